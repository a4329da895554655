"""What the rings of the ranks show together: a key that was never set, a group that some have not joined, messages that
do not meet, a rank that is a step apart.

A ring outlives its process, so all of this holds for ranks that are gone too. What a ring no longer holds is unknown,
and accuses no rank.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigsci_launch.spy.evidence.calls.ring import Ring, RingCall, RootsNamed
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.taxonomy import HangClass
from bigsci_launch.topology.naming import agree

STORE_WAITS = ("store.get", "store.wait")
FROM_RING = "from its ring, the process is gone"
NOT_KNOWN = "is at an unknown place"
UNKNOWN_SETTER = "no ring shows which rank sets it"
MAX_PLACES = 3
MIN_STEPS_APART = 2
"""Steps for which a rank must have been apart from its peers, always by the same number."""
MIN_TIMES_NAMED = 2
"""Earlier calls that show which root a rank always names."""


@dataclass(frozen=True, slots=True)
class RingFact:
    """One thing that rings show, in `words`: `ranks` wait, and `others` should come or act."""

    hang_class: HangClass
    words: str
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()


def find_in_rings(evidence: Evidence) -> tuple[RingFact, ...]:
    """Return everything that the rings show, the most specific first."""
    finds = (find_missing_keys, find_crossed_messages, find_absent_from_group, find_steps_apart)
    return tuple(fact for find in finds for fact in find(evidence))


def current_call(seen: RankEvidence) -> RingCall | None:
    """Return the call that the rank is in by its ring: the outermost one of the thread that decides."""
    if seen.ring is None:
        return None
    inside = seen.ring.waits(seen.thread.tid if seen.thread else None)
    return inside[0] if inside else None


def words_of(call: RingCall) -> str:
    """`recv from rank 1 with tag 8 at main (train.py:9)`: a call without its tensors."""
    return str(replace(call, tensors=None, place=None)) + _at(call)


def _at(call: RingCall | None) -> str:
    """` at main (train.py:9)`; nothing if the ring does not know the place."""
    if call is None or not call.place:
        return ""
    file, _, function = call.place.rpartition("/")[2].rpartition(" ")
    return f" at {function} ({file})" if file else f" at {call.place}"


def whereabouts(seen: RankEvidence) -> str:
    """Where a rank is, in words that follow its name: `is in barrier number 4 of group 0 at main (train.py:9)`."""
    here, verb = current_call(seen), "was" if seen.is_gone else "is"
    gone = f" ({FROM_RING})" if seen.is_gone else ""
    if here is not None:
        return f"{verb} in {words_of(here)}{gone}"
    if seen.thread is not None and not seen.is_gone:
        return f"is in {seen.place}"
    if seen.ring is not None and seen.ring.stacks is not None:
        return f"{verb} in {seen.ring.stacks.place}"
    if seen.ring is not None and seen.ring.calls:
        return f"{verb} past {words_of(seen.ring.calls[-1])}{gone}"
    return "has ended" if seen.is_gone else NOT_KNOWN


def _with_rings(evidence: Evidence) -> list[tuple[RankEvidence, Ring]]:
    return [(seen, seen.ring) for seen in evidence.ranks if seen.ring is not None]


def _who(evidence: Evidence, ranks: Sequence[int]) -> str:
    return evidence.name(ranks[0]) if len(ranks) == 1 else evidence.names(ranks)


def places_of(evidence: Evidence, ranks: Sequence[int]) -> str:
    """Where each of `ranks` is, the smallest group first: `rank 2 is in ...; ranks 0-1 are in ...`."""
    held: dict[str, list[int]] = {}
    for rank in ranks:
        held.setdefault(whereabouts(evidence.ranks[rank]), []).append(rank)
    by_size = sorted(held.items(), key=lambda item: (len(item[1]), item[1]))
    told = "; ".join(f"{_who(evidence, there)} {agree(words, there)}" for words, there in by_size[:MAX_PLACES])
    return told + (f"; and the others are in {len(by_size) - MAX_PLACES} more places" if by_size[MAX_PLACES:] else "")


# ------------------------------------------------------------------------------------------- keys of a store


def wanted_key(seen: RankEvidence) -> str | None:
    """Return the key of a store that the rank waits for, in words; None if its ring shows no such wait."""
    call = current_call(seen)
    if call is None or call.operation not in STORE_WAITS or not call.tensors:
        return None
    return call.tensors.removeprefix("key ")


def find_missing_keys(evidence: Evidence) -> Iterator[RingFact]:
    """Yield the keys that ranks wait for, each with who should have set it, if that is known."""
    waiting: dict[str, list[int]] = {}
    for seen in evidence.ranks:
        if (key := wanted_key(seen)) is not None:
            waiting.setdefault(key, []).append(seen.rank)
    for key, ranks in waiting.items():
        where = _at(current_call(evidence.ranks[ranks[0]]))
        gone = f" ({FROM_RING})" if any(evidence.ranks[rank].is_gone for rank in ranks) else ""
        who = f"{_who(evidence, ranks)} {agree('waits', ranks)} for key '{key}' of the store{where}{gone}"
        setter, why = find_setter(key, ranks, evidence)
        others = () if setter is None else (setter,)
        yield RingFact(HangClass.STORE_KEY_MISSING, f"{who}; {why}", tuple(ranks), others)


def find_setter(key: str, waiting: Sequence[int], evidence: Evidence) -> tuple[int | None, str]:
    """Return the rank that should have set `key`, and why; None if rings do not show it."""
    done = [seen.rank for seen, ring in _with_rings(evidence) if key in ring.set_keys]
    if done:
        whose = f"{_who(evidence, done)} {agree('has', done)} set a key of that name"
        return None, f"{whose}, perhaps in another store, or it was deleted since"
    alike = [
        (seen.rank, each) for seen, ring in _with_rings(evidence) for each in ring.set_keys if _form(each) == _form(key)
    ]
    rank = _named_in(key, alike)
    if rank is None and len({setter for setter, _ in alike}) == 1:
        rank = None if _names_its_setter(alike) else alike[0][0]
    if rank is None or rank in waiting or not 0 <= rank < evidence.world_size:
        return None, UNKNOWN_SETTER
    setter, example = next((each for each in reversed(alike) if each[0] == rank), alike[-1])
    seen = evidence.ranks[rank]
    model = f"{evidence.short_name(setter)} set '{example}'"
    return rank, f"{evidence.name(rank)} sets keys of this form ({model}), but not this one, and {whereabouts(seen)}"


def _form(key: str) -> str:
    """Return a key without its numbers: keys of one form differ by a step or a rank."""
    return re.sub(r"\d+", "#", key)


def _numbers(key: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", key)]


def _names_its_setter(alike: Sequence[tuple[int, str]]) -> bool:
    """Whether some number in each of these keys is the rank that set it."""
    return any(all(_numbers(key)[at] == rank for rank, key in alike) for at in range(len(_numbers(alike[0][1]))))


def _named_in(key: str, alike: Sequence[tuple[int, str]]) -> int | None:
    """Return the rank that a number in `key` names, if that number named the setter in the keys of several ranks."""
    if len({rank for rank, _ in alike}) < 2:
        return None
    fitting = [at for at in range(len(_numbers(key))) if all(_numbers(each)[at] == rank for rank, each in alike)]
    return _numbers(key)[fitting[0]] if len(fitting) == 1 else None


# ------------------------------------------------------------------------------------------- messages


def find_crossed_messages(evidence: Evidence) -> Iterator[RingFact]:
    """Yield pairs of ranks whose messages do not meet: different tags, or a message that the other end never began."""
    calls = {seen.rank: call for seen in evidence.ranks if (call := current_call(seen)) is not None}
    messages = {rank: call for rank, call in calls.items() if call.is_message}
    for rank, call in messages.items():
        peer = call.peer
        if peer is None or not 0 <= peer < evidence.world_size:
            continue
        theirs = messages.get(peer)
        if theirs is not None and theirs.peer == rank:
            if rank < peer:
                yield from _facing(evidence, rank, call, peer, theirs)
        elif evidence.ranks[peer].ring is not None and not _has_begun(evidence.ranks[peer], rank, call):
            yield _without_end(evidence, rank, call, peer)


def _is_send(call: RingCall) -> bool:
    return "send" in (call.operation or "")


def _facing(evidence: Evidence, rank: int, call: RingCall, peer: int, theirs: RingCall) -> Iterator[RingFact]:
    both = "; ".join(f"{evidence.name(each)} {whereabouts(evidence.ranks[each])}" for each in (rank, peer))
    if _is_send(call) == _is_send(theirs):
        why = "both send" if _is_send(call) else "both receive"
        yield RingFact(HangClass.MESSAGES_NEVER_MEET, f"{why}: {both}", (rank, peer))
    elif call.tag != theirs.tag:
        yield RingFact(HangClass.MESSAGE_TAG_DIFFERS, f"the tags differ: {both}", (rank, peer))


def _has_begun(seen: RankEvidence, rank: int, call: RingCall) -> bool:
    """Whether the ring of `seen` holds the other end of `call`, or no longer reaches back to where `call` began."""
    assert seen.ring is not None
    if any((each.left or call.entered) >= call.entered for each in _other_ends(seen.ring, rank, call)):
        return True
    first = min((each.entered for each in seen.ring.calls), default=call.entered + 1)
    return bool(seen.ring.lost_threads) or first > call.entered


def _other_ends(ring: Ring, rank: int, call: RingCall) -> list[RingCall]:
    """Return the calls of a ring that may be the other end of `call` of `rank`."""
    messages = [each for each in (*ring.calls, *ring.open_calls) if each.is_message and each.peer == rank]
    return [each for each in messages if each.tag == call.tag and _is_send(each) != _is_send(call)]


def _without_end(evidence: Evidence, rank: int, call: RingCall, peer: int) -> RingFact:
    """A message whose other end has not begun. Some backends send ahead, so an earlier send is mentioned."""
    seen = evidence.ranks[peer]
    end = f"receive from rank {rank}" if _is_send(call) else f"send to rank {rank}"
    before = ", only before" if seen.ring is not None and _other_ends(seen.ring, rank, call) else ""
    words = f"{evidence.name(rank)} {whereabouts(evidence.ranks[rank])}; the ring of {evidence.name(peer)} shows no "
    words += f"{end} with tag {call.tag} since then{before}, and it {whereabouts(seen)}"
    return RingFact(HangClass.PHASES_SPLIT, words, (rank,), (peer,))


# ------------------------------------------------------------------------------------------- new groups


def find_absent_from_group(evidence: Evidence) -> Iterator[RingFact]:
    """Yield the new groups that some ranks are making while others have not come."""
    making: dict[str, dict[int, RingCall]] = {}
    for seen in evidence.ranks:
        call = current_call(seen)
        if call is not None and call.operation == "new_group" and call.tensors:
            making.setdefault(call.tensors, {})[seen.rank] = call
    for members, inside in making.items():
        wanted = _members(members, evidence.world_size)
        began = min(call.entered for call in inside.values())
        absent = [rank for rank in wanted if rank not in inside]
        late = [rank for rank in absent if _has_not_made(evidence.ranks[rank], members, began)]
        if not late:
            continue
        who = f"{_who(evidence, tuple(inside))} {agree('is', tuple(inside))} in new_group of {members}"
        place = _at(next(iter(inside.values())))
        gone = f" ({FROM_RING})" if any(evidence.ranks[rank].is_gone for rank in inside) else ""
        have = f"{evidence.names(late)} {agree('has', late)}"
        words = f"{who}{place}{gone}; {have} not joined: {places_of(evidence, late)}"
        unknown = [rank for rank in absent if rank not in late and evidence.ranks[rank].ring is None]
        words += f"; unknown whether {evidence.names(unknown)} joined" if unknown else ""
        yield RingFact(HangClass.GROUP_MADE_ALONE, words, tuple(inside), tuple(late))


def _members(words: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that must join; empty if the ring does not list them."""
    if words == "all ranks":
        return tuple(range(world_size))
    ranks = words.removeprefix("ranks ").split(",")
    return tuple(int(rank) for rank in ranks if int(rank) < world_size) if all(map(str.isdigit, ranks)) else ()


