"""What a rule looks at: the facts of a layout, which setups of `bsl plan` have, and run files (`described`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bigsci_launch.config.finding import Finding, Severity
from bigsci_launch.config.schema.technique import Framework, Schedule, ZeroStage
from bigsci_launch.topology import Topology


class ExpertFacts(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def per_token(self) -> int: ...
    @property
    def dense_layers(self) -> int: ...


class ModelSizes(Protocol):
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def head_size(self) -> int | None: ...
    @property
    def ffn_hidden_size(self) -> int | None: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def positions(self) -> str: ...
    @property
    def experts(self) -> ExpertFacts | None: ...


class TechniqueFacts(Protocol):
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def zero_stage(self) -> ZeroStage: ...
    @property
    def shard_group_size(self) -> int | None: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def chunks_per_rank(self) -> int: ...


class LayoutFacts(Protocol):
    """A model on a topology with its batch sizes. An unknown framework is None, and so is a cut into stages that only
    the partitioner of `bsl plan` knows; reading a cut may raise ValueError."""

    @property
    def shape(self) -> ModelSizes: ...
    @property
    def technique(self) -> TechniqueFacts: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def nodes_per_domain(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def framework(self) -> Framework | None: ...
    @property
    def expert_shards(self) -> int: ...
    @property
    def partition_method(self) -> str: ...
    @property
    def layers_per_stage(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a layout must fit: the nodes that the site offers, and the batch sizes of the ramp below the last one."""

    max_nodes: int | None = None
    ramp: Sequence[int] = ()


Wrong = tuple[str, str, str]
"""The key to change, the key that it does not fit, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its name, what it requires, where that comes from, the check, and what of a layout the check looks at:
    `nodes`, the sizes of axes, `size` (of micro-batches), `cut` (the partition method). A search asks once for all
    layouts that agree in these; all its layouts use all ranks of their nodes. A layout that breaks a rule with severity
    `warning` can run, but a search does not propose it."""

    name: str
    asks: str
    source: str
    looks_at: tuple[str, ...]
    check: Callable[[LayoutFacts, Limits], Wrong | None]
    severity: Severity = "error"

    def finding(self, layout: LayoutFacts, limits: Limits) -> Finding | None:
        wrong = self.check(layout, limits)
        return Finding(self.name, self.severity, wrong[:2], wrong[2]) if wrong else None
