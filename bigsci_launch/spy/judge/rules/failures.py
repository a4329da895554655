"""When several ranks died: which failed on its own, and which only because a peer vanished or sent a wrong amount.

A rank that dies takes the others down with "connection closed", which is not their own failure. And gloo aborts the
rank that *receives* an unexpected amount of data, although the sender may be wrong: such an abort, or one without a
message, accuses no rank, unless the rings show whose last collective had another size than ever before at that point.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.spy.evidence.ranks import NOT_FOUND, Evidence, RankEvidence
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.conclusion import Conclusion, GracePeriod, Side, Strength, Suspect, name_with_part
from bigsci_launch.spy.judge.facts import may_wait_for_store
from bigsci_launch.spy.judge.last_calls import find_in_rings, places_of
from bigsci_launch.spy.judge.rules.process import explain_stall
from bigsci_launch.spy.judge.rules.rendezvous import is_joining
from bigsci_launch.spy.judge.schedule.departure import Collective, Departure, find_departures
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.naming import agree, count_ranks

OTHER_AMOUNT = re.compile(r"EnforceNotMet|enforce fail at.*(preamble|nbytes|length)", re.IGNORECASE)
NEWEST = 3
"""The last collectives of a rank among which the one must be that its backend aborted."""
LOOKS_LEFT_S = 10.0
"""For how long those that are left must have slept, before they are known to wait."""
LEAST_RESTARTS = 2
SHORT_LIFE_S = 60.0
"""Ranks that have run for longer may have survived what ended those before."""
AMOUNTS = re.compile(r"(\d+) vs\.? (\d+)")


def in_order_of_failure(failed: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Sort with the cause first. Ranks that lost a peer, were asked to stop, or left no record come later."""
    return sorted(failed, key=_order)


def _order(seen: RankEvidence) -> tuple[bool, bool, float, int]:
    if seen.exit is None:
        return (lost_peer(seen), True, float("inf"), seen.rank)
    return (lost_peer(seen), seen.exit.was_terminated, seen.exit.time, seen.rank)


def lost_peer(seen: RankEvidence) -> bool:
    """Whether the rank failed because another rank was gone."""
    return says_lost_peer(words_of(seen))


def words_of(seen: RankEvidence) -> str:
    """The error of the failed rank, or an empty text."""
    return seen.error or (seen.failure.words if seen.failure else "")


def gone_ranks(case: JobCase) -> list[RankEvidence]:
    """Ranks whose process has ended, or that have none although every node answered."""
    return [seen for seen in case.evidence.ranks if seen.is_gone or has_vanished(seen, case.evidence)]


def has_vanished(seen: RankEvidence, evidence: Evidence) -> bool:
    """Whether a rank has no process although every node answered and every process could be identified."""
    return seen.unreached == NOT_FOUND and not seen.exit and not evidence.nodes_silent


def failed_ranks(case: JobCase) -> list[RankEvidence]:
    """Ranks that are gone, without a record of a good end, the cause first."""
    return in_order_of_failure([seen for seen in gone_ranks(case) if not (seen.exit and seen.exit.is_clean)])


def all_ended_well(case: JobCase) -> Conclusion | None:
    """Every rank has ended with exit code 0."""
    if len(gone_ranks(case)) < case.evidence.world_size or failed_ranks(case) or not case.evidence.ranks:
        return None
    claim = f"all {case.evidence.world_size} ranks have ended with exit code 0"
    return Conclusion(State.FINISHED, claim, Strength.DIRECT)


def all_lost_a_peer(case: JobCase) -> Conclusion | None:
    """Every failed rank reports that a peer was gone, or was asked to stop after that."""
    evidence = case.evidence
    away = [seen for seen in evidence.ranks if _is_on_a_silent_node(seen, evidence)]
    failed = [seen for seen in failed_ranks(case) if seen not in away]
    lost = [seen for seen in failed if lost_peer(seen)]
    told = [seen for seen in failed if seen not in lost]
    if not all(seen.exit and seen.exit.was_terminated for seen in told):
        return None
    if away and failed:
        return _conclude_silent_node(evidence, away, lost, told)
    return _conclude_lost(evidence, lost) if lost else None


