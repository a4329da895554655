"""Where the many may be wrong, or nobody is: a rank is accused for what it shows itself, never for being alone."""

from __future__ import annotations

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.groups import other_groups
from bigsci_launch.spy.evidence.kernel import parse_connections
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.last_calls import UNKNOWN_SETTER
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.spy.taxonomy import HangClass, State

from ...conftest import Document, accused, mesh_of, outcome, rank_of
from ..small_cases import INIT, PEERS, POLLING, SLEEPING, WORLD, a_key_of_a_known_rank, job

WAITING = "all_reduce@c10d:1 < step@/src/loop.py:9"
END = "barrier@c10d:1 < finish@/src/loop.py:11"
BUILD = "wait@/venv/torch/utils/file_baton.py:50 < load@/src/ops.py:3"
PEERS_END = "barrier@c10d:1 < finish@/src/train.py:7"
POLL = {"number": 7, "call": "poll", "name": "poll", "fd": 3, "target": None}
POLLED = "_poll_until_acquired@/venv/filelock/_api.py:9 < acquire@/venv/filelock/_api.py:4 < prepare@/src/data.py:3"


def idle(rank: Document, seconds: float) -> Document:
    rank["samples"][-1]["thread_idle_s"] = {str(rank["pid"]): seconds}
    return rank


def node(ranks: list[Document], **facts: object) -> Evidence:
    return Bundle({}, ({"node": "n0", "clock_ticks_per_s": 100, "ranks": ranks, **facts},)).evidence()


def test_a_shorter_first_row_that_all_ranks_left_alike_is_no_reason_to_look_at_one() -> None:
    """After rows of 7 and 4 with a report after each, one rank begins the fourth of its row, the others a barrier."""
    report = "w:gather w:scatter "
    begun = "w " * 7 + report + "w " * 4 + report + "w " * 3
    calls = [begun + ("w!" if rank == 2 else "w:barrier!") for rank in range(4)]
    ranks = [rank_of(rank, PEERS, calls=each, members={"w": [0, 1, 2, 3]}) for rank, each in enumerate(calls)]
    found = judge(job(ranks)).look_first
    assert all("the only time before" not in pointer.why for pointer in found), found


@pytest.mark.parametrize("wrong", [(1, 2, 3), (0, 1, 3), (2,)])
def test_after_one_round_the_past_accuses_no_rank_and_points_at_those_that_left_it(wrong: tuple[int, ...]) -> None:
    """After one finished round of `16 R r`, the many or one leave out an R: the others do what is due."""
    round_of, short = "w " * 16 + "w:reduce ", "w " * 15 + "w:reduce! "
    calls = [round_of + (short if rank in wrong else "w " * 15 + "w!") for rank in range(4)]
    members = {"w": [0, 1, 2, 3]}
    conclusion = judge(job([rank_of(rank, WAITING, calls=calls[rank], members=members) for rank in range(4)]))
    assert (conclusion.state, accused(conclusion)) == (State.HANG, [])
    assert set(range(4)) == {rank for side in conclusion.sides for rank in side.ranks}
    assert {pointer.rank for pointer in conclusion.look_first[: len(wrong)]} == set(wrong)


def test_ranks_that_only_wait_for_a_circle_are_not_pointed_at_first_for_what_is_new_to_them() -> None:
    """Ranks 0 and 1 send to each other, which no recorder lists; ranks 2 and 3 are in a barrier that is new to them."""
    before, members = ("w " * 12 + "w:reduce ") * 2 + "w " * 12, {"w": [0, 1, 2, 3]}
    ranks = [rank_of(rank, "send@c10d:1 < swap@/src/loop.py:4", calls=before, members=members) for rank in (0, 1)]
    for number, rank in enumerate(ranks):
        for sample in rank["samples"]:
            sample["stack"]["threads"][0]["frames"][0]["arguments"] = {"dst": 1 - number}
    ranks += [rank_of(rank, END, calls=before + "w:barrier!", members=members) for rank in (2, 3)]
    assert [pointer.rank for pointer in judge(job(ranks)).look_first[:2]] == [0, 1]


