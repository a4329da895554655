"""When several ranks failed: which of them is the cause."""

from __future__ import annotations

from typing import Any

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.run_facts import parse_exit
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass, State
from tests.support.texts import has_parts

from ...conftest import accused, ended, make_evidence, outcome, rank_of

LOST = "[pair.cc:553] Connection closed by peer [10.0.0.3]:23436. This is typically caused by a remote worker crashing."
AMOUNT = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 512 vs 256."


def raised(rank: int, message: str, error_type: str = "RuntimeError") -> dict[str, Any]:
    return {"rank": rank, "node": "n0", "type": error_type, "message": message, "time": 0.0}


def verdict(exits: list[dict[str, Any]], errors: list[dict[str, Any]]) -> Conclusion:
    return judge(make_evidence([], world_size=len(exits), exits=exits, errors=errors))


def test_who_lost_a_peer_is_not_the_cause_even_if_it_ended_first() -> None:
    exits = [ended(0, 1, time=1.0), ended(1, 1, time=2.0), ended(2, 1, time=3.0)]
    errors = [raised(0, LOST), raised(1, "loss is nan", "ValueError"), raised(2, LOST)]
    conclusion = verdict(exits, errors)
    assert accused(conclusion) == [1]
    assert "loss is nan" in conclusion.claim


def test_where_all_lost_a_peer_nobody_is_accused() -> None:
    conclusion = verdict([ended(0, 1, time=1.0), ended(1, 1, time=2.0)], [raised(0, LOST), raised(1, LOST)])
    assert (conclusion.state.value, accused(conclusion)) == ("crashed", [])


@pytest.mark.parametrize(("message", "hang_class"), [(AMOUNT, HangClass.SIZE_DIFFERS), (None, HangClass.RANK_CRASHED)])
def test_an_abort_of_the_transport_or_without_words_accuses_nobody(message: str | None, hang_class: HangClass) -> None:
    errors = [raised(1, LOST), *([raised(0, message, "gloo::EnforceNotMet")] if message else [])]
    assert outcome(verdict([ended(0, signal="SIGABRT", time=1.0), ended(1, 1, time=2.0)], errors)) == (
        "crashed",
        hang_class,
        [],
    )


def test_an_abort_with_words_of_its_own_is_the_cause() -> None:
    errors = [raised(0, "device-side assert triggered", "c10::Error"), raised(1, LOST)]
    assert accused(verdict([ended(0, signal="SIGABRT", time=1.0), ended(1, 1, time=2.0)], errors)) == [0]


def test_a_rank_killed_by_another_signal_is_the_cause() -> None:
    exits = [ended(0, 1, time=1.0), ended(1, signal="SIGKILL", time=2.0)]
    assert accused(verdict(exits, [raised(0, LOST)])) == [1]


REDUCE = "all_reduce@c10d:10 < step@/src/train.py:5"


def test_ranks_that_ended_without_a_record_may_have_ended_well() -> None:
    """A job that `bsl` did not start has no recorded exits: neither a crash nor a culprit follows from that."""
    gone = [rank_of(rank, None, state="gone") for rank in range(4)]
    conclusion = judge(make_evidence(gone))
    assert (conclusion.state.value, accused(conclusion)) == ("unknown", [])
    assert conclusion.sides[0].ranks == (0, 1, 2, 3)
    leaving = [rank_of(rank, "upload@/src/train.py:9") for rank in (1, 2, 3)]
    assert accused(judge(make_evidence([gone[0], *leaving]))) == []


@pytest.mark.parametrize(("dead", "suspects"), [((2,), [2]), ((1, 2), [])])
def test_a_single_one_is_accused_without_a_record_while_others_wait_in_a_collective(
    dead: tuple[int, ...], suspects: list[int]
) -> None:
    ranks = [
        rank_of(rank, None if rank in dead else REDUCE, state="gone" if rank in dead else "S") for rank in range(4)
    ]
    conclusion = judge(make_evidence(ranks, topology="dp=4"))
    assert (conclusion.state.value, accused(conclusion)) == ("crashed", suspects)


