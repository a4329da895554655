"""Trains a tiny DeepSpeed pipeline with one defect at a time, saves and resumes, for checkpoints and dumps to compare.

    RANK=.. LOCAL_RANK=.. WORLD_SIZE=2 MASTER_ADDR=.. MASTER_PORT=.. python defects.py OUT TP SCENARIO...

Each scenario writes OUT/SCENARIO/checkpoints/global_step12 and dumps/step-000012-after after 12 steps. Then the same
process creates a new engine, loads, and writes dumps/step-000013-before and resumed/global_step15. The result of the
uninterrupted run is continued/global_step15. first.log, continued.log and resumed.log hold a line per step.

    healthy    no defect
    B1         the tied gradient is not reduced over pp
    B2         the tied module contains a norm that is not tied
    B3         as B2, and the norm is in the weight-decay group, because the rule checks for another norm class
    B4         the tied copy of the last stage is not clipped
    B5         gradients behind column-parallel layers are not summed over tp
    B6         gradients of replicas are divided by tp
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from safetensors.torch import save_file
from torch import Tensor, nn

HIDDEN, VOCAB, LENGTH, BLOCKS, MICRO_BATCHES = 32, 64, 16, 4, 2
SAVE_AT, RESUMED_STEPS = 12, 3


class CopyToTp(torch.autograd.Function):
    """Identity forward; sums the gradient over the tp ranks backward (unless defect B5 is on)."""

    @staticmethod
    def forward(ctx: object, x: Tensor, run: Run) -> Tensor:
        ctx.run = run  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        run: Run = ctx.run  # type: ignore[attr-defined]
        gradient = gradient.contiguous()
        if run.tp_group is not None and run.defect != "B5":
            torch.distributed.all_reduce(gradient, group=run.tp_group)
        return gradient, None


class SumOverTp(torch.autograd.Function):
    """Sums over the tp ranks forward; identity backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, run: Run) -> Tensor:
        x = x.contiguous().clone()
        if run.tp_group is not None:
            torch.distributed.all_reduce(x, group=run.tp_group)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class OwnLayerNorm(nn.LayerNorm):
    """Represents a fused layer norm, which B3 takes for the only norm class."""


