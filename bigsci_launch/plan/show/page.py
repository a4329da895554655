"""The HTML page of a search: self-contained, readable without a network, with SVG plots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from html import escape

from bigsci_launch import pages
from bigsci_launch.charts import Bar, Marker, bars, scatter, stairs
from bigsci_launch.plan.choose.answer import Answer, reference_plans
from bigsci_launch.plan.choose.search import Plan, SearchResult
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.neighbours import point_of
from bigsci_launch.plan.price.price import price_setup, price_stage_memory
from bigsci_launch.plan.shape.ramp import Phase, filling_batch_size
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.shape.tflops import tflops_of
from bigsci_launch.plan.show.explain import EXPLAIN_COLUMNS, explain_cells, explain_lines
from bigsci_launch.plan.show.report import (
    REFUSED_COLUMNS,
    calibration_line,
    hardware_lines,
    memory_lines,
    model_line,
    refused_cells,
    summary_line,
)
from bigsci_launch.plan.show.table import OPTIONAL, plan_table
from bigsci_launch.plan.show.throughput import throughput_line
from bigsci_launch.plan.show.timeline import KEY, draw_timeline, timeline_of
from bigsci_launch.plan.show.timeline import STYLE as TIMELINE_STYLE

SHOWN_PLANS = 20
SLOWEST_SHOWN = 3.0
"""Plans that take more than this many times as long as the best are left out of the plot, which they would flatten."""

WIDEST_SHOWN = 1.8
"""So are plans that need more than this many times the GPU's memory."""

# Setups that break only these rules still have stages, so they have a price to draw.
_PRICED_RULES = ("batch", "ramp-up", "replica on nodes", "nodes")

STYLE = (
    TIMELINE_STYLE
    + """
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 3px 9px; border-bottom: 1px solid var(--line);
  text-align: left; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.wide { overflow-x: auto; } .pair { display: flex; flex-wrap: wrap; gap: 16px; }
svg { max-width: 100%; height: auto; } .full svg { width: 100%; } svg text { font-size: 11px; fill: var(--soft); }
svg .label { text-anchor: middle; } .grid { stroke: var(--line); } .limit { stroke: #c0392b; stroke-dasharray: 5 4; }
.fits { fill: #2d7dd2; } .doubtful { fill: #c79a1e; } .best { fill: none; stroke: #1b9e5a; stroke-width: 3; }
.mine { fill: none; stroke: #e69f00; stroke-width: 3; } .oom { stroke: #c0392b; stroke-width: 1.6; fill: none; }
.refused { stroke: #8a94a0; stroke-width: 1.2; fill: none; opacity: .55; }
.time { fill: #2d7dd2; } .memory { fill: #7a5ea8; } .batch, .speed { fill: none; stroke: #2d7dd2; stroke-width: 2; }
.speed { stroke: #1b9e5a; }
.pair svg { flex: 1 1 400px; } footer { margin: 2rem 0 0; font-size: 12px; }
@media (max-width: 640px) { .full svg text { font-size: 17px; } .full svg .label { font-size: 13px; }
  .pair svg text { font-size: 12px; } .optional { display: none; } td, th { padding: 3px 4px; }
  table { font-size: 12px; } }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .3em 0 0; }
.entry { white-space: nowrap; margin-right: .7em; }
"""
)


def render_page(answer: Answer) -> str:
    """Return the page for `answer`; for a site without a GPU, only the sizes."""
    request = answer.request
    shape, tp = request.configured.shape, request.configured.topology.tp
    parts = [
        f"<h1>{escape(request.name)} on {escape(request.site_name)}</h1>",
        f"<p>{escape(model_line(shape, tp))}</p>",
    ]
    if answer.result is None or request.calibration is None:
        parts.append("<p>The site has no GPU: time and memory are not predicted.</p>")
    else:
        parts += _sections(answer, answer.result, request.calibration)
    parts.append(f'<footer class="soft">{escape(_footer(answer))}</footer>')
    return pages.render_page(f"bsl plan: {request.name}", STYLE, "\n".join(parts))


def _footer(answer: Answer) -> str:
    calibration = answer.request.calibration
    learned = f"; calibrated on {', '.join(calibration.sources)}" if calibration and calibration.sources else ""
    return f"{pages.made_now()}{learned}"


