"""Hard rules on how a program computes: context and sequence parallelism, experts, sharding, the schedule."""

from __future__ import annotations

from bigsci_launch.config.finding import DP, PP, TP
from bigsci_launch.plan.shape.own_cut import can_cut, is_cut_by_deepspeed
from bigsci_launch.plan.shape.rule import Limits, Rule
from bigsci_launch.plan.shape.setup import Setup

LENGTH, SCHEDULE, ZERO = "model.sequence_length", "parallelism.schedule", "parallelism.zero_stage"
CP, SHARDS = "parallelism.context_parallel_size", "parallelism.expert_shards"


def _context_parallel(setup: Setup, limits: Limits) -> str | None:
    length, cp = setup.shape.sequence_length, setup.topology["cp"]
    # The second half of the chunks goes to the ranks in reverse order, because causal attention costs more there.
    chunks = 2 * cp if cp > 1 and setup.framework in ("megatron", "torchtitan") else cp
    return f"{length} tokens are not a multiple of {chunks} chunks for cp {cp}" if length % chunks else None


def _sequence_parallel(setup: Setup, limits: Limits) -> str | None:
    tp, length = setup.topology.tp, setup.shape.sequence_length // setup.topology["cp"]
    if setup.technique.sequence_parallel and length % tp:
        return f"{length} tokens of a rank are not a multiple of tp {tp}, over which sequence parallelism spreads them"
    return None


def _experts(setup: Setup, limits: Limits) -> str | None:
    experts, shards, topology = setup.shape.experts, setup.expert_shards, setup.topology
    if shards == 1:
        return None
    if experts is None:
        return f"there are no experts to spread over {shards} ranks"
    if experts.count % shards:
        return f"{experts.count} experts are not a multiple of {shards} ranks"
    ranks = setup.num_replicas * topology["cp"] * topology.tp
    return f"{shards} ranks with experts do not divide the {ranks} ranks of a stage" if ranks % shards else None


def _zero_stage(setup: Setup, limits: Limits) -> str | None:
    stage, pp = setup.technique.zero_stage, setup.topology.pp
    if stage > 1 and pp > 1 and is_cut_by_deepspeed(setup.framework):
        return f"DeepSpeed's pipeline of pp {pp} does not work with ZeRO stage {stage}"
    return None


def _shard_group(setup: Setup, limits: Limits) -> str | None:
    size, dp = setup.technique.shard_group_size, setup.topology.dp
    return f"groups of {size} that share the state do not divide dp {dp}" if size and dp % size else None


def _pipeline(setup: Setup, limits: Limits) -> str | None:
    pp, schedule = setup.topology.pp, setup.technique.schedule
    if pp > 1 and setup.framework == "fsdp":
        return f"FSDP alone has no pipeline, so none of pp {pp}; torchtitan has one"
    return f"a schedule of {schedule} needs a pipeline, not pp 1" if pp == 1 and schedule != "1f1b" else None


def _layers(setup: Setup, limits: Limits) -> str | None:
    pp, chunks, layers = setup.topology.pp, setup.technique.chunks_per_rank, setup.shape.num_layers
    if can_cut(setup.framework, layers, pp, chunks, setup.partition_method):
        return None
    stages = f"pp {pp}" if chunks == 1 else f"pp {pp} x {chunks} chunks"
    if setup.framework == "megatron":
        return f"neither {layers} layers nor {layers + 2} with embedding and head are a multiple of {stages}"
    if setup.framework == "torchtitan":
        return f"{layers} layers with embedding and head are fewer than {stages}"
    return f"{layers} layers are not a multiple of {stages}"


def _micro_batches(setup: Setup, limits: Limits) -> str | None:
    if setup.technique.schedule != "interleaved":
        return None
    pp, unit = setup.topology.pp, setup.micro_batch_size * setup.num_replicas
    for size in (setup.global_batch_size, *(phase.global_batch_size for phase in limits.phases)):
        count = size // unit
        rounds = max(1, count // pp) if setup.framework == "torchtitan" else pp
        if count % rounds:
            return f"{count} micro batches of batch {size} are not a multiple of {rounds}, as interleaving requires"
    return None


TECHNIQUE_RULES: tuple[Rule, ...] = (
    Rule(
        "context parallel",
        "chunks of cp divide the sequence",
        "Megatron-LM arguments, torchtitan parallel_dims: 2 x cp chunks",
        (LENGTH, CP),
        (),
        _context_parallel,
    ),
    Rule(
        "sequence parallel",
        "tp divides the tokens of a rank",
        "Megatron-LM arguments, torchtitan parallel_dims",
        (LENGTH, TP),
        ("tp",),
        _sequence_parallel,
    ),
    Rule(
        "experts",
        "ranks with experts divide the experts, and the dp x cp x tp ranks of a stage",
        "Megatron-LM parallel_state, torchtitan parallel_dims",
        (SHARDS, DP),
        ("tp", "dp"),
        _experts,
    ),
    Rule(
        "zero stage",
        "DeepSpeed's pipeline has ZeRO stage 0 or 1",
        "DeepSpeed PipelineEngine, DeepSpeed#1110",
        (ZERO, PP),
        ("pp",),
        _zero_stage,
    ),
    Rule(
        "shard group",
        "ranks that share the state divide dp",
        "torchtitan parallel_dims: dp_replicate x dp_shard",
        ("parallelism.shard_group_size", DP),
        ("dp",),
        _shard_group,
    ),
    Rule(
        "pipeline",
        "interleaved and zero_bubble need a pipeline, and FSDP has none",
        "Megatron-LM arguments, arXiv 2401.10241",
        (PP, SCHEDULE),
        ("pp",),
        _pipeline,
    ),
    Rule(
        "layers",
        "stages, or chunks of them, divide the layers where the framework cuts evenly",
        "Megatron-LM arguments and transformer_config",
        (PP, "model.num_layers"),
        ("pp",),
        _layers,
    ),
)
"""Those that do not depend on the size of micro-batches."""

MICRO_BATCH_RULES: tuple[Rule, ...] = (
    Rule(
        "interleaving",
        "pp divides the micro batches",
        "Megatron-LM schedules, torch ScheduleInterleaved1F1B",
        ("parallelism.chunks_per_rank", PP),
        ("pp", "dp", "size"),
        _micro_batches,
    ),
)
