"""The screen of `bsl watch --live`: the newest steps, where every rank is, what is wrong, and what was done.

`read_live_view` only reads the run's files; `live_lines` draws what it returns.
"""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.runs.attempts import query_attempts, read_job
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.generations.read import present_topology, read_generations
from bigsci_launch.runs.generations.records import Generations, recoveries
from bigsci_launch.runs.generations.recovery_text import began_text, recovering_text
from bigsci_launch.runs.layout import RunDir, rank_files
from bigsci_launch.runs.signs import Events, RankSign, StepRecord, find_last_step, read_rank_events, read_signs
from bigsci_launch.runs.watching.heartbeat import Health, WatcherHeartbeat, read_all_heartbeats
from bigsci_launch.runs.watching.ledger import Act, RunFinding, read_acts, read_all_findings
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.spy.show.grid import make_text_grid
from bigsci_launch.status.read import total_steps
from bigsci_launch.styled_lines import AMBER, BOLD, GREEN, RED, SOFT, StyledLine, cut
from bigsci_launch.topology import Topology
from bigsci_launch.topology.naming import count_ranks
from bigsci_launch.units import ago, format_age
from bigsci_launch.watch.show.history import StepPoint, points_of_records, read_printed

TAIL_BYTES = 128 << 10
OLD_AFTER_S = 120.0
"""The age at which a heartbeat is old, where no step tells how long one usually takes."""
TALL = 30
"""Lines of a screen from which on findings take several."""
BLOCKS = "▁▂▃▄▅▆▇█"
PHASES = {"step": ".", "init": "i", "load": "l", "eval": "e", "save": "s", "copy": "c", "dump": "d"}
OTHER_PHASE, SILENT, ENDED, ABSENT = "o", "-", "x", "?"
OLD_STEP, OLD_SILENT = "T", "_"
ORDER = ".-escdlio" + ENDED + ABSENT + OLD_SILENT + "ESCDLIO" + OLD_STEP
"""Marks of ranks, the usual ones first: one place of the grid may show several ranks."""
MEANINGS = {
    **{mark: phase for phase, mark in PHASES.items()},
    OTHER_PHASE: "another phase",
    SILENT: "no heartbeats",
    OLD_SILENT: "no heartbeats, nothing printed for long",
    ENDED: "ended",
    ABSENT: "not started",
}
COLOURS = {Health.HEALTHY: GREEN, Health.FINDING: {**RED, **BOLD}, Health.BLIND: AMBER}


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is known of the newest attempt at `asked`. `points` are the newest steps, `findings` the open ones, and
    `acts` the newest line about each act, the newest first."""

    name: str
    asked: float
    attempt: str
    label: str
    job: JobInfo
    topology: Topology | None
    signs: tuple[RankSign, ...]
    step: StepRecord | None
    total_steps: int | None
    points: tuple[StepPoint, ...] = ()
    findings: tuple[RunFinding, ...] = ()
    acts: tuple[Act, ...] = ()
    heartbeats: tuple[WatcherHeartbeat, ...] = ()
    generations: Generations | None = None


def read_live_view(run: RunDir, job: JobInfo | None = None) -> LiveView:
    """Return what the run's files show now. `job` is Slurm's last answer; without it, only files are read.

    Raises:
        RunDirError: the run has no attempt, or cannot be read.
    """
    attempt = find_attempt(run)
    events, generations = read_rank_events(attempt), read_generations(attempt)
    record, step = read_job(attempt), find_last_step(attempt, events)
    newest = {act.key: act for act in read_acts(run)}
    return LiveView(
        name=run.name,
        asked=time.time(),
        attempt=attempt.name,
        label=record.label if record else "no job",
        job=job or query_attempts([attempt], ask_slurm=False)[attempt.name],
        topology=present_topology(run, attempt, generations),
        generations=generations,
        signs=tuple(read_signs(attempt, events)),
        step=step,
        total_steps=total_steps(record, step),
        points=_newest_points(rank_files(attempt.events, ".jsonl"), events) or read_printed(attempt, TAIL_BYTES),
        findings=tuple(finding for finding in read_all_findings(run) if finding.cleared is None),
        acts=tuple(sorted(newest.values(), key=lambda act: act.time, reverse=True)),
        heartbeats=tuple(read_all_heartbeats(run)),
    )


def _newest_points(files: Mapping[int, Any], events: Events) -> tuple[StepPoint, ...]:
    """Return the newest steps of the rank that reports them."""
    for rank, tail in events.items():
        if any(event.get("kind") == "step" for event in tail):
            return points_of_records(read_last_events(files[rank], TAIL_BYTES))
    return ()


def live_lines(view: LiveView, width: int, height: int) -> list[StyledLine]:
    """Return at most `height` lines of at most `width` columns, each in parts with their styles."""
    head = [_title(view), _health(view), _step(view), *_generation(view), *_plots(view, width), []]
    news = [*_findings(view, width, 1 if height < TALL else 3), *_acts(view)]
    room = height - len(head) - min(len(news), max(3, height // 4)) - 2
    grid = _grid(view, width, max(1, room))
    lines = [*head, *grid, *([[]] if news and len(head) + len(grid) < height - 1 else []), *news]
    return [cut(line, width) for line in lines[:height]]


def plain_line(view: LiveView) -> str:
    """Return the view in one line, for a file or a pipe. It has no ages: it is the same as long as nothing happens."""
    parts = ["".join(text for text, style in line if style != SOFT) for line in (_step(view), _health(view))]
    return f"{view.name} {view.job.state.value}, {'; '.join(parts)}"


def _title(view: LiveView) -> StyledLine:
    state = view.job.state
    colour = GREEN if state.value == "RUNNING" else AMBER
    clock = time.strftime("%H:%M:%S", time.localtime(view.asked))
    ranks = f", {count_ranks(view.topology.world_size)} ({view.topology})" if view.topology else ""
    return [
        (view.name, BOLD),
        (f"  {state.value}", colour),
        (f"  {clock}  attempt {view.attempt}, {view.label}{ranks}", SOFT),
    ]


def _health(view: LiveView) -> StyledLine:
    """Return the report of the newest watcher; that of a dead one is out of date."""
    if not view.heartbeats:
        return [("not watched", AMBER)]
    heartbeat = view.heartbeats[0]
    age = ago(heartbeat.time, view.asked)
    if heartbeat.is_dead(view.asked):
        said = f": watcher {heartbeat.name} on {heartbeat.host} is dead"
        return [("unknown", AMBER), (said, {}), (f"  (its last look was {age})", SOFT)]
    if heartbeat.ended:
        return [
            ("unknown", AMBER),
            (f": watcher {heartbeat.name} has left; its last report: {heartbeat.sentence}", {}),
            (f"  ({age})", SOFT),
        ]
    blind = f"; cannot see: {'; '.join(heartbeat.blind)}" if heartbeat.blind else ""
    said = f": {heartbeat.sentence}{blind}"
    return [(heartbeat.health.value, COLOURS[heartbeat.health]), (said, {}), (f"  ({heartbeat.name}, {age})", SOFT)]


def _step(view: LiveView) -> StyledLine:
    last = view.step
    if last is None:
        return [("no step yet", SOFT)]
    total = f"/{view.total_steps}" if view.total_steps else ""
    parts = [
        f"loss {last.loss:.6g}" if last.loss is not None else "loss unknown",
        f"{last.seconds:.3g} s per step" if last.seconds is not None else "",
        f"{last.tflops:.3g} TFLOP/s" if last.tflops is not None else "",
    ]
    age = ago(last.time, view.asked, differs=last.clock_differs)
    said = "  ".join(part for part in parts if part)
    return [(f"step {last.step}{total}", BOLD), (f"  {said}", {}), (f"  {age}", SOFT)]


def _generation(view: LiveView) -> list[StyledLine]:
    """Return what the newest recovery has come to; nothing where there was none."""
    found = view.generations
    if found is None or (len(found.all) == 1 and not found.is_recovering):
        return []
    if found.is_recovering and not view.job.state.is_over:
        return [[(recovering_text(found, view.asked), AMBER)]]
    return [[(began_text(recoveries(found)[-1], has_phases=found.have_phases), {})]] if len(found.all) > 1 else []


def _plots(view: LiveView, width: int) -> list[StyledLine]:
    found = []
    for name, values in (
        ("loss", [point.loss for point in view.points]),
        ("s per step", [point.seconds for point in view.points]),
    ):
        known = [value for value in values if value is not None][-max(8, width - 34) :]
        finite = [value for value in known if math.isfinite(value)]
        if finite:
            low, high = min(finite), max(finite)
            found.append([(f"{name:<11}", SOFT), (sparkline(known), {}), (f" {low:.4g} to {high:.4g}", SOFT)])
    return found


def sparkline(values: Sequence[float]) -> str:
    """Return one block for each value, from the lowest to the highest; `!` for one that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join(
        "!" if not math.isfinite(value) else BLOCKS[int((value - low) / span * (len(BLOCKS) - 1) + 0.5) if span else 0]
        for value in values
    )


