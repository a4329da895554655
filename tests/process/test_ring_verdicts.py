"""What `bsl spy` concludes from the rings of real ranks: keys, tags, groups and steps that do not match."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.hang_lab.nursery import Nursery
from bigsci_launch.runs.attempts import JobRecord, write_job
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.scheduler.local import Launcher
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.last_calls import FROM_RING, find_crossed_messages, find_in_rings
from bigsci_launch.spy.judge.rings_left import what_rings_show
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.judge.waits import Wait, build_graph
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.trace.last import group_ranks, words_of
from bigsci_launch.trace.read import NO_COPY, read_copies, read_nodes, with_living
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

from .recorded_ranks import ForkedRanks, read
from .test_spy_dumps import dump

pytestmark = pytest.mark.torch
START = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
"""
READY = "print('ready', flush=True)\n"
BARRIER = "dist.barrier()\n"
ROUNDS = """
if rank == 0:
    store.set("round/0/go", "1")
    store.set("round/1/go", "1")
elif rank == 1:
    store.get("round/1/go")
    store.get("round/2/go")
"""
OWN_KEYS = """
if rank < 2:
    store.set(f"ready-{rank}", "1")
elif rank == 2:
    store.wait(["ready-3"])
"""
TAG = "if rank == 1: store.wait(['checkpoint/tag'])\n"
GROUP = "if rank != 2: dist.new_group([0, 1, 2])\n"
STEPS = """
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
for step in range(10000):
    dist.all_reduce(torch.ones(4))
    if not (rank == 2 and step == 3):
        optimizer.step()
    if step == 8:
        print('ready', flush=True)
    time.sleep(0.2)
"""
BLOCKING = """
if rank == 0: dist.recv(torch.zeros(3), 1, tag=8)
elif rank == 1: dist.send(torch.zeros(3), 0, tag=7)
"""
HANDLES = """
if rank == 0: dist.irecv(torch.zeros(3), 1, tag=8).wait()
elif rank == 1: dist.isend(torch.zeros(3), 0, tag=7).wait()
"""
DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
def step():
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(torch.ones(1))
"""
RAW = "def step(): dist.group.WORLD.allreduce([torch.ones(4)]).wait()\n"
OPERATION = """
def step():
    found = torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD.group_name)
    torch.ops._c10d_functional.wait_tensor(found)
"""
FUTURE = "def step(): dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()\n"
ONE_LEAVES = """
for _ in range(5):
    step()
print('ready', flush=True)
dist.barrier() if rank == 2 else step()
"""
ONE_LOCKED = """
dist.all_reduce(torch.ones(4))
print('ready', flush=True)
import threading
lock = threading.Lock()
lock.acquire()
lock.acquire() if rank == 2 else dist.barrier()
"""
ONE_WITHOUT_GRADIENTS = """
for _ in range(3):
    step()