def test_ranks_of_another_machine_are_not_accused_of_staying_away() -> None:
    """--pid shows the ranks of one torchrun; the ranks of the other machine may be healthy."""
    sizes = {"world_size": 4, "local_world_size": 2}
    here = [rank_of(rank, REDUCE, **sizes) for rank in range(2)]

    def seen(ranks: list[dict[str, Any]]) -> Conclusion:
        node = {"node": "a", "found_by": "descendants of 9", "clock_ticks_per_s": 100, "ranks": ranks}
        return judge(Bundle({"topology": "dp=4"}, (node,)).evidence())

    assert (seen(here).state.value, accused(seen(here))) == ("unknown", [])
    assert "ranks 2-3" in seen(here).claim
    stuck = seen([here[0], rank_of(1, "load_batch@/src/train.py:7", wchan="hrtimer_nanosleep", **sizes)])
    assert accused(stuck) == [1]


def told(rank: int, code: int | None = None, signal: str | None = None) -> dict[str, Any]:
    return ended(rank, code, signal, time=2.0, terminated=1.0)


@pytest.mark.parametrize("exits", [[told(0, signal="SIGTERM"), told(1)], [told(0, 143), told(1, 1)]])
def test_who_ends_because_the_run_was_ended_has_not_crashed(exits: list[dict[str, Any]]) -> None:
    conclusion = judge(make_evidence([], world_size=2, exits=exits, is_over=True))
    assert has_parts(conclusion.claim, "2 ranks", "asked to stop")
    assert (conclusion.state, conclusion.suspects) == (State.UNKNOWN, ())


def test_a_rank_that_failed_before_the_run_was_ended_is_still_named() -> None:
    exits = [told(0, signal="SIGTERM"), ended(1, 1, time=0.5)]
    conclusion = judge(make_evidence([], world_size=2, exits=exits, is_over=True))
    assert (accused(conclusion), conclusion.state) == ([1], State.CRASHED)
    assert has_parts(conclusion.claim, "rank 1", "exit code 1")


def test_an_end_that_nobody_saw_has_no_exit_code() -> None:
    unseen = ended(1)
    conclusion = judge(make_evidence([], world_size=2, exits=[told(0), unseen], is_over=True))
    assert accused(conclusion) == [1] and "exit code" not in conclusion.claim
    assert (record := parse_exit(unseen)).code is record.signal is None and "code" not in str(record)


def test_who_was_told_to_end_is_not_accused_while_others_still_save() -> None:
    alive = [rank_of(rank, "save@/src/train.py:8") for rank in (1, 2)]
    conclusion = judge(make_evidence(alive, world_size=3, exits=[told(0, signal="SIGTERM")]))
    assert has_parts(conclusion.claim, "1 rank", "2 of 3 ranks")
    assert (conclusion.state, conclusion.suspects) == (State.UNKNOWN, ())


EXPECTED = [{"rank": rank, "node": f"n{rank // 2}", "host": "h", "pid": 9} for rank in range(6)]
AFTER_A_NODE: dict[str, Any] = {
    "expected": EXPECTED,
    "exits": [told(0), told(1), ended(4, 1, time=0.5), told(5)],
    "errors": [raised(4, LOST)],
}


def test_a_silent_node_comes_before_those_that_noticed() -> None:
    silent = [{"node": "n1", "why": "no answer in 40 s"}]
    conclusion = judge(make_evidence([], world_size=6, nodes_silent=silent, **AFTER_A_NODE))
    assert has_parts(conclusion.claim, "ranks 2-3", f"n1: {silent[0]['why']}", "1 rank ", "3 ranks")
    assert (conclusion.suspects, conclusion.hang_class) == ((), HangClass.NODE_LOST), "silent is not lost"
    assert [command.partition("  #")[0] for command in conclusion.next] == ["scontrol show node n1"]
