"""The word list of CONTRIBUTING.md holds in messages, docstrings, comments and pages."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = ("bigsci_launch", "diagnostics", "slurm", "docs", "benchmarks")
PAGES = ("README.md", "CHANGELOG.md", "docs", "diagnostics", "slurm", "configs")
# Where the same letters are the right words.
RIGHT = {"no more": r"no more than", "of which": r"(one|some|each|all|neither|none|\d,?|,) of which"}


def phrases() -> list[str]:
    """The left column of the table "not | but", remarks in brackets left out."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| not | but |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in text.splitlines()[2:]]
    return [phrase.strip() for cell in cells for phrase in re.sub(r"\(.*?\)", "", cell).split(",")]


def written_words(path: Path) -> Iterator[tuple[int, str]]:
    """What people read in a file, with its line: everything in a page, texts and comments in code."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


def files() -> list[Path]:
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py") if "assets" not in path.parts]
    pages = [ROOT / page for page in PAGES if page.endswith(".md")]
    texts = [path for folder in PAGES for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".yaml", ".j2")]
    return [*code, *pages, *texts]


@cache
def all_words() -> list[tuple[str, str]]:
    """Everything that people read, with its file and line."""
    return [(f"{path.relative_to(ROOT)}:{line}", text) for path in files() for line, text in written_words(path)]


def test_the_list_is_read() -> None:
    assert {"no more", "goes on", "of which"} <= set(phrases())


@pytest.mark.slow
@pytest.mark.parametrize("phrase", phrases())
def test_nobody_writes(phrase: str) -> None:
    pattern, right = re.compile(rf"\b{phrase}\b", re.IGNORECASE), re.compile(RIGHT.get(phrase, "(?!)"))
    wrong = [place for place, text in all_words() if pattern.search(text) and pattern.search(right.sub("", text))]
    assert not wrong, f"{phrase!r}: {', '.join(wrong)}"


@pytest.mark.slow
def test_sentences_have_a_subject() -> None:
    """A passive, or a noun, in the place of nobody and somebody."""
    agentless, folders = (
        re.compile(r"\b(no|some|any)body\b", re.IGNORECASE),
        ("bigsci_launch/", "diagnostics/", "slurm/", "configs/"),
    )
    found = [place for place, text in all_words() if place.startswith(folders) and agentless.search(text)]
    assert len(found) <= 3, found
