"""`bsl watch`: notices what goes wrong with a run that nobody looks at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import CollectError, SlurmUnavailable

if TYPE_CHECKING:
    from types import FrameType

    from bigsci_launch.watch.loop import Glance, Watcher
    from bigsci_launch.watch.watched import WatchedRun

EXIT_FINDING, EXIT_BLIND = 1, 4
FRAME_S = 1.0
LOOK_S = 0.2
"""How soon it is noticed that somebody has ended this process."""
PAGE_EVERY_S = 300.0
"""How often a page is rewritten if nothing was found: each time asks Slurm."""
GONE_LOOKS, GONE_S = 3, 2.0
BLIND_S = 10.0
"""How often, and how many seconds apart, it is looked whether the directory of the run is really gone."""
START_S = 60.0
"""How long the agent waits for the job to be recorded: `bsl submit` writes that after the job has begun."""


@click.command(short_help="Notice hangs, spikes and slow nodes.", epilog="Example: bsl watch demo")
@click.argument("run", required=False)
@click.option("--jobid", metavar="ID", help="Watch this Slurm job; bsl need not have submitted it.")
@click.option("--act", is_flag=True, help="End ranks that hang, and pin checkpoints around a spike.")
@click.option("--once", is_flag=True, help="Look once, and exit with 0 (healthy), 1 (finding) or 4 (could not see).")
@click.option("--live", is_flag=True, help="Show steps, ranks, findings and acts on one screen.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Keep the run as a page in FILE.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; without --once, one a line for each change."
)
@click.option("--agent", is_flag=True, hidden=True, help="Watch from the job script, until the attempt is over.")
@click.pass_context
def watch(
    ctx: click.Context,
    run: str | None,
    jobid: str | None,
    act: bool,
    once: bool,
    live: bool,
    html: Path | None,
    as_json: bool,
    agent: bool,
) -> None:
    """Watch RUN (a name or a directory; default: the run submitted last) until it is over: what goes wrong is noticed,
    explained, kept in the run, and told by the ways of monitor.notify.

    Without --act, it does nothing by itself, but what people ask with `bsl control`; --once does not even that. It asks
    Slurm every 30 seconds, and looks at the ranks only if they show nothing new for twice as long as usual.
    """
    if run is not None and jobid is not None:
        raise click.UsageError("give a run or --jobid, not both")
    if as_json and live:
        raise click.UsageError("--json is no screen: leave out --live")
    if once and (live or act):
        raise click.UsageError("--once neither acts nor stays: leave out --act and --live")
    try:
        watched = _find(run, jobid, START_S if agent else 0.0)
    except SlurmUnavailable as error:
        if not once:
            raise
        raise CollectError(error.message, hint=error.hint) from error  # not to see has an exit code of its own
    if watched.run is None and (live or html or act):
        raise click.UsageError(f"job {jobid} is no run of bsl: --live, --html and --act need its records")
    if once:
        ctx.exit(_look_once(watched, html, as_json))
    if live:
        ctx.exit(_watch_live(watched, html, may_act=act))
    ctx.exit(_watch(watched, html, may_act=act, is_agent=agent, as_json=as_json))


def _find(run: str | None, jobid: str | None, patience_s: float) -> WatchedRun:
    from bigsci_launch.runs.attempts import read_job
    from bigsci_launch.watch.watched import find_watched

    deadline = time.monotonic() + patience_s
    while True:
        watched = find_watched(run, jobid)
        if watched.attempt is None or read_job(watched.attempt) is not None or time.monotonic() >= deadline:
            return watched
        time.sleep(0.2)


def _make(watched: WatchedRun, *, name: str, may_act: bool, is_quiet: bool = False) -> Watcher:
    from bigsci_launch.watch.loop import Watcher
    from bigsci_launch.watch.tell.told import teller

    say = _say if not is_quiet else lambda words: None
    return Watcher(watched, name=name, may_act=may_act, say=say, tell=teller(watched, name))


def _say(words: str) -> None:
    """Print a line with its time: watching is an answer that takes long."""
    console.answer(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {words}")


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class _Told:
    """Whether somebody has ended this process. A `threading.Event` would not do: its lock is held when a wait ends, and
    a handler that is called at that moment waits for it for ever."""

    def __init__(self) -> None:
        self.is_told = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        self.is_told = True

    def wait(self, seconds: float) -> None:
        """Wait that long, or until it is told."""
        until = time.monotonic() + seconds
        while not self.is_told and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))


def _watch(watched: WatchedRun, html: Path | None, *, may_act: bool, is_agent: bool, as_json: bool) -> int:
    """Watch until the run is over, or somebody ends this process. Return the exit code."""
    from bigsci_launch.runs.watching.beat import agent_of

    told = _Told()
    name = agent_of(watched.attempt.name) if is_agent and watched.attempt is not None else _own_name()
    watcher = _make(watched, name=name, may_act=may_act, is_quiet=as_json)
    page, lines = _Page(watched, html), _Lines(watched, is_shown=as_json)
    glance: Glance | None = None
    if not as_json:
        _say(f"{'watching' if not may_act else 'watching, and acting on'} {watched.name}")
    try:
        while True:
            if _is_removed(watcher, told):
                _say(f"{watched.name} was removed, so nothing is left to watch")
                glance = None
                break
            is_last = told.is_told
            glance = _look(watcher, page, lines) or glance
            if is_last or (glance is not None and glance.is_over and (is_agent or not glance.goes_on)):
                break
            told.wait(BLIND_S if glance is None else glance.every_s)
    finally:
        watcher.close(glance)
    return 0 if is_agent else _code(glance)


def _look(watcher: Watcher, page: _Page, lines: _Lines) -> Glance | None:
    """Look once, and return what was seen; None if the file system gives an error, as it does for a time.

    The log of an agent is on the same disk.
    """
    try:
        glance = watcher.tick()
        page.keep(glance)
        lines.show(glance)
    except OSError as error:
        with contextlib.suppress(OSError):
            _say(f"nothing could be seen: {error}")
        return None
    return glance


def _is_removed(watcher: Watcher, told: _Told) -> bool:
    """Return whether what is watched is gone, and stays gone for some seconds."""
    for _ in range(GONE_LOOKS):
        if told.is_told or not watcher.has_nothing_left:
            return False
        told.wait(GONE_S)
    return watcher.has_nothing_left


def _watch_live(watched: WatchedRun, html: Path | None, *, may_act: bool) -> int:
    """Watch, and show everything on one screen, until the run is over or somebody presses Ctrl-C."""
    from bigsci_launch.watch.show.live import live_lines, plain_line, read_live_view

    assert watched.run is not None
    watcher, page, glance = _make(watched, name=_own_name(), may_act=may_act, is_quiet=True), _Page(watched, html), None
    with console.live() as show:
        try:
            while glance is None or not glance.is_over or glance.goes_on:
                glance = watcher.tick()
                page.keep(glance)
                due = time.monotonic() + glance.every_s
                while True:
                    view = read_live_view(watched.run, glance.job)
                    show(partial(live_lines, view), plain_line(view))
                    if time.monotonic() + FRAME_S > due:
                        break
                    time.sleep(FRAME_S)
        finally:
            watcher.close(glance)
    return _code(glance) if glance is not None else 0


class _Lines:
    """Prints a JSON document in one line each time that something has changed."""

    def __init__(self, watched: WatchedRun, *, is_shown: bool) -> None:
        self._watched, self._is_shown = watched, is_shown
        self._last: object = None

    def show(self, glance: Glance) -> None:
        from bigsci_launch.watch.show.words import glance_document

        now = (glance.attempt, glance.health, glance.findings, glance.blind, glance.remarks, glance.is_over)
        if self._is_shown and now != self._last:
            console.answer(json.dumps(glance_document(self._watched, glance)))
        self._last = now


class _Page:
    """Keeps the page of a run, without asking Slurm too often."""

    def __init__(self, watched: WatchedRun, path: Path | None) -> None:
        self._run = watched.run
        self._path = path
        self._shown: tuple[str, ...] | None = None
        self._due = 0.0

    def keep(self, glance: Glance) -> None:
        """Write the page if what was found has changed, or if it is old."""
        keys = tuple(finding.key for finding in glance.findings)
        now = time.monotonic()
        if self._path is None or self._run is None or (keys == self._shown and now < self._due and not glance.is_over):
            return
        from bigsci_launch.pages import write_page
        from bigsci_launch.runs.status import read_status
        from bigsci_launch.watch.show.overview import read_overview
        from bigsci_launch.watch.show.page import render_run_page

        write_page(self._path, render_run_page(read_overview(read_status(self._run))))
        self._shown, self._due = keys, now + PAGE_EVERY_S


def _look_once(watched: WatchedRun, html: Path | None, as_json: bool) -> int:
    from bigsci_launch.watch.once import look_once
    from bigsci_launch.watch.show.words import glance_document, glance_lines

    watcher = _make(watched, name=_own_name(), may_act=False, is_quiet=True)
    glance = look_once(watcher)
    watcher.close(glance)
    _Page(watched, html).keep(glance)
    if as_json:
        console.answer_json(glance_document(watched, glance))
    else:
        console.answer_lines(glance_lines(watched, glance))
    return _code(glance)


def _code(glance: Glance | None) -> int:
    from bigsci_launch.runs.watching.beat import Health

    if glance is None:
        return EXIT_BLIND
    return {Health.HEALTHY: 0, Health.FINDING: EXIT_FINDING, Health.BLIND: EXIT_BLIND}[glance.health]
