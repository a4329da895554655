"""Renders the answer as at most 40 lines of text: the claim first, then the reasons, then the classes.

Each line has a role, which the command line turns into colour on a terminal and ignores elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from bigsci_launch.scheduler.hostlist import compress_hostlist
from bigsci_launch.spy.evidence.known_code import operation_of
from bigsci_launch.spy.evidence.numbering import list_processes
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.stack_classes import StackClass, merge_stacks
from bigsci_launch.spy.evidence.stacks import Frame
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.show.grid import MEANINGS, class_letter, make_text_grid, rank_marks
from bigsci_launch.spy.show.suspects import merge_suspects, name_group

LineRole = Literal["bad", "good", "head", "plain", "muted", "grid"]
MAX_LINES = 40
MAX_FRAMES = 4
MAX_ITEMS = 4
MAX_POINTERS = 3
MAX_WIDTH = 180
MAX_RUNS = 8
"""A list of more ranges of ranks is cut: `0-7,12-39,44-71,...`. The JSON document lists all of them."""

NAME_WIDTH = 11
LEAST_FOR_CLASSES = 5
MAX_GRID_ROWS = 16
_WORD = re.compile(r"(?:'[^']*'|[^\s'])+")
LEAST_FOR_GRID = 8
"""With fewer ranks, the classes are enough and no grid is printed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report. In a line of the grid, each letter has its own colour."""

    text: str
    role: LineRole = "plain"


Items = list[list[Line]]


def to_lines(evidence: Evidence, conclusion: Conclusion, width: int | None = None) -> list[Line]:
    """Return the report: 40 lines at most, whatever the number of ranks.

    `width` is the width of the terminal, which no line exceeds. Without it, the claim is a single line, and other lines
    are cut only if they are very long.
    """
    page = _Folder(width)
    state = conclusion.state
    claim_role: LineRole = "bad" if state.is_failure else "good" if state.is_healthy else "head"
    claim = page.fold("", conclusion.claim, claim_role, max_lines=5)
    lines = [*claim, *page.fold("", _summary(evidence, conclusion), "muted")]
    before = [
        *_known_hang(conclusion, page),
        _items("evidence", conclusion.evidence, page),
        _items("missing", conclusion.missing, page),
        [page.fold_command(*each) for each in zip(["next", " ", " ", " "], conclusion.next, strict=False)],
        _items("suspects", _suspects(evidence, conclusion), page),
        _items("look at", _look_first(evidence, conclusion), page),
    ]
    after = _unreadable(evidence, page)
    classes = merge_stacks(evidence.ranks)
    grid = _grid(evidence, conclusion, classes, page.width)
    _shorten([*before, after], MAX_LINES - len(lines) - len(grid) - LEAST_FOR_CLASSES)
    shown = [line for items in before for item in items for line in item]
    end = [*(line for item in after for line in item), *grid]
    left = MAX_LINES - len(lines) - len(shown) - len(end)
    return [*lines, *shown, *_classes(evidence, conclusion, classes, left, page), *end]


def _shorten(sections: Sequence[Items], max_lines: int) -> None:
    """Remove items from the longest sections until all fit; the first item of each section stays."""
    while sum(len(item) for items in sections for item in items) > max_lines:
        longest = max(sections, key=len)
        if len(longest) <= 1:
            return
        longest.pop()


class _Folder:
    """Folds text into lines of `width`; without a width, into a single line, which is whole."""

    def __init__(self, width: int | None) -> None:
        self.is_terminal = width is not None
        self.width = max(min(width or MAX_WIDTH, MAX_WIDTH), 40)

    def fold(self, name: str, text: str, role: LineRole = "plain", max_lines: int = 2) -> list[Line]:
        """Fold `text` into at most `max_lines` lines, indented behind `name` if there is one."""
        text = _cut_runs(text)
        indent = " " * NAME_WIDTH if name else ""
        first = f"  {name:{NAME_WIDTH - 2}}" if name else ""
        if not self.is_terminal:
            return [Line(first + text, role)]
        lines = wrap(
            text,
            self.width,
            initial_indent=first,
            subsequent_indent=indent,
            max_lines=max_lines,
            placeholder=" ...",
            break_on_hyphens=False,
        )
        return [Line(line, role) for line in lines]

    def fold_command(self, name: str, text: str) -> list[Line]:
        """Fold a command so that it can be run as it is copied: with backslashes, never inside of quotes, and with `#`
        before each line of the remark behind it."""
        if not self.is_terminal:
            return self.fold(name, text)
        command, _, remark = text.partition("  # ")
        lines = [f"  {name:{NAME_WIDTH - 2}}"]
        for word in _WORD.findall(command):
            if len(lines[-1]) > NAME_WIDTH and len(lines[-1]) + len(word) + 3 > self.width:
                lines[-1] += " \\"
                lines.append(" " * NAME_WIDTH)
            lines[-1] += word if len(lines[-1]) == NAME_WIDTH else f" {word}"
        if remark and len(lines[-1]) + len(remark) + 4 <= self.width:
            lines[-1] += f"  # {remark}"
        elif remark:
            indent = " " * NAME_WIDTH + "# "
            lines += wrap(remark, self.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return [Line(line) for line in lines]

    def cut(self, text: str) -> str:
        text = _cut_runs(text)
        return text if len(text) <= self.width else text[: self.width - 4] + " ..."


def _cut_runs(text: str) -> str:
    """Cut long lists of ranks in `text`."""

    def cut(found: re.Match[str]) -> str:
        return ",".join([*found[0].split(",")[: MAX_RUNS - 2], "..."])

    return re.sub(rf"(?:\d+(?:-\d+)?,){{{MAX_RUNS},}}\d+(?:-\d+)?", cut, text)


def _summary(evidence: Evidence, conclusion: Conclusion) -> str:
    read = sum(1 for seen in evidence.ranks if seen.threads)
    parts = [
        conclusion.state.value,
        f"class {conclusion.hang_class}" if conclusion.hang_class else "",
        f"confidence {conclusion.confidence:.2f}",
        f"{read} of {evidence.world_size} {_noun(evidence)} read",
        _nodes_text(evidence),
        f"job {evidence.job}" if evidence.job else "",
        str(evidence.topology or ""),
    ]
    return " · ".join(part for part in parts if part)


def _nodes_text(evidence: Evidence) -> str:
    if evidence.is_over:
        return "the job has ended"
    nodes = {seen.node for seen in evidence.ranks if seen.samples}
    return f"{len(nodes)} of {len(nodes) + len(evidence.nodes_silent)} nodes answered"


def _noun(evidence: Evidence) -> str:
    """`ranks`, or `processes` if it is unknown which of them is which rank."""
    return "ranks" if any(evidence.is_numbered(seen.rank) for seen in evidence.ranks) else "processes"


def _items(name: str, items: Sequence[str], page: _Folder) -> Items:
    names = [name, *[" "] * len(items)]
    return [page.fold(*each) for each in zip(names, items[:MAX_ITEMS], strict=False)]


def _known_hang(conclusion: Conclusion, page: _Folder) -> list[Items]:
    """Return the section on the known hang: its name, why such hangs happen, and what to do."""
    known = conclusion.signature
    if known is None:
        return []
    texts = [("known", f"{known.name}: {known.explanation}"), *([("remedy", known.remedy)] if known.remedy else [])]
    folder = _Folder(page.width)  # worth several lines, even where others are cut
    return [[folder.fold(name, text, "head", 3 if name == "remedy" else 2)] for name, text in texts]


def _look_first(evidence: Evidence, conclusion: Conclusion) -> list[str]:
    """Return where to look if no rank is accused, in one line: the first rank with its reason, then two more."""
    if conclusion.suspects or not conclusion.look_first:
        return []
    first, *rest = conclusion.look_first
    rate = first.hit_rate
    known = f"; pointers of this kind were right in {rate:.0%} of the measured cases" if rate is not None else ""
    others = "".join(f", then {evidence.short_name(pointer.rank)}" for pointer in rest[: MAX_POINTERS - 1])
    return [f"{evidence.name(first.rank)} first{others}: {first.why}{known}"]


def _suspects(evidence: Evidence, conclusion: Conclusion) -> list[str]:
    """Return the suspects by reason, if there are several: the claim has no room for all of them."""
    found = merge_suspects(conclusion.suspects) if len(conclusion.suspects) > 1 else ()
    return [
        f"{name_group(evidence, group.ranks)}{': each' if len(group.ranks) > 1 else ''} {group.why}" for group in found
    ]


def _classes(
    evidence: Evidence, conclusion: Conclusion, classes: Sequence[StackClass], max_lines: int, page: _Folder
) -> list[Line]:
    """Return the largest classes and that of a suspect, two lines each; then how many more there are."""
    suspects = {suspect.rank for suspect in conclusion.suspects}
    count = max_lines // 2 if 2 * len(classes) <= max_lines else max((max_lines - 1) // 2, 1)
    shown = _most_informative(classes, suspects, count)
    lines = []
    for index in shown:
        lines += _one_class(index, classes[index], evidence, bool(suspects.intersection(classes[index].ranks)), page)
    if len(shown) < len(classes):
        rest = [rank for index, found in enumerate(classes) if index not in shown for rank in found.ranks]
        lines.append(Line(page.cut(f"{len(classes) - len(shown)} more classes: {evidence.names(rest)}"), "muted"))
    return lines


def _most_informative(classes: Sequence[StackClass], suspects: set[int], count: int) -> list[int]:
    """Return the largest classes. If none has a suspect, a suspect's class replaces the smallest of them."""
    shown = list(range(min(count, len(classes))))
    theirs = [index for index, found in enumerate(classes) if suspects.intersection(found.ranks)]
    if theirs and not set(theirs).intersection(shown):
        shown[-1] = theirs[0]
    return shown


