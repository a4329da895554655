"""For each number that rules rest on, the same evidence a quarter below and half above it: what must differ.

Each check is True if the rule is silent below and speaks above; it fails where the number is halved or doubled.
"""

from __future__ import annotations

from collections.abc import Callable

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Strength, Suspect
from bigsci_launch.spy.judge.corroboration import corroborate
from bigsci_launch.spy.judge.facts import carries_data, faults_per_s, is_busy, moves_bytes, outer_frames_moved
from bigsci_launch.spy.judge.rules.alike import odd_ranks
from bigsci_launch.spy.judge.rules.process import STALL_RULES
from bigsci_launch.spy.judge.rules.work import busy_child
from bigsci_launch.spy.judge.schedule.departure import is_as_before
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass, State

from ..conftest import Document, rank_of
from .small_cases import BUSY, LOADER, PEERS, SLEEPING, SPIN, WORLD, flowing, job, woken, writing

BELOW, ABOVE = 0.75, 1.5
Check = Callable[[], bool]


def seen(rank: Document) -> RankEvidence:
    return job([rank]).ranks[0]


def counting(key: str, per_look: float, **more: object) -> Document:
    """A rank whose main thread ran, with a count that grows by `per_look` in the second between its looks."""
    rank = rank_of(0, SPIN, **more)
    for index, sample in enumerate(rank["samples"]):
        sample[key] = 100 + round(index * per_look)
        sample["thread_times"] = {str(rank["pid"]): 5 + index}
    return rank


def differs(speaks: Callable[[float], bool], value: float) -> bool:
    return not speaks(BELOW * value) and speaks(ABOVE * value)


def busy_share() -> bool:
    return differs(lambda share: is_busy(seen(rank_of(0, SPIN, cpu_ticks=(0, round(100 * share))))) is True, 0.5)


def in_fine_ticks(rank: Document) -> RankEvidence:
    """Of a kernel that counts CPU time in milliseconds."""
    node = {"node": "n0", "clock_ticks_per_s": 1000, "ranks": [rank]}
    return Bundle({"topology": None}, (node,)).evidence().ranks[0]


def starved_share() -> bool:
    """A process that wanted to run in every look."""

    def speaks(share: float) -> bool:
        return is_busy(in_fine_ticks(rank_of(0, SPIN, state="R", cpu_ticks=(0, round(1000 * share))))) is True

    return differs(speaks, 0.02)


def queued_share() -> bool:
    """A process that waited for a core for most of the time."""

    def speaks(share: float) -> bool:
        rank = counting("run_delay_ns", 9e8, cpu_ticks=(0, round(1000 * share)))
        return is_busy(in_fine_ticks(rank)) is True

    return differs(speaks, 0.1)


def moved_bytes() -> bool:
    return differs(lambda size: moves_bytes(seen(writing(rank_of(0, SPIN), round(size)))) is True, 65536)


def carried_bytes() -> bool:
    return differs(lambda size: carries_data(seen(flowing(rank_of(0, SPIN), round(size)))) is True, 16384)


def carried_bytes_per_s() -> bool:
    """In a long look, what tells who is alive adds up."""

    def speaks(rate: float) -> bool:
        rank = flowing(rank_of(0, SPIN), round(20 * rate))
        rank["samples"][-1]["mono"] = rank["samples"][0]["mono"] + 20.0
        return carries_data(seen(rank)) is True

    return differs(speaks, 4096)


def moved_pages() -> bool:
    return differs(lambda pages: bool(faults_per_s(seen(counting("major_faults", pages)))), 16)


def polling_per_s() -> bool:
    """A thread that wakes up often may poll for a communication."""

    def speaks(times: float) -> bool:
        evidence = job([rank_of(0, WORLD), woken(rank_of(1, LOADER, **SLEEPING), round(times))])
        return JobCase.of(evidence).communicates(evidence.ranks[1]) is None

    return differs(speaks, 20)


def storm_per_s() -> bool:
    rule = next(rule for rule in STALL_RULES if rule.name == "stormed")
    return differs(lambda times: rule.match(seen(woken(rank_of(0, LOADER, **SLEEPING), round(times)))) is not None, 200)


def busy_child_share() -> bool:
    def speaks(share: float) -> bool:
        rank = rank_of(0, SPIN)
        for index, sample in enumerate(rank["samples"]):
            ticks = index * round(100 * share)
            sample["children"] = [{"pid": 9, "comm": "cc1plus", "state": "S", "wchan": "0", "cpu_ticks": ticks}]
        return busy_child(seen(rank)) is not None

    return differs(speaks, 0.2)


