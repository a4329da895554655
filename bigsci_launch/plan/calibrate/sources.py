"""Reads measured runs from tables of rows, run directories of bsl, and logs of other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError, DataError
from bigsci_launch.plan.calibrate.logs import deepspeed, megatron, nemo, torchtitan
from bigsci_launch.plan.calibrate.logs.steps import WARM_UP_STEPS, typical_step
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, measurements_of, read_rows
from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.memory import GIB
from bigsci_launch.plan.shape.setup import Setup, require_framework
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, open_run
from bigsci_launch.typed_path import open_typed

_LOGS: tuple[tuple[tuple[str, ...], Callable[[str], dict[str, str]]], ...] = (
    (megatron.STEP_SIGNS, megatron.read_megatron),
    (torchtitan.STEP_SIGNS, torchtitan.read_torchtitan),
    (nemo.STEP_SIGNS, nemo.read_nemo),
    (deepspeed.STEP_SIGNS, deepspeed.read_deepspeed),
)
"""What the steps of a program look like, and its reader. Megatron-DeepSpeed prints steps of both."""


def read_sources(paths: Sequence[Path]) -> tuple[list[Measurement], list[str]]:
    """Return what was measured in all of `paths`, and why the rest cannot be used.

    Raises:
        DataError: a source cannot be read, or none has a measurement.
    """
    found: list[Measurement] = []
    left: list[str] = []
    for path in paths:
        measured, reasons = _read_source(path)
        found += measured
        left += reasons
    if not any(measurement.seconds or measurement.memory_gib for measurement in found):
        raise DataError(
            f"no measurement in {', '.join(map(str, paths))}" + "".join(f"; {reason}" for reason in left[:3]),
            hint="rows need sec_per_it or mem_gb; runs need finished steps",
        )
    return found, left


def _read_source(path: Path) -> tuple[list[Measurement], list[str]]:
    if path.is_dir():
        return _read_run(path)
    if path.suffix == ".csv":
        return measurements_of(read_rows(path)[1])
    return _read_log(path)


def _read_run(path: Path) -> tuple[list[Measurement], list[str]]:
    """Return one measurement for each attempt that finished steps."""
    run = open_run(path)
    found, left = [], []
    for attempt in run.attempts():
        name = f"{run.name}/{attempt.name}"
        typical = typical_step(_attempt_steps(attempt))
        if typical is None:
            left.append(f"{name}: no step after the first {WARM_UP_STEPS}")
            continue
        sizes, seconds = typical
        try:
            setup = _attempt_setup(attempt, sizes)
        except BslError as error:
            left.append(f"{name}: {error}")
            continue
        found.append(Measurement(name, run.name, setup, seconds, None, False))
        found += _trials(attempt, name, run.name, setup)
    return found, left


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The batch sizes of a step. `micro` is None in records of older versions: the run file says it."""

    batch: int
    micro: int | None


def _attempt_setup(attempt: AttemptDir, sizes: _Sizes) -> Setup:
    config = load_resolved(attempt.config)
    require_framework(config)
    topology = config.parallelism.topology(1)
    ranks_per_node = max(1, topology.world_size // config.slurm.nodes)
    setup = settle_method(Setup.of_config(config, topology, ranks_per_node), Calibration()).with_batch_size(sizes.batch)
    return setup if sizes.micro is None else replace(setup, micro_batch_size=sizes.micro)


def _attempt_steps(attempt: AttemptDir) -> list[tuple[_Sizes, float]]:
    """Return the sizes and seconds of every step, from the first rank that recorded any."""
    for path in sorted(attempt.events.glob("*.jsonl")):
        steps = [
            (_Sizes(int(record["global_batch_size"]), record.get("micro_batch_size")), float(record["seconds"]))
            for record in read_events(path)
            if record.get("kind") == "step" and record.get("seconds") and record.get("global_batch_size")
        ]
        if steps:
            return steps
    return []


def _trials(attempt: AttemptDir, name: str, section: str, setup: Setup) -> list[Measurement]:
    """Return the memory that was seen when `training.micro_batch_size: auto` tried sizes; none on a CPU."""
    found = []
    for record in read_events(attempt.event_file(0)):
        if record.get("kind") == "trial" and record.get("used_bytes") is not None:
            tried = replace(setup, micro_batch_size=record["size"])
            memory = record["used_bytes"] / GIB if record["fits"] else None
            title = f"{name}, trial of {record['size']}"
            found.append(Measurement(title, section, tried, None, memory, not record["fits"]))
    return found


def _read_log(path: Path) -> tuple[list[Measurement], list[str]]:
    """Return the run in a log, or why there is none that can be priced.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_typed(path) as stream:
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    read = next((read for signs, read in _LOGS if any(sign in text for sign in signs)), None)
    if read is None:
        signs = ", ".join(f"`{signs[0].strip()}`" for signs, _ in _LOGS)
        return [], [f"{path}: no step of Megatron, torchtitan, NeMo or DeepSpeed ({signs})"]
    try:
        cells = read(text)
    except ValueError as error:
        return [], [f"{path}: {error}"]
    return measurements_of([MeasuredRow({**cells, "row_id": path.name, "section": path.stem}, str(path))])
