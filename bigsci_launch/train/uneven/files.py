"""Checkpoints of an uneven run, in the form of all others: as DeepSpeed would save one replica of the first pipeline.

Only the ranks of that pipeline write. Any rank can read any checkpoint, of whatever topology and engine: it takes the
parameters that it holds from the files that have them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from bigsci_launch.checkpoints.folder import OTHER_CHECKPOINT, CheckpointRecord
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import CheckpointError
from bigsci_launch.plan.survive.uneven import UnevenLayout
from bigsci_launch.topology import Coordinate, Topology
from bigsci_launch.train.guards.copies import TIED
from bigsci_launch.train.guards.engine.state import HeldState
from bigsci_launch.train.parallel.pipeline import engine_settings
from bigsci_launch.train.rank.rng import capture_generators
from bigsci_launch.train.state.reshard import SavedShards, layer_name, shard_name, states_name
from bigsci_launch.train.uneven.engine import UnevenEngine
from bigsci_launch.train.uneven.optimizer import MOMENTS, ROLES, ReducedStep, UnitState


def saved_record(record: CheckpointRecord, layout: UnevenLayout) -> CheckpointRecord:
    """Return the record of a checkpoint with the topology and the cut of what is saved."""
    counts = layout.pipelines[0].counts
    model = {**record.model, "partition_method": f"time:{','.join(map(str, counts))}"}
    return replace(record, topology=saved_topology(layout).as_dict(), model=model)


def saved_topology(layout: UnevenLayout) -> Topology:
    """Return the topology of what is saved."""
    return Topology(tp=layout.tp, pp=len(layout.pipelines[0].counts))


class StageFiles:
    """What a rank of the first pipeline saves."""

    def __init__(self, engine: UnevenEngine, config: RunConfig, states: Mapping[str, UnitState]) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._is_bf16 = config.training.weight_format == "bf16"
        topology = self._topology = saved_topology(engine.layout)
        self._index = engine.stage * topology.tp + engine.lane
        self._settings = engine_settings(config, topology, config.training.global_batch_size)
        self._groups = self._optimizer.names_by_group()
        self._flats = [
            {role: torch.cat([getattr(states[name], role) for name in group]) for role in ROLES}
            for group in self._groups
        ]

    def held(self) -> HeldState:
        """Return the state that the files hold, as the guards name it."""
        entries: dict[str, Any] = {}
        for group, flats in zip(self._optimizer.param_groups, self._flats, strict=True):
            entries |= {f"{group['name']}.{role}": flat for role, flat in flats.items()}
            entries[f"{group['name']}.step"] = self._optimizer.num_steps
        return HeldState(self._optimizer.weights, entries, capture_generators())

    def write(self, folder: Path, client_state: Mapping[str, Any]) -> None:
        """Write them, through the checkpoint engine."""
        engine, files = self._engine, self._engine.checkpoint_engine
        files.makedirs(str(folder), exist_ok=True)
        for number in engine.module.numbers:
            if (layer := self._layer(number)) is not None:
                files.save(layer, str(folder / layer_name(number, engine.lane)))
        files.save({**self._states(), **client_state}, str(folder / states_name(self._index)))
        name = f"{'bf16_' if self._is_bf16 else ''}{shard_name(0, self._index)}"
        files.save(self._optimizer_file(), str(folder / name))

    def _layer(self, number: int) -> OrderedDict[str, Tensor] | None:
        """Return the weights of a layer; a tied one is saved with the first layer alone."""
        prefix = f"{number}."
        if number == 0 and hasattr(self._engine.module, "tied_modules"):
            prefix = next(name for name in self._optimizer.weights if name.startswith(TIED)).rpartition(".")[0] + "."
        weights = {name: weight for name, weight in self._optimizer.weights.items() if name.startswith(prefix)}
        found = OrderedDict((name.removeprefix(prefix), weight.detach().clone()) for name, weight in weights.items())
        return found or None

    def _states(self) -> dict[str, Any]:
        engine, topology = self._engine, self._topology
        shapes = [OrderedDict((name, self._optimizer.weights[name].shape) for name in group) for group in self._groups]
        return {
            **dict.fromkeys(("module", "optimizer", "frozen_param_shapes", "frozen_param_fragments")),
            **dict.fromkeys(("lr_scheduler", "data_sampler", "random_ltd")),
            "buffer_names": [],
            "param_shapes": shapes,
            "shared_params": {},
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_steps * engine.num_samples,
            "dp_world_size": 1,
            "mp_world_size": topology.world_size,
            "checkpoint_parallel_dimensions": {"pp_degree": topology.pp, "tp_degree": topology.tp},
            "ds_config": self._settings,
            "ds_version": deepspeed.__version__,
        }

    def _optimizer_file(self) -> dict[str, Any]:
        steps, count = torch.tensor(float(self._optimizer.num_steps)), len(self._groups)
        saved = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [number]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        inner: dict[str, Any] = {
            "clip_grad": self._settings["gradient_clipping"],
            "base_optimizer_state": {
                "state": {
                    number: {"step": steps.clone(), **{role: flats[role] for role in MOMENTS}}
                    for number, flats in enumerate(self._flats)
                },
                "param_groups": saved,
            },
            "single_partition_of_fp32_groups": [flats["master"] for flats in self._flats],
            "group_paddings": [0] * count,
            "partition_count": [1] * count,
            "ds_version": deepspeed.__version__,
            "param_slice_mappings": [self._slices(group) for group in self._groups],
        }
        if not self._is_bf16:
            inner |= {
                "loss_scaler": LossScaler(1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "zero_stage": ZeroStageEnum.optimizer_states,
                "param_alignment_paddings": [[0] * len(group) for group in self._groups],
            }
        return {"optimizer_state_dict": inner, "ds_config": self._settings, "ds_version": deepspeed.__version__}

    def _slices(self, group: list[str]) -> OrderedDict[str, Any]:
        found: OrderedDict[str, Any] = OrderedDict()
        start = 0
        for name in group:
            size = self._optimizer.weights[name].numel()
            found[name] = fragment_address(numel=size, start=start)
            start += size
        return found


def load_files(engine: UnevenEngine, folder: Path, record: CheckpointRecord, config: RunConfig) -> None:
    """Set the engine to the state of a checkpoint.

    Raises:
        CheckpointError: a file is missing or is of another step than the record, or has other parameters.
    """
    saved = SavedShards(folder, Topology(**record.topology))
    counters = saved.states[0]
    if counters.get("iteration") != record.step:
        wrong = f"iteration is {counters.get('iteration')}, but {record.step} in checkpoint.json"
        raise CheckpointError(f"{folder}: {wrong}", hint=OTHER_CHECKPOINT)
    found = {name: _read(saved, name, weight, config, engine.lane) for name, weight in _weights(engine)}
    steps = saved.template["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]
    taken = ReducedStep(record.step)
    engine.optimizer.load(found, taken, counters.get("skipped_steps", 0), int(steps))


def _weights(engine: UnevenEngine) -> list[tuple[str, Tensor]]:
    return list(engine.optimizer.weights.items())


def _read(saved: SavedShards, name: str, weight: Tensor, config: RunConfig, lane: int) -> UnitState:
    parameter = saved.parameters.get(name)
    if parameter is None:
        raise CheckpointError(f"{saved.folder}: has no parameter {name}", hint=OTHER_CHECKPOINT)
    tp, rows = config.parallelism.tensor_parallel_size, config.padded_vocab_size
    found = UnitState(*(saved.cut(role, parameter, lane, tp, rows).contiguous() for role in ROLES))
    if found.master.shape != weight.shape:
        sizes = f"{tuple(found.master.shape)} in the checkpoint and {tuple(weight.shape)} in the run"
        raise CheckpointError(f"{saved.folder}: {name} is {sizes}", hint=OTHER_CHECKPOINT)
    return found


def part_of(engine: UnevenEngine) -> tuple[int, Coordinate] | None:
    """Return the rank and the place that this rank has in the saved topology; None if it saves nothing."""
    if not engine.is_in_first_pipeline:
        return None
    topology = saved_topology(engine.layout)
    coordinate = Coordinate.at(pp=engine.stage, tp=engine.lane)
    return topology.rank(coordinate), coordinate
