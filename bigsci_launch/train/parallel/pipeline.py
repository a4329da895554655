"""The model as a DeepSpeed pipeline: layers cut into stages, and the engine that runs them.

The trainer depends on these settings, each for a measured reason:

- ZeRO stage 1 even in fp32: under pipeline parallelism the plain optimizer clips by a wrong norm.
- bf16 with fp32 accumulation: `BF16_Optimizer` is the only bf16 optimizer whose checkpoints load at every stage count.
- Non-reentrant activation checkpointing: the reentrant kind needs inputs with gradients, and tokens have none.
- No layer seeding: it would reseed dropout before every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed import initialize
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import nn

from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.rules.own_cut import parse_layer_counts
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError, ConfigError, MemoryShortageError
from bigsci_launch.plan.choose.automatic import expected_memory
from bigsci_launch.plan.choose.preflight import embedding_tie, find_stage_refusals, find_tie_refusals, remedy
from bigsci_launch.plan.price.balance import settle_method
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.stages import StageLayout, lay_out_stages, layout_lines
from bigsci_launch.plan.shape.partition import Layer, PartitionRule, cut_at_counts
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.topology import Topology
from bigsci_launch.train.parallel.attention import prefer_fastest_attention
from bigsci_launch.train.parallel.compiled import compile_layers
from bigsci_launch.train.parallel.fp8 import has_fp8, use_fp8
from bigsci_launch.train.parallel.initial_weights import Draw
from bigsci_launch.train.parallel.loss import IN_PARTS, VocabularyParallelLoss, compiled_kernels
from bigsci_launch.train.parallel.model import (
    FinalNorm,
    GptSizes,
    InputNorm,
    LearnedPositions,
    OutputEmbedding,
    TransformerLayer,
    VocabularyEmbedding,
    count_parameters,
    tied_logits,
)
from bigsci_launch.train.parallel.optimizer import (
    EagerAdamW,
    GroupRule,
    group_by_shape,
    make_optimizer,
    read_norm_once,
)
from bigsci_launch.train.parallel.reduction import overlap_reduction
from bigsci_launch.train.parallel.sequence import parameters_of_parts, sum_gradients_of_parts
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.rank.collective import gather
from bigsci_launch.train.rank.quiet import talk_as_debug

log = logging.getLogger(__name__)

_NEVER = 10**9
EMBEDDING_KEY = "embedding"
SPLIT_FURTHER = "split the model further: parallelism.tensor_parallel_size or parallelism.pipeline_parallel_size"
ZERO_SUPPORTED_OPTIMIZERS.append(EagerAdamW)


@dataclass(frozen=True, slots=True)
class Build:
    """What an engine is built of: a run file with a size of micro-batches, the first global batch size, the class of
    the embedding, and the rule that decides the optimizer group of a parameter."""

    config: RunConfig
    batch_size: int
    embedding: type[VocabularyEmbedding] = VocabularyEmbedding
    group_rule: GroupRule = group_by_shape


def layer_specs(
    config: RunConfig, sizes: GptSizes, ranks: TensorParallel, table: type[VocabularyEmbedding] = VocabularyEmbedding
) -> list[LayerSpec]:
    """Return specs of all layers of the model, in order, with embeddings of class `table`; builds nothing."""
    seed, tied = config.run.seed, config.model.tied_embeddings
    draw = Draw(seed, "model")
    embedding, positions = (sizes, draw.inside("embedding"), ranks), (sizes, draw.inside("positions"), ranks)
    tie = embedding_tie(config)
    shared = {"tied_weight_attr": list(tie.attributes)} if tie else {}
    head = (
        TiedLayerSpec(EMBEDDING_KEY, table, *embedding, forward_fn=tied_logits, **shared)
        if tied
        else LayerSpec(OutputEmbedding, sizes, draw.inside("output"), ranks)
    )
    return [
        TiedLayerSpec(EMBEDDING_KEY, table, *embedding, **shared) if tied else LayerSpec(table, *embedding),
        *([LayerSpec(LearnedPositions, *positions)] if sizes.positions == "learned" else []),
        *([LayerSpec(InputNorm, sizes)] if config.model.embedding_norm else []),
        *(
            LayerSpec(TransformerLayer, sizes, draw.inside(f"layer{number}"), ranks)
            for number in range(sizes.num_layers)
        ),
        LayerSpec(FinalNorm, sizes),
        head,
    ]


class CutPipeline(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's pipeline, cut at our own bounds if the partition method lists the layer count of every stage."""

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        # Gloo receives for a GPU on the host, and then copies into the weight, which autograd sees as an operation.
        super()._synchronize_tied_weights()

    def _partition_layers(self, method: str = "uniform") -> None:
        counts = parse_layer_counts(method)
        if counts is None:
            super()._partition_layers(method)
            return
        names = [spec.typename.__name__ for spec in self._layer_specs]
        layers = [Layer(name, is_transformer=name == TransformerLayer.__name__) for name in names]
        self.parts = list(cut_at_counts(layers, counts, self.num_stages))
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def planned_setup(config: RunConfig, topology: Topology) -> Setup:
    """Return the run as the planner sees it; an unsettled cut by price uses the uncalibrated prices."""
    setup = Setup.of_config(config, topology, topology.world_size)
    return settle_method(replace(setup, partition_rule=PartitionRule.of_deepspeed(deepspeed_version)), Calibration())


