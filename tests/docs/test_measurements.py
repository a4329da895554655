"""The summary of the measurements names every report, with numbers that the report has and a command that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "docs" / "measurements"
SUMMARY = REPORTS / "README.md"
LINK = re.compile(r"\]\(([^)#]+)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?")


def rows() -> list[list[str]]:
    """The cells of each row: report, claim, figure, next to, repeat."""
    lines = [line for line in SUMMARY.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def report_of(row: list[str]) -> Path:
    found = LINK.search(row[0])
    assert found
    return (REPORTS / found[1]).resolve()


def numbers(text: str) -> list[str]:
    return NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))


def strange_numbers(cells: list[str], text: str) -> list[str]:
    """Return the numbers of some cells that a report does not have."""
    known = set(numbers(text))
    return [number for cell in cells for number in numbers(cell) if number not in known]


def test_every_report_has_a_row() -> None:
    assert {path for path in REPORTS.glob("*.md") if path != SUMMARY} <= {report_of(row) for row in rows()}


@pytest.mark.parametrize("row", rows(), ids=lambda row: report_of(row).stem)
def test_figures_are_those_of_the_report(row: list[str]) -> None:
    assert not strange_numbers(row[2:4], report_of(row).read_text(encoding="utf-8"))


def test_another_figure_is_noticed() -> None:
    assert not strange_numbers(["in 1.2 s, with 3840 lines"], "1.2 s and 3,840 lines")
    assert strange_numbers(["476 of 478", "6.4e-07"], "right: 475 of 478, 6.4e-07") == ["476"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: report_of(row).stem)
def test_the_command_exists(row: list[str]) -> None:
    programs = re.findall(r"benchmarks/\w+\.\w+", row[4])
    assert all((ROOT / program).is_file() for program in programs)
    assert programs or "by hand" in row[4]
