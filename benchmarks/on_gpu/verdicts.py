"""What an answer of `bsl spy --json` says, as figures of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foreign.scoring import read_answer

from bigsci_launch.lost_peer import says_lost_peer

NUM_FRAMES = 4
NUM_LINES = 6
NUM_LETTERS = 400


def verdict_figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict: what is suspected, how surely, and the innermost frames of each stack."""
    if not document:
        return {"state": None}
    suspects = document["verdict"]["suspects"]
    return {
        **read_answer(document, {}).document(),
        "suspect_says": suspects[0]["why"] if suspects else None,
        "signature": document["verdict"]["signature"],
        "innermost": [_place(found) for found in document["classes"]],
        "problems": document["coverage"]["problems"]
        + [each["why"] for each in document["coverage"]["ranks_unreadable"]],
    }


def functions(document: Mapping[str, Any]) -> set[str]:
    """Return every function in a stack of the ranks, or of processes below those that are named."""
    return {str(frame["function"]).rpartition(".")[2] for frame in _frames(document)}


def _frames(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for found in document.get("classes", ()):
        yield from found["frames"]
    verdict = document.get("verdict", {})
    for named in (*verdict.get("suspects", ()), *verdict.get("look_first", ())):
        for child in named["children"]:
            yield from child["frames"] or ()


def _place(found: Mapping[str, Any]) -> str:
    """`ranks [0] MainThread: item < wait_for_the_gpu < <module>`."""
    inner = " < ".join(frame["function"] for frame in found["frames"][:NUM_FRAMES])
    return f"ranks {found['ranks']} {found['thread']}: {inner}"


def last_words(log: str) -> tuple[str, bool]:
    """Return what a rank said about a lost peer or a time-out, and True; else its last lines, and False."""
    lines = [line for line in log.splitlines() if line.strip()]
    recognised = [line for line in lines if says_lost_peer(line)]
    return _short(recognised or lines), bool(recognised)


def _short(lines: Sequence[str]) -> str:
    return "\n".join(line[:NUM_LETTERS] for line in lines[-NUM_LINES:])
