"""From evidence to one verdict, through gates in order: ended, moving, somebody stays away, all wait for each other.

The victim is never blamed. A rank is a suspect only when others wait for it, and its own process or its own collectives
say why. Where the evidence fits either side, both sides are shown and nobody is accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.spy.evidence.ranks import NOT_FOUND, Evidence, RankEvidence
from bigsci_launch.spy.evidence.stack_classes import merge_stacks
from bigsci_launch.spy.evidence.stacks import decisive_thread
from bigsci_launch.spy.judge.conclusion import Conclusion, Side, Suspect, where_shared
from bigsci_launch.spy.judge.motion import is_busy, moving_ranks, named_frames
from bigsci_launch.spy.judge.rules.async_wait import conclude_uncertain, is_certain
from bigsci_launch.spy.judge.rules.circle import judge_circle
from bigsci_launch.spy.judge.rules.corroboration import corroborate
from bigsci_launch.spy.judge.rules.failures import in_order_of_failure, judge_unaccused
from bigsci_launch.spy.judge.rules.left_behind import judge_phases
from bigsci_launch.spy.judge.rules.messages import sides_of
from bigsci_launch.spy.judge.rules.network import judge_network
from bigsci_launch.spy.judge.rules.not_read import judge_unseen
from bigsci_launch.spy.judge.rules.process import Stall, explain_stall
from bigsci_launch.spy.judge.rules.rendezvous import is_joining, judge_rendezvous
from bigsci_launch.spy.judge.rules.work import conclude_computing, conclude_work, find_works, judge_leaving, judge_work
from bigsci_launch.spy.judge.waits import WaitGraph, build_graph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.words import agree, counted, name_ranks

ODD_SHARE = 0.25
"""Largest share of the ranks that may be called odd when no rank is in a collective."""
ASK_RECORDER = "bsl spy --flight-recorder=fork  # torch's record of collectives shows who left"
LOOK_AGAIN = "bsl spy  # again in a minute"
ONE_LOOK = "a second look at the ranks: one look cannot tell whether they are stuck"


def judge(evidence: Evidence) -> Conclusion:
    """Return the verdict on `evidence`. Pure: the same evidence gives the same verdict."""
    graph = build_graph(evidence)
    for gate in GATES:
        conclusion = gate(evidence, graph)
        if conclusion is not None:
            return _complete(corroborate(conclusion, evidence), evidence)
    return _complete(Conclusion(State.UNKNOWN, "the evidence does not say what the ranks wait for", 0.0), evidence)


def _complete(conclusion: Conclusion, evidence: Evidence) -> Conclusion:
    """Add what any verdict may miss, and the next command."""
    missing = list(conclusion.missing)
    unreadable = [seen.rank for seen in evidence.ranks if seen.why_unreadable]
    if unreadable:
        missing.append(f"the stacks of {name_ranks(unreadable)}")
        missing += evidence.problems[:2]
    if conclusion.state is State.HANG and not any(len(seen.samples) > 1 for seen in evidence.ranks):
        missing.append(ONE_LOOK)
    if conclusion.state in (State.HANG, State.UNKNOWN):
        if not any(seen.recorder for seen in evidence.ranks):
            missing.append("sequence numbers of collectives: no rank has a flight recorder that can be read")
        if evidence.topology is None:
            missing.append("coordinates, and which ranks form a group: give --topology tp=..,pp=..,dp=..")
    next_steps = conclusion.next or _next_commands(conclusion, evidence)
    return replace(conclusion, missing=tuple(dict.fromkeys(missing)), next=next_steps)


def _next_commands(conclusion: Conclusion, evidence: Evidence) -> tuple[str, ...]:
    if conclusion.state is State.HANG and not conclusion.suspects and not any(seen.recorder for seen in evidence.ranks):
        return (ASK_RECORDER,)
    if conclusion.state in (State.PROGRESSING, State.FINISHED) or not conclusion.suspects:
        return ()
    seen = next(seen for seen in evidence.ranks if seen.rank == conclusion.suspects[0].rank)
    if seen.is_gone or seen.pid is None:
        return ()
    return (f"py-spy dump --native --pid {seen.pid}  # on {seen.node}",)


def _nothing(evidence: Evidence, _graph: WaitGraph) -> Conclusion | None:
    if any(seen.samples or seen.exit for seen in evidence.ranks):
        return None
    return Conclusion(State.UNKNOWN, "no rank was found, so nothing is known about what they do", 0.0)


def _ended(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when processes have ended: the job finished, or crashed, or the others wait for the dead."""
    gone = [seen for seen in evidence.ranks if seen.is_gone or has_vanished(seen, evidence)]
    if not gone:
        return None
    failed = in_order_of_failure([seen for seen in gone if not (seen.exit and seen.exit.is_clean)])
    if len(gone) == evidence.world_size and not failed:
        return Conclusion(State.FINISHED, f"all {evidence.world_size} ranks have ended with exit code 0", 1.0)
    awaited = [seen for seen in gone if seen.rank in graph.roots]
    unaccused = judge_unaccused(evidence, failed, graph) if failed else None
    if unaccused is not None:
        return unaccused
    first = (failed or awaited or gone)[0]
    stall = explain_stall(first)
    others = evidence.world_size - len(gone)
    claim = f"{evidence.name(first.rank)} {stall.words}"
    if others:
        claim += f"; {others} of {evidence.world_size} ranks still run, {len(graph.waits)} of them in a collective"
    if not failed and not awaited:
        return None
    return Conclusion(
        state=State.CRASHED if failed else State.HANG,
        claim=claim,
        confidence=stall.confidence,
        hang_class=stall.hang_class,
        suspects=(Suspect(first.rank, stall.words),),
        evidence=tuple(f"{evidence.name(seen.rank)} {explain_stall(seen).words}" for seen in failed[1:4]),
        missing=(stall.missing,) if stall.missing else (),
    )


