"""`bsl watch`: watches a run unattended."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import completion, console
from bigsci_launch.cli.options import RUN
from bigsci_launch.errors import CollectError, SlurmUnavailable

if TYPE_CHECKING:
    from bigsci_launch.watch.rounds.loop import WatchStatus
    from bigsci_launch.watch.watched import WatchedRun

FRAME_S = 1.0
START_S = 60.0
"""How long the agent waits for the job to be recorded: `bsl submit` writes that after the job has begun."""


@click.command(short_help="Notice hangs, spikes and slow nodes.", epilog="Example: bsl watch demo")
@RUN
@click.option(
    "--jobid",
    metavar="ID",
    shell_complete=completion.jobs,
    help="Watch this Slurm job; bsl need not have submitted it.",
)
@click.option("--pid", type=click.IntRange(min=1), help="Watch the ranks below this launcher, such as torchrun.")
@click.option("--act", is_flag=True, help="End ranks that hang, and pin checkpoints around a spike.")
@click.option("--once", is_flag=True, help="Look once, and exit with 0 (healthy), 1 (finding) or 4 (could not see).")
@click.option("--live", is_flag=True, help="Show steps, ranks, findings and acts on one screen.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Keep an HTML page up to date.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; without --once, one line for each change."
)
@click.option("--agent", is_flag=True, hidden=True, help="Watch from the job script, until the attempt is over.")
@click.pass_context
def watch(
    ctx: click.Context,
    run: str | None,
    jobid: str | None,
    pid: int | None,
    act: bool,
    once: bool,
    live: bool,
    html: Path | None,
    as_json: bool,
    agent: bool,
) -> None:
    """Watch RUN (a name or a directory; default: the run submitted last) until it is over: problems are noticed,
    explained, recorded in the run, and sent by the ways of monitor.notify.

    Without --act, it only carries out the requests of `bsl control`; with --once, not even those. It queries Slurm
    every 30 seconds, and examines the ranks only if they show no progress for twice as long as usual.
    """
    from bigsci_launch.watch.rounds.until_over import find_recorded

    if sum(each is not None for each in (run, jobid, pid)) > 1:
        raise click.UsageError("give only one of RUN, --jobid and --pid")
    if as_json and live:
        raise click.UsageError("--json and --live are mutually exclusive")
    if once and (live or act):
        raise click.UsageError("--once looks only once: leave out --act and --live")
    try:
        watched = find_recorded(run, jobid, START_S if agent else 0.0, pid)
    except SlurmUnavailable as error:
        if not once:
            raise
        raise CollectError(error.message, hint=error.hint) from error  # not to see has an exit code of its own
    if watched.run is None and (live or html or act):
        raise click.UsageError(f"{watched.name} is not a run of bsl: --live, --html and --act need its records")
    if once:
        ctx.exit(_look_once(watched, html, as_json))
    if live:
        ctx.exit(_watch_live(watched, html, may_act=act))
    ctx.exit(_watch(watched, html, may_act=act, is_agent=agent, as_json=as_json))


def _say(words: str) -> None:
    """Print a line with its time: watching is an answer that takes long."""
    console.answer(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {words}")


def _say_nothing(_words: str) -> None:
    """Leave it to JSON, to the screen or to the one answer."""


def _watch(watched: WatchedRun, html: Path | None, *, may_act: bool, is_agent: bool, as_json: bool) -> int:
    from bigsci_launch.watch.rounds.until_over import EndSignals, exit_code_of, make_watcher, watch_until_over
    from bigsci_launch.watch.show.kept_page import KeptPage

    signals = EndSignals()
    watcher = make_watcher(watched, _say_nothing if as_json else _say, may_act=may_act, is_agent=is_agent)
    page, lines = KeptPage(watched.run, html), _Lines(watched, is_shown=as_json)
    if not as_json:
        _say(f"{'watching' if not may_act else 'watching, and acting on'} {watched.name}")

    def show(status: WatchStatus) -> None:
        page.keep(status)
        lines.show(status)

    status = watch_until_over(watcher, signals, show, _say, is_agent=is_agent)
    if signals.was_interrupted:
        return console.INTERRUPTED
    return 0 if is_agent else exit_code_of(status)


def _watch_live(watched: WatchedRun, html: Path | None, *, may_act: bool) -> int:
    """Watch, and show everything on one screen, until the run is over or Ctrl-C is pressed."""
    from bigsci_launch.watch.rounds.until_over import exit_code_of, make_watcher
    from bigsci_launch.watch.show.kept_page import KeptPage
    from bigsci_launch.watch.show.live import live_lines, plain_line, read_live_view

    assert watched.run is not None
    watcher, page, status = make_watcher(watched, _say_nothing, may_act=may_act), KeptPage(watched.run, html), None
    with console.live() as show:
        try:
            while status is None or not status.seen.view.is_over or status.seen.goes_on:
                status = watcher.tick()
                page.keep(status)
                due = time.monotonic() + status.every_s
                while True:
                    view = read_live_view(watched.run, status.seen.view.job)
                    show(partial(live_lines, view), plain_line(view))
                    if time.monotonic() + FRAME_S > due:
                        break
                    time.sleep(FRAME_S)
        finally:
            watcher.close(status)
    return exit_code_of(status) if status is not None else 0


class _Lines:
    """Prints a JSON document in one line each time that something has changed."""

    def __init__(self, watched: WatchedRun, *, is_shown: bool) -> None:
        self._watched, self._is_shown = watched, is_shown
        self._last: object = None

    def show(self, status: WatchStatus) -> None:
        from bigsci_launch.watch.show.once import status_document

        now = (status.attempt, status.health, status.findings, status.blind, status.remarks, status.seen.view.is_over)
        if self._is_shown and now != self._last:
            console.answer(json.dumps(status_document(self._watched, status)))
        self._last = now


def _look_once(watched: WatchedRun, html: Path | None, as_json: bool) -> int:
    from bigsci_launch.watch.rounds.until_over import exit_code_of, look_once, make_watcher
    from bigsci_launch.watch.show.kept_page import KeptPage
    from bigsci_launch.watch.show.once import status_document, status_lines

    watcher = make_watcher(watched, _say_nothing)
    status = look_once(watcher)
    watcher.close(status)
    KeptPage(watched.run, html).keep(status)
    if as_json:
        console.answer_json(status_document(watched, status))
    else:
        console.answer_lines(status_lines(watched, status))
    return exit_code_of(status)
