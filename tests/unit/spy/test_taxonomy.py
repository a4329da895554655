"""The classes of hangs, and the states of a job."""

from __future__ import annotations

import pytest

from bigsci_launch.spy.taxonomy import HangClass, State


def test_a_class_is_written_as_its_id_and_read_back() -> None:
    assert str(HangClass.PROCESS_STOPPED) == f"{HangClass.PROCESS_STOPPED}" == "H55"
    assert all(HangClass.parse(str(each)) is each for each in HangClass)


@pytest.mark.parametrize("text", ["", "H5", "H999", "PROCESS_STOPPED", "h55"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bsl hang-lab list"):
        HangClass.parse(text)


def test_ids_are_in_order_and_every_class_has_a_title_and_a_state() -> None:
    numbers = [int(str(each)[1:]) for each in HangClass]
    assert numbers == sorted(numbers)
    assert len({each.title for each in HangClass}) == len(HangClass)
    # After one look a class is known whose hang is not: its state is `waiting`.
    assert {each.state for each in HangClass} == set(State) - {State.UNKNOWN, State.WAITING}


def test_which_states_want_somebody_to_act() -> None:
    assert {state for state in State if state.is_failure} == {State.HANG, State.CRASHED}
    assert {state for state in State if state.is_healthy} == {State.PROGRESSING, State.FINISHED}
