"""The run as a page: one file that needs no server and no network. Pure; text of the run is never markup."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape

from bigsci_launch import pages
from bigsci_launch.runs.ending.failures import failure_text
from bigsci_launch.runs.ending.source import unknown_end
from bigsci_launch.runs.watching.heartbeat import Health, WatcherHeartbeat
from bigsci_launch.runs.watching.ledger import Act, RunFinding
from bigsci_launch.status.generations import generation_facts
from bigsci_launch.status.next import next_text
from bigsci_launch.status.read import total_steps
from bigsci_launch.status.sections import lost_text
from bigsci_launch.topology.naming import count_ranks
from bigsci_launch.units import OTHER_CLOCK, age_s, ago, format_age
from bigsci_launch.watch.show.curves import Curve, Flag, draw
from bigsci_launch.watch.show.generations import COLUMNS, SHORT, generation_rows
from bigsci_launch.watch.show.history import StepPoint
from bigsci_launch.watch.show.lanes import STEP_STYLE, draw_heat, draw_lanes
from bigsci_launch.watch.show.overview import AttemptRow, RunOverview, points_of

MOST_SHOWN = 200
"""The newest of so many findings, and of acts; the ledger has the others."""
BAD_REASONS = (
    "crashed",
    "launch_failed",
    "node_failure",
    "left_early",
    "hung_at_exit",
    "hang",
    "node_check",
    "out_of_memory",
    "unknown",
)

STYLE = """
:root { --bad: #c0392b; --good: #1b7f4b; --blind: #9a6a00; --curve: #2d7dd2; --old: #aab3bb; --card: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --bad: #ff7b6b; --good: #5ccb8f; --blind: #e0b03c; --curve: #63a8f0; --old: #56616a; --card: #1e2428; }
}
header { border-bottom: 1px solid var(--line); padding-bottom: .8rem; }
h1 .state { font-size: .8rem; font-weight: 600; vertical-align: middle; border: 1px solid; border-radius: 4px;
  padding: .1rem .45rem; margin-left: .6rem; }
.bad { color: var(--bad); } .good { color: var(--good); } .blind { color: var(--blind); }
.health { font-size: 1.05rem; margin-top: .5rem; } .health b { margin-right: .5rem; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.2rem; margin: .6rem 0 0; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0 0; } figcaption { font-weight: 600; font-size: .95rem; }
figcaption output { font-weight: 400; margin-left: 1rem; }
figure > svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--curve); stroke-width: 1.4; stroke-linejoin: round; }
.old { fill: none; stroke: var(--old); stroke-width: 1.2; } .curve.dot { fill: var(--curve); }
.old.dot { fill: var(--old); } .outside { fill: var(--bad); }
.seam line { stroke: var(--soft); stroke-dasharray: 3 3; } .jump line { stroke: var(--bad); }
.jump text { fill: var(--bad); } .other line { stroke: var(--blind); } .other text { fill: var(--blind); }
.noticed line { stroke: var(--bad); stroke-dasharray: 1 4; } .noticed path { fill: var(--bad); }
g line.touch { stroke: transparent; stroke-width: 9; } .cursor { stroke: var(--ink); opacity: 0; }
.card { background: var(--card); border-left: 3px solid var(--old); border-radius: 0 4px 4px 0; padding: .5rem .8rem;
  margin: .5rem 0; overflow-wrap: anywhere; } .card.open { border-color: var(--bad); }
