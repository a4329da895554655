"""Small checkpoints with known values, written by the real libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from bigsci_launch.cli.main import bsl

HIDDEN, VOCAB, NUM_LAYERS = 8, 16, 2
ROLES = ("fp32", "exp_avg", "exp_avg_sq")
REPLICATED = ("ln.weight", "ln.bias", "down.bias")


@dataclass
class fragment_address:  # the name that DeepSpeed's shards carry
    """The place of a parameter in the flat tensors of its group, as DeepSpeed pickles it."""

    numel: int
    start: int


@dataclass
class TinyCheckpoint:
    """A DeepSpeed pipeline checkpoint of a tiny model: edit its content, then `write` it.

    `state[pp, tp][name][role]` are the fp32 tensors of one model-parallel rank; layer files hold the rounded masters
    of the first holder, unless `layers` overrides them by (layer, tp, key).
    """

    tp: int = 2
    pp: int = 2
    dp: int = 2
    step: int = 20
    optimizer_step: float | None = None
    weight_decay_of_norms: float = 0.0
    betas: tuple[float, float] | None = None
    state: dict[tuple[int, int], dict[str, dict[str, torch.Tensor]]] = field(default_factory=dict)
    layers: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pp in range(self.pp):
            for tp in range(self.tp):
                shapes = self.shapes(pp)
                self.state[pp, tp] = {name: self.made(name, shape, tp) for name, shape in shapes.items()}

    def shapes(self, pp: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes on one rank of stage `pp`: blocks are spread evenly, the tied embedding is at both ends."""
        wide = 4 * HIDDEN // self.tp
        found: dict[str, tuple[int, ...]] = {}
        if pp in (0, self.pp - 1):
            found["tied_modules.embed.weight"] = (VOCAB // self.tp, HIDDEN)
        per_stage = NUM_LAYERS // self.pp
        for layer in range(1 + pp * per_stage, 1 + (pp + 1) * per_stage):
            found |= {
                f"{layer}.ln.weight": (HIDDEN,),
                f"{layer}.ln.bias": (HIDDEN,),
                f"{layer}.up.weight": (wide, HIDDEN),
                f"{layer}.up.bias": (wide,),
                f"{layer}.down.weight": (HIDDEN, wide),
                f"{layer}.down.bias": (HIDDEN,),
            }
        return found

    def made(self, name: str, shape: tuple[int, ...], tp: int) -> dict[str, torch.Tensor]:
        """Values that depend on the name and, for sharded parameters, on the tp rank: copies agree by construction."""
        is_replicated = name.partition(".")[2] in REPLICATED
        seed = sum(map(ord, name)) + (0 if is_replicated else 1000 * (tp + 1))
        generator = torch.Generator().manual_seed(seed)
        return {
            role: torch.randn(shape, generator=generator).abs()
            if role == "exp_avg_sq"
            else torch.randn(shape, generator=generator)
            for role in ROLES
        }

    def write(self, folder: Path) -> Path:
        """Write the checkpoint as `folder/global_stepN` with `latest`; return the path of the step's folder."""
        target = folder / f"global_step{self.step}"
        target.mkdir(parents=True)
        (folder / "latest").write_text(target.name)
        for (pp, tp), params in self.state.items():
            mp = pp * self.tp + tp
            torch.save(self._model_states(pp, tp), target / f"mp_rank_{mp:02d}_model_states.pt")
            for dp in range(self.dp):
                shard = {"optimizer_state_dict": self._shard(params, dp), "ds_version": "0.19.8"}
                torch.save(shard, target / f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
            self._write_layers(target, pp, tp)
        return target

    def _groups(self, params: dict[str, Any]) -> list[list[str]]:
        matrices = [name for name in params if name.endswith("weight") and ".ln." not in name]
        return [matrices, [name for name in params if name not in matrices]]

    def _model_states(self, pp: int, tp: int) -> dict[str, Any]:
        shapes = self.shapes(pp)
        groups = [OrderedDict((n, torch.Size(shapes[n])) for n in group) for group in self._groups(shapes)]
        return {
            "module": None,
            "param_shapes": groups,
            "global_steps": self.step,
            "dp_world_size": self.dp,
            "mp_world_size": self.pp * self.tp,
            "checkpoint_parallel_dimensions": {"pp_degree": self.pp, "tp_degree": self.tp},
            "rng": {"torch": torch.arange(16, dtype=torch.uint8)},
        }

    def _shard(self, params: dict[str, dict[str, torch.Tensor]], dp: int) -> dict[str, Any]:
        flats: dict[str, list[torch.Tensor]] = {role: [] for role in ROLES}
        mappings = []
        for group in self._groups(params):
            sizes = [params[name]["fp32"].numel() for name in group]
            part = -(-sum(sizes) // self.dp)
            for role in ROLES:
                whole = torch.cat([params[name][role].reshape(-1) for name in group])
                padded = torch.nn.functional.pad(whole, (0, part * self.dp - whole.numel()))
                flats[role].append(padded[dp * part : (dp + 1) * part].clone())
            mappings.append(self._mapping(group, sizes, dp * part, (dp + 1) * part))
        step = torch.tensor(float(self.step if self.optimizer_step is None else self.optimizer_step))
        decays = (0.1, self.weight_decay_of_norms)
        return {
            "base_optimizer_state": {
                "state": {
                    group: {
                        "step": step.clone(),
                        "exp_avg": flats["exp_avg"][group],
                        "exp_avg_sq": flats["exp_avg_sq"][group],
                    }
                    for group in range(2)
                },
                "param_groups": [
                    {"weight_decay": decay, "lr": 1e-3, "params": [g]} | ({"betas": self.betas} if self.betas else {})
                    for g, decay in enumerate(decays)
                ],
            },
            "single_partition_of_fp32_groups": flats["fp32"],
            "param_slice_mappings": mappings,
        }

    def _mapping(self, group: list[str], sizes: list[int], first: int, last: int) -> OrderedDict[str, fragment_address]:
        mapping: OrderedDict[str, fragment_address] = OrderedDict()
        begin = 0
        for name, size in zip(group, sizes, strict=True):
            low, high = max(first, begin), min(last, begin + size)
            if low < high:
                mapping[name] = fragment_address(numel=high - low, start=low - first)
            begin += size
        return mapping

    def _write_layers(self, target: Path, pp: int, tp: int) -> None:
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        for name, roles in self.state[pp, tp].items():
            is_tied = name.startswith("tied_modules.")
            if is_tied and pp != 0:
                continue
            layer, key = (0, name.split(".", 2)[2]) if is_tied else (int(name.split(".")[0]), name.split(".", 1)[1])
            value = self.layers.get((layer, tp, key), roles["fp32"].bfloat16())
            by_layer.setdefault(layer, {})[key] = value
        for layer, values in by_layer.items():
            torch.save(values, target / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")


@pytest.fixture
def tiny() -> Callable[..., TinyCheckpoint]:
    """Makes a `TinyCheckpoint` of a given topology."""
    return TinyCheckpoint


@pytest.fixture
def save_arrays() -> Callable[..., Path]:
    """Writes numpy arrays (and torch tensors, for bfloat16) as one safetensors file."""

    def save(path: Path, arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(isinstance(value, torch.Tensor) for value in arrays.values()):
            save_torch_file(arrays, path, metadata)
        else:
            save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path, metadata)
        return path

    return save


@dataclass
class Answer:
    """The output of `bsl diff-weights`."""

    result: Result

    @property
    def code(self) -> int:
        return self.result.exit_code

    @property
    def text(self) -> str:
        return self.result.stdout

    @property
    def talk(self) -> str:
        return self.result.stderr

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.result.stdout)
        return document


@pytest.fixture
def diff() -> Callable[..., Answer]:
    """Runs `bsl diff-weights` with the given arguments in this process."""

    def run(*arguments: object) -> Answer:
        return Answer(CliRunner().invoke(bsl, ["diff-weights", *map(str, arguments)], catch_exceptions=False))

    return run


@pytest.fixture
def diff_without_numpy() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `bsl diff-weights` with the given arguments in a process that finds no numpy."""
    code = "import sys; sys.modules['numpy'] = None; from bigsci_launch.cli.main import main; main()"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "diff-weights", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run
