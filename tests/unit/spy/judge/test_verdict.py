"""Each rule of the verdict, and its traps: who must be named, and who must not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.judge.conclusion import Strength
from bigsci_launch.spy.judge.facts import stood_s
from bigsci_launch.spy.judge.verdict import ONE_LOOK, judge
from bigsci_launch.spy.known.library import name_hang, read_library
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ..conftest import accused, ended, make_evidence, outcome, rank_of
from .small_cases import job

TP = "all_reduce@c10d:1 < all_reduce@tensor:33 < step@/src/loop.py:5"
WORLD = "all_reduce@c10d:1 < reduce_loss@/src/loop.py:9 < step@/src/loop.py:6"
LOADER = "next@/src/data.py:3 < step@/src/loop.py:4"
SLEEPING = {"wchan": "hrtimer_nanosleep"}


def waiting(ranks: range, stack: str = WORLD) -> list[dict[str, Any]]:
    return [rank_of(rank, stack) for rank in ranks]


def test_a_rank_that_cannot_be_read_is_what_the_others_wait_for() -> None:
    ranks = [*waiting(range(3)), rank_of(3, None, state="D", wchan="percpu_rwsem_wait")]
    conclusion = judge(make_evidence(ranks))
    assert outcome(conclusion) == ("hang", HangClass.KERNEL_SLEEP, [3])
    assert "(percpu_rwsem_wait)" in conclusion.claim
    assert any(has_parts(line, "stacks", "rank 3") for line in conclusion.missing)


def test_a_process_that_was_killed_and_cannot_die() -> None:
    dying = rank_of(0, LOADER, state="D", wchan="rpc_wait_bit_killable", sample={"kill_pending": True})
    conclusion = judge(make_evidence([dying, rank_of(1, WORLD)]))
    assert outcome(conclusion) == ("hang", HangClass.UNKILLABLE, [0])
    assert [command.split(" ") for command in conclusion.next] == [
        ["scontrol", "update", "nodename=n0", "state=drain", "reason=D-state"]
    ]


def test_a_silent_node_is_what_the_others_wait_for() -> None:
    expected = [{"rank": rank, "node": f"n{rank // 2}"} for rank in range(4)]
    silent = [{"node": "n1", "why": "no answer in 40 s"}]
    evidence = make_evidence(waiting(range(2)), "dp=4", expected=expected, world_size=4, nodes_silent=silent)
    conclusion = judge(evidence)
    assert outcome(conclusion) == ("hang", HangClass.NODE_LOST, [2, 3])
    assert has_parts(conclusion.claim, "ranks 2-3", "node n1")
    assert has_parts(evidence.ranks[3].why_unreadable or "", "n1", silent[0]["why"])


def test_a_silent_node_is_not_accused_when_another_rank_explains_all() -> None:
    """tp=2: rank 0 waits for rank 1 alone; the ranks of the silent node are missing evidence, not suspects."""
    ranks = [rank_of(0, TP), rank_of(1, LOADER, **SLEEPING)]
    silent = [{"node": "n1", "why": "no answer"}]
    conclusion = judge(make_evidence(ranks, "tp=2,dp=2", world_size=4, nodes_silent=silent))
    assert accused(conclusion) == [1]
    assert any(has_parts(line, "stacks", "ranks 2-3") for line in conclusion.missing)


def test_two_faults_at_once_are_both_named() -> None:
    ranks = [
        rank_of(0, TP),
        rank_of(1, LOADER, **SLEEPING),
        rank_of(2, "step@/src/loop.py:1", state="T", wchan="do_signal_stop"),
        rank_of(3, TP),
    ]
    assert outcome(judge(make_evidence(ranks, "tp=2,dp=2"))) == ("hang", None, [1, 2])


def test_a_rank_that_is_stopped_inside_of_a_collective_holds_it_up() -> None:
    """All recorders say that their ranks are in the same collective: the stopped one has begun it like the others."""
    members = {"0": [0, 1, 2]}
    stopped = {"state": "T", "wchan": "do_signal_stop"}
    ranks = [
        rank_of(rank, WORLD, calls="0 0 0!", members=members, **(stopped if rank == 1 else {})) for rank in range(3)
    ]
    assert outcome(judge(make_evidence(ranks, "dp=3"))) == ("hang", HangClass.PROCESS_STOPPED, [1])


def test_the_culprits_may_be_the_majority() -> None:
    """Three ranks are stuck in their data loaders; the one that waits in the collective is the victim."""
    ranks = [rank_of(0, WORLD), *(rank_of(rank, LOADER, **SLEEPING) for rank in range(1, 4))]
    conclusion = judge(make_evidence(ranks, "dp=4"))
    assert accused(conclusion) == [1, 2, 3]
    assert conclusion.strength is Strength.DERIVED, "one level less than for one rank"


def test_a_transitive_wait_leads_to_its_root() -> None:
    receive = "recv@c10d:1 < _exec_recv_activations@engine:9"
    ranks = [rank_of(0, LOADER, **SLEEPING), *(rank_of(rank, receive) for rank in range(1, 4))]
    conclusion = judge(make_evidence(ranks, "pp=4"))
    assert accused(conclusion) == [0]
    assert has_parts(conclusion.claim, "3 ranks", "(rank 1) in recv", "(ranks 0-1)")


def test_all_inside_the_same_collective_accuses_nobody() -> None:
    members = {"w": [0, 1, 2, 3]}
    ranks = [rank_of(rank, WORLD, calls="w w w!", members=members) for rank in range(4)]
    assert outcome(judge(make_evidence(ranks))) == ("hang", None, [])


def test_a_rank_alone_in_a_known_group_of_four() -> None:
    """tp=4: three peers wait in the tensor-parallel group, the fourth is in the replicas' all_reduce alone."""
    gone_on = "all_reduce@c10d:1 < allreduce_bucket@/venv/deepspeed/runtime/engine.py:4 < _exec_reduce_grads@engine:292"
    stacks = [TP, TP, TP, gone_on, TP, TP, TP, TP]
    conclusion = judge(make_evidence([rank_of(rank, stack) for rank, stack in enumerate(stacks)], "tp=4,dp=2"))
    assert accused(conclusion) == []
    assert "every rank" not in conclusion.claim


