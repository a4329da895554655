"""Starts the ranks of the phase `micro_batches`, gives them attempts to train, and reads what these left."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ranks import Process, draw_corpus, free_port, start_ranks

from bigsci_launch.checkpoints.found_size import FoundSize, read_found_size
from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from on_gpu.card import Card
from on_gpu.micro_batch_rank import DONE, Order

ATTEMPT_S = 35.0
POLL_S = 0.05
LEAVE_S = 2.0
WARM_UP = 1
"""Steps that are left out of times."""

Change = tuple[int, str, int]


class CaseError(Exception):
    """A case came to no result; the text says why."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What an attempt left: the records of each rank, the size it found, and what rank 0 said at its end."""

    events: tuple[tuple[dict[str, Any], ...], ...]
    found: FoundSize | None
    done: dict[str, Any]
    error: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self._of_kind("step")

    @property
    def trials(self) -> list[dict[str, Any]]:
        return self._of_kind("trial")

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.events[0] if each["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        return [each["loss"] for each in self.steps]

    @property
    def sizes(self) -> list[int]:
        """The size of each step."""
        return [each["micro_batch_size"] for each in self.steps]

    @property
    def changes(self) -> list[Change]:
        """After which step, why, and to what the size was changed."""
        return [(each.step, each.why, each.size) for each in self.found.history] if self.found else []

    @property
    def words(self) -> str:
        """What was said of each change."""
        return " | ".join(each.words for each in self.found.history) if self.found else ""

    @property
    def told(self) -> list[list[str]]:
        """Why the size was changed, as each rank says."""
        return [[each["why"] for each in rank if each["kind"] == "micro_batch"] for rank in self.events]

    @property
    def search(self) -> list[dict[str, Any]]:
        """The trials of the search between the records of its beginning and its end."""
        marks = [number for number, each in enumerate(self.events[0]) if each["kind"] == "search"]
        return list(self.events[0][marks[0] : marks[1] + 1]) if len(marks) == 2 else []

    @property
    def step_s(self) -> float:
        """The median time of a step."""
        return median(each["seconds"] for each in self.steps[WARM_UP:])


class Ranks:
    """Processes that train one attempt after the other; `until` is when all must be over."""

    def __init__(self, count: int, folder: Path, card: Card, until: float) -> None:
        self.count, self._folder, self._card, self._until = count, folder, card, until
        folder.mkdir()
        draw_corpus(folder / "corpus")
        self._processes = self._start()

    def _start(self) -> list[Process]:
        place = {"BSL_RUN_DIR": str(self._folder), "BSL_ATTEMPT": "0001", "DS_ACCELERATOR": self._card.device}
        return start_ranks(self.count, ["on_gpu.micro_batch_rank"], self._log, place, stdin=subprocess.PIPE)

    def train(self, name: str, sections: dict[str, Any], **order: Any) -> Trained:
        """Train an attempt of a new run, in new processes if the last attempt has ended the old ones.

        Raises:
            CaseError: a process has ended, or the attempt takes too long.
        """
        if any(process.poll() is not None for process in self._processes):
            self._processes = self._start()
        run = RunDir(self._folder / name)
        attempt = run.attempt("0001")
        attempt.make()
        attempt.config.write_text(dump_resolved(self._config(sections)))
        self._tell(Order(str(attempt.path), free_port(), **order, is_pretended=self._card.is_tiny))
        self._wait(attempt.path / DONE, name)
        return self._read(run, attempt)

    def _config(self, sections: dict[str, Any]) -> RunConfig:
        training = {"precision": "bf16", "device": self._card.device, "share_devices": self.count > 1}
        base = {
            "run": {"name": "size"},
            "parallelism": {"data_parallel_size": self.count},
            "data": {"prefix": str(self._folder / "corpus")},
        }
        return RunConfig.model_validate({**base, **sections, "training": {**training, **sections["training"]}})

    def _tell(self, order: Order) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            process.stdin.flush()

    def _wait(self, done: Path, name: str) -> None:
        until = min(self._until, time.monotonic() + ATTEMPT_S)
        while not done.exists():
            codes = [process.poll() for process in self._processes]
            if any(code is not None for code in codes) or time.monotonic() > until:
                self.end()
                raise CaseError(f"{name}: ranks ended with {codes} (None: too late); {self._last_words(done.parent)}")
            time.sleep(POLL_S)

    def _last_words(self, attempt: Path) -> str:
        events = read_events(AttemptDir(attempt).event_file(0))
        tried = [(each["size"], each["fits"]) for each in events if each["kind"] == "trial"]
        ends = [self._log(rank).read_text(errors="replace")[-400:] for rank in range(self.count)]
        return f"sizes tried, and whether they fit: {tried}; the logs end with {ends}"

    def _read(self, run: RunDir, attempt: AttemptDir) -> Trained:
        done = read_json(attempt.path / DONE)
        errors = [attempt.error_file(rank) for rank in range(self.count)]
        said = [f"{each['type']}: {each['message']}" for each in map(read_json, filter(Path.exists, errors))]
        events = tuple(tuple(read_events(attempt.event_file(rank))) for rank in range(self.count))
        return Trained(events, read_found_size(run), done, "; ".join([*said, *filter(None, [done["error"]])]))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def end(self) -> None:
        """End the processes: the card has their memory back, and what they let others hold of it."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
            process.kill()
            process.wait(10)
