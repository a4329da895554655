"""Plays the demonstration, part by part, with the commands that a user would type.

1. Make a corpus from the source text of the Python standard library.
2. Train a small GPT on 8 ranks (tp2 x pp2 x dp2, bf16, ZeRO-1, tied embeddings) without interruption.
3. Stop the same run half-way and resume it: every loss and every weight is bitwise equal.
4. Let one rank skip a collective: the job hangs, and `bsl spy` names the rank.
"""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.demo.commands import Spoken, require_success, speak
from bigsci_launch.demo.folder import HANGS, STOPPED, UNDISTURBED, wait_until
from bigsci_launch.errors import BslError
from bigsci_launch.progress import Progress
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.safe_files import parse_json

NUM_STEPS = 20
STOP_AFTER = 8
FAULTY_RANK = 5
FAULTY_STEP = 4
STILL_S = 6.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The results of a demonstration; every field was measured while it ran."""

    corpus_tokens: str
    losses: tuple[float, ...]
    stopped_at: int
    diff_sentence: str
    spy_report: str
    suspect: str
    seconds: float
    commands: tuple[str, ...]


class Demo:
    """One demonstration in `folder`, whose earlier runs have been removed."""

    NUM_PARTS = 5

    def __init__(self, folder: Path, config: Path, report_progress: Progress) -> None:
        self.folder = folder
        self.config = config
        self.log = folder / "demo.log"
        self._report_progress = report_progress
        self._commands: list[str] = []

    def play(self) -> DemoResult:
        """Play all parts and return their results.

        Raises:
            BslError: a part did not show what it should; the message says which.
        """
        began = time.monotonic()
        self._report_progress(0, "making a corpus from the source text of the standard library (asyncio)")
        corpus = self._make_corpus()
        self._report_progress(1, f"training {NUM_STEPS} steps on 8 ranks without interruption")
        undisturbed = self._train(UNDISTURBED)
        self._report_progress(2, f"training the same run, which is asked to stop after step {STOP_AFTER}")
        stopped = self._train_and_stop(STOPPED)
        stopped_at = max(losses_by_step(stopped))
        self._report_progress(3, "resuming the stopped run")
        self._train(STOPPED)
        losses = self._require_equal_losses(undisturbed, stopped)
        diff = self._require_equal_weights(undisturbed, stopped)
        self._report_progress(4, f"training again; rank {FAULTY_RANK} skips a collective in step {FAULTY_STEP}")
        report, suspect = self._hang_and_spy()
        self._report_progress(5, "done")
        return DemoResult(
            corpus, losses, stopped_at, diff, report, suspect, time.monotonic() - began, tuple(self._commands)
        )

    def _bsl(self, *words: str, timeout_s: float = 180.0) -> Spoken:
        spoken = require_success(speak(words, timeout_s=timeout_s, log=self.log), self.log)
        self._commands.append(spoken.line)
        return spoken

    def _make_corpus(self) -> str:
        source = Path(sysconfig.get_path("stdlib")) / "asyncio"
        prefix = self.folder / "corpus" / "stdlib"
        spoken = self._bsl(
            "data", "prepare", str(source), "--output", str(prefix), "--vocab-size", "512", "--glob", "*.py"
        )
        return spoken.stdout.strip().splitlines()[-1]

    def _settings(self, name: str, *more: str) -> list[str]:
        values = (
            f"run.name={name}",
            f"run.root={self.folder / 'runs'}",
            f"data.prefix={self.folder / 'corpus' / 'stdlib'}",
            f"training.steps={NUM_STEPS}",
            *more,
        )
        return [word for value in values for word in ("--set", value)]

    def _train(self, name: str, *more: str) -> RunDir:
        self._bsl("submit", str(self.config), "--local", *self._settings(name, *more))
        return RunDir(self.folder / "runs" / name)

    def _train_and_stop(self, name: str) -> RunDir:
        run = self._start(name)
        wait_until(f"the run has trained {STOP_AFTER} steps", lambda: max(losses_by_step(run), default=0) >= STOP_AFTER)
        self._bsl("cancel", str(run.path))
        wait_until("the stopped run has ended", lambda: has_ended(run))
        return run

    def _start(self, name: str, *more: str) -> RunDir:
        self._bsl("submit", str(self.config), "--local", "--detach", *self._settings(name, *more))
        return RunDir(self.folder / "runs" / name)

    def _require_equal_losses(self, one: RunDir, other: RunDir) -> tuple[float, ...]:
        expected, found = losses_by_step(one), losses_by_step(other)
        if sorted(expected) != list(range(1, NUM_STEPS + 1)):
            raise BslError(f"the uninterrupted run logged steps {sorted(expected)}", hint=f"see {self.log}")
        for step, loss in expected.items():
            if found.get(step) != loss:
                raise BslError(f"loss of step {step}: {found.get(step)} after the resume, {loss} without interruption")
        return tuple(expected[step] for step in sorted(expected))

    def _require_equal_weights(self, one: RunDir, other: RunDir) -> str:
        spoken = self._bsl("diff-weights", str(one.checkpoints), str(other.checkpoints))
        return spoken.stdout.strip().splitlines()[0]

    def _hang_and_spy(self) -> tuple[str, str]:
        fault = f"faults=[{{kind: skip, rank: {FAULTY_RANK}, step: {FAULTY_STEP}}}]"
        run = self._start(HANGS, fault)
        try:
            wait_until("no rank makes progress", lambda: is_still(run))
            document = parse_json(self._bsl("spy", str(run.path), "--json").stdout)
            bundle = str(newest(run.bundles))
            report = self._bsl("spy", "--bundle", bundle).stdout
        finally:
            speak(("cancel", str(run.path)), timeout_s=60.0, log=self.log)
            wait_until("the hung run has been ended", lambda: has_ended(run))
        suspects = document["verdict"]["suspects"]
        if [suspect["rank"] for suspect in suspects] != [FAULTY_RANK]:
            raise BslError(f"`bsl spy` named {suspects or 'no rank'}, not rank {FAULTY_RANK}", hint=f"see {self.log}")
        return report.rstrip(), f"rank {FAULTY_RANK}"


def losses_by_step(run: RunDir) -> dict[int, float]:
    """Return the loss of every step that an attempt of `run` logged; a later attempt overrides an earlier one."""
    losses: dict[int, float] = {}
    for attempt in run.attempts():
        for path in sorted(attempt.events.glob("*.jsonl")):
            for record in read_events(path):
                if record["kind"] == "step" and "loss_hex" in record:
                    losses[int(record["step"])] = float.fromhex(record["loss_hex"])
    return losses


def has_ended(run: RunDir) -> bool:
    attempt = run.latest_attempt()
    return attempt is not None and attempt.exit.is_file()


def is_still(run: RunDir) -> bool:
    """Return whether a step was trained, every rank has written records, and none is newer than `STILL_S` seconds."""
    attempt = run.latest_attempt()
    if attempt is None or not losses_by_step(run):
        return False
    latest = [max((record["time"] for record in read_events(path)), default=None) for path in attempt.events.iterdir()]
    return None not in latest and time.time() - max(time for time in latest if time) > STILL_S


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime)
