"""Who takes part in the next generation."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.recover.generation import LineUp, Seat
from bigsci_launch.recover.holding import keepers
from bigsci_launch.recover.members import BatchSizes, HeldStates, Rules, WantedLayout, line_up
from bigsci_launch.topology import Topology

from .conftest import seats_on


def numbers(line: LineUp | str) -> list[int]:
    assert isinstance(line, LineUp), line
    return [seat.number for seat in line.seats]


def first(topology: Topology, seats: list[Seat], **more: object) -> tuple[WantedLayout, LineUp]:
    wanted = WantedLayout(topology, **{"shrink": True, **more})  # type: ignore[arg-type]
    line = line_up(wanted, {seat.number: seat for seat in seats}, None)
    assert isinstance(line, LineUp)
    return wanted, line


def after(wanted: WantedLayout, before: LineUp, seats: list[Seat], *lost: int) -> LineUp | str:
    return line_up(wanted, {seat.number: seat for seat in seats if seat.number not in lost}, before)


def test_ranks_meet_at_the_name_of_a_node_unless_slurm_has_another_address_for_it() -> None:
    near, far = seats_on(1, 1)
    addresses = {far.node: "10.0.0.7"}
    rules = Rules("restart", WantedLayout(Topology(dp=2), shrink=False), 2, address_suffix="-ib", addresses=addresses)
    assert [rules.address_of(seat) for seat in (near, far)] == [f"{near.node}-ib", "10.0.0.7"]
    assert Rules("restart", WantedLayout(Topology(dp=2), shrink=False), 2).address_of(near) == "127.0.0.1"


def test_the_first_generation_takes_seats_in_order_and_whole_nodes_first() -> None:
    seats = seats_on(2, 2, 2)
    assert numbers(first(Topology(dp=4), seats)[1]) == [0, 1, 2, 3]
    assert numbers(first(Topology(dp=4), [seat for seat in seats if seat.number != 1])[1]) == [2, 3, 4, 5]


def test_a_spare_seat_takes_the_place_of_a_lost_one_and_the_others_keep_their_ranks() -> None:
    seats = seats_on(3, 3)
    wanted, before = first(Topology(pp=2, dp=2), seats)
    assert numbers(before) == [0, 1, 2, 3]
    assert numbers(after(wanted, before, seats, 1)) == [0, 4, 2, 3], "the same local rank on another node"
    assert numbers(after(wanted, before, seats, 3)) == [0, 1, 2, 4], "the same node"


def test_a_spare_on_the_same_node_is_nearer_than_one_with_the_same_local_rank() -> None:
    seats = seats_on(3, 3)
    wanted, before = first(Topology(dp=2), seats)
    assert numbers(after(wanted, before, seats, 1)) == [0, 2]


def test_the_smallest_spare_node_that_suffices_is_taken() -> None:
    seats = seats_on(1, 2, 1)
    wanted = WantedLayout(Topology(), shrink=False)
    assert numbers(after(wanted, LineUp(Topology(), (seats[0],)), seats, 0)) == [3]


def test_a_whole_spare_node_takes_the_place_of_a_lost_one() -> None:
    seats = seats_on(2, 2, 1, 2)
    wanted, before = first(Topology(tp=2, dp=2), seats)
    assert numbers(before) == [0, 1, 2, 3]
    assert numbers(after(wanted, before, seats, 0, 1)) == [5, 6, 2, 3]


def test_ranks_of_a_lost_node_are_spread_if_no_spare_node_holds_them() -> None:
    seats = seats_on(2, 2, 1, 1)
    wanted, before = first(Topology(dp=4), seats)
    assert numbers(after(wanted, before, seats, 0, 1)) == [4, 5, 2, 3]


def test_without_spares_the_most_complete_replicas_are_left() -> None:
    seats = seats_on(2, 2, 2)
    wanted, before = first(Topology(pp=2, dp=3), seats)
    line = after(wanted, before, seats, 1)
    assert isinstance(line, LineUp)
    assert (line.topology.dp, numbers(line)) == (2, [0, 2, 3, 5]), "replica 1 had its first stage in seat 1"


def test_replicas_leave_so_that_the_state_of_all_is_still_held() -> None:
    seats = seats_on(1, 1, 1, 1, 1, 1, 1, 1)
    wanted, before = first(Topology(dp=8), seats, batches=BatchSizes(1, (8,)))
    held_by = keepers([seat.node for seat in before.seats], range(8))
    for lost in range(8):
        stay = numbers(after(wanted, before, seats, lost))
        assert len(stay) == 4
        assert all(rank in stay or held_by[rank] in stay for rank in range(8)), f"{lost} is lost, and {stay} stay"


def test_one_lost_seat_costs_no_state_where_two_replicas_become_one() -> None:
    for sizes, topology in (
        ((4,), Topology(tp=2, dp=2)),
        ((4,), Topology(pp=2, dp=2)),
        ((2, 2), Topology(pp=2, dp=2)),
        ((2, 2), Topology(tp=2, dp=2)),
        ((4, 4), Topology(tp=2, pp=2, dp=2)),
    ):
        seats = seats_on(*sizes)
        wanted, before = first(topology, seats)
        for lost in range(topology.world_size):
            line = after(wanted, before, seats, lost)
            assert isinstance(line, LineUp) and line.topology.dp == 1
            held = HeldStates(before, {seat.number: seat for seat in seats if seat.number != lost})
            assert held.num_lost(line) == 0, (sizes, topology, lost)


def test_two_damaged_replicas_make_one_whole() -> None:
    seats = seats_on(1, 1, 1, 1)
    wanted, before = first(Topology(pp=2, dp=2), seats)
    line = after(wanted, before, seats, 0, 3)
    assert numbers(line) == [1, 2], "the first stage of replica 1 and the second of replica 0"


def test_a_rank_with_the_state_of_a_place_is_better_there_than_a_spare() -> None:
    seats = [Seat(number, node, node, 0, 0) for number, node in enumerate("abcdc")]
    topology = Topology(pp=2, dp=2)
    line = after(WantedLayout(topology, shrink=True), LineUp(topology, tuple(seats[:4])), seats, 1, 2)
    assert numbers(line) == [0, 3], "seat 4 is on the node of the lost one, but seat 3 has its stage"


def test_the_global_batch_is_kept_or_nobody_takes_part() -> None:
    seats = seats_on(1, 1, 1, 1)
    wanted, before = first(Topology(dp=4), seats, batches=BatchSizes(1, (4, 8)))
    line = after(wanted, before, seats, 2)
    assert isinstance(line, LineUp)
    assert line.topology.dp == 2, "3 replicas cannot share a batch of 4"
    wanted, before = first(Topology(dp=4), seats, batches=BatchSizes(3, (36, 72)))
    assert numbers(after(wanted, before, seats, 0)) == [1, 2, 3], "12 samples for each of 3 replicas"
    wanted, before = first(Topology(pp=2, dp=2), seats, batches=BatchSizes(2, (5,)))
    assert isinstance(after(wanted, before, seats, 0), str)


def test_it_says_why_nobody_can_take_part(check_text: Any) -> None:
    pipelines, replica = Topology(pp=2, dp=2), Topology(tp=2, pp=2)
    refused = [(pipelines, {"shrink": False}), (replica, {}), (pipelines, {"batches": BatchSizes(2, (5,))})]
    firsts = [first(topology, seats_on(2, 2), **more) for topology, more in refused]
    check_text(*(str(after(wanted, before, seats_on(2, 2), 0)) for wanted, before in firsts))


def test_a_shrunken_layout_grows_again_around_those_that_are_there() -> None:
    seats = seats_on(2, 2)
    wanted, before = first(Topology(pp=2, dp=2), seats)
    shrunken = after(wanted, before, seats, 1)
    assert isinstance(shrunken, LineUp)
    assert numbers(shrunken) == [0, 2]
    grown = line_up(wanted, {seat.number: seat for seat in seats}, shrunken)
    assert numbers(grown) == [0, 1, 2, 3], "seats 0 and 2 keep their stages"


@st.composite
def losses(draw: st.DrawFn) -> tuple[Topology, list[Seat], set[int]]:
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("tp", "pp", "dp", "ep")}
    topology = Topology(**sizes)
    per_node = draw(st.integers(1, 4))
    num_nodes = -(-topology.world_size // per_node) + draw(st.integers(0, 2))
    seats = seats_on(*[per_node] * num_nodes)
    return topology, seats, draw(st.sets(st.sampled_from([seat.number for seat in seats])))


@given(losses())
def test_whoever_is_lost_every_rank_has_one_seat_that_is_left(case: tuple[Topology, list[Seat], set[int]]) -> None:
    topology, seats, lost = case
    wanted, before = first(topology, seats)
    line = after(wanted, before, seats, *lost)
    replica = topology.world_size // topology.dp
    dp = min(topology.dp, (len(seats) - len(lost)) // replica)
    if dp == 0:
        assert isinstance(line, str)
        return
    assert isinstance(line, LineUp)
    assert line.topology == topology.resized(dp=dp)
    assert len(set(numbers(line))) == line.topology.world_size
    assert not set(numbers(line)) & lost
    if dp == topology.dp:
        kept = [rank for rank, seat in enumerate(numbers(before)) if seat not in lost]
        assert [numbers(line)[rank] for rank in kept] == [numbers(before)[rank] for rank in kept]
