"""The forms in which a program may print its steps: the one of its run file, else all that are known."""

from __future__ import annotations

from contextlib import suppress

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.safe_files import read_file
from bigsci_launch.step_lines import StepForm, known_forms, own_form


def forms_of(attempt: AttemptDir) -> tuple[StepForm, ...]:
    """Return the forms in which the steps of an attempt may be printed: `monitor.step_line` alone, if it is given."""
    with suppress(OSError, ValueError):
        return (own_form(read_file(attempt.step_line, follow=True).decode("utf-8")),)
    return known_forms()