loss = model(torch.ones(4, 8)).sum()
print('ready', flush=True)
import threading
lock = threading.Lock()
lock.acquire()
lock.acquire() if rank == 2 else loss.backward()
"""
LONE = "if rank == 0: dist.recv(torch.zeros(3), 1, tag=8)\n"


@pytest.fixture
def ranks(nursery: Nursery, tmp_path: Path) -> Iterator[ForkedRanks]:
    found = ForkedRanks(tmp_path, nursery)
    yield found
    found.end()


def start(ranks: ForkedRanks, program: str, size: int, waiting: int) -> None:
    """Start ranks of `program`, and wait until `waiting` of them are in a call of the ring."""
    file = ranks.rings.parent / "train.py"
    file.write_text(START + program)
    ranks.start([sys.executable, str(file)], size)
    wait_until(lambda: all("ready" in ranks.log(rank) for rank in range(size)))
    wait_until(lambda: sum(bool(ring["open"]) for ring in read(*map(ranks.live, range(size)))) >= waiting)


def look(ranks: ForkedRanks, **more: object) -> Evidence:
    request = {"pid_files": str(ranks.attempt / "pids"), **more}
    return collect(Target(label="rings", request=request, attempt=AttemptDir(ranks.attempt))).evidence()


def verdict(ranks: ForkedRanks) -> Conclusion:
    """The verdict, or what it would be if the job were known to hang."""
    found = judge(look(ranks))
    return found.if_hang or found


@pytest.mark.long
def test_the_rank_that_sets_such_keys_is_named(ranks: ForkedRanks) -> None:
    start(ranks, READY + ROUNDS + BARRIER, 3, waiting=3)
    found = verdict(ranks)
    assert has_parts(found.claim, "rank 1", "'round/2/go'", "rank 0 set 'round/1/go'", "barrier")
    assert found.hang_class is HangClass.STORE_KEY_MISSING and not found.suspects


def test_a_key_that_names_a_rank_is_due_from_that_rank(ranks: ForkedRanks) -> None:
    start(ranks, READY + OWN_KEYS + BARRIER, 4, waiting=4)
    found = verdict(ranks)
    assert has_parts(found.claim, "key 'ready-3'", "rank 3", "rank 1 set 'ready-1'")


@pytest.mark.long
def test_nobody_is_named_for_a_key_like_no_other(ranks: ForkedRanks) -> None:
    start(ranks, READY + TAG + BARRIER, 3, waiting=3)
    found = verdict(ranks)
    assert "key 'checkpoint/tag'" in found.claim and " set '" not in found.claim
    assert any("no ring shows" in line for line in found.evidence)
    assert [suspect.rank for suspect in found.suspects] == [1], "the rank that waits, and no other"


def test_a_rank_that_has_not_come_to_a_new_group_is_named_with_its_place(ranks: ForkedRanks) -> None:
    start(ranks, READY + GROUP + BARRIER, 3, waiting=3)
    found = verdict(ranks)
    said = next(line for line in found.evidence if "new_group of ranks 0,1,2" in line)
    inside, _, missing = said.partition("; ")
    assert inside.startswith("ranks 0-1 ") and "<module> (train.py:" in inside
    assert missing.startswith("rank 2 ") and "barrier" in missing


def test_a_rank_that_left_out_a_step_is_named_with_the_step(ranks: ForkedRanks) -> None:
    start(ranks, STEPS, 3, waiting=0)
    found = wait_until(lambda: (seen := verdict(ranks)).state is State.PROGRESSING and seen)
    assert found.hang_class is HangClass.STEP_DROPPED, found
    assert has_parts(found.claim, "rank 2", "1 step ", "step 4 ")
    assert not found.suspects


def message(wait: Wait) -> tuple[str, int | None, int | None]:
    return wait.operation, wait.partner, wait.tag


@pytest.mark.parametrize(
    ("program", "words"),
    [(BLOCKING, ("recv", "send")), pytest.param(HANDLES, ("irecv", "isend"), marks=pytest.mark.long)],
)
def test_tags_that_differ_are_both_named(ranks: ForkedRanks, program: str, words: tuple[str, str]) -> None:
    start(ranks, READY + program + BARRIER, 3, waiting=3)
    evidence = look(ranks)
    waits, found = build_graph(evidence).waits, judge(evidence)
    assert [message(waits[rank]) for rank in (0, 1)] == [(words[0], 1, 8), (words[1], 0, 7)]
    assert not found.suspects and any(line.startswith("the tags differ: ") for line in found.evidence)
    assert (found.if_hang or found).hang_class is HangClass.MESSAGE_TAG_DIFFERS

    # Without stacks, the rings alone say it.
    unread = look(ranks, py_spy_timeout_s=0.0)
    assert not any(seen.threads for seen in unread.ranks)
    said = [fact.words for fact in find_crossed_messages(unread)]
    assert len(said) == 1 and has_parts(said[0], *words, "tag 8", "tag 7")
    assert message(build_graph(unread).waits[0]) == (words[0], 1, 8)


def test_a_message_that_the_peer_never_sends_is_named(ranks: ForkedRanks) -> None:
    start(ranks, READY + LONE + BARRIER, 3, waiting=3)
    said = [fact.words for fact in find_in_rings(look(ranks))]
    assert len(said) == 1 and said[0].count("tag 8") == 2 and "barrier" in said[0]


@pytest.mark.long  # tests/unit/spy/judge/test_last_calls.py holds this for the ring of such a rank
def test_a_rank_that_waits_for_a_lock_of_its_own_is_accused(ranks: ForkedRanks) -> None:
    start(ranks, ONE_LOCKED, 3, waiting=2)
    assert [suspect.rank for suspect in verdict(ranks).suspects] == [2]


@pytest.mark.long  # tests/unit/spy/judge/test_last_calls.py holds this for the frames of such ranks
@pytest.mark.parametrize("program", [DDP, RAW, OPERATION, FUTURE])
def test_a_rank_that_waits_for_work_that_python_did_not_begin_is_not_accused(ranks: ForkedRanks, program: str) -> None:
    start(ranks, program + ONE_LEAVES, 3, waiting=1)
    assert {suspect.rank for suspect in verdict(ranks).suspects} <= {2}


def test_a_rank_that_others_wait_for_in_their_backward_pass_is_accused(ranks: ForkedRanks) -> None:
    start(ranks, DDP + ONE_WITHOUT_GRADIENTS, 3, waiting=2)
    found = verdict(ranks)
    assert [suspect.rank for suspect in found.suspects] == [2]
    assert has_parts(" ".join(found.evidence), "gradient reduction number 4", "rank 2")


def test_a_dead_rank_is_known_from_the_ring_that_it_left(ranks: ForkedRanks) -> None:
    start(ranks, READY + BLOCKING + "time.sleep(600)", 3, waiting=2)
    os.kill(ranks.record(1)["pid"], signal.SIGKILL)
    wait_until(lambda: ranks.kept(1).exists())
    evidence = look(ranks)
    seen = evidence.ranks[1]
    assert seen.is_gone and seen.ring is not None
    found = judge(evidence)
    assert found.state is State.CRASHED
    said = ("send to rank 0", "tag 7", "<module> (train.py:10)", FROM_RING)
    assert any(has_parts(line, *said) for line in found.evidence), found.evidence

    copies = read_copies(AttemptDir(ranks.attempt))
    assert [each.why for each in copies if each.rank == 2] == [NO_COPY]
    target = Target(label="rings", request={"pid_files": str(ranks.attempt / "pids")})
    both = with_living(copies, read_nodes(collect(target).nodes))
    assert all(each.ring is not None for each in both if each.rank in (1, 2))
    lines = list(words_of(group_ranks(both, 8), both))
    assert f"rank 1 (dp0 pp0 tp1): step 0, {FROM_RING}" in lines and "rank 2 (dp0 pp0 tp2): step 0" in lines


def test_the_commands_answer_for_the_dead_and_the_living(ranks: ForkedRanks) -> None:
    start(ranks, READY + BLOCKING + "time.sleep(600)", 3, waiting=2)
    os.kill(ranks.record(1)["pid"], signal.SIGKILL)
    wait_until(lambda: ranks.kept(1).exists())
    attempt, run = AttemptDir(ranks.attempt), ranks.attempt.parent.parent
    (run / "run.json").write_text("{}")
    write_job(attempt, JobRecord("local", 0.0, launcher=Launcher(os.getpid(), 0, socket.gethostname())))
    said = CliRunner().invoke(bsl, ["trace", "last", str(run)])
    assert f"rank 1 (dp0 pp0 tp1): step 0, {FROM_RING}" in said.stdout, said.output
    assert "\nrank 2 (dp0 pp0 tp2): step 0\n" in said.stdout, said.output
    said = CliRunner().invoke(bsl, ["spy", str(run)])
    assert "with tag 7" in said.stdout and f"({FROM_RING})" in said.stdout, said.output
    assert str(attempt.recorder_dumps) not in said.output

    left = Path(f"{attempt.recorder_dumps}1")
    left.write_bytes(dump())
    said = CliRunner().invoke(bsl, ["spy", str(run)])
    assert f"bsl spy --bundle {attempt.recorder_dumps}*\n" in said.stderr, said.output
    said = CliRunner().invoke(bsl, ["spy", "--bundle", str(left)])
    assert said.exit_code == 0 and "all_reduce" in said.stdout, said.output


def test_a_run_that_was_ended_shows_why_it_hung(ranks: ForkedRanks) -> None:
    start(ranks, READY + BLOCKING + BARRIER, 3, waiting=3)
    ranks.terminate()
    over = Target(label="rings", request={}, attempt=AttemptDir(ranks.attempt), is_over=True)
    first, *_ = what_rings_show(collect(over).evidence())
    for tag, line in ((8, 9), (7, 10)):
        assert f"with tag {tag} at <module> (train.py:{line}) ({FROM_RING})" in first

    said = CliRunner().invoke(bsl, ["trace", "last", str(ranks.kept(0).parent), "--json"])
    assert [rank["rank"] for rank in json.loads(said.stdout)["ranks"]] == [0, 1, 2]
    ranks.kept(2).unlink()
    evidence = collect(over).evidence()
    assert evidence.ranks[2].ring is None
    assert has_parts(what_rings_show(evidence)[-1], "rank 2", "not known")
    assert Path(ranks.kept(1)).exists()
