"""Every reproduction of the hang lab is what it claims to be, according to /proc and py-spy, not `bsl spy`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import Reproduction, Stand
from bigsci_launch.hang_lab.comparison import compare
from bigsci_launch.hang_lab.judgement import Judgement
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.hang_lab.processes import members
from bigsci_launch.hang_lab.runner import Standing, Trial, reproduce
from bigsci_launch.hang_lab.stand import Job, wait_for_stand
from bigsci_launch.hang_lab.zoo import REPRODUCTIONS
from bigsci_launch.procfs import read_process
from bigsci_launch.runs.layout import RunDir, read_json, write_json
from bigsci_launch.spy.look.ring_copies import read_ring_files
from bigsci_launch.spy.taxonomy import HangClass, State
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch
PY_SPY = str(Path(sys.executable).parent / "py-spy")
NUM_RANKS = 4


@dataclass(frozen=True)
class Look:
    """What the culprit looks like: its state, a function on one of its stacks, the kernel function that it waits in.

    `others` is a function that another rank waits in; all other ranks are asleep.
    """

    state: str
    function: str | None
    others: str | None = "all_reduce"
    wchan: str = ""


IN_COLLECTIVE = "futex"
LOOKS = {
    "H01": Look("S", "clip_grad_norm", "backward_step", IN_COLLECTIVE),
    "H01-world": Look("S", "broadcast", "allreduce_gradients", IN_COLLECTIVE),
    "H01-wrapped": Look("S", "clip_grad_norm", "backward_step", IN_COLLECTIVE),
    "H02": Look("S", "finish_epoch", "forward_step", IN_COLLECTIVE),
    "H03": Look("S", "broadcast", "clip_grad_norm", IN_COLLECTIVE),
    "H03-wrapped": Look("S", "broadcast", "clip_grad_norm", IN_COLLECTIVE),
    "H03-majority": Look("S", "all_reduce", "broadcast", IN_COLLECTIVE),
    "H06": Look("S", "broadcast", None, IN_COLLECTIVE),
    "H07": Look("S", "allreduce_gradients", "backward_step", IN_COLLECTIVE),
    "H08": Look("S", "recv", "recv", IN_COLLECTIVE),
    "H09": Look("S", "send", "recv", IN_COLLECTIVE),
    "H10": Look("S", None, "aggregate_total_loss", IN_COLLECTIVE),
    "H12": Look("S", "forward_step", "all_gather_object", IN_COLLECTIVE),
    "H13": Look("S", "_new_process_group_helper", wchan="poll"),
    "H14": Look("S", "forward_step", "training_log", IN_COLLECTIVE),
    "H15-file": Look("S", "save_checkpoint_and_exit", "forward_step", IN_COLLECTIVE),
    "H15-signal": Look("S", "save_checkpoint_and_exit", "forward_step", IN_COLLECTIVE),
    "H17": Look("S", "read_offloaded_gradient", "allreduce_gradients", IN_COLLECTIVE),
    "H18": Look("S", "read_offloaded_gradient", "optimizer_step", "nanosleep"),
    "H20": Look("S", "clip_grad_norm", "allreduce_embedding_gradients", IN_COLLECTIVE),
    "H22": Look("S", "clip_grad_norm", "backward_step", IN_COLLECTIVE),
    "H30": Look("R", "tokenise"),
    "H31": Look("S", "stall", wchan="nanosleep"),
    "H32": Look("S", "stall", wchan="nanosleep"),
    "H33": Look("S", "stall", wchan="futex"),
    "H34": Look("S", "save_async", wchan="futex"),
    "H35": Look("S", "stall", wchan="do_wait"),
    "H36-lock": Look("S", "_try_get_data", wchan="poll"),
    "H36-stopped": Look("S", "_try_get_data", wchan="poll"),
    "H37": Look("S", "get_batch_from_queue", wchan="futex"),
    "H38": Look("S", "map", wchan="futex"),
    "H39": Look("S", "write_log", wchan="pipe_write"),
    "H40": Look("S", "wait", wchan="nanosleep"),
    "H41": Look("S", "stall", wchan="locks_lock_inode_wait"),
    "H42": Look("S", "interaction", wchan="pipe_read"),
    "H43": Look("S", "upload_metrics", wchan="wait_woken"),
    "H44": Look("S", "stall", wchan="poll"),
    "H45": Look("S", "download_tokenizer", "init_process_group", "nanosleep"),
    "H46": Look("S", "_create_c10d_store", "init_process_group"),
    "H47-atexit": Look("S", "synchronize", wchan=IN_COLLECTIVE),
    "H47-finally": Look("S", "synchronize", wchan=IN_COLLECTIVE),
    "H48": Look("S", "_shutdown", wchan="futex"),
    "H49": Look("S", "save_on_signal", wchan="futex"),
    "H50": Look("S", "run_ninja_build", wchan="do_wait"),
    "H51": Look("RD", "build_mapping", "barrier"),
    "H52": Look("S", "__del__", wchan=IN_COLLECTIVE),
    "H55": Look("T", "stall", wchan="do_signal_stop"),
    "H55-traced": Look("t", "stall", wchan="ptrace_stop"),
    "H55-H30": Look("T", "get_batch", wchan="do_signal_stop"),
    "H56": Look("SR", "wait_for_license"),
    "H60": Look("D", "read_shard"),
    "H61": Look("D", "write_checkpoint", wchan="percpu_rwsem_wait"),
    "H62": Look("D", None),
    "H63": Look("D", "__getitem__"),
    "H64": Look("SRD", "write_shard", "barrier"),
    "H65": Look("S", "save_checkpoint", wchan=IN_COLLECTIVE),
    "H66": Look("D", None),
    "H67": Look("S", "open_device", wchan="request_wait_answer"),
    "H68": Look("D", "open_device", wchan="fuse|request_wait_answer"),
    "H70-unseen": Look("gone", None, "wait_for_tag"),
    "H72-exited": Look("gone", None, "wait_for_tag"),
    "H72-zombie": Look("Z", None, "wait_for_tag"),
    "H75": Look("S", "stall", wchan="nanosleep"),
    "H76": Look("T", "get_batch", "read_from_store", "do_signal_stop"),
    "H77": Look("S", "save_checkpoint_and_exit", "forward_step", IN_COLLECTIVE),
    "H80": Look("S", "all_reduce", "all_reduce", IN_COLLECTIVE),
    "H81": Look("S", "reduce_world", "reduce_world", IN_COLLECTIVE),
    "H91": Look("S", "synchronize", wchan="pause"),
    "H102": Look("SRD", "write_shard", "barrier"),
    "H103": Look("R", "compile_fx", "compile_fx"),
    "H104": Look("R", "evaluate", "barrier"),
    "H105-teardown": Look("S", "upload_logs", None, "nanosleep"),
    "H105-leaving": Look("S", "pretrain", None, "nanosleep"),
}
# Some reproductions show more than that.
CODES = {"H00-finished": {"0"}, "H04": {"1", "SIGABRT"}, "H70": {"1", "SIGKILL"}, "H71": {"1", "SIGSEGV"}}


def child_in(state: str, pid: int) -> None:
    """H36: the rank itself only polls; its child is stopped or waits for a lock."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert kernel_state(int(child))[0] == state
    assert "read_sample" in functions_of(int(child))


