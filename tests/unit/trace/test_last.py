"""Ranks that called the same are one group; a rank without a ring says why."""

from __future__ import annotations

from typing import Any

from bigsci_launch.spy.evidence.calls.ring import parse_ring
from bigsci_launch.trace.last import RankCalls, document_of, group_ranks, words_of
from tests.support.texts import has_parts


def call(operation: str, left: float | None = 2.0, number: int = 1, **more: Any) -> list[Any]:
    found = {"group": "0: 0,1", "place": "a.py:3 f", "tensors": None, "peer": None, "tag": None, **more}
    facts = [found[name] for name in ("group", "place", "tensors", "peer", "tag")]
    return [1.0, left, operation, *facts, number, 4, False]


def rank(number: int, *calls: list[Any], step: int = 4) -> RankCalls:
    recorder = {"first_record": 0, "tokens": [], "stream": [], "last_sequence": {}, "open": [], "members": {}}
    document = {
        **{"step": step, "phase": "step", "heartbeat": 3.0, "read": 4.0, "lost_names": 0, "lost_threads": 0},
        "threads": [{"tid": 7, "last": list(calls), "open": [each for each in calls if each[1] is None]}],
        **{"set_keys": [], "recorder": recorder},
    }
    return RankCalls(f"rank {number}", number, parse_ring(document), None)


def test_the_odd_rank_comes_first_and_an_unknown_one_is_said() -> None:
    same = call("all_reduce", None, number=7)
    gone = RankCalls("rank 3", 3, None, "no such file")
    ranks = [rank(0, same), rank(1, call("recv", None, number=0, peer=0, tag=8)), rank(2, same), gone]
    groups = group_ranks(ranks, 8)
    assert [group.name for group in groups] == ["rank 1", "ranks 0,2"]
    lines = list(words_of(groups, ranks))
    assert lines[0] == "rank 1: step 4, step"
    assert has_parts(lines[1], "00:00:01.000000", "not ended", "recv from rank 0", "tag 8", "a.py:3 f")
    assert has_parts(lines[-1], "rank 3: ", "no such file")
    assert [each["why_unknown"] for each in document_of(ranks, groups, 8)["ranks"]] == [None] * 3 + ["no such file"]


def test_ranks_in_different_steps_differ() -> None:
    assert len(group_ranks([rank(0, call("all_reduce")), rank(1, call("all_reduce"), step=5)], 8)) == 2


def test_a_call_that_has_not_ended_is_shown_however_old_it_is() -> None:
    ranks = [rank(0, call("barrier", None), *(call("all_reduce", number=at) for at in range(20)))]
    assert [each.operation for each in group_ranks(ranks, 2)[0].calls] == ["barrier", "all_reduce", "all_reduce"]
