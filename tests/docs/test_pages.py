"""On every page, links lead somewhere, and `bsl` lines name existing commands and options."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "configs", "slurm", "diagnostics", "benchmarks", "tests")
PAGES = [*sorted(ROOT.glob("*.md")), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md")))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PROMPT = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:srun )?(?=bsl )")


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+?)\s*$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))}
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path != index}
    assert pages <= linked


def command_lines(page: Path, blocks: list[Any]) -> Iterator[str]:
    """Yield what a reader may type: lines of blocks, indented lines and code spans that begin with `bsl`."""
    text = prose(page)
    lines = [line for block in blocks for line in re.sub(r"\\\n(> )?", " ", "\n".join(block.lines)).splitlines()]
    lines += [line for line in text.splitlines() if line.startswith("    ")]
    lines += SPAN.findall(text)
    yield from (line[found.end() :] for line in lines if (found := PROMPT.match(line)))


def words_of(line: str) -> list[str]:
    """Return the words of a command, without the brackets of a usage line, up to a pipe, redirection or comment."""
    lexer = shlex.shlex(re.sub(r"[\[\]]|\.\.\.", " ", line), posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: not set(word) <= set("|;&<>"), lexer))


def unknown_words(line: str) -> list[str]:
    """Return the commands and options of a line that `bsl` does not have."""
    command: click.Command = bsl
    words = words_of(line)[1:]
    options: set[str] = {"-h", "--help"}
    unknown = []
    for word in words:
        if word == "--":  # what follows is another program
            break
        if isinstance(command, click.Group) and not word.startswith("-") and word in command.commands:
            command = command.commands[word]
            continue
        if command is bsl and not word.startswith("-"):
            return [word]
        if isinstance(command, click.Group):  # `bsl plan CONFIG` is `bsl plan search CONFIG`
            command = command.commands.get("search", command)
        options |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        if word.startswith("-") and word.partition("=")[0] not in options:
            unknown.append(word)
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_bsl_lines_name_what_there_is(page: Path, blocks_of: Callable[[Path], list[Any]]) -> None:
    blocks = [block for block in blocks_of(page) if block.info != "python"]
    wrong = {line: words for line in command_lines(page, blocks) if (words := unknown_words(line))}
    assert not wrong


def test_a_wrong_line_is_noticed() -> None:
    assert unknown_words("bsl spie runs/demo") == ["spie"]
    assert unknown_words("bsl submit demo.yaml --sett a=b") == ["--sett"]
    assert unknown_words("bsl plan check demo.yaml --top 5") == ["--top"]
    assert unknown_words("bsl trace run --in my_model -- python train.py --epochs 3") == ["--in"]
    assert not unknown_words("bsl plan demo.yaml --top 5 | head")
    assert not unknown_words("bsl submit CONFIG [--set key=value]...")


INDEFINITE = re.compile(r"(?<![-\w])(?:no|some|any)body(?![-\w])", re.IGNORECASE)
FIRST_SCREEN = 40
"""Lines of a page that are read first."""


def indefinite(page: Path) -> list[str]:
    """Return what leaves open who acts: in the first screen, and in the prose of pages that are no measurement."""
    lines = page.read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN]
    if page.parent.name != "measurements":
        lines += SPAN.sub("", prose(page)).splitlines()
    return [line for line in lines if INDEFINITE.search(line)]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_say_who(page: Path) -> None:
    assert not indefinite(page)


def test_an_indefinite_line_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nNobody is accused. `nobody` is a user.\n", encoding="utf-8")
    assert indefinite(page)
    page.write_text("# A page\n\nNo rank is accused, see `store-reached-by-nobody`.\n", encoding="utf-8")
    assert not indefinite(page)
