"""The logs of all ranks in one view: merged by time, each line with its host, rank and coordinate."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import resource
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache

from bigsci_launch.errors import RunDirError
from bigsci_launch.file_names import launcher_of_name
from bigsci_launch.runs.attempts import query_attempt, read_exit
from bigsci_launch.runs.layout import AttemptDir, rank_files, read_json, read_record
from bigsci_launch.runs.log_reader import LogLine, LogReader
from bigsci_launch.scheduler.job import JobState
from bigsci_launch.topology import Coordinate

SCHEMA_VERSION = 1
FOLLOW_POLL_S = 0.5
ASK_SLURM_EVERY_S = 30.0
MAX_UNKNOWN = 10
"""How often in succession the state may be unknown before the logs are followed no further: Slurm may be restarting."""
BATCH = -1
"""Used as the rank of lines of the batch script."""
FIRST_LAUNCHER = -2
"""Used as the rank of lines of launcher 0; that of each further one is less by one."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines are wanted; None means all of them."""

    ranks: Collection[int] | None = None
    node: str | None = None
    pattern: re.Pattern[str] | None = None


class MergedLogs:
    """The logs of an attempt's ranks, as one sequence of printable lines."""

    def __init__(self, attempt: AttemptDir, log_filter: LogFilter, *, as_json: bool = False) -> None:
        self._attempt = attempt
        self._filter = log_filter
        self._format = self._document if as_json else self._text
        self._readers: dict[int, LogReader] = {}
        self._labels: dict[int, str] = {BATCH: "batch"}
        _allow_many_files()

    def lines(self) -> Iterator[str]:
        """Yield every complete line that was not yielded before, merged by time."""
        self._find_ranks()
        for line in heapq.merge(*(reader.new_lines() for reader in self._readers.values())):
            if self._matches(line):
                yield self._format(line)

    def tail(self, number: int | None, since: str = "") -> list[str]:
        """Return the last `number` lines, or all, no older than `since` (see `parse_since`), merged by time.

        It reads the logs from their ends, as far as it must.

        `lines` and `follow` then yield only what is written later.
        """
        self._find_ranks()
        newest = heapq.merge(*(reader.last_lines() for reader in self._readers.values()), reverse=True)
        recent = itertools.takewhile(lambda line: line.stamp >= since, newest)
        wanted = itertools.islice(filter(self._matches, recent), number)
        return [self._format(line) for line in reversed(list(wanted))]

    def troubles(self) -> list[str]:
        """Return which logs could not be read, and why."""
        return [reader.trouble for reader in self._readers.values() if reader.trouble]

    def _matches(self, line: LogLine) -> bool:
        return self._filter.pattern is None or self._filter.pattern.search(line.text) is not None

    def follow(self, has_ended: Callable[[], bool]) -> Iterator[str]:
        """Yield lines as ranks write them, until `has_ended()` is true and no line is left."""
        while True:
            is_last = has_ended()
            yield from self.lines()
            if is_last:
                return
            time.sleep(FOLLOW_POLL_S)

    def _find_ranks(self) -> None:
        """Open the logs that exist by now. Until a rank has one, the batch script's output is shown instead."""
        launchers = rank_files(self._attempt.logs, ".log", launcher_of_name)
        paths = rank_files(self._attempt.logs, ".log")
        paths |= {FIRST_LAUNCHER - number: path for number, path in launchers.items()}
        for rank, path in paths.items():
            if rank not in self._readers and self._is_wanted(rank):
                self._readers[rank] = LogReader(path, rank)
        if paths:
            self._readers.pop(BATCH, None)
        elif self._filter.ranks is None and self._filter.node is None:
            self._readers.setdefault(BATCH, LogReader(self._attempt.job_output, BATCH))

    def _is_wanted(self, rank: int) -> bool:
        if self._filter.ranks is not None and rank not in self._filter.ranks:
            return False
        return self._filter.node is None or describe_rank(self._attempt, rank)[0] == self._filter.node

    def _label(self, rank: int) -> str:
        """Return the label of a rank. It is cached once the rank's PID record exists: the log may begin earlier."""
        if rank not in self._labels:
            node, label = describe_rank(self._attempt, rank)
            if not node:
                return label
            self._labels[rank] = label
        return self._labels[rank]

    def _text(self, line: LogLine) -> str:
        when = f"{_local_minute(line.stamp[:16])}{line.stamp[16:23]} " if line.stamp else ""
        return f"{when}[{self._label(line.rank)}] {line.text}"

    def _document(self, line: LogLine) -> str:
        """Return the line as JSON: its time in UTC, its rank (None for a launcher and the batch script), its label."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "time": f"{line.stamp}Z" if line.stamp else None,
            "rank": line.rank if line.rank >= 0 else None,
            "from": self._label(line.rank),
            "text": line.text,
        }
        return json.dumps(document).replace("\x7f", "\\u007f")


@lru_cache(maxsize=1024)
def _local_minute(minute: str) -> str:
    """Return a minute in UTC, such as `2026-11-27T14:30`, in the reader's time zone, as `11-27 15:30`."""
    try:
        return f"{datetime.fromisoformat(f'{minute}+00:00').astimezone():%m-%d %H:%M}"
    except (ValueError, OverflowError):  # the text of a log may pass for a time
        return f"{minute[5:10]} {minute[11:]}"


