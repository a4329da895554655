"""Writes small checkpoints with the libraries that write them in practice.

    python benchmarks/foreign_checkpoints.py FOLDER [--only trainer accelerate ...]

The folders under `tests/unit/weights/foreign` come from it. It needs packages that the project itself does not use:

    pip install transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 lightning==2.6.6

| name | written by |
|---|---|
| `trainer` | `transformers.Trainer` with `save_steps=2`: two checkpoints with optimizer, scheduler, random states |
| `sharded` | `save_pretrained` of one model, whole and in shards with an index |
| `adapter` | `peft`: a LoRA adapter |
| `accelerate` | `Accelerator.save_state`, with a scheduler and an object of its own |
| `fsdp-sharded`, `fsdp-full` | what `Accelerator.save_state` calls for FSDP2, on two ranks (gloo) |
| `lightning` | `lightning.Trainer`: a `.ckpt` |
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

RANKS = 2


class Steps(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen short series of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(6) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def write_trainer(folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(tiny_gpt2(), arguments, train_dataset=Steps()).train()


def write_sharded(folder: Path) -> None:
    model = tiny_gpt2()
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "shards", max_shard_size="2KB")
    model.save_pretrained(folder / "small-shards", max_shard_size=1300)


def write_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).save_pretrained(folder)


class Counter:
    """An object that a user registers with accelerate."""

    def __init__(self) -> None:
        self.seen = 3

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": torch.tensor([0.5, 0.25])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def _train_and_save(accelerator: Any, folder: Path, model: nn.Module) -> None:
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    batches = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    optimizer, scheduler, batches = accelerator.prepare(optimizer, scheduler, batches)
    accelerator.register_for_checkpointing(Counter())
    for batch in batches:
        accelerator.backward(model(batch).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))


def write_accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    _train_and_save(Accelerator(cpu=True), folder, small_net())


def write_fsdp(folder: Path, state_dict_type: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_fsdp_rank, (str(folder), state_dict_type, port), nprocs=RANKS)


def _fsdp_rank(rank: int, folder: str, state_dict_type: str, port: int) -> None:
    """Train under FSDP2, and save what `Accelerator.save_state` saves. On CPU, accelerate itself does not shard."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=state_dict_type, cpu_ram_efficient_loading=False
    )
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    model = small_net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    save_accelerator_state(folder, [], [], [scheduler], [], rank, 0)
    torch.distributed.destroy_process_group()


def write_lightning(folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.save_hyperparameters({"lr": 1e-2})

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]

    trainer = lightning.Trainer(
        default_root_dir=tempfile.mkdtemp(), max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    trainer.save_checkpoint(folder / "epoch=0-step=4.ckpt")


WRITERS: dict[str, Callable[[Path], None]] = {
    "trainer": write_trainer,
    "sharded": write_sharded,
    "adapter": write_adapter,
    "accelerate": write_accelerate,
    "fsdp-sharded": lambda folder: write_fsdp(folder, "SHARDED_STATE_DICT"),
    "fsdp-full": lambda folder: write_fsdp(folder, "FULL_STATE_DICT"),
    "lightning": write_lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS))
    arguments = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    warnings.filterwarnings("ignore")
    for name in arguments.only:
        target = arguments.folder / name
        target.mkdir(parents=True)
        WRITERS[name](target)
        print(f"{name}: {sum(file.stat().st_size for file in target.rglob('*') if file.is_file()):,} bytes")


if __name__ == "__main__":
    main()
