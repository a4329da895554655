"""The steps that `bsl top` reads in the outputs of jobs that are not runs of `bsl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import SlurmUnavailable
from bigsci_launch.scheduler.job import JobInfo, JobState
from bigsci_launch.top.details import read_details
from bigsci_launch.top.job_logs import RATE_S, JobLogs
from bigsci_launch.top.rows import TopDetails, TopRow

NOW = 1_000_000.0


class Outputs:
    """Answers in the place of `scontrol`, which the tests of a cluster start; `asked` is what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()

    def find(self, number: str) -> Path | None:
        self.asked.append(number)
        if number == "9":
            raise SlurmUnavailable("no answer")
        return self.folder / f"{number}.out"

    def write(self, number: str, *lines: str) -> None:
        with (self.folder / f"{number}.out").open("a") as stream:
            stream.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outputs:
    outputs = Outputs(tmp_path)
    monkeypatch.setattr("bigsci_launch.top.job_logs.query_output", outputs.find)
    return outputs


def look(logs: JobLogs, number: str, now: float = NOW, most_asked: int = 1, **fields: Any) -> TopDetails:
    logs.begin_look(most_asked)
    state = fields.get("state", JobState.RUNNING)
    return read_details(TopRow(number, "x", JobInfo(number, state, state.value, "squeue", number=number)), now, logs)


def test_a_job_of_another_launcher_shows_its_newest_step_and_its_rate(outputs: Outputs) -> None:
    logs = JobLogs()
    outputs.write("7", "importing torch", "step 3 loss 2.5", "step 4 loss 2.25")
    first = look(logs, "7")
    assert (first.step, first.loss, first.seconds) == (4, 2.25, None)
    outputs.write("7", "step 9 loss 2.0")
    assert look(logs, "7", NOW + RATE_S - 1).seconds is None
    later = look(logs, "7", NOW + 2 * RATE_S)
    assert (later.step, later.loss, later.seconds) == (9, 2.0, 4.0)
    assert outputs.asked == ["7"]


def test_a_program_that_starts_again_is_measured_anew(outputs: Outputs) -> None:
    logs = JobLogs()
    outputs.write("7", "step 90 loss 2.5")
    look(logs, "7")
    outputs.write("7", "step 1 loss 9.0")
    assert look(logs, "7", NOW + 100).seconds is None
    outputs.write("7", "step 2 loss 9.0")
    assert look(logs, "7", NOW + 120).seconds == 20.0


def test_printed_seconds_come_before_measured_ones(outputs: Outputs) -> None:
    outputs.write("7", " iteration 5/ 100 | elapsed time per iteration (ms): 1500.0 | lm loss: 2.5E+00 |")
    found = look(JobLogs(), "7")
    assert (found.step, found.total_steps, found.seconds, found.loss) == (5, 100, 1.5, 2.5)


def test_slurm_is_asked_for_few_outputs_in_a_look_and_for_none_of_jobs_that_wait(outputs: Outputs) -> None:
    logs = JobLogs()
    outputs.write("7", "step 1 loss 2")
    assert look(logs, "7", most_asked=0).step is None
    assert look(logs, "7", state=JobState.PENDING).step is None
    assert outputs.asked == []
    assert look(logs, "9").step is None and look(logs, "8").step is None
    assert look(logs, "9").step is None and outputs.asked == ["9", "8"], "it is not asked again"
