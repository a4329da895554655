"""Which files make up a set of weights: the values that `locate` finds and `contents` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.tensors import NOWHERE, Place, StoredTensor

WeightsLayout = Literal["deepspeed", "universal", "rank dumps", "text dumps", "digests", "files"]
FileFormat = Literal["layer", "model_states", "optimizer", "universal", "dump", "text", "digests", "aside", "plain"]


@dataclass(frozen=True, slots=True)
class Source:
    """One file. `label` pairs it with a file of the other side; `place` as far as its name tells."""

    path: Path
    label: str
    format: FileFormat
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that could not be read or is not there, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One parameter group of a shard: its `step` (None if lost), weight decay, and the parameters in it."""

    step: float | None
    weight_decay: float | None
    learning_rate: float | None
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What one file holds: tensors in the order of the file, and the optimizer's groups of a shard."""

    tensors: tuple[StoredTensor, ...]
    groups: tuple[OptimizerGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What the model states of a DeepSpeed checkpoint say about the whole model.

    `shapes[pp][name]` is the shape of a parameter on that stage, on one tp rank.
    """

    shapes: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    global_steps: int | None = None
    skipped_steps: int = 0
    universal_info: Mapping[str, object] = field(default_factory=dict)

    def stage_of(self, name: str) -> int | None:
        """The first stage that holds `name`; None if no stage says so."""
        return next((pp for pp in sorted(self.shapes) if name in self.shapes[pp]), None)

    def tied_keys(self) -> tuple[str, ...]:
        """Names of the tied modules, in the order of the stages."""
        names = (name for pp in sorted(self.shapes) for name in self.shapes[pp])
        return tuple(dict.fromkeys(name.split(".")[1] for name in names if name.startswith("tied_modules.")))


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint or a dump: its files, and what is known of its topology. `broken` files are named, not read.

    `beside`: a checkpoint of the same moment, which holds the moments of the optimizer that a dump lacks.
    """

    path: Path
    layout: WeightsLayout
    sources: tuple[Source, ...]
    topology: Topology | None = None
    metadata: CheckpointMetadata = CheckpointMetadata()
    broken: tuple[Unreadable, ...] = ()
    notes: tuple[str, ...] = ()
    beside: Weights | None = None
