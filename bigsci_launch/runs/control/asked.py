"""`asked.json`: what people ask of the ranks of `bsl train`: to save, to stop. The watcher writes it, rank 0 reads it.

The original kill switch was a file that every rank looked for by itself, between two steps. If it appeared between the
looks of two ranks, some went into the save and the others into the next step: a deadlock made by the stop button. And
a file that nobody removed stopped every later job too. So here:

- Rank 0 alone looks, in a thread, so that a hanging file system stops no step. It tells all ranks in the words that
  they exchange at the end of each step anyway, so that all of them save or none does.
- A wish has a key, and is granted once. The file belongs to one attempt, and names it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from bigsci_launch.errors import RunDirError
from bigsci_launch.runs.layout import AttemptDir, read_json, write_json
from bigsci_launch.runs.watching.typed import typed


@dataclass(frozen=True, slots=True)
class Wish:
    """`key` is that of the request. `after_step` is the optimizer step after which it is due; None: the next one."""

    key: str
    after_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is due once `step` optimizer steps are done. One that comes late is due at once."""
        return self.after_step is None or step >= self.after_step


@dataclass(frozen=True, slots=True)
class StopWish(Wish):
    """`act` is `exit` or `restart`, `who` and `why` are for ended.json: rank 0 writes it if the step was named."""

    act: str = "exit"
    who: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the ranks of an attempt now."""

    save: Wish | None = None
    stop: StopWish | None = None


NOTHING_ASKED = Asked()


def write_asked(attempt: AttemptDir, asked: Asked) -> None:
    """Replace what is asked of the ranks. Raises OSError if it cannot be written."""
    write_json(attempt.asked, {"schema_version": 1, "attempt": attempt.name, **asdict(asked), "written": time.time()})


def read_asked(attempt: AttemptDir) -> Asked:
    """Return what is asked of the ranks. A file that is missing, damaged or of another attempt asks nothing."""
    with suppress(RunDirError, ValueError):
        document = read_json(attempt.asked)
        if isinstance(document, dict) and document.get("attempt") == attempt.name:
            save, stop = document.get("save"), document.get("stop")
            return Asked(typed(Wish, save) if save else None, typed(StopWish, stop) if stop else None)
    return NOTHING_ASKED