def test_init_that_one_rank_never_reached() -> None:
    init = "_store_based_barrier@c10d:1 < init_process_group@c10d:2 < main@/src/train.py:1"
    ranks = [rank_of(0, init, wchan="poll_schedule_timeout"), rank_of(1, LOADER, **SLEEPING)]
    conclusion = judge(make_evidence(ranks))
    assert accused(conclusion) == [1]
    assert has_parts(conclusion.claim, "init_process_group", "world")


def test_a_rank_that_computes_and_moves_is_no_hang() -> None:
    multiplying = "matmul@/src/m.py:1 < mlp@/src/m.py:2 < layer@/src/m.py:3 < forward@/src/m.py:4"
    adding = "add@/src/m.py:9 < norm@/src/m.py:8 < head@/src/m.py:7 < loss@/src/m.py:6"
    moving = [f"{multiplying} < step@/src/loop.py:1", f"{adding} < step@/src/loop.py:2"]
    ranks = [rank_of(0, moving, state="R", cpu_ticks=(0, 95)), rank_of(1, WORLD)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, accused(conclusion)) == ("progressing", [])


def test_a_rank_that_spins_in_one_function_is_named_with_doubt() -> None:
    spinning = ["tokenise@/src/data.py:1 < step@/src/loop.py:1", "tokenise@/src/data.py:2 < step@/src/loop.py:1"]
    ranks = [rank_of(0, WORLD), rank_of(1, spinning, state="R", cpu_ticks=(0, 99))]
    conclusion = judge(make_evidence(ranks))
    assert outcome(conclusion) == ("hang", HangClass.PYTHON_NEVER_ENDS, [1])
    assert conclusion.strength is Strength.GUESS and conclusion.missing


def test_a_stuck_child_is_named() -> None:
    child = {"pid": 4711, "comm": "python", "state": "T", "wchan": "do_signal_stop"}
    loader = rank_of(1, "_next_data@/venv/torch/utils/data/dataloader.py:1", sample={"children": [child]})
    conclusion = judge(make_evidence([rank_of(0, WORLD), loader]))
    assert outcome(conclusion) == ("hang", HangClass.DATA_LOADER_STUCK, [1])
    assert has_parts(conclusion.claim, "4711 (python", "state T", "do_signal_stop")


