"""Reads measured runs from tables of rows, run directories of bsl, and logs in Megatron's format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from bigsci_launch.config.load import load_resolved
from bigsci_launch.errors import BslError, DataError
from bigsci_launch.iteration_line import parse_iterations
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, measurements_of, read_rows
from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.memory import GIB
from bigsci_launch.plan.shape.setup import Setup, require_framework
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, open_run

_Kind = TypeVar("_Kind", bound=Hashable)
WARM_UP_STEPS = 2
"""First steps of a job that are not counted, because they compile, allocate and fill caches."""

_ARGUMENT = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*) \.{3,} (\S+)")

# Columns of measured rows, and the Megatron arguments with their values.
_COLUMN_ARGUMENTS = {
    "nlayers": "num_layers",
    "nhidden": "hidden_size",
    "nheads": "num_attention_heads",
    "seq": "seq_length",
    "vocab": "padded_vocab_size",
    "dp": "data_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "mbs": "micro_batch_size",
    "gpus": "world_size",
    "partition_method": "pp_partition_method",
}


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
        typical = _typical(_attempt_steps(attempt))
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


def _typical(steps: Iterable[tuple[_Kind, float]]) -> tuple[_Kind, float] | None:
    """Return the most common sizes and the median seconds of their steps, without the first steps."""
    counted = list(steps)[WARM_UP_STEPS:]
    if not counted:
        return None
    sizes = Counter(sizes for sizes, _ in counted).most_common(1)[0][0]
    return sizes, median(seconds for other, seconds in counted if other == sizes)


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
    """Return the run whose arguments and steps are in a log of Megatron-LM or Megatron-DeepSpeed.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    typical = _typical(_log_steps(text))
    if typical is None:
        return [], [f"{path}: no `elapsed time per iteration` after the first {WARM_UP_STEPS} steps"]
    arguments = dict(_ARGUMENT.findall(text))
    missing = [
        name for column, name in _COLUMN_ARGUMENTS.items() if column != "partition_method" and name not in arguments
    ]
    if missing:
        return [], [f"{path}: the log does not begin with Megatron's arguments (no {', '.join(missing)})"]
    return measurements_of([_log_row(path, arguments, *typical)])


def _log_steps(text: str) -> list[tuple[int, float]]:
    return [
        (line.global_batch_size, line.seconds)
        for line in parse_iterations(text)
        if line.global_batch_size is not None and line.seconds is not None
    ]


def _log_row(path: Path, arguments: dict[str, str], global_batch_size: int, seconds: float) -> MeasuredRow:
    """Return the log as one measured row."""
    cells = {column: arguments.get(name, "") for column, name in _COLUMN_ARGUMENTS.items()}
    return MeasuredRow(
        {
            **cells,
            "partition_method": cells["partition_method"].strip("'\"").replace("None", ""),
            "row_id": path.name,
            "section": path.stem,
            "gbs": str(global_batch_size),
            "precision": next((name for name in ("bf16", "fp16") if arguments.get(name) == "True"), "fp32"),
            "zero": arguments.get("zero_stage", "1"),
            "sec_per_it": str(seconds),
        },
        str(path),
    )
