"""Stored tensors, in any format: a name, a role, a place on the parallel axes, and bytes in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bigsci_launch.topology.naming import name_box

if TYPE_CHECKING:
    from bigsci_launch.weights.files.mapped import MappedFile

# `padding` is what a format puts between and behind parameters: it is no part of the state.
TensorRole = Literal["weight", "fp32", "exp_avg", "exp_avg_sq", "other", "padding"]
OPTIMIZER_ROLES: tuple[TensorRole, ...] = ("fp32", "exp_avg", "exp_avg_sq")


class _Widths(dict[str, int]):
    """Bytes per element; elements of an unknown dtype are compared byte by byte."""

    def __missing__(self, dtype: str) -> int:
        return 1


# Dtype names follow safetensors; torch's other dtypes (C32, quantized integers) have names of the same kind.
DTYPE_BYTES = _Widths(
    F64=8,
    F32=4,
    F16=2,
    BF16=2,
    F8_E4M3=1,
    F8_E5M2=1,
    F8_E4M3FNUZ=1,
    F8_E5M2FNUZ=1,
    F8_E8M0=1,
    I64=8,
    I32=4,
    I16=2,
    I8=1,
    U64=8,
    U32=4,
    U16=2,
    U8=1,
    BOOL=1,
    C32=4,
    C64=8,
    C128=16,
    QI32=4,
    QI8=1,
    QU8=1,
    BITS16=2,
)
# Dtypes whose elements share bytes: elements and bytes of the smallest whole group. They are read as one code a byte.
PACKED_DTYPES = {"F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}

# Dimensions of one tensor, the most that every numpy has.
MAX_DIMS = 32


def has_numbers(dtype: str) -> bool:
    """Whether it is known which numbers the bytes of this dtype mean."""
    return dtype in DTYPE_BYTES or dtype in PACKED_DTYPES


def stored_bytes(dtype: str, num_elements: int) -> int | None:
    """Return how many bytes so many elements take in a file; None if they do not fill whole bytes."""
    group, num_bytes = PACKED_DTYPES.get(dtype, (1, DTYPE_BYTES[dtype]))
    found, rest = divmod(num_elements * num_bytes, group)
    return None if rest else found


@dataclass(frozen=True, slots=True)
class Place:
    """The index of a tensor on each axis of `PLACE_AXES`. None means every index, or that the file does not say."""

    pp: int | None = None
    tp: int | None = None
    dp: int | None = None

    @property
    def is_known(self) -> bool:
        return self != NOWHERE

    def as_dict(self) -> dict[str, int | None] | None:
        """Return `{"pp": .., "tp": .., "dp": ..}`, with None for a whole axis; None if no axis is known."""
        return {axis: self[axis] for axis in PLACE_AXES} if self.is_known else None

    def __getitem__(self, axis: str) -> int | None:
        index: int | None = getattr(self, axis)
        return index

    def __str__(self) -> str:
        return name_box({axis: (index,) for axis in PLACE_AXES if (index := self[axis]) is not None})


PLACE_AXES = tuple(field.name for field in fields(Place))
"""The axes that weight files mention: pp, tp, dp. No format names a file's rank on any other axis."""
NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of bytes in a file; if they are compressed there, in the temporary file `inflated`."""

    path: Path
    offset: int
    num_bytes: int
    inflated: MappedFile | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor stored in one file or in several.

    `segments` contain its elements in row-major order, one after the other. `strides` (in elements) is set if the
    elements have another layout; there is then one segment, which begins at the first element. `chunks` are the boxes
    of a tensor that is split along several dims, or along a dim that is not the first; they cover it exactly, have no
    chunks themselves, and there are then no segments. If only a `digest`, or the text that torch `printed`, is known,
    one empty segment records the file's path. The shape of a printed tensor is unknown.
    """

    name: str
    role: TensorRole
    place: Place
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    strides: tuple[int, ...] | None = None
    chunks: tuple[Chunk, ...] = ()
    digest: str | None = None
    printed: str | None = None

    @property
    def has_bytes(self) -> bool:
        """Whether a file contains the elements themselves, not only a digest or a printed text."""
        return self.digest is None and self.printed is None

    @property
    def has_shape(self) -> bool:
        """Whether its shape is known. Printed text shows the edges of a tensor, not its size."""
        return self.printed is None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.dtype, self.num_elements) or 0

    @property
    def path(self) -> Path:
        return self.segments[0].path if self.segments else self.chunks[0].tensor.path


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a larger tensor: `offsets` are those of its first element there."""

    offsets: tuple[int, ...]
    tensor: StoredTensor


def cut_segments(segments: Sequence[Segment], first: int, last: int) -> tuple[Segment, ...]:
    """Return the part of the segments between two byte positions."""
    found, begin = [], 0
    for segment in segments:
        low, high = max(first, begin), min(last, begin + segment.num_bytes)
        if low < high:
            found.append(Segment(segment.path, segment.offset + low - begin, high - low, segment.inflated))
        begin += segment.num_bytes
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value that is no tensor: a learning rate, a step, the state of a generator.

    `content` has one form for each value (a digest if it is long), so values are equal if their contents are. `text`
    shows it to a person. `is_about_run`: it says which run or program wrote the file, not what state it was in.
    """

    name: str
    place: Place
    path: Path
    content: bytes
    text: str
    is_about_run: bool = False


@dataclass(frozen=True, slots=True)
class NotRead:
    """An entry of a file that cannot be compared: its name, what the file says it is, and why it is not read."""

    name: str
    type: str
    path: Path
    why: str


TensorPair = tuple[StoredTensor | None, StoredTensor | None]
"""One tensor from each side; None if that side has no tensor of this name."""
ValuePair = tuple[StoredValue | None, StoredValue | None]
"""One value from each side; None if that side has no value of this name."""
