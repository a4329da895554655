"""Checkpoints that others may have written: what their pickles name is looked at before torch runs them.

A file of `torch.save` contains a pickle, and torch does what a pickle says: it imports what is named there, and calls
it. Sizes and digests of a checkpoint are no signature. So the pickle is first read as a description, and may only name
what the checkpoints of `bsl train` consist of, and set attributes only of objects that it makes itself.

Whoever may write a file may exchange or change it after it was looked at. So `torch.load` is not asked: it chooses by
what it finds in the file whether to read a pickle, or to run a program of TorchScript. An archive is opened once, only
its pickle is read, and the bytes that are looked at are those that are then run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from bigsci_launch import own_place
from bigsci_launch.errors import CheckpointError
from bigsci_launch.safe_files import open_stream, others_may_write
from bigsci_launch.safe_pickle import ForbiddenPickle, pickle_module
from bigsci_launch.weights.objects.effects import GETATTR
from bigsci_launch.weights.objects.machine import PickleMachine
from bigsci_launch.weights.objects.nodes import BadPickle, Named, Outside

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
"""What a checkpoint of `bsl train` may name, with DeepSpeed's own classes. Called by a pickle, with whatever arguments,
these run nothing but each other."""
_WITH_ATTRIBUTES = frozenset(
    (
        "collections.OrderedDict",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)
"""What makes the objects whose attributes it may set. Those of the members of ZeroStageEnum would stay set."""
_STAGES: dict[str, Any] = dict(ZeroStageEnum.__members__)
_MEMBERS = frozenset(f"deepspeed.runtime.zero.config.ZeroStageEnum.{name}" for name in _STAGES)
"""What a pickle may get by getattr: Python 3.11.2 pickles the members of an enumeration so, by class and name."""
_SCRIPT = ("constants.pkl", "bytecode.pkl", "code/")
"""How the names of the parts begin that only an archive of TorchScript has."""
HINT = "if you know who saved it, and trust them, remove what is not a part of it; `bsl diff-weights` shows it safely"


def is_foreign(folder: Path, own: Path) -> bool:
    """Whether a checkpoint is not in the folder `own` of its run, or others may have written it, or may put one of
    theirs in its place.

    Raises:
        OSError: a folder or file cannot be looked at.
    """
    place = folder.resolve()
    if place.parent != own.resolve():
        return True
    found = [path.stat() for path in (own.parent, own, folder, *folder.rglob("*.pt"))]
    return any(map(_is_of_others, found)) or bool(own_place.open_above(place))


def _is_of_others(found: os.stat_result) -> bool:
    return found.st_uid != os.geteuid() or others_may_write(found)


def require_plain_checkpoint(folder: Path) -> None:
    """Check all files of a checkpoint that torch would load; see `require_plain`."""
    for path in sorted(folder.rglob("*.pt")):
        require_plain(path)


def require_plain(path: Path) -> None:
    """Check that a file of `torch.save` names nothing but what checkpoints consist of.

    Raises:
        CheckpointError: it names something else, or cannot be read; names the file, and what it would run.
    """
    with _errors_named(path), open_stream(path, follow=True) as stream, _open_archive(stream) as archive:
        _require_plain_pickle(bytes(archive.get_record("data.pkl")))


def load_mapped(path: Path) -> Any:
    """Load a file of `torch.save` from an unknown source.

    Its tensors are memory-mapped, unless others may write it: who cuts a mapped file kills the process that reads it.

    Raises:
        CheckpointError: the file cannot be read, or loading it would run something.
    """
    with _errors_named(path), open_stream(path, follow=True) as stream:
        is_own = not _is_of_others(os.fstat(stream.fileno()))
        return _load(stream, "cpu", _map(stream) if is_own else None)


def load_plain(path: Path | str, map_location: Any = None) -> Any:
    """Load a file of `torch.save`, and build nothing but what ALLOWED names.

    Raises:
        ForbiddenPickle: it would run something else.
        BadPickle: it is damaged, or another kind of file.
        OSError: it cannot be opened.
        RuntimeError: torch cannot read the archive.
    """
    with open_stream(path, follow=True) as stream:
        return _load(stream, map_location)


def _load(stream: IO[bytes], map_location: Any, storage: torch.UntypedStorage | None = None) -> Any:
    """Load what an open file holds; its tensors are parts of `storage`, if given. Raises what `load_plain` does."""
    with _open_archive(stream) as archive:
        load: Callable[..., Any] = torch.serialization._load
        return load(archive, map_location, PLAIN, overall_storage=storage, encoding="utf-8")


def _map(stream: IO[bytes]) -> torch.UntypedStorage:
    """Map the very file that is open, whatever its path leads to by now. What is written there stays in memory."""
    handle = stream.fileno()
    found = torch.UntypedStorage.from_file(f"/proc/self/fd/{handle}", False, os.fstat(handle).st_size)
    assert isinstance(found, torch.UntypedStorage)
    return found


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Raise CheckpointError for what keeps a file from being loaded, with its path."""
    try:
        yield
    except ForbiddenPickle as error:
        raise CheckpointError(f"{path}: {error} when it is loaded, which no checkpoint needs", hint=HINT) from None
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _require_plain_pickle(content: bytes) -> None:
    """Check what a pickle names, and whose attributes it sets.

    Raises:
        ForbiddenPickle: it does something else; the message says what.
        BadPickle: it is damaged or too large, or sets attributes of a function or class.
    """
    machine = PickleMachine(content, lambda reference: Outside(str(reference)), _refuse_getattr)
    machine.run()
    if wrong := _not_in(ALLOWED | _MEMBERS, machine.names - {GETATTR}):
        raise ForbiddenPickle(f"it would run {wrong[0]}")
    if wrong := _not_in(_WITH_ATTRIBUTES, machine.built):
        raise ForbiddenPickle(f"it would set attributes of what {wrong[0]} returns")