def _one_class(index: int, found: StackClass, evidence: Evidence, suspected: bool, page: _Folder) -> list[Line]:
    head = f"{class_letter(index)} {evidence.count(found.ranks)}: {evidence.list_names(found.ranks)}"
    nodes = compress_hostlist(node for node in found.nodes if node)
    where = [nodes, evidence.part(found.ranks)]
    thread = f"thread {found.thread}" if found.thread != "MainThread" else ""
    head += "".join(f"  {part}" for part in (*where, thread) if part)
    frames = " < ".join(_frame(frame) for frame in found.frames[:MAX_FRAMES])
    more = " < ..." if len(found.frames) > MAX_FRAMES else ""
    return [Line(page.cut(head), "bad" if suspected else "head"), Line(page.cut(f"    {frames}{more}"))]


def _frame(frame: Frame) -> str:
    """Return `all_reduce` for torch's own call, `reduce_loss (train.py:35)` for any other."""
    return operation_of(frame.function, frame.file) or str(frame)


def _unreadable(evidence: Evidence, page: _Folder) -> Items:
    """Return the silent nodes and the ranks that could not be read or have just ended, each with the reason."""
    lines = [f"node {node} is silent: {why}" for node, why in evidence.nodes_silent[:MAX_ITEMS]]
    if len(evidence.nodes_silent) > MAX_ITEMS:
        lines.append(f"and {len(evidence.nodes_silent) - MAX_ITEMS} more silent nodes")
    reasons: dict[str, list[int]] = {}
    for seen in evidence.ranks:
        if seen.why_unreadable:
            reasons.setdefault(seen.why_unreadable, []).append(seen.rank)
    by_number = sorted(reasons.items(), key=lambda item: -len(item[1]))[:MAX_ITEMS]
    lines += [f"not read: {name_group(evidence, tuple(ranks))}: {why}" for why, ranks in by_number]
    lines += [f"ended: {name_group(evidence, tuple(ranks))}: {how}" for how, ranks in _ended(evidence)][:MAX_ITEMS]
    strangers = [other for other in evidence.others if other.role == "unknown"]
    if strangers:
        pids = list_processes([other.pid for other in strangers])
        lines.append(f"not identified: {'process' if len(strangers) == 1 else 'processes'} {pids}: {strangers[0].why}")
    return [[Line(page.cut(line), "bad")] for line in lines]


