"""Rules that tell which setups can run at all, and which run badly. Each is one small function with its source.

Hard rules refuse a setup. Advice only adds a remark, with the cost if the model knows it. The rules for a whole run
file are in `config.check`; the rules here apply to setups, of which a search makes thousands.
"""

from __future__ import annotations

from bigsci_launch.config.checks.node import spans_whole_nodes
from bigsci_launch.config.finding import DP, PP, TP, Finding
from bigsci_launch.plan.shape.ramp import filling_batch_size
from bigsci_launch.plan.shape.rule import Limits, Rule
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.plan.shape.technique_rules import MICRO_BATCH_RULES, TECHNIQUE_RULES

EMPTY_STAGE = "empty stage"
NO_START = "the job would fail at its start"
NODES, HEADS, MICRO_BATCH = "slurm.nodes", "model.num_attention_heads", "training.micro_batch_size"


def _world_size(setup: Setup, limits: Limits) -> str | None:
    world, ranks = setup.topology.world_size, setup.ranks_per_node
    if world > ranks and world % ranks:
        return f"{setup.topology} is {world} ranks, which do not fill whole nodes of {ranks}"
    return None


def _tensor_parallel_in_node(setup: Setup, limits: Limits) -> str | None:
    tp, ranks = setup.topology.tp, setup.ranks_per_node
    if ranks % tp == 0 or spans_whole_nodes(tp, ranks, limits.domain_nodes):
        return None
    return f"tp {tp} does not divide the {ranks} ranks of a node"


def _replica_on_nodes(setup: Setup, limits: Limits) -> str | None:
    replica, ranks = setup.topology.tp * setup.topology["cp"] * setup.topology.pp, setup.ranks_per_node
    if replica % ranks and ranks % replica:
        return f"a replica of {replica} ranks neither fills nodes of {ranks} nor divides one"
    return None


def _heads_divide_hidden(setup: Setup, limits: Limits) -> str | None:
    hidden, heads = setup.shape.hidden_size, setup.shape.num_attention_heads
    if hidden % heads and not setup.shape.head_size:
        return f"hidden size {hidden} is not a multiple of {heads} heads"
    shared = setup.shape.num_key_value_heads or heads
    return f"{heads} heads are not a multiple of {shared} key/value heads" if heads % shared else None


def _tensor_parallel_divides(setup: Setup, limits: Limits) -> str | None:
    shape, tp = setup.shape, setup.topology.tp
    sizes = {
        "heads": shape.num_attention_heads,
        "key/value heads": _cut_key_value_heads(setup),
        "hidden": shape.hidden_size,
        "MLP columns": shape.ffn_hidden_size,
    }
    broken = next((f"{size} {name}" for name, size in sizes.items() if size % tp), None)
    return f"{broken} are not a multiple of tp {tp}" if broken else None