def first_steps() -> bool:
    def speaks(steps: int) -> bool:
        beat = {"rank": 1, "phase": "step", "step": 100 + steps, "time": 1.0, "first_step": 100}
        ranks = [rank_of(0, WORLD), rank_of(1, SPIN, **BUSY)]
        return judge(job(ranks, heartbeats=[beat])).hang_class is HangClass.WARM_UP

    return speaks(1) and not speaks(2)


def odd_share() -> bool:
    """A quarter of eight may be odd, three of eight may not, and one of seven may."""

    def odd(num_odd: int, world_size: int) -> int:
        stacks = [LOADER] * num_odd + [PEERS] * (world_size - num_odd)
        return len(odd_ranks(JobCase.of(job([rank_of(rank, stack, **SLEEPING) for rank, stack in enumerate(stacks)]))))

    return (odd(2, 8), odd(3, 8)) == (2, 0)


def inner_frames() -> bool:
    """Two changed innermost calls are noise, three are not."""

    def speaks(changed: int) -> bool:
        before = [f"step_{depth}@/src/m.py:3" for depth in range(8)]
        after = [f"other_{depth}@/src/m.py:3" for depth in range(changed)] + before[changed:]
        return outer_frames_moved(seen(rank_of(0, [" < ".join(before), " < ".join(after)]))) is True

    return not speaks(2) and speaks(3)


def same_moment_s() -> bool:
    """Another rank raised so much earlier than the suspect: that is another event, and speaks against the suspect."""

    def speaks(earlier_s: float) -> bool:
        raised = {"type": "OSError", "message": "no space", "place": "save (train.py:9)", "source": "its log"}
        times = {0: 10.0, 1: 10.0 + earlier_s}
        evidence = job([rank_of(rank, WORLD) for rank in times],
                       tracebacks=[{"rank": rank, "time": time, **raised} for rank, time in times.items()])  # fmt: skip
        suspect = Conclusion(State.HANG, "", Strength.AGREED, suspects=(Suspect(1, ""),))
        return corroborate(suspect, evidence).strength is Strength.DERIVED

    return differs(speaks, 0.2)


def min_times() -> bool:
    """What followed twice in the same way is a rule, what followed once is not."""

    def speaks(times: int) -> bool:
        return is_as_before([*[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * (times + 1)], 12 * times + 11)

    return not speaks(1) and speaks(2)


def grace(wchan: str, asleep_s: float) -> Check:
    """One rank sleeps so for that long, and another one waits for it as long as it is asleep."""

    def speaks(seconds: float) -> bool:
        ranks = [rank_of(0, WORLD), rank_of(1, LOADER, wchan=wchan)]
        for rank in ranks:
            rank["samples"][-1]["thread_idle_s"] = {str(rank["pid"]): seconds}
        return judge(job(ranks)).state is State.HANG

    return lambda: differs(speaks, asleep_s)


def late(wchan: str, late_s: float, **more: object) -> Check:
    """One rank runs, or is woken, in a place that holds up another one for that long."""

    def speaks(seconds: float) -> bool:
        ranks = [rank_of(0, WORLD), woken(rank_of(1, LOADER, **{"wchan": wchan, **more}), 3)]
        ranks[0]["samples"][-1]["thread_idle_s"] = {"100": seconds}
        ranks[1]["samples"][-1].pop("thread_idle_s", None)
        return judge(job(ranks)).state is State.HANG

    return lambda: differs(speaks, late_s)


SIZES: dict[str, Check] = {
    "BUSY_SHARE": busy_share,
    "STARVED_SHARE": starved_share,
    "QUEUED_SHARE": queued_share,
    "MOVED_BYTES": moved_bytes,
    "CARRIED_BYTES": carried_bytes,
    "CARRIED_BYTES_PER_S": carried_bytes_per_s,
    "MOVED_PAGES": moved_pages,
    "POLLING_PER_S": polling_per_s,
    "STORM_PER_S": storm_per_s,
    "BUSY_CHILD_SHARE": busy_child_share,
    "FIRST_STEPS": first_steps,
    "ODD_SHARE": odd_share,
    "INNER_FRAMES": inner_frames,
    "SAME_MOMENT_S": same_moment_s,
    "MIN_TIMES": min_times,
    "LOCAL.asleep_s": grace("locks_lock_inode_wait", 10),
    "ELSEWHERE.asleep_s": grace("something_else", 30),
    "TIMER.asleep_s": grace("hrtimer_nanosleep", 120),
    "LOCAL.late_s": late("locks_lock_inode_wait", 300),
    "ELSEWHERE.late_s": late("something_else", 300),
    "TIMER.late_s": late("hrtimer_nanosleep", 900),
    "COMPUTES.late_s": late("0", 1800, state="R", cpu_ticks=(0, 95), owns_gil=True),
}
"""By number, whether it is what it should be."""
