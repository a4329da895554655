"""What the suite needs of its surroundings."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def test_an_interrupt_reaches_what_tests_start() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


@pytest.mark.slow
def test_it_does_so_in_a_job_of_a_shell_too() -> None:
    """A shell starts `pytest &` with SIGINT ignored, as nohup does."""
    test = f"{__file__}::{test_an_interrupt_reaches_what_tests_start.__name__}"
    argv = ["env", "--ignore-signal=INT", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_one_process_runs_a_file() -> None:
    """Fixtures of a module cost minutes. With a plugin that does not group, each process makes its own."""
    files = ["tests/unit/test_units.py", "tests/unit/test_step_lines.py"]
    argv = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--no-loadscope-reorder", "-p", "no:cacheprovider", *files]
    done = subprocess.run(argv, cwd=TESTS.parent, capture_output=True, text=True, timeout=300, check=False)
    ran = set(re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, flags=re.MULTILINE))
    assert sorted(file for _, file in ran) == sorted(files), done.stdout


def test_every_golden_text_has_its_test() -> None:
    """`check_text` writes them under the name of the test. One that was moved or renamed leaves its text behind."""
    texts = {path: path.read_text() for path in (TESTS / "golden").rglob("*.txt")}
    for path, text in texts.items():
        module = TESTS / path.relative_to(TESTS / "golden").with_name(f"test_{path.stem}.py")
        for name in re.findall(r"^=== (\w+).*", text, flags=re.MULTILINE):
            assert f"def {name}(" in module.read_text(), f"{path}: {name}"