@pytest.mark.parametrize(
    ("stack", "wchan", "hang_class"),
    [
        (
            "wait@/venv/torch/utils/file_baton.py:50 < build@/src/ext.py:1",
            "hrtimer_nanosleep",
            HangClass.BUILD_LOCK_STALE,
        ),
        ("take@/src/lock.py:5", "locks_lock_inode_wait", HangClass.FILE_LOCK_HELD),
        ("interaction@/usr/lib/python3.11/pdb.py:5", "n_tty_read", HangClass.BREAKPOINT_FORGOTTEN),
        ("log@/src/log.py:5", "anon_pipe_write", HangClass.OUTPUT_PIPE_FULL),
        ("next@/src/data.py:3", "hrtimer_nanosleep", HangClass.BLOCKED_IN_C),
        ("next@/src/data.py:3", "something_else", HangClass.BLOCKED_IN_C),
    ],
)
def test_known_stalls(stack: str, wchan: str, hang_class: HangClass) -> None:
    conclusion = judge(make_evidence([rank_of(0, WORLD), rank_of(1, stack, wchan=wchan)]))
    assert outcome(conclusion) == ("hang", hang_class, [1])


@pytest.mark.parametrize("topology", [None, "tp=2,dp=2", "dp=4"])
def test_the_victim_of_an_asynchronous_collective_is_not_accused(topology: str | None) -> None:
    """Rank 0 is in `Work.wait()`, which has no frame of its own; rank 2 has skipped the collective and continued."""
    handle = rank_of(0, "optimizer_step@/src/loop.py:7 < step@/src/loop.py:4")
    conclusion = judge(make_evidence([handle, *waiting(range(1, 4))], topology))
    assert outcome(conclusion) == ("hang", None, [])
    assert conclusion.sides[-1].ranks == (0,)
    assert [command.partition("  #")[0] for command in conclusion.next] == ["bsl spy --native"]


def test_one_of_several_that_sleep_is_accused_where_the_kernel_says_why() -> None:
    handle = rank_of(0, "optimizer_step@/src/loop.py:7 < step@/src/loop.py:4")
    ranks = [handle, rank_of(1, LOADER, **SLEEPING), *waiting(range(2, 4))]
    assert accused(judge(make_evidence(ranks))) == [1]


@pytest.mark.parametrize(("wait", "named"), [("hrtimer_nanosleep", [3]), ("futex_do_wait", [])])
def test_what_counts_is_the_wait_of_the_thread_that_decides(wait: str, named: list[int]) -> None:
    """The main thread joins another thread: the culprit's sleeps, and a victim's waits for a handle."""
    ranks = [*waiting(range(3)), rank_of(3, "join@/usr/lib/python3.11/threading.py:1 < step@/src/a.py:2")]
    thread = {"tid": 999, "name": "autograd-0", "active": False, "owns_gil": False}
    frames = [{"function": "hook", "file": "/src/loop.py", "line": 3}]
    for sample in ranks[3]["samples"]:
        sample["stack"]["threads"].append({**thread, "frames": frames})
        sample.update(children=[], thread_waits={wait: [999]})
    assert accused(judge(make_evidence(ranks))) == named


@pytest.mark.parametrize("looks", [1, 2])
def test_one_look_does_not_tell_that_nobody_moves(looks: int) -> None:
    helper = "all_reduce@c10d:1 < reduce@/src/comm.py:5"
    stacks = [f"{helper} < forward@/src/a.py:1", f"{helper} < backward@/src/a.py:9"]
    ranks = [rank_of(rank, [stack] * looks) for rank, stack in enumerate(stacks)]
    conclusion = judge(make_evidence(ranks))
    assert conclusion.state.value == ("unknown" if looks == 1 else "hang")
    assert (conclusion.if_hang is not None) == (looks == 1)
    assert (ONE_LOOK in conclusion.missing) == (looks == 1)
    assert any("no rank moved" in line for line in conclusion.evidence) == (looks == 2)


def test_one_of_many_that_sleep_at_another_line_may_be_a_victim() -> None:
    """No stack shows a collective, because all wait for handles. The odd one out is not accused for that."""
    stacks = ["backward@/src/loop.py:3", *["optimizer_step@/src/loop.py:7"] * 7]
    conclusion = judge(make_evidence([rank_of(rank, stack) for rank, stack in enumerate(stacks)]))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", []), "nobody has run for an hour"
    assert conclusion.look_first[0].rank == 0


