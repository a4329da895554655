"""When several ranks died: which failed on its own, and which only because a peer vanished or sent a wrong amount.

A rank that dies takes the others down with "connection closed", which is not their own failure. And gloo aborts the
rank that *receives* an unexpected amount of data, although the sender may be wrong: such an abort, or one without a
message, accuses nobody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.conclusion import Conclusion, Side
from bigsci_launch.spy.judge.waits import WaitGraph
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.topology.words import agree, count_ranks, name_ranks

OTHER_AMOUNT = re.compile(r"EnforceNotMet|enforce fail at.*(preamble|nbytes|length)", re.IGNORECASE)
AMOUNTS = re.compile(r"(\d+) vs\.? (\d+)")


def in_order_of_failure(failed: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Sort with the cause first. Ranks that lost a peer, were told to end, or left no record come later."""
    return sorted(failed, key=_order)


def _order(seen: RankEvidence) -> tuple[bool, bool, float, int]:
    if seen.exit is None:
        return (lost_peer(seen), True, float("inf"), seen.rank)
    return (lost_peer(seen), seen.exit.was_told, seen.exit.time, seen.rank)


def lost_peer(seen: RankEvidence) -> bool:
    """Whether the rank failed because another rank was gone."""
    return says_lost_peer(words_of(seen))


def words_of(seen: RankEvidence) -> str:
    """What the rank said when it failed, or nothing."""
    return seen.error or (seen.failure.words if seen.failure else "")


def judge_unaccused(evidence: Evidence, failed: Sequence[RankEvidence], graph: WaitGraph) -> Conclusion | None:
    """The verdict on a crash that no rank can be accused of, or None if the first failure is a rank's own."""
    first = in_order_of_failure(failed)[0]
    if lost_peer(first):
        return _conclude_lost(evidence, failed)
    if not any(seen.exit or words_of(seen) for seen in failed):
        return _judge_silent(evidence, failed, graph)
    if first.exit is None or first.exit.signal != "SIGABRT":
        return None
    words = words_of(first)
    if words and not OTHER_AMOUNT.search(words):
        return None
    return _conclude_abort(evidence, failed, first, words)


def _conclude_lost(evidence: Evidence, failed: Sequence[RankEvidence]) -> Conclusion:
    """The verdict when every rank that failed says that another one was gone."""
    ranks = [seen.rank for seen in failed]
    return Conclusion(
        state=State.CRASHED,
        claim=f"{name_ranks(ranks)} lost a peer and ended; none of them says why the first one failed",
        confidence=0.4,
        hang_class=HangClass.RANK_KILLED,
        sides=(Side(tuple(ranks), "lost a peer"),),
        evidence=tuple(f"{evidence.name(seen.rank)}: {words_of(seen)[:120]}" for seen in failed[:2]),
        missing=("the first failure: no rank's record or log holds it",),
    )


def _judge_silent(evidence: Evidence, failed: Sequence[RankEvidence], graph: WaitGraph) -> Conclusion | None:
    """The verdict when no rank that ended left a record, as in an unprepared job: they may have ended with exit code 0.

    A single rank is accused, by the caller, if others are in a collective. Of several, nobody knows which was first.
    """
    if len(failed) == 1 and graph.waits:
        return None
    ranks = tuple(sorted(seen.rank for seen in failed))
    were_seen = any(seen.samples for seen in failed)
    what = "ended, and nothing that was read says how" if were_seen else "no process that could be found"
    num_left, waiting = len(evidence.ranks) - len(ranks), count_ranks(graph.waits)
    some = name_ranks(ranks) if num_left else f"all {len(ranks)} ranks"
    who = evidence.name(ranks[0]) if len(ranks) == 1 else some
    left = f"; {num_left} of {evidence.world_size} ranks still run" if num_left else ""
    waits = f", {waiting} in a collective" if graph.waits else ", none of them in a collective" if num_left else ""
    return Conclusion(
        state=State.CRASHED if graph.waits else State.UNKNOWN,
        claim=f"{who} {agree('has', ranks)} {what}{left}{waits}",
        confidence=0.5 if graph.waits else 0.3,
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
    return Conclusion(
        state=State.CRASHED,
        claim=f"{evidence.name(first.rank)} aborted first ({why}); {name_ranks(others)} then failed because it was gone"
        if others
        else f"{evidence.name(first.rank)} aborted: {why}",
        confidence=0.7 if words else 0.4,
        hang_class=HangClass.SIZE_DIFFERS if words else HangClass.RANK_CRASHED,
        sides=(Side((first.rank,), "aborted"), *((Side(others, "lost a peer"),) if others else ())),
        missing=(
            "who is wrong: the rank that aborted only received, and its peer may have sent the wrong amount",
            *(() if words else (f"the last words of rank {first.rank}: see its log",)),
        ),
        next=("TORCH_DISTRIBUTED_DEBUG=DETAIL  # in the next attempt: names both sizes at the call",),
    )
