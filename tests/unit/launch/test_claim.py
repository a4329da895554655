"""Of several first submissions of one run, exactly one is accepted, and `run.json` is its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.errors import RunDirError
from bigsci_launch.launch.claim import new_attempt, require_same_run
from bigsci_launch.launch.job.request import JobRequest
from bigsci_launch.launch.prepare import plan_submission

from ..other_users import MALLORY

RunFile = Callable[..., Path]
PROCESSES, ROUNDS = 5, 10
REFUSED, FAILED = "refused", "failed"


@contextmanager
def claimed(loaded: Any, request: JobRequest) -> Iterator[str]:
    """Yield the ID of the run that this process has just made."""
    with new_attempt(request, loaded.config):
        yield json.loads(request.run.record.read_text())["run_id"]


def planned(path: Path) -> tuple[Any, JobRequest]:
    loaded = load_run(path)
    return loaded, plan_submission(loaded, working_directory=Path.cwd(), python=sys.executable, local=True)


def claim(path: Path, gate: Any, answer: Any, *, fails: bool) -> None:
    """Claim a run when all are ready, and say what became of it."""
    loaded, request = planned(path)
    gate.wait()
    try:
        with claimed(loaded, request) as run_id:
            if fails:
                raise OSError("no room")
        answer.send(run_id)
    except FileExistsError as error:
        answer.send(REFUSED if error.filename == str(request.attempt.path) else repr(error))
    except OSError:
        answer.send(FAILED)


def at_once(path: Path, *, failing: int = 0) -> list[str]:
    fork = multiprocessing.get_context("fork")
    gate, pipes = fork.Barrier(PROCESSES), [fork.Pipe(duplex=False) for _ in range(PROCESSES)]
    processes = [
        fork.Process(target=claim, args=(path, gate, pipe[1]), kwargs={"fails": index < failing})
        for index, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found = [receiving.recv() for receiving, _ in pipes]
    for process in processes:
        process.join()
    return found


@pytest.mark.slow
def test_one_of_five_first_submissions_is_accepted(run_file: RunFile) -> None:
    for index in range(ROUNDS):
        found = at_once(run_file(run={"name": f"trial-{index}", "command": ["true"]}))
        run = Path("runs") / f"trial-{index}"
        [accepted] = [answer for answer in found if answer != REFUSED]
        assert json.loads((run / "run.json").read_text())["run_id"] == accepted
        assert sorted(path.name for path in run.iterdir()) == ["attempts", "control", "run.json"]
        assert [path.name for path in (run / "attempts").iterdir()] == ["0001"]


@pytest.mark.slow
def test_submissions_that_fail_take_back_only_what_is_theirs(run_file: RunFile) -> None:
    for index in range(ROUNDS):
        found = at_once(run_file(run={"name": f"trial-{index}", "command": ["true"]}), failing=3)
        run = Path("runs") / f"trial-{index}"
        accepted = [answer for answer in found if answer not in (REFUSED, FAILED)]
        assert len(accepted) <= 1, found
        if not accepted:
            assert not run.exists()
            continue
        assert json.loads((run / "run.json").read_text())["run_id"] == accepted[0]
        assert sorted(path.name for path in run.iterdir()) == ["attempts", "control", "run.json"]


def test_the_run_stays_if_another_attempt_was_made(run_file: RunFile) -> None:
    loaded, request = planned(run_file())
    with pytest.raises(OSError, match="no room"), claimed(loaded, request) as run_id:
        (request.run.attempts_folder / "0002").mkdir()
        raise OSError("no room")
    assert json.loads(request.run.record.read_text())["run_id"] == run_id
    assert [path.name for path in request.run.attempts_folder.iterdir()] == ["0002"]


def test_the_run_of_another_process_stays(run_file: RunFile) -> None:
    loaded, request = planned(run_file())
    with pytest.raises(OSError, match="no room"), claimed(loaded, request):
        request.run.record.write_text('{"run_id": "of another"}')
        raise OSError("no room")
    assert json.loads(request.run.record.read_text())["run_id"] == "of another"


def test_a_link_does_not_make_a_new_run_the_next_attempt_of_another(run_file: RunFile) -> None:
    loaded, request = planned(run_file(run={"name": "old", "command": ["true"]}))
    with claimed(loaded, request):
        pass
    link = Path("runs") / "new"
    link.symlink_to("old")
    loaded, request = planned(run_file(run={"name": "new", "command": ["true"]}))
    assert request.run.name == "old"
    with pytest.raises(RunDirError, match=r"'old'.*new"):
        require_same_run(request.run, loaded.config, request.topology)
    request.run.record.unlink()
    (request.run.attempts_folder / "0001").rmdir()
    require_same_run(request.run, loaded.config, request.topology)
    if os.geteuid() == 0:
        os.lchown(link, MALLORY, MALLORY)
        with pytest.raises(RunDirError, match=f"runs/new .*{MALLORY}"):
            require_same_run(request.run, loaded.config, request.topology)


def test_a_run_that_is_being_made_is_no_foreign_folder(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, request = planned(run_file())
    seen: list[list[str]] = []

    def look(_handle: int) -> None:
        seen.append([path.name for path in request.run.path.iterdir()])
        require_same_run(request.run, loaded.config, request.topology)

    monkeypatch.setattr(os, "fsync", look)
    with pytest.raises(OSError, match="no room"), claimed(loaded, request):
        raise OSError("no room")
    assert seen and not request.run.path.exists(), "it was looked at while run.json was being written"
    request.attempt.path.mkdir(parents=True)
    require_same_run(request.run, loaded.config, request.topology)
    request.attempt.job.write_text("{}")
    with pytest.raises(RunDirError, match=str(request.run.path)):
        require_same_run(request.run, loaded.config, request.topology)
