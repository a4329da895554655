"""Runs a reproduction as a job with `survive` on this machine, with a watcher that may act, until the job is over.

The fault happens in the first generation only. What does not hang is watched for a while, and then ended.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from bigsci_launch.config.load import load_run
from bigsci_launch.errors import BslError, LabError
from bigsci_launch.hang_lab.judgement import read_verdict
from bigsci_launch.hang_lab.processes import kill_sessions, wait_until_gone
from bigsci_launch.hang_lab.programs import RANK_VARIABLES
from bigsci_launch.hang_lab.recovery_outcome import Fenced, JudgedRecovery, RecoveryOutcome
from bigsci_launch.hang_lab.runner import Trial, require_possible, undisturbed
from bigsci_launch.hang_lab.slurm_runner import run_document
from bigsci_launch.hang_lab.spying import spy
from bigsci_launch.launch.prepare import plan_submission
from bigsci_launch.launch.submit import submit
from bigsci_launch.runs.attempts import read_exit, run_of
from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.read import read_generations
from bigsci_launch.runs.generations.records import Generations
from bigsci_launch.runs.layout import AttemptDir, write_json
from bigsci_launch.spy.taxonomy import State
from bigsci_launch.topology import Topology

HANG_S, WATCH_S = 750.0, 90.0
"""How long a hang may last until its job is over, and how long what is none is watched. A watcher leaves a job ten
minutes to come to its first step."""
NUM_STEPS, NEVER = 60, 10**6
POLL_S = 0.2
END_S = 45.0
FENCES = ("hung", "stopped")


def recover(trial: Trial) -> JudgedRecovery:
    """Return what became of a reproduction under `survive`. Leaves nothing behind.

    Raises:
        LabError: this machine cannot run it, or it needs preparations that a job does not make.
    """
    topology = require_possible(trial)
    reproduction = trial.reproduction
    if reproduction.stage:
        raise LabError(f"{reproduction.name} needs preparations on the node, which --recover does not make")
    must_end = reproduction.is_hang or State.CRASHED in reproduction.states
    if must_end:
        trial = replace(trial, arguments=(*trial.arguments, "--steps", str(NUM_STEPS)))
    folder = Path(tempfile.mkdtemp(prefix="bsl-lab-"))
    try:
        began = time.monotonic()
        with _submitted(trial, topology, folder) as (attempt, process):
            limit_s = HANG_S if must_end else WATCH_S
            while process.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(POLL_S)
            outcome = _outcome(attempt, time.monotonic() - began)
            if must_end and process.poll() is None:
                outcome = replace(outcome, accused=read_verdict(spy(run_of(attempt).path)).suspects)
        return JudgedRecovery(reproduction, topology, trial.culprit, outcome)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _submitted(trial: Trial, topology: Topology, folder: Path) -> Iterator[tuple[AttemptDir, subprocess.Popen[bytes]]]:
    path = folder / "run.yaml"
    variables = {**RANK_VARIABLES, **trial.environment}
    reason = "bsl hang-lab"
    env = {name: {"value": value, "reason": reason} for name, value in variables.items() if name != "MASTER_ADDR"}
    # A watcher that does not know whether a program evaluates is patient for ten minutes.
    monitor = {"watch": "act", "eval_interval": NEVER}
    more = {"slurm": {"site": "local"}, "survive": True, "monitor": monitor, "env": env}
    write_json(path, {**run_document(trial, topology, folder), **more})
    loaded = load_run(path)
    request = plan_submission(loaded, working_directory=folder, python=sys.executable, local=True)
    process = submit(loaded, request, sys.argv).process
    assert process is not None
    (request.run.path / "lab").mkdir(exist_ok=True)  # where ranks note what only the lab may know
    try:
        yield request.attempt, process
    finally:
        with undisturbed():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job, if it still runs, and its watcher.

    Raises:
        LabError: processes are left.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    kill_sessions({process.pid})
    if left := wait_until_gone({process.pid}):
        raise LabError(f"processes {left} do not end", hint="`cat /proc/PID/wchan` shows where they wait in the kernel")
    process.wait()


def _outcome(attempt: AttemptDir, seconds: float) -> RecoveryOutcome:
    ended = None
    with suppress(BslError):
        ended = read_exit(attempt)
    found = read_generations(attempt)
    causes = [(each, each.cause) for each in found.all if each.cause is not None] if found else []
    return RecoveryOutcome(
        fenced=tuple(_fenced(found)),
        num_generations=len(found.all) if found else 0,
        failures=tuple(rank_failure_text(cause, generation) for generation, cause in causes),
        reason=str(ended["reason"]) if ended else None,
        exit_code=ended.get("exit_code") if ended else None,
        seconds=seconds,
    )


def _fenced(found: Generations | None) -> Iterator[Fenced]:
    for generation in found.all if found else ():
        for failure in generation.failures:
            if failure.kind in FENCES and failure.rank is not None:
                yield Fenced(failure.rank, generation.number, failure.words or "")
