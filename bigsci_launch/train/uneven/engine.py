"""The engine of one rank: one stage of one pipeline, or its part of it, on torch.distributed.pipelining's schedules.

It has the part of DeepSpeed's interface that the training loop and its companions use. A step is

1. forward and backward passes of the micro batches of this pipeline,
2. sums of the gradients of each unit over its owners,
3. one sum over all ranks: the loss, the squares of all gradients, and the seconds of each pipeline,
4. the optimizer's step, alone; with ZeRO-1, the weights are then put together.

So whoever has the result of 3 knows that every rank has its summed gradients: then the step counts, and a rank that has
not taken it yet can still take it, with the same result. Before that, it does not count anywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.plan.survive.uneven import UnevenLayout, micro_batches_of
from bigsci_launch.train.device.gpu import computes_on_gpu, finish_queued_work
from bigsci_launch.train.parallel.loss import VocabularyParallelLoss
from bigsci_launch.train.parallel.model import GptSizes, TransformerLayer
from bigsci_launch.train.parallel.pipeline import layer_specs
from bigsci_launch.train.parallel.tensor import TensorParallel
from bigsci_launch.train.state.durable import RankCheckpointEngine
from bigsci_launch.train.uneven.optimizer import MasterAdamW, ReducedStep, square_norm
from bigsci_launch.train.uneven.reduction import OwnerGroups
from bigsci_launch.train.uneven.shards import OwnerShards
from bigsci_launch.train.uneven.speed import PipelineSpeeds
from bigsci_launch.train.uneven.stage import UnevenStage, bounds_of, owners_of


class UnevenEngine:
    """The engine of `rank`; to make one is a collective call."""

    def __init__(self, config: RunConfig, layout: UnevenLayout, rank: int, ranks: TensorParallel) -> None:
        sizes = self._sizes = GptSizes.of_config(config)
        self.layout, self.rank, self.lane = layout, rank, ranks.rank
        self.specs: list[LayerSpec] = layer_specs(config, sizes, ranks)
        lane = layout.lanes[self.lane]
        self.pipeline, self.stage = lane.places[rank]
        self.bounds = bounds_of(self.specs, self.pipeline.counts)
        self.device = torch.device("cuda", torch.cuda.current_device()) if computes_on_gpu() else torch.device("cpu")
        self.module = self._build(config)
        owners = [owners_of(self.specs, each) for each in layout.lanes]
        self.owners = owners[self.lane]
        self.groups = OwnerGroups(layout, owners, rank)
        self.shards = OwnerShards(self.groups, self.owners, rank, layout.copies)
        self.optimizer = MasterAdamW(self.module, config.optimizer, self.shards)
        self._loss = VocabularyParallelLoss(sizes.vocab, ranks)
        self._total, self.num_samples = micro_batches_of(config), config.training.global_batch_size
        assert config.training.micro_batch_size != "auto"
        self.micro_batch_size, self.micro_batches = config.training.micro_batch_size, self.pipeline.micro_batches
        self._schedule = self._make_schedule()
        self._speeds = PipelineSpeeds(config)
        self.listeners: list[Callable[[UnevenEngine, UnevenLayout], None]] = []
        """What is called when pipelines get other micro batches."""
        self.checkpoint_engine = RankCheckpointEngine()

    def _build(self, config: RunConfig) -> UnevenStage:
        stage = UnevenStage(self.specs, self.bounds[self.stage], self.bounds[self.stage + 1], config)
        for layer in stage.modules():
            if isinstance(layer, TransformerLayer):
                layer.is_selective = config.training.activation_checkpointing == "selective"
        if config.training.precision == "bf16":
            stage.bfloat16()
        return stage.to(self.device)

    def _make_schedule(self) -> Schedule1F1B | ScheduleGPipe:
        pipeline, count = self.pipeline, self.pipeline.micro_batches
        given, made = self._examples()
        stage = PipelineStage(
            self.module, self.stage, len(pipeline.ranks), self.device, given, made, group=self.groups.of(pipeline.ranks)
        )
        # 1F1B begins with a forward pass on every stage.
        kind = Schedule1F1B if count >= len(pipeline.ranks) else ScheduleGPipe
        return kind(stage, count, loss_fn=self._weighted_loss, scale_grads=False)

    def _examples(self) -> tuple[Tensor, Tensor]:
        """Return what the stage gets and makes, without memory; torch would run the stage once to learn it."""
        size, sizes = self.micro_batch_size, self._sizes
        tokens = torch.empty(size, sizes.length, dtype=torch.int64, device="meta")
        weight = next(self.module.parameters())
        stream = torch.empty(*tokens.shape, sizes.hidden, dtype=weight.dtype, device="meta", requires_grad=True)
        width = sizes.padded_vocab_size // self.layout.tp
        logits = torch.empty(*tokens.shape, width, dtype=weight.dtype, device="meta")
        return tokens if self.is_first else stream, logits.requires_grad_() if self.is_last else stream

    def _weighted_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The share of a micro batch in the mean loss of all pipelines."""
        return self._loss(logits, labels) / self._total

    @property
    def global_steps(self) -> int:
        """The steps that were taken or skipped."""
        return self.optimizer.taken.step

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.num_skipped

    @property
    def is_in_first_pipeline(self) -> bool:
        """Whether this rank's pipeline is the one that is saved."""
        return self.pipeline.first == 0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.pipeline.ranks) - 1

    def set_train_batch_size(self, size: int) -> None:
        """The layout is made for the batch size of the run file; there is no ramp."""
        assert size == self.num_samples

    def train_batch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        """Take a step with this pipeline's next micro batches, and return the mean loss of all pipelines."""
        self.optimizer.clear_gradients()
        started = time.monotonic()
        loss = self._pass_through(batches)
        seconds = [0.0] * len(self.layout.pipelines)
        if self.is_first and self.lane == 0:
            finish_queued_work()
            seconds[self.layout.topology.coordinate(self.rank).dp_rank] = time.monotonic() - started
        gradients = self.optimizer.gradients()
        self.groups.sum(gradients)
        self.optimizer.summed = self.global_steps + 1
        squares = square_norm(self.optimizer.gradients_of(self.groups.counted(), only_split=self.lane > 0))
        mine = [0.0 if self.lane else loss, squares, *seconds]
        sums = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        total, squares, *seconds = map(float, sums.tolist())
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        reduced = ReducedStep(self.global_steps + 1, total, norm, self.optimizer.param_groups[0]["lr"])
        self.optimizer.overflow = not math.isfinite(reduced.norm)
        self.take_step(reduced)
        if (layout := self._speeds.after_step(self.layout, seconds)) is not None:
            self._change_to(layout)
        return total

    def _change_to(self, layout: UnevenLayout) -> None:
        """Continue with other micro batches on the same pipelines."""
        self.layout = layout
        self.pipeline, _ = layout.lanes[self.lane].places[self.rank]
        self.micro_batches = self.pipeline.micro_batches
        self._schedule = self._make_schedule()
        for each in self.listeners:
            each(self, layout)

    def _pass_through(self, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        """Do the forward and backward passes, and return this rank's share of the mean loss."""
        first, count = self.pipeline.first, self.micro_batches
        self.module.begin_step(self.global_steps + 1, range(first, first + count))
        given: tuple[Tensor, ...] = ()
        labels, losses = None, list[Tensor]()
        if self.is_first or self.is_last:
            taken = list(islice(batches, count))
            given = (torch.cat([tokens for tokens, _ in taken]),) if self.is_first else ()
            labels = torch.cat([each for _, each in taken]) if self.is_last else None
        self._schedule.step(*given, target=labels, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if losses else 0.0

    def take_step(self, reduced: ReducedStep) -> None:
        """Take the optimizer's step with the gradients that are summed; no peer can interrupt that. Then share the
        weights: the masters have them, whatever happens to a peer."""
        self.optimizer.take(reduced)
        if math.isfinite(reduced.norm):
            self.optimizer.share_weights(self.shards)

    def get_global_grad_norm(self) -> float:
        return self.optimizer.taken.norm
