"""Starts a run with `bsl submit --local`, injures it at the right moment, and waits for its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json
from recovering.cases import EVALUATE_EVERY, SAVE_EVERY, STEPS, Case, Injury, Layout

BSL = "from bigsci_launch.cli.main import main; main()"
LIMIT_S = 240.0
POLL_S = 0.002
HEARTBEAT = {"in a step": "step", "in a save": "save", "in an evaluation": "eval"}


@dataclass(frozen=True, slots=True)
class Done:
    """An injury that was done: when, seconds since the epoch, and to which processes."""

    injury: Injury
    time: float
    pids: tuple[int, ...]


def write_run_file(
    folder: Path,
    name: str,
    layout: Layout,
    corpus: Path,
    survive: dict[str, Any] | None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run file of a tiny GPT; `more` has further sections, or further keys of those that are here."""
    document: dict[str, Any] = {
        "run": {"name": name, "root": str(folder / "runs")},
        "slurm": {"site": "local"},
        "parallelism": {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.dp,
        },
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 300,
            "vocab_size_multiple": 4,
            "sequence_length": 32,
            "dropout": layout.dropout,
        },
        "training": {
            "steps": STEPS,
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "precision": layout.precision,
            "device": "cpu",
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4},
        "data": {"prefix": str(corpus), "held_out": 0.1},
        "checkpoint": {"save_interval": SAVE_EVERY},
        "monitor": {"eval_interval": EVALUATE_EVERY, "eval_batches": 2},
        "guards": {"interval": 4},
        **({} if survive is None else {"survive": survive}),
    }
    for section, value in (more or {}).items():
        document[section] = {**document.get(section, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document))
    return path


def run_undisturbed(path: Path, run: RunDir) -> None:
    """Run it to its end.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"{path.name}: the undisturbed run ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def run_injured(
    path: Path, run: RunDir, case: Case, injuries_folder: Path, backend: Path | None = None
) -> tuple[int, list[Done]]:
    """Start a run, injure it, and return its exit code (124: it did not end in time) and what was done.

    `backend` is the folder of a backend over which its ranks communicate.
    """
    injuries_folder.mkdir(parents=True, exist_ok=True)
    site = Path(__file__).parent / "injured_site"
    path_of_python = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "BSL_INJURIES": str(injuries_folder), "PYTHONPATH": path_of_python}
    if backend is not None:
        environment["BSL_NCCL_LIKE"] = str(backend)
    command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
    with path.with_suffix(".out").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    until = time.monotonic() + LIMIT_S
    done: list[Done] = []
    for injury in case.injuries:
        attempt = _wait_for_moment(process, run, case, injury, until)
        if attempt is None:
            break
        done.append(Done(injury, time.time(), _injure(attempt, injury, injuries_folder)))
    try:
        return process.wait(max(1.0, until - time.monotonic())), done
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        return 124, done


def _wait_for_moment(
    process: subprocess.Popen[bytes], run: RunDir, case: Case, injury: Injury, until: float
) -> AttemptDir | None:
    """Wait for the moment, and return the attempt; None if it did not come."""
    while process.poll() is None and time.monotonic() < until:
        attempt = run.latest_attempt()
        if attempt is not None and _has_come(attempt, case.layout, injury):
            time.sleep(injury.delay_s)
            return attempt
        time.sleep(POLL_S)
    return None


def _has_come(attempt: AttemptDir, layout: Layout, injury: Injury) -> bool:
    if injury.moment == "in the recovery":
        return any(record["event"] == "failed" for record in read_generations(attempt))
    if injury.moment == "in the first step":
        return any(each["phase"] == "step" for each in _events(attempt, injury.victims[0], "heartbeat"))
    waiting = next((each["time"] for each in read_generations(attempt) if each.get("phase") == "standby"), None)
    if waiting is None:
        return False
    teller = layout.tp * layout.dp * (layout.pp - 1)
    done = [each for each in _events(attempt, teller, "step") if each["time"] > waiting]
    if len(done) < injury.wait:
        return False
    if injury.moment == "at the end of a step":
        return len(done) > injury.wait and time.time() - done[-1]["time"] < 0.02
    last = _events(attempt, injury.victims[0], "heartbeat")[-1]
    return bool(last["phase"] == HEARTBEAT[injury.moment] and time.time() - last["time"] < 0.02)


def _events(attempt: AttemptDir, rank: int, kind: str) -> list[dict[str, Any]]:
    path = attempt.event_file(rank)
    return [record for record in read_events(path) if record["kind"] == kind] if path.exists() else []


def read_generations(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Return the records of the controller; a torn last line is left out."""
    try:
        lines = attempt.generations.read_text().split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def _injure(attempt: AttemptDir, injury: Injury, folder: Path) -> tuple[int, ...]:
    records = _records_of(attempt, injury.victims)
    pids = tuple(int(record["runner_pid" if injury.kind == "runner" else "pid"]) for record in records)
    for pid in pids:
        _hurt(pid, injury.kind, folder)
    return pids


def _records_of(attempt: AttemptDir, victims: Sequence[int]) -> list[dict[str, Any]]:
    """Return who the victims are. After replicas were lost there are fewer ranks, so theirs are counted on from 0
    again; between two generations there are none, until the next one begins."""
    while attempt.path.exists():
        files = rank_files(attempt.pids, ".json")
        try:
            return [read_json(files[sorted(files)[rank % len(files)]]) for rank in victims]
        except (RunDirError, ZeroDivisionError):
            time.sleep(POLL_S)
    raise RunDirError(f"{attempt.path} was removed")


def _hurt(pid: int, kind: str, folder: Path) -> None:
    if kind in ("exit", "exception"):
        hidden = folder / f".{pid}"
        hidden.write_text(kind)
        hidden.rename(folder / str(pid))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def steps_of(attempt: AttemptDir, layout: Layout) -> list[dict[str, Any]]:
    """Return all records of steps, in the order in which they were written; a step that was done again comes twice."""
    tellers: Sequence[int] = range(layout.ranks)
    found = [each for rank in tellers for each in _events(attempt, rank, "step")]
    return sorted(found, key=lambda each: each["time"])
