"""Turns a folder of text into an indexed dataset, with a byte-level BPE tokenizer trained on the same text.

Nothing is downloaded, and the same folder gives the same bytes: files are read in the order of their relative paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from bigsci_launch.data.indexed import IndexedWriter, token_dtype, tokenizer_path, write_beside
from bigsci_launch.errors import DataError
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.safe_files import open_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 byte values and the end-of-document token."""

_FILES_PER_BATCH = 64


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """The dataset that `prepare_dataset` wrote."""

    prefix: Path
    num_documents: int
    num_tokens: int
    num_bytes: int
    vocab_size: int


def find_texts(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return every file under `folder` whose name matches the glob `pattern`, ordered by relative path.

    Raises:
        DataError: the folder does not exist, or no file in it matches.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    if not files:
        raise DataError(f"{folder}: no file matches {pattern!r}", hint="choose the files with --glob")
    return tuple(files)


def require_tokenizers() -> None:
    """Fail early if the tokenizer library is missing.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import tokenizers  # noqa: F401


def prepare_dataset(
    folder: Path, prefix: Path, vocab_size: int, pattern: str = "*", report_progress: Progress = no_progress
) -> PreparedDataset:
    """Train a tokenizer on the texts of `folder` and write `prefix.bin`, `.idx` and `.tokenizer.json`.

    Each file becomes one document, closed by the end-of-document token (id 0). Bytes that are not UTF-8 are replaced.

    Raises:
        DataError: there is nothing to read, a file is unreadable, or the text is too short for `vocab_size` tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"a vocabulary of {vocab_size} is too small; the smallest has {SMALLEST_VOCABULARY} tokens")
    files = find_texts(folder, pattern)
    tokenizer, num_bytes = _train_tokenizer(files, vocab_size, report_progress)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"{folder}: {num_bytes} bytes of text yield a vocabulary of {tokenizer.get_vocab_size()}, not {vocab_size}",
            hint="add text, or choose a smaller --vocab-size",
        )
    try:
        with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
            for done, tokens in enumerate(_encode(files, tokenizer), start=1):
                writer.add_document(tokens)
                report_progress(len(files) + done, "encode")
            write_beside(tokenizer_path(prefix), tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error.strerror or error}") from error
    return PreparedDataset(prefix, writer.num_documents, writer.num_tokens, num_bytes, vocab_size)


def _train_tokenizer(files: tuple[Path, ...], vocab_size: int, report_progress: Progress) -> tuple[Tokenizer, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    num_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal num_bytes
        for done, path in enumerate(files, start=1):
            text = read_text(path)
            num_bytes += len(text.encode())
            yield text
            report_progress(done, "read")

    tokenizer.train_from_iterator(texts(), trainer)
    # Text that contains the token's name must not end a document.
    tokenizer.encode_special_tokens = True
    return tokenizer, num_bytes


def _encode(files: tuple[Path, ...], tokenizer: Tokenizer) -> Iterator[list[int]]:
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    remaining = iter(files)
    while batch := list(islice(remaining, _FILES_PER_BATCH)):
        for encoding in tokenizer.encode_batch_fast([read_text(path) for path in batch]):
            yield [*encoding.ids, end]


def read_text(path: Path) -> str:
    """Return the text of a file; bytes that are not UTF-8 are replaced.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_stream(path, follow=True) as stream:
            return stream.read().decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", hint="make it readable, or exclude it with --glob"
        ) from error
