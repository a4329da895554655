"""What the controller writes, and the little that it reads from disk, in a thread of its own: a file system that hangs
must not silence the controller, because runners that hear nothing from it end their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.nodes.memory import add_nodes, make_entry
from bigsci_launch.printable import one_line
from bigsci_launch.recover.generation import Instant
from bigsci_launch.recover.orders import (
    Archived,
    ArchiveRecords,
    JobEvent,
    LeaveOut,
    LookAtRanks,
    RanksSeen,
    RecordLine,
    RequestAnswer,
    SayLine,
    SlotOrder,
)
from bigsci_launch.runs.control.request import answer_request
from bigsci_launch.runs.layout import AttemptDir, node_memory, read_json
from bigsci_launch.runs.log_reader import LogReader
from bigsci_launch.runs.signs import find_last_step, read_rank_events
from bigsci_launch.safe_files import append_line, write_file
from bigsci_launch.scheduler.local import say

CLOSE_TIMEOUT_S = 10.0
MOST_LINES = 200
"""Of the end of a log that are looked at for the last words of its rank."""
IN_TRACEBACK = re.compile(
    r"  |Traceback \(most recent call last\)|During handling of the above|The above exception was"
)
"""Lines of a traceback that do not show what was raised. A full disk may cut off the one that does."""


class Records:
    """Carries out orders that need the disk, one after the other. `tell` gets the answers, in the writer's thread."""

    def __init__(self, attempt: AttemptDir, tell: Callable[[JobEvent], None], *, remembers_nodes: bool) -> None:
        self._attempt = attempt
        self._tell = tell
        self._remembers_nodes = remembers_nodes
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="bsl-records", daemon=True)
        self._thread.start()

    def carry_out(self, order: SlotOrder, now: Instant) -> None:
        match order:
            case RecordLine():
                line = {"time": now.time, "event": order.event, "generation": order.generation, **order.fields}
                self._queue.put(partial(self._append, line))
            case ArchiveRecords():
                self._queue.put(partial(self._archive, order.generation))
            case LookAtRanks():
                self._queue.put(partial(self._look, order))
            case LeaveOut() if self._remembers_nodes:
                self._queue.put(partial(self._leave_out, order))
            case RequestAnswer():
                answer = partial(answer_request, self._attempt, order.request, order.refused, now.time)
                self._queue.put(answer)
            case SayLine():
                self._queue.put(partial(say, order.text))

    def note_strangers(self, count: int, host: str, moment: float) -> None:
        """Record how many callers were sent away, and where the newest of them came from."""
        document = {"count": count, "newest_host": host, "newest_time": moment}
        self._queue.put(partial(self._write_strangers, document))

    def close(self) -> None:
        """Write what is waiting, and end."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except (OSError, BslError) as error:
                say(f"controller: {error}")  # the job continues without this record

    def _append(self, line: dict[str, Any]) -> None:
        self._make_folder()
        append_line(self._attempt.generations, json.dumps(line))

    def _write_strangers(self, document: dict[str, Any]) -> None:
        self._make_folder()
        write_file(self._attempt.strangers, json.dumps(document) + "\n")

    def _make_folder(self) -> None:
        """Make the folder of the controller, for its owner to write, whatever the umask."""
        self._attempt.recover.mkdir(mode=0o755, parents=True, exist_ok=True)

    def _archive(self, generation: int) -> None:
        """Move what ranks have left about their end: the folders then only speak of the present generation."""
        try:
            self._make_folder()
            self._attempt.generation(generation).mkdir(mode=0o755, exist_ok=True)
            for folder in (self._attempt.exits, self._attempt.errors):
                to = self._attempt.generation(generation) / folder.name
                to.mkdir(mode=0o755, exist_ok=True)
                for path in list(folder.glob("*.json")):
                    path.replace(to / path.name)
        finally:
            self._tell(Archived(generation))

    def _look(self, order: LookAtRanks) -> None:
        step, words, accused = None, {}, {}
        try:
            accused = {rank: whom for rank in order.ranks if (whom := accused_by(self._attempt, rank)) is not None}
            words = {rank: text for rank in order.ranks if (text := last_words(self._attempt, rank))}
            if order.since is not None:
                found = find_last_step(self._attempt, read_rank_events(self._attempt))
                step = found.step if found is not None and found.time >= order.since else None
        finally:
            self._tell(RanksSeen(order.generation, step, words, accused))

    def _leave_out(self, order: LeaveOut) -> None:
        run = self._attempt.path.parent.parent
        entry = make_entry(
            order.node, order.reason, order.evidence, cluster=os.environ.get("SLURM_CLUSTER_NAME") or None
        )
        document = {**asdict(entry), "run": run.name, "attempt": self._attempt.name}
        add_nodes(node_memory(run.parent), [type(entry)(**document)])


def last_words(attempt: AttemptDir, rank: int) -> str | None:
    """Return why a rank died, in one line and as it has said itself: its recorded exception, or the end of its log."""
    with contextlib.suppress(BslError, LookupError, TypeError):
        error = read_json(attempt.error_file(rank))
        return one_line(f"{error['type']}: {error['message']}")
    lines = (line.text for line in LogReader(attempt.log_file(rank), rank).last_lines())
    newest = [text for text in islice(lines, MOST_LINES) if text.strip()]
    own = [text for text in newest if not IN_TRACEBACK.match(text)]
    return next((one_line(text.strip()) for text in [*own, *newest]), None)


def accused_by(attempt: AttemptDir, rank: int) -> tuple[int, ...] | None:
    """Return the ranks that a guard accuses, as the error record of a rank that it has ended says; None if none has."""
    with contextlib.suppress(BslError, TypeError):
        accused = read_json(attempt.error_file(rank)).get("accused")
        return tuple(sorted(each for each in accused if type(each) is int)) if isinstance(accused, list) else None
    return None
