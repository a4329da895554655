"""When ranks are looked at, and what a silence and the looks mean together: no wrong act, and no alarm from the clock
alone where ranks move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.watch.facts.look import Look, may_be_the_node
from bigsci_launch.watch.facts.stalls import StallWatch
from bigsci_launch.watch.judge.silence import Pace, Silence

HANG = Look(State.HANG, "rank 3 sleeps", (3,), ("n1",), "abc", confidence=0.97)
MOVING = Look(State.PROGRESSING, "ranks move")
WAITING = Look(State.WAITING, "rank 3 is late; this may still end by itself")
BLIND = Look(None, "no node answered")


def silence(lasts_s: float, pace: Pace = Pace.LONG, usual_s: float | None = 100.0) -> Silence:
    return Silence(pace, "step", 45, lasts_s, usual_s, f"nothing new for {lasts_s:g} s")


@dataclass
class Ranks:
    """Looks in the order in which they are taken; the last one is repeated."""

    looks: list[Look]
    settled: list[float] = field(default_factory=list)

    def __call__(self, settle_s: float) -> Look:
        self.settled.append(settle_s)
        return self.looks[min(len(self.settled), len(self.looks)) - 1]


def watched(*looks: Look) -> tuple[StallWatch, Ranks]:
    ranks = Ranks(list(looks))
    return StallWatch(ranks, 30.0), ranks


def test_ranks_are_left_alone_while_a_silence_is_usual() -> None:
    stalls, ranks = watched(HANG)
    for second in range(0, 200, 10):
        stalls.consider(silence(second, Pace.USUAL), second)
    assert not ranks.settled
    assert stalls.finding(silence(190, Pace.USUAL), "0001") is None


def test_a_failure_is_confirmed_by_a_second_look_and_no_sooner_than_slurm_may_be_asked() -> None:
    stalls, ranks = watched(HANG)
    stalls.consider(silence(200), 1000)
    assert not stalls.may_act(silence(200))
    stalls.consider(silence(210), 1010)
    assert len(ranks.settled) == 1
    stalls.consider(silence(231), 1031)
    assert len(ranks.settled) == 2
    assert stalls.may_act(silence(231))
    stalls.consider(silence(300), 1100)
    assert len(ranks.settled) == 2, "confirmed: nobody looks again until the silence has doubled"


@pytest.mark.parametrize("second", [MOVING, WAITING, BLIND, Look(State.HANG, "rank 5 sleeps", (5,), confidence=0.97)])
def test_nothing_is_confirmed_by_another_answer(second: Look) -> None:
    stalls, _ = watched(HANG, second)
    stalls.consider(silence(200), 1000)
    stalls.consider(silence(240), 1040)
    assert not stalls.may_act(silence(240))


def test_a_new_step_forgets_the_looks_before_it() -> None:
    stalls, _ = watched(HANG)
    stalls.consider(silence(200), 1000)
    stalls.consider(silence(5, Pace.USUAL), 1005)
    assert stalls.look is None
    stalls.consider(silence(200), 1200)
    assert not stalls.may_act(silence(200)), "one look of this silence is not two"


def test_a_hang_stays_one_until_something_moves_and_is_none_then() -> None:
    stalls, _ = watched(HANG, WAITING, MOVING)
    stalls.consider(silence(200), 1000)
    stalls.consider(silence(240), 1040)
    found = stalls.finding(silence(240), "0001")
    assert found is not None
    assert (found.kind, found.key) == ("hang", "stall:0001:45")
    stalls.consider(silence(500), 1300)
    assert stalls.finding(silence(500, Pace.TOO_LONG), "0001") is None
    assert "make progress" in stalls.remark(silence(500, Pace.TOO_LONG))


@pytest.mark.parametrize(
    ("look", "kind"), [(WAITING, "stall"), (BLIND, "stall"), (Look(State.SLOW, "rank 2 is late"), "slow")]
)
def test_the_clock_alone_is_a_finding_only_when_it_is_too_long(look: Look, kind: str) -> None:
    stalls, _ = watched(look)
    stalls.consider(silence(200), 1000)
    assert stalls.finding(silence(200), "0001") is None
    stalls.consider(silence(400, Pace.TOO_LONG), 1200)
    found = stalls.finding(silence(400, Pace.TOO_LONG), "0001")
    assert found is not None
    assert found.kind == kind
    assert look.sentence in found.sentence
    assert not stalls.may_act(silence(400, Pace.TOO_LONG))


def test_a_silence_of_unknown_meaning_is_looked_at_and_is_blindness_if_that_shows_nothing() -> None:
    stalls, ranks = watched(WAITING)
    stalls.consider(silence(150, Pace.UNKNOWN), 1000)
    assert not ranks.settled, "two steps have not passed"
    assert not stalls.blindness(silence(150, Pace.UNKNOWN))
    stalls.consider(silence(210, Pace.UNKNOWN), 1060)
    assert len(ranks.settled) == 1
    assert WAITING.sentence in stalls.blindness(silence(210, Pace.UNKNOWN))
    stalls.consider(silence(10, Pace.USUAL), 1070)
    stalls.consider(silence(110, Pace.UNKNOWN, None), 1170)
    assert len(ranks.settled) == 1, "not even the length of a step is known"
    stalls.consider(silence(130, Pace.UNKNOWN, None), 1190)
    assert len(ranks.settled) == 2


def test_a_guess_ends_nothing_in_a_phase_of_unknown_length_for_ten_minutes() -> None:
    guess = Look(State.HANG, "rank 3 may sleep", (3,), confidence=0.8)
    for look, may_act in ((guess, False), (HANG, True)):
        stalls, _ = watched(look)
        stalls.consider(silence(210, Pace.UNKNOWN), 1000)
        stalls.consider(silence(250, Pace.UNKNOWN), 1040)
        assert stalls.may_act(silence(250, Pace.UNKNOWN)) is may_act
        assert stalls.may_act(silence(601, Pace.UNKNOWN))


def test_a_look_takes_as_long_as_a_step_within_bounds() -> None:
    for usual_s, settle_s in ((0.5, 5.0), (20.0, 20.0), (105.0, 30.0)):
        stalls, ranks = watched(HANG)
        stalls.consider(silence(900, Pace.LONG, usual_s), 1000)
        assert ranks.settled == [settle_s]


def test_no_node_is_suspected_of_what_programs_do() -> None:
    assert may_be_the_node(HangClass.PROCESS_STOPPED)
    assert may_be_the_node(HangClass.PYTHON_NEVER_ENDS)
    assert not may_be_the_node(HangClass.COLLECTIVE_SKIPPED)
    assert not may_be_the_node(HangClass.PROGRAM_DIFFERS)
    assert not may_be_the_node(None)
