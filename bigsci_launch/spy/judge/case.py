"""Everything that rules look at, computed once: the evidence, who waits for whom, and which waits are not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigsci_launch.spy.evidence.kernel import FileLock
from bigsci_launch.spy.evidence.known_code import POLL_WAITS, SLEEP_WAITS
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stack_classes import StackClass, merge_stacks
from bigsci_launch.spy.judge.facts import (
    POLLING_PER_S,
    deciding_wait,
    finished_something,
    is_busy,
    may_wait_for_store,
    outer_frames_moved,
    polls_for_lock,
    sleeps_on_futex,
    spins_in_native_code,
    still_s,
    stood_s,
    switches_per_s,
    waits_in_library,
    was_seen_twice,
)
from bigsci_launch.spy.judge.schedule.mismatch import Departed, Mismatch, find_departed, find_mismatch
from bigsci_launch.spy.judge.waits import WaitGraph, build_graph, is_halted


@dataclass(frozen=True)
class JobCase:
    """One look at a job, as rules see it. Values are computed when they are first asked for."""

    evidence: Evidence
    graph: WaitGraph

    @classmethod
    def of(cls, evidence: Evidence) -> JobCase:
        return cls(evidence, build_graph(evidence))

    @cached_property
    def by_rank(self) -> Mapping[int, RankEvidence]:
        return {seen.rank: seen for seen in self.evidence.ranks}

    @cached_property
    def alive(self) -> tuple[RankEvidence, ...]:
        return tuple(seen for seen in self.evidence.ranks if not seen.is_gone)

    @cached_property
    def classes(self) -> Sequence[StackClass]:
        """Ranks by equal stack, the largest class first."""
        return merge_stacks(self.evidence.ranks)

    @cached_property
    def mismatch(self) -> Mismatch | None:
        """The first collective that members of its group disagree about."""
        return find_mismatch(self.evidence, self.graph)

    @cached_property
    def departed(self) -> Departed:
        """Who left its own schedule, or that of its peers, as far as recorders show it."""
        return find_departed(self.evidence, self.graph, self.mismatch)

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """Ranks that finished something between the looks.

        A rank that computes does not count while others wait: its call may never end. If no rank waits in a
        communication, any change of the outer frames counts.
        """
        moved = tuple(seen.rank for seen in self.alive if finished_something(seen))
        if moved or self.graph.waits:
            return moved
        return tuple(seen.rank for seen in self.alive if outer_frames_moved(seen))

    @cached_property
    def outsiders(self) -> tuple[RankEvidence, ...]:
        """Ranks that certainly are in no communication while each of the others is in one, or may be: at most half.

        Where no stack shows a communication, they are the ones that the others may wait for.
        """
        found = tuple(seen for seen in self.alive if seen.samples and self.communicates(seen) is False)
        return found if 2 * len(found) <= len(self.alive) else ()

    @cached_property
    def roots(self) -> tuple[RankEvidence, ...]:
        """Ranks that others wait for, that are in no visible communication, and that were within reach."""
        if not self.graph.waits:
            return self.outsiders
        return tuple(seen for rank in self.graph.roots if not (seen := self.by_rank[rank]).was_out_of_reach)

    @cached_property
    def locked_out(self) -> Mapping[int, tuple[FileLock, int]]:
        """Ranks that wait, or whose child waits, for a file lock that another rank or its child holds: {rank: (lock,
        rank of the holder)}."""
        owners = {(seen.node, pid): seen.rank for seen in self.evidence.ranks for pid in seen.family}
        found = {}
        for lock in self.evidence.locks:
            holder = owners.get((lock.node, lock.holder))
            for pid in lock.waiters:
                waiter = owners.get((lock.node, pid))
                if holder is not None and waiter is not None and waiter != holder:
                    found[waiter] = (lock, holder)
        return {**self._polled_locks(owners), **found}

    def _polled_locks(self, owners: Mapping[tuple[str, int], int]) -> dict[int, tuple[FileLock, int]]:
        """The same of ranks that try again and again: the one lock on their node that another rank holds."""
        found = {}
        for seen in self.alive:
            if seen.thread is None or not polls_for_lock(seen.thread):
                continue
            held = [(lock, owners.get((lock.node, lock.holder))) for lock in self.evidence.locks]
            near = [(lock, rank) for lock, rank in held if lock.node == seen.node and rank not in (None, seen.rank)]
            if len(near) == 1 and not near[0][0].waiters and near[0][1] is not None:
                found[seen.rank] = (near[0][0], near[0][1])
        return found

    def communicates(self, seen: RankEvidence) -> bool | None:
        """Whether the rank is in a communication: True if that is seen, False if it cannot be, None if it may be.

        `Work.wait()`, a device, compiled code, MPI and autograd communicate without a frame of Python, and so do ranks
        that share a lock.
        """
        if seen.rank in self.graph.waits:
            return True
        if seen.is_gone or is_halted(seen):
            return False
        if not seen.threads:
            return None
        if self._shows_none(seen):
            # No recorder lists keys of the store, which other ranks set.
            return None if may_wait_for_store(seen) and self.graph.waits else False
        if seen.thread is not None and seen.thread.waits_for_shared_lock:
            return None
        if seen.thread is not None and seen.thread.is_plainly_local:
            return False
        if seen.thread is not None and seen.thread.native_call is not None:
            return None
        if is_busy(seen):
            return False if spins_in_native_code(seen) is False else None
        if waits_in_library(seen):
            return False
        return self._sleeps_in_communication(seen)

    def _sleeps_in_communication(self, seen: RankEvidence) -> bool | None:
        wait = deciding_wait(seen)
        if wait is None:
            return None
        if self._sleeps_by_itself(seen):
            return False
        if sleeps_on_futex(seen):
            return None
        if wait.startswith(POLL_WAITS):
            # Of torch's own waits only that for a key of its store is in poll, right below the caller's line.
            return None if may_wait_for_store(seen) or not self.graph.waits else False
        if wait.startswith(SLEEP_WAITS):
            rate = switches_per_s(seen)
            return None if rate is None or rate >= POLLING_PER_S else False
        return False

    def _sleeps_by_itself(self, seen: RankEvidence) -> bool:
        """Whether the ring of the rank shows no call that waits for others, and no library that may have begun one in
        C++ is at work."""
        is_own = seen.thread is not None and seen.thread.is_in_own_code
        return is_own and seen.ring is not None and seen.ring.shows_no_wait

    def _shows_none(self, seen: RankEvidence) -> bool:
        """Whether the recorder of the rank lists all that it is in, and lists nothing open. That of gloo does not list
        messages between two ranks."""
        recorder = seen.recorder
        if recorder is None or not recorder.lists_all or recorder.open_calls or self.has_messages:
            return False
        return recorder.open_messages is not None or not self.may_exchange_messages

    @cached_property
    def may_exchange_messages(self) -> bool:
        """Whether several ranks sleep on a futex right below a line of their own: `Work.wait()` of messages, which
        gloo's recorder does not list, looks like that."""
        silent = [seen for seen in self.alive if seen.rank not in self.graph.waits and sleeps_on_futex(seen)]
        return sum(seen.thread is not None and seen.thread.is_in_own_code for seen in silent) > 1

    @cached_property
    def has_messages(self) -> bool:
        """Whether some rank is in a point-to-point call."""
        return any(wait.is_point_to_point for wait in self.graph.waits.values())

    @cached_property
    def was_seen_twice(self) -> bool:
        """Whether there is a second look at the ranks that could be reached."""
        looked = [seen for seen in self.evidence.ranks if seen.samples]
        return bool(looked) and 2 * sum(was_seen_twice(seen) for seen in looked) >= len(looked)

    def asleep_s(self, ranks: Sequence[int]) -> float:
        """For how many seconds none of `ranks` has run; 0 where that is not known of one of them."""
        return min((still_s(self.by_rank[rank]) or 0.0 for rank in ranks), default=0.0)

    def late_s(self, ranks: Sequence[int]) -> float:
        """For how many seconds other ranks have waited for each of `ranks`: they are late by at least that much."""
        return min((self._awaited_s(rank) for rank in ranks), default=0.0)

    def _awaited_s(self, rank: int) -> float:
        if not self.graph.waits:
            return self._stood_inside_s
        return max((seconds for blockers, seconds in self._meetings_stood_s if rank in blockers), default=0.0)

    @cached_property
    def _meetings_stood_s(self) -> tuple[tuple[frozenset[int], float], ...]:
        """(blockers, for how many seconds the longest-standing of the ranks that wait for them has been there)."""
        return tuple((blockers, max(self._stood_s[rank] for rank in ranks)) for blockers, ranks in self.graph.meetings)

    @cached_property
    def _stood_inside_s(self) -> float:
        """The same of the ranks that may wait for the outsiders, where no stack shows a communication."""
        outside = {seen.rank for seen in self.outsiders}
        return max((self._stood_s[seen.rank] for seen in self.alive if seen.rank not in outside), default=0.0)

    @cached_property
    def _stood_s(self) -> Mapping[int, float]:
        return {seen.rank: stood_s(seen) or 0.0 for seen in self.evidence.ranks}

    def stood_s(self, ranks: Sequence[int]) -> float:
        """For how many seconds all of `ranks` have been where they are."""
        return min((self._stood_s[rank] for rank in ranks), default=0.0)