def describe_rank(attempt: AttemptDir, rank: int) -> tuple[str, str]:
    """Return the node of a rank and its label `n3 rank 5 dp0 pp1 tp1`, from its PID record. That of a launcher is
    `n3 launcher 1`."""
    if rank <= FIRST_LAUNCHER:
        number = FIRST_LAUNCHER - rank
        path = rank_files(attempt.pids, ".json", launcher_of_name).get(number)
        node = str(read_record(path).get("node") or "") if path else ""
        return node, f"{node} launcher {number}".strip()
    try:
        identity = read_json(attempt.pid_file(rank))
        node, at = str(identity["node"]), identity["coordinate"]
        return node, f"{node} rank {rank} {Coordinate.at(**at)}"
    except (RunDirError, KeyError, TypeError, ValueError):
        return "", f"rank {rank}"


def parse_ranks(text: str) -> frozenset[int]:
    """Parse ranks such as `0-3,7`.

    Raises:
        ValueError: anything else.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part.strip()!r} is neither a rank nor a range of ranks")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_since(text: str, now: float) -> str:
    """Return the time that `text` means, in the form of a `LogLine.stamp`.

    It is an age (`90s`, `10m`, `2h`, `1d`), or a time in the reader's zone (`14:30`, `2026-11-27`), or in UTC
    (`2026-11-27T14:30:05Z`). `now` is in seconds since the epoch; a time of day is the last such one.

    Raises:
        ValueError: anything else.
    """
    here = datetime.fromtimestamp(now).astimezone()
    if match := _AGE.fullmatch(text):
        try:
            found = here - timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
        except OverflowError:
            return datetime.min.isoformat(timespec="microseconds")
    elif re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text):
        found = datetime.fromisoformat(f"{here:%Y-%m-%d}T{text}")
        found -= timedelta(days=found.astimezone() > here)
    else:
        found = datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)
    try:
        return found.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds")
    except OverflowError:
        raise ValueError(f"{text!r} is not a time of this calendar in UTC") from None


def end_detector(attempt: AttemptDir) -> Callable[[], bool]:
    """Return a function that tests if the attempt has ended: from exit.json, else by asking at most every 30 s."""
    asked, num_unknown = time.monotonic() - ASK_SLURM_EVERY_S + 2, 0

    def has_ended() -> bool:
        nonlocal asked, num_unknown
        ended = read_exit(attempt)
        if ended is not None and ended.get("exit_code") is not None:
            return True
        if time.monotonic() - asked < ASK_SLURM_EVERY_S:
            return False
        asked = time.monotonic()
        job = query_attempt(attempt)
        num_unknown = num_unknown + 1 if job.state is JobState.UNKNOWN else 0
        return job.state.is_over or job.is_gone or num_unknown >= MAX_UNKNOWN

    return has_ended


def _allow_many_files() -> None:
    """Raise the limit on open files as far as allowed: merging reads one file per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