def test_all_ended_well_is_finished() -> None:
    conclusion = judge(make_evidence([], world_size=2, exits=[ended(0, 0), ended(1, 0)]))
    assert (conclusion.state.value, accused(conclusion)) == ("finished", [])


def test_the_first_failure_is_the_cause_not_those_that_were_told_to_end() -> None:
    told = [
        ended(rank, signal=signal, time=9.0 - rank, terminated=1.0) for rank, signal in ((0, "SIGTERM"), (2, "SIGKILL"))
    ]
    records = [*told, ended(1, 1, time=8.0)]
    conclusion = judge(make_evidence([], world_size=3, exits=records))
    assert outcome(conclusion) == ("crashed", HangClass.RANK_EXITED, [1])


def test_a_killed_rank_whose_peers_wait() -> None:
    records = [ended(2, signal="SIGKILL")]
    errors = [{"rank": 2, "type": "MemoryError", "message": "no more"}]
    evidence = make_evidence(waiting(range(2)), world_size=3, exits=records, errors=errors)
    conclusion = judge(evidence)
    assert outcome(conclusion) == ("crashed", HangClass.RANK_KILLED, [2])
    assert has_parts(conclusion.claim, "SIGKILL", "MemoryError: no more")


def test_nothing_seen_is_unknown() -> None:
    conclusion = judge(make_evidence([], world_size=4))
    assert (conclusion.state.value, conclusion.strength, accused(conclusion)) == ("unknown", Strength.NOTHING, [])


def test_one_of_many_plain_processes_stands_elsewhere() -> None:
    peers = "wait_for_peers@/src/p.py:4 < main@/src/p.py:9"
    ranks = [rank_of(rank, LOADER if rank == 201 else peers, **SLEEPING) for rank in range(384)]
    conclusion = judge(make_evidence(ranks, "tp=4,pp=12,dp=8", ranks_per_node=8))
    assert accused(conclusion) == [201]
    assert conclusion.strength is Strength.GUESS
    assert has_parts(conclusion.claim, "rank 201 (n25, dp2 pp6 tp1)", "next (data.py:3)")