def build_engine(build: Build, topology: Topology, ranks: TensorParallel) -> PipelineEngine:
    """Build this rank's stage with its optimizer; a collective call.

    Raises:
        ConfigError: a stage could not be trained.
        MemoryShortageError: its state alone does not fit.
    """
    try:
        return _build_engine(build, topology, ranks)
    except torch.OutOfMemoryError:
        raise _no_room(build.config, topology) from None


def _build_engine(build: Build, topology: Topology, ranks: TensorParallel) -> PipelineEngine:
    config = build.config
    require_precision(config)
    sizes, setup = GptSizes.of_config(config), planned_setup(config, topology)
    compiles = config.training.compile
    with talk_as_debug():
        module = CutPipeline(
            layers=layer_specs(config, sizes, ranks, build.embedding),
            topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
            loss_fn=VocabularyParallelLoss(sizes.vocab, ranks, compiled_kernels() if compiles else IN_PARTS),
            partition_method=setup.partition_method,
            checkpointable_layers=[TransformerLayer.__name__],
        )
        require_trainable(config, topology, stage_layers(module))
        if build.embedding is VocabularyEmbedding:
            require_layout(module, lay_out_stages(setup))
        if config.training.precision == "fp8":
            use_fp8(module)
        for layer in module.modules():
            if isinstance(layer, TransformerLayer):
                layer.is_selective = config.training.activation_checkpointing == "selective"
        prefer_fastest_attention()
        read_norm_once()
        if compiles:
            compile_layers(module, by_rule=config.training.deterministic or topology.tp > 1)
        engine, *_ = initialize(
            model=module,
            optimizer=make_optimizer(module, config.optimizer, build.group_rule),
            config=engine_settings(config, topology, build.batch_size),
        )
    require_one_format(module, config)
    if "data" in (config.parallelism.overlap or ()):
        overlap_reduction(engine, parameters_of_parts(module, ranks))
    sum_gradients_of_parts(engine, ranks)
    return engine


def _no_room(config: RunConfig, topology: Topology) -> MemoryShortageError:
    """Return the error for an engine that could not even be built: no size of micro-batches changes that."""
    expected = expected_memory(planned_setup(config, topology), 1)
    return MemoryShortageError(
        f"out of memory before the first step: weights, gradients and optimizer state alone are expected to need "
        f"{expected.state_gib + expected.optimizer_gib:.3g} GiB on the fullest rank",
        hint=SPLIT_FURTHER,
    )


def require_precision(config: RunConfig) -> None:
    """Refuse a number format that the device does not support.

    Raises:
        ConfigError: names a format that it supports.
    """
    device = get_accelerator()
    if config.training.precision == "fp16" and not device.is_fp16_supported():
        raise ConfigError(
            f"training.precision: fp16: this rank's {device.device_name()} does not support it",
            hint="set training.precision to bf16, or run on GPUs",
        )
    if config.training.precision == "fp8" and not has_fp8():
        raise ConfigError(
            f"training.precision: fp8: {torch.cuda.get_device_name()} does not compute in it",
            hint="set training.precision to bf16, or run on NVIDIA GPUs of the Ada or Hopper generation or newer",
        )