def _ended(evidence: Evidence) -> list[tuple[str, list[int]]]:
    """Return the ranks that ended between two looks, which are in no class, by what is known of their ends."""
    found: dict[str, list[int]] = {}
    for seen in evidence.ranks:
        if seen.is_gone and seen.threads:
            how = str(seen.exit or seen.failure or seen.error or "no record shows how")
            found.setdefault(f"{how}; seen last in {seen.place}", []).append(seen.rank)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _grid(evidence: Evidence, conclusion: Conclusion, classes: Sequence[StackClass], width: int) -> list[Line]:
    """Return the grid of all ranks, unless there are few ranks or all have the same mark."""
    marks = rank_marks(evidence, classes, (suspect.rank for suspect in conclusion.suspects))
    if len(marks) < LEAST_FOR_GRID or len(set(marks.values())) < 2:
        return []
    grid = make_text_grid(evidence.topology, marks, min(width, 120) - 2 - NAME_WIDTH, MAX_GRID_ROWS)
    meanings = (f"{mark} {meaning}" for mark, meaning in MEANINGS.items() if mark in marks.values())
    caption = "; ".join((grid.caption, *meanings))
    widest = max(len(name) for name, _ in grid.rows)
    rows = [Line(f"  {name:{widest}}  {row}", "grid") for name, row in grid.rows]
    return [*(Line(line, "muted") for line in wrap(caption, width)), *rows]


def to_text(lines: Iterable[Line]) -> str:
    """Return the report without colour."""
    return "\n".join(line.text for line in lines)
