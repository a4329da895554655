"""The JSON file of one phase, written again after every result: a phase that is cut short keeps what it had."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigsci_launch.safe_files import write_file
from on_gpu.card import Card, find_card

SCHEMA_VERSION = 1


class Record:
    """What a phase has found so far: rows of figures, and checks that passed or failed.

    A phase writes `state: running` until `close`; whoever started it replaces that by what became of it.
    """

    def __init__(self, path: Path, card: Card) -> None:
        self._path = path
        self._document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "phase": path.stem,
            "state": "running",
            "why": "",
            "card": card.document,
            "checks": [],
            "rows": [],
        }
        self._write()

    def row(self, **figures: Any) -> None:
        """Add one line of the phase's table."""
        self._document["rows"].append(figures)
        self._write()
        _talk(figures)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Add one claim, and whether it held; `detail` is what was seen."""
        self._document["checks"].append({"name": name, "passed": bool(passed), "detail": detail})
        self._write()
        _talk({"check": name, "passed": bool(passed), "detail": detail})

    def close(self) -> None:
        """Say that the phase came to its end. It passed if it checked something and nothing failed."""
        failed = [each["name"] for each in self._document["checks"] if not each["passed"]]
        passed = bool(self._document["checks"]) and not failed
        why = "" if passed else f"failed: {', '.join(failed)}" if failed else "nothing was checked"
        self._document |= {"state": "passed" if passed else "failed", "why": why}
        self._write()

    def _write(self) -> None:
        write_file(self._path, json.dumps(self._document, indent=1) + "\n")


def _talk(document: dict[str, Any]) -> None:
    print(json.dumps(document), file=sys.stderr, flush=True)


def run_phase(run: Callable[[Record, Card], None]) -> None:
    """Run a phase as a program: `python -m on_gpu.PHASE FILE.json`."""
    card = find_card()
    record = Record(Path(sys.argv[1]), card)
    run(record, card)
    record.close()
