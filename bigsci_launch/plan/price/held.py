"""The weights that a rank holds: of a layer, and of the stage that has most."""

from __future__ import annotations

from bigsci_launch.plan.shape.setup import Setup


def layer_weights(setup: Setup) -> float:
    """Return the weights in the matrices of a layer on one rank, the mean over the layers."""
    shape, experts, tp = setup.shape, setup.shape.experts, setup.topology.tp
    if experts is None:
        return shape.layer_matrices / tp
    share = shape.expert_layers / shape.num_layers
    dense = shape.attention_matrices + (1 - share) * shape.mlp_matrices(shape.ffn_hidden_size)
    dense += share * shape.mlp_matrices(experts.shared_ffn_hidden_size)
    return dense / tp + expert_weights(setup)


def expert_weights(setup: Setup) -> float:
    """Return the weights of a layer's experts on one rank, which holds whole ones; the mean over the layers."""
    shape, experts = setup.shape, setup.shape.experts
    if experts is None:
        return 0.0
    held = experts.count / setup.expert_shards * shape.mlp_matrices(experts.ffn_hidden_size)
    return shape.expert_layers / shape.num_layers * held


def heaviest_stage(setup: Setup) -> float:
    """Return the weights on a rank of the heaviest stage: its layers, and a table of the vocabulary at either end."""
    layers, tp = setup.layers_per_stage, setup.topology.tp
    layer, table = layer_weights(setup), setup.shape.padded_vocab_size(tp) // tp * setup.shape.hidden_size
    return max(layers[0] * layer + table, max(layers) * layer, layers[-1] * layer + table)


def shard_ranks(setup: Setup) -> int:
    """Return the ranks that share one copy of what ZeRO shards."""
    ranks = setup.num_replicas * setup.topology["cp"]
    return min(ranks, setup.technique.shard_group_size or ranks)


def expert_shard_ranks(setup: Setup) -> float:
    """Return the ranks that share one copy of an expert's state: experts have fewer replicas than other layers."""
    return max(1.0, shard_ranks(setup) * setup.topology.tp / setup.expert_shards)