@pytest.mark.parametrize(("wrong", "suspects"), [((2,), [2]), ((0, 1, 3), [])])
def test_after_two_rounds_the_past_shows_who_left_it_and_the_many_are_only_pointed_at(
    wrong: tuple[int, ...], suspects: list[int]
) -> None:
    before, members = ("w " * 12 + "w:reduce ") * 2, {"w": [0, 1, 2, 3]}
    calls = [before + "w " * 9 + ("w:reduce!" if rank in wrong else "w!") for rank in range(4)]
    conclusion = judge(job([rank_of(rank, WAITING, calls=calls[rank], members=members) for rank in range(4)]))
    assert (conclusion.state, accused(conclusion)) == (State.HANG, suspects)
    assert {pointer.rank for pointer in conclusion.look_first[: len(wrong)]} == set(wrong)


@pytest.mark.parametrize(("nodes", "state"), [(1, State.HANG), (2, State.WAITING)])
def test_ranks_of_one_node_that_wait_for_each_other_need_less_time(nodes: int, state: State) -> None:
    stacks = (WORLD, WORLD, PEERS_END)
    ranks = [idle(rank_of(rank, stack), 15.0) for rank, stack in enumerate(stacks)]
    parts = [{"node": f"n{number}", "clock_ticks_per_s": 100, "ranks": ranks[number::nodes]} for number in range(nodes)]
    assert judge(Bundle({}, tuple(parts)).evidence()).state is state


@pytest.mark.parametrize(("seconds", "state"), [(300.0, State.WAITING), (1900.0, State.HANG)])
def test_where_all_sleep_nobody_is_waited_for(seconds: float, state: State) -> None:
    ranks = [idle(rank_of(rank, "back_off@/src/store.py:6", **SLEEPING), seconds) for rank in range(3)]
    assert outcome(judge(job(ranks))) == (state.value, None, [])


@pytest.mark.parametrize(
    ("stack", "seconds", "expected"),
    [
        (PEERS, 20.0, ("crashed", HangClass.RANK_EXITED, [2])),
        (PEERS, 3.0, ("unknown", None, [])),
        (INIT, 20.0, None),
    ],
    ids=["they wait", "only just", "they still join"],
)
def test_a_rank_is_gone_and_no_collective_shows_that_the_others_wait(
    stack: str, seconds: float, expected: tuple[str, HangClass | None, list[int]] | None
) -> None:
    sample = {"system_call": POLL}
    ranks = [idle(rank_of(rank, stack, world_size=4, age_s=60.0, sample=sample, **POLLING), seconds)
             for rank in (0, 1, 3)]  # fmt: skip
    found = outcome(judge(node(ranks)))
    assert found == expected if expected else found[0] != "hang"


def test_how_a_rank_that_was_not_reaped_has_ended() -> None:
    ranks = [rank_of(rank, WORLD, world_size=3) for rank in (0, 2)]
    for end, expected in (({"code": 3}, ("crashed", HangClass.RANK_EXITED, [1])),
                          ({"signal": 11}, ("crashed", HangClass.RANK_CRASHED, [1]))):  # fmt: skip
        gone = {**rank_of(1, None, world_size=3), "samples": [{"mono": 1.0, "state": "Z"}], "end": end}
        assert outcome(judge(node([*ranks, gone]))) == expected


def test_who_waits_for_a_rank_that_ended_well_does_not_leave() -> None:
    for seconds, expected in ((4.0, None), (20.0, ("hang", HangClass.RANK_EXITED, [3]))):
        sample = {"system_call": POLL}
        ranks = [idle(rank_of(rank, PEERS, world_size=4, sample=sample, **POLLING), seconds) for rank in range(3)]
        gone = {**rank_of(3, None, world_size=4), "samples": [{"mono": 1.0, "state": "Z"}], "end": {"code": 0}}
        found = judge(node([*ranks, gone]))
        assert outcome(found) == expected if expected else found.state is not State.FINISHED


@pytest.mark.parametrize(("age_s", "number", "is_loop"), [(5.0, 3, True), (5.0, 1, False), (600.0, 3, False)])
def test_a_crash_loop_is_known_by_its_restarts(age_s: float, number: int, is_loop: bool) -> None:
    ranks = [rank_of(rank, ["forward@/src/m.py:3", WORLD], restarts=[number, 20], age_s=age_s) for rank in range(2)]
    conclusion = judge(node(ranks))
    assert (conclusion.state is State.CRASHED, accused(conclusion)) == (is_loop, [])


