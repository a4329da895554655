"""The table of rules that `bsl config check`, `bsl submit`, `bsl plan` and its search ask about a layout.

Each rule is one small function with its source. What it forbids would fail on the nodes, at the start or days later.
"""

from __future__ import annotations

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.rules import sizes, technique
from bigsci_launch.config.rules.layout import LayoutFacts, Limits, Rule

EMPTY_STAGE = "empty stage"
WORLD_SIZE = Rule(
    "world size", "the ranks fill whole nodes", "Megatron-DeepSpeed arguments", ("nodes",), sizes.ranks_fill_nodes
)

LAYOUT_RULES: tuple[Rule, ...] = (
    WORLD_SIZE,
    Rule(
        "nodes",
        "nodes are within the partition less its reserve",
        "BLOOM: 48 of 52 nodes",
        ("nodes",),
        sizes.site_has_nodes,
    ),
    Rule(
        "tp in a node",
        "tp divides the GPUs of a node, or fills nodes of an NVLink domain",
        "BLOOM: TP = gpus per node",
        ("tp",),
        sizes.tensor_parallel_in_node,
    ),
    Rule(
        "replica on nodes",
        "tp x cp x pp fills nodes or divides one",
        "BLOOM's prequel",
        ("tp", "pp"),
        sizes.replica_on_nodes,
        "warning",
    ),
    Rule(
        "heads",
        "heads divide the hidden size, if they have no width of their own",
        "Megatron-DeepSpeed arguments",
        (),
        sizes.heads_divide,
    ),
    Rule(
        "tp divides",
        "tp divides heads, key/value heads, hidden and MLP",
        "Megatron-DeepSpeed transformer, torchtitan#2577",
        ("tp",),
        sizes.tensor_parallel_divides,
    ),
    Rule(
        "context parallel",
        "chunks of cp divide the sequence",
        "Megatron-LM arguments, torchtitan parallel_dims: 2 x cp chunks",
        (),
        technique.context_parallel,
    ),
    Rule(
        "sequence parallel",
        "tp divides the tokens of a rank",
        "Megatron-LM arguments, torchtitan parallel_dims",
        ("tp",),
        technique.sequence_parallel,
    ),
    Rule(
        "experts",
        "ranks with experts divide the experts, and the dp x cp x tp ranks of a stage",
        "Megatron-LM parallel_state, torchtitan parallel_dims",
        ("tp", "dp"),
        technique.experts_spread,
    ),
    Rule(
        "zero stage",
        "DeepSpeed's pipeline has ZeRO stage 0 or 1",
        "DeepSpeed PipelineEngine, DeepSpeed#1110",
        ("pp",),
        technique.zero_stage,
    ),
    Rule(
        "shard group",
        "ranks that share the state divide dp",
        "torchtitan parallel_dims: dp_replicate x dp_shard",
        ("dp",),
        technique.shard_group,
    ),
    Rule(
        "pipeline",
        "interleaved and zero_bubble need a pipeline, and FSDP has none",
        "Megatron-LM arguments, arXiv 2401.10241",
        ("pp",),
        technique.pipeline,
    ),
    Rule(
        "layers",
        "stages, or chunks of them, divide the layers where the framework cuts evenly",
        "Megatron-LM arguments and transformer_config",
        ("pp",),
        technique.layers_divide,
    ),
    Rule(
        "batch",
        "micro batch x replicas divides the batch",
        "Megatron-DeepSpeed microbatches",
        ("dp", "size"),
        sizes.batch_divides,
    ),
    Rule(
        "ramp-up",
        "micro batch x replicas divides every batch of the ramp",
        "Megatron-DeepSpeed microbatches",
        ("dp", "size"),
        sizes.ramp_divides,
    ),
    Rule(
        "interleaving",
        "pp divides the micro batches",
        "Megatron-LM schedules, torch ScheduleInterleaved1F1B",
        ("pp", "dp", "size"),
        technique.micro_batches_divide,
    ),
    Rule(
        EMPTY_STAGE,
        "every stage has a layer",
        "DeepSpeed#4312, DeepSpeed#5078, gpt_model",
        ("tp", "pp", "cut"),
        sizes.stages_are_filled,
    ),
)


def find_refusal(layout: LayoutFacts, limits: Limits) -> Finding | None:
    """Return the first rule that `layout` breaks, so that it cannot run."""
    findings = (rule.finding(layout, limits) for rule in LAYOUT_RULES if rule.severity == "error")
    return next((finding for finding in findings if finding), None)
