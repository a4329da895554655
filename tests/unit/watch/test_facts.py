"""What stands against a run at one moment, from its records and from what Slurm says."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.checkpoints.folder import CheckpointRecord, write_record
from bigsci_launch.config.load import load_resolved
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.scheduler.job import JobInfo, JobState, NodeInfo
from bigsci_launch.scheduler.reservations import Maintenance, parse_reservation
from bigsci_launch.watch.facts import standing as facts
from bigsci_launch.watch.facts.job import JobView
from bigsci_launch.watch.facts.standing import Tempo
from tests.support.texts import has_parts

CONFIGS = Path(__file__).parents[3] / "configs"
RESERVATION = (
    "ReservationName=maint-7 StartTime=2026-11-25T20:00:00 EndTime=2026-11-25T22:00:00 Duration=02:00:00 "
    "Nodes=n[0-1] NodeCnt=2 CoreCnt=8 Features=(null) PartitionName=(null) Flags={flags} TRES=cpu=8 "
    "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE"
)


def running(**more: object) -> JobView:
    job = JobInfo("7", JobState.RUNNING, "RUNNING", "squeue", hostlist="n[0-1]", num_nodes=2)
    fields = {name: more.pop(name) for name in list(more) if name in ("ends",)}
    return JobView(job=_with(job, **fields), seen=0.0, **more)  # type: ignore[arg-type]


def _with(job: JobInfo, **fields: object) -> JobInfo:
    return replace(job, **fields)  # type: ignore[arg-type]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    found = RunDir(tmp_path / "run").attempt("0001")
    found.make()
    return found


def end(attempt: AttemptDir, rank: int, *, ago_s: float, code: int | None = None, name: str | None = None) -> None:
    record = {"rank": rank, "node": "n1", "code": code, "signal": name, "time": time.time() - ago_s}
    write_json(attempt.exit_file(rank), record)


def test_ranks_that_ended_long_ago_in_a_running_job_are_a_finding_and_the_first_failure_is_named(
    attempt: AttemptDir,
) -> None:
    end(attempt, 3, ago_s=400, name="SIGKILL")
    end(attempt, 2, ago_s=300, code=1)
    (found,) = facts.dead_ranks(attempt, running())
    assert found.kind == "dead"
    assert has_parts(found.sentence, "ranks 2-3", "rank 3 on n1", "SIGKILL")


@pytest.mark.parametrize("case", ["just now", "told to end, and still there", "the job is over", "nobody has ended"])
def test_ranks_that_are_being_ended_are_none(attempt: AttemptDir, case: str) -> None:
    view = running()
    if case == "just now":
        end(attempt, 3, ago_s=400, name="SIGKILL")
        end(attempt, 2, ago_s=10, code=1)
    elif case == "told to end, and still there":
        end(attempt, 3, ago_s=400)
    elif case == "the job is over":
        end(attempt, 3, ago_s=400, name="SIGKILL")
        view = JobView(JobInfo("7", JobState.FAILED, "FAILED", "squeue"))
    assert not list(facts.dead_ranks(attempt, view))


def test_a_disk_without_room_for_another_checkpoint_is_found_before_the_save(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    saved = run.checkpoints / "global_step10"
    saved.mkdir(parents=True)
    (run.checkpoints / "latest").write_text("global_step10\n")
    with (saved / "weights").open("wb") as stream:
        stream.truncate(1000)
    assert not list(facts.full_disk(run))
    disk = os.statvfs(tmp_path)
    with (saved / "weights").open("wb") as stream:
        stream.truncate(disk.f_bavail * disk.f_frsize + (1 << 40))  # sparse: it takes no room itself
    (found,) = facts.full_disk(run)
    assert "a checkpoint takes" in found.sentence


def test_a_maintenance_before_the_next_save_is_found_and_a_later_one_is_not() -> None:
    slow = Tempo(step=45, step_s=100.0, save_s=40.0, save_interval=50)
    assert slow.next_save_s == 540.0
    soon = Maintenance("maint-7", time.time() + 300, None, frozenset({"n0"}))
    (found,) = facts.near_limits(None, running(maintenance=(soon,)), slow)
    assert "maintenance maint-7 begins in" in found.sentence
    assert not list(facts.near_limits(None, running(maintenance=(soon,)), Tempo(49, 100.0, 40.0, 50)))
    (unknown,) = facts.near_limits(None, running(maintenance=(soon,)), Tempo())
    assert has_parts(unknown.sentence, "maint-7", "unknown")
    later = Maintenance("maint-8", time.time() + 9000, None, frozenset({"n0"}))
    assert not list(facts.near_limits(None, running(maintenance=(later,)), Tempo()))


@pytest.mark.parametrize(("flags", "is_one"), [("MAINT,IGNORE_JOBS,SPEC_NODES", True), ("SPEC_NODES", False)])
def test_only_a_reservation_for_maintenance_counts(flags: str, is_one: bool) -> None:
    found = parse_reservation(RESERVATION.format(flags=flags))
    assert (found is not None) == is_one
    if found is not None:
        assert (found.name, found.nodes) == ("maint-7", frozenset({"n0", "n1"}))
        assert found.ends is not None
        assert found.ends - found.begins == 7200


def test_a_limit_that_comes_before_the_next_save_is_found(attempt: AttemptDir) -> None:
    slow = Tempo(step=45, step_s=100.0, save_s=40.0, save_interval=50)
    (found,) = facts.near_limits(None, running(ends=time.time() + 300), slow)
    assert found.kind == "time_limit"
    assert not list(facts.near_limits(None, running(ends=time.time() + 900), slow))
    # Ranks that are told in time save by themselves, unless a step and a save take longer than they have.
    attempt.script.write_text("#!/bin/bash\n#SBATCH --signal=B:USR2@120\n")
    (cut_off,) = facts.near_limits(attempt, running(ends=time.time() + 9000), slow)
    assert "140 s" in cut_off.sentence
    quick = Tempo(step=45, step_s=10.0, save_s=40.0, save_interval=50)
    assert not list(facts.near_limits(attempt, running(ends=time.time() + 300), quick))


def test_refused_saves_are_a_finding_until_one_works(attempt: AttemptDir) -> None:
    refused = {
        **{"kind": "save_refused", "time": time.time(), "step": 60, "refused_since": 50, "newest": 40, "retry_s": 30.0},
        **{"text": "p: No space left on device (ENOSPC)", "path": "p", "errno": "ENOSPC", "hint": "make room there"},
        **{"ranks": [2], "node": "n1"},
    }
    events = attempt.event_file(0)
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text(json.dumps(refused) + "\n")
    (found,) = facts.refused_saves(attempt, running())
    assert (found.kind, found.key, found.step) == ("save", "save:0001:50", 60)
    assert found.details == ("p", "make room there") and "rank 2 on n1" in found.sentence
    with events.open("a") as stream:
        stream.write(json.dumps({"kind": "save", "step": 63, "refused_since": 50}) + "\n")
    assert not list(facts.refused_saves(attempt, running()))


def test_a_node_that_may_be_alive_is_not_called_lost(attempt: AttemptDir) -> None:
    down, silent = NodeInfo("n1", "down*", "Not responding"), NodeInfo("n0", "idle*", "")
    lost, unknown = facts.lost_nodes(attempt, running(silent_nodes=(down, silent)))
    assert ["n1" in each.sentence for each in lost] == [True]
    assert ["n0" in each for each in unknown] == [True]


@pytest.mark.parametrize(("step", "is_told"), [(990_000, False), (999_990, True), (1_000_100, False)])
def test_the_end_of_a_long_epoch_is_told_an_hour_before_and_no_longer(tmp_path: Path, step: int, is_told: bool) -> None:
    config = load_resolved(CONFIGS / "demo.yaml")
    size, length = config.training.global_batch_size, config.model.sequence_length
    run = RunDir(tmp_path / "run")
    saved = run.checkpoints / "global_step900000"
    saved.mkdir(parents=True)
    (run.checkpoints / "latest").write_text("global_step900000\n")
    record = CheckpointRecord(
        900_000, 900_000 * size, {}, "bf16", {}, {}, data={"num_tokens": 10**6 * size * length + 1}
    )
    write_record(saved, record)
    found = list(facts.epoch_end(run, config, Tempo(step=step, step_s=100.0)))
    assert [("samples repeat" in each.sentence) for each in found] == [True] * is_told
    assert not list(facts.epoch_end(run, config, Tempo(step=step, step_s=0.01))), "a short epoch ends often"