def _sections(answer: Answer, result: SearchResult, calibration: Calibration) -> list[str]:
    trust = calibration_line(calibration, answer.request.configured)
    needed = answer.request.program_needed
    notes = [*hardware_lines(answer.request.configured, calibration), *([needed] if needed else [])]
    parts = [
        f'<p class="soft">{escape(calibration.gpu.name)}: {escape(trust)}</p>',
        *(f'<p class="soft">{escape(note)}</p>' for note in notes),
        f"<p>{escape(summary_line(result))}</p>",
    ]
    shown = reference_plans(answer)
    if result.plans or result.doubtful or result.out_of_memory:
        parts += ["<h2>Time against memory</h2>", _SCATTER_KEY, _time_against_memory(answer, result, calibration)]
    if result.plans:
        columns, rows = plan_table(answer, result.listed(SHOWN_PLANS))
        meaning = throughput_line(answer.request.configured, calibration.gpu)
        parts += ["<h2>The best plans</h2>", table(columns, rows, OPTIONAL)]
        parts += [f'<p class="soft">{escape(line)}</p>' for line in (meaning, *memory_lines(result))]
    parts += _timelines(shown)
    for plan in shown:
        parts += _balance(plan, calibration)
    if shown:
        parts += _ramp(shown[0], answer.request.phases)
    if len(result.plans) > 1:
        best, other = result.plans[:2]
        parts += ["<h2>The winner and the runner-up</h2>", table(EXPLAIN_COLUMNS, explain_cells(best, other))]
        parts += [f"<p>{escape(line)}</p>" for line in explain_lines(best, other)]
    return [*parts, "<h2>Refused</h2>", table(REFUSED_COLUMNS, refused_cells(result))]


def _key(entries: Sequence[tuple[str, str]], remark: str = "") -> str:
    """Return the legend of a chart: a colour, or the style of a ring, with its meaning."""
    spans = "".join(
        f'<span class="entry"><span class="key" style="{style}"></span>{escape(words)}</span> '
        for style, words in entries
    )
    return f'<p class="soft">{spans}{escape(remark)}</p>'


_SCATTER_KEY = _key(
    (
        ("background:#2d7dd2", "fits"),
        ("background:#c79a1e", "doubtful"),
        ("background:#c0392b", "runs out of memory"),
        ("background:#8a94a0", "refused, but priced"),
        ("border:3px solid #1b9e5a", "best"),
        ("border:3px solid #e69f00", "as configured"),
    ),
    "point at a mark for details",
)
_TIMELINE_KEY = _key([(f"background:{colour}", words) for colour, words in KEY], "empty: the stage waits")


def _timelines(plans: Sequence[Plan]) -> list[str]:
    """Draw one step of each of `plans`."""
    parts = []
    for index, plan in enumerate(plans):
        name = f"A step of {plan.setup.topology}, micro batch {plan.setup.micro_batch_size}"
        which = "the best plan" if index == 0 else "as configured"
        schedule = f"{plan.setup.technique.schedule}, {plan.setup.num_micro_batches} micro batches"
        parts += [f"<h2>{escape(name)}: {which}, {plan.price.seconds:.4g} s</h2>", _TIMELINE_KEY if index == 0 else ""]
        chart = draw_timeline(timeline_of(plan), f"{name}, {schedule}")
        parts.append(f'<p class="soft">{escape(schedule)}</p><div class="timeline">{chart}</div>')
    return parts


def _time_against_memory(answer: Answer, result: SearchResult, calibration: Calibration) -> str:
    every = [*result.plans, *result.doubtful, *result.out_of_memory]
    fastest = min(plan.price.seconds for plan in result.plans or every)
    markers = [
        *_refused_markers(result, calibration),
        *(_plan_marker(plan, "oom", "cross") for plan in result.out_of_memory),
        *(_plan_marker(plan, "doubtful", "dot") for plan in result.doubtful),
        *(_plan_marker(plan, "fits", "dot") for plan in result.plans),
    ]
    if result.plans:
        markers.append(replace(_plan_marker(result.plans[0], "best", "dot"), shape="ring"))
    if answer.configured:
        markers.append(replace(_plan_marker(answer.configured, "mine", "dot"), shape="ring"))
    memory = calibration.gpu.memory_gib
    near = [marker for marker in markers if marker.y <= SLOWEST_SHOWN * fastest and marker.x <= WIDEST_SHOWN * memory]
    limit = (memory, f"{memory:g} GiB")
    chart = scatter(near, "memory of the fullest rank, GiB", "seconds of a step", limit=limit)
    return f'<div class="full">{chart}</div>'


