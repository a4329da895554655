"""Counts what ranks send to each other. Ranks are numbered tensor fastest, then context, expert, data, pipeline.

A group whose ranks are all in one NVLink domain sends over NVLink, at the rate of one GPU; any other one sends over the
network, at the rate of a node, which the groups of a node share. NVLink is counted in units of a tensor-parallel
all-reduce of 8 ranks as NCCL's bus bandwidth has it. Collectives are rings: with n ranks, a gather or a reduction is
n - 1 messages one after the other, an all-reduce both. The more nodes a ring has, the less of the nominal rate is left.
"""

from __future__ import annotations

import math

from bigsci_launch.plan.price.constants import NETWORK_SHARE
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.held import heaviest_stage, layer_weights, shard_ranks
from bigsci_launch.plan.price.terms import NO_WORK, WorkByTerm, work_of
from bigsci_launch.plan.shape.setup import Setup

NVLINK_UNIT = 8 / 7
"""Bytes of a tensor-parallel all-reduce are counted once, not twice (n - 1) / n times: 1 for 8 ranks."""

TP_EXPOSED = 0.8
"""Share of tensor-parallel communication that is still waited for where it overlaps with products. In an eager program
it is all: a rank has only its own part of a product to compute until the others' inputs are there."""

PP_EXPOSED = 0.2
"""The same for hops. Megatron sends the messages of interleaved chunks while it computes another one."""

DIRECT_SHARE = 0.96
"""Share of the nominal network rate that messages between two ranks reach: that of Jean Zay, fitted separately."""


INSIDE = 0.15
"""Time of a message over NVLink relative to one over the network."""

EAGER_MESSAGE = 40
"""How many times as long a message between nodes takes in tensor parallelism of an eager program with overlap, whose
hosts wait for each other at every collective. Chosen on the Ultra-Scale Playbook's layouts with tp 16 and 32."""

CROWDED_NODES = 4000
"""Nodes of a ring that double the time of its bytes: links are shared with other rings, and the slowest one counts."""

MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK, DEEPSPEED_BUCKET, TENSORS_OF_LAYER = 40e6, 1e6, 5e8, 9
"""Parameters that Megatron and DeepSpeed send at once, and the tensors of a layer, which other loops send singly."""


def tensor_parallel_exchange(setup: Setup) -> WorkByTerm:
    """Return the all-reduces of one layer and micro batch, or the gathers and scatters that move as much.

    Two in the forward pass, two in the backward, and two where the forward pass is repeated. Experts need none.
    """
    tp, shape = setup.topology.tp, setup.shape
    if tp == 1:
        return NO_WORK
    is_shared = shape.experts is not None and shape.experts.shared_ffn_hidden_size > 0
    blocks = 2 - shape.expert_layers / shape.num_layers * (0 if is_shared else 1)
    is_hidden = "tensor" in setup.technique.overlap and not setup.has_eager_overlap
    count = (setup.num_passes - 1) * blocks * (TP_EXPOSED if is_hidden else 1)
    sent = count * setup.tokens_per_micro_batch * shape.hidden_size * setup.element_bytes * (tp - 1) / tp
    messages = 2 * count * _ring(setup, tp)
    if tp <= setup.domain_ranks:
        return work_of(nvlink=sent * NVLINK_UNIT / 1e9, messages=messages)
    messages *= EAGER_MESSAGE if setup.has_eager_overlap else 1
    return work_of(network=2 * sent * _crowding(setup, tp) / 1e9, messages=messages)


def key_value_exchange(setup: Setup) -> WorkByTerm:
    """Return the keys and values that context-parallel ranks pass around while they compute attention, and their
    gradients."""
    cp, tp = setup.topology["cp"], setup.topology.tp
    if cp == 1:
        return NO_WORK
    width = 2 * setup.shape.key_value_size / tp * setup.element_bytes
    sent = setup.num_passes * (cp - 1) * setup.tokens_per_micro_batch * width
    return _by_place(setup, tp, cp, sent, setup.num_passes)


