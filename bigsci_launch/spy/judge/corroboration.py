"""The last step: what else supports the verdict, or contradicts it.

The rings of the ranks, first traceback in logs, kills for lack of memory, holders of file locks, stale lock files,
stuck connections. It raises or lowers the strength by one level and adds lines. It never changes whom the verdict
accuses, however loud a log, nor its class: `refine_class` decides between classes that the rule alone cannot tell
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from bigsci_launch.spy.evidence.kernel import FileLock
from bigsci_launch.spy.evidence.known_code import bare_name
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.commands import FIND_BUILD_LOCK, on_node
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.first_use import ASK_NCCL, words_of_first_use
from bigsci_launch.spy.judge.last_calls import find_in_rings, whereabouts
from bigsci_launch.spy.judge.rules.failures import lost_peer
from bigsci_launch.spy.judge.rules.network import stuck_connections
from bigsci_launch.spy.judge.rules.rendezvous import calling_in_vain
from bigsci_launch.spy.taxonomy import HangClass, State

LEFT_CLASSES = (
    HangClass.COLLECTIVE_SKIPPED,
    HangClass.LEFT_EARLY,
    HangClass.OPERATION_DIFFERS,
    HangClass.PHASES_SPLIT,
    HangClass.LOCAL_DECISION,
)
"""Classes that also fit a rank whose exception took it out of the schedule into a barrier of its own."""
MAX_RING_FACTS = 2
SAME_MOMENT_S = 0.2
"""Exceptions this close in time are one event: the clocks of nodes agree no better."""


@dataclass(frozen=True, slots=True)
class Clue:
    """One thing that bears on the verdict. `weight`: 1 supports it, -1 contradicts it, 0 only belongs to it."""

    evidence: str = ""
    missing: str = ""
    weight: int = 0
    next: str = ""


def corroborate(conclusion: Conclusion, evidence: Evidence) -> Conclusion:
    """Return `conclusion` with all other evidence about it. Pure; never changes whom it accuses."""
    if conclusion.state in (State.PROGRESSING, State.FINISHED, State.UNKNOWN):
        return conclusion
    accused = {suspect.rank for suspect in conclusion.suspects}
    suspects = [seen for seen in evidence.ranks if seen.rank in accused]
    clues = [clue for find in _SEARCHES for clue in find(conclusion, evidence, suspects)]
    weights = [clue.weight for clue in clues]
    by = -1 if -1 in weights else max(weights, default=0)
    return replace(
        conclusion,
        strength=conclusion.strength.raised(by) if by else conclusion.strength,
        evidence=_joined(conclusion.evidence, (clue.evidence for clue in clues)),
        missing=_joined(conclusion.missing, (clue.missing for clue in clues)),
        next=_joined(conclusion.next, (clue.next for clue in clues)),
    )


def refine_class(conclusion: Conclusion, evidence: Evidence) -> Conclusion:
    """Return `conclusion` with the class that explains why its suspect left the schedule, if its process shows that."""
    accused = {suspect.rank for suspect in conclusion.suspects}
    suspects = [seen for seen in evidence.ranks if seen.rank in accused]
    if conclusion.state is not State.HANG or conclusion.hang_class not in LEFT_CLASSES:
        return conclusion
    if any(_destructor(seen) for seen in suspects):
        return replace(conclusion, hang_class=HangClass.COLLECTIVE_IN_DESTRUCTOR)
    first = [seen for seen in _first_failures(evidence) if seen.rank in accused]
    if first and not _survived(first[0]):
        return replace(conclusion, hang_class=HangClass.BARRIER_AFTER_EXCEPTION)
    return conclusion


def _joined(lines: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    """Join with the corroborating lines (`more`) first: reports show only a few lines of each kind."""
    return tuple(dict.fromkeys(line for line in (*more, *lines) if line))


# --------------------------------------------------------------------------------------------------- exceptions


def _failures(evidence: Evidence) -> list[RankEvidence]:
    """Ranks that raised something by themselves."""
    return [seen for seen in evidence.ranks if seen.failure and not lost_peer(seen)]


def _first_failures(evidence: Evidence) -> list[RankEvidence]:
    """The ranks that raised first; several if it was at the same moment."""
    failed = _failures(evidence)
    earliest = min((_time_of(seen) for seen in failed), default=0.0)
    return [seen for seen in failed if _time_of(seen) - earliest <= SAME_MOMENT_S]


def _first_exception(_conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """The first exception of the job: a suspect's own, or that of a rank that nothing else accuses."""
    first = _first_failures(evidence)
    if not first:
        return []
    ranks = {seen.rank for seen in suspects}
    accused = [seen for seen in first if seen.rank in ranks]
    if accused:
        return [_own_exception(evidence, accused[0])]
    said = _said(evidence, first[0])
    if not suspects:
        return [Clue(f"{said}: the first exception of the job", missing=_HANDLED)]
    late = next((seen for seen in _failures(evidence) if seen.rank in ranks), None)
    if late is not None:
        return [Clue(f"{said}: before the first exception of {evidence.short_name(late.rank)}", weight=-1)]
    return [Clue(f"{said}, and no suspect raised an exception", missing=_HANDLED, weight=-1)]


