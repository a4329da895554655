from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.departure import depart_from_past, depart_from_peers, find_departures
from bigsci_launch.spy.evidence import Evidence

MakeRank = Callable[..., dict[str, Any]]
MakeEvidence = Callable[..., Evidence]
WAITING = "all_reduce@c10d:1 < step@/src/loop.py:9"
MEMBERS = {"t0": [0, 1], "t1": [2, 3], "d0": [0, 2], "d1": [1, 3], "w": [0, 1, 2, 3]}


def stream(text: str) -> list[tuple[str, str, str, str]]:
    return [(word, "all_reduce", "", "") for word in text.split()]


@pytest.mark.parametrize(
    ("calls", "expected", "did", "form"),
    [
        ("t t d w t t d w t t d w t d w", "t", "d", "skip"),
        ("t t d w t t d w t t d w t t t d", "d", "t", "extra"),
        ("t t d w t t d w t t d w b", "t", "b", "other"),
        ("i i t t d w t t d w t t d w t t w", "d", "w", "skip"),
    ],
)
def test_a_departure_from_ones_own_past(calls: str, expected: str, did: str, form: str) -> None:
    found = depart_from_past(0, stream(calls))
    assert found is not None
    assert (found.expected[0], found.did[0], found.form) == (expected, did, form)


@pytest.mark.parametrize(
    "calls",
    [
        "t t d w t t d w t t d w t",  # in the middle of a step like all others
        "t t t t t t t t",  # nothing but one kind
        "t t d w t t d w",  # too short to know
        "a b c d e f g",
    ],
)
def test_no_departure(calls: str) -> None:
    assert depart_from_past(0, stream(calls)) is None


def test_peers_outvote_the_one_that_differs_whoever_it_is() -> None:
    same, other = stream("t d w t d w"), stream("t d w d w")
    for odd in range(3):
        streams = {rank: other if rank == odd else same for rank in range(3)}
        found = depart_from_peers([0, 1, 2], streams, {0: 0, 1: 0, 2: 0})
        assert [departure.rank for departure in found] == [odd]


def test_two_peers_that_differ_are_a_tie() -> None:
    assert depart_from_peers([0, 1], {0: stream("t d"), 1: stream("t w")}, {0: 0, 1: 0}) == []


def test_a_rank_that_only_stopped_earlier_did_not_depart() -> None:
    streams = {0: stream("t d w t"), 1: stream("t d w t d w"), 2: stream("t d w t d")}
    assert depart_from_peers([0, 1, 2], streams, {0: 0, 1: 0, 2: 0}) == []


def test_a_ring_that_wrapped_is_aligned_by_record_numbers() -> None:
    whole = stream("t d w t d w t x w")
    streams = {0: whole[2:7] + stream("d w"), 1: whole[:7] + stream("d w"), 2: whole}
    found = depart_from_peers([0, 1, 2], streams, {0: 2, 1: 0, 2: 0})
    assert [departure.rank for departure in found] == [2]


def test_streams_that_do_not_fit_from_the_start_accuse_nobody() -> None:
    streams = {0: stream("t d w t"), 1: stream("d w t d"), 2: stream("t d w t")}
    assert depart_from_peers([0, 1, 2], streams, {0: 5, 1: 5, 2: 5}) == []


def four(make_rank: MakeRank, *calls: str) -> list[dict[str, Any]]:
    steps = "{t} {t} {d} w " * 4
    ranks = []
    for rank, more in enumerate(calls):
        names = {"t": f"t{rank // 2}", "d": f"d{rank % 2}"}
        members = {name: MEMBERS[name] for name in (*names.values(), "w")}
        words = (steps + more).format(**names)
        ranks.append(make_rank(rank, WAITING, calls=words, members=members))
    return ranks


def test_what_all_did_alike_is_no_departure(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    """A checkpoint: every rank enters a barrier that no step before had; rank 3 has not come to it yet."""
    ranks = four(make_rank, "w:barrier!", "w:barrier!", "w:barrier!", "")
    assert find_departures(make_evidence(ranks, "tp=2,dp=2")).ranks == ()


def test_past_and_peers_agree_on_a_skipped_collective(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = four(make_rank, "{t} {t}!", "{t} {d} w!", "{t} {t} {d}!", "{t} {t} {d} w!")
    found = find_departures(make_evidence(ranks, "tp=2,dp=2"))
    assert list(found.from_past) == [1]
    assert list(found.from_peers) == [1]
    assert found.of(1).expected_group == "t0"


def test_half_of_the_ranks_in_another_phase_depart_on_both_sides(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    ranks = four(make_rank, "w!", "w!", "{d}:broadcast!", "{d}:broadcast!")
    found = find_departures(make_evidence(ranks, "tp=2,dp=2"))
    assert set(found.from_past) == {0, 1, 2, 3}
    assert not found.from_peers
