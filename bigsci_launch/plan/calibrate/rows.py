"""Measured rows: a CSV file, often kept by hand, with a setup and its measurements in each row.

Cells may be empty. If the others do not describe a setup, the row is not priced and the reason is reported. Unknown
columns are kept unchanged.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from bigsci_launch.config.rules.own_cut import is_cut_by_deepspeed
from bigsci_launch.errors import DataError
from bigsci_launch.gpus import gpu_named
from bigsci_launch.plan.calibrate.cells import Cells
from bigsci_launch.plan.calibrate.columns import (
    Program,
    expert_shards_of,
    method_of,
    precision_of,
    program_of,
    shape_of,
    technique_of,
    topology_of,
)
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import AXIS_NAMES, Topology
from bigsci_launch.typed_path import open_typed

REQUIRED = ("nlayers", "nhidden", "nheads", "seq", "vocab", "dp", "tp", "pp", "mbs", "gbs")

LAYOUT = tuple(axis for axis in AXIS_NAMES if axis != "ep")
"""Columns whose product is the number of ranks. `ep` spreads experts inside these."""

BF16_OPTIMIZER_DAY = date(2022, 2, 28)
"""First day of DeepSpeed's BF16 optimizer in the measured rows; bf16 before it accumulated gradients in bf16."""

BALANCE_DAY = date(2023, 12, 15)
"""Release of DeepSpeed 0.12.5, which cuts layers by the rule of DeepSpeed#4312."""


@dataclass(frozen=True, slots=True)
class MeasuredRow(Cells):
    """One line of the table."""

    @property
    def name(self) -> str:
        return self.text("row_id") or self.where

    @property
    def section(self) -> str:
        return self.text("section")

    @property
    def day(self) -> date | None:
        try:
            return date.fromisoformat(self.text("date"))
        except ValueError:
            return None

    def is_scored(self, what: Literal["time", "mem", "oom"]) -> bool:
        """Return whether the row counts for an error; if the cell is empty, it does."""
        column = f"score_{what}"
        return self.flag(column) if self.text(column) else True

    @property
    def seconds(self) -> float | None:
        """Measured seconds of a step, or those that its tokens per second and GPU give, or None."""
        seconds = self.number("sec_per_it")
        if seconds is None and (rate := self.number("tokens_per_s_per_gpu")):
            tokens = math.prod(self.number(column) or 0 for column in ("gbs", "seq"))
            ranks = math.prod(self.number(column) or 1 for column in LAYOUT)
            seconds = tokens / (rate * ranks)
        return seconds if seconds and seconds > 0 else None

    @property
    def memory_gib(self) -> float | None:
        memory = self.number("mem_gb")
        return memory if memory and memory > 0 else None


