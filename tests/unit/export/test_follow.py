"""Trackers: three attempts are one run, without a gap, with no step twice, also after the follower was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bigsci_launch.config.schema.monitor import TRACKER_PACKAGES
from bigsci_launch.errors import BslError, ConfigError
from bigsci_launch.export.follow import TrackerFollower
from bigsci_launch.export.trackers.seam import TrackedNote, TrackedRun, TrackedStep, Tracker, open_tracker
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.ledger import raise_finding

from .conftest import FINDING, write_steps

ALL_STEPS = list(range(1, 13))


def tensorboard_steps(run: RunDir) -> list[int]:
    found = EventAccumulator(str(run.tracker_files("tensorboard")))
    found.Reload()
    return sorted(event.step for event in found.Scalars("loss"))  # files of one second are read in any order


def trackio_steps(run: RunDir) -> list[int]:
    from trackio.sqlite_storage import SQLiteStorage

    assert len(SQLiteStorage.get_run_records("bsl")) == 1
    return [each["step"] for each in SQLiteStorage.get_logs("bsl", f"{run.name}-abc123")]


STEPS_OF: dict[str, Callable[[RunDir], list[int]]] = {"tensorboard": tensorboard_steps, "trackio": trackio_steps}


def follow(run: RunDir, name: str) -> int:
    follower = TrackerFollower(run, name)
    try:
        return follower.catch_up()
    finally:
        follower.close()


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEPS_OF)
def test_three_attempts_are_one_run(run: RunDir, name: str) -> None:
    """Each attempt has a follower of its own, as job scripts start them."""
    raise_finding(run, FINDING)
    later = [run.attempt(each).path.rename(run.path / each) for each in ("0002", "0003")]
    for number in range(3):
        follow(run, name)
        for each in later[number : number + 1]:
            each.rename(run.attempts_folder / each.name)
    assert STEPS_OF[name](run) == ALL_STEPS
    notes = json.loads(run.tracker_cursor(name).read_text())["notes"]
    assert len(notes) == 4 and follow(run, name) == 0


@pytest.mark.filterwarnings("ignore")
def test_findings_and_beginnings_are_notes_at_their_steps(run: RunDir) -> None:
    raise_finding(run, FINDING)
    follow(run, "tensorboard")
    found = EventAccumulator(str(run.tracker_files("tensorboard")))
    found.Reload()
    notes = [(each.step, each.tensor_proto.string_val[0].decode()) for each in found.Tensors("notes")]
    assert [step for step, _ in notes] == [0, 6, 10, 9]
    assert FINDING.sentence in notes[-1][1]


PROGRAM = """
import os, signal, sys
from pathlib import Path
from bigsci_launch.export import follow
from bigsci_launch.runs.layout import RunDir
follow.MOST_AT_ONCE = 2
follower = follow.TrackerFollower(RunDir(Path(sys.argv[1])), sys.argv[3])
write, left = follower._write_cursor, int(sys.argv[2])
def killed() -> None:
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write()
follower._write_cursor = killed
follower.catch_up()
"""


def kill_follower(run: RunDir, name: str, times: int) -> None:
    """Start a follower that is killed when it has written its cursor `times` times, and would write it again."""
    argv = [sys.executable, "-c", PROGRAM, str(run.path), str(times), name]
    assert subprocess.run(argv, timeout=300, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_follower_that_is_killed_before_it_writes_the_cursor_repeats_no_step(run: RunDir) -> None:
    for times in (1, 3, 0):
        kill_follower(run, "tensorboard", times)
    newest = max(run.tracker_files("tensorboard").glob("events*"), key=os.path.getmtime)
    with newest.open("ab") as stream:
        stream.write(newest.read_bytes()[:20])  # a record that was being written
    follow(run, "tensorboard")
    assert tensorboard_steps(run) == ALL_STEPS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_alert_of_trackio_is_lost_or_there_twice_if_followers_are_killed(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    raise_finding(run, FINDING)
    kill_follower(run, "trackio", times=3)  # the first alert is stored, and not noted
    kill_follower(run, "trackio", times=6)  # the third one was noted a moment before
    follow(run, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    alerts = [each["title"] for each in SQLiteStorage.get_alerts("bsl", f"{run.name}-abc123")]
    assert sorted(alerts) == ["attempt 0001", "attempt 0002", "attempt 0003", "slower"]
    assert sorted(trackio_steps(run)) == ALL_STEPS


class Noted:
    """A tracker that cannot tell what it has."""

    steps: list[TrackedStep]

    def __init__(self, run: TrackedRun) -> None:
        self.settings = run.settings

    def newest_step(self) -> None:
        return None

    def log(self, steps: list[TrackedStep]) -> None:
        Noted.steps += steps

    def annotate(self, note: TrackedNote) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An entry point of another package, under the name `noted`."""

    class Entry:
        name = "noted"

        def load(self) -> Callable[[TrackedRun], Tracker]:
            return Noted

    def found(group: str, name: str = "noted") -> list[Entry]:
        return [Entry()] if (group, name) == ("bigsci_launch.trackers", "noted") else []

    monkeypatch.setattr("bigsci_launch.export.trackers.seam.entry_points", found)
    Noted.steps = []
    return Noted


def test_an_entry_point_is_a_tracker_and_the_cursor_knows_what_it_has(run: RunDir, noted: Any) -> None:
    follow(run, "noted")
    write_steps(run, 4, range(10, 15))
    follower = TrackerFollower(run, "noted")
    assert follower.catch_up() == 2
    assert [each.step for each in Noted.steps] == list(range(1, 15))
    assert Noted.steps[0].values == {"loss": 1.01, "grad_norm": 0.5, "seconds_per_step": 1.0, "tflops_per_rank": 40.0,
                                     "tokens_per_second": 1024.0}  # fmt: skip


def test_a_tracker_learns_no_values_of_the_environment(run: RunDir, noted: Any) -> None:
    tracker = TrackerFollower(run, "noted")._tracker
    assert isinstance(tracker, Noted)
    assert set(tracker.settings) == {"parallelism", "model", "training", "optimizer"}


def test_a_missing_package_and_an_unknown_name_are_one_clear_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = TrackedRun("r", "i", run.path)
    monkeypatch.setattr("bigsci_launch.export.trackers.seam.find_spec", lambda name: None)
    for name in TRACKER_PACKAGES:
        with pytest.raises(BslError) as error:
            open_tracker(name, about)
        assert name in error.value.message and sys.executable in str(error.value.hint)
    with pytest.raises(ConfigError) as wrong:
        open_tracker("neptune", about)
    assert "neptune" in wrong.value.message and "tensorboard" in str(wrong.value.hint)