def require_one_format(module: nn.Module, config: RunConfig) -> None:
    """Refuse weights whose number format is not that of the run.

    DeepSpeed stores a group as one tensor in the widest format of its members. With mixed formats the run would crash,
    or save checkpoints that cannot be loaded.

    Raises:
        ConfigError: names the rule and the remedy.
    """
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.training.weight_format]
    other = [name for name, parameter in module.named_parameters() if parameter.dtype != wanted]
    if other:
        found = str(dict(module.named_parameters())[other[0]].dtype).removeprefix("torch.")
        raise ConfigError(
            f"preflight: one number format: training.precision: {config.training.precision}, but {other[0]} and "
            f"{len(other) - 1} more are {found}",
            hint="keep the weights in the run's format; a layer may convert to another one inside forward",
        )


def require_trainable(config: RunConfig, topology: Topology, stages: Sequence[Sequence[str]]) -> None:
    """Refuse a cut that would hang or crash; `stages` holds the class names of every stage's layers.

    Raises:
        ConfigError: names the rule and the remedy; `guards.preflight: warn` logs a warning instead.
    """
    tied, precision = config.model.tied_embeddings, config.training.weight_format
    refusals = find_stage_refusals(stages, tied=tied, tp=topology.tp, precision=precision)
    refusals += find_tie_refusals(embedding_tie(config), pp=topology.pp, precision=precision)
    if not refusals:
        return
    first = refusals[0]
    if config.guards.preflight == "warn":
        log.warning("preflight: %s: %s. %s", first.rule, first.text, first.price)
        return
    raise ConfigError(
        f"preflight: {first.rule}: parallelism.pipeline_parallel_size: {first.text}; {first.price}",
        hint=remedy(config),
    )


def engine_settings(config: RunConfig, topology: Topology, batch_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run file."""
    training = config.training
    size, has_parts = assumed_size(training, topology), config.parallelism.sequence_parallel
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": batch_size // (size * topology.dp),
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": 1},
        "steps_per_print": _NEVER,
        # It synchronizes the device before the forward pass of every micro batch.
        "timers": {"throughput": {"enabled": False}},
        "checkpoint": {"tag_validation": "Ignore"},
        "pipeline": {
            "activation_checkpoint_interval": int(training.activation_checkpointing is True),
            "use_reentrant": False,
            # By default each tensor-parallel rank sends a part of what all have, and they gather it.
            **(dict.fromkeys(("pipe_partitioned", "grad_partitioned"), False) if has_parts else {}),
        },
    }
    if training.weight_format == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}
    if training.weight_format == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def stage_layers(module: PipelineModule) -> list[list[str]]:
    """Return the class names of every stage's layers, first stage first."""
    names = [spec.typename.__name__ for spec in module._layer_specs]
    bounds = [int(bound) for bound in module.parts]
    return [names[first:last] for first, last in pairwise(bounds)]


def require_layout(module: PipelineModule, planned: Sequence[StageLayout]) -> None:
    """Check that all ranks hold the planned layers and parameter counts; a collective call.

    Raises:
        BslError: a rank holds something else, so the plan's figures would describe another model.
    """
    names = tuple(spec.typename.__name__ for spec in module._layer_specs[module._local_start : module._local_stop])
    everywhere = gather((module.stage_id, names, count_parameters(module)))
    for rank, (stage, layers, count) in enumerate(everywhere):
        if (layers, count) != (planned[stage].layers, planned[stage].num_parameters):
            (expected,) = layout_lines([planned[stage]])
            raise BslError(f"rank {rank} holds {', '.join(layers)}; {count} parameters. The plan was {expected}")


def describe_layout(config: RunConfig, topology: Topology) -> list[str]:
    """Return one line per stage that lists its layers; `require_layout` has compared them with the ranks."""
    return layout_lines(lay_out_stages(planned_setup(config, topology)))
