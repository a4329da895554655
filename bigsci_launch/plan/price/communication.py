"""Counts what ranks send to each other. Ranks are numbered tensor fastest, then context, expert, data, pipeline.

A group whose ranks are all in one NVLink domain sends over NVLink, at the rate of one GPU; any other one sends over the
network, at the rate of a node, which the groups of a node share. NVLink is counted in units of a tensor-parallel
all-reduce of 8 ranks as NCCL's bus bandwidth has it.
"""

from __future__ import annotations

from bigsci_launch.plan.price.constants import NETWORK_SHARE
from bigsci_launch.plan.price.hardware import GpuModel
from bigsci_launch.plan.price.held import heaviest_stage, layer_weights, shard_ranks
from bigsci_launch.plan.price.terms import NO_WORK, WorkByTerm, work_of
from bigsci_launch.plan.shape.setup import Setup

NVLINK_UNIT = 8 / 7
"""Bytes of a tensor-parallel all-reduce are counted once, not twice (n - 1) / n times: 1 for 8 ranks."""

TP_EXPOSED = 0.65
"""Share of tensor-parallel communication that is still waited for where it overlaps with products."""

PP_EXPOSED = 0.2
"""The same for hops. Megatron sends the messages of interleaved chunks while it computes another one."""

DIRECT_SHARE = 0.96
"""Share of the nominal network rate that messages between two ranks reach: that of Jean Zay, fitted separately."""


def tensor_parallel_exchange(setup: Setup) -> WorkByTerm:
    """Return the all-reduces of one layer and micro batch, or the gathers and scatters that move as much.

    Two in the forward pass, two in the backward, and two where the forward pass is repeated. Experts need none.
    """
    tp, shape = setup.topology.tp, setup.shape
    if tp == 1:
        return NO_WORK
    blocks = 2 - shape.expert_layers / shape.num_layers * (0 if _has_shared_expert(setup) else 1)
    sent = (setup.num_passes - 1) * blocks * setup.tokens_per_micro_batch * shape.hidden_size
    sent *= setup.element_bytes * (tp - 1) / tp * (TP_EXPOSED if "tensor" in setup.technique.overlap else 1)
    if tp <= setup.domain_ranks:
        return work_of(nvlink=sent * NVLINK_UNIT / 1e9)
    return work_of(network=2 * sent / 1e9)


def _has_shared_expert(setup: Setup) -> bool:
    return bool(setup.shape.experts and setup.shape.experts.shared_ffn_hidden_size)


def key_value_exchange(setup: Setup) -> WorkByTerm:
    """Return the keys and values that context-parallel ranks pass around while they compute attention, and their
    gradients."""
    cp, tp = setup.topology["cp"], setup.topology.tp
    if cp == 1:
        return NO_WORK
    width = 2 * setup.shape.key_value_size / tp * setup.element_bytes
    sent = setup.num_passes * (cp - 1) * setup.tokens_per_micro_batch * width
    return _by_place(setup, tp * cp, sent)


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
    gradient = 4 if setup.framework == "torchtitan" else 2
    weight = 0 if stage == 2 and setup.framework in ("deepspeed", "bsl") else 2 if stage == 2 else 4
    return _collective(setup, ranks, (gradient + weight) * layer_weights(setup))


def gradient_exchange(setup: Setup) -> WorkByTerm:
    """Return what replicas send once per step for the heaviest stage: gradients, and weights that ZeRO-1 shards.

    Rings of different tensor-parallel ranks share the links of a node.
    """
    technique, ranks = setup.technique, setup.num_replicas * setup.topology["cp"]
    group = shard_ranks(setup)
    if ranks == 1:
        return NO_WORK
    if technique.zero_stage >= 2:
        # The replicas of a shard add up their gradients; within the shard they were scattered with the layers.
        copies = ranks // group
        return _collective(setup, copies, 4 * heaviest_stage(setup) / group, spread=group) if copies > 1 else NO_WORK
    return _collective(setup, ranks, _gradient_bytes(setup) * heaviest_stage(setup))


def _gradient_bytes(setup: Setup) -> int:
    """Return bytes per parameter of a reduction and a gather. DeepSpeed reduces 16-bit gradients; Megatron reduces bf16
    ones in fp32, which are reduced and gathered themselves without a distributed optimizer."""
    if setup.framework in ("bsl", "deepspeed"):
        return 6
    gradient = 4 if setup.has_fp32_gradients else 2
    return 2 * gradient if setup.technique.zero_stage == 0 else gradient + 2


def _collective(setup: Setup, ranks: int, size: float, spread: int = 1) -> WorkByTerm:
    """Return a reduction or gather of `size` bytes over `ranks` data-parallel ranks, `spread` apart."""
    tp, per_domain = setup.topology.tp, setup.domain_ranks
    sent = size * (ranks - 1) / ranks
    if tp * spread * ranks <= per_domain:
        return work_of(nvlink=sent / 1.75 / 1e9)
    # `rings`: different groups of a domain that share the links of its nodes.
    rings = per_domain / min(ranks, max(1, per_domain / (tp * spread)))
    network = sent * rings / setup.nodes_per_domain / 1e9
    # The fabric of many nodes has so many links to others that it is no faster itself.
    return work_of(network=network, nvlink=sent / 1.75 / 1e9 if setup.nodes_per_domain > 1 else 0.0)


def _by_place(setup: Setup, ranks: int, sent: float) -> WorkByTerm:
    """Return `sent` bytes of every rank to others of a group of neighbouring `ranks`."""
    if ranks <= setup.domain_ranks:
        return work_of(nvlink=sent / 1.75 / 1e9)
    return work_of(network=sent * setup.ranks_per_node / 1e9)


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
