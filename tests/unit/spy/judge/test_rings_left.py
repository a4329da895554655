"""What the rings of a run that has ended show."""

from __future__ import annotations

from bigsci_launch.spy.judge.rings_left import what_rings_show
from tests.support.texts import has_parts

from ..conftest import ended
from .small_cases import all_told_to_end_with_rings, job, one_aborted, ring_of


def test_where_ranks_were_is_shown_if_nothing_differs() -> None:
    (found,) = what_rings_show(all_told_to_end_with_rings())
    assert has_parts(found, "ranks 0-1 were in barrier number 4", "process is gone")


def test_a_rank_without_a_ring_is_not_known_unless_it_ended_well() -> None:
    ring = {"rank": 0, "ring": ring_of((9.0, None, "barrier", "0: 0,1,2", None, 4, 0))}
    exits = [ended(0, signal="SIGTERM", terminated=0.5), ended(1, 1), ended(2, 0)]
    found = what_rings_show(job([], world_size=3, exits=exits, rings=[ring], is_over=True))
    assert len(found) == 2 and has_parts(found[0], "rank 0", "barrier") and has_parts(found[1], "rank 1", "not known")
    assert what_rings_show(job([], world_size=3, exits=exits, is_over=True)) == ()


def test_what_differs_comes_before_where_they_were() -> None:
    (found,) = what_rings_show(one_aborted())
    assert has_parts(found, "rank 1", "all_reduce of [[8]]", "[[4]]")
