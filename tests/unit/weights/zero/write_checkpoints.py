"""Writes `checkpoints.tar.xz` with the real DeepSpeed: `python write_checkpoints.py`, which takes minutes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

# name: (ranks, stage, precision, what is special about the model)
CHECKPOINTS: dict[str, tuple[int, int, str, str]] = {
    "stage0": (1, 0, "fp32", ""),
    "stage1": (2, 1, "fp32", ""),
    "stage2": (2, 2, "fp32", ""),
    "stage2-of4": (4, 2, "fp32", ""),
    "stage3": (2, 3, "fp32", ""),
    "stage3-of4": (4, 3, "fp32", ""),
    "groups2": (2, 2, "bf16", "groups tied frozen"),
    "groups3": (2, 3, "bf16", "groups tied frozen"),
    "experts2": (2, 2, "bf16", "experts"),
    "experts4": (4, 2, "bf16", "experts"),
}
STEPS = 2


def make_model(special: str) -> Any:
    """Return a model with odd sizes, so that every flat tensor ends with padding."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.up = nn.Linear(3, 7)
            self.norm = nn.LayerNorm(7)
            self.down = nn.Linear(7, 3, bias=False)
            self.register_buffer("scale", torch.arange(3.0))
            self.head = nn.Linear(3, 5, bias=False)
            if "tied" in special:
                self.head.weight = self.embed.weight
            if "frozen" in special:
                self.up.weight.requires_grad_(False)
            if "experts" in special:
                from deepspeed.moe.layer import MoE

                expert = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
                self.moe = MoE(3, expert, num_experts=4, ep_size=2, k=1, min_capacity=8)

        def forward(self, tokens: Any) -> Any:
            hidden = self.embed(tokens)
            hidden = hidden + self.down(torch.relu(self.norm(self.up(hidden)))) * self.scale.to(hidden.dtype)
            return self.head(self.moe(hidden)[0] if "experts" in special else hidden)

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        # Stage 3 draws in another order.
        for seed, (_, value) in enumerate(sorted(model.named_parameters())):
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)) / 2)
    return model


def parameters_of(model: Any, special: str) -> Any:
    trained = [value for value in model.parameters() if value.requires_grad]
    if "groups" in special:
        vectors = [value for value in trained if value.dim() == 1]
        matrices = [value for value in trained if value.dim() > 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if "experts" in special:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "dense"})
    return trained


def train(folder: Path, stage: int, precision: str, special: str) -> None:
    """Train as one rank and save. Every rank gets the same samples, for the same gradients whatever their number is."""
    import deepspeed
    import torch
    from torch import nn

    deepspeed.init_distributed("gloo", verbose=False)
    world_size = torch.distributed.get_world_size()
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // world_size,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    model = make_model(special)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters_of(model, special), config=config)
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 5, (4, 6), generator=draw)
        logits = engine(tokens).float()
        engine.backward(nn.functional.cross_entropy(logits.view(-1, 5), tokens.roll(-1, 1).view(-1)))
        engine.step()
    state = {"epoch": 3, "note": "mine", "rng": torch.arange(16, dtype=torch.uint8)}
    engine.save_checkpoint(str(folder), client_state=state)
    torch.distributed.destroy_process_group()


def write(folder: Path, num_ranks: int, *arguments: object) -> None:
    """Start the ranks of one training, and wait for them."""
    port = random.randrange(20000, 30000)
    command = [sys.executable, __file__, str(folder), *map(str, arguments)]
    common = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    ranks = [subprocess.Popen(command, env=each) for each in environments]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * num_ranks


def convert(folder: Path) -> None:
    """Convert checkpoints as DeepSpeed's users do: to one state dict in fp32, and to universal checkpoints."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for name in ("stage2", "groups3"):
        script = [sys.executable, folder / name / "zero_to_fp32.py", folder / name, folder / f"{name}-fp32"]
        subprocess.run(script, env=environment, check=True)
    script = [sys.executable, folder / "stage2/zero_to_fp32.py", folder / "stage2", folder / "stage2-safe"]
    subprocess.run([*script, "--safe_serialization"], env=environment, check=True)
    for name in ("stage2", "stage3"):
        step = folder / name / f"global_step{STEPS}"
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        command += ["--input_folder", str(step), "--output_folder", str(folder / f"{name}-universal")]
        subprocess.run(command, env=environment, check=True)


def pack(folder: Path, archive: Path) -> None:
    """Pack all files but DeepSpeed's scripts; a tar compresses them together."""
    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(folder.glob("*/**/*")):
            if path.is_file() and path.suffix != ".py":
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = path.stat().st_size
                with path.open("rb") as stream:
                    packed.addfile(entry, stream)


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for checkpoint, (num_ranks, stage, precision, special) in CHECKPOINTS.items():
            write(folder / checkpoint, num_ranks, stage, precision, special)
        convert(folder)
        pack(folder, Path(__file__).with_name("checkpoints.tar.xz"))


if __name__ == "__main__":
    main()
