"""The steps that the program of an attempt prints: in which forms, and which part of a log is its own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from bigsci_launch.runs.ending.output import lines_of_attempt
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.safe_files import read_file
from bigsci_launch.step_lines import StepForm, known_forms, own_form


def forms_of(attempt: AttemptDir) -> tuple[StepForm, ...]:
    """Return the forms in which the steps of an attempt may be printed: `monitor.step_line` alone, if it is given."""
    with suppress(OSError, ValueError):
        return (own_form(read_file(attempt.step_line, follow=True).decode("utf-8")),)
    return known_forms()


def printed_text(attempt: AttemptDir, path: Path, data: bytes) -> str:
    """Return what a part of a log shows of the attempt: a requeued job appends to the output of its first start."""
    text = data.decode("utf-8", "replace")
    return "\n".join(lines_of_attempt(text, attempt.name)) if path == attempt.job_output else text
