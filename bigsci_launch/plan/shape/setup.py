"""A setup: everything that decides how long a step takes and how much memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Literal

from bigsci_launch.config.check import foreign_axes
from bigsci_launch.config.checks.technique import foreign_keys
from bigsci_launch.config.micro_batches import assumed_size
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.technique import (
    Attention,
    Framework,
    Hidden,
    Kernels,
    LossKernel,
    Precision,
    Schedule,
    ZeroStage,
)
from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.shape.parameters import ModelShape, cut_model
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.topology import Topology

OPTIMIZER_BYTES = 12.0
"""Bytes per parameter of AdamW's state: an fp32 master and two moments."""

UNEVEN = "uneven pipelines are not priced before they run; the log has the planned time of a step"
UNPRICED = "name the framework that the program of run.command uses; without it, nothing is priced"


@dataclass(frozen=True, slots=True)
class Technique:
    """How the program computes; the keys of the run file with these names say more.

    `recomputation`: whether layers recompute all activations (`full`), those of attention, or none in the backward
    pass. `recomputed_layers`: with `full`, the layers of each stage that do; None means all. `hop_wait`: seconds that
    the program adds to each message between stages, whatever its size.
    """

    attention: Attention = "fused"
    recomputation: Literal["none", "selective", "full"] = "none"
    recomputed_layers: int | None = None
    sequence_parallel: bool = False
    zero_stage: ZeroStage = 1
    shard_group_size: int | None = None
    schedule: Schedule = "1f1b"
    chunks_per_rank: int = 1
    overlap: frozenset[Hidden] = frozenset()
    kernels: Kernels = "eager"
    loss: LossKernel = "fused"
    optimizer_bytes: float = OPTIMIZER_BYTES
    hop_wait: float = 0.0

    @classmethod
    def of_config(cls, config: RunConfig) -> Technique:
        """Return the technique that a run file describes."""
        parallelism, recomputed = config.parallelism, config.training.activation_checkpointing
        framework = config.run.framework
        is_selective = recomputed == "selective"
        return cls(
            attention=config.training.attention,
            kernels="compiled" if config.training.compile else config.training.kernels or usual_kernels(framework),
            recomputation="selective" if is_selective else "full" if recomputed else "none",
            recomputed_layers=None if isinstance(recomputed, (bool, str)) else recomputed,
            sequence_parallel=parallelism.sequence_parallel,
            zero_stage=parallelism.zero_stage,
            shard_group_size=parallelism.shard_group_size,
            schedule=parallelism.schedule,
            chunks_per_rank=parallelism.chunks_per_rank,
            overlap=usual_overlap(framework, parallelism.zero_stage)
            if parallelism.overlap is None
            else frozenset(parallelism.overlap),
            loss=config.training.loss or usual_loss(framework),
            optimizer_bytes=OPTIMIZER_BYTES
            if config.training.optimizer_bytes is None
            else config.training.optimizer_bytes,
        )


def usual_kernels(framework: Framework | None) -> Kernels:
    """Return the kernels of a program that does not say which it has."""
    return "compiled" if framework in ("megatron", "torchtitan") else "eager"


def usual_loss(framework: Framework | None) -> LossKernel:
    """Return the loss of a program that does not say which it has."""
    return "plain" if framework in ("fsdp", "other") else "fused"


def usual_overlap(framework: Framework | None, zero_stage: ZeroStage) -> frozenset[Hidden]:
    """Return what a program hides by default: DeepSpeed's `overlap_comm` is on in stage 3 alone; FSDP prefetches."""
    hides_data = zero_stage == 3 or framework in ("torchtitan", "fsdp")
    return frozenset(("data",)) if hides_data else frozenset()


UNFUSED_2021 = Technique(attention="unfused", recomputation="full")
"""Megatron and Megatron-DeepSpeed of 2021 and 2022, as BLOOM was trained."""


