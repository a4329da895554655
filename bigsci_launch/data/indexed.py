"""Megatron's indexed dataset: `PREFIX.bin` holds the tokens back to back, `PREFIX.idx` the bounds of the sequences.

The index is little-endian: magic, version u64, dtype code u8, number of sequences u64, length of the document list
u64, lengths i32[sequences], byte offsets i64[sequences], documents i64 (the first sequence of each, and the end).
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bigsci_launch.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_LARGEST_UINT16_VOCABULARY = 65500  # Megatron's limit: its readers choose the dtype by it

Tokens = NDArray[np.integer[Any]]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def tokenizer_path(prefix: Path) -> Path:
    """Return the file with the tokenizer that `bsl data prepare` trained for dataset `prefix`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the integer type that Megatron chooses for a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


@dataclass(frozen=True, slots=True)
class IndexedDataset:
    """An open dataset whose arrays are memory-mapped.

    `tokens` is the whole stream, `lengths[i]` the number of tokens in sequence i, `offsets[i]` its first byte in the
    stream, and `documents[d]:documents[d + 1]` the sequences of document d.
    """

    prefix: Path
    tokens: Tokens
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def sequence(self, index: int) -> Tokens:
        start = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.lengths[index])]


def open_dataset(prefix: Path) -> IndexedDataset:
    """Open the dataset `prefix` and check that both files exist, the index is complete and the token count matches it.

    Raises:
        DataError: a file is missing, unreadable, of another format, or truncated.
    """
    index = _map_bytes(idx_path(prefix))
    dtype, num_sequences, num_marks = _parse_header(index, idx_path(prefix))
    parts = _split_index(index, num_sequences, num_marks, idx_path(prefix))
    tokens = _map_bytes(bin_path(prefix))
    expected = int(parts[1][-1]) + int(parts[0][-1]) * dtype.itemsize if num_sequences else 0
    if len(tokens) != expected:
        raise DataError(
            f"{bin_path(prefix)}: has {len(tokens)} bytes, but its index describes {expected}",
            hint="the file is truncated or belongs to another index; make the dataset again",
        )
    return IndexedDataset(prefix, tokens.view(dtype), *parts)


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file",
            hint="make a dataset with `bsl data prepare DIR --output PREFIX`, and set data.prefix to PREFIX",
        ) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _parse_header(index: NDArray[np.uint8], path: Path) -> tuple[np.dtype[Any], int, int]:
    head = index[: _HEADER.size].tobytes()
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: not an index of Megatron's indexed dataset (bad magic {head[:9]!r})")
    if len(head) < _HEADER.size:
        raise DataError(f"{path}: the file ends within its header")
    _, version, code, num_sequences, num_marks = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: is version {version} of the indexed dataset; only version {VERSION} can be read")
    if code not in _DTYPES:
        raise DataError(f"{path}: tokens have dtype code {code}; only integers ({sorted(_DTYPES)}) can be read")
    return np.dtype(_DTYPES[code]).newbyteorder("<"), num_sequences, num_marks


def _split_index(
    index: NDArray[np.uint8], num_sequences: int, num_marks: int, path: Path
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    bounds = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_marks]).tolist()
    if len(index) != bounds[-1] or num_marks < 1:
        raise DataError(
            f"{path}: has {len(index)} bytes, but {num_sequences} sequences and {num_marks} document marks "
            f"need {bounds[-1]}",
            hint="the file is truncated; make the dataset again",
        )
    return (
        index[bounds[0] : bounds[1]].view("<i4"),
        index[bounds[1] : bounds[2]].view("<i8"),
        index[bounds[2] : bounds[3]].view("<i8"),
    )


class IndexedWriter:
    """Writes a dataset document by document; a context manager that replaces the files at `prefix` only if it succeeds.

    It writes temporary files and renames them, the index last, so a reader never sees a partial dataset.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype.newbyteorder("<")
        self._code = _CODES[np.dtype(dtype)]
        self._lengths: list[int] = []
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._stream = _open_beside(bin_path(prefix))

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def add_document(self, tokens: Sequence[int] | Tokens) -> None:
        """Append one document, as one sequence."""
        self._stream.write(np.asarray(tokens, dtype=self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is not None:
            self._stream.close()
            Path(self._stream.name).unlink(missing_ok=True)
            return
        index = _open_beside(idx_path(self._prefix))
        index.write(self._index())
        # The old index must go first, or a reader could pair it with the new tokens.
        idx_path(self._prefix).unlink(missing_ok=True)
        _put_in_place(self._stream, bin_path(self._prefix))
        _put_in_place(index, idx_path(self._prefix))

    def _index(self) -> bytes:
        num_documents = len(self._lengths)
        lengths = np.array(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        offsets = np.concatenate([np.zeros(1, "<i8"), ends])[:num_documents].astype("<i8")
        documents = np.arange(num_documents + 1, dtype="<i8")
        head = _HEADER.pack(MAGIC, VERSION, self._code, num_documents, num_documents + 1)
        return head + lengths.tobytes() + offsets.tobytes() + documents.tobytes()


def write_beside(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically."""
    stream = _open_beside(path)
    stream.write(content)
    _put_in_place(stream, path)


def _open_beside(path: Path) -> BinaryIO:
    return tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False)  # type: ignore[return-value]


def _put_in_place(stream: BinaryIO, path: Path) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    os.fchmod(stream.fileno(), 0o644)
    stream.close()
    Path(stream.name).replace(path)
