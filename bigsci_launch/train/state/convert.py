"""Rewrites a checkpoint: `python -m bigsci_launch.train.state.convert CHECKPOINT TOPOLOGY METHOD FOLDER`.

Each new file is assembled from the parts of the saved files that it needs, so memory holds only one file at a time.
The result is an ordinary checkpoint, including the digests that its ranks would have written; a load checks them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from bigsci_launch.checkpoints.folder import (
    CheckpointsDir,
    begin_checkpoint,
    commit_checkpoint,
    list_files,
    sync_path,
    write_digests,
    write_record,
)
from bigsci_launch.checkpoints.verify import file_digest, with_digest
from bigsci_launch.errors import BslError, CheckpointError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.plan.choose.conversion import Conversion, plan_conversion, saved_topology
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.train.device.digest import bytes_of
from bigsci_launch.train.guards.copies import TIED
from bigsci_launch.train.guards.engine.state import tensor_entry
from bigsci_launch.train.guards.engine.watch import read_state_document
from bigsci_launch.train.state.checkpoint import generators_path, universal_info
from bigsci_launch.train.state.durable import DurableCheckpointEngine
from bigsci_launch.train.state.foreign import load_mapped
from bigsci_launch.train.state.reshard import (
    MOMENTS,
    Parameter,
    SavedShards,
    layer_name,
    shard_name,
    states_name,
)
from bigsci_launch.weights.formats.digests import digest_bytes, digest_document

ALIGNMENT = 2
"""DeepSpeed pads each flat group to a multiple of this many elements per dp rank (`nccl_start_alignment_factor`)."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A dp rank's partition of an optimizer group: (start, length) `slices` by name, and the `padding` at its end."""

    name: str
    slices: dict[str, tuple[int, int]]
    flats: dict[str, Tensor]
    padding: int