def logits_exchange(setup: Setup) -> WorkByTerm:
    """Return the logits that tensor-parallel ranks gather for a loss that needs the whole vocabulary."""
    tp = setup.topology.tp
    if tp == 1 or not setup.gathers_logits:
        return NO_WORK
    columns = setup.shape.padded_vocab_size(tp)
    return _by_place(setup, 1, tp, setup.element_bytes * setup.tokens_per_micro_batch * columns * (tp - 1) / tp, 1)


def expert_exchange(setup: Setup, gpu: GpuModel) -> WorkByTerm:
    """Return what a rank sends to the experts of other ranks and gets back, forward and backward."""
    experts, shards = setup.shape.experts, setup.expert_shards
    if experts is None or shards == 1:
        return NO_WORK
    tokens = setup.tokens_per_micro_batch / setup.topology.tp * (experts.capacity_factor or 1.0)
    one_way = tokens * setup.shape.hidden_size * setup.element_bytes
    sent = 2 * (setup.num_passes - 1) * one_way * setup.shape.expert_layers / setup.shape.num_layers
    if shards <= setup.domain_ranks:
        return work_of(nvlink=sent * experts.per_token * (shards - 1) / shards / 1.75 / 1e9)
    # A token goes once to every domain that has one of its experts.
    domains = shards / setup.domain_ranks
    others = domains * (1 - (1 - 1 / domains) ** experts.per_token) * (1 - 1 / domains)
    speedup = 1 / NETWORK_SHARE if gpu.network_gb_per_s else 1.0
    return work_of(network=sent * others * setup.ranks_per_node / speedup / 1e9)


def gathered_weights(setup: Setup) -> WorkByTerm:
    """Return what ZeRO beyond stage 1 sends for one layer and micro batch: weights that are gathered (twice where they
    are freed after the forward pass), and gradients that are scattered."""
    stage, ranks = setup.technique.zero_stage, shard_ranks(setup)
    if stage < 2 or ranks == 1:
        return NO_WORK
    gradient, weight = 4 if setup.framework == "torchtitan" else 2, _weight_bytes_of_layer(setup)
    return _collective(setup, ranks, (gradient + weight) * layer_weights(setup), 1 + weight / 2)


def _weight_bytes_of_layer(setup: Setup) -> int:
    """Return the bytes per parameter that are gathered with every layer and micro batch."""
    if setup.technique.zero_stage == 2:
        return 0 if setup.framework in ("deepspeed", "bsl", "other") else 2
    return 4


def weight_exchange(setup: Setup) -> WorkByTerm:
    """Return the gather of the heaviest stage's weights, once per step, where ZeRO-1 or ZeRO-2 shards its optimizer."""
    ranks = shard_ranks(setup)
    if ranks == 1 or setup.technique.zero_stage not in (1, 2):
        return NO_WORK
    if setup.technique.zero_stage == 2 and _weight_bytes_of_layer(setup):
        return NO_WORK
    return _collective(setup, ranks, setup.element_bytes * heaviest_stage(setup), _num_buckets(setup))


def gradient_exchange(setup: Setup) -> WorkByTerm:
    """Return what replicas send once per step for the heaviest stage: the reduction of its gradients.

    Rings of different tensor-parallel ranks share the links of a node.
    """
    technique, ranks = setup.technique, setup.num_replicas * setup.topology["cp"]
    group = shard_ranks(setup)
    if ranks == 1:
        return NO_WORK
    if technique.zero_stage >= 2:
        # The replicas of a shard add up their gradients; within the shard they were scattered with the layers.
        copies = ranks // group
        if copies == 1:
            return NO_WORK
        size, layers = 4 * heaviest_stage(setup) / group, max(setup.layers_per_stage)
        return _collective(setup, copies, size, 2 * layers, spread=group)
    count = (1 if _scatters(setup) else 2) * _num_buckets(setup)
    return _collective(setup, ranks, _gradient_bytes(setup) * heaviest_stage(setup), count)


def _num_buckets(setup: Setup) -> int:
    """Return how many collectives reduce the gradients of a rank of the heaviest stage."""
    if setup.framework == "other":
        return TENSORS_OF_LAYER * max(setup.layers_per_stage)
    bucket = DEEPSPEED_BUCKET
    if setup.framework == "megatron":
        bucket = max(MEGATRON_BUCKET, MEGATRON_BUCKET_PER_RANK * setup.num_replicas)
    return math.ceil(heaviest_stage(setup) / bucket)


