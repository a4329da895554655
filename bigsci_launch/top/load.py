"""Reads the rows of `bsl top` in a thread of its own: Slurm seldom, the runs on the screen often, the others once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bigsci_launch.scheduler.slurm import SLURM_EVERY_S
from bigsci_launch.top.list import list_rows
from bigsci_launch.top.rows import TopDetails, TopRow

if TYPE_CHECKING:
    from bigsci_launch.top.job_logs import JobLogs

EVERY_S = 3.0
"""Seconds between two looks at the files of the runs on the screen that have not ended."""
BLOCK = 40
"""Runs that are not on the screen are read so many at a time."""
REST_S = 0.05
MOST_ASKED = 3
"""Outputs of other jobs that Slurm is asked for in a look: `scontrol` names that of one job at a time."""


class TopReader(Protocol):
    """Takes what was read; called from the thread that reads."""

    def take_rows(self, rows: Sequence[TopRow], asked: float, trouble: str) -> None: ...

    def take_details(self, details: Mapping[str, TopDetails]) -> None: ...


class TopLoader:
    """Reads until it is stopped. `show` says which rows are on the screen."""

    def __init__(self, root: Path, reader: TopReader) -> None:
        self._root, self._reader = root, reader
        self._wake = threading.Condition()
        self._visible: tuple[TopRow, ...] = ()
        self._is_stopping = False
        self._rows: list[TopRow] = []
        self._read: dict[str, tuple[float, bool]] = {}
        self._job_logs: JobLogs | None = None
        self._thread = threading.Thread(target=self._run, name="bsl-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def show(self, rows: Sequence[TopRow]) -> None:
        """Say which rows are on the screen now: they are read first."""
        with self._wake:
            is_new = [row.key for row in rows] != [row.key for row in self._visible]
            self._visible = tuple(rows)
            if is_new:
                self._wake.notify()

    def read_again(self) -> None:
        """Read the rows on the screen now, and Slurm if it may be asked again."""
        with self._wake:
            self._read.clear()
            self._wake.notify()

    def _run(self) -> None:
        asked = -SLURM_EVERY_S
        while not self._is_stopping:
            if time.monotonic() - asked >= SLURM_EVERY_S:
                asked = time.monotonic()
                self._rows, trouble = list_rows(self._root)
                self._reader.take_rows(self._rows, time.time(), trouble)
            with self._wake:
                visible = self._visible
            newest = {row.key: row for row in self._rows}
            is_busy = self._read_rows([newest.get(row.key, row) for row in visible], MOST_ASKED)
            is_busy |= self._read_rows([row for row in self._rows if row.key not in self._read][:BLOCK])
            with self._wake:
                if not self._is_stopping:
                    self._wake.wait(REST_S if is_busy else min(EVERY_S, 1.0))

    def _read_rows(self, rows: Sequence[TopRow], most_asked: int = 0) -> bool:
        """Read those rows whose details may have changed, and ask Slurm for so many outputs. Return whether there were
        any."""
        # The first rows are on the screen before the readers of records are loaded.
        from bigsci_launch.top.details import read_details
        from bigsci_launch.top.job_logs import JobLogs

        logs = self._job_logs = self._job_logs or JobLogs()
        logs.begin_look(most_asked)
        now, found = time.monotonic(), {}
        for row in rows:
            read, is_over = self._read.get(row.key, (0.0, False))
            if row.key in self._read and (is_over or now - read < EVERY_S):
                continue
            details = read_details(row, time.time(), logs)
            found[row.key] = details
            self._read[row.key] = (now, details.job.state.is_over)
        if found:
            self._reader.take_details(found)
        return bool(found)