class Converter:
    """Writes the files of one conversion into `folder`."""

    def __init__(self, conversion: Conversion, folder: Path, begin_part: Callable[[str], None]) -> None:
        self._conversion, self._folder, self._begin_part = conversion, folder, begin_part
        self._topology = conversion.topology
        self._saved = SavedShards(conversion.source, saved_topology(conversion.before))
        self._rows: int = conversion.after.model["padded_vocab_size"]
        self._engine = DurableCheckpointEngine()

    @property
    def num_parts(self) -> int:
        """The number of calls to `begin_part`."""
        return len(self._saved.parameters) + self._topology.world_size

    def write(self) -> None:
        """Write every file except the record.

        Raises:
            CheckpointError: copies of a parameter differ, or a file cannot be read.
        """
        self._saved.require_equal_copies(self._begin_part)
        for pp in range(self._topology.pp):
            groups = self._groups(pp)
            for tp in range(self._topology.tp):
                weights = {each.name: self._cut("weight", each, tp) for group in groups for each in group}
                entries = {name: tensor_entry(weight) for name, weight in weights.items()}
                for dp in range(self._topology.dp):
                    coordinate = Coordinate.at(dp=dp, pp=pp, tp=tp)
                    self._begin_part(f"rank {self._topology.rank(coordinate)}")
                    self._engine.digests.clear()
                    if dp == 0:
                        self._write_model(groups, weights, pp, tp)
                    self._write_rank(groups, entries, coordinate)

    def _cut(self, role: str, parameter: Parameter, tp: int) -> Tensor:
        return self._saved.cut(role, parameter, tp, self._topology.tp, self._rows)

    def _groups(self, pp: int) -> list[list[Parameter]]:
        """Return the parameters of a stage by optimizer group, each in module order: tied ones first, then by layer."""
        layers = set(self._conversion.stages[pp])
        ends = {0, max(max(stage, default=0) for stage in self._conversion.stages)}
        groups: list[list[Parameter]] = [[] for _ in self._saved.states[0]["param_shapes"]]
        for parameter in self._saved.parameters.values():
            is_tied = parameter.name.startswith(TIED)
            if (layers & ends) if is_tied else parameter.layer in layers:
                groups[parameter.group].append(parameter)
        return [sorted(group, key=lambda each: (not each.name.startswith(TIED), each.layer)) for group in groups]

    def _write_model(
        self, groups: Sequence[Sequence[Parameter]], weights: Mapping[str, Tensor], pp: int, tp: int
    ) -> None:
        for layer in self._conversion.stages[pp]:
            if (self._saved.folder / layer_name(layer, 0)).exists():
                self._save(self._layer(layer, weights), layer_name(layer, tp))
        topology = self._topology
        state = {
            **self._saved.states[0],
            "param_shapes": [OrderedDict((each.name, weights[each.name].shape) for each in group) for group in groups],
            "dp_world_size": topology.dp,
            "mp_world_size": topology.tp * topology.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": topology.pp, "tp_degree": topology.tp},
            "universal_checkpoint_info": universal_info(self._conversion.after.model),
            "ds_config": self._settings(),
        }
        self._save(state, states_name(pp * topology.tp + tp))

    def _layer(self, layer: int, weights: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
        by_key = {
            each.key: weights[each.name]
            for each in self._saved.parameters.values()
            if each.layer == layer and each.name in weights
        }
        saved = load_mapped(self._saved.folder / layer_name(layer, 0))
        return OrderedDict((key, by_key[key].clone()) for key in saved)

    def _settings(self) -> dict[str, Any]:
        """Return DeepSpeed's saved configuration, with the micro batches for the new dp if they divide evenly."""
        saved: dict[str, Any] = dict(self._saved.states[0]["ds_config"])
        samples = saved["gradient_accumulation_steps"] * self._saved.topology.dp
        if samples % self._topology.dp == 0:
            saved["gradient_accumulation_steps"] = samples // self._topology.dp
        return saved

    def _write_rank(
        self, groups: Sequence[Sequence[Parameter]], entries: Mapping[str, Any], coordinate: Coordinate
    ) -> None:
        parts = [self._group_part(number, group, coordinate) for number, group in enumerate(groups)]
        name = shard_name(coordinate.dp_rank, coordinate.pp_rank * self._topology.tp + coordinate.tp_rank)
        self._save(self._optimizer_file(groups, parts), f"{self._saved.shard_prefix}{name}")
        rank = self._topology.rank(coordinate)
        document = {
            **digest_document(entries, rank=rank, coordinate=coordinate, step=self._conversion.after.step),
            "optimizer": dict(self._optimizer_entries(parts)),
            "random": self._keep_random_states(rank, coordinate),
            "files": dict(self._engine.digests),
        }
        write_digests(self._folder, rank, document)

    def _group_part(self, number: int, group: Sequence[Parameter], coordinate: Coordinate) -> GroupPart:
        sizes = [self._cut_size(each) for each in group]
        dp, total = self._topology.dp, sum(sizes)
        width = -(-total // (ALIGNMENT * dp)) * ALIGNMENT
        first, last = coordinate.dp_rank * width, (coordinate.dp_rank + 1) * width
        flats = {role: torch.zeros(width) for role in ("master", *MOMENTS)}
        slices, begin = {}, 0
        for parameter, size in zip(group, sizes, strict=True):
            low, high = max(first, begin), min(last, begin + size)
            if low < high:
                slices[parameter.name] = (low - first, high - low)
                for role, flat in flats.items():
                    values = self._cut(role, parameter, coordinate.tp_rank).reshape(-1)
                    flat[low - first : high - first] = values[low - begin : high - begin]
            begin += size
        padding = width * dp - total if coordinate.dp_rank == dp - 1 else 0
        return GroupPart(self._param_group(number)["name"], slices, flats, padding)

    def _cut_size(self, parameter: Parameter) -> int:
        """Return the number of elements of a parameter on one rank."""
        size: int = math.prod(parameter.shape)
        if parameter.axis is None:
            return size
        if parameter.is_vocabulary:
            return size // parameter.shape[0] * (self._rows // self._topology.tp)
        return size // self._topology.tp * self._saved.topology.tp

    def _param_group(self, number: int) -> dict[str, Any]:
        state = self._saved.template["optimizer_state_dict"]
        group: dict[str, Any] = state["base_optimizer_state"]["param_groups"][number]
        return group

    def _step(self, number: int) -> Tensor:
        state = self._saved.template["optimizer_state_dict"]["base_optimizer_state"]["state"][number]
        step: Tensor = state["step"]
        return step.clone()

    def _optimizer_file(self, groups: Sequence[Sequence[Parameter]], parts: Sequence[GroupPart]) -> dict[str, Any]:
        template = self._saved.template
        inner = dict(template["optimizer_state_dict"])
        has_padding = inner.get("param_alignment_paddings") is None  # BF16_Optimizer saves masters with it
        inner["base_optimizer_state"] = {
            "state": {
                number: {"step": self._step(number), **{role: part.flats[role] for role in MOMENTS}}
                for number, part in enumerate(parts)
            },
            "param_groups": [self._param_group(number) for number in range(len(parts))],
        }
        inner["single_partition_of_fp32_groups"] = [
            part.flats["master"] if has_padding else part.flats["master"][: len(part.flats["master"]) - part.padding]
            for part in parts
        ]
        inner["group_paddings"] = [part.padding for part in parts]
        inner["partition_count"] = [self._topology.dp] * len(parts)
        inner["param_slice_mappings"] = [
            OrderedDict(
                (name, fragment_address(numel=size, start=start)) for name, (start, size) in part.slices.items()
            )
            for part in parts
        ]
        if not has_padding:
            inner["param_alignment_paddings"] = [[0] * len(group) for group in groups]
        return {**template, "optimizer_state_dict": inner, "ds_config": self._settings()}

    def _optimizer_entries(self, parts: Sequence[GroupPart]) -> Iterator[tuple[str, Any]]:
        for number, part in enumerate(parts):
            for role, flat in part.flats.items():
                yield f"{part.name}.{role}", digest_bytes(bytes_of(flat))
            yield f"{part.name}.step", int(self._step(number))

    def _keep_random_states(self, rank: int, coordinate: Coordinate) -> str | None:
        """Copy the random states saved at this coordinate and return their digest, or None if they cannot be kept."""
        if not self._conversion.keeps_random_states:
            return None
        source = self._saved.topology.rank_at(dp=coordinate.dp_rank, pp=coordinate.pp_rank)
        path = generators_path(self._folder, rank)
        shutil.copyfile(generators_path(self._saved.folder, source), path)
        sync_path(path)
        self._engine.digests[path.name] = file_digest(path)
        random: str | None = read_state_document(self._saved.folder, source)["random"]
        return random

    def _save(self, state: Any, name: str) -> None:
        self._engine.save(state, str(self._folder / name))


def convert(conversion: Conversion, out: CheckpointsDir, report: Callable[[int, int, str], None]) -> Path:
    """Write the converted checkpoint into `out` and point `latest` at it; a kill never leaves a partial checkpoint.

    Raises:
        CheckpointError: copies differ, a file cannot be read, or the disk refuses.
    """
    tag = checkpoint_tag(conversion.after.step)
    done = 0

    def begin_part(text: str) -> None:
        nonlocal done
        report(done, converter.num_parts, text)
        done += 1

    staged = begin_checkpoint(out, tag) / tag
    try:
        converter = Converter(conversion, staged, begin_part)
        converter.write()
    except BaseException:
        shutil.rmtree(staged.parent, ignore_errors=True)
        raise
    for script in conversion.source.parent.glob("zero_to_*.py"):
        shutil.copyfile(script, staged.parent / script.name)
    write_record(staged, with_digest(staged, replace(conversion.after, files=list_files(staged))))
    commit_checkpoint(out, tag, conversion.after.step)
    return out.folder(tag)


def main() -> None:
    """Convert as the command line says; print progress and errors as JSON lines on stdout."""
    source, topology, partition_method, out = sys.argv[1:]

    def tell(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    try:
        conversion = plan_conversion(Path(source), Topology.parse(topology), partition_method)
        folder = convert(
            conversion, CheckpointsDir(Path(out)), lambda done, total, text: tell(done=done, total=total, text=text)
        )
    except BslError as error:
        tell(error=error.message, hint=error.hint)
        sys.exit(error.exit_code)
    except OSError as error:
        tell(error=f"{error.filename or out}: {error.strerror or error}", hint=None)
        sys.exit(CheckpointError.exit_code)
    tell(folder=str(folder))


if __name__ == "__main__":
    main()
