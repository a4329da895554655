"""What watchers ask of the controller: a file for each wish, read by a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigsci_launch.errors import RunDirError
from bigsci_launch.recover.orders import WatcherWish
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json

POLL_S = 0.5


class WishReader:
    """Reads the folder of wishes twice a second. `tell` gets each wish once, in the reader's thread."""

    def __init__(self, attempt: AttemptDir, tell: Callable[[WatcherWish], None]) -> None:
        self._attempt = attempt
        self._tell = tell
        self._seen: set[str] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="bsl-wishes", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(POLL_S):
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        paths = [path for path in self._attempt.wishes.glob("*.json") if not path.name.startswith(".")]
        for path in sorted(paths):
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            try:
                self._tell(wish_of(path.name, read_json(path)))
            except (RunDirError, LookupError, TypeError, ValueError) as error:
                self._refuse(path, f"not a wish: {error}")

    def _refuse(self, path: Path, why: str) -> None:
        write_json(self._attempt.wishes_done / path.name, {"granted": False, "refused": why})
        path.unlink()


def wish_of(name: str, document: dict[str, Any]) -> WatcherWish:
    """Return the wish in a document.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    kind, failure = document["kind"], document.get("failure", "hung")
    if kind not in ("fence", "restart") or failure not in ("hung", "stopped"):
        raise ValueError(f"{kind!r} is not fence or restart, or {failure!r} is not hung or stopped")
    rank = _whole(document, "rank") if kind == "fence" else None
    why, who = (str(document.get(key) or "unknown") for key in ("why", "who"))
    return WatcherWish(name, kind, _whole(document, "generation"), why, who, rank, failure)


def _whole(document: dict[str, Any], key: str) -> int:
    """Return a number of a wish. JSON's true is none, although Python's is 1."""
    value = document[key]
    if type(value) is not int:
        raise TypeError(f"{key} {value!r:.40} is not a whole number")
    return value
