"""Ranks that others wait for but that make progress: slow, or allowed to take long. Not a hang.

What counts is what moved between the samples: bytes, the CPU time of a child, calls below the outermost. A rank that
only computes may never end. It is at work only if others are meant to wait for it (they are in a barrier at the end of
what it does, or its own record names such a phase), or if several ranks do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigsci_launch.spy.evidence.known_code import bare_name, is_meant_barrier, phase_of
from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.evidence.samples import Child
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer, Reason, Strength, Suspect
from bigsci_launch.spy.judge.facts import (
    INNER_FRAMES,
    MOVED_BYTES,
    STARVED_SHARE,
    cpu_share,
    deciding_thread_ran,
    faults_per_s,
    file_bytes_per_s,
    is_busy,
    is_motion_known,
    may_wait_for_store,
    moves_bytes,
    named_frames,
    outer_frames_moved,
    per_s,
    socket_growth,
    spins_in_native_code,
)
from bigsci_launch.spy.judge.rules.failures import others_wait
from bigsci_launch.spy.judge.rules.process import may_wait_for_child
from bigsci_launch.spy.judge.waits import WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks, counted
from bigsci_launch.units import format_bytes

MEANT_PHASES = {
    "save": HangClass.SAVE_IN_PROGRESS,
    "copy": HangClass.SAVE_IN_PROGRESS,
    "dump": HangClass.SAVE_IN_PROGRESS,
    "load": HangClass.PREPARES_ALONE,
    "eval": HangClass.BARRIER_MEANT,
}
"""Phases in a trainer's own record in which one rank may keep the others waiting, and the class of each."""
END_PHASE = "end"
BUSY_CHILD_SHARE = 0.2
FIRST_STEPS = 2


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank is doing; `words` completes "rank 3 ..."."""

    rank: int
    hang_class: HangClass
    words: str
    strength: Strength
    missing: str = ""


@dataclass(frozen=True, slots=True)
class WaitGroup:
    """Ranks that wait for `blockers`: the functions (name, file) in which they are at a barrier, or None if one of them
    waits in anything else."""

    blockers: frozenset[int]
    functions: frozenset[tuple[str, str]] | None


def find_wait_groups(graph: WaitGraph) -> tuple[WaitGroup, ...]:
    """The ranks that wait for the same others, one wait_group for each set of these."""
    return tuple(WaitGroup(blockers, _barrier_functions(graph, ranks)) for blockers, ranks in graph.meetings)


def _barrier_functions(graph: WaitGraph, ranks: Sequence[int]) -> frozenset[tuple[str, str]] | None:
    found = set()
    for wait in (graph.waits[rank] for rank in ranks):
        if wait.operation not in ("barrier", "monitored_barrier") or wait.site is None:
            return None
        found.add((wait.site.function, wait.site.file))
    return frozenset(found)


def find_works(case: JobCase, roots: Sequence[RankEvidence]) -> dict[int, RankWork]:
    """For each rank of `roots` that shows progress, what it is doing."""
    wait_groups = find_wait_groups(case.graph)
    return {seen.rank: work for seen in roots if (work := find_work(case, seen, wait_groups))}


def find_work(case: JobCase, seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> RankWork | None:
    """What the rank is doing, or None if nothing shows that it makes progress.

    Bytes that went to peers are no work of its own. Where it is not known how many did, only a rank counts that
    certainly is in no communication.
    """
    is_outside = case.communicates(seen) is False
    are_its_own = socket_growth(seen) is not None or is_outside
    return (
        (_moves_bytes(seen, wait_groups) if are_its_own else None)
        or (_exchanges_data(seen, wait_groups) if is_outside else None)
        or _fetches_pages(seen)
        or _child_computes(seen)
        or _is_meant(seen, wait_groups)
        or _is_warming_up(seen)
    )


def _moves_bytes(seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> RankWork | None:
    rates = file_bytes_per_s(seen)
    if rates is None or not moves_bytes(seen):
        return None
    written, read = rates
    did = f"writes {format_bytes(round(written))}/s" if written >= read else f"reads {format_bytes(round(read))}/s"
    is_reading = is_busy(seen) is True or read > written
    otherwise = HangClass.PREPARES_ALONE if is_reading else HangClass.SAVE_IN_PROGRESS
    hang_class = _class_of_phase(seen, wait_groups) or otherwise
    return RankWork(seen.rank, hang_class, f"{did} in {seen.place}", Strength.AGREED, "how much is left to do")


def _exchanges_data(seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> RankWork | None:
    """A rank that sends or receives while it is in no communication: a download, an upload, a service."""
    sent, received = socket_growth(seen) or (0, 0)
    if sent + received < MOVED_BYTES or deciding_thread_ran(seen) is not True:
        return None
    rate = format_bytes(round(per_s(seen, max(sent, received)) or 0.0))
    did = f"sends {rate}/s" if sent >= received else f"receives {rate}/s"
    hang_class = _class_of_phase(seen, wait_groups) or HangClass.PREPARES_ALONE
    return RankWork(seen.rank, hang_class, f"{did} in {seen.place}", Strength.AGREED, "how much is left to do")


def _fetches_pages(seen: RankEvidence) -> RankWork | None:
    """A rank that reads a mapped file: no system call shows the bytes, and every look finds it asleep in the kernel."""
    rate = faults_per_s(seen)
    if not rate:
        return None
    words = f"fetches {rate:.0f} pages of mapped files per second in {seen.place}"
    return RankWork(seen.rank, HangClass.PREPARES_ALONE, words, Strength.DERIVED, "how much is left to read")


def _child_computes(seen: RankEvidence) -> RankWork | None:
    if is_busy(seen) or not may_wait_for_child(seen):
        return None
    child = busy_child(seen)
    if child is None:
        return None
    words = f"waits in {seen.place} for its child process {child.pid} ({child.comm}), which computes"
    return RankWork(seen.rank, HangClass.COMPILER_AT_WORK, words, Strength.DERIVED, f"whether process {child.pid} ends")


def busy_child(seen: RankEvidence) -> Child | None:
    """A process below the rank that used the CPU between the samples, or wanted to while others held the cores."""
    if len(seen.samples) < 2 or seen.last is None:
        return None
    before = {child.pid: child for child in seen.samples[0].children or ()}
    for child in seen.last.children or ():
        earlier = before.get(child.pid)
        if earlier is None:
            continue
        wants_cpu = child.state == earlier.state == "R"
        if child.cpu_ticks is None or earlier.cpu_ticks is None:
            share = BUSY_CHILD_SHARE if wants_cpu else 0.0
        else:
            share = per_s(seen, (child.cpu_ticks - earlier.cpu_ticks) / seen.clock_ticks_per_s) or 0.0
        if share >= (STARVED_SHARE if wants_cpu else BUSY_CHILD_SHARE):
            return child
    return None


def _is_meant(seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> RankWork | None:
    """A rank that computes while others are meant to wait for it."""
    if not is_busy(seen):
        return None
    words = f"computes in {seen.place} ({cpu_share(seen) or 0:.0%} of a core)"
    if seen.heartbeat and seen.heartbeat.phase in MEANT_PHASES:
        words += f", in the phase {seen.heartbeat.phase!r} of step {seen.heartbeat.step}"
        return RankWork(seen.rank, MEANT_PHASES[seen.heartbeat.phase], words, Strength.DERIVED, "whether it will end")
    shared = _meant_function(seen, wait_groups)
    if shared is None:
        return None
    hang_class = _class_of_phase(seen, wait_groups) or HangClass.BARRIER_MEANT
    words += f"; the others wait in a barrier in {shared}"
    return RankWork(seen.rank, hang_class, words, Strength.GUESS, "whether it will end")


def _meant_function(seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> str | None:
    """The function that the rank is in and in which all who wait for the rank itself are at a barrier."""
    own = {(frame.function, frame.file) for frame in seen.thread.frames} if seen.thread else set()
    around = [wait_group.functions for wait_group in wait_groups if seen.rank in wait_group.blockers]
    if not around or any(functions is None or not functions <= own for functions in around):
        return None
    return bare_name(min(function for functions in around for function, _ in functions or ()))


def _class_of_phase(seen: RankEvidence, wait_groups: Sequence[WaitGroup]) -> HangClass | None:
    """The class of what the rank does, from its record or from the names of its calls."""
    if seen.heartbeat and seen.heartbeat.phase in MEANT_PHASES:
        return MEANT_PHASES[seen.heartbeat.phase]
    frames = seen.thread.named_frames[:4] if seen.thread else ()
    phases = [phase for frame in frames if (phase := phase_of(frame.function, frame.file))]
    for phase in (HangClass.SAVE_IN_PROGRESS, HangClass.BARRIER_MEANT):
        if phase in phases:
            return phase
    return HangClass.PREPARES_ALONE if _meant_function(seen, wait_groups) else None


def _is_warming_up(seen: RankEvidence) -> RankWork | None:
    """A rank that computes in the first steps after its start, where compilers and caches take long."""
    beat = seen.heartbeat
    if not is_busy(seen) or beat is None or beat.first_step is None or beat.step - beat.first_step >= FIRST_STEPS:
        return None
    words = (
        f"computes in {seen.place} ({cpu_share(seen) or 0:.0%} of a core), in step {beat.step}, soon after its start"
    )
    return RankWork(seen.rank, HangClass.WARM_UP, words, Strength.GUESS, "whether it will end")


def compute_alike(roots: Sequence[RankEvidence]) -> bool:
    """Whether several ranks compute in one place: an endless loop would hardly happen on all of them."""
    if len(roots) < 2 or not all(is_busy(seen) for seen in roots):
        return False
    stacks = [[frame.function for frame in reversed(named_frames(seen, seen.samples[-1]))] for seen in roots]
    shared = 0
    for calls in zip(*stacks, strict=False):
        if len(set(calls)) > 1:
            break
        shared += 1
    return shared > 0 and shared >= min(map(len, stacks)) - INNER_FRAMES


def judge_work(case: JobCase, roots: Sequence[RankEvidence], works: Mapping[int, RankWork]) -> Conclusion | None:
    """The verdict when every rank that others wait for makes progress; None if one of them does not."""
    if len(works) == len(roots):
        return conclude_work(case, list(works.values()))
    others = [seen for seen in roots if seen.rank not in works]
    if all(is_busy(seen) and outer_frames_moved(seen) for seen in others) or compute_alike(others):
        return conclude_computing(case, [seen.rank for seen in roots])
    return None


def conclude_computing(case: JobCase, ranks: Sequence[int]) -> Conclusion:
    """The verdict when several ranks compute, as they do in every step."""
    evidence = case.evidence
    if len(ranks) == evidence.world_size:
        is_known = not any(seen.thread and seen.thread.native_call for seen in evidence.ranks)
        none = "none is in a communication" if is_known else "no stack shows a communication"
        words = f"all {count_ranks(ranks)} compute, and {none}"
    else:
        them = "it" if len(ranks) == 1 else "them"
        words = f"{evidence.names(ranks)} {agree('computes', ranks)}, and the others wait for {them}"
    there = set(ranks)
    if all(seen.recorder is None and spins_in_native_code(seen) for seen in evidence.ranks if seen.rank in there):
        doubt = "or wait for their devices: each stays in one place, in native code"
        missing = "what the devices do: native frames or a recorder would show it"
        again = "bsl spy  # again in a minute: if the places are the same, it is a hang"
        return Conclusion(State.UNKNOWN, f"{words}, {doubt}", Strength.NOTHING, missing=(missing,), next=(again,))
    return Conclusion(State.PROGRESSING, words, Strength.DERIVED, missing=("whether it takes longer than it should",))


def conclude_work(case: JobCase, works: Sequence[RankWork]) -> Conclusion:
    """The verdict when ranks that others wait for show progress."""
    evidence = case.evidence
    first, waiting = works[0], case.graph.leading_to(frozenset(work.rank for work in works))
    hang_classes = {work.hang_class for work in works}
    who = evidence.name(first.rank) if len(works) == 1 else evidence.names([work.rank for work in works])
    does, whom = (
        (first.words, "it")
        if len(works) == 1
        else (f"make progress ({evidence.short_name(first.rank)} {first.words})", "them")
    )
    waits = counted(waiting, "waits") if waiting else "the others may wait"
    claim = f"no hang so far: {who} {does}, and {waits} for {whom}"
    is_named = bool(waiting) and hang_classes != {HangClass.WARM_UP}
    named = tuple(Suspect(work.rank, work.words) for work in works) if is_named else ()
    return Conclusion(
        # If no rank is seen to wait, reading and writing is what healthy ranks do too.
        state=State.SLOW if waiting else State.WAITING,
        claim=claim,
        strength=min((work.strength for work in works), key=lambda strength: strength.level),
        hang_class=hang_classes.pop() if len(hang_classes) == 1 else None,
        suspects=named,
        evidence=tuple(f"{evidence.name(work.rank)} {work.words}" for work in works[1:4]),
        missing=tuple(dict.fromkeys(work.missing for work in works if work.missing)),
        next=("bsl spy  # again in a minute: the same place without progress means a hang",),
    )


def prepares_alone(case: JobCase) -> Conclusion | None:
    """Ranks wait at a barrier that is there so that one may work, and that one does such work. Nothing shows whether it
    makes progress."""
    graph, evidence = case.graph, case.evidence
    calls = {seen.rank: call for seen in case.roots if (call := _work_call(seen))}
    barriers = {rank: barrier for rank in graph.waits if (barrier := _meant_barrier(case.by_rank[rank]))}
    are_all = 0 < len(calls) == len(case.roots) and 0 < len(barriers) == len(graph.waits)
    if not are_all or any(is_motion_known(seen) for seen in case.roots):
        return None
    ranks = tuple(calls)
    first, barrier = calls[ranks[0]], next(iter(barriers.values()))
    hang_class = phase_of(first.function, first.file)
    does = agree(_WORDS_OF_WORK[hang_class] if hang_class else "is", ranks)
    who = evidence.name(ranks[0]) if len(ranks) == 1 else evidence.names(ranks)
    waiting = tuple(graph.waits)
    who_waits = evidence.name(waiting[0]) if len(waiting) == 1 else evidence.names(waiting)
    return Conclusion(
        state=State.WAITING,
        claim=f"{who} {does} in {first}, and {who_waits} {agree('waits', waiting)} in {bare_name(barrier.function)}, "
        "whose barrier is there for that: it may still end by itself",
        strength=Strength.GUESS,
        hang_class=hang_class,
        missing=("whether it makes progress: its bytes, its CPU time and its children show that",),
        next=("bsl spy  # again in a minute: the same place without progress means a hang",),
        look_first=tuple(
            Pointer(rank, f"others wait for it: it is in {call}", Reason.AWAITED) for rank, call in calls.items()
        ),
    )


_WORDS_OF_WORK = {
    HangClass.PREPARES_ALONE: "prepares data",
    HangClass.SAVE_IN_PROGRESS: "saves",
    HangClass.BARRIER_MEANT: "evaluates",
}


def _work_call(seen: RankEvidence) -> Frame | None:
    """The outermost of the innermost known calls that do work for which others may be meant to wait."""
    found: Frame | None = None
    for frame in seen.thread.frames if seen.thread else ():
        is_work = phase_of(frame.function, frame.file) in _WORDS_OF_WORK
        if found is not None and not is_work:
            break
        found = frame if is_work else None
    return found


def _meant_barrier(seen: RankEvidence) -> Frame | None:
    frames = seen.thread.frames if seen.thread else ()
    return next((frame for frame in frames if is_meant_barrier(frame.function, frame.file)), None)


def leaving(case: JobCase) -> Conclusion | None:
    """The training has ended and ranks are on their way out.

    All that ended did so with code 0, and none waits, in the store neither. Without the ranks' own record of their end,
    most must be gone, or all others at one place.
    """
    evidence, alive = case.evidence, case.alive
    if case.graph.waits or not alive or any(seen.is_gone and not _ended_well(seen) for seen in evidence.ranks):
        return None
    says_so = all(seen.heartbeat is not None and seen.heartbeat.phase == END_PHASE for seen in alive)
    gone = len(evidence.ranks) - len(alive)
    if not says_so and (others_wait(case) or any(map(may_wait_for_store, alive))):
        return None
    if not says_so and not (gone and (gone >= len(alive) or _stand_together(alive))):
        return None
    slow = alive[0]
    where = f"{evidence.name(slow.rank)} is still in {slow.place}" if len(alive) == 1 else f"{len(alive)} are leaving"
    return Conclusion(
        state=State.FINISHED,
        claim=f"the training has ended: {gone} of {evidence.world_size} ranks have ended with exit code 0, and {where}",
        strength=Strength.AGREED if says_so else Strength.GUESS,
        hang_class=HangClass.LEAVING,
        evidence=("the ranks' own records show that they have reached the end",) if says_so else (),
        missing=() if says_so else ("whether the remaining ranks have reached the end of their training",),
    )


def _ended_well(seen: RankEvidence) -> bool:
    return seen.exit is not None and seen.exit.is_clean


def _stand_together(alive: Sequence[RankEvidence]) -> bool:
    """Whether all that could be read are at one place, and none of them computes or writes."""
    places = {thread.named_frames[:1] for seen in alive if (thread := seen.thread)}
    return len(places) == 1 and not any(seen.threads and (is_busy(seen) or moves_bytes(seen)) for seen in alive)
