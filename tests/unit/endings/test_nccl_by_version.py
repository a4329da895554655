"""Lines of torch's watchdog from torch 2.0 on: each version has other words around the same few."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from bigsci_launch.endings.words import read_words
from bigsci_launch.lost_peer import says_lost_peer
from bigsci_launch.runs.ending.output import collective_of

TABLE = Path(__file__).parent / "nccl_by_version.txt"


class Row(NamedTuple):
    version: str
    source: str
    kind: str
    line: str


ROWS = [Row(*line.split(" | ", 3)) for line in TABLE.read_text().splitlines() if not line.startswith("#")]
SAYING = [row for row in ROWS if row.kind != "-"]
TIMED_OUT = [row for row in ROWS if "Watchdog caught" in row.line]


@pytest.mark.parametrize("row", SAYING, ids=lambda row: f"{row.version}, {row.source}: {row.kind}")
def test_the_words_of_each_version_are_those_of_a_victim(row: Row) -> None:
    found = read_words().find(row.line)
    assert found is not None and found.word.kind == row.kind
    assert says_lost_peer(row.line)


@pytest.mark.parametrize("row", TIMED_OUT, ids=lambda row: f"{row.version}, {row.source}")
def test_the_collective_that_timed_out_is_read(row: Row) -> None:
    found = collective_of(row.line)
    sequence, operation = re.findall(r"SeqNum=(\d+), OpType=(\w+)", row.line)[0]
    assert (found["sequence"], found["operation"]) == (int(sequence), operation)
    assert found["timeout_ms"] is not None
    assert (found["group"] is not None) == ("[PG " in row.line)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.kind == "-"], ids=lambda row: f"{row.version}, {row.source}"
)
def test_lines_that_only_add_to_another_one_blame_nothing(row: Row) -> None:
    found = read_words().find(row.line)
    assert found is None or found.word.speaker in ("register", "echo")