def _has_not_made(seen: RankEvidence, members: str, began: float) -> bool:
    """Whether the ring reaches back to `began` and holds no such group that was still being made then."""
    if seen.ring is None or seen.ring.lost_threads or not seen.ring.calls:
        return False
    made = (call for call in seen.ring.calls if call.operation == "new_group" and call.tensors == members)
    if any(call.left is None or call.left >= began for call in made):
        return False
    return seen.ring.calls[0].entered <= began


# ------------------------------------------------------------------------------------------- steps


def find_steps_apart(evidence: Evidence) -> Iterator[RingFact]:
    """Yield the ranks that make the same collectives as their peers in another step."""
    told: set[int] = set()
    for group, steps in _steps_by_group(evidence).items():
        usual = _usual_steps(steps)
        for rank, theirs in steps.items():
            shared = {number: step - usual[number] for number, step in theirs.items() if number in usual}
            if rank not in told and _is_apart(shared, theirs):
                told.add(rank)
                yield _one_apart(evidence, rank, group, shared, theirs)


def _steps_by_group(evidence: Evidence) -> Mapping[str, Mapping[int, Mapping[int, int]]]:
    """{group: {rank: {number of a collective with which some rank began a step: step of this rank}}}."""
    begun: dict[str, dict[int, Ring]] = {}
    for seen, ring in _with_rings(evidence):
        for group in ring.steps:
            if ":" in group:
                begun.setdefault(group, {})[seen.rank] = ring
    return {
        group: {rank: _steps_at(ring, group, numbers) for rank, ring in rings.items()}
        for group, rings in begun.items()
        for numbers in (sorted({number for ring in rings.values() for number in ring.steps[group]}),)
    }


