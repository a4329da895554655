"""Measured rows: a CSV file, often kept by hand, with a setup and its measurements in each row.

Cells may be empty. If the others do not describe a setup, the row is not priced and the reason is reported. Unknown
columns are kept unchanged.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Literal

from bigsci_launch.config.schema.technique import Precision
from bigsci_launch.errors import DataError
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup
from bigsci_launch.topology import Topology

REQUIRED = ("nlayers", "nhidden", "nheads", "seq", "vocab", "dp", "tp", "pp", "mbs", "gbs")

BF16_OPTIMIZER_DAY = date(2022, 2, 28)
"""First day of DeepSpeed's BF16 optimizer in the measured rows; bf16 before it accumulated gradients in bf16."""

BALANCE_DAY = date(2023, 12, 15)
"""Release of DeepSpeed 0.12.5, which cuts layers by the rule of DeepSpeed#4312."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One line of the table: its original cells, its place for messages, and the assumed values of empty cells."""

    cells: dict[str, str]
    where: str
    assumed: dict[str, str] = field(default_factory=dict)

    def text(self, column: str) -> str:
        return (self.cells.get(column) or self.assumed.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """Return the number in a cell, or None."""
        try:
            return float(self.text(column))
        except ValueError:
            return None

    def flag(self, column: str) -> bool:
        return self.number(column) == 1

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
        """Measured seconds of a step, or None."""
        seconds = self.number("sec_per_it")
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
        with path.open(newline="", encoding="utf-8-sig") as stream:
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
    """Return assumed values for what people often leave out: whether launches blocked, as in most rows that say so."""
    said = Counter(cells["launch_blocking"] for cells in lines if cells.get("launch_blocking"))
    return {"launch_blocking": said.most_common(1)[0][0]} if said else {}


def _cells(line: dict[str, str | list[str]]) -> dict[str, str]:
    return {key: value for key, value in line.items() if isinstance(key, str) and isinstance(value, str)}


def setup_of(row: MeasuredRow) -> Setup | str:
    """Return the setup that a row describes, or why it cannot be priced."""
    sizes: dict[str, int] = {}
    for column in REQUIRED:
        number = row.number(column)
        if number is None:
            return f"{column} is empty" if not row.text(column) else f"{column} is not a number: {row.text(column)!r}"
        if number < 1 or number != int(number):
            return f"{column} is {row.text(column)}, not a positive whole number"
        sizes[column] = int(number)
    ranks_per_node = _ranks_per_node(row, sizes)
    problem = _problem(row, sizes, ranks_per_node)
    return problem or _build(row, sizes, ranks_per_node)


def _ranks_per_node(row: MeasuredRow, sizes: dict[str, int]) -> int:
    """Return the GPUs per node that the row gives, else 8, or all ranks if they are fewer."""
    gpus, nodes = row.number("gpus"), row.number("nodes")
    if gpus and nodes and gpus % nodes == 0:
        return int(gpus / nodes)
    return min(8, sizes["dp"] * sizes["tp"] * sizes["pp"])


def _problem(row: MeasuredRow, sizes: dict[str, int], ranks_per_node: int) -> str | None:
    """Return why the sizes cannot be a run, or None."""
    world, gpus = sizes["dp"] * sizes["tp"] * sizes["pp"], row.number("gpus")
    micro = sizes["mbs"] * sizes["dp"]
    if gpus and world != gpus:
        return f"dp {sizes['dp']} x tp {sizes['tp']} x pp {sizes['pp']} = {world}, but gpus is {gpus:g}"
    if sizes["tp"] > ranks_per_node:
        return f"tp {sizes['tp']} is more than the {ranks_per_node} GPUs of a node"
    if sizes["gbs"] % micro:
        return f"gbs {sizes['gbs']} is not a multiple of mbs {sizes['mbs']} x dp {sizes['dp']} = {micro}"
    if sizes["pp"] > 1 and (row.number("zero") or 0) > 1:
        return f"ZeRO stage {row.text('zero')} cannot be used with a pipeline"
    if sizes["nheads"] % sizes["tp"]:
        return f"{sizes['nheads']} heads are not a multiple of tp {sizes['tp']}"
    return None


def _build(row: MeasuredRow, sizes: dict[str, int], ranks_per_node: int) -> Setup | str:
    day, precision = row.day, row.text("precision") or "fp16"
    if precision not in ("fp16", "bf16", "fp32"):
        return f"precision {precision!r} is not one of fp16, bf16, fp32"
    accumulates = precision == "bf16" and _has_bf16_optimizer(row)
    setup = Setup(
        shape=ModelShape(
            sizes["nlayers"], sizes["nhidden"], sizes["nheads"], 4 * sizes["nhidden"], sizes["seq"], sizes["vocab"]
        ),
        topology=Topology(tp=sizes["tp"], pp=sizes["pp"], dp=sizes["dp"]),
        micro_batch_size=sizes["mbs"],
        global_batch_size=sizes["gbs"],
        ranks_per_node=ranks_per_node,
        partition_method=row.text("partition_method") or "type:transformer",
        precision=_precision(precision),
        has_fp32_gradients=accumulates,
        technique=replace(UNFUSED_2021, zero_stage=1 if accumulates or row.number("zero") != 0 else 0),
        partition_rule=PartitionRule.FILL if day and day < BALANCE_DAY else PartitionRule.BALANCE,
        has_blocking_launches=row.flag("launch_blocking"),
        framework="deepspeed",
        day=day,
    )
    try:
        num_empty = setup.layers_per_stage.count(0)
    except ValueError as error:
        return str(error)
    return f"{num_empty} of {setup.topology.pp} stages have no transformer layer" if num_empty else setup


def _precision(text: str) -> Precision:
    return "fp16" if text == "fp16" else "bf16" if text == "bf16" else "fp32"


def _has_bf16_optimizer(row: MeasuredRow) -> bool:
    if "BF16 optimizer" in row.text("notes"):
        return True
    return row.day is None or row.day >= BF16_OPTIMIZER_DAY


@dataclass(frozen=True, slots=True)
class Measurement:
    """A setup with its measurements. `section` groups rows that were compared with each other at the time."""

    name: str
    section: str
    setup: Setup
    seconds: float | None
    memory_gib: float | None
    ran_out_of_memory: bool


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
            found.append(Measurement(row.name, row.section, setup, seconds, memory, row.flag("oom")))
    return found, left
