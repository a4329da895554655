"""One line of a program's log, as a log event: the formats in which trainers print steps, evaluations and saves."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bigsci_launch.file_names import step_of_tag
from bigsci_launch.iteration_line import parse_iterations
from bigsci_launch.watch.judge.log_event import LogEvent

NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity))"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_RANK = re.compile(r"\s*(?:\[rank(\d+)\]:|(\d+): )")
_EVALUATED = re.compile(rf"valid\w* loss at iteration (\d+)\b(?:.*?value: {NUMBER})?", re.IGNORECASE)
_SAVING = re.compile(r"\bsaving checkpoint at iteration\s+(\d+)")
_SAVED = re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d+)")
_SAVED_BY_US = re.compile(r"(?:^|Z )saved (\S+) in ([\d.]+) s$")
_SETTING = re.compile(r"\b(eval_interval|save_interval) \.{3,} (\d+|None)\s*$")
_TITAN = re.compile(rf"\bstep:\s*(\d+)\s+loss:\s*{NUMBER}(?:\s+grad_norm:\s*{NUMBER})?")
_NEMO = re.compile(r"\bTraining epoch (\d+), iteration (\d+)/(\d+) \|")
_NEMO_FIELDS = {
    name: re.compile(rf"{label}: {NUMBER}")
    for name, label in (
        ("loss", "reduced_train_loss"),
        ("seconds", "train_step_timing in s"),
        ("batch_size", "global_batch_size"),
        ("grad_norm", "grad_norm"),
    )
}
_BAR = re.compile(r"\b(\d+)/(\d+) \[\d[\d:]*<")
_ENDED = "[exiting program after"
OUTPUT = LogEvent("output")
_FAILED = re.compile(
    r"Traceback \(most recent call last\)|CUDA error|CUDA out of memory|OutOfMemoryError|NCCL error|Uncorrectable ECC"
    r"|Segmentation fault|Bus error|ChildFailedError|srun: error:|uncaught exception"
)
_WATCHDOG = "PULSE:"
"""Lines of a cron job that asked Slurm, in the log of the program: they say nothing about it."""


class LineReader:
    """Reads the lines of one log. It remembers the last progress bar, the only place where some programs have a step.

    `rank` is whose log it is; None if lines of several ranks are in it.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self._bar: tuple[int, int] | None = None

    def read(self, line: str) -> LogEvent | None:
        """Return the event in the line; `output` if it only shows activity, None if not even that."""
        if _WATCHDOG in line:
            return None
        found = (
            _step(line)
            or _evaluation_or_save(line)
            or _setting(line)
            or self._trainer_step(line)
            or _end_or_failure(line)
        )
        if found is None:
            self._see_bar(line)
            return OUTPUT
        return replace(found, time=_time_of(line), rank=self._rank if self._rank is not None else _rank_of(line))

    def _see_bar(self, line: str) -> None:
        if "<" in line and (bar := _BAR.search(line)) and (self._bar is None or int(bar[2]) >= self._bar[1]):
            self._bar = int(bar[1]), int(bar[2])

    def _trainer_step(self, line: str) -> LogEvent | None:
        """Return the step that a line of Hugging Face's Trainer reports: its number is in the progress bar."""
        start, end = line.find("{'"), line.rfind("}")
        if start < 0 or end < 0 or "'epoch'" not in line:
            return None
        try:
            fields = ast.literal_eval(line[start : end + 1].replace(": nan", ": None"))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        if not isinstance(fields, dict):
            return None
        self._see_bar(line[:start])
        step, total = self._bar or (None, None)
        if "eval_loss" in fields:
            seconds = _as_number(fields.get("eval_runtime"))
            return LogEvent("evaluated", step=step, loss=_as_number(fields["eval_loss"]), seconds=seconds)
        if "loss" not in fields:
            return None
        loss = float("nan") if fields["loss"] is None else _as_number(fields["loss"])
        return LogEvent(
            "step",
            step=step,
            total_steps=total,
            loss=loss,
            grad_norm=_as_number(fields.get("grad_norm")),
            text="report",
        )


def _as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _step(line: str) -> LogEvent | None:
    if "iteration" in line and (nemo := _NEMO.search(line)):
        return _nemo_step(line, nemo)
    if "iteration" in line and "|" in line:
        for found in parse_iterations(line):
            return LogEvent(
                "step",
                step=found.step,
                seconds=found.seconds,
                loss=found.loss,
                grad_norm=found.grad_norm,
                batch_size=found.global_batch_size,
                total_steps=found.total_steps,
                text="skipped" if found.is_skipped else "",
            )
    if "step:" in line and (titan := _TITAN.search(line)):
        return LogEvent("step", step=int(titan[1]), loss=_number(titan[2]), grad_norm=_number(titan[3]))
    return None


def _nemo_step(line: str, found: re.Match[str]) -> LogEvent:
    values = {name: _number(match[1]) for name, field in _NEMO_FIELDS.items() if (match := field.search(line))}
    size = values.get("batch_size")
    return LogEvent(
        "step",
        step=int(found[2]) + 1,  # it counts from 0
        loss=values.get("loss"),
        grad_norm=values.get("grad_norm"),
        seconds=values.get("seconds"),
        batch_size=None if size is None else int(size),
        total_steps=int(found[3]) + 1,
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
