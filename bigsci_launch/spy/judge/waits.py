"""Who waits for whom: the communication that each rank is in, and the ranks that have not reached it.

There are two sources. If torch's recorder could be read, group and sequence number show exactly who is missing. If not,
the stacks give the operation, known frames, the topology or the connections of the ranks give the group, and a rank
that is elsewhere has either not reached the communication or already left it: stacks alone do not show which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bigsci_launch.spy.evidence.calls.flight_recorder import Call
from bigsci_launch.spy.evidence.calls.ring import RingCall
from bigsci_launch.spy.evidence.groups import (
    group_members,
    group_text,
    is_world_only,
    other_groups,
    scope_of,
    scope_within,
    smallest_group,
)
from bigsci_launch.spy.evidence.known_code import (
    LOCK_WAITS,
    POINT_TO_POINT,
    call_scope,
    operation_of,
    uses_process_groups,
)
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack
from bigsci_launch.spy.judge.facts import is_busy, is_only_counted, waits_in, waits_in_library

SETUP_OPERATIONS = ("init_process_group", "new_group")
ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather"})
"""Collectives that a rank may leave before all others have come."""
OWN_GROUP = "own_group"
"""Whether a call was given a group, 1, or is over the default one, 0."""
ROOT_INDICES = ("group_src", "group_dst")
ROOT_ARGUMENTS = ("src", "dst", *ROOT_INDICES)
ASSUMED = " (its members are assumed)"
DEFAULT_GROUP = "0"
"""Name that torch gives to the group of all ranks."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A communication that a rank is in. `call` is its recorder entry; without one, the stack is the source.

    `members` is None if the group is not known, and `is_assumed` if nothing lists them. Without members, `path` holds
    the calls that led there, innermost first: a function may communicate over several groups for several callers.
    Where they can be read: `partner` and `tag` of a point-to-point call, `root` of a collective that has one
    (`root_index` is its index in the group), and `outer`, the call that the program made (`all_gather_object`).
    """

    rank: int
    operation: str
    scope: str | None
    members: tuple[int, ...] | None
    site: Frame | None
    call: Call | None
    outer: str | None = None
    partner: int | None = None
    tag: int | None = None
    root: int | None = None
    root_index: int | None = None
    path: str = ""
    is_assumed: bool = False

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in POINT_TO_POINT

    @property
    def place(self) -> tuple[str, str | None, str]:
        """What ranks in the same communication have in common, as far as a stack shows."""
        return (self.operation, self.scope, self.path if self.members is None else "")

    def __str__(self) -> str:
        number = f" number {self.call.sequence}" if self.call else ""
        if self.partner is not None:
            preposition = "to" if "send" in self.operation else "from"
            tag = f" with tag {self.tag}" if self.tag else ""
            return f"{self.operation} {preposition} rank {self.partner}{tag}"
        if self.members is None and self.scope is None:
            return self.operation
        assumed = ASSUMED if self.is_assumed else ""
        return f"{self.operation}{number} of {group_text(self.scope, self.members)}{assumed}"


@dataclass(frozen=True)
class WaitGraph:
    """`waits` per waiting rank; `blockers` are the ranks that have not joined a waiting rank.

    `of_world_only`: whether each process group holds all ranks, as their connections show; None if not known.
    `users` are, per rank that waits in a group whose members are assumed, the ranks that have used that group.
    `lost` are ranks that wait, while it is uncertain for whom.
    """

    waits: Mapping[int, Wait]
    blockers: Mapping[int, frozenset[int]]
    ranks: tuple[int, ...]
    users: Mapping[int, frozenset[int]] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    of_world_only: bool | None = None

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Ranks that others wait for and that wait in no communication themselves."""
        awaited = frozenset().union(*(blockers for blockers, _ in self.meetings))
        return tuple(rank for rank in self.ranks if rank in awaited and rank not in self.waits)

    @cached_property
    def meetings(self) -> tuple[tuple[frozenset[int], tuple[int, ...]], ...]:
        """(blockers, the ranks that wait for them), grouped because thousands of ranks wait in few places."""
        found: dict[int, tuple[frozenset[int], list[int]]] = {}
        for rank, blockers in self.blockers.items():
            found.setdefault(id(blockers), (blockers, []))[1].append(rank)
        return tuple((blockers, tuple(ranks)) for blockers, ranks in found.values())

    def leading_to(self, goals: frozenset[int], without: int | None = None) -> frozenset[int]:
        """Return the waiting ranks from which a chain of waits ends in `goals`, not counting the rank `without`."""
        waiting_for: dict[int, list[list[int]]] = {}
        for blockers, ranks in self.meetings:
            not_seen = [rank for rank in ranks if rank not in goals and rank != without]
            for blocker in blockers:
                waiting_for.setdefault(blocker, []).append(not_seen)
        found: set[int] = set()
        left = [goal for goal in goals if goal != without]
        while left:
            for not_seen in waiting_for.get(left.pop(), ()):
                found.update(not_seen)
                left += not_seen
                not_seen.clear()
        return frozenset(found)

    @cached_property
    def is_certain(self) -> bool:
        """Whether the group of every wait is known: only then is it certain who waits for whom."""
        return all(wait.members is not None and not wait.is_assumed for wait in self.waits.values())

    def certain_part(self) -> WaitGraph:
        """Return the graph without the waits whose group is not known. Who has used an assumed group is a member."""
        if self.is_certain:
            return self
        none: frozenset[int] = frozenset()
        known = {
            rank: found & self.users.get(rank, none) if wait.is_assumed else found if wait.members else none
            for rank, found in self.blockers.items()
            for wait in (self.waits[rank],)
        }
        lost = frozenset(rank for rank, found in self.blockers.items() if found and not known[rank])
        return WaitGraph(self.waits, known, self.ranks, self.users, lost, self.of_world_only)

    @cached_property
    def surely_awaited(self) -> frozenset[int]:
        """Ranks that others certainly wait for."""
        return frozenset().union(*(blockers for blockers, _ in self.certain_part().meetings))

    def open_ends(self) -> tuple[int, ...]:
        """Return the ranks in point-to-point calls with unknown partners if all other waits lead to them, else none."""
        ends = tuple(rank for rank, wait in self.waits.items() if wait.is_point_to_point and wait.members is None)
        rest = self.waits.keys() - set(ends) - self.leading_to(frozenset(ends))
        return () if rest else ends

    @cached_property
    def endless(self) -> tuple[int, ...]:
        """Ranks in a circle: their waits lead neither to a root nor to a rank whose peers are unknown."""
        unknown = {rank for rank, wait in self.waits.items() if wait.members is None and not self.blockers[rank]}
        explained = self.leading_to(frozenset({*self.roots, *unknown, *self.lost}))
        return tuple(rank for rank in self.waits if rank not in explained and self.blockers[rank])

    def breaking_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are each, on their own, part of every circle of waits.

        Ranks that are at one place and wait for the same others are one node of a smaller graph: no single one of them
        breaks a circle.
        """
        places: dict[object, list[int]] = {}
        for rank in self.endless:
            wait = self.waits[rank]
            sequence = wait.call.sequence if wait.call else None
            places.setdefault((wait.place, wait.members, sequence, self.blockers[rank]), []).append(rank)
        node_of = {rank: node for node, ranks in enumerate(places.values()) for rank in ranks}
        edges = [
            frozenset(node_of[blocker] for blocker in self.blockers[ranks[0]] if blocker in node_of)
            for ranks in places.values()
        ]
        single = [ranks[0] for ranks in places.values() if len(ranks) == 1]
        return tuple(sorted(rank for rank in single if _is_acyclic(edges, node_of[rank])))

    def direct_waiter(self, rank: int) -> Wait | None:
        """Return a wait for `rank` itself: preferably in a collective, and with the fewest other blockers."""
        waiters = [self.waits[other] for other, blockers in self.blockers.items() if rank in blockers]
        return min(
            waiters,
            key=lambda wait: (wait.is_point_to_point, len(self.blockers[wait.rank]), wait.rank),
            default=None,
        )


def _is_acyclic(edges: Sequence[frozenset[int]], removed: int) -> bool:
    """Whether the graph has no circle once node `removed` is taken out."""
    left = {node: targets - {removed} for node, targets in enumerate(edges) if node != removed}
    while True:
        free = [node for node, targets in left.items() if not any(target in left for target in targets)]
        if not free:
            return not left
        for node in free:
            del left[node]


def build_graph(evidence: Evidence) -> WaitGraph:
    found = {seen.rank: wait for seen in evidence.ranks if (wait := find_wait(seen, evidence)) is not None}
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    connections = [seen.connections for seen in evidence.ranks]
    of_world_only = is_world_only(connections)
    found = _within_other_groups(found, evidence, other_groups(connections))
    if of_world_only is True:
        found = _within_the_world(found, by_rank)
    groups = {rank: wait.call.token.group for rank, wait in found.items() if wait.is_assumed and wait.call}
    users = {group: frozenset(users_of(group, evidence)) for group in set(groups.values())}
    used_by = {rank: users[group] for rank, group in groups.items()}
    blockers = _all_blockers(found, by_rank)
    return WaitGraph(found, blockers, tuple(by_rank), used_by, of_world_only=of_world_only)


def _within_the_world(waits: Mapping[int, Wait], by_rank: Mapping[int, RankEvidence]) -> dict[int, Wait]:
    """Return `waits` with the world as the group of each whose group was not known.

    None is changed if one is not of torch's process groups, or if ranks reached the same operation on different paths:
    the stacks do not show whether that is one collective.
    """
    open_waits = [wait for wait in waits.values() if _lacks_group(wait)]
    paths = {(wait.operation, wait.path) for wait in waits.values() if not wait.is_point_to_point}
    is_told = len({operation for operation, _ in paths}) == len(paths)
    if not is_told or not all(_uses_process_groups(by_rank[wait.rank].thread) for wait in open_waits):
        return dict(waits)
    members = group_members("world", 0, len(by_rank), None)
    world = {wait.rank: replace(wait, scope="world", members=members, path="") for wait in open_waits}
    return {**waits, **world}


def _within_other_groups(
    waits: Mapping[int, Wait], evidence: Evidence, others: Mapping[int, tuple[int, ...]]
) -> dict[int, Wait]:
    """Return `waits` with the members of each call that was given a group, where a rank has only one besides the
    world."""
    found = dict(waits)
    for seen in evidence.ranks:
        wait, members = waits.get(seen.rank), others.get(seen.rank)
        if wait is None or members is None:
            continue
        is_given = _lacks_group(wait) and seen.thread is not None and seen.thread.argument(OWN_GROUP) == 1
        users = users_of(wait.call.token.group, evidence) if wait.call and wait.is_assumed else ()
        if is_given or (users and set(members).issuperset(users)):
            found[seen.rank] = replace(wait, members=members, scope=None, path="", is_assumed=False)
    return found


def _lacks_group(wait: Wait) -> bool:
    return wait.members is None and wait.call is None and not wait.is_point_to_point


def _uses_process_groups(thread: ThreadStack | None) -> bool:
    frame = thread.communication if thread else None
    return frame is not None and uses_process_groups(frame.function, frame.file)


def _all_blockers(waits: Mapping[int, Wait], by_rank: Mapping[int, RankEvidence]) -> dict[int, frozenset[int]]:
    """The blockers of every waiting rank, found once for ranks in the same collective of the same group."""
    found: dict[object, frozenset[int]] = {}
    blockers = {}
    for rank, wait in waits.items():
        token = (wait.call.token.group, wait.call.sequence) if wait.call else None
        key = (wait.place, id(wait.members), token, rank if wait.is_point_to_point else None)
        if key not in found:
            found[key] = find_blockers(wait, waits, by_rank)
        blockers[rank] = found[key]
    return blockers


def find_wait(seen: RankEvidence, evidence: Evidence) -> Wait | None:
    """Return the communication that a rank is in, or None."""
    thread = seen.thread
    if seen.is_gone or is_halted(seen):
        return None
    operation = thread.operation if thread else None
    calls = seen.recorder.open_calls if seen.recorder and not is_only_counted(seen) else ()
    message = seen.ring.open_message(thread.tid if thread else None) if seen.ring else None
    if message is not None and not operation and not calls and waits_for_handle(seen) is not False:
        return _wait_for_message(seen, thread, message)
    if operation in POINT_TO_POINT or operation in SETUP_OPERATIONS or (operation and not calls):
        return _wait_from_stack(seen, thread, operation, evidence)
    if calls and (operation or waits_for_handle(seen) is not False):
        return wait_from_call(seen, thread, calls[-1] if operation else calls[0], evidence)
    return None


def _wait_for_message(seen: RankEvidence, thread: ThreadStack | None, message: RingCall) -> Wait:
    """Return the wait for a message that only the ring shows: `Work.wait()` has no frame."""
    assert message.operation is not None and message.peer is not None
    members = (min(seen.rank, message.peer), max(seen.rank, message.peer))
    site = thread.site if thread else None
    return Wait(seen.rank, message.operation, None, members, site, None, partner=message.peer, tag=message.tag)


def is_halted(seen: RankEvidence) -> bool:
    """Whether the process is stopped or sleeps in the kernel: then something else than its collective holds it up."""
    return seen.last is not None and seen.last.state in ("T", "t", "D")


def waits_for_handle(seen: RankEvidence) -> bool | None:
    """Whether a process without a communication on its stack waits for one that it started earlier.

    `Work.wait()` is C++ and shows no frame. It sleeps on a futex, which nothing does that computes or does I/O. Without
    stacks, an unfinished collective is the best that is known. None where the kernel was not asked, as in the files of
    other tools, or hides what the process sleeps in.
    """
    if seen.last is None:
        return False
    if seen.threads is None:
        return True
    return False if seen.last.state == "R" or is_busy(seen) or waits_in_library(seen) else waits_in(seen, LOCK_WAITS)


def _wait_from_stack(seen: RankEvidence, thread: ThreadStack | None, operation: str | None, evidence: Evidence) -> Wait:
    assert thread is not None and operation is not None
    scope = _said_scope(thread, operation, evidence)
    is_of_all = operation not in POINT_TO_POINT and scope is None and thread.argument(OWN_GROUP) == 0
    if is_of_all or operation in SETUP_OPERATIONS or operation == "monitored_barrier":
        scope = "world"
    members = group_members(scope, seen.rank, evidence.world_size, evidence.topology) if scope else None
    message = seen.ring.open_message(thread.tid) if seen.ring and operation in POINT_TO_POINT else None
    partner = thread.argument("src", "dst") if operation in POINT_TO_POINT else None
    tag = thread.argument("tag") if operation in POINT_TO_POINT else None
    if message is not None:
        partner, tag = message.peer, message.tag
    if partner is not None and not 0 <= partner < evidence.world_size:
        partner = None
    if partner is not None:
        members = (min(seen.rank, partner), max(seen.rank, partner))
    return Wait(
        seen.rank,
        operation,
        scope,
        members,
        thread.site,
        None,
        outer=thread.outer_operation,
        partner=partner,
        tag=tag,
        root=None if operation in POINT_TO_POINT else thread.argument(*ROOT_ARGUMENTS),
        root_index=thread.argument(*ROOT_INDICES),
        path=path_of(thread) if members is None else "",
    )


def _said_scope(thread: ThreadStack, operation: str, evidence: Evidence) -> str | None:
    """The scope of the communication, from the known function nearest to it."""
    scopes = (call_scope(frame.function, frame.file, operation) for frame in thread.frames)
    scope = next((scope for scope in scopes if scope is not None), None)
    return scope_within(scope, evidence.topology) if scope else None


def wait_from_call(seen: RankEvidence, thread: ThreadStack | None, call: Call, evidence: Evidence) -> Wait:
    """Return the wait for a recorded collective; without `thread`, its place in the code is not known."""
    members = recorded_members(seen, call.token.group, evidence)
    scope = scope_of(members, evidence.world_size, evidence.topology) if members else None
    said = _said_scope(thread, call.token.operation, evidence) if thread else None
    if said and said != scope and members:
        scope = said if group_members(said, seen.rank, evidence.world_size, evidence.topology) == members else scope
    return Wait(
        seen.rank,
        call.token.operation,
        scope,
        members,
        thread.site if thread else None,
        call,
        outer=thread.outer_operation if thread else None,
        root=thread.argument(*ROOT_ARGUMENTS) if thread and thread.operation == call.token.operation else None,
        path=path_of(thread) if members is None and thread else "",
        is_assumed=is_assumed(seen, call.token.group),
    )


def path_of(thread: ThreadStack) -> str:
    """The calls that led to a communication, innermost first, without lines: branches of one function may meet."""
    frames = (frame for frame in thread.named_frames if operation_of(frame.function, frame.file) is None)
    return " < ".join(f"{frame.function} {frame.file}" for frame in frames)


def recorded_members(seen: RankEvidence, group: str, evidence: Evidence) -> tuple[int, ...] | None:
    """The ranks of a recorded group: from the run if it lists them, else guessed from who has used it."""
    if seen.recorder and group in seen.recorder.members:
        return seen.recorder.members[group]
    if group == DEFAULT_GROUP:
        return group_members("world", seen.rank, evidence.world_size, evidence.topology)
    users = users_of(group, evidence)
    return smallest_group(users, evidence.world_size, evidence.topology) or tuple(users)


def is_assumed(seen: RankEvidence, group: str) -> bool:
    """Whether nothing lists the members of a recorded group: gloo does not, except by its name for the world."""
    return group != DEFAULT_GROUP and (seen.recorder is None or group not in seen.recorder.members)


def users_of(group: str, evidence: Evidence) -> list[int]:
    """Return the ranks whose recorder shows that they have used a group: these certainly are members."""
    return [seen.rank for seen in evidence.ranks if seen.recorder and group in seen.recorder.last_sequence]


def find_blockers(wait: Wait, waits: Mapping[int, Wait], by_rank: Mapping[int, RankEvidence]) -> frozenset[int]:
    """Return the members of the group that have not reached the communication of `wait`."""
    members = wait.members if wait.members is not None else tuple(by_rank)
    return frozenset(
        other
        for other in members
        if other != wait.rank and other in by_rank and not _has_come(other, wait, waits, by_rank)
    )


def _has_come(other: int, wait: Wait, waits: Mapping[int, Wait], by_rank: Mapping[int, RankEvidence]) -> bool:
    recorder = by_rank[other].recorder
    if wait.call is not None and recorder is not None:
        reached = recorder.last_sequence.get(wait.call.token.group, 0)
        # One that is stopped inside of the collective has begun it, and cannot do its part.
        return reached > wait.call.sequence or (reached == wait.call.sequence and not is_halted(by_rank[other]))
    theirs = waits.get(other)
    if theirs is None:
        return False
    if wait.is_point_to_point:
        return _meet(wait, theirs)
    is_same_group = wait.members is None or theirs.members is wait.members or theirs.members == wait.members
    return is_same_group and theirs.place == wait.place


def _meet(wait: Wait, theirs: Wait) -> bool:
    """Whether two ranks are at the two ends of one message: different tags do not meet."""
    if not theirs.is_point_to_point or theirs.members != wait.members or theirs.operation == wait.operation:
        return False
    return None in (wait.tag, theirs.tag) or wait.tag == theirs.tag
