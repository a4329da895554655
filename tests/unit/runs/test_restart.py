"""What `bsl status` says about the loss where an attempt continued its run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from bigsci_launch.checkpoints.folder import CheckpointRecord, write_record
from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import AttemptDir
from tests.support.texts import CheckText, has_parts, without_ages

pytestmark = pytest.mark.slow

TELLER = 4
LINE = "2026-11-21T01:02:03.123456Z  iteration {step:8d}/      60 | consumed samples: 40 | lm loss: {loss:.6E} |\n"


def losses(first: int, last: int, rise: float = 0.0) -> dict[int, float]:
    draw = np.random.default_rng(0)
    noise = 0.02 * draw.standard_normal(100)
    return {step: 10 * step**-0.2 + float(noise[step]) + rise for step in range(first, last + 1)}


def train(trial: Any, name: str, steps: Mapping[int, float], **settings: Any) -> AttemptDir:
    """Let an attempt report these steps, after loading a checkpoint if it does not begin with the first."""
    attempt: AttemptDir = trial.run.attempt(name)
    if not attempt.job.exists():
        trial.add_attempt(name)
    if min(steps) > 1:
        folder = trial.run.checkpoints / f"global_step{min(steps) - 1}"
        trial.event(0, "load", 50, path=str(folder), checkpoint_step=min(steps) - 1)
    for step, loss in steps.items():
        trial.event(TELLER, "heartbeat", 40, phase="step", step=step)
        fields = {"global_batch_size": 8, "consumed_samples": 8 * step, "learning_rate": 1e-4, **settings}
        trial.event(TELLER, "step", 40, step=step, loss=loss, **fields)
    return attempt


def status(*options: str) -> Result:
    return CliRunner().invoke(bsl, ["status", "trial", *options])


def restart() -> dict[str, Any]:
    answer = status("--json")
    assert answer.exit_code == 0, answer.output
    found: dict[str, Any] = json.loads(answer.stdout)["restart"]
    return found


@pytest.fixture(autouse=True)
def no_slurm(fake_slurm: Any) -> None:
    fake_slurm("squeue", "sinfo").answer("squeue", "")


def test_an_attempt_that_begins_at_step_one_has_no_restart(trial: Any) -> None:
    train(trial, "0001", losses(1, 20))
    assert restart() is None and "restart" not in status().stdout


def test_a_smooth_restart_is_said_to_be_one(trial: Any, check_text: CheckText) -> None:
    train(trial, "0001", losses(1, 30))
    train(trial, "0002", losses(31, 36))
    found = restart()
    assert (found["verdict"], found["step"], found["after_attempt"]) == ("no jump", 31, "0001")
    check_text(without_ages(status().stdout))


def test_a_spike_is_called_one_and_its_cause_is_not_invented(trial: Any, check_text: CheckText) -> None:
    train(trial, "0001", losses(1, 30))
    train(trial, "0002", losses(31, 36, rise=0.5))
    found = restart()
    assert (found["verdict"], found["causes"]) == ("spike", [])
    assert found["jump"] == pytest.approx(0.5, abs=0.1) and found["spreads"] > 5
    check_text(without_ages(status().stdout))
    logs = [str(trial.run.attempt(name).log_file(TELLER)) for name in ("0001", "0002")]
    assert found["compare"][0] == f"bsl diff-weights --seam {logs[0]} {logs[1]}"
    assert found["compare"][1].endswith("checkpoints/global_step30")


def test_changed_settings_and_findings_are_its_causes(trial: Any, check_text: CheckText) -> None:
    train(trial, "0001", losses(1, 30))
    attempt = train(trial, "0002", losses(31, 36, rise=0.5))
    trial.event(1, "changed", 45, key="optimizer.lr", severity="name", text="A SETTING")
    trial.event(1, "changed", 45, key="health", severity="unknown", text="WHAT IS UNKNOWN")
    trial.event(1, "skipped", 45, step=33, skipped_step=32, began=["A GRADIENT"])
    trial.event(2, "guard", 40, step=31, check="copies", text="A FINDING")
    trial.event(3, "guard", 30, step=36, check="copies", text="much later")
    folder = trial.run.checkpoints / "global_step30"
    folder.mkdir(parents=True)
    write_record(folder, CheckpointRecord(30, 240, {}, "bf16", {}, {}))
    changed, skipped, finding = restart()["causes"]
    assert (changed, finding) == ("A SETTING", "A FINDING") and has_parts(skipped, "step 32", "A GRADIENT")
    assert restart()["not_known"] == ["WHAT IS UNKNOWN"]
    check_text(without_ages(status().stdout))
    assert attempt.name == "0002"


def test_a_checkpoint_that_failed_its_checks_is_a_cause(trial: Any) -> None:
    train(trial, "0001", losses(1, 30))
    train(trial, "0002", losses(31, 36, rise=0.5))
    folder = trial.run.checkpoints / "global_step30"
    folder.mkdir(parents=True)
    health = {"passed": False, "step": 30, "findings": ["A FINDING"]}
    write_record(folder, CheckpointRecord(30, 240, {}, "bf16", {}, {}, health=health))
    [cause] = restart()["causes"]
    assert has_parts(cause, "global_step30", "A FINDING")


def test_records_of_the_same_step_show_other_settings(trial: Any) -> None:
    train(trial, "0001", losses(1, 35))
    train(trial, "0002", losses(31, 36, rise=0.5), learning_rate=1e-3, global_batch_size=16)
    found = restart()
    assert has_parts(found["causes"][0], "learning rate", "step 31", "0.001, 0.0001 in attempt 0001")
    assert has_parts(found["causes"][1], "global batch size", "step 31", "16, 8 in attempt 0001")
    assert "in attempt 0001" in found["text"]


def test_a_run_that_counts_its_samples_otherwise_reads_other_data(trial: Any) -> None:
    train(trial, "0001", losses(1, 30))
    train(trial, "0002", losses(31, 36, rise=0.3), consumed_samples=8)
    [cause] = restart()["causes"]
    assert has_parts(cause, "step 31", "sample 0", 240)


def test_the_losses_come_from_as_many_attempts_as_are_needed(trial: Any) -> None:
    """Attempt 2 was killed after two steps, which attempt 3 repeats."""
    train(trial, "0001", losses(1, 30))
    train(trial, "0002", losses(26, 27))
    train(trial, "0003", losses(26, 31, rise=0.5))
    found = restart()
    assert (found["verdict"], found["after_attempt"], found["step"]) == ("spike", "0002", 26)
    train(trial, "0004", losses(32, 33, rise=0.5))
    assert restart()["step"] == 32


def test_too_few_steps_are_not_known(trial: Any) -> None:
    train(trial, "0001", losses(1, 3))
    train(trial, "0002", losses(4, 6, rise=3.0))
    assert restart()["verdict"] == "unknown"


def test_earlier_attempts_without_losses_are_not_known(trial: Any, check_text: CheckText) -> None:
    train(trial, "0002", losses(31, 36))
    texts = [restart()["text"]]
    assert restart()["verdict"] == "unknown"
    trial.add_attempt("0003")
    trial.event(0, "load", 20, path=str(trial.run.checkpoints / "global_step36"), checkpoint_step=36)
    check_text(*texts, restart()["text"])


def test_programs_that_print_their_steps_are_read_too(trial: Any) -> None:
    trial.attempt.log_file(3).write_text("".join(LINE.format(step=s, loss=x) for s, x in losses(1, 30).items()))
    attempt = trial.add_attempt("0002")
    attempt.log_file(3).write_text("".join(LINE.format(step=s, loss=x) for s, x in losses(31, 36, rise=0.5).items()))
    found = restart()
    assert (found["verdict"], found["checkpoint"]) == ("spike", None)
    assert found["compare"] == [
        f"bsl diff-weights --seam {trial.run.attempt('0001').log_file(3)} {attempt.log_file(3)}"
    ]


def test_a_checkpoint_of_another_run_continues_that_run(trial: Any, make_trial: Any, tmp_path: Path) -> None:
    other = make_trial("other")
    train(other, "0001", losses(1, 30))
    shutil.rmtree(trial.run.attempt("0001").path)
    folder = other.run.checkpoints / "global_step30"
    attempt = trial.add_attempt("0001")
    trial.event(0, "load", 50, path=str(folder), checkpoint_step=30)
    for step, loss in losses(31, 36, rise=0.5).items():
        trial.event(TELLER, "step", 40, step=step, loss=loss)
    assert restart()["verdict"] == "spike" and attempt.name == "0001"


def test_torn_records_are_no_error(trial: Any) -> None:
    train(trial, "0001", losses(1, 30))
    attempt = train(trial, "0002", losses(31, 36))
    with attempt.event_file(TELLER).open("a") as stream:
        stream.write('{"kind": "step", "step": 37, "lo\n[1]\n{"kind": "step", "step": null, "loss": 1}\n')
    assert restart()["verdict"] == "no jump"