def _scatters(setup: Setup) -> bool:
    """Return whether each rank gets its part of the gradients alone, as Megatron's distributed optimizer does. Other
    programs reduce them to all ranks, whether or not ZeRO-1 then uses a part."""
    return setup.technique.zero_stage == 1 and setup.framework == "megatron"


def _gradient_bytes(setup: Setup) -> int:
    """Return bytes per parameter of a reduction. DeepSpeed reduces 16-bit gradients, others those that they add up."""
    gradient = 4 if setup.has_fp32_gradients and setup.framework not in ("bsl", "deepspeed") else 2
    return gradient if _scatters(setup) else 2 * gradient


def _collective(setup: Setup, ranks: int, size: float, count: float, spread: int = 1) -> WorkByTerm:
    """Return `count` reductions or gathers, together of `size` bytes, over `ranks` replicas, `spread` apart."""
    tp, per_domain = setup.topology.tp, setup.domain_ranks
    sent = size * (ranks - 1) / ranks
    messages = count * _ring(setup, ranks, tp * spread)
    if tp * spread * ranks <= per_domain:
        return work_of(nvlink=sent / 1.75 / 1e9, messages=messages)
    # `rings`: different groups of a domain that share the links of its nodes.
    rings = per_domain / min(ranks, max(1, per_domain / (tp * spread)))
    network = sent * rings / setup.nodes_per_domain * _crowding(setup, ranks, tp * spread) / 1e9
    # The fabric of many nodes has so many links to others that it is no faster itself.
    nvlink = sent / 1.75 / 1e9 if setup.nodes_per_domain > 1 else 0.0
    return work_of(network=network, nvlink=nvlink, messages=messages)


def _domains(setup: Setup, ranks: int, spread: int) -> int:
    """Return the NVLink domains that a ring of `ranks` ranks, `spread` apart, leads through."""
    return -(-ranks // max(1, setup.domain_ranks // spread))


def _ring(setup: Setup, ranks: int, spread: int = 1) -> float:
    """Return the messages that wait for each other in a ring, in units of those between nodes."""
    domains = _domains(setup, ranks, spread)
    return domains - 1 + INSIDE * (ranks - domains)


def _crowding(setup: Setup, ranks: int, spread: int = 1) -> float:
    """Return by how much more a ring's bytes take because it leads through many nodes."""
    return 1 + (_domains(setup, ranks, spread) - 1) * setup.nodes_per_domain / CROWDED_NODES


def _by_place(setup: Setup, spread: int, ranks: int, sent: float, count: float) -> WorkByTerm:
    """Return `count` rounds of `sent` bytes in total that every rank passes on in a ring of `ranks`, `spread` apart."""
    messages = count * _ring(setup, ranks, spread)
    if ranks * spread <= setup.domain_ranks:
        return work_of(nvlink=sent / 1.75 / 1e9, messages=messages)
    return work_of(network=sent * setup.ranks_per_node / 1e9, messages=messages)


def hop_traffic(setup: Setup) -> WorkByTerm:
    """Return what a rank sends to the next stage, and the gradients that come back.

    Megatron sends each tensor-parallel rank's part, DeepSpeed all of it from every one.
    """
    topology, technique = setup.topology, setup.technique
    if topology.pp == 1:
        return NO_WORK
    sent = 2.0 * setup.tokens_per_micro_batch * setup.shape.hidden_size * setup.element_bytes
    if setup.framework not in ("bsl", "deepspeed") or technique.sequence_parallel:
        sent /= topology.tp
    exposed = PP_EXPOSED if "pipeline" in technique.overlap or technique.schedule == "interleaved" else 1.0
    sent *= exposed * technique.chunks_per_rank
    if topology.world_size <= setup.domain_ranks:
        return work_of(nvlink=sent / 1.75 / 1e9)
    return work_of(network=sent * setup.ranks_per_node / 1e9)


def direct_seconds_per_gb(gpu: GpuModel) -> float | None:
    """Return the seconds in which a node sends a GB from rank to rank, near the nominal rate; None if that is not
    known."""
    return 1 / (DIRECT_SHARE * gpu.network_gb_per_s) if gpu.network_gb_per_s else None