def has_vanished(seen: RankEvidence, evidence: Evidence) -> bool:
    """Whether a rank has no process although every node answered and every process could be identified."""
    return seen.unreached == NOT_FOUND and not seen.exit and not evidence.nodes_silent


def _moving(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when the job makes progress: it is healthy, or one rank holds up the others."""
    moving = moving_ranks(evidence, graph)
    if not moving:
        return None
    fact = f"{len(moving)} of {evidence.world_size} ranks moved between the samples"
    if all(is_joining(seen) for seen in evidence.ranks):
        missing = "whether all will: a rank that is late, or looks elsewhere, shows once the others stop moving"
        claim = f"the ranks are still connecting to each other: {fact}"
        return Conclusion(State.PROGRESSING, claim, 0.5, evidence=(fact,), missing=(missing,), next=(LOOK_AGAIN,))
    slow = _straggler(evidence)
    if slow is None:
        return Conclusion(State.PROGRESSING, f"the job makes progress: {fact}", 0.9, evidence=(fact,))
    stall = explain_stall(slow)
    words = f"is late: it {stall.words}, in every sample, while all others wait"
    return Conclusion(
        state=State.SLOW,
        claim=f"the job makes progress, but {evidence.name(slow.rank)} {words}",
        confidence=0.6,
        hang_class=HangClass.STRAGGLER_COMPUTES if is_busy(slow) else HangClass.STRAGGLER_SLEEPS,
        suspects=(Suspect(slow.rank, words),),
        evidence=(fact,),
        missing=("more samples: run `bsl spy` again and see whether the same rank is late",),
    )


def _straggler(evidence: Evidence) -> RankEvidence | None:
    """The one rank that was outside any communication in every sample, at one place, while all others were inside."""
    outside = [
        {seen.rank for seen in evidence.ranks if not _communicates(seen, index)}
        for index in range(_num_samples(evidence))
    ]
    late = outside[0] if outside else set()
    if len(late) != 1 or any(ranks != late for ranks in outside):
        return None
    seen = next(seen for seen in evidence.ranks if seen.rank in late)
    places = {frames[0].place for sample in seen.samples if (frames := named_frames(seen, sample))}
    return seen if len(places) == 1 else None


def _num_samples(evidence: Evidence) -> int:
    return min((len(seen.samples) for seen in evidence.ranks), default=0)


def _communicates(seen: RankEvidence, index: int) -> bool:
    threads = seen.samples[index].threads
    thread = decisive_thread(threads, seen.pid or 0) if threads else None
    return thread is not None and thread.operation is not None


def _stays_away(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict on ranks that others wait for and that wait in no communication themselves."""
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    roots = [by_rank[rank] for rank in graph.roots if not by_rank[rank].was_out_of_reach]
    if not roots:
        return None
    works = find_works(graph, roots)
    at_work = judge_work(evidence, graph, roots, works)
    if at_work is not None:
        return at_work
    stalls = _certain_stalls([seen for seen in roots if seen.rank not in works])
    if all(is_joining(by_rank[rank]) for rank in graph.waits):
        stalls = [replace(stall, hang_class=HangClass.RENDEZVOUS_LATE) for stall in stalls]
    if not stalls:
        at_work = conclude_work(evidence, graph, list(works.values())) if works else None
        return at_work or conclude_uncertain(evidence, graph, roots)
    waiting = graph.leading_to(frozenset(seen.rank for seen in roots))
    many = len(stalls) > len(waiting)
    return Conclusion(
        state=State.HANG,
        claim=_claim_away(evidence, graph, stalls, len(waiting)),
        confidence=round(min(stall.confidence for stall in stalls) * (0.6 if many else 1.0), 2),
        hang_class=stalls[0].hang_class if len({stall.hang_class for stall in stalls}) == 1 else None,
        suspects=tuple(Suspect(stall.rank, stall.words) for stall in stalls),
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=_evidence_away(evidence, graph, stalls),
        missing=tuple(dict.fromkeys(stall.missing for stall in stalls if stall.missing)),
        next=tuple(dict.fromkeys(stall.next for stall in stalls if stall.next)),
    )


def _certain_stalls(ranks: Sequence[RankEvidence]) -> list[Stall]:
    """What holds up those of `ranks` that cannot be victims themselves."""
    return [stall for seen in ranks if is_certain(stall := explain_stall(seen), seen)]


def _claim_away(evidence: Evidence, graph: WaitGraph, stalls: list[Stall], num_waiting: int) -> str:
    first = stalls[0]
    waiting = counted(num_waiting, "waits")
    if len(stalls) == 1:
        wait = graph.direct_waiter(first.rank)
        waits = f"{waiting} for it" + (f", the first of them (rank {wait.rank}) in {wait}" if wait else "")
        if wait and num_waiting == 1:
            waits = f"rank {wait.rank} waits for it in {wait}"
        return f"{evidence.name(first.rank)} {first.words}; {waits}"
    who = name_ranks([stall.rank for stall in stalls])
    shared = where_shared(evidence, [stall.rank for stall in stalls])
    words = {stall.words for stall in stalls}
    said = f"each {first.words}" if len(words) == 1 else f"rank {first.rank} {first.words}, the others are listed below"
    return f"{who}{f' ({shared})' if shared else ''} stay away while {waiting} for them: {said}"


def _evidence_away(evidence: Evidence, graph: WaitGraph, stalls: list[Stall]) -> tuple[str, ...]:
    lines = []
    for stall in stalls[:4]:
        wait = graph.direct_waiter(stall.rank)
        if wait is not None:
            lines.append(f"{evidence.name(wait.rank)} waits in {wait}; rank {stall.rank} has not reached it")
    endless = graph.endless
    if endless:
        circle = f"{name_ranks(endless)} also {agree('waits', endless)} in a circle"
        lines.append(f"{circle}, which this does not explain")
    if _num_samples(evidence) > 1 and not any(is_busy(seen) for seen in evidence.ranks):
        lines.append("no rank used the CPU or moved between the samples")
    return tuple(lines)


def _together(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when every member of every group is in its collective: no rank is missing."""
    alive = [seen for seen in evidence.ranks if not seen.is_gone]
    if not graph.waits or len(graph.waits) < len(alive):
        return None
    where = "; ".join(f"{name_ranks(side.ranks)} in {side.where}" for side in sides_of(graph, tuple(graph.waits))[:3])
    return Conclusion(
        state=State.HANG,
        claim=f"every rank is in its collective and none is missing, yet none makes progress: {where}",
        confidence=0.4,
        hang_class=HangClass.LINK_DOWN,
        sides=sides_of(graph, tuple(graph.waits)),
        evidence=("no rank moved between the samples",) if _num_samples(evidence) > 1 else (),
        missing=("unacknowledged bytes on the connections between the nodes", "the state of the devices"),
        next=("ss -tin  # on the nodes: look for unacked bytes and retransmits",),
    )


def _no_collectives(evidence: Evidence, graph: WaitGraph) -> Conclusion | None:
    """The verdict when no rank communicates, as in plain programs: only being in a minority can make a rank odd."""
    classes = merge_stacks(evidence.ranks)
    if graph.waits or not classes:
        return None
    sides = tuple(Side(found.ranks, str(found.frames[0])) for found in classes)
    num_read = sum(len(found.ranks) for found in classes)
    odd = sorted(rank for found in classes[1:] for rank in found.ranks)
    most = f"{counted(classes[0].ranks, 'is')} in {classes[0].frames[0]}"
    read = [seen for seen in evidence.ranks if seen.threads and not seen.is_gone]
    if all(is_busy(seen) for seen in read):
        return conclude_computing(evidence, [seen.rank for seen in read])
    if len(classes) == 1:
        place = classes[0].frames[0]
        claim = f"all {most}, and none is in a collective" if num_read > 1 else f"the rank that was read is in {place}"
        return Conclusion(State.UNKNOWN, claim, 0.2, sides=sides)
    if len(odd) > ODD_SHARE * num_read:
        return _in_places(len(classes), sides)
    by_rank = {seen.rank: seen for seen in evidence.ranks}
    strays = [by_rank[rank] for rank in odd]
    at_work = judge_work(evidence, graph, strays, find_works(graph, strays))
    if at_work is not None:
        return at_work
    stalls = _certain_stalls(strays)
    if not stalls:
        return _in_places(len(classes), sides)
    first = f"{evidence.name(stalls[0].rank)} {stalls[0].words}"
    claim = first if len(odd) == 1 else f"{name_ranks(odd)} are not where the rest are: {first}"
    return Conclusion(
        state=State.HANG,
        claim=f"{claim}; the other {most}",
        confidence=0.5,
        hang_class=stalls[0].hang_class,
        suspects=tuple(Suspect(stall.rank, stall.words) for stall in stalls),
        sides=sides,
        evidence=("the only evidence is that they differ: no rank is in a collective that would show who waits",),
    )


def _in_places(count: int, sides: tuple[Side, ...]) -> Conclusion:
    claim = f"the ranks are in {count} different places, none of them in a collective"
    return Conclusion(State.UNKNOWN, claim, 0.2, sides=sides)


GATES = (
    _nothing, _ended, _moving, judge_leaving, judge_network, judge_phases, judge_unseen, _stays_away, judge_rendezvous,
    judge_circle, _together, _no_collectives,
)  # fmt: skip
