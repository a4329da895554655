"""The model as DeepSpeed's pipeline: layers cut into stages, and the engine that runs them.

Settings that this trainer depends on, each for a measured reason: ZeRO stage 1 also in fp32 (the plain optimizer clips
by a wrong norm under pipeline parallelism), bf16 with fp32 accumulation (`BF16_Optimizer`, the only bf16 optimizer
whose checkpoints load again at every stage count), non-reentrant activation checkpointing (the other kind needs inputs
with gradients, and tokens have none), and no layer seeding (it would reseed dropout before every layer).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from deepspeed import initialize
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from bigsci_launch.config.schema import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.preflight import find_stage_refusals, remedy
from bigsci_launch.topology import Topology
from bigsci_launch.train.defects import Defects
from bigsci_launch.train.initial import Draw
from bigsci_launch.train.model import (
    FinalNorm,
    GptSizes,
    InputNorm,
    LearnedPositions,
    OutputEmbedding,
    TransformerLayer,
    VocabularyEmbedding,
    tied_logits,
)
from bigsci_launch.train.optimizer import make_optimizer
from bigsci_launch.train.parallel.tensor import TensorParallel, VocabularyParallelLoss
from bigsci_launch.train.startup import talk_as_debug

log = logging.getLogger(__name__)

_NEVER = 10**9
EMBEDDING_KEY = "embedding"


def layer_specs(
    config: RunConfig, sizes: GptSizes, ranks: TensorParallel, table: type[VocabularyEmbedding] = VocabularyEmbedding
) -> list[LayerSpec]:
    """The layers of the whole model, in order, with embeddings of class `table`; nothing is built yet."""
    seed, tied = config.run.seed, config.model.tied_embeddings
    draw = Draw(seed, "model")
    embedding = (sizes, draw.inside("embedding"), ranks)
    head = (
        TiedLayerSpec(EMBEDDING_KEY, table, *embedding, forward_fn=tied_logits)
        if tied
        else LayerSpec(OutputEmbedding, sizes, draw.inside("output"), ranks)
    )
    return [
        TiedLayerSpec(EMBEDDING_KEY, table, *embedding) if tied else LayerSpec(table, *embedding),
        LayerSpec(LearnedPositions, sizes, draw.inside("positions")),
        *([LayerSpec(InputNorm, sizes)] if config.model.embedding_norm else []),
        *(
            LayerSpec(TransformerLayer, sizes, draw.inside(f"layer{number}"), ranks)
            for number in range(sizes.num_layers)
        ),
        LayerSpec(FinalNorm, sizes),
        head,
    ]


def build_engine(
    config: RunConfig, topology: Topology, ranks: TensorParallel, batch_size: int, defects: Defects
) -> PipelineEngine:
    """This rank's stage with its optimizer; a collective call. `batch_size` is the first global batch size.

    Raises:
        ConfigError: a stage could not be trained.
    """
    sizes = GptSizes.of_config(config)
    with talk_as_debug():
        module = PipelineModule(
            layers=layer_specs(config, sizes, ranks, defects.embedding),
            topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
            loss_fn=VocabularyParallelLoss(sizes.vocab, ranks),
            partition_method=config.parallelism.partition_method,
            checkpointable_layers=[TransformerLayer.__name__],
        )
        require_trainable(config, topology, stage_layers(module))
        engine, *_ = initialize(
            model=module,
            optimizer=make_optimizer(module, config.optimizer, defects.group_rule),
            config=engine_settings(config, topology, batch_size),
        )
    return engine


def require_trainable(config: RunConfig, topology: Topology, stages: Sequence[Sequence[str]]) -> None:
    """Refuse a cut that would hang or crash, given by the class names of every stage's layers.

    Raises:
        ConfigError: naming rule and remedy, unless `guards.preflight` only warns.
    """
    tied, precision = config.model.tied_embeddings, config.training.precision
    refusals = find_stage_refusals(stages, tied=tied, tp=topology.tp, precision=precision)
    if not refusals:
        return
    first = refusals[0]
    if config.guards.preflight == "warn":
        log.warning("preflight: %s: %s. %s", first.rule, first.text, first.effect)
        return
    raise ConfigError(
        f"preflight: {first.rule}: parallelism.pipeline_parallel_size: {first.text}; {first.effect}",
        hint=remedy(config),
    )


def engine_settings(config: RunConfig, topology: Topology, batch_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run file."""
    training = config.training
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": batch_size // (training.micro_batch_size * topology.dp),
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": 1},
        "steps_per_print": _NEVER,
        "checkpoint": {"tag_validation": "Ignore"},
        "pipeline": {
            "activation_checkpoint_interval": int(training.activation_checkpointing),
            "use_reentrant": False,
        },
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def stage_layers(module: PipelineModule) -> list[list[str]]:
    """The class names of every stage's layers, the first stage first."""
    names = [spec.typename.__name__ for spec in module._layer_specs]
    bounds = [int(bound) for bound in module.parts]
    return [names[first:last] for first, last in pairwise(bounds)]


def describe_stages(stages: Sequence[Sequence[str]]) -> list[str]:
    """One line per stage: its layers in order, neighbours of one kind counted."""
    lines = []
    for stage, names in enumerate(stages):
        runs = [(name, len(list(run))) for name, run in groupby(names)]
        held = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
        lines.append(f"stage {stage}: {held}")
    return lines