def read_rows(path: Path) -> tuple[list[str], list[MeasuredRow]]:
    """Return the columns and rows of the CSV file at `path`.

    Raises:
        DataError: the file cannot be read, is not CSV, or lacks columns that a setup needs.
    """
    try:
        with TextIOWrapper(open_typed(path), encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = list(reader.fieldnames or [])
            lines = [(_cells(line), f"{path}:{reader.line_num}") for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: {error}") from error
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        hint = "docs/how-to/plan.md lists the columns of measured rows"
        raise DataError(f"{path}: no column {', '.join(missing)}", hint=hint)
    assumed = _assumed([cells for cells, _ in lines])
    return columns, [MeasuredRow(cells, where, assumed) for cells, where in lines]


def _assumed(lines: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return assumed values for what is often left out: whether launches blocked, as in most rows that say so."""
    said = Counter(cells["launch_blocking"] for cells in lines if cells.get("launch_blocking"))
    return {"launch_blocking": said.most_common(1)[0][0]} if said else {}


def _cells(line: dict[str, str | list[str]]) -> dict[str, str]:
    return {key: value for key, value in line.items() if isinstance(key, str) and isinstance(value, str)}


def setup_of(row: MeasuredRow) -> Setup | str:
    """Return the setup that a row describes, or why it cannot be priced."""
    try:
        for column in REQUIRED:
            row.size(column)
        setup = _build(row)
        num_empty = setup.layers_per_stage.count(0)
    except ValueError as error:
        return str(error)
    if num_empty and is_cut_by_deepspeed(setup.framework):
        return f"{num_empty} of {setup.topology.pp} stages have no transformer layer"
    return setup


def _build(row: MeasuredRow) -> Setup:
    """Return the setup of a row.

    Raises:
        ValueError: the row describes no run, or one that is not modelled.
    """
    program, topology, day = program_of(row), topology_of(row), row.day
    ranks_per_node = _ranks_per_node(row, topology)
    shape, technique = shape_of(row, program), technique_of(row, program, topology)
    _require_run(row, program, topology, ranks_per_node)
    precision = precision_of(row, program)
    accumulates = precision in ("bf16", "fp8") and (not program.is_deepspeed or _has_bf16_optimizer(row))
    accumulates = accumulates and row.choice("gradients", {"fp32": True, "bf16": False}, True)
    return Setup(
        shape=shape,
        topology=topology,
        micro_batch_size=row.size("mbs"),
        global_batch_size=row.size("gbs"),
        ranks_per_node=ranks_per_node,
        nodes_per_domain=_nodes_per_domain(row, ranks_per_node),
        partition_method=method_of(row, program, shape.num_layers, topology.pp, technique.chunks_per_rank),
        precision=precision,
        has_fp32_gradients=accumulates,
        technique=_with_optimizer(technique, program, accumulates),
        partition_rule=PartitionRule.FILL if day and day < BALANCE_DAY else PartitionRule.BALANCE,
        has_blocking_launches=row.flag("launch_blocking") if program.named is None else _says_blocking(row),
        framework=program.framework,
        expert_shards=expert_shards_of(row, shape, topology),
        day=day,
    )


def _nodes_per_domain(row: MeasuredRow, ranks_per_node: int) -> int:
    """Return the nodes that NVLink connects, by what is known of the row's GPU."""
    known = gpu_named(row.text("gpu"))
    return max(1, (known.nvlink_domain or 1) // ranks_per_node) if known else 1


def _ranks_per_node(row: MeasuredRow, topology: Topology) -> int:
    """Return the GPUs per node that the row gives, else 8, or all ranks if they are fewer."""
    gpus, nodes = row.number("gpus"), row.number("nodes")
    if gpus and nodes and gpus % nodes == 0:
        return int(gpus / nodes)
    return min(8, topology.world_size)


def _require_run(row: MeasuredRow, program: Program, topology: Topology, ranks_per_node: int) -> None:
    """Raise ValueError if the sizes cannot be a run. A row that names its framework and its nodes is believed where
    tensor parallelism leaves a node, as in the domains of GB200."""
    world, gpus, tp, dp = topology.world_size, row.number("gpus"), topology.tp, topology.dp
    heads, sharing = row.size("nheads"), row.optional_size("kv_heads") or row.size("nheads")
    micro, batch, length = row.size("mbs"), row.size("gbs"), row.size("seq")
    is_replicated = program.framework in ("megatron", "fsdp") and tp % sharing == 0
    is_believed = program.named is not None and bool(row.number("nodes"))
    problems = (
        (gpus and world != gpus, f"{_product(topology)} = {world}, but gpus is {gpus or 0:g}"),
        (tp > ranks_per_node and not is_believed, f"tp {tp} is more than the {ranks_per_node} GPUs of a node"),
        (batch % (micro * dp), f"gbs {batch} is not a multiple of mbs {micro} x dp {dp} = {micro * dp}"),
        (
            program.is_deepspeed and topology.pp > 1 and (row.number("zero") or 0) > 1,
            f"ZeRO stage {row.text('zero')} cannot be used with a pipeline",
        ),
        (heads % tp, f"{heads} heads are not a multiple of tp {tp}"),
        (sharing % tp and not is_replicated, f"kv_heads {sharing} is not a multiple of tp {tp}"),
        (length % topology["cp"], f"seq {length} is not a multiple of cp {topology['cp']}"),
    )
    for is_wrong, reason in problems:
        if is_wrong:
            raise ValueError(reason)


def _product(topology: Topology) -> str:
    sizes = [("dp", topology.dp), ("tp", topology.tp), ("pp", topology.pp), ("cp", topology["cp"])]
    return " x ".join(f"{axis} {size}" for axis, size in sizes if axis != "cp" or size > 1)


def _with_optimizer(technique: Technique, program: Program, accumulates: bool) -> Technique:
    """Return the technique with what DeepSpeed's BF16 optimizer always does: it shards its state."""
    if program.is_deepspeed and accumulates and technique.zero_stage == 0:
        return replace(technique, zero_stage=1)
    return technique


def _says_blocking(row: MeasuredRow) -> bool:
    """Return whether the row itself says that launches blocked, whatever is assumed of others."""
    return row.cells.get("launch_blocking", "").strip() == "1"


def _has_bf16_optimizer(row: MeasuredRow) -> bool:
    if "BF16 optimizer" in row.text("notes"):
        return True
    return row.day is None or row.day >= BF16_OPTIMIZER_DAY


@dataclass(frozen=True, slots=True)
class Measurement:
    """A setup with its measurements. `section` groups rows that were compared with each other at the time. `gpu`,
    `site` and `network_gb_per_s`, the nominal rate of a node's adapters, are where it ran, as far as a row says it."""

    name: str
    section: str
    setup: Setup
    seconds: float | None
    memory_gib: float | None
    ran_out_of_memory: bool
    gpu: str = ""
    site: str = ""
    network_gb_per_s: float | None = None


def measurements_of(rows: Sequence[MeasuredRow]) -> tuple[list[Measurement], list[str]]:
    """Return the usable measurements, and `NAME: reason` for every other row."""
    found, left = [], []
    for row in rows:
        setup = setup_of(row)
        seconds = row.seconds if row.is_scored("time") else None
        memory = row.memory_gib if row.is_scored("mem") else None
        if isinstance(setup, str):
            left.append(f"{row.name}: {setup}")
        elif seconds is None and memory is None and not row.flag("oom"):
            left.append(f"{row.name}: no measurement that counts")
        else:
            place = row.text("gpu"), row.text("site"), row.number("network_gb_per_s")
            found.append(Measurement(row.name, row.section, setup, seconds, memory, row.flag("oom"), *place))
    return found, left
