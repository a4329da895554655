"""Writes what a session on a card has shown as tables.

    python benchmarks/gpu_page.py OUT [--page docs/measurements/one-card.md]

OUT is the folder that `benchmarks/gpu_session.sh` filled. Without `--page` the tables are printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_session import PHASES

BEGIN, END = "<!-- card -->", "<!-- /card -->"
LONGEST_CELL = 160
TABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "speed": (
        ("ceiling", "bf16_tflops", "fp8_tflops"),
        ("ceiling", "tb_per_s"),
        (
            "case",
            "micro_batch",
            "micro_batches",
            "seconds",
            "tokens_per_s",
            "tflops",
            "mfu",
            "allocated_gib",
            "start_s",
        ),
    ),
    "peer": (
        ("case", "micro_batch", "micro_batches", "seconds", "tokens_per_s", "tflops", "mfu", "allocated_gib"),
        ("case", "words"),
    ),
    "tests": (("test", "state", "seconds"),),
    "memory": (("setting", "state_gib", "need_gib", "allocated_gib", "error", "shown_gib", "reserved_gib"),),
    "hangs": (
        ("case", "state", "claim", "confidence", "seconds"),
        ("case", "has_ended", "seconds", "signal", "reason", "words"),
    ),
    "micro_batches": (
        ("case", "tried", "fits", "after_step", "micro_batch_s", "used_gib"),
        ("case", "predicted", "found", "trials", "search_s", "free_at_peak"),
        ("case", "size", "is_auto", "tokens_per_s"),
    ),
    "survive": (
        ("snapshot", "bytes", "out_ms", "out_gb_s", "back_gb_s", "out_to_pageable_gb_s", "digest_gb_s"),
        ("snapshot", "mb_per_rank", "pairs", "step_ms", "more_ms"),
        ("injury", "exit_code", "generations", "replicas", "restored_from", "largest_difference"),
    ),
    "cost": (
        ("case", "step_ms", "check_ms", "interval", "every_step_ms", "share"),
        ("case", "records_per_step", "record_us", "share"),
        ("case", "waits_per_step", "in_lines_of_bsl"),
        ("case", "waits_in", "per_step"),
    ),
    "kernels": (
        ("case", "kernels", "busy_ms", "profiled_ms"),
        ("case", "kind", "launches", "ms", "share"),
        ("case", "kernel", "launches", "ms"),
    ),
}
"""The tables of each phase by their columns. A row is in each table whose columns it has."""


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
        for columns in TABLES[document["phase"]]:
            yield from _table(columns, [row for row in document["rows"] if row.keys() >= set(columns)])


def _checked(document: dict[str, Any]) -> str:
    checks = document["checks"]
    failed = [f"{each['name']} ({_cell(each['detail'])})" for each in checks if not each["passed"]]
    held = f"{len(checks) - len(failed)} of {len(checks)} checks held."
    cut = " Its time was over before its end." if document["state"] == "cut short" else ""
    return held + cut + (f" Failed: {'; '.join(failed)}." if failed else "")


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of these columns, without those that are empty in all rows; nothing if there are no rows."""
    used = [key for key in columns if any(row[key] not in (None, "") for row in rows)]
    if not used:
        return
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
