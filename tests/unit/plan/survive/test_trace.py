"""Failure traces: what is read, what is refused, and what a strategy trains under them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import DataError
from bigsci_launch.plan.survive.trace import FailureTrace, NodeEvent, Strategy, parse_trace, regular, replay

ROWS = Path(__file__).parents[4] / "benchmarks/rows"
LINEAR = Strategy("linear", float, lambda before, after: 0.0)


def counts(trace: FailureTrace) -> list[tuple[float, float, int]]:
    return [(span.begin, span.end, span.num_nodes) for span in trace.spans]


def test_own_trace_starts_with_the_nodes_added_at_second_0() -> None:
    text = "seconds,event,node\n0,add,a\n0,add,b\n60.5,remove,a\n100,add,c\n"
    assert counts(parse_trace(text, "t.csv")) == [(0, 60.5, 2), (60.5, 100, 1), (100, 100, 2)]


def test_own_trace_of_losses_only_starts_with_the_nodes_of_the_plan() -> None:
    trace = parse_trace("seconds,event,node\n\n10,remove,\n20,remove,n7\n", "t.csv", 4)
    assert counts(trace) == [(0, 10, 4), (10, 20, 3), (20, 20, 2)]


def test_a_file_without_a_header_counts_milliseconds_from_its_first_event() -> None:
    trace = parse_trace("480000,add,node1\n480000,add,node2\n481500,remove,node1\n", "gcp.csv", 30)
    assert counts(trace) == [(0, 1.5, 2), (1.5, 1.5, 1)]


def test_events_of_one_second_are_one_change_even_if_the_number_stays() -> None:
    trace = parse_trace("seconds,event,node\n0,add,a\n0,add,b\n5,add,c\n5,remove,a\n9,remove,b\n9,remove,c\n", "t.csv")
    assert counts(trace) == [(0, 5, 2), (5, 9, 2), (9, 9, 0)]
    assert replay(trace, LINEAR).num_changes == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: "),
        ("seconds,event,node\n", "t.csv: "),
        ("seconds,event,node\n0,add,a\n\n1,remove\n", "t.csv:4: '1,remove'"),
        ("seconds,event,node\n0,add,a\nsoon,remove,a\n", "t.csv:3: 'soon'"),
        ("seconds,event,node\nnan,add,a\n", "t.csv:2: 'nan'"),
        ("seconds,event,node\n-1,add,a\n", "t.csv:2: '-1'"),
        ("0,add,a\n1.5,remove,a\n", "t.csv:2: '1.5'"),
        ("seconds,event,node\n0,add,a\n9,add,b\n3,remove,a\n", "t.csv:4: '3'"),
        ("seconds,event,node\n0,add,a\n1,reboot,a\n", "t.csv:3: 'reboot'"),
        ("seconds,event,node\n0,add,a\n1,remove,b\n", "t.csv:3: 'b'"),
        ("seconds,event,node\n0,add,a\n1,add,a\n", "t.csv:3: 'a'"),
        ("seconds,event,node\n0,add,\n1,remove,\n2,remove,\n", "t.csv:4: "),
    ],
)
def test_a_bad_row_is_named(text: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_trace(text, "t.csv")
    assert error.value.message.startswith(message) and error.value.hint


def test_a_node_cannot_be_lost_twice_in_a_trace_of_losses_only() -> None:
    with pytest.raises(DataError, match="3: 'a' is removed"):
        parse_trace("seconds,event,node\n1,remove,a\n2,remove,a\n", "t.csv", 9)


def test_regular_is_the_artifacts_shape() -> None:
    trace = regular(30, 15, 3600)
    text = "".join(f"0,add,node{n}\n" for n in range(30)) + "".join(
        f"{3_600_000 * (n + 1)},remove,node{n}\n" for n in range(15)
    )
    assert trace.spans == parse_trace(text, "1h.csv").spans
    assert (trace.end, trace.spans[-1].num_nodes, trace.spans[-1].seconds) == (54_000, 15, 0)
    with pytest.raises(ValueError, match="31 of 30"):
        regular(30, 31, 60)


@pytest.mark.parametrize(
    ("name", "hours", "start", "adds", "removals"), [("ec2-p3", 11.37, 20, 157, 142), ("gcp-a2", 10.63, 15, 89, 72)]
)
def test_the_artifacts_spot_traces_have_its_counts(
    name: str, hours: float, start: int, adds: int, removals: int
) -> None:
    trace = parse_trace((ROWS / f"{name}-trace.csv").read_text(), name)
    assert trace.end / 3600 == pytest.approx(hours, abs=0.005)
    assert (trace.num_nodes, trace.most_nodes) == (start, 30)
    assert sum(event.change == "add" for event in trace.events) == adds - start
    assert sum(event.change == "remove" for event in trace.events) == removals


def test_a_pause_trains_nothing_and_a_change_during_it_begins_another() -> None:
    strategy = Strategy("s", lambda n: 10.0 * n, lambda before, after: 30.0)
    trace = FailureTrace(4, (NodeEvent(100, "remove"), NodeEvent(110, "remove"), NodeEvent(200, "remove")), 300)
    found = replay(trace, strategy)
    assert found.samples == 40 * 100 + 0 + 20 * (90 - 30) + 10 * (100 - 30)
    assert (found.paused_s, found.stopped_s, found.num_changes) == (10 + 30 + 30, 0, 3)
    assert found.effective_share == pytest.approx(found.samples / (40 * 300))


def test_a_longer_pause_is_not_cut_short_by_a_shorter_one() -> None:
    strategy = Strategy("s", float, lambda before, after: 80.0 if after == 3 else 5.0)
    trace = FailureTrace(4, (NodeEvent(100, "remove"), NodeEvent(110, "remove")), 300)
    assert replay(trace, strategy).paused_s == 80


def test_too_few_nodes_are_a_stop_and_not_a_pause() -> None:
    strategy = Strategy("s", lambda n: n if n > 2 else 0, lambda before, after: 20.0)
    trace = FailureTrace(3, (NodeEvent(50, "remove"), NodeEvent(150, "add")), 250)
    found = replay(trace, strategy)
    assert (found.samples, found.paused_s, found.stopped_s) == (3 * 50 + 3 * 80, 20, 100)


def test_nothing_to_compare_with_is_an_error() -> None:
    with pytest.raises(ValueError, match="to compare"):
        replay(regular(4, 0, 60), LINEAR)
    with pytest.raises(ValueError, match="to compare"):
        replay(regular(4, 2, 60), Strategy("s", lambda n: 0, lambda before, after: 0))


@given(
    st.integers(5, 40),
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["add", "remove"])), max_size=12),
    st.integers(0, 40),
)
def test_seconds_add_up_and_the_share_is_at_most_one(
    num_nodes: int, changes: list[tuple[int, str]], pause: int
) -> None:
    events, at, here = [], 0, num_nodes
    for gap, change in changes:
        at += gap
        if change == "add" or here > 0:
            here += 1 if change == "add" else -1
            events.append(NodeEvent(float(at), "add" if change == "add" else "remove"))
    trace = FailureTrace(num_nodes, tuple(events), at + 10.0)
    found = replay(trace, Strategy("s", lambda n: float(n) if n > 3 else 0.0, lambda before, after: float(pause)))
    assert trace.spans[0].begin == 0 and trace.spans[-1].end == found.seconds == at + 10.0
    assert 0 <= found.effective_share <= 1
    assert found.paused_s + found.stopped_s <= found.seconds + 1e-9
