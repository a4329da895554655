"""Hostile input at the terminal gives one clear error for each problem and the right exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import LONGEST_LINE, error_text
from bigsci_launch.cli.main import bsl
from bigsci_launch.demo.screen import last_screen
from bigsci_launch.demo.story import DemoResult
from bigsci_launch.errors import BslError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LONG = "a" * 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the shipped run files and with many broken files."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    files = {
        "keys.yaml": "extends: configs/minicluster.yaml\nslurm:\n  time_limit: 72000\nparallelism:\n"
        "  tensor_paralel_size: 4\nmodle: {}\n",
        "twice.yaml": "run:\n  name: a\n  seed: 1\n  name: b\n",
        "circle.yaml": "extends: circle.yaml\n",
        "aliases.yaml": "a: &a [x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "no-partition.yaml": "extends: configs/minicluster.yaml\nslurm: {site: crowded}\n",
        "sites/crowded.yaml": "description: two partitions\nscheduler: slurm\nranks_per_node: 2\n"
        "partitions: {big: {}, small: {}}\n",
        "binary.yaml": b"\x00\x01\xff",
        "global_step7/pinned/a-file": "",
        "runs/torn/run.json": "{",
        "runs/torn/attempts/0001/job.json": "{",
        "a-file": "",
        ".demo/corpus/stdlib.bin": "",
        ".demo/corpus/stdlib.idx": "",
        "short.pt": b"PK\x03\x04 and no more",
        "short.safetensors": (1000).to_bytes(8, "little") + b"{",
        "all.safetensors": tensors("first", "second"),
        "one.safetensors": tensors("first"),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "round").symlink_to("round")
    return tmp_path


def tensors(*names: str) -> bytes:
    """A safetensors file with four zeros under each name."""
    header: dict[str, Any] = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * index, 16 * index + 16]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16 * len(names))


Run = Callable[..., Result]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*words)`: `bsl` in the folder, in this process, which has imported it; no error may escape its boundary."""
    monkeypatch.chdir(folder)

    def start(*words: str) -> Result:
        done = CliRunner().invoke(bsl, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done

    return start


CASES = [
    ("config check keys.yaml", 2),
    ("submit keys.yaml --dry-run", 2),
    ("config check twice.yaml", 2),
    ("config check circle.yaml", 2),
    ("config check aliases.yaml", 2),
    ("config check binary.yaml", 2),
    ("submit configs/demo.yaml --set parallelism.partition_method=type:none --dry-run", 2),
    ("config check configs", 2),
    (f"config check {LONG}.yaml", 2),
    ("submit configs/demo.yaml --set slurm.site=moon --dry-run", 2),
    ("submit configs/demo.yaml --set slurm.site=a-file --dry-run", 2),
    ("submit no-partition.yaml --dry-run", 2),
    ("submit configs/minicluster.yaml --set slurm.partition=gpu --dry-run", 2),
    ("submit configs/demo.yaml --local --set run.root=a-file", 2),
    ("status nowhere", 2),
    ("status ./configs", 2),
    ("status ./a-file", 2),
    ("status ./round", 2),
    (f"status {LONG}", 2),
    (f"logs ./{LONG}", 2),
    ("status torn", 2),
    ("logs torn", 2),
    ("cancel torn", 2),
    ("spy ./configs", 2),
    ("spy --pid 999999999", 4),
    ("spy --bundle a-file", 2),
    ("spy --topology tp=x --pid 1", 2),
    ("diff-weights nowhere nowhere", 4),
    ("diff-weights configs configs", 4),
    ("diff-weights --seam nowhere nowhere", 4),
    ("checkpoint pin global_step7 --undo", 1),
    ("plan nowhere.yaml", 2),
    ("plan score a-file", 2),
    ("data prepare nowhere --output x --vocab-size 300", 2),
    ("cluster kill-node n1", 3),
    ("hang-lab run H999", 2),
]
"""What a user types, and the exit code."""
CHANGING = re.compile(r"(?<=error: round: ).*|(?<=JSON document ).*|(?<=known: ).*")
"""Errors of Python in its own words, and the list of sites."""


@pytest.mark.parametrize(("words", "code"), CASES, ids=[words[:60] for words, _ in CASES])
def test_one_clear_error_for_each_problem(
    words: str, code: int, run: Run, monkeypatch: pytest.MonkeyPatch, check_text: Callable[..., None]
) -> None:
    monkeypatch.setenv("BSL_CLUSTER_DIR", "/tmp/no-cluster")
    done = run(*words.split())
    assert done.exit_code == code, done.stderr
    errors = (line for line in done.stderr.splitlines() if line.lower().startswith("error: "))
    check_text(*(CHANGING.sub("...", line) for line in errors))


def test_a_time_limit_is_text_and_not_a_number_in_base_60(run: Run) -> None:
    done = run("submit", "configs/minicluster.yaml", "--set", "slurm.time_limit=20:00:00", "--dry-run")
    assert done.exit_code == 0 and "#SBATCH --time=20:00:00\n" in done.stdout


@pytest.mark.parametrize("name", ["short.safetensors", "short.pt"])
def test_a_truncated_file_is_named_in_the_answer(run: Run, name: str) -> None:
    done = run("diff-weights", name, "all.safetensors")
    assert done.exit_code == 4
    assert done.stdout.count(f"could not read {name}: truncated") == 1


def test_a_tensor_that_is_missing_is_a_difference(run: Run) -> None:
    done = run("diff-weights", "all.safetensors", "one.safetensors")
    assert done.exit_code == 1 and "second" in done.stdout and "missing" in done.stdout


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    bsl = f"{sys.executable} -m bigsci_launch"
    line = f"{bsl} plan configs/bloom-176b.yaml --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ}
    )
    assert done.stdout.splitlines()[0] == "{" and done.stdout.splitlines()[1] in ("0", "141")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_there_is_no_need_for_room_where_no_disk_is_full(run: Run) -> None:
    done = run("submit", "configs/demo.yaml", "--local", "--set", "run.root=a-file")
    assert done.stderr.splitlines()[-1].startswith("hint: ") and "run.root" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("where", "starts"), [(".", "configs/"), ("runs", "/")])
