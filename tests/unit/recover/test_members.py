"""Who takes part in the next generation."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.recover.generation import Membership, Slot
from bigsci_launch.recover.holding import keepers
from bigsci_launch.recover.members import BatchSizes, HeldStates, Rules, WantedLayout, choose_members
from bigsci_launch.topology import Topology

from .conftest import slots_on


def numbers(line: Membership | str) -> list[int]:
    assert isinstance(line, Membership), line
    return [slot.number for slot in line.slots]


def first(topology: Topology, slots: list[Slot], **more: object) -> tuple[WantedLayout, Membership]:
    wanted = WantedLayout(topology, **{"shrink": True, **more})  # type: ignore[arg-type]
    line = choose_members(wanted, {slot.number: slot for slot in slots}, None)
    assert isinstance(line, Membership)
    return wanted, line


def after(wanted: WantedLayout, before: Membership, slots: list[Slot], *lost: int) -> Membership | str:
    return choose_members(wanted, {slot.number: slot for slot in slots if slot.number not in lost}, before)


def test_ranks_meet_at_the_name_of_a_node_unless_slurm_has_another_address_for_it() -> None:
    near, far = slots_on(1, 1)
    addresses = {far.node: "10.0.0.7"}
    rules = Rules("restart", WantedLayout(Topology(dp=2), shrink=False), 2, address_suffix="-ib", addresses=addresses)
    assert [rules.address_of(slot) for slot in (near, far)] == [f"{near.node}-ib", "10.0.0.7"]
    assert Rules("restart", WantedLayout(Topology(dp=2), shrink=False), 2).address_of(near) == "127.0.0.1"


def test_the_first_generation_takes_slots_in_order_and_whole_nodes_first() -> None:
    slots = slots_on(2, 2, 2)
    assert numbers(first(Topology(dp=4), slots)[1]) == [0, 1, 2, 3]
    assert numbers(first(Topology(dp=4), [slot for slot in slots if slot.number != 1])[1]) == [2, 3, 4, 5]


def test_a_spare_slot_takes_the_place_of_a_lost_one_and_the_others_keep_their_ranks() -> None:
    slots = slots_on(3, 3)
    wanted, before = first(Topology(pp=2, dp=2), slots)
    assert numbers(before) == [0, 1, 2, 3]
    assert numbers(after(wanted, before, slots, 1)) == [0, 4, 2, 3], "the same local rank on another node"
    assert numbers(after(wanted, before, slots, 3)) == [0, 1, 2, 4], "the same node"


def test_a_spare_on_the_same_node_is_nearer_than_one_with_the_same_local_rank() -> None:
    slots = slots_on(3, 3)
    wanted, before = first(Topology(dp=2), slots)
    assert numbers(after(wanted, before, slots, 1)) == [0, 2]


def test_the_smallest_spare_node_that_suffices_is_taken() -> None:
    slots = slots_on(1, 2, 1)
    wanted = WantedLayout(Topology(), shrink=False)
    assert numbers(after(wanted, Membership(Topology(), (slots[0],)), slots, 0)) == [3]


def test_a_whole_spare_node_takes_the_place_of_a_lost_one() -> None:
    slots = slots_on(2, 2, 1, 2)
    wanted, before = first(Topology(tp=2, dp=2), slots)
    assert numbers(before) == [0, 1, 2, 3]
    assert numbers(after(wanted, before, slots, 0, 1)) == [5, 6, 2, 3]


def test_ranks_of_a_lost_node_are_spread_if_no_spare_node_holds_them() -> None:
    slots = slots_on(2, 2, 1, 1)
    wanted, before = first(Topology(dp=4), slots)
    assert numbers(after(wanted, before, slots, 0, 1)) == [4, 5, 2, 3]


def test_without_spares_the_most_complete_replicas_are_left() -> None:
    slots = slots_on(2, 2, 2)
    wanted, before = first(Topology(pp=2, dp=3), slots)
    line = after(wanted, before, slots, 1)
    assert isinstance(line, Membership)
    assert (line.topology.dp, numbers(line)) == (2, [0, 2, 3, 5]), "replica 1 had its first stage in slot 1"


def test_replicas_leave_so_that_the_state_of_all_is_still_held() -> None:
    slots = slots_on(1, 1, 1, 1, 1, 1, 1, 1)
    wanted, before = first(Topology(dp=8), slots, batches=BatchSizes(1, (8,)))
    held_by = keepers([slot.node for slot in before.slots], range(8))
    for lost in range(8):
        stay = numbers(after(wanted, before, slots, lost))
        assert len(stay) == 4
        assert all(rank in stay or held_by[rank] in stay for rank in range(8)), f"{lost} is lost, and {stay} stay"


def test_one_lost_slot_costs_no_state_where_two_replicas_become_one() -> None:
    for sizes, topology in (
        ((4,), Topology(tp=2, dp=2)),
        ((4,), Topology(pp=2, dp=2)),
        ((2, 2), Topology(pp=2, dp=2)),
        ((2, 2), Topology(tp=2, dp=2)),
        ((4, 4), Topology(tp=2, pp=2, dp=2)),
    ):
        slots = slots_on(*sizes)
        wanted, before = first(topology, slots)
        for lost in range(topology.world_size):
            line = after(wanted, before, slots, lost)
            assert isinstance(line, Membership) and line.topology.dp == 1
            held = HeldStates(before, {slot.number: slot for slot in slots if slot.number != lost})
            assert held.num_lost(line) == 0, (sizes, topology, lost)


def test_two_damaged_replicas_make_one_whole() -> None:
    slots = slots_on(1, 1, 1, 1)
    wanted, before = first(Topology(pp=2, dp=2), slots)
    line = after(wanted, before, slots, 0, 3)
    assert numbers(line) == [1, 2], "the first stage of replica 1 and the second of replica 0"


def test_a_rank_with_the_state_of_a_place_is_better_there_than_a_spare() -> None:
    slots = [Slot(number, node, node, 0, 0) for number, node in enumerate("abcdc")]
    topology = Topology(pp=2, dp=2)
    line = after(WantedLayout(topology, shrink=True), Membership(topology, tuple(slots[:4])), slots, 1, 2)
    assert numbers(line) == [0, 3], "slot 4 is on the node of the lost one, but slot 3 has its stage"


def test_the_global_batch_is_kept_or_nobody_takes_part() -> None:
    slots = slots_on(1, 1, 1, 1)
    wanted, before = first(Topology(dp=4), slots, batches=BatchSizes(1, (4, 8)))
    line = after(wanted, before, slots, 2)
    assert isinstance(line, Membership)
    assert line.topology.dp == 2, "3 replicas cannot share a batch of 4"
    wanted, before = first(Topology(dp=4), slots, batches=BatchSizes(3, (36, 72)))
    assert numbers(after(wanted, before, slots, 0)) == [1, 2, 3], "12 samples for each of 3 replicas"
    wanted, before = first(Topology(pp=2, dp=2), slots, batches=BatchSizes(2, (5,)))
    assert isinstance(after(wanted, before, slots, 0), str)


def test_it_says_why_nobody_can_take_part(check_text: Any) -> None:
    pipelines, replica = Topology(pp=2, dp=2), Topology(tp=2, pp=2)
    refused = [(pipelines, {"shrink": False}), (replica, {}), (pipelines, {"batches": BatchSizes(2, (5,))})]
    firsts = [first(topology, slots_on(2, 2), **more) for topology, more in refused]
    check_text(*(str(after(wanted, before, slots_on(2, 2), 0)) for wanted, before in firsts))


def test_a_shrunken_layout_grows_again_around_those_that_are_there() -> None:
    slots = slots_on(2, 2)
    wanted, before = first(Topology(pp=2, dp=2), slots)
    shrunken = after(wanted, before, slots, 1)
    assert isinstance(shrunken, Membership)
    assert numbers(shrunken) == [0, 2]
    grown = choose_members(wanted, {slot.number: slot for slot in slots}, shrunken)
    assert numbers(grown) == [0, 1, 2, 3], "slots 0 and 2 keep their stages"


@st.composite
def losses(draw: st.DrawFn) -> tuple[Topology, list[Slot], set[int]]:
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("tp", "pp", "dp", "ep")}
    topology = Topology(**sizes)
    per_node = draw(st.integers(1, 4))
    num_nodes = -(-topology.world_size // per_node) + draw(st.integers(0, 2))
    slots = slots_on(*[per_node] * num_nodes)
    return topology, slots, draw(st.sets(st.sampled_from([slot.number for slot in slots])))


@given(losses())
def test_whoever_is_lost_every_rank_has_one_slot_that_is_left(case: tuple[Topology, list[Slot], set[int]]) -> None:
    topology, slots, lost = case
    wanted, before = first(topology, slots)
    line = after(wanted, before, slots, *lost)
    replica = topology.world_size // topology.dp
    dp = min(topology.dp, (len(slots) - len(lost)) // replica)
    if dp == 0:
        assert isinstance(line, str)
        return
    assert isinstance(line, Membership)
    assert line.topology == topology.resized(dp=dp)
    assert len(set(numbers(line))) == line.topology.world_size
    assert not set(numbers(line)) & lost
    if dp == topology.dp:
        kept = [rank for rank, slot in enumerate(numbers(before)) if slot not in lost]
        assert [numbers(line)[rank] for rank in kept] == [numbers(before)[rank] for rank in kept]
