"""The contents of each pipeline stage: layers by name, parameters per rank, and what they cost.

`bsl plan` and `bsl submit --dry-run` print it; `bsl train` prints it too and compares it with what its ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.memory import count_memory, weigh_memory
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.parameters import cut_model
from bigsci_launch.plan.shape.setup import Setup


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One stage: class names of its layers, parameters on one of its ranks, and its price if it is known: milliseconds
    per micro batch, and the GiB that a rank needs."""

    stage: int
    layers: tuple[str, ...]
    num_parameters: int
    milliseconds: float | None = None
    need_gib: float | None = None


def lay_out_stages(setup: Setup, calibration: Calibration | None = None) -> tuple[StageLayout, ...]:
    """Return every stage of `setup` in order; without a calibration there are no prices.

    Raises:
        ValueError: the layers cannot be cut into stages.
    """
    setup = settle_method(setup, calibration or Calibration())
    pp, tied = setup.topology.pp, setup.shape.tied_embeddings
    cut = cut_model(
        setup.shape,
        setup.partition_method,
        pp,
        setup.partition_rule,
        setup.topology.tp,
        setup.framework,
        setup.expert_shards,
    )
    prices = _prices(setup, calibration) if calibration else [(None, None)] * pp
    found = []
    for stage, (milliseconds, need) in enumerate(prices):
        layers = cut.layers_of(stage)
        # A single stage has the tied table only once.
        is_shared = tied and pp == 1
        count = sum(layer.num_parameters for layer in (layers[:-1] if is_shared else layers))
        found.append(StageLayout(stage, tuple(layer.name for layer in layers), count, milliseconds, need))
    return tuple(found)


def _prices(setup: Setup, calibration: Calibration) -> list[tuple[float | None, float | None]]:
    constants, seconds = calibration.constants, price_setup(setup, calibration).stage_seconds
    needs = [
        weigh_memory(count_memory(setup, stage), constants, calibration.gpu)[0] for stage in range(setup.topology.pp)
    ]
    return [(1e3 * second, need) for second, need in zip(seconds, needs, strict=True)]


def layout_lines(stages: Sequence[StageLayout]) -> list[str]:
    """Return a line for every stage; neighbours with the same layers share one."""
    return [_describe(list(run)) for _, run in groupby(stages, key=lambda stage: (stage.layers, stage.num_parameters))]


def _describe(alike: Sequence[StageLayout]) -> str:
    first, last = alike[0], alike[-1]
    which = f"stage {first.stage}" if len(alike) == 1 else f"stages {first.stage}-{last.stage}"
    runs = [(name, len(list(run))) for name, run in groupby(first.layers)]
    held = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs) or "nothing"
    return f"{which}: {held}; {first.num_parameters} parameters a rank{_price(first, last)}"


def _price(first: StageLayout, last: StageLayout) -> str:
    if first.milliseconds is None or first.need_gib is None or last.need_gib is None:
        return ""
    needs = list(dict.fromkeys((f"{first.need_gib:.1f}", f"{last.need_gib:.1f}")))
    return f"; {first.milliseconds:.0f} ms a micro batch, needs {' to '.join(needs)} GiB"
