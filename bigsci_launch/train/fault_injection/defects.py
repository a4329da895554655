"""Reproduces, on purpose, the defects behind restart spikes. Each of them has silently harmed a real run.

All ranks share a defect, and it makes no rank wait for another: the run trains on, and only its numbers are wrong.
Tests and demonstrations use them to show that `guards` and `bsl diff-weights` notice each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from bigsci_launch.config.schema.guards import FAULTS_OF_ONE_RANK, FaultSpec
from bigsci_launch.errors import ConfigError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.train.parallel.initial_weights import Draw
from bigsci_launch.train.parallel.model import GptSizes, VocabularyEmbedding
from bigsci_launch.train.parallel.optimizer import GroupRule, group_by_shape
from bigsci_launch.train.parallel.tensor import ColumnParallelLinear, TensorParallel
from bigsci_launch.train.rank.rng import capture_generators, restore_generators


class Defects:
    """The defects of a run on this rank."""

    def __init__(self, specs: Sequence[FaultSpec], rank: int) -> None:
        self._specs = [spec for spec in specs if spec.kind not in FAULTS_OF_ONE_RANK]
        self._flips = [spec for spec in specs if spec.kind == "flipped_byte" and spec.rank == rank]
        self._names = {spec.kind for spec in self._specs}

    @property
    def embedding(self) -> type[VocabularyEmbedding]:
        """The class of the tied embedding module."""
        with_norm = {"passenger_norm", "decayed_norm", "tied_norm"}
        return EmbeddingWithNorm if self._names & with_norm else VocabularyEmbedding

    @property
    def group_rule(self) -> GroupRule:
        """The rule that decides the optimizer group of a parameter."""
        return group_by_class if "decayed_norm" in self._names else group_by_shape

    def before_step(self, step: int, engine: PipelineEngine) -> list[str]:
        """Apply the defects due at `step` to the engine and return their names."""
        begun = [spec for spec in self._specs if spec.step <= step]
        self._specs = [spec for spec in self._specs if spec not in begun or spec.kind not in BREAKS]
        for spec in begun:
            if spec.kind in BREAKS:
                BREAKS[spec.kind](engine)
        return [spec.kind for spec in begun if spec.kind in BREAKS]

    def stand_at_saves(self, engine: PipelineEngine) -> None:
        """Flip a bit of this rank's optimizer state in a checkpoint, once it is written, if the run asks for it.

        What a load may lose is taken from the engine as it was built.
        """
        self._engine, self._generators = engine, capture_generators()
        if not self._flips:
            return
        files = engine.checkpoint_engine
        original, shard = files.write, Path(engine._get_zero_ckpt_name("", "")).name
        tags = [checkpoint_tag(spec.step) for spec in self._flips]

        def write(state_dict: Any, path: str) -> None:
            original(state_dict, path)
            if Path(path).name == shard and Path(path).parent.name in tags:
                flip_bit(Path(path))

        files.write = write

    def after_load(self, step: int) -> None:
        """Lose what the load of the checkpoint after `step` must lose."""
        begun = {spec.kind for spec in self._specs if spec.step <= step}
        if "lost_random_states" in begun:
            restore_generators(self._generators)
        if "lost_optimizer_step" in begun:
            lose_optimizer_step(self._engine)


class EmbeddingWithNorm(VocabularyEmbedding):
    """A tied module with a layer norm inside: the last stage holds a copy of it that nothing trains, saves or loads."""

    def __init__(self, sizes: GptSizes, draw: Draw, ranks: TensorParallel) -> None:
        super().__init__(sizes, draw, ranks)
        self.norm = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, hidden)."""
        result: Tensor = self.norm(super().forward(tokens))
        return result


def group_by_class(name: str, parameter: nn.Parameter) -> str:
    """Assign groups by class, fooled by an alias: norms outside transformer layers are taken for matrices."""
    return "decay" if name.startswith("tied_modules.") else group_by_shape(name, parameter)


def skip_tied_reduction(engine: PipelineEngine) -> None:
    """Do not sum the gradients of tied copies (BLOOM's prequel, DeepSpeed#1801)."""
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: lambda self: None}


def skip_clipping_of_copies(engine: PipelineEngine) -> None:
    """Do not clip the tied copies of later stages (BLOOM's prequel)."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer):
        raise ConfigError("faults: unclipped_tied_copy: only training.precision bf16 clips parameter by parameter")
    original = optimizer.get_grads_for_norm

    def without_copies(for_clipping: bool = False) -> Any:
        if not for_clipping:
            return original()
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        return [gradient for parameter, gradient in pairs if not parameter.ds_pipe_replicated]

    optimizer.get_grads_for_norm = without_copies


class Unreduced(TensorParallel):
    """Tensor-parallel ranks that skip the all-reduce and keep their partial results."""

    def all_reduce(self, tensor: Tensor, operation: Any = None) -> None:
        """Leave `tensor` as it is."""

    def sum_into_parts(self, whole: Tensor) -> Tensor:
        """Return this rank's own values of its part."""
        return whole[:, self.part(whole.shape[1])].clone()


def skip_tp_reduction(engine: PipelineEngine) -> None:
    """Do not sum input gradients of column-parallel layers, so tp replicas drift apart (BLOOM's layer norms)."""
    for module in engine.module.modules():
        if isinstance(module, ColumnParallelLinear):
            _require_tp("unreduced_tp_gradients", module.ranks)
            ranks = module.ranks
            module.ranks = Unreduced(ranks.rank, ranks.size, ranks.group, splits_sequences=ranks.parts > 1)


def scale_replicated_gradients(engine: PipelineEngine) -> None:
    """Divide the gradients of tp-replicated parameters by tp (BLOOM's first fix for its drifting layer norms)."""
    ranks = next(module.ranks for module in engine.module.modules() if isinstance(module, ColumnParallelLinear))
    _require_tp("scaled_gradients", ranks)
    for parameter in engine.module.parameters():
        if not getattr(parameter, "model_parallel", False):
            parameter.register_hook(lambda gradient: gradient / ranks.size)


def _require_tp(defect: str, ranks: TensorParallel) -> None:
    if ranks.size == 1:
        raise ConfigError(f"faults: {defect}: has no effect at tensor_parallel_size 1")


BREAKS = {
    "unreduced_tied_gradients": skip_tied_reduction,
    "unclipped_tied_copy": skip_clipping_of_copies,
    "unreduced_tp_gradients": skip_tp_reduction,
    "scaled_gradients": scale_replicated_gradients,
}


def lose_optimizer_step(engine: PipelineEngine) -> None:
    """Reset AdamW's step count, so that bias correction starts over."""
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def flip_bit(path: Path) -> None:
    """Invert one bit in the middle of a file, where tensors are."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))