def _is_on_a_silent_node(seen: RankEvidence, evidence: Evidence) -> bool:
    """Whether the rank left no record of its end, on a node that does not answer."""
    return seen.exit is None and seen.node in {node for node, _ in evidence.nodes_silent}


def ended_in_silence(case: JobCase) -> Conclusion | None:
    """No rank that ended left a record, as in an unprepared job: they may have ended with exit code 0.

    A single one is named by another rule, if others wait. Of several, it is unknown which was first.
    """
    failed = failed_ranks(case)
    if not failed or any(seen.exit or words_of(seen) for seen in failed):
        return None
    if len(failed) == 1 and (case.graph.waits or others_wait(case)):
        return None
    return _conclude_silent(case, failed)


def others_wait(case: JobCase) -> bool:
    """Whether all others, two or more, have been at one place for longer than a rank takes to end, and may wait there
    for a key of the store. They had all joined, or they would still be joining. An upload looks the same otherwise."""
    left = [seen for seen in case.alive if seen.samples]
    return (
        len(left) > max(1, len(gone_ranks(case)))
        and all(map(may_wait_for_store, left))
        and len({seen.place for seen in left}) == 1
        and not any(map(is_joining, left))
        and case.asleep_s([seen.rank for seen in left]) >= LOOKS_LEFT_S
    )


def crash_loop(case: JobCase) -> Conclusion | None:
    """The launcher has started all ranks again, several times, and they did not live for long."""
    restarts = case.evidence.restarts
    if restarts is None or restarts.number < LEAST_RESTARTS or restarts.age_s > SHORT_LIFE_S:
        return None
    of = f" of {restarts.limit}" if restarts.limit is not None else ""
    gone = failed_ranks(case)
    accused = [seen for seen in gone if seen.exit is not None and not lost_peer(seen)][:1]
    return Conclusion(
        state=State.CRASHED,
        claim=f"the ranks end and are started again: restart {restarts.number}{of} began {restarts.age_s:.0f} s ago",
        strength=Strength.DERIVED,
        hang_class=HangClass.RANK_CRASHED,
        suspects=tuple(Suspect(seen.rank, explain_stall(seen).words) for seen in accused),
        missing=("which rank ends first, and why: see the output of the ranks",),
        grace=GracePeriod.NONE,
    )


def ended_on_request(case: JobCase) -> Conclusion | None:
    """Each failed rank had been asked to stop before. Rings show where they were, if all have ended."""
    failed, evidence = failed_ranks(case), case.evidence
    if not failed or not all(seen.exit is not None and seen.exit.was_terminated for seen in failed):
        return None
    rings = [] if case.alive else [seen.rank for seen in evidence.ranks if seen.ring is not None]
    asked = f"{count_ranks(failed)} had been asked to stop, and did"
    if not rings:
        left = f"; {len(case.alive)} of {evidence.world_size} ranks still run" if case.alive else ""
        return Conclusion(
            state=State.UNKNOWN,
            claim=asked + left,
            strength=Strength.DERIVED,
            missing=("what they did before: none of them left a ring with its last calls",),
        )
    found = find_in_rings(evidence)
    without = [seen.rank for seen in failed if seen.ring is None]
    return Conclusion(
        state=State.UNKNOWN,
        claim=f"{asked}: {found[0].words if found else places_of(evidence, rings)}",
        strength=Strength.DERIVED if found else Strength.GUESS,
        hang_class=found[0].hang_class if found else None,
        sides=(Side(tuple(rings), "ended; known from their rings"),),
        evidence=tuple(each.words for each in found[1:]),
        missing=(f"the last calls of {evidence.names(without)}: no ring of them was kept",) if without else (),
        next=("bsl trace last  # the last calls of every rank",),
    )


