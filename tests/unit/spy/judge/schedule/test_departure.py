from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from bigsci_launch.spy.judge.conclusion import Reason
from bigsci_launch.spy.judge.schedule.departure import Collective, PeerView, find_departures, find_surprises
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.topology import Topology

from ...conftest import make_evidence, rank_of

WAITING = "all_reduce@c10d:1 < step@/src/loop.py:9"
MEMBERS = {"t0": [0, 1], "t1": [2, 3], "d0": [0, 2], "d1": [1, 3], "w": [0, 1, 2, 3]}


def stream(text: str) -> list[Collective]:
    """`t d w:broadcast`: group, then operation if it is not all_reduce."""
    return [Collective(word.partition(":")[0], word.partition(":")[2] or "all_reduce", "", "") for word in text.split()]


STEP = "a t t t t t t t t d w "


@pytest.mark.parametrize(
    ("more", "expected", "did", "form"),
    [
        ("a t t t t t t t d w", "t", "d", "skip"),
        ("a t t t t t t t t t d", "d", "t", "extra"),
        ("a t t t t t t t t d w:broadcast", "w", "w", "other"),
        ("a t t t t t t t t w", "d", "w", "skip"),
        ("t t t", "a", "t", "skip"),
    ],
)
def test_a_surprise_is_what_never_followed_before(more: str, expected: str, did: str, form: str) -> None:
    for before in ("", "i i i j j j i i i j j j k "):  # what happened once, at the start, proves nothing
        found = find_surprises(0, stream(before + STEP * 4 + more))
        assert [(each.expected[0], each.did[0], each.form) for each in found[-1:]] == [(expected, did, form)]


@pytest.mark.parametrize(
    "calls",
    [
        STEP * 4 + "a t t t t",  # in the middle of an ordinary step
        STEP * 4 + "a t t t t t t t t d w",
        "t " * 40,  # only one kind of collective
        STEP * 2,  # too short to tell
        " ".join(f"k{number}" for number in range(50)),
        STEP * 4 + "a t t t t t t t t d b",  # a group that was never used: possibly a new phase
        "t " * 40 + "d",  # a repetition whose start was not recorded
        "t s " * 20 + "d",
        "d w " + "t " * 20 + "d",
        "d w " + "t " * 20 + "d w " + "t " * 20 + "d",
    ],
)
def test_no_surprise(calls: str) -> None:
    assert find_surprises(0, stream(calls)) == []


ROUND = "t " * 12 + "r "


@pytest.mark.parametrize(
    ("calls", "is_whole", "found"),
    [
        (ROUND * 2 + "t " * 9 + "r", True, [(35, "t", "r")]),
        (ROUND * 2 + "t " * 13, True, [(38, "r", "t")]),
        (ROUND * 3 + "t " * 13, False, [(51, "r", "t")]),
        (ROUND * 2 + "t " * 13, False, []),  # the first round may have begun earlier
        (ROUND + "t " * 9 + "r", True, []),  # one round is no past
        (ROUND * 2 + "t " * 5 + "r " + "t " * 9 + "r", True, [(31, "t", "r")]),  # rows of other lengths have been seen
        (ROUND * 2 + "t " * 9, True, []),
    ],
)
def test_rows_that_always_had_one_length(calls: str, is_whole: bool, found: list[tuple[int, str, str]]) -> None:
    surprises = find_surprises(0, stream(calls), is_whole=is_whole)
    assert [(each.position, each.expected[0], each.did[0]) for each in surprises] == found


def test_steps_that_differ_by_a_check_now_and_then_are_no_surprise() -> None:
    """Every third step ends with one more collective."""
    calls = (STEP + STEP + STEP + "g ") * 5
    assert find_surprises(0, stream(calls + STEP + STEP + "a t t")) == []


def odd(streams: dict[int, list[tuple[str, str, str, str]]], **firsts: int) -> list[int]:
    places = {rank: firsts.get(f"r{rank}", 0) for rank in streams}
    return [departure.rank for departure in PeerView(list(streams), streams, places).odd_ones()]


def test_peers_outvote_the_one_that_differs_whoever_it_is() -> None:
    same, other = stream("t d w t d w"), stream("t d w d w")
    for number in range(3):
        assert odd({rank: other if rank == number else same for rank in range(3)}) == [number]


def test_two_peers_that_differ_are_a_tie() -> None:
    assert odd({0: stream("t d"), 1: stream("t w")}) == []


