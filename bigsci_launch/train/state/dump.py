"""Dumps the weights of one rank to a safetensors file, for `bsl diff-weights`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import nn

from bigsci_launch.topology import Coordinate


def dump_weights(module: nn.Module, path: Path, *, rank: int, coordinate: Coordinate, step: int, when: str) -> None:
    """Write every parameter of this rank, by name, to `path`, atomically.

    `when` is `before` or `after` the step. The file's metadata holds rank, coordinate and step as text.
    """
    # Parameters are views of one flat buffer, but safetensors needs tensors that share no memory.
    weights = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in module.named_parameters()}
    metadata = {
        "rank": str(rank),
        "dp": str(coordinate.dp_rank),
        "pp": str(coordinate.pp_rank),
        "tp": str(coordinate.tp_rank),
        "step": str(step),
        "when": when,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as own:
        written = Path(own) / path.name
        save_file(weights, written, metadata)
        written.replace(path)
