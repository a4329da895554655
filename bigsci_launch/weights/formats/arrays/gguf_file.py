"""GGUF, the files of llama.cpp: values, then tensors. ggml/docs/gguf.md in its repository defines the format.

Quantized blocks are compared byte by byte, under the name that ggml gives their type.
"""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.mapped import MappedFile
from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import (
    NotRead,
    Place,
    Segment,
    StoredTensor,
    StoredValue,
    UnreadableFile,
    stored_bytes,
)
from bigsci_launch.weights.objects.texts import show

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Values by their type; 8 is text, and 9 an array.
VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# Elements and bytes of a block of each quantized type: GGML_QUANT_SIZES of gguf 0.19.
BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
MAX_ENTRIES = 200_000
# Tokens of a vocabulary, and merges: each is a text of an array.
MAX_TEXTS = 2_000_000
MAX_DIMS = 4


def read_gguf(path: Path, place: Place) -> Contents:
    """Return the tensors and values of a file, without reading any tensor bytes.

    Raises:
        UnreadableFile: the file is missing or truncated, or is not a GGUF file of version 2 or 3.
    """
    with MappedFile(path) as file:
        try:
            return _GgufHeader(file, place).contents()
        except struct.error as error:
            raise UnreadableFile(path, f"truncated inside its header, after {len(file):,} bytes") from error


class _GgufHeader:
    """The header of one file, read from its first byte to its last."""

    def __init__(self, file: MappedFile, place: Place) -> None:
        self._file = file
        self._place = place
        self._at = len(MAGIC)
        self._texts_left = MAX_TEXTS
        self._alignment = 32

    def contents(self) -> Contents:
        (version,) = self._numbers("<I")
        if self._file.memory[: len(MAGIC)] != MAGIC or version not in VERSIONS:
            raise UnreadableFile(self._file.path, "not a GGUF file of version 2 or 3")
        num_tensors, num_values = self._numbers("<2Q")
        if max(num_tensors, num_values) > MAX_ENTRIES:
            raise UnreadableFile(self._file.path, f"has more than {MAX_ENTRIES:,} entries")
        values = [self._value() for _ in range(num_values)]
        described = [self._described() for _ in range(num_tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        found = [self._tensor(name, shape, kind, begin + offset) for name, shape, kind, offset in described]
        return Contents(
            tuple(entry for entry in found if isinstance(entry, StoredTensor)),
            values=tuple(values),
            not_read=tuple(entry for entry in found if isinstance(entry, NotRead)),
        )

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._file.memory, self._at)
        self._at += struct.calcsize(form)
        return found

    def _skip(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._file):
            raise struct.error
        return self._file.memory[self._at - length : self._at]

    def _text(self) -> str:
        (length,) = self._numbers("<Q")
        return self._skip(length).decode("utf-8", "surrogateescape")

    def _value(self) -> StoredValue:
        name = self._text()
        (kind,) = self._numbers("<I")
        start = self._at
        text = self._skip_value(kind, name)
        digest = hashlib.sha256(self._file.memory[start : self._at]).digest()
        return StoredValue(name, self._place, self._file.path, struct.pack("<I", kind) + digest, text)

    def _skip_value(self, kind: int, name: str) -> str:
        """Read a value, and return how a person reads it."""
        if kind == TEXT:
            return show(self._text())
        if kind != ARRAY:
            return show(self._number(kind, name))
        inner, count = self._numbers("<IQ")
        if inner in VALUES:
            self._skip(count * struct.calcsize(f"<{VALUES[inner]}"))
        elif inner == TEXT:
            self._texts_left -= count
            if self._texts_left < 0:
                raise UnreadableFile(self._file.path, f"has more than {MAX_TEXTS:,} texts")
            for _ in range(count):
                self._skip(*self._numbers("<Q"))
        else:
            raise UnreadableFile(self._file.path, f"{name[:60]!r} is an array of the unknown type {inner}")
        return f"{count:,} values"

    def _number(self, kind: int, name: str) -> Any:
        if kind not in VALUES:
            raise UnreadableFile(self._file.path, f"{name[:60]!r} is of the unknown type {kind}")
        (number,) = self._numbers(f"<{VALUES[kind]}")
        if name == "general.alignment" and type(number) is int and number > 0:
            self._alignment = number
        return number

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (num_dims,) = self._numbers("<I")
        if num_dims > MAX_DIMS:
            raise UnreadableFile(self._file.path, f"{name[:60]!r} has {num_dims} dimensions")
        shape = self._numbers(f"<{num_dims}Q")
        # The fastest dimension comes first in the file.
        return name, tuple(reversed(shape)), *self._numbers("<IQ")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor | NotRead:
        dtype, elements, num_bytes = BLOCKS.get(kind, (PLAIN.get(kind, ""), 1, 1))
        if not dtype or (shape and shape[-1] % elements):
            return NotRead(name, f"type {kind}", self._file.path, f"its shape {list(shape)} or its type is unknown")
        if kind in BLOCKS:
            shape = (*shape[:-1], shape[-1] // elements * num_bytes) if shape else shape
        length = stored_bytes(dtype, math.prod(shape)) or 0
        if offset + length > len(self._file):
            return NotRead(name, f"{dtype} {list(shape)}", self._file.path, "the file ends before it does")
        return StoredTensor(name, "weight", self._place, dtype, shape, (Segment(self._file.path, offset, length),))
