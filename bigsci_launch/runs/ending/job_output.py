"""What job.out shows about the end of an attempt that left no exit.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from bigsci_launch.runs.events import read_tail
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.safe_files import open_stream, others_may_write, parse_json

TAIL_BYTES = 2**18
RECORD = "exit_reason: record exit "
"""How the program of the job script prints the record that it could not write, as on a full disk."""
OWN = " bsl: "
"""In every line of the job script itself, after the time."""


def read_printed_exit(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the last exit record that was printed instead of written; None if there is none.

    A requeued job appends to the output of its first start, so the record must name the attempt. What others may have
    written is not believed.
    """
    if _is_open(attempt.job_output):
        return None
    for line in reversed(_tail(attempt.job_output)):
        if line.startswith(RECORD):
            try:
                document = parse_json(line.removeprefix(RECORD))
            except ValueError:
                continue  # cut off by the full disk
            if isinstance(document, dict) and "reason" in document and document.get("attempt") == attempt.name:
                return {**document, "reconstructed": {"source": "job.out", "host": None}}
    return None


def last_own_line(attempt: AttemptDir) -> str | None:
    """Return the last line of the job script itself, or of its program; None if there is none."""
    own = (line for line in reversed(_tail(attempt.job_output)) if OWN in line or line.startswith("bsl: "))
    return next(own, None)


def start_time(attempt: AttemptDir) -> float | None:
    """Return when the attempt began, in seconds since the epoch, as its first line says; None if it does not."""
    mark = f"{OWN}start attempt={attempt.name} "
    for line in _lines(attempt.job_output):
        if line.partition("Z")[2].startswith(mark):
            with suppress(ValueError):
                return datetime.fromisoformat(line.partition("Z")[0]).replace(tzinfo=timezone.utc).timestamp()
    return None


def _is_open(path: Path) -> bool:
    try:
        return others_may_write(path.stat())
    except OSError:
        return True


def _tail(path: Path) -> list[str]:
    text = read_tail(path, TAIL_BYTES, follow=True).decode("utf-8", "replace")
    return text.split("\n")  # not where a quoted text would like one to end


def _lines(path: Path) -> Iterator[str]:
    with (
        suppress(OSError),
        TextIOWrapper(open_stream(path, follow=True), encoding="utf-8", errors="replace", newline="\n") as stream,
    ):
        yield from stream
