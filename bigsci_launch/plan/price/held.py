"""What a rank holds: weights of a layer and of the stage that has most, and its part of a model in any program."""

from __future__ import annotations

from dataclasses import dataclass

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


FP32 = 4


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of a rank at the fullest moment of a step, without the optimizer's share. `kept` are activations of all
    micro-batches in flight; `working` is everything else that is not state."""

    weights_and_gradients: float
    kept: float
    working: float


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One rank's part of a model: its transformer layers and parameters, the parameters whose optimizer state it has,
    and the micro-batches that it keeps at once."""

    setup: Setup
    number: int
    num_layers: int
    parameters: float
    shared: float
    in_flight: float

    @property
    def _element(self) -> int:
        return self.setup.element_bytes

    @property
    def _tokens(self) -> int:
        return self.setup.tokens_per_micro_batch

    @property
    def _is_last(self) -> bool:
        return self.number == self.setup.topology.pp - 1

    @property
    def _stream(self) -> float:
        """Bytes of the residual stream of a micro-batch."""
        return self._element * self.setup.stream_elements

    @property
    def _part(self) -> float:
        """Bytes of this rank's part of it."""
        return self._element * self.setup.stream_part
