"""torch's compiler: which one, what it says where it fails, and where a rank keeps its code: for the other ranks of its
node, and for the next start.

torch's default is `/tmp/torchinductor_USER`. Whoever makes that folder first decides what the ranks run. Ours is only
used if it belongs to us and only we can enter it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.errors import BslError
from bigsci_launch.own_place import open_above

log = logging.getLogger(__name__)

BACKEND: Any = "inductor"
"""What `torch.compile` gets: tests have others."""

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CompiledFunction:
    """Computes what a function does, as one graph that torch compiles for each shape of its inputs."""

    def __init__(self, function: Callable[..., Tensor], what: str) -> None:
        self._compute: Callable[..., Tensor] = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
        self._what = what
        from torch._dynamo.exc import TorchDynamoException

        self._failures = TorchDynamoException

    def __call__(self, *arguments: Any) -> Tensor:
        """Return what the function returns; the first call with a shape takes seconds to minutes.

        Raises:
            BslError: it cannot be compiled here.
        """
        try:
            return self._compute(*arguments)
        except self._failures as error:
            raise BslError(
                f"training.compile: {self._what} could not be compiled on this node: {_cause(error)}",
                hint="it takes gcc, Python's headers and, for a GPU, triton; training.compile: false needs none",
            ) from error


def _cause(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else 'without words'}"[:300]


def keep_compiled_code() -> Path:
    """Choose the folder for compiled code, unless the environment names one, and return it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(_own_folder(Path(tempfile.gettempdir()) / f"torchinductor_bsl_{os.geteuid()}"))
    return Path(os.environ[_VARIABLE])


def _own_folder(folder: Path) -> Path:
    """Return `folder`, or a new one that only this start uses if others may have written or replaced it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if _is_ours(folder):
        return folder
    other = Path(tempfile.mkdtemp(prefix="torchinductor_bsl_"))
    log.warning("others may write %s: compiled code is kept in %s, which the next start does not use", folder, other)
    return other


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    is_closed = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return is_closed and not open_above(folder)
