"""The rules of the verdict, and which of them say more than others."""

from __future__ import annotations

from bigsci_launch.spy.judge.rule import Match, Rule
from bigsci_launch.spy.judge.rules import (
    alike,
    away,
    circle,
    failures,
    left_behind,
    moving,
    network,
    not_read,
    rendezvous,
    work,
)


def _rule(match: Match, beats: str, source: str = "", shown_by: str = "", silent_on: str = "") -> Rule:
    return Rule(match.__name__.replace("_", "-"), match, tuple(beats.split()), source, shown_by, silent_on)


RULES = (
    _rule(moving.nothing_found, ""),
    _rule(failures.all_ended_well, ""),
    _rule(failures.all_lost_a_peer, "rank-ended"),
    _rule(failures.ended_in_silence, "rank-ended"),
    _rule(failures.aborted_on_size, "rank-ended"),
    _rule(failures.rank_ended, "stays-away cannot-be-read may-be-victims one-place in-places"),
    _rule(moving.still_joining, "makes-progress"),
    _rule(moving.one_is_late, "makes-progress"),
    _rule(moving.makes_progress, "leaving not-read stays-away may-be-victims departed"),
    _rule(moving.data_flows, "all-at-work odd-at-work all-compute one-place in-places"),
    _rule(moving.most_moved, "all-compute one-place in-places"),
    _rule(work.leaving, "one-place"),
    _rule(network.link_carries_nothing, "not-read stays-away unfinished"),
    _rule(left_behind.left_behind, "may-be-victims"),
    _rule(not_read.not_read_but_recorded, "not-read stays-away cannot-be-read"),
    _rule(not_read.not_read, "all-at-work stays-away cannot-be-read"),
    _rule(away.all_at_work, "some-at-work may-be-victims"),
    _rule(away.stays_away, "cannot-be-read may-be-victims each-other"),
    _rule(away.some_at_work, ""),
    _rule(away.cannot_be_read, ""),
    _rule(away.may_be_victims, ""),
    _rule(rendezvous.store_not_reached, "stands-alone"),
    _rule(rendezvous.store_reached_by_nobody, ""),
    _rule(circle.departed, "operations-differ"),
    _rule(circle.operations_differ, "unfinished"),
    _rule(circle.roots_differ, "unfinished"),
    _rule(circle.unfinished, "each-other"),
    _rule(circle.stands_alone, "each-other"),
    _rule(circle.norms_differ, "each-other"),
    _rule(circle.new_collective, "each-other"),
    _rule(circle.each_other, "different-places"),
    _rule(circle.different_places, "all-together"),
    _rule(alike.all_together, ""),
    _rule(alike.all_compute, "one-place"),
    _rule(alike.odd_at_work, "odd-one-out"),
    _rule(alike.odd_one_out, "in-places"),
    _rule(alike.one_place, ""),
    _rule(alike.in_places, ""),
)
