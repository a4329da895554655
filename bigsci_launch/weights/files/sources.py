"""The files that make up a set of weights: values that `locate` finds and `contents` reads."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.tensors import NOWHERE, NotRead, Place, StoredTensor, StoredValue

WeightsLayout = Literal["deepspeed", "universal", "rank dumps", "text dumps", "digests", "files"]
FileFormat = Literal[
    "layer", "model_states", "optimizer", "universal", "dump", "text", "digests", "aside", "json", "dcp", "plain"
]
Component = Literal[
    "weights",
    "weights and optimizer",
    "optimizer",
    "scheduler",
    "random states",
    "training arguments",
    "trainer state",
    "data loader",
    "other",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An index of shards: the file of each tensor, and the tensors of each file; `total_size` is the stated sum."""

    path: Path
    files: Mapping[str, str]
    shards: Mapping[str, Set[str]]
    total_size: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One file; for `dcp`, one folder. `label` pairs it with a file of the other side; `place` is what its name says.

    `component` is the part of a checkpoint that it is. `index` is the index that lists the file as a shard.
    """

    path: Path
    label: str
    format: FileFormat
    place: Place = NOWHERE
    component: Component = "weights"
    index: ShardIndex | None = None


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of no format that is read: `label` is its path in the checkpoint."""

    path: Path
    label: str
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that is missing or could not be read, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One parameter group of a shard: its `step` (None if lost), its options, and its parameters' names."""

    step: float | None
    weight_decay: float | None
    learning_rate: float | None
    names: tuple[str, ...]
    betas: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one source: every entry is a tensor, a value, or not read; and an optimizer's parameter groups.

    `container` is the key of the dictionary with the parameters (`model`, `app.model`); empty if it is the file itself.
    `unreadable` are files of a source that has several. `step` is the number of steps done, if the file states it.
    `is_program`: the file has a model's code and constants too, as TorchScript does.
    """

    tensors: tuple[StoredTensor, ...]
    groups: tuple[OptimizerGroup, ...] = ()
    values: tuple[StoredValue, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    container: str = ""
    unreadable: tuple[Unreadable, ...] = ()
    step: int | None = None
    is_program: bool = False


@dataclass(frozen=True, slots=True)
class ZeroCut:
    """How ZeRO cut the optimizer's state: its stage, and the number of dp ranks that share it.

    `groups[pp]` are the names in each parameter group of a pipeline stage, in the order of the flat tensors.
    """

    stage: int | None = None
    num_ranks: int | None = None
    groups: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a DeepSpeed checkpoint's model-states files say about the whole model.

    `shapes[pp][name]` is the shape of a parameter on that stage, on one tp rank. `shared[name]` is the parameter whose
    tensor `name` uses too; only that one has a master. `zero` is known if ZeRO wrote the checkpoint without a pipeline.
    """

    shapes: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    zero: ZeroCut = ZeroCut()
    global_steps: int | None = None
    skipped_steps: int = 0
    universal_info: Mapping[str, object] = field(default_factory=dict)

    def stage_of(self, name: str) -> int | None:
        """Return the first stage that has a parameter `name`; None if no stage is known to have it."""
        return next((pp for pp in sorted(self.shapes) if name in self.shapes[pp]), None)

    def tied_keys(self) -> tuple[str, ...]:
        """Return the names of the tied modules, in stage order."""
        names = (name for pp in sorted(self.shapes) for name in self.shapes[pp])
        return tuple(dict.fromkeys(name.split(".")[1] for name in names if name.startswith("tied_modules.")))


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint or a dump: its files, and its topology if known. `broken` files are reported, not read.

    `moments_from` is a checkpoint of the same step, with the optimizer's moments that a dump lacks. `others` are the
    files in its folder that no reader knows.
    """

    path: Path
    layout: WeightsLayout
    sources: tuple[Source, ...]
    topology: Topology | None = None
    metadata: CheckpointMetadata = CheckpointMetadata()
    broken: tuple[Unreadable, ...] = ()
    notes: tuple[str, ...] = ()
    moments_from: Weights | None = None
    others: tuple[OtherFile, ...] = ()

    def num_bytes(self) -> int:
        """Return the size of all files, as far as they can be found."""
        total = 0
        for path in {source.path for source in self.sources}:
            with suppress(OSError):
                total += sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))
        return total
