"""Finds whether two datasets are the same without reading all of them.

A dataset is known by its number of tokens, its index, its tokenizer and a digest of windows spread over its tokens.
The windows lie at places that depend on the number of tokens alone, so a dataset that has only grown is recognised by
digesting its beginning again. A change between two windows is not seen; the guards of `bsl train` compare what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from xxhash import xxh3_128

from bigsci_launch.data.indexed import IndexedDataset, Tokens, idx_path, tokenizer_path
from bigsci_launch.errors import DataError
from bigsci_launch.safe_files import open_stream

_NUM_WINDOWS = 64
_WINDOW = 32_768
"""Tokens in a window. 64 windows are 4 MiB of 16-bit tokens: some milliseconds on a parallel file system."""
_CHUNK = 1 << 24

Likeness = Literal["same", "grown", "other", "unknown"]


@dataclass(frozen=True, slots=True)
class DataFingerprint:
    """What distinguishes a dataset from another one; digests are XXH3 with 128 bits, in hexadecimal."""

    prefix: str
    num_tokens: int
    index_digest: str
    tokens_digest: str
    tokenizer_digest: str | None
    """None if no tokenizer is stored with the dataset."""

    @property
    def contents(self) -> tuple[int, str, str, str | None]:
        """Everything but the place, which may differ from node to node."""
        return self.num_tokens, self.index_digest, self.tokens_digest, self.tokenizer_digest

    @property
    def document(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(dataset: IndexedDataset) -> DataFingerprint:
    """Return the fingerprint of an open dataset.

    Raises:
        DataError: the index or the tokenizer cannot be read.
    """
    index, tokenizer = file_digest_if_any(idx_path(dataset.prefix)), file_digest_if_any(tokenizer_path(dataset.prefix))
    return DataFingerprint(
        str(dataset.prefix), dataset.num_tokens, index or "", content_digest(dataset.tokens), tokenizer
    )


def content_digest(tokens: Tokens) -> str:
    """Return a digest of the length of `tokens` and of windows spread evenly from the first token to the last."""
    digest = xxh3_128(str(len(tokens)).encode())
    if len(tokens) <= _NUM_WINDOWS * _WINDOW:
        digest.update(tokens.tobytes())
        return digest.hexdigest()
    last = len(tokens) - _WINDOW
    for number in range(_NUM_WINDOWS):
        start = last * number // (_NUM_WINDOWS - 1)
        digest.update(tokens[start : start + _WINDOW].tobytes())
    return digest.hexdigest()


def compare_with_saved(saved: Mapping[str, Any] | None, dataset: IndexedDataset) -> Likeness:
    """Return how `dataset` relates to the one that a checkpoint was trained on.

    `saved` is the document of that one's fingerprint; without it the answer is "unknown". "grown" means that the old
    tokens are still there, and others follow them.
    """
    try:
        num_tokens, digest = int(saved["num_tokens"]), str(saved["tokens_digest"])  # type: ignore[index]
        tokenizer = saved["tokenizer_digest"]  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        return "unknown"
    if tokenizer != file_digest_if_any(tokenizer_path(dataset.prefix)) or num_tokens > dataset.num_tokens:
        return "other"
    if content_digest(dataset.tokens[:num_tokens]) != digest:
        return "other"
    return "same" if num_tokens == dataset.num_tokens else "grown"


def file_digest_if_any(path: Path) -> str | None:
    """Return the digest of a file's bytes, or None if there is no such file.

    Raises:
        DataError: it cannot be read.
    """
    digest = xxh3_128()
    try:
        with open_stream(path, follow=True) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest()
