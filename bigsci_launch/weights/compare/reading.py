"""How the bytes of a comparison are read: by how many threads, all or a sample, what need not be read, and whether
numpy is there to measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bigsci_launch.errors import INSTALL_WEIGHTS, BslError

DEFAULT_JOBS = 4


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How the user wants the bytes to be read.

    `jobs` threads open, parse and compare. `sample` is the share of each tensor to read; None means all. `digests` are
    those of whole files, recorded when they were saved: files with the same one are not read.
    """

    jobs: int = DEFAULT_JOBS
    sample: float | None = None
    digests: Mapping[Path, str] = field(default_factory=dict)

    @property
    def is_of_every_byte(self) -> bool:
        return self.sample is None and not self.digests

    def have_one_digest(self, a: Path, b: Path) -> bool:
        """Whether a digest is recorded for both files, and it is the same."""
        digest = self.digests.get(a)
        return digest is not None and digest == self.digests.get(b)


@dataclass(slots=True)
class Extent:
    """How many bytes of each side were read, and how many were not, because the recorded digests are equal.

    With `is_sample`, only a part of each tensor was read.
    """

    num_read: int = 0
    num_by_digest: int = 0
    num_files_by_digest: int = 0
    is_sample: bool = False


EVERY_BYTE = ReadPlan()


@cache
def has_numpy() -> bool:
    """Whether numpy is installed, which measures what differs. Bytes are compared without it."""
    try:
        import bigsci_launch.weights.files.elements  # noqa: F401  # imports numpy, limited to one BLAS thread
    except ModuleNotFoundError:
        return False
    return True


def require_numpy(why: str) -> None:
    """Require numpy; the error begins with `why`.

    Raises:
        BslError: numpy is not installed.
    """
    if not has_numpy():
        raise BslError(f"{why}, but numpy, which measures by how much, is not installed", hint=INSTALL_WEIGHTS)
