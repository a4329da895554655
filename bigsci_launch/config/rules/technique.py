"""Checks of how a program computes: context and sequence parallelism, experts, sharding, the schedule."""

from __future__ import annotations

from bigsci_launch.config.finding import DP, PP, TP
from bigsci_launch.config.rules.layout import LayoutFacts, Limits, Wrong
from bigsci_launch.config.rules.own_cut import can_cut, is_cut_by_deepspeed
from bigsci_launch.config.rules.sizes import LAYERS

LENGTH, SCHEDULE, ZERO = "model.sequence_length", "parallelism.schedule", "parallelism.zero_stage"
CP, SHARDS, CHUNKS = "parallelism.context_parallel_size", "parallelism.expert_shards", "parallelism.chunks_per_rank"
EXPERTS = "model.experts.count"


def context_parallel(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    length, cp = layout.shape.sequence_length, layout.topology["cp"]
    # The second half of the chunks goes to the ranks in reverse order, because causal attention costs more there.
    chunks = 2 * cp if cp > 1 and layout.framework in ("megatron", "torchtitan") else cp
    return (
        (LENGTH, CP, f"{length} tokens are not a multiple of {chunks} chunks for cp {cp}") if length % chunks else None
    )


def sequence_parallel(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    tp, length = layout.topology.tp, layout.shape.sequence_length // layout.topology["cp"]
    if layout.technique.sequence_parallel and length % tp:
        text = f"{length} tokens of a rank are not a multiple of tp {tp}, over which sequence parallelism spreads them"
        return LENGTH, TP, text
    return None


def experts_spread(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    experts, shards, topology = layout.shape.experts, layout.expert_shards, layout.topology
    ranks = layout.num_replicas * topology["cp"] * topology.tp
    if experts is None:
        text = f"there are no experts to spread over {shards} ranks"
        return (SHARDS, "model.experts", text) if shards > 1 else None
    if experts.per_token > experts.count:
        text = f"{experts.per_token} experts per token are more than the {experts.count} experts"
        return "model.experts.per_token", EXPERTS, text
    if experts.dense_layers >= layout.shape.num_layers:
        text = f"{experts.dense_layers} dense layers of {layout.shape.num_layers} leave none with experts"
        return "model.experts.dense_layers", LAYERS, text
    if experts.count % shards:
        return SHARDS, EXPERTS, f"{experts.count} experts are not a multiple of {shards} ranks"
    if ranks % shards:
        return SHARDS, DP, f"{shards} ranks with experts do not divide the {ranks} ranks of a stage"
    return None


def zero_stage(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    stage, pp = layout.technique.zero_stage, layout.topology.pp
    if stage > 1 and pp > 1 and is_cut_by_deepspeed(layout.framework):
        return ZERO, PP, f"DeepSpeed's pipeline of pp {pp} does not work with ZeRO stage {stage}"
    return None


def shard_group(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    size, dp = layout.technique.shard_group_size, layout.topology.dp
    if size and dp % size:
        return "parallelism.shard_group_size", DP, f"groups of {size} that share the state do not divide dp {dp}"
    return None


def pipeline(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    pp, schedule, chunks = layout.topology.pp, layout.technique.schedule, layout.technique.chunks_per_rank
    if pp > 1 and layout.framework == "fsdp":
        return PP, "run.framework", f"FSDP alone has no pipeline, so pp must be 1, not {pp}; torchtitan has one"
    if pp == 1 and schedule != "1f1b":
        return PP, SCHEDULE, f"a schedule of {schedule} needs a pipeline, not pp 1"
    if (schedule == "interleaved") != (chunks > 1):
        return CHUNKS, SCHEDULE, f"{chunks} with {schedule}: more than 1 chunk is `interleaved`, and only that"
    return None


def layers_divide(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    pp, chunks, layers = layout.topology.pp, layout.technique.chunks_per_rank, layout.shape.num_layers
    if can_cut(layout.framework, layers, pp, chunks, layout.partition_method):
        return None
    stages = f"pp {pp}" if chunks == 1 else f"pp {pp} x {chunks} chunks"
    text = f"{layers} layers are not a multiple of {stages}"
    if layout.framework == "megatron":
        text = f"neither {layers} layers nor {layers + 2} with embedding and head are a multiple of {stages}"
    elif layout.framework in ("torchtitan", "fsdp"):
        text = f"{layers} layers with embedding and head are fewer than {stages}"
    return PP, LAYERS, text


def micro_batches_divide(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    if layout.technique.schedule != "interleaved" or layout.framework is None:
        return None
    pp, unit = layout.topology.pp, layout.micro_batch_size * layout.num_replicas
    for size in (layout.global_batch_size, *limits.ramp):
        count = size // unit
        rounds = max(1, count // pp) if layout.framework == "torchtitan" else pp
        if count % rounds:
            text = f"{count} micro batches of batch {size} are not a multiple of {rounds}, as interleaving requires"
            return CHUNKS, PP, text
    return None
