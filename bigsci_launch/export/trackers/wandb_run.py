"""Weights & Biases: a run with the run's id, which W&B resumes. Its own variables, such as WANDB_MODE, hold."""

from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from bigsci_launch.export.trackers.seam import PROJECT, TrackedNote, TrackedRun, TrackedStep
from bigsci_launch.safe_files import make_folder


class WandbRun:
    """A run of W&B. Offline, each process that follows it leaves a folder, and `wandb sync --append` joins them."""

    def __init__(self, run: TrackedRun) -> None:
        make_folder(run.folder)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.id,
            name=os.environ.get("WANDB_NAME") or run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True),
        )

    def newest_step(self) -> int | None:
        """Return what the server has; offline, W&B does not know."""
        return self._run.step - 1 if self._run.resumed and self._run.step else None

    def log(self, steps: Sequence[TrackedStep]) -> None:
        for each in steps:
            moment = {} if each.time is None else {"_timestamp": each.time}
            self._run.log({**each.values, **moment}, step=each.step)

    def annotate(self, note: TrackedNote) -> None:
        self._run.alert(title=note.title, text=note.text)
        self._run.summary[f"notes/{note.key}"] = note.text

    def close(self) -> None:
        self._run.finish()


def open_run(run: TrackedRun) -> WandbRun:
    return WandbRun(run)
