from __future__ import annotations

from typing import Any

from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.judge.waits import build_graph
from tests.support.texts import has_parts

from ..conftest import make_evidence, rank_of

TP = "all_reduce@c10d:1 < all_reduce@tensor:33 < backward@tensor:68 < step@/src/loop.py:5"
SEND = "send@c10d:1 < PipelineEngine._exec_send_activations@engine:9 < step@/src/loop.py:5"
RECEIVE = "recv@c10d:1 < PipelineEngine._exec_recv_activations@engine:9 < step@/src/loop.py:5"
TIED = "all_reduce@c10d:1 < PipelineEngine._exec_reduce_tied_grads@engine:285"
LOSS = "broadcast@c10d:1 < PipelineEngine._aggregate_total_loss@engine:540"
WORLD = "all_reduce@c10d:1 < check_exit@/src/loop.py:9"
LOADER = "next@/src/data.py:3 < step@/src/loop.py:4"


def graph_of(stacks: list[str], topology: str | None) -> Any:
    return build_graph(make_evidence([rank_of(rank, stack) for rank, stack in enumerate(stacks)], topology))


def test_a_known_frame_says_the_group() -> None:
    graph = graph_of([TP, LOADER, TP, TP], "tp=2,dp=2")
    assert graph.blockers == {0: {1}, 2: set(), 3: set()}
    assert graph.roots == (1,)
    assert (graph.waits[0].scope, graph.waits[0].members) == ("tp", (0, 1))


def test_pipeline_calls_wait_for_the_neighbour_stage() -> None:
    graph = graph_of([LOADER, RECEIVE, RECEIVE, RECEIVE], "pp=4")
    assert graph.blockers == {1: {0}, 2: {1}, 3: {2}}
    assert graph.leading_to(frozenset({0})) == {1, 2, 3}


def test_a_sender_and_its_receiver_meet() -> None:
    assert graph_of([SEND, RECEIVE], "pp=2").blockers == {0: set(), 1: set()}


def test_tied_weights_join_first_and_last_stage() -> None:
    graph = graph_of([TIED, LOADER, LOADER, TIED], "pp=4")
    assert graph.waits[0].members == (0, 3)
    assert graph.blockers[0] == set()


def test_the_loss_is_broadcast_over_the_pipeline() -> None:
    assert graph_of([LOSS, LOADER, LOADER, LOADER], "pp=2,dp=2").waits[0].members == (0, 2)


def test_without_a_topology_everyone_elsewhere_may_be_missing() -> None:
    graph = graph_of([WORLD, WORLD, LOADER], None)
    assert graph.blockers == {0: {2}, 1: {2}}
    assert not graph.is_certain


def test_one_helper_called_from_two_places_is_not_one_collective() -> None:
    """The groups are unknown: a rank that calls the helper for another reason has not reached the same collective."""
    helper = "all_reduce@c10d:1 < reduce@/src/comm.py:5"
    stacks = [f"{helper} < forward@/src/a.py:1", f"{helper} < backward@/src/a.py:9", f"{helper} < forward@/src/a.py:2"]
    assert graph_of(stacks, None).blockers == {0: {1}, 1: {0, 2}, 2: {1}}
    conclusion = judge(make_evidence([rank_of(rank, stack) for rank, stack in enumerate(stacks)]))
    assert (conclusion.hang_class, conclusion.suspects) == (None, ())
    assert has_parts(conclusion.claim, "ranks 0,2", "reduce (comm.py:5)", "forward (a.py)")


def test_the_recorder_knows_who_has_come_and_gone() -> None:
    """Rank 1 has left the broadcast that rank 0 is still in: rank 0 does not wait for rank 1."""
    members = {"w": [0, 1, 2]}
    ranks = [
        rank_of(0, WORLD, calls="w w!", members=members),
        rank_of(1, LOADER, calls="w w", members=members),
        rank_of(2, LOADER, calls="w", members=members),
    ]
    graph = build_graph(make_evidence(ranks))
    assert graph.blockers == {0: {2}}
    assert has_parts(str(graph.waits[0]), "all_reduce number 2")


def test_a_handle_that_is_waited_for_counts_without_a_frame() -> None:
    waiting = rank_of(0, "optimizer_step@/src/loop.py:7", calls="w w!", members={"w": [0, 1]})
    sleeping = rank_of(1, "load@/src/data.py:7", wchan="hrtimer_nanosleep", calls="w w!", members={"w": [0, 1]})
    assert set(build_graph(make_evidence([waiting, sleeping])).waits) == {0}


def test_a_stopped_rank_does_not_wait() -> None:
    assert build_graph(make_evidence([rank_of(0, WORLD), rank_of(1, WORLD, state="T")])).roots == (1,)


def test_ranks_that_alone_break_every_circle() -> None:
    """0 and 1 wait for each other; 2 and 3 only wait for 0: either of the first two breaks the circle."""
    members = {"t": [0, 1], "d": [0, 2, 3], "w": [0, 1, 2, 3]}
    ranks = [
        rank_of(0, WORLD, calls="t!", members=members),
        rank_of(1, WORLD, calls="w!", members=members),
        rank_of(2, WORLD, calls="d!", members=members),
        rank_of(3, WORLD, calls="d!", members=members),
    ]
    graph = build_graph(make_evidence(ranks))
    assert set(graph.endless) == {0, 1, 2, 3}
    assert graph.breaking_ranks() == (0, 1)