def test_the_commands_after_the_demonstration_name_files_that_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, starts: str
) -> None:
    monkeypatch.chdir(folder / where)
    result = DemoResult("1 token", (2.0, 1.0), 8, "equal", "rank 5", "rank 5", 60.0, ())
    lines = [line.split() for line in last_screen(result, Path(".demo")).splitlines() if "bloom-176b" in line]
    assert [words[:2] for words in lines] == [["bsl", "plan"], ["bsl", "submit"]]
    assert all(words[2].startswith(starts) and Path(words[2]).is_file() for words in lines)


def test_the_commands_after_the_demonstration_can_be_pasted_where_a_path_has_a_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "my clone"
    (home / "bin").mkdir(parents=True)
    (home / "bin/activate").touch()
    monkeypatch.setattr(sys, "executable", str(home / "bin/python"))
    monkeypatch.setenv("PATH", "/nowhere")
    result = DemoResult("1 token", (2.0, 1.0), 8, "equal", "rank 5", "rank 5", 60.0, ())
    after = last_screen(result, home / ".demo").partition("Try next:")[2].splitlines()
    typed = [shlex.split(line) for line in after if line.startswith("  ")]
    assert typed[0] == ["source", str(home / "bin/activate")]
    assert typed[2] == ["bsl", "status", str(home / ".demo/runs/stopped")]


def test_a_conversion_without_torch_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("checkpoint", "convert", "nowhere", "--tp", "1", "-o", "there")
    assert (done.exit_code, "pip install '.[train]'" in done.stderr) == (4, True)


def process(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv, given = [sys.executable, "-m", "bigsci_launch", *words], {**os.environ, **environment}
    return subprocess.run(argv, cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False)


def test_a_process_says_where_an_error_comes_from_only_if_asked(folder: Path) -> None:
    done = process(folder, "status", "nowhere")
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "error: " in done.stderr and "'nowhere'" in done.stderr
    assert "Traceback" in process(folder, "status", "nowhere", BSL_DEBUG="1").stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("list >&-", 0, "no runs under runs"),
        ("config sites >&-", 0, ""),
        ("config sites >&- 2>&- <&-", 0, ""),
        ("--help >/dev/full", 1, "error: no space left on device"),
        ("config sites >/dev/full", 1, "error: no space left on device"),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(tmp_path: Path, line: str, code: int, said: str) -> None:
    words = f"{sys.executable} -m bigsci_launch {line}"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.partition(";")[0].partition("\n")[0]) == (code, said)


LOADED_WITH_CTRL_C = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from bigsci_launch.__main__ import main
main()
"""


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback() -> None:
    argv = [sys.executable, "-c", LOADED_WITH_CTRL_C]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_the_program_starts_where_ctrl_c_is_expected() -> None:
    """The script `bsl` of an installation calls the function that handles it."""
    assert '\nbsl = "bigsci_launch.__main__:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_a_table_whose_reader_went_away_ends_as_other_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary turns it into 141. Rich alone would exit with 1, which means a bad answer."""
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.fdopen(writer, "w")
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr(sys, "stdout", stdout)
        console.answer_table(("tensor",), [("weight",)])
    with suppress(BrokenPipeError):
        stdout.close()


def test_an_error_that_quotes_a_million_characters_is_cut() -> None:
    text = error_text(BslError("x" * 1_000_000, hint="mend it"))
    assert len(text) < LONGEST_LINE + 50 and text.endswith("\nhint: mend it")
