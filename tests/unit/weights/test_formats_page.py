"""The page about formats has every format that is read, and what `benchmarks/weights_formats.py` measures."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from bigsci_launch.weights.files.sources import FileFormat
from bigsci_launch.weights.formats.table import BY_NAME, format_of
from bigsci_launch.weights.locate.locate import open_weights

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "measurements" / "weights-formats.md"
# torch needs two seconds to export a program; its archive is one of many plain files.
SLOW = "torch.export"


@pytest.fixture(scope="module")
def writers() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("weights_writers")


def test_the_page_has_the_rows_that_are_measured(writers: ModuleType) -> None:
    rows = re.findall(r"^\| ([^|]+) \| (?:yes|no)", PAGE.read_text(), re.MULTILINE)
    assert rows == [row.name for row in writers.ROWS]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_every_reader_of_files_has_a_row(writers: ModuleType, tmp_path: Path) -> None:
    """A reader, or a format of the table, that no row writes a file for is missing on the page."""
    used, read = set(), set()
    for number, row in enumerate(writers.ROWS):
        if row.name != SLOW:
            path = row.write(tmp_path / str(number), False)
            sources = open_weights(path).sources
            used |= {source.format for source in sources}
            read |= {format_of(source).name for source in sources}
    assert used == set(get_args(FileFormat))
    assert read == set(BY_NAME)