def _plan_marker(plan: Plan, css_class: str, shape: str) -> Marker:
    return _marker(plan.setup, plan.price.need_gib, plan.price.seconds, css_class, shape, f"{plan.days:.1f} days")


def _marker(setup: Setup, memory: float, seconds: float, css_class: str, shape: str, remark: str) -> Marker:
    title = (
        f"{setup.topology}, micro batch {setup.micro_batch_size}, {setup.partition_method}: "
        f"{seconds:.1f} s, {memory:.0f} GiB; {remark}"
    )
    return Marker(memory, seconds, css_class, "cross" if shape == "cross" else "dot", title)


def _refused_markers(result: SearchResult, calibration: Calibration) -> list[Marker]:
    """Return an even sample of the refused setups that have a price."""
    priced = [setup for entry in result.refused if entry.rule.name in _PRICED_RULES for setup in entry.samples]
    markers = []
    for setup in priced:
        if not setup.num_micro_batches or setup.topology.pp > setup.shape.num_layers or 0 in setup.layers_per_stage:
            continue
        price = price_setup(setup, calibration)
        markers.append(_marker(setup, price.need_gib, price.seconds, "refused", "cross", "refused"))
    return markers


def _balance(plan: Plan, calibration: Calibration) -> list[str]:
    """Draw time and memory of every stage separately: the head costs time, the embedding memory."""
    setup = plan.setup
    layers = setup.layers_per_stage
    times = [
        Bar(str(stage), seconds * 1e3, f"stage {stage}: {layers[stage]} layers, {seconds * 1e3:.0f} ms")
        for stage, seconds in enumerate(plan.price.stage_seconds)
    ]
    factor, _ = calibration.memory_neighbours.look_up(point_of(setup))
    memories = [price_stage_memory(setup, stage, calibration, factor) for stage in range(len(layers))]
    fullness = [
        Bar(str(memory.stage), memory.predicted_gib, f"stage {memory.stage}: {memory.predicted_gib:.0f} GiB")
        for memory in memories
    ]
    limit = (calibration.gpu.memory_gib, f"{calibration.gpu.memory_gib:g} GiB")
    heading = f"Stages of {setup.topology}, micro batch {setup.micro_batch_size}, {setup.partition_method}"
    charts = (
        bars(times, "ms for a micro batch", "time", limit=None),
        bars(fullness, "GiB of a rank", "memory", limit=limit),
    )
    return [f"<h2>{escape(heading)}</h2>", f'<div class="pair">{"".join(charts)}</div>']


def _ramp(plan: Plan, phases: Sequence[Phase]) -> list[str]:
    """Draw batch size and TFLOP/s over the days of the ramp-up."""
    if len(phases) < 2:
        return []
    batches, speeds = [], []
    days = 0.0
    for phase in phases:
        setup = plan.setup.with_batch_size(phase.global_batch_size)
        missing = plan.setup.num_micro_batches - setup.num_micro_batches
        seconds = plan.price.seconds - missing * plan.price.micro_batch_seconds
        batches.append((days, float(phase.global_batch_size)))
        speeds.append((days, tflops_of(setup, seconds).full))
        # The last phase lasts for the rest of the run; a tenth of the ramp shows it.
        is_last = phase is phases[-1]
        days += days / 10 if is_last else phase.num_steps * seconds / 86400
    batches.append((days, batches[-1][1]))
    speeds.append((days, speeds[-1][1]))
    topology = plan.setup.topology
    filling = filling_batch_size(plan.setup.micro_batch_size, topology.dp, topology.pp)
    fill = (float(filling), f"{filling} fill the pipeline")
    return [
        "<h2>Ramp-up of the best plan</h2>",
        f'<div class="full">{stairs(batches, "days", "global batch size", "batch", limit=fill)}</div>',
        f'<div class="full">{stairs(speeds, "days", "TFLOP/s of a GPU", "speed", limit=None)}</div>',
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Collection[str] = ()) -> str:
    """Return a table; a column whose name begins with `>` has numbers, and a narrow screen shows none of `optional`."""
    classes = [
        f' class="{" ".join(["number"] * column.startswith(">") + ["optional"] * (column in optional))}"'
        for column in columns
    ]
    head = "".join(
        f"<th{attribute}>{escape(column.lstrip('>'))}</th>" for column, attribute in zip(columns, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{attribute}>{escape(cell)}</td>" for cell, attribute in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
