"""One line of a program's log, as a log event: steps in any known form, evaluations and saves as of Megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from bigsci_launch.file_names import step_of_tag
from bigsci_launch.printable import without_escapes
from bigsci_launch.step_lines import StepForm, StepLine, StepReader
from bigsci_launch.watch.judge.log_event import LogEvent

_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity))"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_RANK = re.compile(r"\s*(?:\[rank(\d+)\]:|(\d+): )")
_EVALUATED = re.compile(rf"valid\w* loss at iteration (\d+)\b(?:.*?value: {_NUMBER})?", re.IGNORECASE)
_SAVING = re.compile(r"\bsaving checkpoint at iteration\s+(\d+)")
_SAVED = re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d+)")
_SAVED_BY_US = re.compile(r"(?:^|Z )saved (\S+) in ([\d.]+) s$")
_SETTING = re.compile(r"\b(eval_interval|save_interval) \.{3,} (\d+|None)\s*$")
_ENDED = "[exiting program after"
OUTPUT = LogEvent("output")
_FAILED = re.compile(
    r"Traceback \(most recent call last\)|CUDA error|CUDA out of memory|OutOfMemoryError|NCCL error|Uncorrectable ECC"
    r"|Segmentation fault|Bus error|ChildFailedError|srun: error:|uncaught exception"
)
_WATCHDOG = "PULSE:"
"""Lines of a cron job that asked Slurm, in the log of the program: they say nothing about it."""


class LineReader:
    """Reads the lines of one log, whose steps are printed in one of `forms`: by default in any known one.

    `rank` is whose log it is; None if lines of several ranks are in it.
    """

    def __init__(self, rank: int | None = None, forms: Sequence[StepForm] | None = None) -> None:
        self._rank = rank
        self._steps = StepReader(forms)

    def read(self, line: str) -> LogEvent | None:
        """Return the event in the line; `output` if it only shows activity, None if not even that."""
        if _WATCHDOG in line:
            return None
        line = without_escapes(line)
        step = self._steps.read(line)
        found = _event_of(step) if step else _evaluation_or_save(line) or _setting(line) or _end_or_failure(line)
        if found is None:
            return OUTPUT
        return replace(found, time=_time_of(line), rank=self._rank if self._rank is not None else _rank_of(line))


def _event_of(line: StepLine) -> LogEvent:
    if line.is_evaluation:
        return LogEvent("evaluated", step=line.step, loss=line.loss, seconds=line.seconds)
    return LogEvent(
        "step",
        step=line.step,
        seconds=line.seconds,
        loss=line.loss,
        grad_norm=line.grad_norm,
        batch_size=line.batch_size,
        total_steps=line.total_steps,
        text="skipped" if line.is_skipped else "",
    )


def _evaluation_or_save(line: str) -> LogEvent | None:
    if "loss at iteration" in line and (found := _EVALUATED.search(line)):
        return LogEvent("evaluated", step=int(found[1]), loss=_number(found[2]))
    if "sav" not in line:
        return None
    if found := _SAVED.search(line):
        return LogEvent("saved", step=int(found[1]))
    if found := _SAVING.search(line):
        return LogEvent("saving", step=int(found[1]))
    if found := _SAVED_BY_US.search(line):
        return LogEvent("saved", step=step_of_tag(Path(found[1]).name), seconds=float(found[2]))
    return None


def _setting(line: str) -> LogEvent | None:
    """Return an interval that Megatron prints among its arguments, as `eval_interval=1000`; 0 if it is None."""
    if "_interval" in line and (found := _SETTING.search(line)):
        return LogEvent("settings", text=f"{found[1]}={0 if found[2] == 'None' else found[2]}")
    return None


def _end_or_failure(line: str) -> LogEvent | None:
    may_fail = "rror" in line or "Traceback" in line or "fault" in line or "uncaught" in line or "ECC" in line
    if _ENDED in line:
        return LogEvent("end", text=line.strip()[-300:])
    return LogEvent("failed", text=line.strip()[-300:]) if may_fail and _FAILED.search(line) else None


def _number(text: str | None) -> float | None:
    return float(text.replace(",", "")) if text else None


def _rank_of(line: str) -> int | None:
    found = _RANK.match(line)
    return int(found[1] or found[2]) if found else None


def _time_of(line: str) -> float | None:
    """Return the time in front of the line, as if it were UTC: only times of one log are compared."""
    found = _TIME.search(line, 0, 120)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(f"{found[1]} {found[2]}").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{found[3]}") if found[3] else 0.0)