_HANDLED = "whether that exception was handled"


def _survived(seen: RankEvidence) -> bool:
    """Whether later records show that the rank continued after its exception."""
    return seen.heartbeat is not None and _time_of(seen) < seen.heartbeat.time


def _own_exception(evidence: Evidence, seen: RankEvidence) -> Clue:
    """A suspect's exception. It is weak evidence if later records show that the rank survived it."""
    said = f"{_said(evidence, seen)}: the first exception of the job"
    return Clue(f"{said}, and the rank continued after it") if _survived(seen) else Clue(said, weight=1)


def _said(evidence: Evidence, seen: RankEvidence) -> str:
    """`rank 5 (n2) raised OSError: no space at save (train.py:9) at 12:00:01 UTC, according to its log`."""
    assert seen.failure is not None
    when, source = _clock(seen.failure.time), seen.failure.source
    return f"{evidence.name(seen.rank)} raised {seen.failure}{when}, according to {source}"


def _time_of(seen: RankEvidence) -> float:
    return seen.failure.time if seen.failure else 0.0


def _clock(time: float) -> str:
    return f" at {datetime.fromtimestamp(time, timezone.utc):%H:%M:%S} UTC" if time else ""


def _called_by_collector(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """A suspect that entered a communication from `__del__`: no two ranks free an object at the same moment."""
    if conclusion.hang_class is not HangClass.COLLECTIVE_IN_DESTRUCTOR:
        return []
    found = [(seen, frame) for seen in suspects if (frame := _destructor(seen))]
    why = "the garbage collector runs at a different time on each rank"
    return [Clue(f"{evidence.name(seen.rank)} entered it from {frame}: {why}", weight=1) for seen, frame in found[:1]]


def _destructor(seen: RankEvidence) -> Frame | None:
    """The `__del__` from which the rank entered its communication, or None."""
    frames = seen.thread.frames if seen.thread and seen.thread.operation else ()
    return next((frame for frame in frames if bare_name(frame.function) == "__del__"), None)


# --------------------------------------------------------------------------------------------------- memory


def _memory_kills(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """Kills for lack of memory that explain what a suspect has lost: its own process, or one that it waits for."""
    found = _kills_of(filter(_has_lost_a_process, suspects), evidence)
    if not found and any(_was_killed(seen) for seen in suspects):
        node = next(seen.node for seen in suspects if _was_killed(seen))
        return [Clue(missing="who sent SIGKILL: the OOM killer of the kernel, or a user", next=_who_killed(node))]
    return [Clue(words, weight=1) for words in found]


def _other_memory_kills(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """Kills where no suspect has lost a process: the kernel only counts them, so they may be older than the job."""
    told = _kills_of(filter(_has_lost_a_process, suspects), evidence)
    return [Clue(f"{words}, at an unknown time") for words in _kills_of(suspects, evidence) if words not in told]


def _has_lost_a_process(seen: RankEvidence) -> bool:
    return _was_killed(seen) or _waits_for_killed(seen)


def _kills_of(ranks: Iterable[RankEvidence], evidence: Evidence) -> list[str]:
    """Return what the kernel has counted in the control groups of ranks, or of others on their nodes."""
    of_node = {seen.node: seen.memory_events for seen in evidence.ranks if seen.memory_events}
    found: dict[str, None] = {}
    for seen in ranks:
        if events := seen.memory_events or of_node.get(seen.node):
            times = "once" if events.num_kills == 1 else f"{events.num_kills} times"
            words = f"the kernel has killed a process for lack of memory {times} in {events.group} on {seen.node}"
            found[words] = None
    return list(found)


def _who_killed(node: str) -> str:
    return on_node(node, "dmesg -T | grep -i 'killed process'")


def _was_killed(seen: RankEvidence) -> bool:
    return seen.exit is not None and seen.exit.signal == "SIGKILL"


def _waits_for_killed(seen: RankEvidence) -> bool:
    """Whether the rank waits for a pool or a worker, whose processes may be killed without notice."""
    return any("multiprocessing/" in frame.file for thread in seen.threads or () for frame in thread.frames)


# --------------------------------------------------------------------------------------------------- locks


def _lock_holders(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """Who holds the file lock for which a suspect, or a child of it, waits."""
    found = []
    for seen in suspects:
        for lock in evidence.locks:
            if lock.node == seen.node and not seen.family.isdisjoint(lock.waiters):
                found.append(_held(lock, evidence))
    is_known = any(str(lock) in conclusion.evidence for lock in evidence.locks)
    if not found and not is_known and conclusion.hang_class is HangClass.FILE_LOCK_HELD:
        missing = "who holds the lock: /proc/locks on this node does not show it"
        return [Clue(missing=missing, next=on_node(suspects[0].node, "cat /proc/locks") if suspects else "")]
    return found


def _held(lock: FileLock, evidence: Evidence) -> Clue:
    holder = next((seen for seen in evidence.ranks if seen.node == lock.node and seen.pid == lock.holder), None)
    words = f"{lock}" + (f": that is {evidence.name(holder.rank)}" if holder else "")
    if not lock.holder:
        return Clue(missing="who holds the lock: a process on another node, or one that has ended")
    return Clue(words, weight=1, next=on_node(lock.node, f"ls -l /proc/{lock.holder}/fd", "who holds the lock"))


def _stale_lock_file(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """A build that waits for a lock file: if no rank on the node is building, the file stays."""
    if conclusion.hang_class is not HangClass.BUILD_LOCK_STALE:
        return []
    nodes = {seen.node for seen in suspects}
    near = [seen for seen in evidence.ranks if seen.node in nodes]
    builder = next((seen for seen in near if _is_building(seen)), None)
    if builder is not None:
        words = f"{evidence.name(builder.rank)} is building right now: the lock may be its own, and will be released"
        return [Clue(words, weight=-1)]
    words = "no rank on the node is building anything: the lock file is left over from a build that was killed"
    return [Clue(words, missing="the path and the age of the lock file", weight=1, next=FIND_BUILD_LOCK)]


def _is_building(seen: RankEvidence) -> bool:
    """Whether a rank is in torch's builder and not merely waiting for another rank's build."""
    names = {bare_name(frame.function) for thread in seen.threads or () for frame in thread.frames}
    return bool(names & {"_run_ninja_build", "_write_ninja_file_and_build_library"}) and "wait" not in names


# --------------------------------------------------------------------------------------------------- connections


def _connections(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """Unacknowledged bytes and unanswered connections: the network plays a part."""
    if conclusion.hang_class in (HangClass.LINK_DOWN, HangClass.LARGE_PACKETS_LOST):
        return []
    found = [Clue(line) for seen in suspects if (line := calling_in_vain(seen)) and line not in conclusion.evidence]
    stuck = stuck_connections(evidence)
    if stuck:
        missing = "whether the network works: connections between hosts retransmit in vain"
        found.append(Clue(str(stuck[0]), missing=missing, weight=-1))
    return found if conclusion.state is not State.HANG else [*found, *_unread(evidence, suspects)]


def _unread(evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """Bytes that a suspect has no room left for: it does not read what others have sent it."""
    ends = {socket.local: seen for seen in suspects for socket in seen.sockets if socket.unread}
    for seen in evidence.ranks:
        for socket in seen.sockets:
            if socket.is_unsent and socket.remote in ends:
                deaf = evidence.name(ends[socket.remote].rank)
                return [Clue(f"{deaf} does not read what {evidence.short_name(seen.rank)} has sent it", weight=1)]
    return []


# --------------------------------------------------------------------------------------------------- rings


def _last_calls(conclusion: Conclusion, evidence: Evidence, suspects: list[RankEvidence]) -> list[Clue]:
    """What rings show: keys, tags, groups and steps that do not match, and where a suspect was that is gone."""
    found = [fact.words for fact in find_in_rings(evidence)[:MAX_RING_FACTS]]
    gone = [seen for seen in suspects if seen.is_gone and seen.ring is not None]
    found += [f"{evidence.name(seen.rank)} {whereabouts(seen)}" for seen in gone[:MAX_RING_FACTS]]
    return [Clue(words) for words in found if words not in conclusion.claim]


Find = Callable[[Conclusion, Evidence, list[RankEvidence]], list[Clue]]


def _communicators(conclusion: Conclusion, evidence: Evidence, _suspects: list[RankEvidence]) -> list[Clue]:
    """A communicator that may be in the making, where no rank is accused."""
    words = "" if conclusion.suspects else words_of_first_use(evidence)
    return [Clue(evidence=words, next=ASK_NCCL)] if words else []


_SEARCHES: tuple[Find, ...] = (
    _last_calls,
    _first_exception,
    _called_by_collector,
    _memory_kills,
    _lock_holders,
    _stale_lock_file,
    _connections,
    _communicators,
    _other_memory_kills,
)
