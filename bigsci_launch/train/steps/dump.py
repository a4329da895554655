"""Dumps the weights of one rank to safetensors files, for `bsl diff-weights`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import nn

from bigsci_launch.topology import Coordinate
from bigsci_launch.train.steps.companion import Built, Companion, RankSetup


def dump_weights(module: nn.Module, path: Path, *, rank: int, coordinate: Coordinate, step: int, when: str) -> None:
    """Write every parameter of this rank, by name, to `path`, atomically.

    `when` is `before` or `after` the step. The file's metadata holds rank, coordinate and step as text.
    """
    # Parameters are views of one flat buffer, but safetensors needs tensors that share no memory.
    weights = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.named_parameters()}
    about = {"rank": rank, **coordinate.as_dict(), "step": step, "when": when}
    metadata = {name: str(value) for name, value in about.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as own:
        written = Path(own) / path.name
        save_file(weights, written, metadata)
        written.replace(path)


class Dumps(Companion):
    """Dumps the weights of a rank before and after each step in `monitor.dump_weights_steps`."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup

    def after_build(self, built: Built) -> None:
        self._module = built.engine.module

    def before_step(self, step: int) -> None:
        self._dump(step, "before")

    def after_batch(self, step: int, seconds: float) -> None:
        self._dump(step, "after")

    def _dump(self, step: int, when: str) -> None:
        setup, rank = self._setup, self._setup.identity.rank
        if step in setup.config.monitor.dump_weights_steps:
            setup.report.phase("dump")
            path = setup.identity.run.dump_file(step, when, rank)
            dump_weights(self._module, path, rank=rank, coordinate=setup.coordinate, step=step, when=when)
