"""Checkpoints that others may have written: what their pickles name is looked at before torch runs them.

A file of `torch.save` contains a pickle, and torch does what a pickle says: it imports what is named there, and calls
it. Sizes and digests of a checkpoint are no signature. So the pickle is first read as a description, and may only name
what the checkpoints of `bsl train` consist of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bigsci_launch.errors import CheckpointError
from bigsci_launch.safe_files import others_may_write
from bigsci_launch.safe_pickle import pickle_module
from bigsci_launch.weights.objects.machine import PickleMachine
from bigsci_launch.weights.objects.nodes import BadPickle, Outside

_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
ALLOWED = frozenset(
    (
        "collections.OrderedDict",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch.device",
        "torch.storage.UntypedStorage",
        *(f"torch.{each}Storage" for each in _TYPES),
        *(f"torch.{each}" for each in _DTYPES),
    )
)
"""What a checkpoint of `bsl train` may name, with DeepSpeed's own classes. None of these runs anything else."""
HINT = "if you know who saved it, and trust them, remove what is not a part of it; `bsl diff-weights` shows it safely"


def is_foreign(folder: Path, own: Path) -> bool:
    """Whether a checkpoint is not in the folder `own` of its run, or others may have written it."""
    if folder.resolve().parent != own.resolve():
        return True
    found = [path.stat() for path in (folder, *folder.rglob("*.pt"))]
    return any(each.st_uid != os.geteuid() or others_may_write(each) for each in found)


def require_plain_checkpoint(folder: Path) -> None:
    """Check all files of a checkpoint that torch would load; see `require_plain`."""
    for path in sorted(folder.rglob("*.pt")):
        require_plain(path)


def require_plain(path: Path) -> None:
    """Check that a file of `torch.save` names nothing but what checkpoints consist of.

    Raises:
        CheckpointError: it names something else, or cannot be read; names the file, and what it would run.
    """
    try:
        machine = PickleMachine(_pickle_in(path), lambda reference: Outside(str(reference)))
        machine.run()
    except (BadPickle, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if wrong := sorted({str(named) for named in machine.names if str(named) not in ALLOWED}):
        raise CheckpointError(
            f"{path}: it would run {wrong[0]} when it is loaded, which no checkpoint needs", hint=HINT
        )


PLAIN = pickle_module(ALLOWED)
"""For `torch.load`: a file may be another one than a moment ago, when it was looked at."""


@contextlib.contextmanager
def plain_loads() -> Iterator[None]:
    """Let `torch.load` build nothing but what ALLOWED names, in this block, also where DeepSpeed calls it."""
    load = torch.load
    torch.load = partial(load, pickle_module=PLAIN)
    try:
        yield
    finally:
        torch.load = load


def _pickle_in(path: Path) -> bytes:
    """Return the pickle that `torch.load` would run, found by torch's own reader.

    Raises:
        BadPickle: it is in one of torch's other formats, which contain more than one program.
        RuntimeError: torch cannot read the archive.
    """
    with path.open("rb") as stream:
        if not torch.serialization._is_zipfile(stream):
            raise BadPickle("it is not the archive that torch.save writes")
    archive = torch._C.PyTorchFileReader(str(path))
    if "constants.pkl" in archive.get_all_records():
        raise BadPickle("it is a program of TorchScript")
    return bytes(archive.get_record("data.pkl"))
