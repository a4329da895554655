"""One of four gloo ranks that write the state of one tiny training in several ways, as torchtitan does.

    RANK=.. WORLD_SIZE=4 MASTER_ADDR=.. MASTER_PORT=.. python distributed_checkpoints.py FOLDER

Gradients depend on nothing but the parameter's name and the step, so every topology has the same state:

    FOLDER/dp2-tp2, FOLDER/dp2       distributed checkpoints of FSDP2 with tensor parallelism, and without
    FOLDER/changed                   as dp2-tp2, but one element of one moment differs: [19, 5] of layers.1.up.weight
    FOLDER/whole.pt                  the full state
    FOLDER/rank-N/plain.pt           what `torch.save` writes on each rank of dp2-tp2: DTensors
    FOLDER/rank-N/same.pt            the same, but for what every other process has in it: hashes
    FOLDER/rank-N/element.pt         the same, with another first local element of layers.0.down.weight
    FOLDER/rank-N/placement.pt       the same, with layers.0.norm.weight placed whole on every rank
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
STEPS = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 28)
        self.down = nn.Linear(28, 12)


class Model(nn.Module):
    """The rows of `tokens` are not divided evenly; torch refuses such rows if both dp and tp cut them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, 12)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})


def values(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) + step))


def train(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, 0, parameter.shape))
    for block in model.layers.values():
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        for name, parameter in model.named_parameters():
            full = values(name, step, parameter.shape)
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        optimizer.step()
    return model, optimizer


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: dist.ProcessGroup) -> None:
    parameters, state = get_state_dict(model, optimizer, options=FLAT)
    everything = {"model": parameters, "optimizer": state, "train_state": {"step": torch.tensor(STEPS)}}
    dcp.save(everything, storage_writer=dcp.FileSystemWriter(folder, sync_files=False), process_group=ranks)


def save_whole(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    parameters, state = get_state_dict(model, optimizer, options=options)
    if RANK == 0:
        torch.save({"model": parameters, "optimizer": state, "train_state": {"step": torch.tensor(STEPS)}}, path)


def save_dtensors(model: nn.Module) -> None:
    folder = FOLDER / f"rank-{RANK}"
    folder.mkdir()
    state = model.state_dict()
    torch.save(state, folder / "plain.pt")
    spec = state["layers.0.norm.weight"]._spec
    spec._hash, spec.mesh._hash = 1, 2
    torch.save(state, folder / "same.pt")
    norm = state["layers.0.norm.weight"]
    other = DTensor.from_local(norm.to_local(), norm.device_mesh, [Replicate()] * len(norm.placements))
    torch.save({**state, "layers.0.norm.weight": other}, folder / "placement.pt")
    with torch.no_grad():
        state["layers.0.down.weight"].to_local().view(-1)[0] += 1
    torch.save(state, folder / "element.pt")


def change_element(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Change one element of a moment, on the rank that has it."""
    moment = optimizer.state[parameter]["exp_avg"]
    change = torch.zeros(moment.shape)
    change[19, 5] = 1
    moment.to_local().add_(distribute_tensor(change, moment.device_mesh, moment.placements).to_local())


torch.set_num_threads(1)
dist.init_process_group("gloo")
two, everyone = dist.new_group([0, 1]), dist.group.WORLD
mesh_of_four = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
mesh_of_two = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
if RANK < 2:
    save(FOLDER / "dp2", *train(mesh_of_two), two)
model, optimizer = train(mesh_of_four)
save(FOLDER / "dp2-tp2", model, optimizer, everyone)
save_whole(FOLDER / "whole.pt", model, optimizer)
change_element(optimizer, model.layers["1"].up.weight)
save(FOLDER / "changed", model, optimizer, everyone)
save_dtensors(model)
dist.destroy_process_group()
