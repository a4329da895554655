"""Writes one small model in every format, for the table of formats."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from bigsci_launch.file_names import digests_name
from bigsci_launch.topology import Coordinate
from bigsci_launch.weights.formats.digests import digest_document, digest_entry

TESTS = Path(__file__).parents[1] / "tests" / "unit" / "weights"
FOREIGN = TESTS / "foreign"
CHANGED = "1.up.weight"
REPLICATED = ("ln.weight", "ln.bias", "down.bias")
Tensors = dict[str, torch.Tensor]
Write = Callable[[Path, bool], Path]


@dataclass(frozen=True)
class Row:
    """One format: `write(folder, is_changed)` writes the model, perhaps with one bit flipped, and returns its path.

    `named` is what the answer calls the tensor that has the flipped bit. `otherwise` writes the same model in other
    files, or says why there are none.
    """

    name: str
    write: Write
    otherwise: Write | str
    named: str = CHANGED


# The model: that of the tests, on any topology.


@cache
def _of_tests(path: str) -> Any:
    """Return a module of the tests."""
    name = f"weights_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, TESTS / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(is_changed: bool, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Any:
    """Return the model on a topology; changed, its `CHANGED` has the sign of its first element flipped."""
    tiny = _of_tests("conftest.py").TinyCheckpoint
    made, whole = tiny(tp=tp, pp=pp, dp=dp), tiny(tp=1, pp=1, dp=1)
    for (_, rank), tensors in made.state.items():
        for name, roles in tensors.items():
            for role, value in roles.items():
                roles[role] = _shard(whole.state[0, 0][name][role], name, rank, value.shape)
    if is_changed:
        holder = next(tensors for (_, rank), tensors in made.state.items() if rank == 0 and CHANGED in tensors)
        holder[CHANGED]["fp32"].view(torch.int32)[0, 0] ^= 1 << 16
    return made


def _shard(whole: torch.Tensor, name: str, rank: int, shape: torch.Size) -> torch.Tensor:
    dim = next((dim for dim in range(whole.dim()) if whole.shape[dim] != shape[dim]), None)
    if dim is None or name.endswith(REPLICATED):
        return whole.clone()
    return whole.narrow(dim, rank * shape[dim], shape[dim]).clone()


def weights(is_changed: bool) -> Tensors:
    """Return the parameters of the model, each as a whole, in bf16."""
    return {name: roles["fp32"].bfloat16() for name, roles in model(is_changed).state[0, 0].items()}


def ranks(is_changed: bool, **topology: int) -> list[tuple[int, dict[str, int], Tensors]]:
    """Return each rank's number, coordinate and parameters."""
    made = model(is_changed, **topology)
    places = [(pp, tp, dp) for pp, tp in made.state for dp in range(made.dp)]
    return [
        (
            number,
            {"pp": pp, "tp": tp, "dp": dp},
            {name: roles["fp32"].bfloat16() for name, roles in made.state[pp, tp].items()},
        )
        for number, (pp, tp, dp) in enumerate(places)
    ]


# Single files.


def torch_zip(folder: Path, is_changed: bool) -> Path:
    return _saved(folder / "model.pt", weights(is_changed))


def torch_legacy(folder: Path, is_changed: bool) -> Path:
    return _saved(folder / "model.pt", weights(is_changed), _use_new_zipfile_serialization=False)


def _saved(path: Path, tree: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path, **options)
    return path


def torch_compressed(folder: Path, is_changed: bool) -> Path:
    plain = torch_zip(folder, is_changed)
    packed = folder / "packed.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    return packed


