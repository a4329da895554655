"""`bsl data`: datasets that `bsl train` reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from bigsci_launch.cli import console


@click.group()
def data() -> None:
    """Make datasets for training.

    \b
    Example:
      bsl data prepare corpus/ --output data/corpus --vocab-size 32000
    """


@data.command(
    short_help="Make an indexed dataset from a folder of text.",
    epilog="Example: bsl data prepare src/ --output data/src --vocab-size 1024 --glob '*.py'",
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "prefix",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PREFIX",
    help="Write PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json; a run file names it in data.prefix.",
)
@click.option("--vocab-size", required=True, type=click.IntRange(min=257), help="Size of the vocabulary in tokens.")
@click.option("--glob", "pattern", default="*", show_default=True, help="Which files under FOLDER to read.")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as one JSON document.")
def prepare(folder: Path, prefix: Path, vocab_size: int, pattern: str, as_json: bool) -> None:
    """Make an indexed dataset (Megatron's .bin/.idx) from the texts of FOLDER.

    A byte-level BPE tokenizer is trained on the texts themselves; nothing is downloaded. Every file becomes one
    document, which ends with an end-of-document token. The same folder gives the same bytes.
    """
    from bigsci_launch.errors import INSTALL_TRAIN, DataError

    try:
        from bigsci_launch.data.prepare import find_texts, prepare_dataset, require_tokenizers

        require_tokenizers()
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed", hint=INSTALL_TRAIN) from error
    total = 2 * len(find_texts(folder, pattern))
    with console.progress("prepare", total) as report_progress:
        made = prepare_dataset(folder, prefix, vocab_size, pattern, report_progress)
    if as_json:
        console.answer_json({"schema_version": 1, **asdict(made)})
        return
    console.answer(
        f"{made.prefix}: {made.num_documents} documents, {made.num_tokens} tokens "
        f"({made.num_bytes / made.num_tokens:.2f} bytes each), vocabulary {made.vocab_size}"
    )
