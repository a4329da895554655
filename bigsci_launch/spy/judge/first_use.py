"""Ranks that may wait for a communicator: NCCL makes one when a group or a pair of ranks first uses it. Pure."""

from __future__ import annotations

from bigsci_launch.spy.evidence.calls.flight_recorder import Call
from bigsci_launch.spy.evidence.known_code import uses_process_groups
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.judge.facts import frames_moved
from bigsci_launch.spy.judge.rules.unfinished import is_of_nccl
from bigsci_launch.topology.naming import agree

POSTED = ("isend", "irecv")
"""Calls of torch that begin a message and return."""
ASK_NCCL = (
    "NCCL_DEBUG=INFO  # in the next attempt: `Init START` without `Init COMPLETE` shows who waits for a communicator"
)


def words_of_first_use(evidence: Evidence) -> str:
    """What suggests that NCCL makes a communicator, for which all of its ranks have to come; empty if nothing does."""
    posting = [seen.rank for seen in evidence.ranks if _does_not_return(seen)]
    if len(posting) > 1:
        have = f"{evidence.names(posting)} {agree('has', posting)} not returned from isend or irecv"
        return f"{have}: in the first message of two ranks, NCCL makes their communicator there, which needs both"
    first = sorted({(call.token.group, call.token.operation) for seen in evidence.ranks for call in _first_calls(seen)})
    if len(first) == 1:
        group, operation = first[0]
        return f"{operation} is the first call of group {group}: NCCL makes its communicator there, which needs all"
    return ""


def _does_not_return(seen: RankEvidence) -> bool:
    call = seen.thread.communication if seen.thread is not None and not seen.is_gone else None
    if seen.thread is None or call is None or seen.thread.operation not in POSTED or frames_moved(seen):
        return False
    return uses_process_groups(call.function, call.file)


def _first_calls(seen: RankEvidence) -> list[Call]:
    """The collectives of NCCL that a rank is in and that are the first of their groups."""
    if seen.recorder is None or seen.is_gone or not is_of_nccl(seen):
        return []
    return [call for call in seen.recorder.open_calls[:1] if call.sequence == 1]
