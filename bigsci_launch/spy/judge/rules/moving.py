"""Jobs in which something was finished between the looks: they are healthy, or one rank holds up the others."""

from __future__ import annotations

from collections.abc import Sequence

from bigsci_launch.spy.evidence.numbering import OtherProcess, WaitingLauncher
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stacks import decisive_thread
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Side, Strength, Suspect
from bigsci_launch.spy.judge.facts import (
    callers_moved,
    carries_data,
    collectives_moved,
    deciding_thread_share,
    elapsed_s,
    is_busy,
    is_motion_known,
    named_frames,
    socket_growth,
)
from bigsci_launch.spy.judge.last_calls import find_steps_apart
from bigsci_launch.spy.judge.rules.failures import failed_ranks
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.judge.rules.rendezvous import is_joining
from bigsci_launch.spy.judge.waits import SETUP_OPERATIONS
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree
from bigsci_launch.units import format_bytes

PATIENCE_S = 10.0
"""How long a launcher takes at most until its ranks are there."""
LEAST_OTHERS, LEAST_SPAN_S, MOST_SAMPLES = 2, 3.0, 2 / 3
"""One rank alone is at work only next to so many others, over so long, and where it is seen so in most samples."""
BUSY_SHARE, IDLE_SHARE = 0.7, 0.35
"""CPU shares of a thread that works all the time, at least, and of one that mostly waits, at most."""
LOOK_AGAIN = "bsl spy --settle 60  # look for longer"


def nothing_found(case: JobCase) -> Conclusion | None:
    """No rank was found at all."""
    evidence = case.evidence
    if any(seen.samples or seen.exit for seen in evidence.ranks):
        return None
    ended = [other for other in evidence.others if other.role == "ended"]
    if ended and all(other.end for other in ended):
        return _conclude_all_reaped_late(ended)
    if evidence.launcher is not None and evidence.launcher.age_s >= PATIENCE_S:
        return _conclude_waiting(evidence.launcher)
    return Conclusion(State.UNKNOWN, "no rank was found, so their state is unknown", Strength.NOTHING)


def _conclude_all_reaped_late(ended: Sequence[OtherProcess]) -> Conclusion:
    """The verdict where all processes below a launcher have ended, and it still runs."""
    failed = [other for other in ended if other.end and not other.end.is_clean]
    how = "; ".join(f"process {other.pid}: {other.end}" for other in (failed or ended)[:3])
    count = "1 process" if len(ended) == 1 else f"{len(ended)} processes"
    return Conclusion(
        State.CRASHED if failed else State.FINISHED,
        f"{count} below the launcher {agree('has', ended)} ended, and the launcher still runs: {how}",
        Strength.DERIVED,
        missing=("which ranks they were",) if failed else (),
    )


def _conclude_waiting(launcher: WaitingLauncher) -> Conclusion:
    where = f" at {launcher.endpoint}" if launcher.endpoint else ""
    return Conclusion(
        State.WAITING,
        f"no rank has been started: the launcher (process {launcher.pid} on {launcher.node}) has run for "
        f"{launcher.age_s:.0f} s and was given --nnodes={launcher.nodes}, which meet{where}",
        Strength.DERIVED,
        missing=("how many of the nodes have come",),
        next=(f"py-spy dump --pid {launcher.pid}  # on {launcher.node}: next_rendezvous means that nodes are missing",),
    )


def still_joining(case: JobCase) -> Conclusion | None:
    """The ranks are connecting to each other, and some of them came on."""
    moving = case.moving
    if not moving or not all(is_joining(seen) for seen in case.evidence.ranks):
        return None
    missing = "whether all ranks will: a late or misdirected rank becomes visible once the others stop moving"
    fact = _fact(case, moving)
    return Conclusion(
        state=State.PROGRESSING,
        claim=f"the ranks are still connecting to each other: {fact}",
        strength=Strength.GUESS,
        evidence=(fact,),
        missing=(missing,),
        next=(LOOK_AGAIN,),
    )


def makes_progress(case: JobCase) -> Conclusion | None:
    """Ranks finished collectives or left a communication between the looks."""
    moving = case.moving
    if not moving:
        return None
    fact = _fact(case, moving)
    counted = any(collectives_moved(seen) for seen in case.alive)
    strength = Strength.AGREED if counted or len(moving) > 1 else Strength.DERIVED
    return Conclusion(State.PROGRESSING, f"the job makes progress: {fact}", strength, evidence=(fact,))


def _fact(case: JobCase, moving: tuple[int, ...]) -> str:
    return f"{len(moving)} of {case.evidence.world_size} ranks moved between the samples"


def prints_steps(case: JobCase) -> Conclusion | None:
    """Ranks have printed the line of another step during the look, and none has failed."""
    steps = {each.rank: each.step for each in case.evidence.printed if each.step is not None}
    if not steps or failed_ranks(case):
        return None
    first = min(steps)
    fact = f"{case.evidence.short_name(first)} has printed step {steps[first]} during the look"
    return Conclusion(State.PROGRESSING, f"the job makes progress: {fact}", Strength.DERIVED, evidence=(fact,))


