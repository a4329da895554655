"""The page of a run in a file: written once, or kept up to date without asking Slurm too often."""

from __future__ import annotations

import time
from pathlib import Path

from bigsci_launch.pages import write_page
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.status.read import RunStatus, read_status
from bigsci_launch.watch.rounds.loop import WatchStatus
from bigsci_launch.watch.show.overview import read_overview
from bigsci_launch.watch.show.page import render_run_page

PAGE_EVERY_S = 300.0
"""How often a page is rewritten if nothing was found: each time asks Slurm."""


def write_run_page(path: Path, status: RunStatus) -> None:
    """Write the page of a run.

    Raises:
        BslError: the file cannot be written.
    """
    write_page(path, render_run_page(read_overview(status)))


class KeptPage:
    """Keeps the page of a run in the file at `path`, if there is one."""

    def __init__(self, run: RunDir | None, path: Path | None) -> None:
        self._run = run
        self._path = path
        self._shown: tuple[str, ...] | None = None
        self._due = 0.0

    def keep(self, status: WatchStatus) -> None:
        """Write the page if what was found has changed, or if it is old."""
        keys = tuple(finding.key for finding in status.findings)
        now = time.monotonic()
        if (
            self._path is None
            or self._run is None
            or (keys == self._shown and now < self._due and not status.seen.view.is_over)
        ):
            return
        write_run_page(self._path, read_status(self._run))
        self._shown, self._due = keys, now + PAGE_EVERY_S
