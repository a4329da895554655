"""What the ranks need is looked at before they start: their data, and torch where they run on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import invoke
from tests.support.texts import has_parts

pytestmark = pytest.mark.slow

RunFile = Callable[..., Path]
RUN = Path("runs/trial")


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any]) -> Any:
    fake = fake_slurm("sbatch", "squeue")
    fake.answer("sbatch", "77\n")
    fake.answer("squeue", "")
    return fake


def test_a_dataset_that_is_not_there_is_warned_of_before_anyone_waits(slurm: Any, run_file: RunFile) -> None:
    trained = run_file(run={"name": "trial", "command": None}, data={"prefix": "/on-the-nodes/corpus"})
    done = invoke("submit", str(trained))
    assert done.exit_code == 0
    assert has_parts(done.stderr, "warning: data.prefix: /on-the-nodes/corpus.bin: ", "`bsl data prepare")


def test_a_dataset_that_no_node_can_see_either_is_refused(slurm: Any, run_file: RunFile) -> None:
    Path("corpus.bin").touch()
    trained = str(run_file(run={"name": "trial", "command": None}, data={"prefix": "corpus"}))
    done = invoke("submit", trained)
    assert done.exit_code == 2 and not RUN.exists()
    assert has_parts(done.stderr, "error: ", "data.prefix: corpus.idx: ", "`bsl data prepare", "--force")
    later = ("--set", "slurm.dependency=afterok:7", "--set", "run.name=later")
    assert invoke("submit", trained, *later).exit_code == 0, "another job may make the dataset"
    assert invoke("submit", trained, "--force").exit_code == 0


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_ranks_on_this_machine_do_not_start_without_their_data(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch, force: list[str]
) -> None:
    monkeypatch.delattr("bigsci_launch.launch.start_job.start_launcher")  # if nothing refuses them, they must not start
    trained = run_file(run={"name": "trial", "command": None}, data={"prefix": "/on-the-nodes/corpus"})
    done = invoke("submit", str(trained), "--local", *force)
    assert done.exit_code == 2 and not RUN.exists()
    assert has_parts(done.stderr, "trial.yaml:1:", "data.prefix: /on-the-nodes/corpus.bin: ", "`bsl data prepare")


def test_ranks_on_this_machine_do_not_start_without_torch(run_file: RunFile) -> None:
    for suffix in (".bin", ".idx"):
        Path(f"corpus{suffix}").touch()
    trained = run_file(run={"name": "trial", "command": None}, data={"prefix": "corpus"})
    code = "import sys; sys.modules[sys.argv.pop(1)] = None; from bigsci_launch.cli.main import main; main()"
    for name in ("torch", "deepspeed"):
        done = subprocess.run(
            [sys.executable, "-c", code, name, "submit", trained, "--local"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and not RUN.exists()
        assert has_parts(done.stderr, f"error: {name} is not installed", sys.executable, "pip install '.[train]'")
