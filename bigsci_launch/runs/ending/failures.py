"""Which ranks of an attempt failed, each with its own last words.

A failure is a record: who (`rank`, `node`, `coordinate`), how (`signal` or `code`), `step`, `error` in words, the
`last_words` of a rank that a signal ended, and `time`. `is_about_others` marks one that another rank caused.
"""

from __future__ import annotations

from typing import NamedTuple

from bigsci_launch.lost_peer import TIMED_OUT, loss_in, says_lost_peer
from bigsci_launch.runs.ending.records import Ranks, Record, error_text, node_of
from bigsci_launch.topology.coordinates import Coordinate
from bigsci_launch.topology.naming import name_ranks

LOST_NODE = "none of the {} ranks on {} left an exit record: the node was lost, or they were all killed at once"
SILENT_NODES = (
    "{} on {} left no exit record: unknown whether these nodes were lost, or the ranks were all killed at once"
)
MAX_NODES = 8
ABORT = "SIGABRT"
"""How NCCL's watchdog ends its process."""


class Silent(NamedTuple):
    """Ranks that started but left no exit record."""

    lost: list[Record]
    """One failure for the node that left none, if it is a single one."""
    killed: list[Record]
    """One failure for each such rank whose node left others."""
    unknown: str | None
    """What is said of several nodes that left none."""


def find_failures(ranks: Ranks) -> list[Record]:
    """Return every failed rank, whether it failed on its own or because of others."""
    return [failure for number, rank in ranks.items() if (failure := failure_of(number, rank)) is not None]


def failure_of(number: int, rank: Record) -> Record | None:
    """Return how a rank failed; None if it ended well, still runs, or was told to end before anything went wrong."""
    end, error = rank["exit"], rank["error"]
    if not end and not error:
        return None
    ended_well = bool(end) and (end.get("code") == 0 or end.get("clean_end"))
    failed_at = (error or end).get("time")
    terminated = end.get("terminated")
    if ended_well or (terminated is not None and (failed_at is None or failed_at >= terminated)):
        return None
    was_killed = end.get("signal") is not None
    words = error_text(error) if error else end.get("error") or rank["said"]
    return {
        **make_failure(number, rank, None if was_killed and not error else words or None, failed_at),
        "signal": end.get("signal"),
        "code": end.get("code"),
        "step": error.get("step"),
        "last_words": last_words(rank) if was_killed and not error else None,
        "is_about_others": is_about_others(rank, words or ""),
    }


def is_about_others(rank: Record, words: str) -> bool:
    """Whether other ranks caused the failure of this one."""
    end, error = rank["exit"], rank["error"]
    if end.get("signal") == "SIGTERM":
        return True  # TERM may reach the program before its runner, which then does not see it
    if error:
        return bool(error.get("lost_peer")) or says_lost_peer(words)
    if rank["failed_itself"]:
        return False
    watchdog_spoke = rank["was_told"] or any(loss_in(text) in (*TIMED_OUT, "aborted") for text in rank["about_others"])
    if end.get("signal") is not None:
        return watchdog_spoke and end["signal"] == ABORT
    return watchdog_spoke or says_lost_peer(words)


def last_words(rank: Record) -> str | None:
    """Return what a rank that a signal ended said last: of other ranks, of the fatal error, or else its last line."""
    timed_out = [text for text in rank["about_others"] if loss_in(text) in TIMED_OUT]
    return next(iter(timed_out), None) or rank["fatal"] or rank["said"] or None


def make_failure(number: int, rank: Record, error: str | None, moment: float | None) -> Record:
    """Return the record of a failure that no signal and no exit code describes."""
    return {
        **identity(number, rank),
        "signal": None,
        "code": None,
        "step": rank["event"].get("step"),
        "error": error,
        "last_words": None,
        "time": moment,
        "is_about_others": False,
    }


def ordered(failures: list[Record]) -> list[Record]:
    """Return the failures, those that other ranks caused last, and otherwise the earliest first."""
    return sorted(failures, key=lambda failure: (failure["is_about_others"], failure["time"] or 0.0))


def without_marks(failure: Record | None) -> Record | None:
    return failure and {key: value for key, value in failure.items() if key != "is_about_others"}


def find_lost(ranks: Ranks, nodes: list[str]) -> list[Record]:
    """Return one failure for each node that Slurm lost."""
    members = {node: [n for n, rank in ranks.items() if node_of(rank) == node] for node in nodes}
    return [silent_failure(ranks, found, f"Slurm lost the node {node}") for node, found in members.items() if found]


def find_silent(ranks: Ranks) -> Silent:
    """Return the ranks that started but left no exit record.

    A runner writes a record even if it is told to end; only a runner that is killed, or dies with its node, does not.
    If no rank at all left a record, everything was killed at once, and no rank was the first. Nodes rarely die
    together, so several that left no record were rather killed from outside: then no node is named.
    """
    nodes: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        nodes.setdefault(node_of(rank) or "?", []).append(number)
    silent = {node: [n for n in members if not ranks[n]["exit"]] for node, members in nodes.items()}
    whole = [node for node, members in nodes.items() if len(silent[node]) == len(members)]
    if len(whole) == len(nodes):
        return Silent([], [], None)
    if len(whole) > 1:
        names = ", ".join(whole[:MAX_NODES]) + (f" and {len(whole) - MAX_NODES} more" if len(whole) > MAX_NODES else "")
        return Silent([], [], SILENT_NODES.format(name_ranks([n for node in whole for n in nodes[node]]), names))
    lost = [silent_failure(ranks, nodes[node], LOST_NODE.format(len(nodes[node]), node)) for node in whole]
    killed = [
        silent_failure(ranks, [number], "left no exit record: its runner was killed")
        for node, members in silent.items()
        if node not in whole
        for number in members
    ]
    return Silent(lost, killed, None)


def silent_failure(ranks: Ranks, members: list[int], why: str) -> Record:
    last_seen = max((ranks[number]["event"].get("time", 0.0) for number in members), default=0.0)
    return make_failure(members[0], ranks[members[0]], why, last_seen or None)


def identity(number: int, rank: Record) -> Record:
    """Return rank, node and coordinate, from whichever record has them."""
    known = rank["pid"] or rank["exit"] or rank["error"]
    return {"rank": number, "node": known.get("node"), "coordinate": known.get("coordinate")}


def failure_text(failure: Record) -> str:
    """`rank 3 (dp1 pp0 tp1) on n2: SIGKILL`. Records of older versions lack some fields."""
    at = failure.get("coordinate")
    coordinate = f" ({Coordinate.at(**at)})" if at else ""
    how = failure.get("error") or failure.get("signal") or f"exit code {failure.get('code')}"
    if failure.get("rank") is None:
        return f"node {failure.get('node')}: {how}"
    return f"rank {failure.get('rank')}{coordinate} on {failure.get('node') or 'an unknown node'}: {how}"
