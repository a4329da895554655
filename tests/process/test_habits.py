"""What users of squeue, kubectl and gh type by habit, on real runs of two ranks on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.checkpoints.verify import pin_path
from bigsci_launch.demo.folder import end_run
from bigsci_launch.launch.remove import plan_removal
from bigsci_launch.runs.layout import RunDir, find_runs
from tests.support.waiting import wait_until

ARGUMENTS = "import os, sys; print(sys.argv[1:], os.environ['DEPTH'], flush=True)"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


class Shell:
    """Types `bsl` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, stdin: str = "", code: int = 0) -> str:
        command = [sys.executable, "-m", "bigsci_launch", *words]
        done = subprocess.run(command, cwd=self.folder, input=stdin, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)


def run_file(name: str, program: str) -> str:
    document = {
        "run": {"name": name, "command": [sys.executable, "-c", program]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "env": {"DEPTH": 5},
    }
    return json.dumps(document)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """`done` has ended, with arguments and a variable of the command line; `busy` runs."""
    shell = Shell(tmp_path_factory.mktemp("habits"))
    shell("submit", "-", "--set", "env.DEPTH=6", "--", "--lr", "3", stdin=run_file("done", ARGUMENTS))
    shell("submit", "-", "--detach", stdin=run_file("busy", SLEEP))
    wait_until(lambda: shell("logs", "busy").count("up") == 2)
    yield shell
    for run in find_runs(shell.folder / "runs"):
        end_run(run)


def test_arguments_and_variables_of_the_command_line_reach_the_program(shell: Shell) -> None:
    lines = [json.loads(line) for line in shell("logs", "done", "--json").splitlines()]
    assert {(line["rank"], line["text"]) for line in lines} == {(rank, "['--lr', '3'] 6") for rank in range(2)}
    assert all(line["schema_version"] == 1 and line["time"].endswith("Z") for line in lines)


@pytest.mark.parametrize("command", ["null", "[bash, -c, 'echo hi']"])
def test_arguments_without_a_program_that_takes_them_are_refused(shell: Shell, command: str) -> None:
    words = ("submit", "-", "--set", f"run.command={command}", "--dry-run", "--", "--lr")
    assert "run.command: is" in shell(*words, stdin=run_file("refused", ARGUMENTS), code=2)


def test_runs_are_listed_by_state_and_number(shell: Shell) -> None:
    def names(*words: str) -> list[str]:
        return [run["name"] for run in shell.json("list", *words)["runs"]]

    assert sorted(names()) == ["busy", "done"]
    assert names("--state", "running") == ["busy"]
    assert names("--state", "COMPLETED", "--state", "failed") == ["done"]
    assert names("-n", "1") == names()[:1]
    assert "'ODD'" in shell("list", "--state", "odd", code=2)


def test_several_runs_have_one_document(shell: Shell) -> None:
    both = shell.json("status", "done", "busy")
    assert [each["run"]["name"] for each in both["runs"]] == ["done", "busy"]
    assert both["runs"][0].keys() == shell.json("status", "done").keys()


def test_a_state_is_watched_until_the_run_has_ended(shell: Shell) -> None:
    assert shell("status", "done", "--watch").count("COMPLETED") == 1


@pytest.mark.parametrize(
    ("words", "count"),
    [(("--since", "1h"), 2), (("--since", "0s"), 0), (("-n", "1"), 1), (("--since", "2020-01-01"), 2)],
)
def test_recent_lines(shell: Shell, words: tuple[str, ...], count: int) -> None:
    assert len(shell("logs", "done", *words).splitlines()) == count


def test_what_runs_is_not_deleted_and_one_error_keeps_no_other_run_from_being_cancelled(shell: Shell) -> None:
    assert "'absent'" in shell("cancel", "busy", "absent", code=2)
    assert shell.json("list", "--state", "running")["runs"]
    assert "has not ended" in shell("rm", "busy", "--yes", code=2)
    assert "has ended" in shell("cancel", "done", "busy", code=2)
    wait_until(lambda: not shell.json("list", "--state", "running")["runs"])


def test_a_folder_of_another_program_is_kept(shell: Shell) -> None:
    folder = shell.folder / "of-another"
    folder.mkdir()
    (folder / "run.json").write_text('{"name": "of-another", "schema_version": 1}')
    assert "not the record of a run" in shell("rm", str(folder), "--yes", code=2)
    assert folder.exists()


def test_a_run_is_deleted_with_all_it_has_but_never_a_pinned_checkpoint(shell: Shell) -> None:
    shell("submit", "-", stdin=run_file("old", "pass"))
    run = shell.run("old")
    pinned = run.checkpoints / "global_step20"
    pinned.mkdir(parents=True)
    pin_path(pinned).touch()
    elsewhere = shell.folder / "elsewhere"
    elsewhere.mkdir()
    run.dumps.symlink_to(elsewhere)
    assert "step 20" in shell("rm", "old", "--yes", code=2)
    pin_path(pinned).unlink()
    assert "--yes" in shell("rm", "old", code=2)
    (run.path / "ckpt").mkdir()
    (run.path / "ckpt" / "ckpt.pt").write_bytes(b"0" * 3000)
    assert plan_removal(run).others == ("ckpt/ (2.9 KiB)",)
    shell("rm", "old", "--dry-run")
    assert run.record.exists()
    shell("rm", "old", "-y")
    assert not run.path.exists() and elsewhere.exists()
    assert {path.name for path in run.path.parent.iterdir()} <= {"done", "busy", "nodes.json"}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("status d", ["done"]),
        ("cancel done b", ["busy"]),
        ("submit x.yaml --set training.st", ["training.steps", "training.stop_after_steps"]),
        ("plan predict rows.csv --site jean", ["jean-zay-a100", "jean-zay-a100-2022", "jean-zay-h100"]),
    ],
)
def test_tab_completes(shell: Shell, words: str, completed: list[str]) -> None:
    line = f"bsl {words}"
    variables = {"_BSL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).with_name("bsl")],
        cwd=shell.folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert [line.removeprefix("plain,") for line in done.stdout.splitlines()] == completed


def test_words_of_other_tools(shell: Shell) -> None:
    assert "`bsl list`" in shell("ps", code=2) and "`bsl cancel`" in shell("scancel", "7", code=2)
    assert shell("help", "checkpoint", "prune").startswith("Usage: bsl checkpoint prune ")
    assert shell("help") == shell("--help")
    assert shell("-V") == shell("--version")
