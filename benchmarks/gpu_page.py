"""Writes what a session on a card has shown as tables.

    python benchmarks/gpu_page.py OUT [--page docs/explanation/one-card.md]

OUT is the folder that `benchmarks/gpu_session.sh` filled. Without `--page` the tables are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_session import PHASES

BEGIN, END = "<!-- card -->", "<!-- /card -->"
LONGEST_CELL = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=Path, help="file whose tables, between markers, are replaced")
    options = parser.parse_args()
    files = [options.out / f"{phase.name}.json" for phase in PHASES]
    documents = [json.loads(file.read_text()) for file in files if file.exists()]
    text = "\n".join(page_of(documents))
    if options.page is None:
        print(text)
        return
    before, rest = options.page.read_text().split(BEGIN)
    options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def page_of(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of all phases."""
    for document in documents:
        card = document["card"]
        yield f"### {document['phase'].replace('_', ' ').capitalize()}: {document['state']}"
        yield ""
        yield (
            f"{card['name']}, driver {card['driver']}, torch {card['torch']}, {card['date']}, "
            f"{document.get('seconds', 0):.0f} s. {_checked(document)}"
        )
        yield ""
        for keys, rows in groupby(document["rows"], key=tuple):
            yield from _table(keys, list(rows))


def _checked(document: dict[str, Any]) -> str:
    checks = document["checks"]
    failed = [f"{each['name']} ({_cell(each['detail'])})" for each in checks if not each["passed"]]
    held = f"{len(checks) - len(failed)} of {len(checks)} checks held."
    why = f" {document['why']}." if document["why"] and not failed else ""
    return held + why + (f" Failed: {'; '.join(failed)}." if failed else "")


def _table(keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    used = [key for key in keys if any(row[key] not in (None, "") for row in rows)]
    yield f"| {' | '.join(key.replace('_', ' ') for key in used)} |"
    yield "|---" * len(used) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(row[key]) for key in used)} |"
    yield ""


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    text = " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


if __name__ == "__main__":
    main()
