"""The sentence about what ended a generation, for the status, the report of the end and the controller. Pure."""

from __future__ import annotations

from textwrap import shorten

from bigsci_launch.runs.generations.records import Generation, RankFailure

MOST_WORDS = 160
"""Characters shown of the message of a rank or a watcher."""
_HOW = {
    "left_early": "left with exit code 0 before the others",
    "lost_runner": "lost its runner",
    "hung": "hung, and was fenced",
    "stopped": "was stopped, and was fenced",
    "lost_peer": "lost a peer, but no rank has died",
    "stuck": "did not leave in time, and was killed",
}


def rank_failure_text(
    failure: RankFailure | None, generation: Generation | None = None, *, most: int | None = MOST_WORDS
) -> str:
    """`rank 5 (dp0 pp1 tp1) on n2 died (SIGKILL)`; also if nothing or something unknown was recorded.

    `most` is how many characters of its own message are quoted; None: all, 0: none.
    """
    if failure is None:
        return "an unrecorded failure"
    what = _what(failure, generation)
    if not failure.words or most == 0:
        return what
    return f"{what}: {failure.words if most is None else shorten(failure.words, most, placeholder=' ...')}"


def _what(failure: RankFailure, generation: Generation | None) -> str:
    if failure.kind == "lost_node":
        return f"node {failure.node or '(unknown)'} was lost"
    if failure.kind == "asked":
        return "a restart of all ranks was requested"
    who, status = _who(failure, generation), _status(failure)
    if failure.kind == "died":
        return f"{who} died{status}"
    if failure.kind in _HOW:
        return f"{who} {_HOW[failure.kind]}"
    return f"{who}: a failure of unknown kind {failure.kind!r}{status}"


def _who(failure: RankFailure, generation: Generation | None) -> str:
    members, topology = (generation.members, generation.topology) if generation else ((), None)
    node = failure.node or next((each.node for each in members if each.rank == failure.rank), None)
    if failure.rank is None:
        return f"a rank on {node}" if node else "some rank"
    at = f" ({topology.coordinate(failure.rank)})" if topology and failure.rank < topology.world_size else ""
    return f"rank {failure.rank}{at} on {node or 'an unknown node'}"


def _status(failure: RankFailure) -> str:
    if failure.signal:
        return f" ({failure.signal})"
    return f" (exit code {failure.code})" if failure.code is not None else ""
