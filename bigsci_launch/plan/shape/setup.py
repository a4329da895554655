"""A setup: everything that decides how long a step takes and how much memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Literal

from bigsci_launch.config.check import foreign_axes
from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.shape.parameters import Framework, ModelShape, cut_model
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.topology import Topology

Precision = Literal["fp32", "fp16", "bf16"]
UNPRICED = "bsl plan prices tensor, pipeline and data parallelism only"


@dataclass(frozen=True)
class Setup:
    """A model on a topology with its batch sizes, ready to be measured or priced.

    `has_fp32_gradients`: 16-bit weights accumulate their gradients in fp32 (DeepSpeed's BF16 optimizer).
    `shards_optimizer`: replicas shard the optimizer state (ZeRO 1; the BF16 optimizer always does).
    `recomputes_activations`: layers recompute them in the backward pass. `has_blocking_launches`: the host waits for
    every kernel (CUDA_LAUNCH_BLOCKING=1). `day` is when it ran; None means now, in the newest state of the cluster.
    """

    shape: ModelShape
    topology: Topology
    micro_batch_size: int
    global_batch_size: int
    ranks_per_node: int
    partition_method: str
    precision: Precision = "bf16"
    has_fp32_gradients: bool = True
    shards_optimizer: bool = True
    recomputes_activations: bool = True
    has_blocking_launches: bool = False
    partition_rule: PartitionRule = PartitionRule.BALANCE
    framework: Framework = "bsl"
    day: date | None = None

    @classmethod
    def of_config(cls, config: RunConfig, topology: Topology, ranks_per_node: int) -> Setup:
        """Return the setup that a run file describes, on `topology`."""
        return cls(
            shape=ModelShape.of_config(config),
            topology=topology,
            micro_batch_size=assumed_size(config.training, topology),
            global_batch_size=config.training.global_batch_size,
            ranks_per_node=ranks_per_node,
            partition_method=config.parallelism.partition_method,
            precision=config.training.precision,
            has_fp32_gradients=config.training.precision == "bf16",
            recomputes_activations=config.training.activation_checkpointing,
            has_blocking_launches=_is_blocking(config),
            framework="bsl" if config.run.starts_trainer else "megatron",
        )

    @property
    def num_nodes(self) -> int:
        return -(-self.topology.world_size // self.ranks_per_node)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of one step on one replica."""
        return self.global_batch_size // (self.micro_batch_size * self.topology.dp)

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.shape.sequence_length

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of every stage, by the framework's partitioner.

        Raises:
            ValueError: the partition method is unknown or matches no layer.
        """
        stages = cut_model(
            self.shape, self.partition_method, self.topology.pp, self.partition_rule, self.topology.tp, self.framework
        )
        return stages.transformer_layers_per_stage

    def with_batch_size(self, global_batch_size: int) -> Setup:
        """Return the same setup at another global batch size, as on a ramp."""
        return replace(self, global_batch_size=global_batch_size)


def require_priced_axes(config: RunConfig) -> None:
    """Raise ConfigError for a run with context or expert parallelism, which cannot be priced."""
    if foreign := foreign_axes(config):
        key = f"parallelism.{foreign[0].key}"
        raise ConfigError(f"{key}: {UNPRICED}", hint=f"--set {key}=1 plans the run without it")


def _is_blocking(config: RunConfig) -> bool:
    """Return whether the ranks' environment, including the site's part, makes kernel launches block."""
    variable = config.env.get("CUDA_LAUNCH_BLOCKING")
    return variable is not None and variable.value == "1"


def describe_stages(layers: tuple[int, ...]) -> str:
    """Return layers per stage as people write them: `6,7x10,6`."""
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}x{times}" for count, times in runs)
