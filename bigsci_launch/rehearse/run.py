"""Runs an arranged rehearsal from its first attempt to its stored report."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.errors import BslError
from bigsci_launch.launch.foreground import interrupts_on
from bigsci_launch.launch.notes import read_revision
from bigsci_launch.progress import Report
from bigsci_launch.rehearse.arrange import Arrangement
from bigsci_launch.rehearse.judge import REPEATABLE
from bigsci_launch.rehearse.play import Rehearsal
from bigsci_launch.rehearse.reduce import slower_by
from bigsci_launch.rehearse.report import RehearsalReport, report_document
from bigsci_launch.runs.layout import write_json


def run_rehearsal(arrangement: Arrangement, command: Sequence[str], tell: Report) -> RehearsalReport:
    """Play the rehearsal, store its report and return it. Ctrl-C, TERM and the loss of the terminal end its attempt.

    Raises:
        BslError: the first attempt was refused. Nothing is left of the rehearsal.
        KeyboardInterrupt: it was interrupted. It has no report.
    """
    revision, began = read_revision(arrangement.working_directory), time.time()
    rehearsal = Rehearsal(
        lambda: arrangement.start(command),
        arrangement.limits,
        tell,
        has_evaluation=arrangement.has_evaluation,
        tolerance=_tolerance(arrangement),
        saves_on_interval=arrangement.loaded.config.run.starts_trainer,
        survives=arrangement.loaded.config.survive is not None,
    )
    more = slower_by(arrangement.original, arrangement.prepared.loaded.config)
    try:
        with interrupts_on(signal.SIGTERM, signal.SIGHUP):
            played = rehearsal.play(slower_by=more, unchecked=arrangement.unchecked)
    except BslError:
        arrangement.forget()
        raise
    report = RehearsalReport(arrangement, played, revision, time.time(), time.time() - began)
    try:
        write_json(arrangement.folder.report, report_document(report))
    except OSError as error:  # the disk on which the save has failed may be full
        report = replace(report, is_stored=False)
        tell(f"warning: the report is not stored: {arrangement.folder.report}: {error.strerror or error}")
    if played.decision == "go":
        # They may be large, and show nothing more. After a no-go they are evidence.
        shutil.rmtree(arrangement.prepared.request.run.checkpoints, ignore_errors=True)
    return report


def _tolerance(arrangement: Arrangement) -> float:
    """Return the relative difference that repeated losses may have: none for `bsl train` on CPUs."""
    loaded = arrangement.loaded
    is_exact = loaded.config.run.starts_trainer and loaded.site.config.gpu is None
    return 0.0 if is_exact else REPEATABLE
