"""Checks of sizes: ranks on nodes, heads and widths over tensor-parallel ranks, batches over replicas."""

from __future__ import annotations

from bigsci_launch.config.finding import DP, PP, TP
from bigsci_launch.config.rules.layout import LayoutFacts, Limits, Wrong

NODES, MICRO_BATCH, BATCH = "slurm.nodes", "training.micro_batch_size", "training.global_batch_size"
HEADS, KEY_VALUE_HEADS, HIDDEN = "model.num_attention_heads", "model.num_key_value_heads", "model.hidden_size"
FFN, LAYERS, RANKS = "model.ffn_hidden_size", "model.num_layers", "site.ranks_per_node"


def ranks_fill_nodes(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    world, ranks = layout.topology.world_size, layout.ranks_per_node
    if world > ranks and world % ranks:
        return DP, NODES, f"{layout.topology} is {world} ranks, which do not fill whole nodes of {ranks}"
    return None


def site_has_nodes(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    if limits.max_nodes is not None and layout.num_nodes > limits.max_nodes:
        text = f"{layout.num_nodes} nodes, but the partition offers {limits.max_nodes} besides reserve and spare nodes"
        return NODES, "site.reserve_nodes", text
    return None


def tensor_parallel_in_node(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    tp, ranks, nodes = layout.topology.tp, layout.ranks_per_node, layout.nodes_per_domain
    if ranks % tp == 0 or (tp % ranks == 0 and tp // ranks <= nodes):
        return None
    text = f"tp {tp} does not divide the {ranks} ranks of a node"
    if nodes > 1:
        text = f"tp {tp} neither divides the {ranks} ranks of a node nor fills nodes of an NVLink domain of {nodes}"
    return TP, RANKS, f"{text}: a tensor-parallel group would cross the network"


def replica_on_nodes(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    replica, ranks = layout.topology.tp * layout.topology["cp"] * layout.topology.pp, layout.ranks_per_node
    if replica % ranks and ranks % replica:
        return PP, TP, f"a replica of {replica} ranks neither fills nodes of {ranks} nor divides one"
    return None


def heads_divide(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    shape = layout.shape
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    shared, width = shape.num_key_value_heads or heads, shape.head_size or hidden // heads
    if hidden % heads and not shape.head_size:
        return HEADS, HIDDEN, f"hidden size {hidden} is not a multiple of {heads} heads"
    if heads % shared:
        return KEY_VALUE_HEADS, HEADS, f"{heads} heads are not a multiple of {shared} key/value heads"
    if shape.positions == "rotary" and width % 2:
        return "model.positions", HEADS, f"rotary positions need an even head width; {hidden} / {heads} is {width}"
    return None


def tensor_parallel_divides(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    shape, tp = layout.shape, layout.topology.tp
    sizes = (
        (HEADS, shape.num_attention_heads, "heads"),
        (KEY_VALUE_HEADS, _cut_key_value_heads(layout), "key/value heads"),
        (HIDDEN, shape.hidden_size, "hidden"),
        (FFN, shape.ffn_hidden_size or 4 * shape.hidden_size, "MLP columns"),
    )
    for key, size, words in sizes:
        if size % tp:
            return key, TP, f"{size} {words} are not a multiple of tp {tp}"
    return None


def _cut_key_value_heads(layout: LayoutFacts) -> int:
    """Return the key/value heads that tensor-parallel ranks share. Megatron copies them to more ranks than there are
    heads; torchtitan (torchtitan#2577) and `bsl train` do not."""
    heads = layout.shape.num_key_value_heads or layout.shape.num_attention_heads
    is_copied = layout.framework == "megatron" and layout.topology.tp % heads == 0
    return heads * (layout.topology.tp // heads) if is_copied else heads


def _unit(layout: LayoutFacts) -> tuple[int, str]:
    """Return the samples of one micro batch on all replicas, and how they come about."""
    replicas = "dp" if layout.topology["ep"] == 1 else "dp x ep"
    unit = layout.micro_batch_size * layout.num_replicas
    return unit, f"micro batch {layout.micro_batch_size} x {replicas} {layout.num_replicas} = {unit}"


def batch_divides(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    unit, words = _unit(layout)
    size = layout.global_batch_size
    return (BATCH, MICRO_BATCH, f"global batch {size} is not a multiple of {words}") if size % unit else None


def ramp_divides(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    """Megatron's own check fires only when training reaches that size, days later."""
    unit, words = _unit(layout)
    # Remainders of a ramp repeat, so its first `unit` sizes show all of them.
    broken = next((size for size in limits.ramp[:unit] if size % unit), None)
    if broken is None:
        return None
    key = "training.rampup.start" if limits.ramp[0] % unit else "training.rampup.increment"
    return key, MICRO_BATCH, f"the ramp reaches {broken}, not a multiple of {words}"


def stages_are_filled(layout: LayoutFacts, limits: Limits) -> Wrong | None:
    pp, num_layers = layout.topology.pp, layout.shape.num_layers
    if num_layers < pp:
        return PP, LAYERS, f"{num_layers} layers cannot fill {pp} stages: {pp - num_layers} would have no layer"
    try:
        empty = [stage for stage, layers in enumerate(layout.layers_per_stage or ()) if not layers]
    except ValueError as problem:
        return PP, LAYERS, str(problem)
    if not empty:
        return None
    return PP, LAYERS, f"{layout.partition_method} leaves stage {empty[0]} of {pp} without a transformer layer"