def test_peers_without_a_recorder_may_have_done_the_same() -> None:
    streams = {rank: stream("t t d w " + ("w" if rank == 1 else "t")) for rank in (1, 2, 3)}
    for known, found in (((1, 2, 3), [1]), ((0, 1, 2, 3), [])):
        view = PeerView(known, streams, dict.fromkeys(streams, 0))
        assert [each.rank for each in view.odd_ones()] == found


def test_a_rank_that_only_stopped_earlier_did_not_depart() -> None:
    assert odd({rank: stream(calls) for rank, calls in enumerate(("t d w t", "t d w t d w", "t d w t d"))}) == []


def test_a_ring_that_wrapped_is_aligned_by_record_numbers() -> None:
    whole = stream("t d w t d w t x w")
    streams = {0: whole[2:7] + stream("d w"), 1: whole[:7] + stream("d w"), 2: whole}
    assert odd(streams, r0=2) == [2]


def test_streams_that_do_not_fit_from_the_start_accuse_nobody() -> None:
    assert odd({0: stream("t d w t"), 1: stream("d w t d"), 2: stream("t d w t")}, r0=5, r1=5, r2=5) == []


def four(*calls: str) -> list[dict[str, Any]]:
    steps = "{t} {t} {d} w " * 6
    ranks = []
    for rank, more in enumerate(calls):
        names = {"t": f"t{rank // 2}", "d": f"d{rank % 2}"}
        members = {name: MEMBERS[name] for name in (*names.values(), "w")}
        words = (steps + more).format(**names)
        ranks.append(rank_of(rank, WAITING, calls=words, members=members))
    return ranks


def test_what_all_did_alike_is_no_departure() -> None:
    """A checkpoint: every rank enters a barrier that no step before had; rank 3 has not reached it yet."""
    ranks = four("w:barrier!", "w:barrier!", "w:barrier!", "")
    assert find_departures(make_evidence(ranks, "tp=2,dp=2")).ranks == ()


def test_past_and_peers_agree_on_a_skipped_collective() -> None:
    ranks = four("{t} {t}!", "{t} {d} w!", "{t} {t} {d}!", "{t} {t} {d} w!")
    found = find_departures(make_evidence(ranks, "tp=2,dp=2"))
    assert list(found.from_past) == [1]
    assert list(found.from_peers) == [1]
    assert found.of(1).expected_group == "t0"


def test_half_of_the_ranks_in_another_phase_are_two_sides() -> None:
    ranks = four("w!", "w!", "{d}:broadcast!", "{d}:broadcast!")
    assert find_departures(make_evidence(ranks, "tp=2,dp=2")).ranks == ()


def test_when_most_ranks_surprise_their_past_the_one_that_does_not_is_not_odd() -> None:
    """Three ranks enter an evaluation, one continues training: who is wrong?"""
    ranks = four("w:gather!", "w:gather!", "{t} {t}!", "w:gather!")
    found = find_departures(make_evidence(ranks, "tp=2,dp=2"))
    assert 2 not in found.from_past
    assert not found.from_peers


def test_a_rank_without_peers_is_judged_by_its_past_alone() -> None:
    """pp=2: the ranks of two stages have different schedules."""
    members = {"w": [0, 1]}
    steps = "w:broadcast w w w w w w w w " * 5
    more = ("w:broadcast w w!", "w:broadcast w w:broadcast!")
    ranks = [rank_of(rank, WAITING, calls=steps + more[rank], members=members) for rank in range(2)]
    found = find_departures(make_evidence(ranks, "pp=2"))
    assert list(found.from_past) == [1]
    assert not found.from_peers


@pytest.mark.parametrize(("cause", "suspects"), [("skip", [9]), ("loader", [])])
def test_from_recorders_alone_ranks_that_wait_for_a_message_are_not_accused(
    synthetic: ModuleType, cause: str, suspects: list[int]
) -> None:
    """Earlier stages of the culprit's replica wait in a receive, which no recorder lists. One look accuses nobody."""
    bundle = synthetic.SyntheticJob(Topology(tp=2, pp=4, dp=2), culprit=9, cause=cause, ring=300).bundle()
    for rank in (rank for node in bundle.nodes for rank in node["ranks"]):
        rank["samples"] = [{"mono": 0.0, "state": "?", "recorder": rank["samples"][-1]["recorder"]}]
    conclusion = judge(bundle.evidence())
    assert (conclusion.state.value, conclusion.suspects) == ("unknown", ())
    accused = [pointer.rank for pointer in conclusion.look_first if pointer.reason is Reason.ACCUSED]
    assert accused == suspects, conclusion.claim
    assert "outside any collective" not in conclusion.claim