def _not_in(allowed: frozenset[str], found: set[Named]) -> list[str]:
    return sorted({str(named) for named in found} - allowed)


def _refuse_getattr(named: Named, args: tuple[Any, ...]) -> None:
    """Refuse a call of getattr, unless it is one that the machine has understood: it asks about the others."""
    if named == GETATTR:
        raise ForbiddenPickle(f"it would run {GETATTR}")


def _member(owner: Any, name: Any) -> Any:
    """What a pickle calls where it names getattr.

    Raises:
        ForbiddenPickle: it would get something else than a member.
    """
    if owner is not ZeroStageEnum or type(name) is not str or name not in _STAGES:
        raise ForbiddenPickle(f"it would run {GETATTR}")
    return _STAGES[name]


_INSTEAD = {"builtins.getattr": _member, "__builtin__.getattr": _member}
"""By the names of Python 3 and 2: torch writes the latter."""
PLAIN = pickle_module(ALLOWED, _require_plain_pickle, _INSTEAD)
"""What reads the pickle of a file: it may be another one than a moment ago, when it was looked at."""


@contextlib.contextmanager
def plain_loads() -> Iterator[None]:
    """Let `torch.load` be `load_plain` in this block, also where DeepSpeed calls it."""
    load = torch.load
    torch.load = _load_instead
    try:
        yield
    finally:
        torch.load = load


def _load_instead(f: Any, map_location: Any = None, *_: Any, **options: Any) -> Any:
    """What is called for `torch.load`: whatever the caller requests, nothing is mapped, and only ALLOWED is built."""
    return _load(f, map_location) if hasattr(f, "read") else load_plain(f, map_location)


@contextlib.contextmanager
def _open_archive(stream: IO[bytes]) -> Iterator[Any]:
    """Open what `torch.save` writes. The names and places of its parts are read once, here.

    Raises:
        BadPickle: it is in one of torch's other formats, which contain more than one program.
        RuntimeError: torch cannot read the archive.
    """
    if not torch.serialization._is_zipfile(stream):
        raise BadPickle("it is not the archive that torch.save writes")
    with torch.serialization._open_zipfile_reader(stream) as archive:
        if any(name.startswith(_SCRIPT) for name in archive.get_all_records()):
            raise BadPickle("it is a program of TorchScript")
        yield archive