class EmbeddingPipe(nn.Module):
    """The tied embedding, whole on every tp rank; in B2 and B3 with a layer norm that is not tied."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.05)
        if run.defect in ("B2", "B3"):
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        return self.norm(x) if hasattr(self, "norm") else x


class Shard(nn.Module):
    """This tp rank's part of the weight and bias of a linear layer."""

    def __init__(self, weight: Tensor, bias_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(torch.zeros(bias_size))


class TransformerPipe(nn.Module):
    """A block without attention: layer norm, column-parallel up projection, row-parallel down projection."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.ln = OwnLayerNorm(HIDDEN)
        up, down = torch.randn(4 * HIDDEN, HIDDEN) * 0.05, torch.randn(HIDDEN, 4 * HIDDEN) * 0.05
        self.up = Shard(up.chunk(run.tp_size, 0)[run.tp], 4 * HIDDEN // run.tp_size)
        self.down = Shard(down.chunk(run.tp_size, 1)[run.tp], HIDDEN)
        for shard in (self.up.weight, self.up.bias, self.down.weight):
            shard.model_parallel = True  # type: ignore[attr-defined]
        if run.defect == "B6":
            for replica in (*self.ln.parameters(), self.down.bias):
                replica.register_hook(lambda gradient: gradient / run.tp_size)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(F.linear(CopyToTp.apply(self.ln(x), self.run), self.up.weight, self.up.bias))
        return x + SumOverTp.apply(F.linear(wide, self.down.weight), self.run) + self.down.bias


def head(module: EmbeddingPipe, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCAB), labels.reshape(-1))


class Run:
    """One scenario on this rank."""

    def __init__(self, defect: str, tp_size: int, out: Path) -> None:
        self.defect, self.tp_size, self.out = defect, tp_size, out
        world = torch.distributed.get_world_size()
        self.topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tp_size, num_dp=world // 2 // tp_size)
        place = self.topology.get_coord(torch.distributed.get_rank())
        self.pp, self.tp, self.dp = place.pipe, place.model, place.data
        self.tp_group = None
        for ranks in self.topology.get_axis_comm_lists("model"):
            group = torch.distributed.new_group(ranks)
            if torch.distributed.get_rank() in ranks:
                self.tp_group = group

    def engine(self) -> object:
        torch.manual_seed(7)
        specs = [
            TiedLayerSpec("embed", EmbeddingPipe, self),
            *[LayerSpec(TransformerPipe, self) for _ in range(BLOCKS)],
            TiedLayerSpec("embed", EmbeddingPipe, self, forward_fn=head),
        ]
        module = PipelineModule(
            specs, topology=self.topology, loss_fn=loss_of, partition_method="type:transformer|embedding",
            seed_layers=True, seed_fn=lambda seed: torch.manual_seed(int(seed)),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(self.groups(module), lr=1e-2, betas=(0.9, 0.95))
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.2, "steps_per_print": 10**9, "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.break_engine(engine)
        return engine

    def groups(self, module: nn.Module) -> list[dict[str, object]]:
        """Return groups that decay only matrices, by excluding a norm class, as frameworks do. B3: the wrong class."""
        norm = OwnLayerNorm if self.defect == "B3" else nn.LayerNorm
        decayed, plain = [], []
        for part in module.modules():
            for name, value in part._parameters.items():
                if value is not None:
                    (plain if isinstance(part, norm) or name.endswith("bias") else decayed).append(value)
        return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]

    def break_engine(self, engine: object) -> None:
        if self.defect == "B1":
            engine._INSTRUCTION_MAP = dict(engine._INSTRUCTION_MAP)  # type: ignore[attr-defined]
            engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads] = lambda self: None  # type: ignore[attr-defined]
            engine._exec_reduce_tied_grads = types.MethodType(lambda self: None, engine)  # type: ignore[attr-defined]
        if self.defect == "B4":
            optimizer = engine.optimizer  # type: ignore[attr-defined]
            whole = optimizer.get_grads_for_norm

            def without_tied(for_clipping: bool = False) -> list[Tensor]:
                if not for_clipping:
                    return whole()
                groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
                return [
                    gradient
                    for params, gradients in groups
                    for param, gradient in zip(params, gradients, strict=True)
                    if not getattr(param, "ds_pipe_replicated", False)
                ]

            optimizer.get_grads_for_norm = without_tied

    def batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same micro batches in every run, from `first_step` on; they differ between dp ranks."""
        number = (first_step - 1) * MICRO_BATCHES
        while True:
            generator = torch.Generator().manual_seed(1000 * number + self.dp)
            start = torch.randint(0, VOCAB, (2, 1), generator=generator)
            tokens = (start + torch.arange(LENGTH + 1) * (1 + start % 3)) % VOCAB
            noise = torch.rand(tokens.shape, generator=generator) < 0.2
            tokens = torch.where(noise, torch.randint(0, VOCAB, tokens.shape, generator=generator), tokens)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            number += 1

    def train(self, engine: object, first: int, last: int, log: str) -> None:
        batches = self.batches(first)
        for step in range(first, last + 1):
            began = time.perf_counter()
            loss = engine.train_batch(batches)  # type: ignore[attr-defined]
            if torch.distributed.get_rank() == 0:
                self.write_line(log, step, float(loss), time.perf_counter() - began)

    def write_line(self, log: str, step: int, loss: float, seconds: float) -> None:
        """Write a line as Megatron-DeepSpeed prints it."""
        self.out.mkdir(parents=True, exist_ok=True)
        last, samples = SAVE_AT + RESUMED_STEPS, step * 2 * MICRO_BATCHES
        line = (
            f" iteration {step:8d}/{last:8d} | consumed samples: {samples:12d} | "
            f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | lm loss: {loss:.6E} |\n"
        )
        with (self.out / log).open("a") as stream:
            stream.write(line)

    def dump(self, engine: object, step: int, when: str) -> None:
        path = self.out / "dumps" / f"step-{step:06d}-{when}" / f"rank-{torch.distributed.get_rank():04d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {name: value.detach().clone() for name, value in engine.module.named_parameters()}  # type: ignore[attr-defined]
        metadata = {"pp": str(self.pp), "tp": str(self.tp), "dp": str(self.dp), "step": str(step), "when": when}
        save_file(values, path, metadata)

    def go(self) -> None:
        engine = self.engine()
        self.train(engine, 1, SAVE_AT, "first.log")
        self.dump(engine, SAVE_AT, "after")
        save(engine, self.out / "checkpoints", SAVE_AT)
        self.train(engine, SAVE_AT + 1, SAVE_AT + RESUMED_STEPS, "continued.log")
        save(engine, self.out / "continued", SAVE_AT + RESUMED_STEPS)
        resumed = self.engine()
        resumed.load_checkpoint(str(self.out / "checkpoints"))  # type: ignore[attr-defined]
        self.dump(resumed, SAVE_AT + 1, "before")
        self.train(resumed, SAVE_AT + 1, SAVE_AT + RESUMED_STEPS, "resumed.log")
        save(resumed, self.out / "resumed", SAVE_AT + RESUMED_STEPS)


def save(engine: object, folder: Path, step: int) -> None:
    patterns = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r"\d+\.ln\..*", r"\d+\.down\.bias", r"tied_modules\.embed\..*"],
        "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\..*"],
        "vocabulary_parameter_patterns": [], "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_to_average_patterns": [],
    }  # fmt: skip
    engine.save_checkpoint(str(folder), client_state={"universal_checkpoint_info": patterns})  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    # Otherwise the first process group would compile a C++ operator, which takes 27 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    for scenario in sys.argv[3:]:
        Run(scenario, int(sys.argv[2]), Path(sys.argv[1]) / scenario).go()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
