"""The section `survive` of a run file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from bigsci_launch.config.schema.section import Section


class SurviveSection(Section):
    """How a run continues within its job when a rank, a node or a device dies, or hangs. `survive: true` is short for
    the defaults.

    With `bsl train` the surviving ranks stay, and lost state comes from the memory of others; another program is
    started again on all ranks, or uses `Survivor` to stay as well."""

    in_place: bool = False
    """Whether the program of `run.command` uses `Survivor`, so that its surviving ranks stay; those of `bsl train`
    always do."""

    snapshot_steps: PositiveInt = 1
    """Steps between snapshots, `bsl train` only. Each rank keeps two of its optimizer state in host memory, and two of
    another rank's, on another node if there is one."""

    standby: bool = True
    """Whether a second process of each rank waits, with everything imported, to take the place of the first one if that
    dies; for ranks that stay."""

    shrink: bool = True
    """Whether the run continues with fewer data-parallel replicas when no spare node is left. The global batch size is
    kept."""

    failures: NonNegativeInt = 1
    """How many ranks may be lost at the same time, so that all state is still in memory: with `parallelism.engine:
    uneven`, which forms one pipeline more if there are enough ranks, and else says which number it keeps."""

    on_unexplained_hang: Literal["wait", "restart"] = "wait"
    """What a watcher with `monitor.watch: act` does with a hang for which no rank can be blamed. `restart`: all ranks
    leave the step and begin again from the last snapshot, or from their checkpoint."""


def survive_defaults(value: Any) -> Any:
    """Return the section for `survive: true`, and None for `survive: false`."""
    if isinstance(value, bool):
        return {} if value else None
    return value


def or_switch(schema: dict[str, Any]) -> None:
    """Say in the JSON schema that the section may be written as `true` or `false`."""
    schema["anyOf"].insert(0, {"type": "boolean"})
