"""Trains the same GPT with torchtitan's own trainer: fp32 weights under bf16 autocast, its AdamW, loss and compilation.

torchtitan trains any model that is registered with it. Its `seconds` and its peaks of memory are those that it logs.
Phase `peer` starts this program; `peer_gpt.py` says how they talk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from on_gpu.programs.peer_gpt import LARGEST_NORM, RATE, SEED, PlainGpt, Work, draw_tokens, print_step

CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
"""What torchtitan asks of `torch.cuda`, where there is no GPU."""

if not torch.cuda.device_count():
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: CPU

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import build_cross_entropy_loss  # noqa: E402
from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402
from torchtitan.components.metrics import BaseLogger, MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import parallelize_llama  # noqa: E402
from torchtitan.protocols.model import BaseModelArgs  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

NAME = "gpt"
PEAKS = {"allocated": "active", "reserved": "reserved"}
"""Our words for torchtitan's. Active memory is that of tensors, and of freed ones that a stream may still use."""


@dataclass
class GptArgs(BaseModelArgs):
    """What torchtitan keeps of the model. Its utilization is that of our count of operations."""

    work: Work | None = None

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Keep the sizes as they are."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Return the number of parameters and the operations of a token."""
        assert self.work is not None
        return sum(each.numel() for each in model.parameters()), self.work.flops_per_token


class TitanGpt(PlainGpt):
    """The model, as torchtitan makes and asks it."""

    def __init__(self, args: GptArgs) -> None:
        assert args.work is not None
        super().__init__(args.work)
        self.model_args = args


class Samples(IterableDataset[Any]):
    """The samples of a step, again and again."""

    def __init__(self, work: Work) -> None:
        self._tokens = draw_tokens(work)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield from (({"input": each[:-1]}, each[1:]) for each in self._tokens)


class Printed(BaseLogger):
    """Passes on what torchtitan would write to TensorBoard."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Print the figures of a step."""
        loss, seconds = metrics["loss_metrics/global_avg_loss"], metrics["time_metrics/end_to_end(s)"]
        logged = {"logged_tokens_per_s": metrics["throughput(tps)"], "logged_mfu": metrics["mfu(%)"] / 100}
        memory = {f"{ours}_gib": metrics[f"memory/max_{theirs}(GiB)"] for ours, theirs in PEAKS.items()}
        print_step(step, loss, seconds, **logged, **(memory if torch.cuda.device_count() else {}))


def metrics_processor(config: JobConfig, dims: Any, args: Any) -> MetricsProcessor:
    """Return torchtitan's own, with the printing logger."""
    processor = MetricsProcessor(config, dims)
    processor.logger = Printed()
    return processor


def spec(work: Work) -> TrainSpec:
    """Return the model with the parts of torchtitan that train it; the data are ours."""
    return TrainSpec(
        model_cls=TitanGpt,
        model_args={NAME: GptArgs(work=work)},
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: ParallelAwareDataloader(
            Samples(work), dp_rank, dp_world_size, batch_size=work.micro_batch
        ),
        build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
        build_metrics_processor_fn=metrics_processor,
    )


def configure(work: Work, folder: str) -> JobConfig:
    """Return a run of one process that recomputes nothing and logs every step; all else is torchtitan's default."""
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = NAME
    config.metrics.log_freq = 1
    config.metrics.disable_color_printing = True
    config.training.local_batch_size = work.micro_batch
    config.training.global_batch_size = work.micro_batch * work.micro_batches
    config.training.seq_len, config.training.steps = work.length, work.steps
    config.training.max_norm = LARGEST_NORM
    config.optimizer.lr, config.lr_scheduler.warmup_steps = RATE, 0
    config.activation_checkpoint.mode = "none"
    config.compile.enable, config.compile.backend = bool(work.backend), work.backend or config.compile.backend
    config.debug.seed = SEED
    return config


def main() -> None:
    work = Work.of_arguments()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(place)
    init_logger()
    register_train_spec(NAME, spec(work))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(configure(work, folder))
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