def _grid(view: LiveView, width: int, max_rows: int) -> list[StyledLine]:
    """Return the grid of ranks and what its marks mean."""
    usual = usual_step_s(view.points)
    old_s = OLD_AFTER_S if usual is None else max(10.0, 4 * usual)
    marks = {sign.rank: mark_of(sign, view.asked, old_s) for sign in view.signs}
    if view.topology is not None:
        marks = {rank: marks.get(rank, ABSENT) for rank in range(view.topology.world_size)}
    if not marks:
        return [[("no rank has started", SOFT)]]
    grid = make_text_grid(view.topology, marks, max(8, width - 8), max_rows, ORDER)
    name_width = max(len(name) for name, _ in grid.rows)
    rows = [[(f"{name:<{name_width}}  ", SOFT), *_coloured(row)] for name, row in grid.rows]
    return [*rows, [(_legend(marks.values(), old_s), SOFT)]]


def usual_step_s(points: Iterable[StepPoint]) -> float | None:
    """Return the median of the newest seconds per step; None if none is known."""
    seconds = [point.seconds for point in points if point.seconds is not None]
    return statistics.median(seconds) if seconds else None


def mark_of(sign: RankSign, asked: float, old_s: float) -> str:
    """Return the mark of a rank: its phase, as a capital if its newest sign is old."""
    if sign.has_ended:
        return ENDED
    if sign.phase is None:
        return OLD_SILENT if asked - sign.newest > OLD_AFTER_S else SILENT
    mark = PHASES.get(sign.phase, OTHER_PHASE)
    if asked - sign.time <= old_s:
        return mark
    return OLD_STEP if mark == PHASES["step"] else mark.upper()


