"""Per-rank records: heartbeats and events, appended as JSON lines, one writer per file.

Writing never blocks training: records go into a bounded queue that a thread empties. If the queue is full, they are
dropped and counted. Each record is one `write` to a file opened with O_APPEND. Readers tolerate a torn last line.

A record is `{"kind", "time", "mono", "step", ...}`. Kinds: `start` (world, coordinate, host, pid), `heartbeat` (phase:
the rank has just entered it), `step` (loss, seconds, tflops, ... from the ranks that know them; on a GPU also
memory_allocated and memory_reserved, peak bytes of that rank in the step, and memory_retries), `save` (path, seconds;
request: the key of the request for it, if any; refused_since: the first step of the saves before it that the disk
refused; stalled_s: how long training has waited, for one in the background), `save_refused` (by rank 0: what the disk
refused: text, path, errno; the ranks, the node of the first, the step of the newest checkpoint, hint, and retry_s,
after which it is tried again at the latest), `load` (path), `changed` (what is not as it was when the loaded checkpoint
was saved: key, saved, now, severity, text, accepted), `evaluation` (loss, samples, seconds), `fault` (what was
injected), `guards` (interval, cost), `guard` (what a guard found: check, tensor, coordinates, text), `skipped` (a step
whose gradients were not finite: skipped_step, how many in_a_row, the first of them, loss_scale, and in words where it
began), `dropped` (how many records were lost), `end` (reason). With `training.micro_batch_size: auto`: `trial` (size,
whether it fits, seconds of a micro-batch, used_bytes of the fullest device), `micro_batch` (why, size, was, words; or
evaluation_size). With `parallelism.engine: uneven`: `pipeline` (pipeline, stage, layers and micro_batches of this rank;
the ranks of all pipelines, the means by which they were formed, how many failures they tolerate, how many of them were
wanted, and planned_s, the planned seconds of a step). With `survive`: `generation` (this rank enters it: its
number, topology), `restored` (the state that it begins with: restored_step, source, path, why), `left` (this rank has
left it). Steps after restored_step are done again, so a reader takes the last record of a step.
`time` is wall clock seconds, `mono` the monotonic clock of that host, `step` the optimizer step in progress.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigsci_launch.safe_files import open_stream, parse_json

QUEUE_SIZE = 1024


class EventWriter:
    """Appends the records of one rank to `path`. Any thread may call it. It never blocks or raises on disk errors."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_SIZE)
        self._num_dropped = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._drain, name="bsl-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Queue one record; drop and count it if the queue is full."""
        record = {"kind": event, "time": time.time(), "mono": time.monotonic(), "step": step, **fields}
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, waiting at most `timeout_s`, and stop. Idempotent."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _drain(self) -> None:
        while (record := self._queue.get()) is not None:
            lost = self._num_dropped
            said = {"kind": "dropped", "time": time.time(), "mono": time.monotonic(), "num_records": lost}
            if lost and self._append(said):
                self._drop(-lost)
            if not self._append(record):
                self._drop()
        os.close(self._descriptor)

    def _append(self, record: dict[str, Any]) -> bool:
        """Write a record; False if the disk refuses it: a full or unreachable one must not end the training."""
        try:
            os.write(self._descriptor, (json.dumps(record, default=str) + "\n").encode())
        except OSError:
            return False
        return True

    def _drop(self, number: int = 1) -> None:
        with self._counting:
            self._num_dropped += number


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `path`, oldest first. Torn and foreign lines are skipped; a missing file has no records."""
    try:
        stream = open_stream(path)
    except OSError:
        return
    with stream:
        for line in stream:
            try:
                record = parse_json(line, allow_nan=True)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def read_tail(path: Path, size: int, *, follow: bool = False) -> bytes:
    """Return the last `size` bytes of a file; nothing if it cannot be read."""
    try:
        with open_stream(path, follow=follow) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            return stream.read()
    except OSError:
        return b""


def read_last_events(path: Path, tail_bytes: int = 65536, holding: bytes = b"") -> list[dict[str, Any]]:
    """Return the records in the last `tail_bytes` of `path`, oldest first: cheap for a file of any size.

    Only those whose line has `holding` in it: the others are not parsed.
    """
    records = []
    for line in (line for line in read_tail(path, tail_bytes).splitlines() if holding in line):
        try:
            record = parse_json(line, allow_nan=True)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
