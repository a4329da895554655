"""The answer as lines for people: the sentence first, then why, then the classes, at most 40 lines.

A line carries a role, which the command line turns into colour on a terminal and into nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from bigsci_launch.scheduler.hostlist import compress_hostlist
from bigsci_launch.spy.conclusion import Conclusion, State, where_shared
from bigsci_launch.spy.evidence import Evidence, RankEvidence
from bigsci_launch.spy.known_frames import operation_of
from bigsci_launch.spy.merge import StackClass, merge_stacks
from bigsci_launch.spy.stacks import Frame
from bigsci_launch.topology import compress_ranks

Role = Literal["bad", "good", "head", "plain", "muted"]
MAX_CLASSES = 7
MAX_FRAMES = 4
MAX_UNREADABLE = 4
MAX_REASONS = 3
MAX_WIDTH = 180


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    text: str
    role: Role = "plain"


def to_lines(evidence: Evidence, conclusion: Conclusion) -> list[Line]:
    """The report. 40 lines at most, whatever the number of ranks."""
    bad = conclusion.state in (State.HANG, State.CRASHED)
    good = conclusion.state in (State.PROGRESSING, State.FINISHED)
    lines = [
        Line(conclusion.claim, "bad" if bad else "good" if good else "head"),
        Line(_summary(evidence, conclusion), "muted"),
        *_known_hang(conclusion),
        *_list("evidence", conclusion.evidence),
        *_list("missing", conclusion.missing),
        *_list("next", conclusion.next),
        *_other_suspects(evidence, conclusion),
        *_classes(evidence, conclusion),
        *_unreadable(evidence),
    ]
    return [Line(_cut(line.text) if index else line.text, line.role) for index, line in enumerate(lines)]


def _summary(evidence: Evidence, conclusion: Conclusion) -> str:
    read = sum(1 for seen in evidence.ranks if seen.threads)
    nodes = {seen.node for seen in evidence.ranks if seen.samples}
    parts = [
        conclusion.state.value,
        f"class {conclusion.kind}" if conclusion.kind else "",
        f"confidence {conclusion.confidence:.2f}",
        f"{read} of {evidence.world_size} ranks read",
        f"{len(nodes)} of {len(nodes) + len(evidence.nodes_silent)} nodes answered",
        f"job {evidence.job}" if evidence.job else "",
        str(evidence.topology or ""),
    ]
    return " · ".join(part for part in parts if part)


def _list(name: str, items: Sequence[str]) -> list[Line]:
    lines = [f"  {name if index == 0 else '':9}{item}" for index, item in enumerate(items[:MAX_REASONS])]
    return [Line(line) for line in lines]


def _known_hang(conclusion: Conclusion) -> list[Line]:
    """Which known hang it is, why such hangs happen, and what to do; two lines each at most."""
    known = conclusion.signature
    if known is None:
        return []
    texts = (("known", f"{known.name}: {known.explanation}"), ("remedy", known.remedy))
    lines = []
    for name, text in texts:
        parts = wrap(text, MAX_WIDTH - 20)
        lines += [f"  {name if part is parts[0] else '':9}{part}" for part in parts]
    return [Line(line, "head") for line in lines]


def _other_suspects(evidence: Evidence, conclusion: Conclusion) -> list[Line]:
    """The suspects that the sentence has no room for."""
    if len(conclusion.suspects) < 2:
        return []
    lines = [Line(f"  {evidence.name(item.rank)} {item.why}") for item in conclusion.suspects[:MAX_REASONS]]
    rest = [suspect.rank for suspect in conclusion.suspects[MAX_REASONS:]]
    return [*lines, *([Line(f"  and ranks {compress_ranks(rest)}")] if rest else [])]


def _classes(evidence: Evidence, conclusion: Conclusion) -> list[Line]:
    found = merge_stacks(evidence.ranks)
    suspects = {suspect.rank for suspect in conclusion.suspects}
    # A known hang takes four lines, as many as two classes.
    shown = _most_telling(found, suspects, MAX_CLASSES - (2 if conclusion.signature else 0))
    lines = []
    for stack_class in shown:
        lines += _one_class(stack_class, evidence, bool(suspects.intersection(stack_class.ranks)))
    rest = [stack_class for stack_class in found if stack_class not in shown]
    if rest:
        ranks = [rank for stack_class in rest for rank in stack_class.ranks]
        lines.append(Line(f"{len(rest)} more classes: ranks {compress_ranks(ranks)}", "muted"))
    return lines


def _most_telling(found: Sequence[StackClass], suspects: set[int], count: int) -> list[StackClass]:
    """The largest classes, and the first of the suspects' in place of the smallest of them."""
    shown = list(found[:count])
    if suspects and len(found) > count and not any(suspects.intersection(item.ranks) for item in shown):
        shown[-1] = next((item for item in found if suspects.intersection(item.ranks)), shown[-1])
    return shown


def _one_class(stack_class: StackClass, evidence: Evidence, suspected: bool) -> list[Line]:
    count = len(stack_class.ranks)
    head = f"{count} {'rank' if count == 1 else 'ranks'}: {compress_ranks(stack_class.ranks)}"
    nodes = compress_hostlist(node for node in stack_class.nodes if node)
    where = [nodes, _coordinates(stack_class, evidence)]
    thread = f"thread {stack_class.thread}" if stack_class.thread != "MainThread" else ""
    head += "".join(f"  {part}" for part in (*where, thread) if part)
    frames = " < ".join(_frame(frame) for frame in stack_class.frames[:MAX_FRAMES])
    more = " < ..." if len(stack_class.frames) > MAX_FRAMES else ""
    return [Line(head, "bad" if suspected else "head"), Line(f"    {frames}{more}", "plain")]


def _frame(frame: Frame) -> str:
    """`all_reduce` for torch's own call, `reduce_loss (train.py:35)` for any other."""
    return operation_of(frame.function, frame.file) or str(frame)


def _coordinates(stack_class: StackClass, evidence: Evidence) -> str:
    """The coordinate of a single rank; what several have in common."""
    if len(stack_class.ranks) == 1:
        return str(evidence.coordinate(stack_class.ranks[0]) or "")
    shared = where_shared(evidence, stack_class.ranks).split(", ")
    return " ".join(part for part in shared if "node" not in part)


def _unreadable(evidence: Evidence) -> list[Line]:
    lines = [Line(f"node {node} is silent: {why}", "bad") for node, why in evidence.nodes_silent[:MAX_UNREADABLE]]
    if len(evidence.nodes_silent) > MAX_UNREADABLE:
        lines.append(Line(f"and {len(evidence.nodes_silent) - MAX_UNREADABLE} more silent nodes", "bad"))
    reasons: dict[str, list[RankEvidence]] = {}
    for seen in evidence.ranks:
        if seen.why_unreadable:
            reasons.setdefault(seen.why_unreadable, []).append(seen)
    for why, group in sorted(reasons.items(), key=lambda item: -len(item[1]))[:MAX_UNREADABLE]:
        lines.append(Line(f"not read: {_who(evidence, group)}: {why}", "bad"))
    return lines


def _who(evidence: Evidence, group: Sequence[RankEvidence]) -> str:
    if len(group) == 1:
        return evidence.name(group[0].rank)
    return f"ranks {compress_ranks(seen.rank for seen in group)}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 4] + " ..."


def to_text(lines: Iterable[Line]) -> str:
    """The report without colour."""
    return "\n".join(line.text for line in lines)