def data_flows(case: JobCase) -> Conclusion | None:
    """Data moves over the connections of most ranks.

    Ranks that look for each other poll their store all the time: what those exchange does not count.
    """
    flowing = [seen for seen in case.alive if carries_data(seen) and not _looks_for_others(case, seen)]
    if len(flowing) < 2 or 2 * len(flowing) <= len(case.alive):
        return None
    carried = sum(sum(socket_growth(seen) or ()) for seen in flowing)
    moved = f"{case.evidence.count([seen.rank for seen in flowing])} of {len(case.alive)}"
    fact = f"the connections of {moved} carried {format_bytes(carried)} between the samples"
    return Conclusion(State.PROGRESSING, f"the job makes progress: {fact}", Strength.DERIVED, evidence=(fact,))


def _looks_for_others(case: JobCase, seen: RankEvidence) -> bool:
    wait = case.graph.waits.get(seen.rank)
    return wait is not None and wait.operation in (*SETUP_OPERATIONS, "monitored_barrier")


def step_apart(case: JobCase) -> Conclusion | None:
    """Ranks make progress, and one makes the same collectives as its peers in another step."""
    progress = makes_progress(case) or data_flows(case)
    apart = tuple(find_steps_apart(case.evidence)) if progress is not None else ()
    if progress is None or not apart:
        return None
    return Conclusion(
        state=State.PROGRESSING,
        claim=f"the job makes progress, but {apart[0].words}",
        strength=Strength.DERIVED,
        hang_class=HangClass.STEP_DROPPED,
        sides=tuple(Side(each.ranks, "a step apart from its peers") for each in apart),
        evidence=(*progress.evidence, *(each.words for each in apart[1:])),
        missing=("whether it skipped a step, or counts steps differently",),
    )


def most_moved(case: JobCase) -> Conclusion | None:
    """Most ranks were at different places in different looks."""
    moved = [seen.rank for seen in case.alive if callers_moved(seen)]
    if 2 * len(moved) <= len(case.alive):
        return None
    fact = f"{case.evidence.count(moved)} of {len(case.alive)} were at other places between the samples"
    return Conclusion(State.PROGRESSING, f"the job makes progress: {fact}", Strength.GUESS, evidence=(fact,))


def one_is_late(case: JobCase) -> Conclusion | None:
    """The job makes progress, and one rank was outside any communication at one place in every look, or in most and
    alone at work."""
    moving = case.moving
    slow = _straggler(case.evidence) if moving else None
    if slow is not None and is_motion_known(slow):
        words = f"is late: it {explain_stall(slow).words}, in every sample, while all others wait"
    elif moving and (slow := _alone_at_work(case.alive)) is not None:
        share = f"{deciding_thread_share(slow) or 0:.0%} of a core"
        words = f"is late: it uses {share} and is in no communication in most samples, while all others wait"
    else:
        return None
    return Conclusion(
        state=State.SLOW,
        claim=f"the job makes progress, but {case.evidence.name(slow.rank)} {words}",
        strength=Strength.DERIVED,
        hang_class=HangClass.STRAGGLER_COMPUTES if is_busy(slow) else HangClass.STRAGGLER_SLEEPS,
        suspects=(Suspect(slow.rank, words),),
        evidence=(_fact(case, moving),),
        missing=("more samples: run `bsl spy` again and see whether the same rank is late",),
    )


def _straggler(evidence: Evidence) -> RankEvidence | None:
    """The one rank that was outside any communication in every sample, at one place, while all others were inside."""
    outside = [
        {seen.rank for seen in evidence.ranks if not _communicates(seen, index)}
        for index in range(_num_looks(evidence))
    ]
    late = outside[0] if outside else set()
    if len(late) != 1 or any(ranks != late for ranks in outside):
        return None
    seen = next(seen for seen in evidence.ranks if seen.rank in late)
    if seen.thread is None or seen.thread.native_call is not None:
        return None
    places = {frames[0].place for sample in seen.samples if (frames := named_frames(seen, sample))}
    return seen if len(places) == 1 else None


def _alone_at_work(ranks: Sequence[RankEvidence]) -> RankEvidence | None:
    """The one rank whose deciding thread had a core nearly all the time, mostly outside any communication, while those
    of all others waited in one. Stacks are moments; the time on a core is that of the whole look."""
    count = min((len(seen.samples) for seen in ranks), default=0)
    if len(ranks) <= LEAST_OTHERS or any((elapsed_s(seen) or 0.0) < LEAST_SPAN_S for seen in ranks):
        return None
    at_work, num_waiting = [], 0
    for seen in ranks:
        share = deciding_thread_share(seen)
        inside = sum(_communicates(seen, index) for index in range(count)) / count
        if share is None:
            return None
        if share >= BUSY_SHARE and inside <= 1 - MOST_SAMPLES:
            at_work.append(seen)
        num_waiting += share <= IDLE_SHARE and inside >= MOST_SAMPLES
    return at_work[0] if len(at_work) == 1 and num_waiting == len(ranks) - 1 else None


def _num_looks(evidence: Evidence) -> int:
    return min((len(seen.samples) for seen in evidence.ranks), default=0)


def _communicates(seen: RankEvidence, index: int) -> bool:
    threads = seen.samples[index].threads
    thread = decisive_thread(threads, seen.pid or 0) if threads else None
    return thread is not None and thread.operation is not None