def _coloured(row: str) -> StyledLine:
    """Return a row of marks in runs of one colour."""
    spans: StyledLine = []
    for mark in row:
        style = _style(mark)
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + mark, style)
        else:
            spans.append((mark, style))
    return spans


def _style(mark: str) -> dict[str, Any]:
    if mark.isupper() or mark == OLD_SILENT:
        return {**RED, **BOLD}
    if mark in (ABSENT, ENDED):
        return AMBER
    return GREEN if mark == PHASES["step"] else {}


def _legend(marks: Iterable[str], old_s: float) -> str:
    """Return what the marks mean that are shown."""
    shown = set(marks)
    has_old = any(mark.isupper() for mark in shown)
    named = {PHASES["step"] if mark == OLD_STEP else mark.lower() for mark in shown}
    words = [f"{mark} {MEANINGS[mark]}" for mark in sorted(named, key=ORDER.index)]
    return "  ".join([*words, *([f"capital (T: step): no heartbeat for {format_age(old_s)}"] if has_old else [])])


def _findings(view: LiveView, width: int, max_lines: int) -> list[StyledLine]:
    """Return the open findings, the newest first, each in at most `max_lines` lines."""
    lines: list[StyledLine] = []
    for finding in sorted(view.findings, key=lambda finding: finding.noticed, reverse=True):
        kind = f"{finding.kind.replace('_', ' ')}: "
        if max_lines == 1:
            lines.append([(kind, {**RED, **BOLD}), (finding.sentence, {})])
            continue
        first, *others = textwrap.wrap(kind + finding.sentence, max(20, width), subsequent_indent="  ") or [kind]
        lines.append([(first[: len(kind)], {**RED, **BOLD}), (first[len(kind) :], {})])
        lines += [[(text, {})] for text in others[: max_lines - 1]]
    return lines


def _acts(view: LiveView) -> list[StyledLine]:
    return [[(f"{act.what.replace('_', ' ')} ", BOLD), (_came(act, view.asked), {})] for act in view.acts[:3]]


def _came(act: Act, asked: float) -> str:
    words = f": {act.words}" if act.words else f": {act.why}" if act.why else ""
    return f"by {act.who}, {ago(act.time, asked)}, {act.state}{words}"
