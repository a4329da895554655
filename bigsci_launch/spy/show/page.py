"""Renders the answer as one self-contained HTML page: the claim, the reasons, the classes, and a grid of all ranks.

Clicking a rank, or moving to it with the arrow keys, shows its stack, its kernel facts and what it waits for.
`page.html#rank=5` opens the page on that rank. Names from the job are inserted as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

from bigsci_launch import __version__, pages
from bigsci_launch.scheduler.hostlist import compress_hostlist
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.stack_classes import StackClass, merge_stacks
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, is_wrapper
from bigsci_launch.spy.judge.conclusion import Conclusion, Pointer
from bigsci_launch.spy.judge.waits import WaitGraph, build_graph
from bigsci_launch.spy.show.rank_facts import RankFact, facts_of
from bigsci_launch.spy.show.suspects import merge_suspects, name_group
from bigsci_launch.topology import AXES, AXIS_NAMES, Topology
from bigsci_launch.topology.naming import count_ranks

Size = Literal["small", "medium", "large"]
COLOURS = 8
"""Number of classes that have their own colour; the others share one."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SMALL_GRID, LARGE_GRID = 64, 1024
"""Cells show rank numbers in grids up to the first size, and not even letters from the second size."""

MAX_ROWS = 40
"""Without coordinates, the grid has one row per node, or several nodes per row if there are more nodes than this."""


@dataclass(frozen=True, slots=True)
class RankCell:
    """A rank in the grid. `style` is a colour (`k0` to `k8`), `unread` or `gone`; `mark` is the letter shown in it."""

    rank: int
    style: str
    mark: str
    title: str
    is_suspect: bool


