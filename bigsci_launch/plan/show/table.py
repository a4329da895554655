"""The table of plans. Where there is little room, it leaves out columns instead of breaking words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigsci_launch.plan.choose.answer import Answer
from bigsci_launch.plan.choose.search import Plan
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import price_stage_memory
from bigsci_launch.plan.shape.setup import Setup, describe_stages
from bigsci_launch.plan.show.throughput import Throughput, throughput_of

PIPE_WIDTH = 100
"""Columns of text where the width of the reader's screen is unknown."""

_BETWEEN, _MARGIN = 3, 2
"""Characters between columns, and around the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan with its rank, `?` if it is doubtful, and the calibration that priced it."""

    rank: str
    plan: Plan
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """A column: its heading (`>` before numbers), the cell of a row, and when it is left out: the highest first; None:
    never."""

    heading: str
    cell: Callable[[Row], str]
    left_out: int | None = None


def _seconds(row: Row) -> str:
    price = row.plan.price
    return f"{price.seconds:.{2 if price.seconds < 10 else 1}f} ±{100 * price.band:.0f}%"


def _tokens(row: Row) -> str:
    return f"{_throughput(row).tokens_per_second:.{0 if _throughput(row).tokens_per_second >= 100 else 1}f}"


def _mfu(row: Row) -> str:
    mfu = _throughput(row).mfu
    return "?" if mfu is None else f"{100 * mfu:.0f}%"


def _throughput(row: Row) -> Throughput:
    return throughput_of(row.plan.setup, row.plan.price.seconds, row.calibration.gpu)


def _memory(row: Row) -> str:
    setup, price = row.plan.setup, row.plan.price
    middle = price_stage_memory(setup, setup.topology.pp // 2, row.calibration)
    stages = (price.first_stage, middle, price.last_stage)
    figures = "/".join(f"{stage.predicted_gib:.0f}" for stage in stages)
    return figures if price.fit == "fits" else f"{figures} {price.fit}"


def _method(row: Row) -> str:
    """Return the partition method as the table shows it next to the stages."""
    name, _, pattern = row.plan.setup.partition_method.partition(":")
    return pattern if name == "type" else name


def _axis(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.plan.setup.topology[name])


NODES = PlanColumn(">nodes", lambda row: str(row.plan.setup.num_nodes))
SHAPE = PlanColumn(
    ">L/heads", lambda row: f"{row.plan.setup.shape.num_layers}/{row.plan.setup.shape.num_attention_heads}"
)
COLUMNS = (
    PlanColumn(">#", lambda row: row.rank),
    PlanColumn(">tp", _axis("tp")),
    PlanColumn(">pp", _axis("pp")),
    PlanColumn(">dp", _axis("dp")),
    PlanColumn(">mbs", lambda row: str(row.plan.setup.micro_batch_size)),
    PlanColumn("partition", _method, 7),
    PlanColumn("stages", lambda row: describe_stages(row.plan.setup.layers_per_stage), 3),
    PlanColumn(">s/step", _seconds),
    PlanColumn(">tok/s/GPU", _tokens, 1),
    PlanColumn(">MFU", _mfu, 0),
    PlanColumn(">TFLOP/s", lambda row: f"{_throughput(row).hardware_tflops:.0f}", 4),
    PlanColumn(">GiB", _memory),
    PlanColumn(">bubble", lambda row: f"{100 * row.plan.price.bubble:.0f}%", 5),
    PlanColumn(">days", lambda row: f"{row.plan.days:.1f}", 6),
    PlanColumn(">3 of 4", lambda row: f"{row.plan.likely_days:.1f}", 0),
)
OPTIONAL = tuple(column.heading for column in COLUMNS if (column.left_out or 0) > 2)
"""Headings of the columns that the narrow screen of a telephone has no room for."""


def plan_table(
    answer: Answer, plans: Sequence[Plan], width: int | None = None
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and lines of the table of plans that fit into `width` characters; None: all columns.

    Nodes and shapes are shown only if they vary, cp and ep only if they are more than 1.
    """
    calibration, configured = answer.request.calibration or Calibration(), answer.request.configured
    rows = [Row(str(rank) if plan.price.is_safe else "?", plan, calibration) for rank, plan in enumerate(plans, 1)]
    first, *others = COLUMNS
    shown = [first, *_varying(plans, configured), *_other_axes(configured), *others]
    cells = {column.heading: [column.cell(row) for row in rows] for column in shown}
    while width is not None and _width(shown, cells) > width:
        optional = [column for column in shown if column.left_out is not None]
        if not optional:
            break
        shown.remove(max(optional, key=lambda column: column.left_out or 0))
    lines = list(zip(*(cells[column.heading] for column in shown), strict=True))
    return tuple(column.heading for column in shown), lines


def _varying(plans: Sequence[Plan], configured: Setup) -> list[PlanColumn]:
    found = []
    if any(plan.setup.shape != configured.shape for plan in plans):
        found.append(SHAPE)
    if any(plan.setup.num_nodes != configured.num_nodes for plan in plans):
        found.append(NODES)
    return found


def _other_axes(configured: Setup) -> list[PlanColumn]:
    """Return columns of the axes that the search keeps as configured, where there are any."""
    return [PlanColumn(f">{axis}", _axis(axis)) for axis in ("cp", "ep") if configured.topology[axis] > 1]


def _width(columns: Sequence[PlanColumn], cells: dict[str, list[str]]) -> int:
    widths = (max(len(text) for text in (column.heading.lstrip(">"), *cells[column.heading])) for column in columns)
    return sum(widths) + _BETWEEN * (len(columns) - 1) + _MARGIN