def _steps_at(ring: Ring, group: str, numbers: Sequence[int]) -> Mapping[int, int]:
    """Return the step in which the ring has each of these collectives; those that it does not hold are left out."""
    begun = sorted(ring.steps[group].items())
    last = ring.recorder.last_sequence.get(group.partition(":")[0], 0)
    held = (number for number in numbers if begun and begun[0][0] <= number <= last)
    return {number: begun[bisect_right(begun, (number, sys.maxsize)) - 1][1] for number in held}


def _usual_steps(steps: Mapping[int, Mapping[int, int]]) -> Mapping[int, int]:
    """{number: the step in which more than half of three or more ranks made that collective}."""
    by_number: dict[int, list[int]] = {}
    for theirs in steps.values():
        for number, step in theirs.items():
            by_number.setdefault(number, []).append(step)
    most = {number: Counter(found).most_common(1)[0] for number, found in by_number.items()}
    return {
        number: step
        for number, (step, count) in most.items()
        if len(by_number[number]) >= 3 and 2 * count > len(by_number[number])
    }


def _is_apart(shared: Mapping[int, int], theirs: Mapping[int, int]) -> bool:
    """Whether the newest steps of a rank are apart from those of its peers, always by the same number."""
    if not shared or shared[max(shared)] == 0:
        return False
    first = _first_apart(shared)
    later = [number for number in shared if number >= first]
    is_even = len({shared[number] for number in later}) == 1
    return is_even and len({theirs[number] for number in later}) >= MIN_STEPS_APART


