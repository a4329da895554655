"""Weights & Biases: a run with the run's id, which W&B resumes. Its own variables, such as WANDB_MODE, hold.

A server says which step is its newest. Offline, the files of the run do: W&B takes steps before it writes them, and a
process of its own may still write when the one that gave them is dead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from bigsci_launch.export.trackers.seam import (
    NO_STEP,
    PROJECT,
    TrackedNote,
    TrackedRun,
    TrackedStep,
    wait_until_written,
)
from bigsci_launch.safe_files import make_folder, open_stream

FLUSH_S = 1.0
FLUSH = "x_transaction_log_flush_interval"
"""The setting for the seconds between two writes, since W&B 0.31. Older ones write when 32 KiB have come together."""


class WandbRun:
    """A run of W&B. Offline, each process that follows it leaves a folder, and `wandb sync --append` joins them."""

    def __init__(self, run: TrackedRun) -> None:
        make_folder(run.folder)
        earlier = [OfflineFile(path) for path in run.folder.glob(f"wandb/offline-run-*/run-{run.id}.wandb")]
        self._on_disk = max((each.newest_when_closed() for each in earlier), default=None)
        can_flush = FLUSH in wandb.Settings.model_fields
        settings: dict[str, Any] = {FLUSH: FLUSH_S} if can_flush else {}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.id,
            name=os.environ.get("WANDB_NAME") or run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, **settings),
        )
        self._file = OfflineFile(Path(self._run.settings.sync_file)) if self._run.offline and can_flush else None

    def newest_step(self) -> int | None:
        """Return what the server has; offline, what the files have that are still there."""
        if self._run.offline:
            return self._on_disk
        return self._run.step - 1 if self._run.resumed and self._run.step else None

    def log(self, steps: Sequence[TrackedStep]) -> None:
        """Give the steps.

        Raises:
            BslError: offline, W&B did not write them.
        """
        for each in steps:
            moment = {} if each.time is None else {"_timestamp": each.time}
            self._run.log({**each.values, **moment}, step=each.step, commit=True)
        if self._file is not None and steps:
            self._file.wait_for(steps[-1].step)

    def annotate(self, note: TrackedNote) -> None:
        self._run.alert(title=note.title, text=note.text)
        self._run.summary[f"notes/{note.key}"] = note.text

    def close(self) -> None:
        self._run.finish()


class OfflineFile:
    """What is on disk of an offline run: records in LevelDB's log format, after a head of 7 bytes."""

    BLOCK, HEAD = 1 << 15, 7
    WHOLE, FIRST, LAST = 1, 2, 4

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at, self._part = self.HEAD, b""
        self.newest = NO_STEP

    def read(self) -> int:
        """Return the newest step on disk. Only what is new is read; a record that is not whole is left."""
        try:
            with open_stream(self._path) as stream:
                stream.seek(self._at)
                data = stream.read()
        except FileNotFoundError:
            return self.newest
        begin, at = self._at, 0
        while True:
            if (left := self.BLOCK - (begin + at) % self.BLOCK) < self.HEAD:
                at += left
            if at + self.HEAD > len(data):
                break
            _, size, kind = struct.unpack_from("<IHB", data, at)
            if at + self.HEAD + size > len(data):
                break
            body = data[at + self.HEAD : at + self.HEAD + size]
            at += self.HEAD + size
            self._part = body if kind in (self.WHOLE, self.FIRST) else self._part + body
            if kind in (self.WHOLE, self.LAST):
                self._take(Record.FromString(self._part))
            self._at = begin + at
        return self.newest

    def _take(self, record: Any) -> None:
        if record.WhichOneof("record_type") == "history":
            self.newest = max(self.newest, record.history.step.num)

    def wait_for(self, step: int) -> None:
        wait_until_written(lambda: self.read() >= step, f"{self._path}: step {step} is not written")

    def newest_when_closed(self) -> int:
        """Return the newest step, when no process has the file open: that of W&B outlives the one that it served."""
        wait_until_written(lambda: not is_open(self._path), f"{self._path}: another process still writes it")
        return self.read()


def is_open(path: Path) -> bool:
    """Return whether a process of this user on this machine has the file open."""
    found = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.path.samestat(link.stat(), found):
                return True
    return False


def open_run(run: TrackedRun) -> WandbRun:
    return WandbRun(run)
