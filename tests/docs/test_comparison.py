"""Each row of the comparison of launchers names a command or key that `bsl` has; where it says no, there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements" / "launchers-compared.md"
KEYS_PAGE = ROOT / "docs" / "reference" / "config.md"
SPAN = re.compile(r"`([^`]+)`")
LACKING = {
    "sweeps and arrays": r"sweep|array",
    "heterogeneous jobs": r"\bhet",
    "packs and ships the code": r"packag|ship|upload|sync|workdir",
    "from a laptop over ssh": r"ssh|remote|tunnel",
    "these were run there by the project": r"confirmed_on",
}
"""What `bsl` does not have, and what a command or a key for it would be called."""


def rows(text: str) -> dict[str, str]:
    """The cell about `bsl` of each row."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): cells[1].strip() for cells in lines if cells[0].strip()}


def commands(command: click.Command = bsl, path: str = "bsl") -> Iterator[str]:
    """Yield every command, and every command with each of its options."""
    yield path
    yield from (f"{path} {option}" for parameter in command.params for option in parameter.opts)
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


def keys() -> set[str]:
    """The keys of run files and site files, and their sections."""
    text = KEYS_PAGE.read_text(encoding="utf-8")
    return {*re.findall(r"^\| `([^`]+)`", text, re.MULTILINE), *re.findall(r"^### `([^`]+)`", text, re.MULTILINE)}


NAMES = {*commands(), *keys()}


def objection(row: str, cell: str) -> str:
    """Return what is wrong with the cell about `bsl` in a row; empty if nothing is."""
    if re.match(r"\W*no\b", cell):
        if row not in LACKING:
            return "add to LACKING what a command or a key for it would be called"
        found = sorted(name for name in NAMES if re.search(LACKING[row], name))
        return f"there is {found[0]}" if found else ""
    named = SPAN.findall(cell)
    wrong = [name for name in named if ("." in name or name.startswith("bsl ")) and name not in NAMES]
    if wrong:
        return f"no such command or key: {wrong[0]}"
    return "" if NAMES & set(named) else "name the command or key"


@pytest.mark.parametrize(("row", "cell"), rows(PAGE.read_text(encoding="utf-8")).items(), ids=str)
def test_each_row_names_what_there_is(row: str, cell: str) -> None:
    assert not objection(row, cell)


def test_every_lack_is_a_row() -> None:
    assert set(LACKING) <= set(rows(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ("spare nodes within the job", "no; a site can ask to leave nodes free"),
        ("notices a hang", "yes"),
        ("notices a hang", "yes, `bsl watch-all`"),
        ("after a crash", "yes, `slurm.chains`"),
        ("after a crash", "yes, `squeue`"),
    ],
)
def test_a_wrong_cell_is_noticed(row: str, cell: str) -> None:
    assert objection(row, cell)


def test_a_lack_that_has_become_a_feature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LACKING, "notifications", "notify")
    assert objection("notifications", "**no**") == "there is bsl notify"
