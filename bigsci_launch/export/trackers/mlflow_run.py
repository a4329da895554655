"""MLflow: a run where MLFLOW_TRACKING_URI says, else in files of the run directory. It has the run's id as a tag."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric

from bigsci_launch.export.trackers.seam import NO_STEP, PROJECT, TrackedNote, TrackedRun, TrackedStep
from bigsci_launch.safe_files import make_folder

RUN_ID = "bsl.run_id"
STEP = "bsl_step"
"""A metric that each step has; it is written last."""
LONGEST_TAG = 500
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun) -> None:
        make_folder(run.folder)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.id}'")
        if not found:
            found = [self._client.create_run(experiment, run_name=run.name, tags={RUN_ID: run.id})]
        self._id = found[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")

    def newest_step(self) -> int:
        return max((each.step for each in self._client.get_metric_history(self._id, STEP)), default=NO_STEP)

    def log(self, steps: Sequence[TrackedStep]) -> None:
        for each in steps:
            moment = int(1000 * (time.time() if each.time is None else each.time))
            values = {**each.values, STEP: float(each.step)}
            metrics = [Metric(name, value, moment, each.step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def annotate(self, note: TrackedNote) -> None:
        at = "" if note.step is None else f"step {note.step}: "
        self._client.set_tag(
            self._id, f"note.{_NOT_IN_NAMES.sub('_', note.key)}", f"{at}{note.title}: {note.text}"[:LONGEST_TAG]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_run(run: TrackedRun) -> MlflowRun:
    return MlflowRun(run)
