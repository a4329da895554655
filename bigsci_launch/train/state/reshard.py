"""Cuts the parameters of a saved checkpoint for any topology. Files are memory-mapped, so unused parts are not read.

The checkpoint itself declares along which dimension a parameter is split over tp (its universal info). If several ranks
hold copies, these must be bitwise equal; no copy is preferred.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.errors import CheckpointError
from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import TIED
from bigsci_launch.train.state.foreign import load_mapped

MOMENTS = ("exp_avg", "exp_avg_sq")
ROLES = ("weight", "master", *MOMENTS)
"""The 16-bit weight in a layer file, the fp32 master, and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model.

    `axis` is the dimension that tp splits, or None if every rank holds all of it; `shape` is that of one saved shard;
    `start` is its first element in the flat group, for each stage that saved it.
    """

    name: str
    group: int
    axis: int | None
    is_vocabulary: bool
    shape: tuple[int, ...]
    start: Mapping[int, int]

    @property
    def layer(self) -> int:
        """The number of its pipeline layer; for a tied parameter, the first layer that holds it."""
        return 0 if self.name.startswith(TIED) else int(self.name.partition(".")[0])

    @property
    def key(self) -> str:
        """Its name within the layer."""
        return self.name.split(".", 2)[2] if self.name.startswith(TIED) else self.name.partition(".")[2]


class SavedShards:
    """A checkpoint in DeepSpeed's layout, saved at `topology`."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self.folder, self.topology = folder, topology
        stages = range(topology.pp)
        self.states = [load_mapped(folder / states_name(pp * topology.tp)) for pp in stages]
        self._shards = lru_cache(maxsize=None)(self._load_shard)
        self._layers = lru_cache(maxsize=None)(self._load_layer)
        self.parameters = {parameter.name: parameter for parameter in self._find_parameters()}

    def _load_shard(self, pp: int, tp: int, dp: int) -> dict[str, Any]:
        for prefix in ("bf16_", "fp16_", ""):
            path = self.folder / f"{prefix}{shard_name(dp, pp * self.topology.tp + tp)}"
            if path.exists():
                state: dict[str, Any] = load_mapped(path)
                return state
        raise CheckpointError(f"{self.folder / shard_name(dp, pp * self.topology.tp + tp)}: no such file")

    def _load_layer(self, layer: int, tp: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = load_mapped(self.folder / layer_name(layer, tp))
        return state

    @property
    def template(self) -> dict[str, Any]:
        """The first rank's optimizer file, used for the settings and scalars that all ranks share."""
        return self._shards(0, 0, 0)

    @property
    def shard_prefix(self) -> str:
        """The prefix of the names of optimizer files: `bf16_`, `fp16_` or nothing."""
        return next((prefix for prefix in ("bf16_", "fp16_") if any(self.folder.glob(f"{prefix}zero_*"))), "")

    def _find_parameters(self) -> Iterator[Parameter]:
        info = self.states[0]["universal_checkpoint_info"]
        found: dict[str, tuple[int, tuple[int, ...], dict[int, int]]] = {}
        for pp, state in enumerate(self.states):
            for group, shapes in enumerate(state["param_shapes"]):
                start = 0
                for name, shape in shapes.items():
                    found.setdefault(name, (group, tuple(shape), {}))[2][pp] = start
                    start += math.prod(shape)
        for name, (group, shape, starts) in found.items():
            axis = _axis(name, info)
            is_vocabulary = _matches(info["vocabulary_parameter_patterns"], name)
            yield Parameter(name, group, axis, is_vocabulary, shape, starts)

    def piece(self, role: str, parameter: Parameter, pp: int, tp: int) -> Tensor:
        """Return one rank's shard of a parameter as it was saved; `pp` is a stage that holds it."""
        if role == "weight":
            return self._layers(parameter.layer, tp)[parameter.key]
        start, stop = parameter.start[pp], parameter.start[pp] + math.prod(parameter.shape)
        found, begin = [], 0
        for dp in range(self.topology.dp):
            flat, size = self._flat(role, parameter.group, pp, tp, dp)
            first, last = max(start, begin), min(stop, begin + size)
            if first < last:
                found.append(flat[first - begin : last - begin])
            begin += size
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.detach().view(parameter.shape)

    def _flat(self, role: str, group: int, pp: int, tp: int, dp: int) -> tuple[Tensor, int]:
        """Return a dp rank's partition of a group, and its length including the padding that saved masters lack."""
        state = self._shards(pp, tp, dp)["optimizer_state_dict"]
        moments = state["base_optimizer_state"]["state"][group]
        flat = state["single_partition_of_fp32_groups"][group] if role == "master" else moments[role]
        return flat, moments["exp_avg"].numel()

    def cut(self, role: str, parameter: Parameter, part: int, parts: int, rows: int) -> Tensor:
        """Return part `part` of `parts` of a parameter; a vocabulary table is first padded with zeros to `rows`."""
        pp = min(parameter.start)
        if parameter.axis is None:
            return self.piece(role, parameter, pp, 0)
        width = parameter.shape[parameter.axis]
        total = rows if parameter.is_vocabulary else width * self.topology.tp
        first, last = part * (total // parts), (part + 1) * (total // parts)
        found = []
        for tp in range(self.topology.tp):
            low, high = max(first, tp * width), min(last, (tp + 1) * width)
            if low < high:
                piece = self.piece(role, parameter, pp, tp)
                found.append(piece.narrow(parameter.axis, low - tp * width, high - low))
        missing = last - max(first, min(last, width * self.topology.tp))
        if missing:
            template = self.piece(role, parameter, pp, 0)
            shape = list(parameter.shape)
            shape[parameter.axis] = missing
            found.append(template.new_zeros(shape))
        return found[0] if len(found) == 1 else torch.cat(found, parameter.axis)

    def require_equal_copies(self, begin_part: Callable[[str], None]) -> None:
        """Check that all copies of a parameter, its master and its moments are bitwise equal.

        Raises:
            CheckpointError: names the first that are not.
        """
        for parameter in self.parameters.values():
            begin_part(f"copies of {parameter.name}")
            for role in ROLES:
                for copies in self._copies(role, parameter):
                    self._require_equal(role, parameter, copies)

    def _copies(self, role: str, parameter: Parameter) -> Iterator[list[tuple[int, int]]]:
        """Yield the groups of places (pp, tp) whose pieces are copies of each other."""
        stages = [min(parameter.start)] if role == "weight" else sorted(parameter.start)
        ranks = range(self.topology.tp)
        if parameter.axis is None:
            yield [(pp, tp) for pp in stages for tp in ranks]
        else:
            yield from ([(pp, tp) for pp in stages] for tp in ranks)

    def _require_equal(self, role: str, parameter: Parameter, places: Sequence[tuple[int, int]]) -> None:
        first = self.piece(role, parameter, *places[0])
        for pp, tp in places[1:]:
            if not torch.equal(_bits(first), _bits(self.piece(role, parameter, pp, tp))):
                what = "" if role == "weight" else f" ({role.replace('exp_avg', 'moment exp_avg')})"
                raise CheckpointError(
                    f"{parameter.name}{what}: its copies on pp{places[0][0]} tp{places[0][1]} and on pp{pp} "
                    f"tp{tp} differ, and a conversion would have to pick one of them",
                    hint=f"bsl diff-weights --audit {self.folder} names the cause",
                )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _axis(name: str, info: Mapping[str, Any]) -> int | None:
    if _matches(info["tp_replicated_parameter_patterns"], name):
        return None
    return 1 if _matches(info["parameter_with_row_parallelism_patterns"], name) else 0


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether a pattern matches from the start of the name, as in DeepSpeed's converter."""
    return any(re.match(pattern, name) for pattern in patterns)


def states_name(index: int) -> str:
    """Return the model states file of the model-parallel rank `index`, which is pp rank x tp size + tp rank."""
    return f"mp_rank_{index:02d}_model_states.pt"


def shard_name(dp: int, index: int) -> str:
    """Return the optimizer file of a data-parallel rank, without its prefix (`bf16_` or `fp16_`)."""
    return f"zero_pp_rank_{dp}_mp_rank_{index:02d}_optim_states.pt"


def layer_name(layer: int, tp: int) -> str:
    """Return the file with the 16-bit weights of a pipeline layer."""
    return f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