def _first_apart(shared: Mapping[int, int]) -> int:
    """The first collective from which on the rank was apart."""
    together = [number for number, offset in shared.items() if offset == 0]
    return min(number for number in shared if number > max(together, default=-1))


def _one_apart(
    evidence: Evidence, rank: int, group: str, shared: Mapping[int, int], theirs: Mapping[int, int]
) -> RingFact:
    newest, first = max(shared), _first_apart(shared)
    offset = shared[newest]
    many = f"{abs(offset)} step{'' if abs(offset) == 1 else 's'} {'ahead of' if offset > 0 else 'behind'} its peers"
    call = f"collective number {newest} of group {group.partition(':')[0]}"
    since = f"since step {theirs[first] - offset} of the others"
    if first == min(shared):
        since = "for as long as its ring reaches back"
    words = f"{evidence.name(rank)} is {many}, {since}: it made {call} in step {theirs[newest]}, and they in step "
    return RingFact(HangClass.STEP_DROPPED, f"{words}{theirs[newest] - offset}", (rank,))


# ------------------------------------------------------------------------------------------- roots


@dataclass(frozen=True, slots=True)
class RootSplit:
    """A collective whose root ranks disagree about. `departed` have always named another root there, and the others
    always this one."""

    group: str
    number: int
    by_root: Mapping[int, tuple[int, ...]]
    departed: tuple[int, ...]


def find_root_splits(evidence: Evidence) -> Iterator[RootSplit]:
    """Yield the collectives for which rings show different roots under one number."""
    named: dict[tuple[str, int], dict[int, RootsNamed]] = {}
    for seen, ring in _with_rings(evidence):
        for each in ring.roots:
            named.setdefault((each.group, each.newest[1]), {})[seen.rank] = each
    for (group, number), by_rank in named.items():
        by_root: dict[int, tuple[int, ...]] = {}
        for rank, each in by_rank.items():
            by_root[each.newest[0]] = (*by_root.get(each.newest[0], ()), rank)
        if len(by_root) > 1:
            yield RootSplit(group, number, by_root, _departed_roots(by_rank))


def _departed_roots(by_rank: Mapping[int, RootsNamed]) -> tuple[int, ...]:
    """Return the ranks that named a new root where they always named one; none if the others did not do as always."""
    always = {rank: set(each.before) for rank, each in by_rank.items() if len(each.before) >= MIN_TIMES_NAMED}
    departed = tuple(rank for rank, roots in always.items() if len(roots) == 1 and by_rank[rank].newest[0] not in roots)
    others = by_rank.keys() - set(departed)
    are_as_before = all(always.get(rank) == {by_rank[rank].newest[0]} for rank in others)
    return departed if others and are_as_before else ()
