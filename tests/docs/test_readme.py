"""The README's first screen has the required parts, and its statements about this repository are true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bigsci_launch

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_the_first_screen(blocks_of: Callable[[Path], list[Any]]) -> None:
    session, install = blocks_of(README)[:2]
    before = TEXT.partition("```")[0].strip()
    title, _, sentence = before.partition("\n\n")
    assert title == "# bigsci-launch" and sentence.endswith(".") and sentence.count(". ") == 0
    # tests/slurm/test_readme.py holds the answer to a real job.
    assert session.lines[0].startswith("$ bsl spy --jobid") and len(session.lines) <= 14
    assert session.lines[1].startswith("rank 5 ")
    assert [line.split()[:2] for line in install.lines] == [["pip", "install"]]
    assert re.findall(r"^\| `bsl (\S+) ", TEXT, re.MULTILINE) == ["submit", "spy", "diff-weights"]
    assert all(f"(docs/{page}.md)" in TEXT for page in ("README", "tutorial", "how-to/my-job-hangs", "how-to/install"))
    assert len(TEXT.splitlines()) <= 60


def test_make_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text() for page in pages]
    named = {name for text in texts for name in re.findall(r"(?:`|^|\$ )make ([a-z-]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_extras_and_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    named = {name for found in re.findall(r"pip install '[^\[]*\[([\w,]+)\]'", TEXT) for name in found.split(",")}
    assert named and named <= extras
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert python and f"Python {python[1]} or newer" in TEXT
    assert f"{bigsci_launch.__version__}, not released" in TEXT or f"{bigsci_launch.__version__}." in TEXT
    assert f"## [{bigsci_launch.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
