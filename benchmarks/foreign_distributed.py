"""Writes small distributed checkpoints with the trainers that write them in practice, on 1, 2 and 4 gloo ranks.

python benchmarks/foreign_distributed.py FOLDER [--only megatron torchtitan ...]
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import tempfile
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

STEP = 4
# The parameters that the small fixture keeps: cut by row, in two halves, and whole on every rank.
KEPT = re.compile(r".*(?:word_embeddings\.weight|linear_fc1\.weight|final_layernorm\.weight)")


def values(name: str, shape: Any) -> torch.Tensor:
    """Return what a tensor holds: it depends on nothing but its name and its shape in the whole model."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def spawn(write: Callable[..., None], folder: Path, num_ranks: int, *arguments: Any) -> None:
    """Run `write(folder, *arguments)` on gloo ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (write, folder, num_ranks, port, arguments), nprocs=num_ranks)


def _rank(rank: int, write: Callable[..., None], folder: Path, num_ranks: int, port: int, arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    write(folder, *arguments)
    torch.distributed.destroy_process_group()


# Megatron-core


def write_megatron(folder: Path, **kinds: Any) -> None:
    topologies = (("tp2", 2, 2, 1), ("tp1", 1, 1, 1), ("dp2", 2, 1, 1), ("pp2", 2, 1, 2))
    for name, num_ranks, tp, pp in topologies[: 2 if kinds.get("is_small") else None]:
        spawn(_megatron_rank, folder / name, num_ranks, tp, pp, kinds)


def _megatron_rank(folder: Path, tp: int, pp: int, kinds: dict[str, Any]) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    _pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    config = TransformerConfig(
        num_layers=1 if kinds.get("is_small") else 2,
        hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, use_cpu_initialization=True,
        gated_linear_unit=True, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        perform_initialization=False, num_moe_experts=kinds.get("experts"), add_bias_linear=not kinds.get("experts"),
        moe_grouped_gemm=False,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=kinds.get("experts")),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    metadata = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    if kinds.get("sharding"):
        metadata["distrib_optim_sharding_type"] = kinds["sharding"]
        model, optimizer = _distributed_optimizer(config, model)
        sharded = model.sharded_state_dict(metadata=metadata)
        _save_megatron(
            folder, kinds, tp, pp, sharded, optimizer.sharded_state_dict(sharded, metadata=metadata), metadata
        )
        return
    parameters = list(model.parameters())
    inner = torch.optim.AdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    inner.step()
    for group in inner.param_groups:
        group["step"] = STEP
    for state in inner.state.values():
        del state["step"]
    optimizer = FP32Optimizer(inner, OptimizerConfig(), lambda: None)
    sharded = model.sharded_state_dict(metadata=metadata)
    of_optimizer = optimizer.sharded_state_dict(sharded, metadata=metadata)
    _save_megatron(folder, kinds, tp, pp, sharded, of_optimizer, metadata)


def _pretend_cuda() -> None:
    """Let Megatron-core, which knows no other device, take the CPU for one."""
    plain, kind = torch.tensor, torch.Tensor.type
    torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"
    torch.tensor = lambda *given, device=None, **named: plain(*given, **named)
    torch.Tensor.cuda = lambda self: self
    torch.Tensor.type = lambda self, *given: (
        kind(self, *given) if given else kind(self).replace("torch.", "torch.cuda.")
    )


def _distributed_optimizer(config: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True), [model]
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.main_grad.copy_(values(f"grad {name}", parameter.shape))
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    return model, optimizer


def _save_megatron(
    folder: Path, kinds: dict[str, Any], tp: int, pp: int, sharded: Any, of_optimizer: Any, metadata: Any
) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank = torch.distributed.get_rank()
    scheduler = {"max_lr": 1e-2, "num_steps": STEP, "start_wd": 0.01, "end_wd": 0.01}
    random_state = [{"torch_rng_state": values(f"rng {rank}", (8,)), "rng_tracker_states": {"rank": rank}}]
    of_tp, of_pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    state = {
        "args": Namespace(
            tensor_model_parallel_size=tp, hidden_size=8, save=folder.name, world_size=tp * pp, rank=0, lr=1e-2
        ),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "num_floating_point_operations_so_far": 12.0,
        "model": sharded,
        "optimizer": of_optimizer,
        "opt_param_scheduler": scheduler,
        "rng_state": ShardedObject(
            "rng_state",
            random_state,
            (pp, tp),
            (of_pp, of_tp),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
    if kinds.get("is_small"):
        _prune(state)
    _fill(state)
    target = folder / f"iter_{STEP:07d}"
    if rank == 0:
        target.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    parallel_state.destroy_model_parallel()


def _prune(state: dict[str, Any]) -> None:
    """Remove all sharded entries but those of a few parameters, and the random states."""
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    for held in (state["model"], *state["optimizer"]["state"].values()):
        for key, item in list(held.items()):
            if isinstance(item, ShardedBase) and not KEPT.fullmatch(item.key):
                del held[key]
    of_parameters = state["optimizer"]["state"]
    state["optimizer"]["state"] = {number: held for number, held in of_parameters.items() if held}


def _fill(state: Any) -> None:
    """Give every sharded tensor its part of the whole."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    stack = [state]
    while stack:
        node = stack.pop()
        if isinstance(node, ShardedTensor):
            part = values(node.key, node.global_shape)[node.global_slice()]
            with torch.no_grad():
                node.data.copy_(part.reshape(node.data.shape))
        elif isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, (list, tuple)):
            stack += node