def test_plain_processes_in_many_places_accuse_nobody() -> None:
    ranks = [rank_of(rank, f"work@/src/p.py:{rank % 2}", **SLEEPING) for rank in range(8)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", []), "nobody has run for an hour"
    for rank in ranks:
        rank["samples"][-1]["thread_idle_s"] = {str(rank["pid"]): 60.0}
    assert judge(make_evidence(ranks)).state.value == "waiting", "a timer may wake them"


def test_a_rank_without_a_process_has_ended() -> None:
    conclusion = judge(make_evidence(waiting(range(3)), world_size=4))
    assert (conclusion.state.value, accused(conclusion)) == ("crashed", [3])


def test_a_process_that_nobody_could_identify_may_be_that_rank() -> None:
    """The environment of a poisoned process cannot be read, so its rank is not known to be gone."""
    ranks = waiting(range(3))
    problems = ["pid 9: its environment cannot be read"]
    conclusion = judge(make_evidence(ranks, world_size=4, problems=problems))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", []), "it may be another rank"
    assert conclusion.look_first[0].rank == 3
    assert f"n1: {problems[0]}" in conclusion.missing


def test_a_phase_that_all_ranks_are_new_to_accuses_nobody() -> None:
    """Two stages without peers, both in collectives that no step before had: a save that went wrong somewhere."""
    steps = "w:broadcast w w w w w w w w " * 5
    members = {"w": [0, 1]}
    ranks = [
        rank_of(0, WORLD, calls=steps + "w:gather w:barrier!", members=members),
        rank_of(1, WORLD, calls=steps + "w:gather w:scatter!", members=members),
    ]
    conclusion = judge(make_evidence(ranks, "pp=2"))
    assert outcome(conclusion) == ("hang", HangClass.OPERATION_DIFFERS, [])
    assert len(conclusion.sides) == 2


def test_a_rank_that_may_be_on_one_of_several_silent_nodes_is_not_said_to_have_ended() -> None:
    silent = [{"node": node, "why": "no answer in 40 s"} for node in ("n1", "n2")]
    evidence = make_evidence(
        [rank_of(rank, "all_reduce@c10d:1 < step@/src/p.py:1") for rank in range(2)],
        "tp=2,dp=3",
        world_size=6,
        nodes_silent=silent,
    )
    conclusion = judge(evidence)
    assert conclusion.hang_class == HangClass.NODE_LOST, conclusion.claim
    assert "2 nodes" in conclusion.suspects[0].why


@pytest.mark.parametrize("holder", [1, 3])
def test_who_waits_for_a_shared_semaphore_may_be_a_victim(holder: int) -> None:
    """One rank has taken all places of a semaphore that ranks share, and waits for the others in a collective."""
    enter = "SemLock.__enter__@/usr/lib/python3.11/multiprocessing/synchronize.py:95 < step@/src/loop.py:4"
    conclusion = judge(job([rank_of(rank, WORLD if rank == holder else enter) for rank in range(4)]))
    assert not accused(conclusion)
    assert "semaphore" in conclusion.claim
    assert conclusion.look_first[0].rank == holder


def test_how_long_ranks_stood_is_asked_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks for which no stack shows a wait, and of ranks that all wait for one: thousands must cost as little."""
    asked: Counter[int] = Counter()

    def count(seen: RankEvidence) -> float | None:
        asked[seen.rank] += 1
        return stood_s(seen)

    monkeypatch.setattr("bigsci_launch.spy.judge.case.stood_s", count)
    for stacks in ([f"work@/src/p.py:{rank}" for rank in range(40)], [WORLD] * 39 + [LOADER]):
        ranks = [rank_of(rank, stack, **SLEEPING) for rank, stack in enumerate(stacks)]
        for rank in ranks:
            rank["samples"][-1]["thread_idle_s"] = {str(rank["pid"]): 1.0}
        judge(job(ranks))
        assert max(asked.values()) == 1, asked
        asked.clear()


def test_lines_that_are_no_steps_are_shown_and_decide_nothing() -> None:
    """A loop that waits prints too."""
    ranks = [rank_of(rank, "wait@/src/train.py:5", cpu_ticks=(1, 2)) for rank in range(2)]
    quiet = judge(make_evidence(ranks))
    printed = [{"rank": 1, "lines": 3, "last": "still waiting (30 s)", "step": None}]
    conclusion = judge(make_evidence(ranks, printed=printed))
    assert (conclusion.state, conclusion.claim) == (quiet.state, quiet.claim)
    (said,) = set(conclusion.evidence) - set(quiet.evidence)
    assert has_parts(said, "rank 1", "3 lines", printed[0]["last"])


def test_who_waits_for_a_silent_node_is_no_known_rendezvous() -> None:
    joining = "init_process_group@/venv/torch/distributed/distributed_c10d.py:1764"
    expected = [{"rank": rank, "node": "n1", "pid": 9} for rank in (2, 3)]
    silent = [{"node": "n1", "why": "no answer in 40 s"}]
    evidence = make_evidence([rank_of(rank, joining) for rank in (0, 1)], expected=expected, nodes_silent=silent)
    conclusion = name_hang(evidence, judge(evidence), read_library())
    assert (conclusion.hang_class, conclusion.signature) == (HangClass.NODE_LOST, None)
    assert any(line.startswith("scontrol show node n1  #") for line in conclusion.next)
    assert not any("py-spy" in line for line in conclusion.next)


@pytest.mark.parametrize(("asleep_s", "hang_in_s"), [(12.0, 108.0), (0.0, None), (200.0, None)])
def test_what_may_end_by_itself_says_when_it_may_be_called_a_hang_as_far_as_the_kernel_shows_it(
    asleep_s: float, hang_in_s: float | None
) -> None:
    late = rank_of(2, "load@/src/p.py:4 < main@/src/p.py:1", **SLEEPING)
    ranks = [rank_of(0, WORLD), rank_of(1, WORLD), late]
    for rank in ranks:
        rank["samples"][-1]["thread_idle_s"] = {str(rank["pid"]): asleep_s}
    conclusion = judge(job(ranks))
    assert conclusion.state.value == ("waiting" if asleep_s < 120.0 else "hang")
    assert conclusion.hang_in_s == hang_in_s