def safetensors(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(is_changed), folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


class Net(nn.Module):
    """One linear layer."""

    def __init__(self, is_changed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)
        with torch.no_grad():
            self.up.weight.copy_(torch.arange(12.0).reshape(3, 4) + 1)
            self.up.bias.zero_()
            self.up.weight.view(torch.int32)[0, 0] ^= int(is_changed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.up(x)
        return found


def torchscript(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(Net(is_changed)).save(str(folder / "model.pt"))
    return folder / "model.pt"


def exported(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(torch.export.export(Net(is_changed), (torch.ones(2, 4),)), folder / "model.pt2")
    return folder / "model.pt2"


def net_state(folder: Path, is_changed: bool) -> Path:
    return _saved(folder / "state.pt", Net(is_changed).state_dict())


def npz(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: value.float().numpy() for name, value in weights(is_changed).items()}
    np.savez(folder / "model.npz", **arrays)
    return folder / "model.npz"


def npz_compressed(folder: Path, is_changed: bool) -> Path:
    with np.load(npz(folder, is_changed)) as arrays:
        np.savez_compressed(folder / "packed.npz", **arrays)
    return folder / "packed.npz"


def npz_otherwise(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.float() for name, value in weights(is_changed).items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


# Folders.


def hugging_face(folder: Path, is_changed: bool, size: int = 4) -> Path:
    """As `save_pretrained` writes shards: `size` tensors in each."""
    folder.mkdir(parents=True, exist_ok=True)
    held = list(weights(is_changed).items())
    parts = [dict(held[first : first + size]) for first in range(0, len(held), size)]
    names = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, {"format": "pt"})
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    total = sum(value.numel() * value.element_size() for _, value in held)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def foreign(name: str, file: str, change: Callable[[Path], None]) -> Write:
    """Return the writer of a folder that another library wrote; changed, `change` is applied to one file of it."""

    def write(folder: Path, is_changed: bool) -> Path:
        target = folder / Path(name).name
        shutil.copytree(FOREIGN / name, target)
        if is_changed:
            change(target / file)
        return target

    return write


def flip_safetensors(name: str) -> Callable[[Path], None]:
    """Return a function that flips a bit of a tensor in a .safetensors file."""

    def change(path: Path) -> None:
        tensors = load_file(path)
        tensors[name].view(torch.int32).reshape(-1)[0] ^= 1
        save_file(tensors, path, {"format": "pt"})

    return change


def flip_record(record: str) -> Callable[[Path], None]:
    """Return a function that flips a bit of a record in a file of `torch.save`."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith(f"/{record}"))
        raw = bytearray(path.read_bytes())
        at = (
            info.header_offset + 30 + sum(int.from_bytes(raw[info.header_offset + n :][:2], "little") for n in (26, 28))
        )
        raw[at] ^= 1
        path.write_bytes(raw)

    return change


def megatron(folder: Path, is_changed: bool) -> Path:
    """As Megatron-LM writes: a folder per tp and pp rank."""
    for _, at, tensors in ranks(is_changed, tp=2):
        tree = {"checkpoint_version": 3.0, "iteration": 20, "model": tensors, "opt_param_scheduler": {"num_steps": 20}}
        _saved(folder / "iter_0000020" / f"mp_rank_{at['tp']:02d}" / "model_optim_rng.pt", tree)
    return folder / "iter_0000020"


def distributed(folder: Path, is_changed: bool) -> Path:
    dcp.save({"model": weights(is_changed), "step": 20}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def distributed_as_one(folder: Path, is_changed: bool) -> Path:
    return _saved(folder / "model.pt", {"model": weights(is_changed), "step": 20})


def distributed_safetensors(folder: Path, is_changed: bool) -> Path:
    writer = dcp.HuggingFaceStorageWriter(str(folder / "dcp"))
    dcp.save(weights(is_changed), storage_writer=writer, no_dist=True)
    return folder / "dcp"


# Files of ranks.


def pipeline(folder: Path, is_changed: bool) -> Path:
    return Path(model(is_changed, tp=2, pp=2, dp=2).write(folder))


def pipeline_otherwise(folder: Path, is_changed: bool) -> Path:
    return Path(model(is_changed, tp=1, pp=1, dp=4).write(folder))


def zero(name: str, shard: str, flats: str) -> Write:
    """Return the writer of a checkpoint of the tests that DeepSpeed wrote; changed, a master in one shard is."""

    def write(folder: Path, is_changed: bool) -> Path:
        with tarfile.open(TESTS / "zero" / "checkpoints.tar.xz") as packed:
            members = [member for member in packed.getmembers() if member.name.split("/")[0] == name]
            packed.extractall(folder, members, filter="data")
        steps = list((folder / name).glob("global_step*"))
        if is_changed:
            _flip_master(next((folder / name).glob(f"**/{shard}")), flats)
        return steps[0] if steps else folder / name

    return write


def _flip_master(path: Path, flats: str) -> None:
    tree = torch.load(path, weights_only=False)
    held = tree["param"] if flats == "param" else tree["optimizer_state_dict"][flats][0]
    with torch.no_grad():
        held.view(torch.int32).view(-1)[0] ^= 1
    torch.save(tree, path)


def dumps(folder: Path, is_changed: bool, **topology: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, at, tensors in ranks(is_changed, **(topology or {"tp": 2, "pp": 2})):
        metadata = {axis: str(index) for axis, index in at.items()}
        save_file(tensors, folder / f"rank-{number:04d}.safetensors", metadata)
    return folder


def dumps_otherwise(folder: Path, is_changed: bool) -> Path:
    return dumps(folder, is_changed, tp=1)


def digests(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, at, tensors in ranks(is_changed, tp=2, pp=2):
        entries = {
            name: digest_entry("BF16", value.shape, value.view(torch.uint8).numpy().tobytes())
            for name, value in tensors.items()
        }
        document = digest_document(entries, rank=number, coordinate=Coordinate.at(**at), step=20)
        (folder / digests_name(number)).write_text(json.dumps(document))
    return folder


def printed(folder: Path, is_changed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for _, at, tensors in ranks(is_changed, tp=2, pp=2):
        text = "".join(f"module.{name}={nn.Parameter(value)}\n" for name, value in tensors.items())
        name = f"debug-805-pp{at['pp']:02d}-tp{at['tp']}-dp{at['dp']}-global20-after-iteration-20.txt"
        (folder / name).write_text(text)
    return folder


IN_THE_TRAINER = "its other files belong to this run"
SHARD, MASTERS = "*zero_pp_rank_0_mp_rank_00_optim_states.pt", "single_partition_of_fp32_groups"
ROWS = (
    Row("torch.save", torch_zip, safetensors),
    Row("torch.save before torch 1.6", torch_legacy, torch_zip),
    Row("torch.save, compressed by another program", torch_compressed, torch_zip),
    Row("TorchScript", torchscript, net_state, "up.weight"),
    Row("torch.export", exported, net_state, "up.weight"),
    Row("safetensors", safetensors, hugging_face),
    Row(
        "Hugging Face shards with an index",
        hugging_face,
        lambda folder, is_changed: hugging_face(folder, is_changed, 3),
    ),
    Row(
        "Hugging Face Trainer",
        foreign("trainer", "model.safetensors", flip_safetensors("transformer.wte.weight")),
        IN_THE_TRAINER,
        "transformer.wte.weight",
    ),
    Row(
        "accelerate",
        foreign("accelerate", "model.safetensors", flip_safetensors("0.weight")),
        IN_THE_TRAINER,
        "0.weight",
    ),
    Row(
        "accelerate, FSDP with full state dicts",
        foreign("fsdp-full", "pytorch_model_fsdp.bin", flip_record("data/0")),
        IN_THE_TRAINER,
        "0.weight",
    ),
    Row(
        "peft adapter",
        foreign(
            "adapter",
            "adapter_model.safetensors",
            flip_safetensors("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"),
        ),
        "it is one file",
        "lora_A.weight",
    ),
    Row(
        "Lightning",
        foreign("lightning", "epoch=0-step=4.ckpt", flip_record("data/0")),
        "it is one file",
        "weight",
    ),
    Row("torch.distributed.checkpoint", distributed, distributed_as_one),
    Row("torch.distributed.checkpoint, safetensors storage", distributed_safetensors, safetensors),
    Row("Megatron-LM", megatron, "it does not say how shards are cut"),
    Row("DeepSpeed pipeline", pipeline, pipeline_otherwise),
    *(
        Row(f"DeepSpeed ZeRO-{stage}", zero(f"stage{stage}", SHARD, flats), otherwise, "fp32")
        for stage, flats, otherwise in (
            (1, MASTERS, zero("stage2-of4", SHARD, MASTERS)),
            (2, MASTERS, zero("stage3", SHARD, "fp32_flat_groups")),
            (3, "fp32_flat_groups", zero("stage3-of4", SHARD, "fp32_flat_groups")),
        )
    ),
    Row(
        "DeepSpeed universal",
        zero("stage2-universal", "fp32.pt", "param"),
        zero("stage2", SHARD, MASTERS),
        "fp32",
    ),
    Row("dumps of ranks by `bsl train`", dumps, dumps_otherwise),
    Row("digests by `bsl train`", digests, dumps),
    Row("tensors as torch prints them", printed, dumps),
    Row("npz of numpy", npz, npz_otherwise),
    Row("npz of numpy, compressed", npz_compressed, npz),
)
