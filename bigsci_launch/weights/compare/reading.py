"""How the bytes of a comparison are read: by how many threads, all or a sample, and what need not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