def aborted_on_size(case: JobCase) -> Conclusion | None:
    """The rank that failed first was aborted by its backend, which received another amount of data than it expected."""
    failed = failed_ranks(case)
    first = failed[0] if failed else None
    if first is None or lost_peer(first) or first.exit is None or first.exit.signal != "SIGABRT":
        return None
    words = words_of(first)
    if words and not OTHER_AMOUNT.search(words):
        return None
    found = _conclude_abort(case.evidence, failed, first, words)
    resized = find_resized(case.evidence)
    return _conclude_resized(case.evidence, found, resized) if resized else found


def find_resized(evidence: Evidence) -> list[Departure]:
    """Return where rings show that ranks, at most half of all, last made a collective of another size than always."""
    rings = {seen.rank: seen.ring for seen in evidence.ranks if seen.ring and not seen.ring.lost_threads}
    ranks = tuple(
        replace(seen, recorder=rings[seen.rank].recorder if seen.rank in rings else None) for seen in evidence.ranks
    )
    found = find_departures(replace(evidence, ranks=ranks)).from_past
    resized = [
        each
        for rank, each in found.items()
        if each.expected[:2] == each.did[:2] and each.position + NEWEST >= len(rings[rank].recorder.stream)
    ]
    return resized if 2 * len(resized) <= len(ranks) else []


def _conclude_resized(evidence: Evidence, abort: Conclusion, resized: Sequence[Departure]) -> Conclusion:
    """The verdict on an abort if the past of ranks shows who sent another amount."""
    why = {each.rank: words_of_resized(each) for each in resized}
    said = "; ".join(f"{evidence.name(rank)} {words}" for rank, words in why.items())
    return replace(
        abort,
        claim=f"{said}, as its ring shows; {abort.claim}",
        strength=Strength.AGREED,
        hang_class=HangClass.SIZE_DIFFERS,
        suspects=tuple(Suspect(rank, words) for rank, words in why.items()),
        missing=(),
        next=(),
    )


def words_of_resized(departure: Departure) -> str:
    """`issued all_reduce of [[2]] float32 where all_reduce of [[4]] float32 was due`."""
    return f"issued {_sized(departure.did)} where {_sized(departure.expected)} was due"


def _sized(did: Collective) -> str:
    return f"{did.operation} of {did.sizes} {did.types}"


def one_has_ended(case: JobCase) -> Conclusion | None:
    """A rank ended by itself, or ended while others wait for it."""
    gone, failed, evidence = gone_ranks(case), failed_ranks(case), case.evidence
    awaited = [seen for seen in gone if seen.rank in case.graph.roots or (len(gone) == 1 and others_wait(case))]
    if not (failed or awaited):
        return None
    first = (failed or awaited)[0]
    stall = explain_stall(first)
    others = evidence.world_size - len(gone)
    claim = f"{evidence.name(first.rank)} {stall.words}"
    if others:
        claim += f"; {others} of {evidence.world_size} ranks still run, {len(case.graph.waits)} of them in a collective"
    return Conclusion(
        state=State.CRASHED if failed else State.HANG,
        claim=claim,
        strength=stall.strength,
        hang_class=stall.hang_class,
        suspects=(Suspect(first.rank, stall.words),),
        evidence=tuple(f"{evidence.name(seen.rank)} {explain_stall(seen).words}" for seen in failed[1:4]),
        missing=(stall.missing,) if stall.missing else (),
        grace=GracePeriod.NONE,
    )


def _conclude_lost(evidence: Evidence, failed: Sequence[RankEvidence]) -> Conclusion:
    """The verdict when every failed rank reports that a peer was gone."""
    ranks = [seen.rank for seen in failed]
    return Conclusion(
        state=State.CRASHED,
        claim=f"{evidence.names(ranks)} lost a peer and ended; none of them recorded why the first one failed",
        strength=Strength.GUESS,
        hang_class=HangClass.RANK_KILLED,
        sides=(Side(tuple(ranks), "lost a peer"),),
        evidence=tuple(f"{evidence.name(seen.rank)}: {words_of(seen)[:120]}" for seen in failed[:2]),
        missing=("the first failure: no rank's record or log holds it",),
    )