@dataclass(frozen=True)
class Setup:
    """A model on a topology with its batch sizes, ready to be measured or priced.

    `has_fp32_gradients`: 16-bit weights accumulate their gradients in fp32 (DeepSpeed's BF16 optimizer).
    `has_blocking_launches`: the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1). `expert_shards`: ranks over which
    the experts of a layer are spread inside the others. `nodes_per_domain`: nodes whose GPUs NVLink connects. `day` is
    when it ran; None means now, in the newest state of the cluster.
    """

    shape: ModelShape
    topology: Topology
    micro_batch_size: int
    global_batch_size: int
    ranks_per_node: int
    partition_method: str
    precision: Precision = "bf16"
    has_fp32_gradients: bool = True
    technique: Technique = Technique()
    has_blocking_launches: bool = False
    has_dropout: bool = False
    is_compiled: bool = False
    partition_rule: PartitionRule = PartitionRule.BALANCE
    framework: Framework = "bsl"
    expert_shards: int = 1
    nodes_per_domain: int = 1
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
            has_fp32_gradients=config.training.precision in ("bf16", "fp8") and config.training.gradients != "bf16",
            technique=Technique.of_config(config),
            has_blocking_launches=_is_blocking(config),
            has_dropout=config.model.dropout > 0,
            is_compiled=config.training.compile,
            framework=config.run.framework or "bsl",
            expert_shards=config.parallelism.expert_shards * topology["ep"],
        )

    @property
    def loops_over_experts(self) -> bool:
        """Whether the host launches the kernels of one expert after the other."""
        experts = self.shape.experts
        if experts is None or experts.products is not None:
            return experts is not None and experts.products == "loop"
        return self.framework in ("deepspeed", "fsdp")

    @property
    def has_eager_overlap(self) -> bool:
        """Whether tensor-parallel collectives run next to kernels that the host launches one by one."""
        return "tensor" in self.technique.overlap and self.technique.kernels in ("eager", "fused")

    @property
    def has_kernels_of_2021(self) -> bool:
        """Whether the kernels are those of Megatron and Megatron-DeepSpeed in 2021 and 2022."""
        return self.technique.attention == "unfused" and self.framework in ("deepspeed", "megatron", "bsl")

    @property
    def gathers_logits(self) -> bool:
        """Whether each rank of tp computes the loss of the whole vocabulary. torchtitan has `loss_parallel`."""
        return self.technique.loss == "plain" and self.framework != "torchtitan"

    @property
    def num_nodes(self) -> int:
        return -(-self.topology.world_size // self.ranks_per_node)

    @property
    def domain_ranks(self) -> int:
        """Ranks that NVLink connects."""
        return self.ranks_per_node * self.nodes_per_domain

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of one step on one replica."""
        return self.global_batch_size // (self.micro_batch_size * self.num_replicas)

    @property
    def num_replicas(self) -> int:
        """Ranks that compute different samples of a step: those of an expert axis do."""
        return self.topology.dp * self.topology["ep"]

    @property
    def num_passes(self) -> float:
        """Passes through a layer's products in a step: forward, two backward, and what is recomputed of a forward."""
        technique = self.technique
        if technique.recomputation != "full":
            return 3.0
        if technique.recomputed_layers is None:
            return 4.0
        layers = self.shape.num_layers / self.topology.pp
        return 3.0 + min(1.0, technique.recomputed_layers / layers)

    @property
    def stream_elements(self) -> int:
        """Elements of the residual stream of a micro-batch."""
        return self.tokens_per_micro_batch * self.shape.hidden_size

    @property
    def stream_part(self) -> float:
        """Elements of this rank's part of the stream: with sequence parallelism, ranks of tp share it out."""
        return self.stream_elements / (self.topology.tp if self.technique.sequence_parallel else 1)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of a micro batch on one rank, of which context parallelism gives every rank a part."""
        return self.micro_batch_size * self.shape.sequence_length // self.topology["cp"]

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
            self.shape,
            self.partition_method,
            self.topology.pp,
            self.partition_rule,
            self.topology.tp,
            self.framework,
            self.expert_shards,
        )
        return stages.transformer_layers_per_stage

    def with_batch_size(self, global_batch_size: int) -> Setup:
        """Return the same setup at another global batch size, as on a ramp."""
        return replace(self, global_batch_size=global_batch_size)


def require_framework(config: RunConfig) -> None:
    """Raise ConfigError for a run that cannot be priced: of another program whose framework is not said, or uneven."""
    if config.parallelism.engine == "uneven":
        raise ConfigError(f"parallelism.engine: {UNEVEN}", hint="--set parallelism.engine=deepspeed")
    if unpriced(config):
        hint = "--set run.framework=megatron; or deepspeed, torchtitan, fsdp, other"
        raise ConfigError(f"run.framework: {UNPRICED}", hint=hint)


_PIPELINE_KEYS = (
    "model.experts",
    "parallelism.context_parallel_size",
    "parallelism.expert_parallel_size",
    "parallelism.zero_stage",
    "parallelism.shard_group_size",
    "parallelism.schedule",
)
"""Keys of a run whose pipelines are others than those of `bsl train`."""


def require_plain(config: RunConfig) -> None:
    """Raise ConfigError for a run whose pipelines cannot be planned for losses: only those of `bsl train` can."""
    if keys := [key for key in _foreign(config) if key in _PIPELINE_KEYS]:
        raise ConfigError(
            f"{keys[0]}: bsl plan --survive supports tensor, pipeline and data parallelism with ZeRO-1 and 1F1B only",
            hint="leave out --survive, --lose and --trace, or the key",
        )


def unpriced(config: RunConfig) -> str | None:
    """Return why a run is not priced, or None: it is not known which framework trains, or its pipelines are uneven."""
    if config.parallelism.engine == "uneven":
        return UNEVEN
    return None if config.run.starts_trainer or config.run.framework else UNPRICED


def program_needed(config: RunConfig) -> str | None:
    """Return why `bsl train` cannot run what is planned, or None; other programs are not judged."""
    if not config.run.starts_trainer:
        return None
    keys = _foreign(config)
    return f"bsl train cannot do {', '.join(keys)}: this plan needs another program" if keys else None


def _foreign(config: RunConfig) -> list[str]:
    return [*(f"parallelism.{axis.key}" for axis in foreign_axes(config)), *foreign_keys(config)]


def _is_blocking(config: RunConfig) -> bool:
    """Return whether the ranks' environment, including the site's part, makes kernel launches block."""
    variable = config.env.get("CUDA_LAUNCH_BLOCKING")
    return variable is not None and variable.value == "1"


def describe_stages(layers: tuple[int, ...]) -> str:
    """Return layers per stage in short form: `6,7x10,6`."""
    runs: list[list[int]] = []
    for count in layers:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}x{times}" for count, times in runs)
