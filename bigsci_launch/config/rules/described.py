"""The layout that a run file describes, and the rules that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from bigsci_launch.config.finding import DP, TP, Finding
from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.config.rules.own_cut import own_method
from bigsci_launch.config.rules.sizes import NODES
from bigsci_launch.config.rules.table import LAYOUT_RULES, WORLD_SIZE
from bigsci_launch.config.schema.run import ModelSection, ParallelismSection, RunConfig
from bigsci_launch.config.schema.section import NotDescribed
from bigsci_launch.config.schema.technique import Framework
from bigsci_launch.config.site import Site
from bigsci_launch.topology import Topology


@dataclass(frozen=True, slots=True)
class DescribedLayout:
    """The layout of a run file, as it is written: its sizes may not fit the nodes. Raises NotDescribed where a rule
    looks at a section that the run file leaves out."""

    config: RunConfig
    topology: Topology
    num_nodes: int
    ranks_per_node: int
    nodes_per_domain: int
    layers_per_stage: None = None

    @classmethod
    def of_run(cls, config: RunConfig, site: Site) -> DescribedLayout:
        ranks, domain = site.config.ranks_per_node, site.config.nvlink_domain_nodes
        if site.is_local:
            topology = config.parallelism.topology(ranks)
            return cls(config, topology, 1, topology.world_size, domain)
        nodes = config.slurm.nodes
        return cls(config, config.parallelism.topology(nodes * ranks), nodes, ranks, domain)

    @property
    def shape(self) -> ModelSection:
        return self.config.model

    @property
    def technique(self) -> ParallelismSection:
        return self.config.parallelism

    @property
    def micro_batch_size(self) -> int:
        return assumed_size(self.config.training, self.topology)

    @property
    def global_batch_size(self) -> int:
        return self.config.training.global_batch_size

    @property
    def num_replicas(self) -> int:
        return self.topology.dp * self.topology["ep"]

    @property
    def framework(self) -> Framework | None:
        return self.config.run.framework or ("bsl" if self.config.run.starts_trainer else None)

    @property
    def expert_shards(self) -> int:
        return self.technique.expert_shards * self.topology["ep"]

    @property
    def partition_method(self) -> str:
        pp, chunks, written = self.topology.pp, self.technique.chunks_per_rank, self.technique.partition_method
        return own_method(self.framework, self.shape.num_layers, pp, chunks, written)


def limits_of(config: RunConfig, site: Site) -> Limits:
    """Return what a run must fit: the nodes of its partition that are neither reserved nor its spares, and its ramp."""
    partition = site.config.partitions.get(config.slurm.partition or site.config.default_partition or "")
    nodes = None if site.is_local or partition is None else partition.nodes
    kept = site.config.reserve_nodes + config.slurm.spare_nodes
    training = config.training if config.describes("training") else None
    ramp = training.rampup if training else None
    sizes = range(ramp.start, training.global_batch_size, ramp.increment) if training and ramp else ()
    return Limits(None if nodes is None else nodes - kept, sizes)


def find_misfit(config: RunConfig, site: Site) -> Finding | None:
    """Return why the sizes of a run do not multiply to the ranks of its nodes."""
    try:
        site.layout(config)
    except ValueError as problem:
        key = DP if config.parallelism.data_parallel_size else TP
        return Finding(WORLD_SIZE.name, "error", (key, NODES), f"{problem} (site {site.name})")
    return None


def check_layout(config: RunConfig, site: Site) -> Iterator[Finding]:
    """The layout breaks no rule of the table."""
    misfit, limits, layout = find_misfit(config, site), limits_of(config, site), DescribedLayout.of_run(config, site)
    if misfit:
        yield misfit
    is_uneven = config.parallelism.engine == "uneven"
    has_replicas = misfit is None or config.parallelism.data_parallel_size is not None
    for rule in LAYOUT_RULES:
        # Uneven pipelines are no grid: only what tensor-parallel ranks split must fit.
        if is_uneven and not {*rule.looks_at} <= {"tp"}:
            continue
        if (misfit and rule is WORLD_SIZE) or ("dp" in rule.looks_at and not has_replicas):
            continue
        with suppress(NotDescribed):
            if finding := rule.finding(layout, limits):
                yield finding