def _cut_key_value_heads(setup: Setup) -> int:
    """Return the key/value heads that tensor-parallel ranks share. Megatron copies them to more ranks than there are
    heads; torchtitan (torchtitan#2577) and `bsl train` do not."""
    heads = setup.shape.num_key_value_heads or setup.shape.num_attention_heads
    is_copied = setup.framework == "megatron" and setup.topology.tp % heads == 0
    return heads * (setup.topology.tp // heads) if is_copied else heads


def _stages_are_filled(setup: Setup, limits: Limits) -> str | None:
    pp, num_layers = setup.topology.pp, setup.shape.num_layers
    if num_layers < pp:
        return f"{num_layers} layers leave some of {pp} stages without a transformer layer"
    try:
        empty = [stage for stage, layers in enumerate(setup.layers_per_stage) if not layers]
    except ValueError as problem:
        return str(problem)
    if not empty:
        return None
    return f"{setup.partition_method} leaves stage {empty[0]} of {pp} without a transformer layer"


def _unit(setup: Setup) -> tuple[int, str]:
    """Return the samples of one micro batch on all replicas, and how they come about."""
    replicas = "dp" if setup.topology["ep"] == 1 else "dp x ep"
    words = f"micro batch {setup.micro_batch_size} x {replicas} {setup.num_replicas}"
    return setup.micro_batch_size * setup.num_replicas, words


def _global_batch(setup: Setup, limits: Limits) -> str | None:
    unit, words = _unit(setup)
    size = setup.global_batch_size
    return f"global batch {size} is not a multiple of {words}" if size % unit else None


def _every_batch_of_the_ramp(setup: Setup, limits: Limits) -> str | None:
    unit, words = _unit(setup)
    broken = next((phase.global_batch_size for phase in limits.phases if phase.global_batch_size % unit), None)
    return None if broken is None else f"the ramp reaches {broken}, not a multiple of {words}"


def _nodes_of_the_site(setup: Setup, limits: Limits) -> str | None:
    if limits.max_nodes is not None and setup.num_nodes > limits.max_nodes:
        return f"{setup.num_nodes} nodes, but the site offers {limits.max_nodes} besides its reserve"
    return None


HARD_RULES: tuple[Rule, ...] = (
    Rule(
        "world size",
        "the ranks fill whole nodes",
        "Megatron-DeepSpeed arguments",
        (DP, NODES),
        ("nodes",),
        _world_size,
    ),
    Rule(
        "nodes",
        "nodes are within the partition less its reserve",
        "BLOOM: 48 of 52 nodes",
        (NODES, "site.reserve_nodes"),
        ("nodes",),
        _nodes_of_the_site,
    ),
    Rule(
        "tp in a node",
        "tp divides the GPUs of a node, or fills nodes of an NVLink domain",
        "BLOOM: TP = gpus per node",
        (TP, "site.ranks_per_node"),
        ("tp",),
        _tensor_parallel_in_node,
    ),
    Rule(
        "replica on nodes",
        "tp x cp x pp fills nodes or divides one",
        "BLOOM's prequel",
        (PP, TP),
        ("tp", "pp"),
        _replica_on_nodes,
    ),
    Rule(
        "heads",
        "heads divide the hidden size, if they have no width of their own",
        "Megatron-DeepSpeed arguments",
        (HEADS, "model.hidden_size"),
        (),
        _heads_divide_hidden,
    ),
    Rule(
        "tp divides",
        "tp divides heads, key/value heads, hidden and MLP",
        "Megatron-DeepSpeed transformer, torchtitan#2577",
        (TP, HEADS),
        ("tp",),
        _tensor_parallel_divides,
    ),
    *TECHNIQUE_RULES,
    Rule(
        "batch",
        "micro batch x replicas divides the batch",
        "Megatron-DeepSpeed microbatches",
        ("training.global_batch_size", MICRO_BATCH),
        ("dp", "size"),
        _global_batch,
    ),
    Rule(
        "ramp-up",
        "micro batch x replicas divides every batch of the ramp",
        "Megatron-DeepSpeed microbatches",
        ("training.rampup.increment", MICRO_BATCH),
        ("dp", "size"),
        _every_batch_of_the_ramp,
    ),
    *MICRO_BATCH_RULES,
    Rule(
        EMPTY_STAGE,
        "every stage has a layer",
        "DeepSpeed#4312, DeepSpeed#5078, gpt_model",
        (PP, "model.num_layers"),
        ("tp", "pp", "cut"),
        _stages_are_filled,
    ),
)


def find_refusal(setup: Setup, limits: Limits) -> Finding | None:
    """Return the first hard rule that `setup` breaks, as a finding."""
    for rule in HARD_RULES:
        text = rule.check(setup, limits)
        if text:
            return Finding(rule.name, "error", rule.keys, text, NO_START)
    return None


def advise(setup: Setup) -> tuple[str, ...]:
    """Return remarks on a legal setup, most costly first."""
    checks = (
        _head_size,
        _without_effect,
        _fused_softmax,
        _uneven_stages,
        _row_width,
        _micro_batch_power,
        _thin_pipeline,
    )
    return tuple(text for text in (check(setup) for check in checks) if text)


def _head_size(setup: Setup) -> str | None:
    """NVIDIA's matrix-multiply guide; a head size of 13824 / 128 = 108 was measured a third slower."""
    if setup.shape.head_dim % 8:
        return f"head size {setup.shape.head_dim:g} is not a multiple of 8: attention is about 25 times slower (priced)"
    return None


def _without_effect(setup: Setup) -> str | None:
    """Megatron-LM turns sequence parallelism off by itself at tp 1 (arguments.py)."""
    is_alone = setup.technique.sequence_parallel and setup.topology.tp == 1
    return "sequence parallelism has no effect with tp 1" if is_alone else None


def _fused_softmax(setup: Setup) -> str | None:
    """Megatron-DeepSpeed's fused softmax: 16 < seq <= 2048, seq % 4 = 0, heads per rank x micro batch % 4 = 0."""
    length = setup.shape.sequence_length
    planes = setup.shape.num_attention_heads // setup.topology.tp * setup.micro_batch_size
    if setup.technique.attention == "fused" or (16 < length <= 2048 and length % 4 == 0 and planes % 4 == 0):
        return None
    return (
        f"the fused softmax needs 16 < length <= 2048, length % 4 = 0 and heads per rank x micro batch ({planes}) % 4"
    )


def _uneven_stages(setup: Setup) -> str | None:
    """Megatron-LM#381, #1303; the slowest stage sets the pace."""
    layers = setup.layers_per_stage
    inner = layers[1:-1] or layers
    idle = max(layers) * len(layers) - sum(layers)
    if max(inner) == min(inner) or not idle:
        return None
    return f"stages are uneven: {idle} layer slots of {max(layers) * len(layers)} idle (priced)"


def _row_width(setup: Setup) -> str | None:
    """128-byte rows on A100: NVIDIA's guide, arXiv 2401.14489."""
    width = setup.shape.hidden_size // setup.topology.tp
    return f"hidden / tp = {width} is not a multiple of 64" if width % 64 else None


def _micro_batch_power(setup: Setup) -> str | None:
    size = setup.micro_batch_size
    return f"micro batch {size} is not a power of two" if size & (size - 1) else None


def _thin_pipeline(setup: Setup) -> str | None:
    filling = filling_batch_size(setup.micro_batch_size, setup.num_replicas, setup.topology.pp)
    if setup.global_batch_size < filling:
        return f"the batch never fills the pipeline, which takes {filling} samples"
    return None