@dataclass(frozen=True, slots=True)
class RankRow:
    """A row of the grid: its name, which is shown on the left, and its cells in blocks."""

    name: str
    blocks: tuple[tuple[RankCell, ...], ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """All ranks: rows of pipeline stages with blocks of replicas, or, without coordinates, rows of nodes."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[RankRow, ...]
    size: Size


def render_page(evidence: Evidence, conclusion: Conclusion, stored: Path | None = None) -> str:
    """Return the page as HTML text. `stored` is where the evidence is."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = package_files("bigsci_launch.spy.show")
    template, style, script = ((here / f"page.{suffix}").read_text("utf-8") for suffix in ("html.j2", "css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    classes = merge_stacks(evidence.ranks)
    body = environment.from_string(template).render(
        evidence=evidence,
        conclusion=conclusion,
        num_read=sum(1 for seen in evidence.ranks if seen.threads),
        suspects=[(found, name_group(evidence, found.ranks)) for found in merge_suspects(conclusion.suspects)],
        look_first=[] if conclusion.suspects else _pointers(evidence, conclusion),
        classes=[_class_row(index, found, evidence) for index, found in enumerate(classes)],
        unread=_unread(evidence),
        grid=make_grid(evidence, conclusion, classes),
        data=Markup(_dump(_details(evidence, conclusion))),
        script=Markup(script),
        origin=_origin(evidence, stored),
    )
    return pages.render_page(f"bsl spy: {conclusion.claim}", style, body)


def _origin(evidence: Evidence, stored: Path | None) -> str:
    """Return what the page rests on: the version, the time of the look, and the evidence."""
    moment = None if evidence.looked is None else datetime.fromtimestamp(evidence.looked, timezone.utc)
    looked = f"looked at {moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""
    where = f"evidence: {stored.absolute()}" if stored else ""
    return " · ".join(part for part in (f"bsl {__version__}", looked, where) if part)


def _pointers(evidence: Evidence, conclusion: Conclusion) -> list[tuple[Pointer, str]]:
    """Return where to look if no rank is accused, each with its name."""
    return [(pointer, evidence.name(pointer.rank)) for pointer in conclusion.look_first]


def _dump(document: Any) -> str:
    """Return JSON for a script element: without `<`, which could end the element."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else "*"


def _class_row(index: int, found: StackClass, evidence: Evidence) -> dict[str, Any]:
    return {
        "style": f"k{min(index, COLOURS)}",
        "mark": _letter(index),
        "count": evidence.count(found.ranks),
        "ranks": evidence.list_names(found.ranks),
        "first": found.ranks[0],
        "nodes": compress_hostlist(node for node in found.nodes if node),
        "thread": "" if found.thread == "MainThread" else found.thread,
        "frames": [str(frame) for frame in found.frames],
    }


def _unread(evidence: Evidence) -> list[tuple[str, str, int]]:
    """Return the ranks without stacks: the reason, the ranks in words, the first of them."""
    reasons: dict[str, list[int]] = {}
    for seen in evidence.ranks:
        if seen.why_unreadable or seen.is_gone:
            reasons.setdefault(seen.why_unreadable or f"it has ended: {seen.exit or 'gone'}", []).append(seen.rank)
    return [(why, evidence.names(ranks), ranks[0]) for why, ranks in reasons.items()]


def make_grid(evidence: Evidence, conclusion: Conclusion, classes: Sequence[StackClass]) -> Grid:
    number = {rank: index for index, found in enumerate(classes) for rank in found.ranks}
    suspects = {suspect.rank for suspect in conclusion.suspects}
    cells = {seen.rank: _cell(seen, evidence, number.get(seen.rank), suspects) for seen in evidence.ranks}
    size: Size = "small" if len(cells) <= SMALL_GRID else "medium" if len(cells) < LARGE_GRID else "large"
    sizes = evidence.topology
    if sizes is None or not sizes.is_grid or sizes.world_size != evidence.world_size:
        return Grid("Rows are nodes.", (), tuple(_node_rows(evidence, cells)), size)
    rows, in_block = [], sizes.stride("dp")
    for stage in range(sizes.pp):
        firsts = [sizes.rank_at(dp=replica, pp=stage) for replica in range(sizes.dp)]
        blocks = tuple(tuple(cells[first + at] for at in range(in_block)) for first in firsts)
        rows.append(RankRow(f"pp{stage}", blocks))
    columns = f"blocks are replicas (dp), each of {_block_text(sizes)}" if in_block > 1 else "columns are replicas"
    heads = tuple(f"dp{replica}" for replica in range(sizes.dp))
    return Grid(f"Rows are pipeline stages; {columns}.", heads, tuple(rows), size)


def _block_text(sizes: Topology) -> str:
    """Describe the ranks of a replica on one stage: `2 tensor-parallel ranks`, `4 ranks: tp 2 x cp 2`."""
    inside = [axis for axis in AXES[: AXIS_NAMES.index("dp")] if sizes[axis.name] > 1]
    if len(inside) == 1:
        return f"{sizes.stride('dp')} {inside[0].words} ranks"
    return f"{sizes.stride('dp')} ranks: {' x '.join(f'{axis.name} {sizes[axis.name]}' for axis in inside)}"


def _node_rows(evidence: Evidence, cells: dict[int, RankCell]) -> list[RankRow]:
    nodes: dict[str, list[RankCell]] = {}
    for seen in evidence.ranks:
        nodes.setdefault(seen.node, []).append(cells[seen.rank])
    blocks = [(name or "unknown", tuple(held)) for name, held in sorted(nodes.items(), key=lambda node: not node[0])]
    per_row = -(-len(blocks) // MAX_ROWS)
    parts = [blocks[start : start + per_row] for start in range(0, len(blocks), per_row)]
    return [
        RankRow(
            ", ".join(name for name, _ in part) if len(part) <= 2 else f"{part[0][0]} to {part[-1][0]}",
            tuple(held for _, held in part),
        )
        for part in parts
    ]


def _cell(seen: RankEvidence, evidence: Evidence, number: int | None, suspects: set[int]) -> RankCell:
    if number is not None:
        style, mark, what = f"k{min(number, COLOURS)}", _letter(number), f"class {_letter(number)}"
    elif seen.is_gone:
        style, mark, what = "gone", "x", "ended"
    else:
        style, mark, what = "unread", "?", "not read"
    where = (seen.node, str(evidence.coordinate(seen.rank) or ""), what)
    return RankCell(
        seen.rank,
        style,
        mark,
        " · ".join((evidence.short_name(seen.rank), *filter(None, where))),
        seen.rank in suspects,
    )


def _details(evidence: Evidence, conclusion: Conclusion) -> dict[str, Any]:
    """Return what the page shows about each selected rank. Values that several ranks share are stored once."""
    graph = build_graph(evidence)
    whys = {suspect.rank: suspect.why for suspect in conclusion.suspects}
    waits, ranks = _WaitWords(graph, evidence), {}
    stacks: dict[tuple[ThreadStack, ...], int] = {}
    tables: dict[tuple[RankFact, ...], int] = {}
    for seen in evidence.ranks:
        threads = _threads(seen)
        ranks[seen.rank] = {
            "name": evidence.name(seen.rank),
            "pid": seen.pid,
            "why": whys.get(seen.rank),
            "unread": seen.why_unreadable,
            "waits": tables.setdefault(waits.of(seen.rank), len(tables)),
            "facts": tables.setdefault(facts_of(seen, evidence), len(tables)),
            "stack": stacks.setdefault(threads, len(stacks)) if threads else None,
        }
    return {
        "ranks": ranks,
        "tables": list(tables),
        "stacks": [[_thread(thread) for thread in threads] for threads in stacks],
    }


def _threads(seen: RankEvidence) -> tuple[ThreadStack, ...]:
    """Return the threads of a rank, the deciding one first, without thread ids, so that equal stacks compare equal."""
    deciding = seen.thread
    if deciding is None:
        return ()
    others = (thread for thread in seen.threads or () if thread is not deciding and thread.frames)
    return tuple(ThreadStack(0, each.label, each.owns_gil, False, each.frames) for each in (deciding, *others))


def _thread(thread: ThreadStack) -> dict[str, Any]:
    return {
        "name": thread.name + (", holds the GIL" if thread.owns_gil else "") if thread.name else "",
        "frames": [_frame(frame) for frame in thread.frames],
    }


def _frame(frame: Frame) -> list[Any]:
    """Return function, place, whole path, and whether the frame is a mere wrapper."""
    return [frame.function, frame.place, frame.file, int(is_wrapper(frame))]


class _WaitWords:
    """What each rank waits for, in words; ranks that wait for the same ranks share one value."""

    def __init__(self, graph: WaitGraph, evidence: Evidence) -> None:
        self._graph = graph
        self._said: dict[int, tuple[RankFact, ...]] = {}
        self._awaited: dict[int, int] = {}
        for blockers, ranks in graph.meetings:
            absent = (("not there yet", evidence.names(blockers)),) if blockers else ()
            self._said[id(blockers)] = (("waits in", str(graph.waits[ranks[0]])), *absent)
            for blocker in blockers:
                self._awaited[blocker] = self._awaited.get(blocker, 0) + len(ranks)

    def of(self, rank: int) -> tuple[RankFact, ...]:
        """Return (name, words) of each fact about what `rank` waits for, and who waits for it."""
        found: tuple[RankFact, ...] = (("waits in", "no visible communication"),)
        if rank in self._graph.waits:
            found = self._said[id(self._graph.blockers[rank])]
        if rank in self._awaited:
            count = self._awaited[rank]
            found = (*found, ("awaited by", f"{count_ranks(count)} directly"))
        return found
