"""Scores answers about foreign programs: each question has one outcome, and three figures of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreign.case import Truth

FAILURES = ("hang", "crashed")
HEALTHY = ("progressing", "finished")
UNDECIDED = ("unknown", "waiting")
HARMFUL = ("wrong accusation", "false alarm", "missed", "healthy called slow")
OUTCOMES = (
    "right", *HARMFUL, "slow called healthy", "no rank named", "undecided", "unanswered", "not scored",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What `bsl spy --json` said: ranks as the reader would understand them, -1 for a process that is no rank."""

    state: str
    hang_class: str | None
    suspects: tuple[int, ...]
    look_first: tuple[int, ...]
    claim: str
    confidence: float
    world_size: int
    ranks_read: int

    def document(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "class": self.hang_class,
            "suspects": list(self.suspects),
            "look_first": list(self.look_first),
            "claim": self.claim,
            "confidence": self.confidence,
            "world_size": self.world_size,
            "ranks_read": self.ranks_read,
        }


def read_answer(document: Mapping[str, Any], pids: Mapping[int, int]) -> Answer:
    """Return the answer in a document of `bsl spy --json`; `pids` are the true ranks by process."""
    verdict = document["verdict"]
    suspects = tuple(_rank_of(each, pids) for each in verdict["suspects"])
    first = verdict.get("look_first", document.get("look_first"))
    return Answer(
        state=verdict["state"],
        hang_class=verdict["class"],
        suspects=suspects,
        look_first=suspects if first is None else tuple(_rank_of(each, pids) for each in first),
        claim=verdict["claim"],
        confidence=verdict["confidence"],
        world_size=document["world_size"],
        ranks_read=document["coverage"]["ranks_read"],
    )


def _rank_of(each: Mapping[str, Any], pids: Mapping[int, int]) -> int:
    """A number of a rank is taken as it is printed; what is called a process is looked up among the true ranks."""
    rank, pid = each.get("rank"), each.get("pid")
    called = str(each.get("name") or each.get("called") or "")
    if rank is None or each.get("numbered_by") == "order of start" or called.startswith("process"):
        return pids.get(pid, -1) if pid is not None else -1
    return int(rank)


def outcome(truth: Truth, answer: Answer) -> str:
    """Return which of OUTCOMES an answer is."""
    state = answer.state
    if state in UNDECIDED:
        return "right" if state == "waiting" and truth.state == "slow" else "undecided"
    is_wrong_rank = bool(set(answer.suspects) - truth.culprits)
    if state in truth.also:
        return "wrong accusation" if is_wrong_rank else "right"
    if truth.state in FAILURES:
        return _outcome_of_failure(truth, answer, is_wrong_rank)
    if state in FAILURES:
        return "false alarm"
    if truth.state in HEALTHY:
        return "right" if state in HEALTHY else "healthy called slow"
    if state in HEALTHY:
        return "slow called healthy"
    return "wrong accusation" if is_wrong_rank else "right"


def _outcome_of_failure(truth: Truth, answer: Answer, is_wrong_rank: bool) -> str:
    if answer.state in FAILURES:
        if is_wrong_rank:
            return "wrong accusation"
        return "right" if answer.suspects or not truth.culprits else "no rank named"
    return "wrong accusation" if answer.state == "slow" and is_wrong_rank else "missed"


def figures(truth: Truth, answer: Answer) -> Row:
    """Return the figures of one question; None where a figure means nothing for this truth."""
    is_state_right = answer.state == truth.state or answer.state in truth.also
    is_state_right = is_state_right or (truth.state == "slow" and answer.state == "waiting")
    is_bad = truth.state in FAILURES
    found = set(answer.suspects)
    ranks_right = bool(found) and found <= truth.culprits if truth.culprits else not found
    guilty = truth.culprits or truth.involved
    is_pointed = is_bad and bool(guilty)
    first = answer.suspects or answer.look_first[:1]
    return {
        "state_right": is_state_right,
        "ranks_right": ranks_right and is_state_right if is_bad else None,
        "class_right": answer.hang_class in truth.classes if truth.classes and truth.state not in HEALTHY else None,
        "top1": bool(guilty & set(answer.look_first[:1])) if is_pointed else None,
        "top3": bool(guilty & set(answer.look_first[:3])) if is_pointed else None,
        "unnamed": not found if truth.culprits and answer.state in FAILURES else None,
        "astray": guilty.isdisjoint(first) if truth.culprits and answer.state in FAILURES else None,
        "unpointed": not found and not answer.look_first if is_bad and truth.culprits else None,
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the score of all questions as text: outcomes, figures, and every answer that is not right."""
    scored = [row for row in rows if row["outcome"] != "not scored"]
    counts = Counter(row["outcome"] for row in rows)
    lines = [f"{len(scored)} questions about {len({row['case'] for row in scored})} programs"]
    lines += [f"  {counts[name]:4d}  {name}" for name in OUTCOMES if counts[name]]
    for name, words in (
        ("state_right", "state right"), ("ranks_right", "ranks right (of hangs and crashes)"),
        ("class_right", "exact class"), ("top1", "look_first: the first is guilty"),
        ("top3", "look_first: one of the first three"), ("unnamed", "called a hang or a crash, and no rank is accused"),
        ("astray", "called a hang or a crash, and neither an accused rank nor the first pointer is guilty"),
        ("unpointed", "of hangs, no rank is accused or pointed at"),
    ):  # fmt: skip
        lines.append("  " + _share(words, [row["figures"][name] for row in scored if row.get("figures")]))
    by_truth = Counter((row["truth"]["state"], row["outcome"]) for row in scored)
    lines += [f"  {state:12s} {name:20s} {count}" for (state, name), count in sorted(by_truth.items())]
    lines += [line_of(row) for row in sorted(scored, key=_place) if row["outcome"] != "right"]
    return "\n".join(lines)


def _place(row: Row) -> tuple[int, str, int]:
    return OUTCOMES.index(row["outcome"]), row["case"], row["ask"]


def _share(words: str, values: Iterable[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{words}: {sum(known)} of {len(known)}" + (f" ({100 * sum(known) / len(known):.0f} %)" if known else "")


def line_of(row: Row) -> str:
    """Return one question and its outcome as a line."""
    answer = row.get("answer") or {}
    said = f"{answer.get('state')} {answer.get('class')} suspects {answer.get('suspects')}"
    truth = f"{row['truth']['state']} {row['truth']['culprits'] or row['truth']['involved']}"
    claim = (answer.get("claim") or row.get("error") or "")[:150]
    return f"{row['outcome']}: {row['case']} #{row['ask']} (truth {truth}): {said}: {claim}"