def map_is_locked(pid: int) -> None:
    """H62: reading /proc/PID/cmdline blocks, reading the four safe files does not."""
    with subprocess.Popen(["cat", f"/proc/{pid}/cmdline"], stdout=subprocess.DEVNULL) as cat:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                cat.wait(1.0)
        finally:
            cat.kill()
    assert kernel_state(pid)[0] == "D"


def core_is_dumped(pid: int) -> None:
    assert "CoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()


def kill_is_pending(pid: int) -> None:
    """H61: SIGKILL was sent, and the process still exists."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    assert any(signals >> 8 & 1 for signals in pending)


MORE_TO_SEE: dict[str, Callable[[int], None]] = {
    "H36-lock": partial(child_in, "S"),
    "H36-stopped": partial(child_in, "T"),
    "H61": kill_is_pending,
    "H62": map_is_locked,
    "H66": core_is_dumped,
}
"""What else the culprit of a reproduction shows."""


def culprit_of(reproduction: Reproduction) -> int:
    """Return the culprit: another place for each class, so that all places are tested."""
    place = REPRODUCTIONS.index(reproduction) % NUM_RANKS
    return {"any": place, "not rank 0": place or 1}.get(reproduction.culprits, 0)


def cases() -> Iterator[Any]:
    """Yield all reproductions. The first of a kind is of this tier: one way to wait in the kernel, or more to see."""
    seen = set()
    for one in REPRODUCTIONS:
        look = LOOKS.get(one.name)
        kind = (one.stand, one.stage, look and (look.state, look.wchan), MORE_TO_SEE.get(one.name))
        yield pytest.param(one, id=one.name, marks=[pytest.mark.long] if kind in seen else [])
        seen.add(kind)


@pytest.mark.parametrize("reproduction", list(cases()))
def test_a_reproduction_is_what_it_says(
    reproduction: Reproduction, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := missing_need(reproduction):
        pytest.skip(f"{reproduction.name} {reason}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    trial = Trial(reproduction, NUM_RANKS, culprit_of(reproduction))
    with reproduce(trial, nursery=nursery) as standing:
        sessions = {process.session for pid in standing.pids.values() if (process := read_process(pid))}
        if reproduction.stand is Stand.MOVING:
            require_steps(standing)
        elif reproduction.stand is Stand.ALL_ENDED:
            require_ended(standing)
        else:
            require_look(standing, LOOKS[reproduction.name])
        if more := MORE_TO_SEE.get(reproduction.name):
            more(standing.pids[standing.job.culprit])
    assert not members(sessions), "processes were left"
    assert not list(tmp_path.iterdir()), "files were left"
    assert str(tmp_path) not in Path("/proc/mounts").read_text(), "a mount was left"


def require_steps(standing: Standing) -> None:
    """Check that every rank makes progress and none ends."""
    before = standing.job.steps()
    wait_until(lambda: all(now > before[rank] for rank, now in standing.job.steps().items()))
    assert not standing.job.ended()


def require_ended(standing: Standing) -> None:
    """Check that every rank ended as expected; in a crash, gloo may keep some waiting."""
    ends = [read_json(standing.job.attempt.exit_file(rank)) for rank in standing.job.ended()]
    seen = {record["signal"] or str(record["code"]) for record in ends}
    expected = CODES.get(standing.reproduction.name)
    if len(ends) < NUM_RANKS:
        assert standing.reproduction.states == (State.CRASHED,)
    if expected:
        assert seen == expected if len(ends) == NUM_RANKS else seen <= expected
    else:
        assert seen != {"0"}


def require_look(standing: Standing, look: Look) -> None:
    """Check that the culprit looks as described and the others wait for it."""
    culprit, pids = standing.job.culprit, standing.pids
    state, wchan = kernel_state(pids[culprit])
    assert state in look.state or state == look.state, (state, wchan)
    assert re.search(look.wchan, wchan), wchan
    if look.function:
        require_function(pids[culprit], look.function)
    if look.others:
        stacks = {rank: functions_of(pid) for rank, pid in pids.items() if rank != culprit}
        assert any(look.others in stack for stack in stacks.values()), stacks


def kernel_state(pid: int) -> tuple[str, str]:
    process = read_process(pid)
    if process is None:
        return "gone", ""
    try:
        return process.state, Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return process.state, ""


def require_function(pid: int, name: str) -> None:
    """Check that `name` is on a stack. If the process moves, reading without a pause may catch only part of a stack."""
    wait_until(lambda: name in functions_of(pid), evidence=lambda: functions_of(pid))


def functions_of(pid: int) -> set[str]:
    """Return the names of the functions on all stacks of a process, without their classes."""
    for _ in range(3):  # a moving process is occasionally misread
        argv = [PY_SPY, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            threads = json.loads(done.stdout)
            return {frame["name"].rpartition(".")[2] for thread in threads for frame in thread["frames"]}
    return set()


def named(name: str) -> Reproduction:
    return next(one for one in REPRODUCTIONS if one.name == name)


def test_a_forked_rank_keeps_the_ring_of_a_new_one_and_bsl_spy_names_the_culprit_from_it(nursery: Nursery) -> None:
    trial = Trial(named("H01-world"), 2, 1, {"BSL_LAB_RECORDER": "0"}, keeps_rings=True)
    with reproduce(trial, nursery=nursery) as standing:
        forked = [calls_in_ring(standing, rank) for rank in range(2)]
        assert compare(standing).judgement is Judgement.RIGHT
    with reproduce(trial) as standing:
        assert [calls_in_ring(standing, rank) for rank in range(2)] == forked
    assert {call[5] for calls in forked for call in calls if call[1] == "broadcast"} == {0}  # the root
    operations = [[call[1] for call in calls] for calls in forked]
    assert operations[0][-2:] == ["broadcast", "all_reduce"] and operations[1][-2:] == ["broadcast", "broadcast"]


def calls_in_ring(standing: Standing, rank: int) -> list[list[Any]]:
    """Return the calls in the ring of a rank, without their times."""
    record = read_json(standing.job.attempt.pid_file(rank))
    ring = Path(record["rings"]) / f"{record['pid']}.ring"
    (said,) = read_ring_files([ring], 1000).values()
    return [[call[1] is None, *call[2:]] for thread in said["threads"] for call in thread["last"]]


@pytest.mark.long  # test_ring_verdicts.py holds this for a program that marks no steps
def test_a_step_that_was_left_out_is_seen_in_the_rings(nursery: Nursery) -> None:
    trial = Trial(named("H11"), NUM_RANKS, 2, {"BSL_LAB_RECORDER": "0"}, keeps_rings=True)
    with reproduce(trial, nursery=nursery) as standing:
        verdict = compare(standing).verdict
    assert verdict.hang_class is HangClass.STEP_DROPPED and "rank 2" in verdict.claim


def test_every_entry_has_a_look() -> None:
    standing_still = {one.name for one in REPRODUCTIONS if one.stand not in (Stand.MOVING, Stand.ALL_ENDED)}
    assert set(LOOKS) == standing_still


@pytest.mark.parametrize("num_ended", [0, 1])
def test_a_rank_that_waits_beside_the_crashed_is_left_there(
    num_ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigsci_launch.hang_lab.stand.LEFT_BEHIND_S", 0.3)
    attempt = RunDir(tmp_path / "run").attempt("0001")
    attempt.make()
    notes = tmp_path / "lab"
    notes.mkdir()
    (notes / "struck-0").touch()
    with subprocess.Popen(["sleep", "60"]) as waiting:
        try:
            for rank in range(2):
                write_json(attempt.pid_file(rank), {"pid": waiting.pid})
            for rank in range(num_ended):
                write_json(attempt.exit_file(rank), {"code": None, "signal": "SIGABRT"})
            wait = partial(wait_for_stand, Job(attempt, notes, 2, 0), Stand.ALL_ENDED, 2.0)
            if num_ended:
                wait()
            else:
                with pytest.raises(LabError, match="0 have ended"):
                    wait()
        finally:
            waiting.kill()
