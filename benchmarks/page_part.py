"""Puts a table into its place on a page."""

from __future__ import annotations

import sys
from pathlib import Path


def show(page: Path, name: str, text: str) -> None:
    """Print a table; with `--write`, also replace what is between the marks with that name on the page."""
    print(text)
    if "--write" in sys.argv:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        whole = page.read_text(encoding="utf-8")
        before, after = whole.split(begin)[0], whole.split(end)[1]
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
