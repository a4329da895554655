"""Writes files of a checkpoint so that they survive a power failure, and says what the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from bigsci_launch.checkpoints.folder import sync_path, write_digests
from bigsci_launch.checkpoints.verify import file_digest
from bigsci_launch.errors import CheckpointError, SaveError
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.rank.identity import RankIdentity

_TORCH_WRITER = "inline_container.cc"
"""What torch names when it could not write a file: its C++ code does not say why."""
_PROBE_BYTES = 1 << 20
_HINT = "ask the machine's administrators whether the disk or its server failed"
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What is no fault of the disk: another process of this rank could save. It ends the rank as any other error."""
_HINTS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "your quota is used up: make room there",
    errno.EROFS: "have it mounted writable again",
}


class DurableCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes files as DeepSpeed does, and syncs each one before the checkpoint gets its name."""

    def __init__(self) -> None:
        super().__init__()
        self.zipfile_serialization = True
        self.digests: dict[str, str] = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Write `state_dict` to `path`. No activations are held now, so what the cache keeps may make room."""
        try:
            self._write(state_dict, path)
        except torch.OutOfMemoryError:
            if computes_on_gpu():
                torch.cuda.empty_cache()
            self._write(state_dict, path)
        with save_errors(Path(path)):
            sync_path(Path(path))
            self.digests[Path(path).name] = file_digest(Path(path))

    def _write(self, state_dict: Any, path: str) -> None:
        """Write a file. Raises SaveError, with the reason, where the disk refuses it."""
        try:
            with save_errors(Path(path)):
                super().save(state_dict, path)
        except RuntimeError as error:
            if _TORCH_WRITER not in str(error):
                raise
            with save_errors(Path(path)):
                _write_more(Path(path))
            words = str(error).splitlines()[0]
            why = f"{path}: cannot be written, and the disk gives no reason: {words}"
            raise SaveError(why, hint=_HINT, path=path) from error


class RankCheckpointEngine(DurableCheckpointEngine):
    """Writes the files of one rank, among others. It keeps what the disk refuses until all ranks know of it: they are
    in collective calls of DeepSpeed's save, and a rank that raised there would end them all."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: SaveError | None = None
        self._kept: list[tuple[str, Any]] | None = None

    def begin(self, *, keeps: bool = False) -> None:
        """Forget the last save. `keeps`: the files of this one are written later."""
        self.refused = None
        self.digests.clear()
        self._kept = [] if keeps else None

    def take_kept(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return the files that are to be written, and what they hold; from now on, files are written at once."""
        kept, self._kept = self._kept or [], None
        return tuple(path for path, _ in kept), tuple(state for _, state in kept)

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed must clone a weight that is a part of a larger storage. Each kept tensor is copied."""
        return self._kept is None

    @contextlib.contextmanager
    def keeping_errors(self, path: Path) -> Iterator[None]:
        """Keep what the disk refuses in here."""
        try:
            with save_errors(path):
                yield
        except SaveError as error:
            # Its frames hold the state of this rank.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self.refused = self.refused or error

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file, or keep what it is to hold."""
        if self._kept is None:
            self.write(state_dict, path)
        else:
            # DeepSpeed's clone of the weights of a layer has no attributes either, such as torch's `_metadata`.
            self._kept.append((path, type(state_dict)(state_dict)))

    def write(self, state_dict: Any, path: str) -> None:
        """Write a file, unless the disk has refused another one: then the checkpoint will not be committed."""
        if self.refused is None:
            with self.keeping_errors(Path(path)):
                super().save(state_dict, path)

    def write_document(self, staged: Path, rank: int, document: Mapping[str, Any]) -> None:
        """Write the digests of a rank into the checkpoint in `staged`, as the last file of its part."""
        if self.refused is None:
            with self.keeping_errors(staged):
                write_digests(staged, rank, {**document, "files": dict(self.digests)})

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self.keeping_errors(Path(path)):
            super().makedirs(path, exist_ok=exist_ok)


def refused_to(error: SaveError, ranks: Sequence[int], node: str) -> SaveError:
    error.ranks, error.node = tuple(ranks), node
    return error


@contextlib.contextmanager
def errors_of_rank(path: Path, identity: RankIdentity) -> Iterator[None]:
    """Raise SaveError, with this rank in it, for what the disk refuses."""
    try:
        with save_errors(path):
            yield
    except SaveError as error:
        raise refused_to(error, [identity.rank], identity.node) from None


@contextlib.contextmanager
def save_errors(path: Path) -> Iterator[None]:
    """Say in one sentence what the disk refuses to write. Raises SaveError."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_THE_PROCESS:
            raise
        sentence, hint = _refusal(path, error)
        raise SaveError(sentence, hint=hint, path=str(error.filename or path), number=error.errno) from error


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence what the disk refuses. Raises CheckpointError."""
    try:
        yield
    except OSError as error:
        sentence, hint = _refusal(path, error)
        raise CheckpointError(sentence, hint=f"{hint}, and submit the run again") from error


def _refusal(path: Path, error: OSError) -> tuple[str, str]:
    """Return what the disk refuses, where, and what to do."""
    number = error.errno or 0
    name = f" ({errno.errorcode.get(number, number)})" if number else ""
    return f"{error.filename or path}: {error.strerror or error}{name}", _HINTS.get(number, _HINT)


def _write_more(path: Path) -> None:
    """Write a little to `path`, since torch does not say why it could not. Raises OSError if the disk still refuses."""
    with path.open("ab") as stream:
        stream.write(bytes(_PROBE_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