# torchtitan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tokens(tokens))


def _set_values(model: nn.Module) -> None:
    """Give every parameter, sharded or not, its values, and a gradient."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in model.named_parameters():
        for tag in ("", "grad "):
            part = values(f"{tag}{name}", parameter.shape)
            if isinstance(parameter, DTensor):
                part = distribute_tensor(part, parameter.device_mesh, parameter.placements)
            if tag:
                parameter.grad = part
            else:
                with torch.no_grad():
                    parameter.copy_(part)


def _sharded_model(num_ranks: int) -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    model = Model()
    fully_shard(model, mesh=mesh)
    return model


def write_torchtitan(folder: Path) -> None:
    for num_ranks in (1, 2):
        spawn(_torchtitan_rank, folder / f"dp{num_ranks}", num_ranks)


def _torchtitan_rank(folder: Path) -> None:
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = _sharded_model(num_ranks)
    config = OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})],
        implementation="for-loop",
    )
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    _set_values(model)
    for _ in range(2):
        optimizers.step()
        schedulers.step()

    class Tokens(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield torch.tensor(self.at)

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "rank": rank}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    loader = ParallelAwareDataloader(Tokens(), dp_rank=rank, dp_world_size=num_ranks, batch_size=2)
    next(iter(loader))

    class TrainState:
        def state_dict(self) -> dict[str, Any]:
            return {"step": 2, "ntokens_seen": 128}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    manager = CheckpointManager.Config(enable=True, folder="checkpoint", interval=1, keep_latest_k=0).build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": TrainState()}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    manager.save(2)


# Lightning


def write_lightning(folder: Path) -> None:
    for num_ranks in (1, 2):
        spawn(_trainer_rank, folder / f"dp{num_ranks}", num_ranks)


def write_fabric(folder: Path) -> None:
    for num_ranks in (1, 2):
        spawn(_fabric_rank, folder / f"dp{num_ranks}", num_ranks)


def _fabric_rank(folder: Path) -> None:
    from lightning.fabric.strategies.model_parallel import _save_checkpoint

    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model = _sharded_model(num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _set_values(model)
    optimizer.step()
    for name, is_full in (("sharded", False), ("full.ckpt", True)):
        state = {"model": model, "optimizer": optimizer, "step": 1, "hparams": {"lr": 1e-2}}
        folder.mkdir(parents=True, exist_ok=True)
        _save_checkpoint(path=folder / name, state=state, full_state_dict=is_full, rank=rank)


def _trainer_rank(folder: Path) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def configure_model(self) -> None:
            if not any(hasattr(p, "placements") for p in self.net.parameters()):
                _set_values(self.net)
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]

    trainer = lightning.Trainer(
        default_root_dir=tempfile.mkdtemp(), max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=torch.distributed.get_world_size(), tensor_parallel_size=1),
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 2, dtype=torch.long), batch_size=2))
    trainer.save_checkpoint(folder / "epoch=0-step=2.ckpt")


WRITERS: dict[str, Callable[[Path], None]] = {
    "megatron": lambda folder: write_megatron(folder, is_small=True),
    "megatron-gpt": write_megatron,
    "megatron-moe": lambda folder: write_megatron(folder, experts=2),
    "megatron-dp": lambda folder: write_megatron(folder, sharding="dp_reshardable"),
    "megatron-full": lambda folder: write_megatron(folder, sharding="fully_reshardable"),
    "torchtitan": write_torchtitan,
    "lightning": write_lightning,
    "fabric": write_fabric,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS))
    arguments = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for name in arguments.only:
        WRITERS[name](arguments.folder / name)


if __name__ == "__main__":
    main()
