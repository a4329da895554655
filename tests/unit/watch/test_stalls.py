"""When ranks are looked at, and what a silence and the looks mean together: no wrong act, and no alarm from the clock
alone where ranks move."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from bigsci_launch.spy.answer import answer_from
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.watch.facts.look import Look, look_of, may_be_the_node
from bigsci_launch.watch.facts.stalls import StallWatch
from bigsci_launch.watch.judge.silence import Pace, Silence
from tests.unit.spy.conftest import rank_of

HANG = Look(State.HANG, "rank 3 sleeps", (3,), ("n1",), "abc", confidence=0.97)
MOVING = Look(State.PROGRESSING, "ranks move")
WAITING = Look(State.WAITING, "rank 3 is late; this may still end by itself")
BLIND = Look(None, "no node answered")


def silence(lasts_s: float, pace: Pace = Pace.LONG, usual_s: float | None = 100.0, after_s: float = 200.0) -> Silence:
    """A silence that is worth a look after so many seconds."""
    return Silence(pace, "step", 45, lasts_s, usual_s, f"nothing new for {lasts_s:g} s", after_s - lasts_s)


@dataclass
class Ranks:
    """Looks in the order in which they are taken; the last one is repeated."""

    looks: list[Look]
    settled: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    def __call__(self, settle_s: float, keeps_doubt: bool) -> Look:
        self.settled.append(settle_s)
        self.kept.append(keeps_doubt)
        return self.looks[min(len(self.settled), len(self.looks)) - 1]


def watched(*looks: Look) -> tuple[StallWatch, Ranks]:
    ranks = Ranks(list(looks))
    return StallWatch(ranks, 10.0, 30.0), ranks


def looked(look: Look, until: int, after_s: float = 30.0) -> list[int]:
    """Return the seconds of a silence at which the ranks are looked at, each look with the same answer."""
    stalls, ranks = watched(look)
    found = []
    for second in range(until):
        stalls.consider(silence(second, Pace.UNKNOWN, None, after_s), second)
        found += [second] * (len(ranks.settled) - len(found))
    return found


def test_ranks_are_left_alone_until_a_silence_is_worth_a_look() -> None:
    stalls, ranks = watched(HANG)
    for second in range(0, 200, 10):
        stalls.consider(silence(second, Pace.USUAL), second)
    assert not ranks.settled
    assert stalls.finding(silence(190, Pace.USUAL), "0001") is None


def test_looks_back_off_with_the_silence() -> None:
    assert looked(WAITING, 90, 6.0) == [6, 16, 26, 36, 46, 58, 73]
    assert looked(MOVING, 400) == [30, 130, 230, 330]


def test_a_look_ends_when_ranks_that_sleep_may_be_called_hung() -> None:
    """In doubt, a look also says when that is; after a few such looks, the silence alone says when to look again."""
    stalls, ranks = watched(*(replace(WAITING, hang_at=at) for at in (25.0, 40.0, 90.0, 52.0)))
    at: list[float] = []
    for half_second in range(160):
        now = half_second / 2
        stalls.consider(silence(now, Pace.UNKNOWN, None, 10.0), now)
        at += [now] * (len(ranks.settled) - len(at))
    assert at == [10.0, 23.5, 38.5, 48.5, 61.0, 76.5], "the third is too far away, and the fourth one too many"
    assert [began + settled_s for began, settled_s in zip(at[1:3], ranks.settled[1:3], strict=True)] == [25.5, 40.5]


@pytest.mark.parametrize("shows_calls", [True, False])
def test_looks_back_off_from_when_the_ranks_last_moved_and_not_from_their_last_output(shows_calls: bool) -> None:
    stalls, ranks = watched(*(() if shows_calls else (MOVING,)), WAITING)
    at = []
    for second in range(7000, 7060):
        quiet_s = second - 6994.0 if shows_calls else None
        told = replace(silence(second, Pace.UNKNOWN, None, 30.0), quiet_s=quiet_s, look_in_s=0.0)
        stalls.consider(told, second)
        at += [second] * (len(ranks.settled) - len(at))
    # After a look that found progress the next one comes in a hundred seconds.
    assert at == ([7000, 7010, 7020, 7030, 7040, 7052] if shows_calls else [7000])
    assert ranks.settled[0] == (2.0 if shows_calls else 30.0)
    if not shows_calls:
        stalls.consider(silence(7105.0, Pace.UNKNOWN, None, 30.0), 7105.0)
        stalls.consider(silence(7132.0, Pace.UNKNOWN, None, 30.0), 7132.0)
        assert ranks.settled[1:] == [10.5, 13.2], "a second look comes when 105 s have become a quarter longer"


def test_calls_that_stop_after_a_look_that_saw_the_ranks_move_are_looked_at_soon() -> None:
    stalls, ranks = watched(MOVING)
    at = []
    for second in range(30, 90):
        quiet_s = float(second - 45 if second >= 45 else second - 20)
        told = replace(silence(second, Pace.UNKNOWN, None, 30.0), quiet_s=quiet_s, calls_in_s=5.0 - quiet_s)
        stalls.consider(told, second)
        at += [second] * (len(ranks.settled) - len(at))
    assert at == [30, 50], "no call came after the first look until second 45, and none after the second look"


def test_nothing_is_done_and_no_doubt_is_kept_while_the_clock_calls_a_silence_usual() -> None:
    stalls, ranks = watched(HANG)
    for now in (6, 40):
        stalls.consider(silence(now, Pace.USUAL, after_s=5.0), now)
    assert (stalls.is_confirmed, stalls.may_act(silence(40, Pace.USUAL))) == (True, False)
    assert stalls.may_act(silence(41, Pace.LONG))
    assert ranks.kept == [False, False]
    found = stalls.finding(silence(40, Pace.USUAL), "0001")
    assert found is not None and found.sentence.startswith(HANG.sentence)


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
    assert not ranks.settled
    assert not stalls.blindness(silence(150, Pace.UNKNOWN))
    stalls.consider(silence(210, Pace.UNKNOWN), 1060)
    assert len(ranks.settled) == 1
    assert WAITING.sentence in stalls.blindness(silence(210, Pace.UNKNOWN))
    stalls.consider(silence(10, Pace.USUAL), 1070)
    assert not stalls.blindness(silence(10, Pace.USUAL))
    assert stalls.blindness(replace(silence(10, Pace.USUAL), has_shown=False)), "nothing shows that it is healthy"


def test_a_guess_ends_nothing_in_a_phase_of_unknown_length_for_ten_minutes() -> None:
    guess = Look(State.HANG, "rank 3 may sleep", (3,), confidence=0.8)
    for look, may_act in ((guess, False), (HANG, True)):
        stalls, _ = watched(look)
        stalls.consider(silence(210, Pace.UNKNOWN), 1000)
        stalls.consider(silence(250, Pace.UNKNOWN), 1040)
        assert stalls.may_act(silence(250, Pace.UNKNOWN)) is may_act
        assert stalls.may_act(silence(601, Pace.UNKNOWN))


def test_a_look_takes_as_long_as_a_step_within_bounds() -> None:
    for usual_s, settle_s in ((0.5, 2.0), (20.0, 20.0), (105.0, 30.0)):
        stalls, ranks = watched(HANG)
        stalls.consider(silence(900, Pace.LONG, usual_s), 1000)
        assert ranks.settled == [settle_s]


def test_no_node_is_suspected_of_what_programs_do() -> None:
    assert may_be_the_node(HangClass.PROCESS_STOPPED)
    assert may_be_the_node(HangClass.PYTHON_NEVER_ENDS)
    assert not may_be_the_node(HangClass.COLLECTIVE_SKIPPED)
    assert not may_be_the_node(HangClass.PROGRAM_DIFFERS)
    assert not may_be_the_node(None)


def test_a_failure_without_a_suspect_begins_with_the_rank_to_look_at() -> None:
    members, before = {"w": [0, 1, 2]}, "w " * 4
    ranks = [
        rank_of(rank, "all_reduce@c10d:1 < step@/src/loop.py:9", calls=before + more, members=members)
        for rank, more in enumerate(("w!", "w:reduce!", "w!"))
    ]
    look = look_of(answer_from(Bundle({}, ({"node": "n0", "clock_ticks_per_s": 100, "ranks": ranks},))))
    assert (look.state, look.suspects) == (State.HANG, ())
    assert look.sentence.startswith("rank 1 (n0) is where to look first")