def test_what_is_left_of_a_job_whose_launcher_still_runs() -> None:
    other = {"pid": 7, "comm": "python3", "role": "ended", "why": "it has ended"}
    for codes, state in (([0, 0], State.FINISHED), ([0, 1], State.CRASHED)):
        others = [{**other, "end": {"code": code}} for code in codes]
        assert judge(node([], others=others)).state is state
    waits = {"nodes": "2", "endpoint": "n1:29500", "age_s": 70.0}
    launcher = {"pid": 7, "comm": "torchrun", "role": "launcher", "why": "it starts ranks", "waits_for_nodes": waits}
    conclusion = judge(node([], others=[launcher]))
    assert conclusion.state is State.WAITING
    assert "n1:29500" in conclusion.claim


def pairs_of_four() -> list[Document]:
    """The world, and a group of ranks 2 and 3."""
    ends = mesh_of(4)
    ends[2]["listening"]["127.0.0.1:50002"] = 1
    ends[3]["opened"]["127.0.0.1"].append(50002)
    return ends


def test_which_group_a_rank_has_besides_the_world() -> None:
    def groups(ends: list[Document]) -> dict[int, tuple[int, ...]]:
        return other_groups([parse_connections([{"connections": end, "state": "S"}], "n0") for end in ends])

    assert groups(pairs_of_four()) == {2: (2, 3), 3: (2, 3)}
    assert groups(mesh_of(4)) == {}
    assert groups([dict(end, devices=["/dev/nvidia0"]) for end in pairs_of_four()]) == {}


def test_a_barrier_of_a_group_is_not_that_of_the_world() -> None:
    ranks = [rank_of(rank, END, sample={"connections": end}) for rank, end in enumerate(pairs_of_four())]
    for rank in ranks:
        rank["samples"][-1]["stack"]["threads"][0]["frames"][0]["arguments"] = {"own_group": int(rank["rank"] == 3)}
    graph = build_graph(job(ranks))
    assert [graph.waits[rank].members for rank in range(4)] == [(0, 1, 2, 3)] * 3 + [(2, 3)]
    assert graph.blockers[0] == {3}
    conclusion = judge(job(ranks))
    assert (accused(conclusion), conclusion.look_first[0].rank) == ([], 3)


def test_who_holds_the_lock_that_others_ask_for_again_and_again() -> None:
    waiting = rank_of(0, END)
    pollers = [rank_of(rank, POLLED, **SLEEPING) for rank in (1, 2)]
    lock = {"kind": "FLOCK", "mode": "WRITE", "file": "1:2:3", "holder": 100, "waiters": [], "path": "/data/x.lock"}
    assert outcome(judge(node([waiting, *pollers], locks=[lock]))) == ("hang", HangClass.FILE_LOCK_HELD, [0])
    two = [lock, {**lock, "file": "1:2:4"}]
    assert accused(judge(node([waiting, *pollers], locks=two))) != [0]


def test_a_recorder_does_not_show_which_keys_are_awaited() -> None:
    """A recorder that shows no open collective does not show keys of the store."""
    members, calls = {"w": [0, 1, 2]}, "w " * 6
    reader = {"sample": {"system_call": POLL}, **POLLING}
    ranks = [idle(rank_of(rank, WAITING, calls=f"{calls}w!", members=members), 60.0) for rank in (0, 2)]
    ranks.insert(1, idle(rank_of(1, "publish@/src/p.py:4", calls=calls, members=members, **reader), 60.0))
    conclusion = judge(job(ranks))
    assert accused(conclusion) == []
    assert [pointer.rank for pointer in conclusion.look_first[:2]] == [0, 1]


def test_who_reads_a_key_of_the_store_is_not_accused() -> None:
    reader = rank_of(2, "version@/src/vocab.py:8", sample={"system_call": POLL}, **POLLING)
    conclusion = judge(job([rank_of(0, WORLD), rank_of(1, WORLD), reader]))
    assert outcome(conclusion) == ("hang", HangClass.STORE_KEY_MISSING, [])
    assert [pointer.rank for pointer in conclusion.look_first[:2]] == [0, 2]


def test_a_key_of_the_store_is_asked_of_the_rank_that_sets_its_form_and_it_is_not_accused() -> None:
    conclusion = judge(a_key_of_a_known_rank())
    assert accused(conclusion) == []
    assert [pointer.rank for pointer in conclusion.look_first] == [0, 1]
    assert not any(UNKNOWN_SETTER in pointer.why for pointer in conclusion.look_first)


def test_a_build_lock_that_all_ranks_wait_for() -> None:
    conclusion = judge(job([rank_of(rank, BUILD, **SLEEPING) for rank in range(3)]))
    assert outcome(conclusion) == ("hang", HangClass.BUILD_LOCK_STALE, [])