def _conclude_silent_node(
    evidence: Evidence, away: Sequence[RankEvidence], lost: Sequence[RankEvidence], told: Sequence[RankEvidence]
) -> Conclusion:
    """The verdict where a node is silent: the other ranks noticed that, or were asked to stop."""
    ranks, nodes = tuple(seen.rank for seen in away), sorted({seen.node for seen in away})
    where = f"{agree('was', ranks)} on node {nodes[0]}" + (" and others" if len(nodes) > 1 else "")
    others = [f"{count_ranks(lost)} then lost a peer and ended"] if lost else []
    others += [f"{count_ranks(told)} had been asked to stop, and did"] if told else []
    return Conclusion(
        state=State.CRASHED,
        claim=f"{name_with_part(evidence, ranks)} {where}: {dict(evidence.nodes_silent)[nodes[0]]}; "
        + ", and ".join(others),
        strength=Strength.GUESS,
        hang_class=HangClass.NODE_LOST,
        sides=(Side(ranks, "on a node that does not answer"),),
        evidence=tuple(f"{evidence.name(seen.rank)}: {words_of(seen)[:120]}" for seen in lost[:2]),
        next=(f"scontrol show node {nodes[0]}  # whether Slurm has lost it",),
    )


def _conclude_silent(case: JobCase, failed: Sequence[RankEvidence]) -> Conclusion:
    evidence, graph = case.evidence, case.graph
    ranks = tuple(sorted(seen.rank for seen in failed))
    were_seen = any(seen.samples for seen in failed)
    what = "ended, and no record shows how" if were_seen else "no process that could be found"
    num_left, waiting = len(evidence.ranks) - len(ranks), count_ranks(graph.waits)
    some = evidence.names(ranks) if num_left else f"all {len(ranks)} ranks"
    who = evidence.name(ranks[0]) if len(ranks) == 1 else some
    left = f"; {num_left} of {evidence.world_size} ranks still run" if num_left else ""
    none = "none of them" if all(case.communicates(seen) is False for seen in case.alive) else "and no stack shows one"
    waits = f", {waiting} in a collective" if graph.waits else f", {none} in a collective" if num_left else ""
    return Conclusion(
        state=State.CRASHED if graph.waits else State.UNKNOWN,
        claim=f"{who} {agree('has', ranks)} {what}{left}{waits}",
        strength=Strength.GUESS if graph.waits else Strength.NOTHING,
        hang_class=HangClass.RANK_EXITED if graph.waits else None,
        sides=(Side(ranks, "ended"),),
        missing=("how they ended, if they were ever started: see the job's output",),
    )


def _conclude_abort(evidence: Evidence, failed: Sequence[RankEvidence], first: RankEvidence, words: str) -> Conclusion:
    others = tuple(sorted(seen.rank for seen in failed if seen is not first))
    amounts = AMOUNTS.search(words)
    sizes = f" of {amounts[1]} bytes where {amounts[2]} were expected" if amounts else ""
    why = (
        f"it received a message{sizes}: it and a peer disagree about the size of one collective"
        if words
        else "gloo aborts the rank that receives a different amount of data than it expects"
    )
    who, after = evidence.name(first.rank), f"{evidence.names(others)} then failed because it was gone"
    return Conclusion(
        state=State.CRASHED,
        claim=f"{who} aborted first ({why}); {after}" if others else f"{who} aborted: {why}",
        strength=Strength.DERIVED if words else Strength.GUESS,
        hang_class=HangClass.SIZE_DIFFERS if words else HangClass.RANK_CRASHED,
        sides=(Side((first.rank,), "aborted"), *((Side(others, "lost a peer"),) if others else ())),
        missing=(
            "which rank is wrong: the one that aborted only received, and its peer may have sent the wrong amount",
            *(() if words else (f"the last output of rank {first.rank}: see its log",)),
        ),
        next=("TORCH_DISTRIBUTED_DEBUG=DETAIL  # in the next attempt: names both sizes at the call",),
    )