.card ul { margin: .2rem 0; padding-left: 1.2rem; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td, th { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: break-word; } td.short { white-space: nowrap; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } summary { cursor: pointer; color: var(--soft); } code { font-size: .9em; }
"""

# What is nearest to the pointer, in words above the curve.
SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-places]")) {
  const [[left, right, first, last], held] = JSON.parse(svg.dataset.places);
  const output = svg.parentNode.querySelector("output"), cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = first + (at - left) / (right - left) * (last - first);
    let best = null;
    for (const [name, places] of held) for (const [each, value] of places)
      if (best === null || Math.abs(each - step) < Math.abs(best[1] - step)) best = [name, each, value];
    if (best === null) return;
    const x = left + (best[1] - first) / Math.max(1, last - first) * (right - left);
    output.textContent = `step ${best[1]}: ${best[2]}, attempt ${best[0]}`;
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.opacity = .5;
  });
  svg.addEventListener("pointerleave", () => { output.textContent = ""; cursor.style.opacity = 0; });
}
"""


def render_run_page(view: RunOverview) -> str:
    parts = [
        _header(view),
        *_charts(view),
        *_ranks(view),
        *_findings(view),
        *_acts(view),
        *_generations(view),
        *_attempts(view),
    ]
    body = "\n".join([*parts, f"<script>{SCRIPT}</script>"])
    return pages.render_page(f"bsl status: {view.status.run.name}", STYLE + STEP_STYLE, body)


def _header(view: RunOverview) -> str:
    status = view.status
    state, is_over = status.job.state.value, status.job.state.is_over
    reason = str(status.exit["reason"]) if status.exit and not status.job.state.is_active else ""
    colour = "bad" if reason in BAD_REASONS else "good" if state in ("RUNNING", "COMPLETED") else "blind"
    facts = [
        *_progress(view),
        *_present_generation(view, may_run=not is_over),
        ("watched by", _watchers(view)),
        *[("undelivered", each) for each in view.undelivered],
    ]
    if (following := next_text(status)) is not None:
        facts.append(("next start", following))
    facts += [("queued", each) for each in view.queued]
    facts.append(("directory", str(status.run.path)))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    ended = f": {reason}" if reason else ""
    return (
        f'<header><h1>{escape(status.run.name)}<span class="state {colour}">{escape(state + ended)}</span></h1>'
        f"{_health(view, is_over)}<dl class=facts>{rows}</dl>"
        f'<p class="soft">as of {_clock(status.asked)}</p></header>'
    )


def _progress(view: RunOverview) -> list[tuple[str, str]]:
    status, last = view.status, view.status.last_step
    facts = [("attempt", f"{status.attempt.name} of {status.num_attempts}, {view.rows[-1].label}")]
    if status.topology is not None:
        facts[0] = ("attempt", f"{facts[0][1]}, {count_ranks(status.topology.world_size)} ({status.topology})")
    if last is not None:
        total = total_steps(status.record, last)
        said = [
            f"{last.step}/{total}" if total else f"{last.step}",
            f"loss {last.loss:.6g}" if last.loss is not None else "",
            f"{last.seconds:.3g} s per step" if last.seconds is not None else "",
            f"{last.tflops:.3g} TFLOP/s per rank" if last.tflops is not None else "",
            _before(last.time, status.asked, differs=last.clock_differs),
        ]
        facts.append(("step", ", ".join(part for part in said if part)))
    if (saved := status.checkpoint) is not None:
        facts.append(("checkpoint", f"{saved.path.name}, {_before(saved.time, status.asked)}"))
    if (refused := status.refused_saves) is not None:
        facts.append(("not saved", f"{refused.sentence}, {_before(refused.time, status.asked)}: {refused.path}"))
    return facts


def _before(moment: float, asked: float, *, differs: bool = False) -> str:
    age = None if differs else age_s(moment, asked)
    return OTHER_CLOCK if age is None else f"{format_age(age)} before this page"


def _health(view: RunOverview, is_over: bool) -> str:
    """Show what the newest watcher reported, if it still watches: a dead one proves no health."""
    open_findings = [finding for finding in view.findings if finding.cleared is None]
    if not view.heartbeats:
        word, colour, sentence = "not watched", "blind", "no watcher has looked at this run"
    else:
        heartbeat = view.heartbeats[0]
        word, colour = _HEALTH[heartbeat.health]
        sentence = heartbeat.sentence
        if heartbeat.is_dead(view.status.asked):
            age = ago(heartbeat.time, view.status.asked)
            word, colour, sentence = (
                "unknown",
                "blind",
                f"watcher {heartbeat.name} died {age}; its last report: {sentence}",
            )
        elif heartbeat.ended and not is_over:
            word, colour = "unknown", "blind"
            sentence = f"watcher {heartbeat.name} has left; its last report: {sentence}"
    if open_findings and colour == "good":
        word, colour = _HEALTH[Health.FINDING]
    return f'<p class="health"><b class="{colour}">{escape(word)}</b>{escape(sentence)}</p>'


_HEALTH = {Health.HEALTHY: ("healthy", "good"), Health.FINDING: ("finding", "bad"), Health.BLIND: ("blind", "blind")}


def _watchers(view: RunOverview) -> str:
    return "; ".join(_watcher(heartbeat, view.status.asked) for heartbeat in view.heartbeats) or "no watcher"


def _watcher(heartbeat: WatcherHeartbeat, asked: float) -> str:
    is_dead = heartbeat.is_dead(asked)
    fate = "has left" if heartbeat.ended else "is dead" if is_dead else "is late" if is_dead is None else "watches"
    may = "may act" if heartbeat.may_act else "observes only"
    blind = f", cannot see: {'; '.join(heartbeat.blind)}" if heartbeat.blind else ""
    return f"{heartbeat.name} on {heartbeat.host} {fate} (newest look {_before(heartbeat.time, asked)}, {may}{blind})"


def _charts(view: RunOverview) -> list[str]:
    flags = [*_seam_flags(view), *_finding_flags(view)]
    wanted: list[tuple[str, Callable[[StepPoint], float | None]]] = [
        ("loss", lambda point: point.loss),
        ("gradient norm", lambda point: point.grad_norm),
        ("seconds per iteration", lambda point: point.seconds),
    ]
    charts = [draw(_curves(view, of), flags, label) for label, of in wanted]
    if not any(charts):
        return ["<h2>Steps</h2><p>No step has been reported yet.</p>"]
    key = (
        "Lines mark where an attempt began: red if the loss jumped there, amber if the same step has another loss. "
        "Diamonds mark findings, triangles values that are off the scale or not finite. Grey steps were repeated by a "
        "later attempt. Point at anything for details."
    )
    return ["<h2>Steps</h2>", f'<p class="soft">{key}</p>', *(chart for chart in charts if chart)]


def _ranks(view: RunOverview) -> list[str]:
    """Show how long ranks worked in the steps that the watcher has looked at last."""
    if (steps := view.steps) is None or not steps.rows:
        return []
    said = f"{_before(steps.taken, view.status.asked)}: {steps.answer}"
    return ["<h2>Ranks</h2>", f'<p class="soft">{escape(said)}</p>', draw_heat(steps), draw_lanes(steps)]


def _curves(view: RunOverview, of: Callable[[StepPoint], float | None]) -> list[Curve]:
    return [
        Curve(held.attempt.name, _places(kept, of), _places(old, of)) for held, kept, old in points_of(view.histories)
    ]


def _places(points: Iterable[StepPoint], of: Callable[[StepPoint], float | None]) -> tuple[tuple[int, float], ...]:
    return tuple((point.step, value) for point in points if (value := of(point)) is not None)


def _seam_flags(view: RunOverview) -> list[Flag]:
    endings = {row.name: _why_ended(row) for row in view.rows}
    names = list(endings)
    flags = []
    for seam in view.seams:
        before = names[names.index(seam.attempt) - 1]
        parts = [
            f"attempt {seam.attempt} begins at step {seam.step}, after {before}: {endings[before]}",
            seam.sentence,
            *seam.causes,
        ]
        flags.append(Flag(seam.step, seam.attempt, "\n".join(parts), _CLASSES.get(seam.verdict, "seam")))
    return flags


_CLASSES = {"spike": "jump", "other loss": "other"}


def _finding_flags(view: RunOverview) -> list[Flag]:
    shown = [finding for finding in view.findings if finding.step is not None][-MOST_SHOWN:]
    return [Flag(finding.step or 0, "", f"{finding.kind}: {finding.sentence}", "noticed") for finding in shown]


def _findings(view: RunOverview) -> list[str]:
    open_ones = [finding for finding in reversed(view.findings) if finding.cleared is None]
    cleared = [finding for finding in reversed(view.findings) if finding.cleared is not None]
    asked = None if view.status.job.state.is_over else view.status.asked
    parts = ["<h2>Findings</h2>", *(_card(finding, asked) for finding in open_ones[:MOST_SHOWN])]
    if not open_ones:
        is_watched = bool(view.heartbeats or cleared)
        parts.append("<p>No open findings.</p>" if is_watched else "<p>No watcher has looked for any.</p>")
    if cleared:
        cards = "".join(_card(finding, asked) for finding in cleared[:MOST_SHOWN])
        parts.append(f"<details><summary>{len(cleared)} resolved</summary>{cards}</details>")
    return parts + _left_out(max(len(open_ones), len(cleared)), view.status.run.findings)


def _card(finding: RunFinding, asked: float | None) -> str:
    at = [
        finding.kind.replace("_", " "),
        f"attempt {finding.attempt}" if finding.attempt else "",
        f"step {finding.step}" if finding.step is not None else "",
        f"since {_clock(finding.since)}" if finding.since is not None else "",
        f"noticed {_clock(finding.noticed)}",
        f"over {_clock(finding.cleared)}" if finding.cleared is not None else "",
    ]
    details = "".join(f"<li>{escape(line)}</li>" for line in finding.details)
    bundle = f"<p>evidence: <code>{escape(finding.bundle)}</code></p>" if finding.bundle else ""
    return (
        f'<div class="card{"" if finding.cleared else " open"}"><p><b>{escape(finding.sentence)}</b></p>'
        f'<p class="soft">{escape(", ".join(part for part in at if part))}</p>'
        f"{''.join(f'<p>{escape(text)}</p>' for text in lost_text(finding, asked))}"
        f"{f'<ul>{details}</ul>' if details else ''}{bundle}</div>"
    )


def _acts(view: RunOverview) -> list[str]:
    newest = {act.key: act for act in view.acts}
    first = {act.key: act for act in reversed(view.acts)}
    shown = sorted(newest.values(), key=lambda act: first[act.key].time, reverse=True)
    if not shown:
        return []
    rows = [_act_cells(act, first[act.key].time) for act in shown[:MOST_SHOWN]]
    columns = ("when", "what", "by", "why", "result")
    return ["<h2>Acts</h2>", _table(columns, rows, short=(0, 1, 2)), *_left_out(len(shown), view.status.run.acts)]


def _act_cells(act: Act, begun: float) -> list[str]:
    at = f" at step {act.step}" if act.step is not None else ""
    came = f"{act.state}{at}" + (f": {act.words}" if act.words else "")
    return [_clock(begun), act.what.replace("_", " "), act.who, act.why, came]


def _left_out(number: int, ledger: object) -> list[str]:
    return (
        [f'<p class="soft">the newest {MOST_SHOWN} of {number}; all are in {ledger}</p>'] if number > MOST_SHOWN else []
    )


def _present_generation(view: RunOverview, *, may_run: bool) -> list[tuple[str, str]]:
    """Return the line about the newest generation, and which nodes are left out."""
    status = view.status
    facts = generation_facts(status.generations, status.recorded_steps, status.asked, may_run=may_run)
    return [(name, text) for name, text in facts if name in ("generation", "left out", "gave up")]


def _generations(view: RunOverview) -> list[str]:
    rows = generation_rows(view.status)
    title = f"<h2>Generations of attempt {escape(view.status.attempt.name)}</h2>"
    return [title, _table(COLUMNS, rows[:MOST_SHOWN], short=SHORT)] if rows else []


def _attempts(view: RunOverview) -> list[str]:
    seams = {seam.attempt: seam for seam in view.seams}
    rows = []
    for row in reversed(view.rows):
        steps = f"{row.first} to {row.last}" if row.first is not None else "none"
        seam = seams.get(row.name)
        began = "" if seam is None else seam.sentence + "".join(f"; {cause}" for cause in seam.causes)
        rows.append([row.name, row.label, steps, _why_ended(row), began])
    return ["<h2>Attempts</h2>", _table(("attempt", "job", "steps", "ended", "at its start"), rows, short=(0, 1, 2))]


def _why_ended(row: AttemptRow) -> str:
    ended = row.exit
    if ended is None:
        if row.job.state.is_over or row.job.is_gone:
            return unknown_end(None)
        return row.job.state.value + (f" ({row.job.reason})" if row.job.reason else "")
    parts = [str(ended["reason"])]
    if ended.get("first_failure"):
        parts.append(failure_text(dict(ended["first_failure"])))
    elif ended.get("cause"):
        parts.append(str(ended["cause"]))
    return ": ".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, short: Sequence[int]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=short' if at in short else ''}>{escape(cell)}</td>" for at, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _clock(moment: float) -> str:
    if not math.isfinite(moment):
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
