"""The ranks of the benchmark: `python -m silent.program RUN/ATTEMPT...` trains the attempts in turn, each with its
defect.

An attempt's `defect.json` names the defect and the ranks on which it acts. Everything is patched from outside the
package and is taken back before the next attempt. An attempt that fails on one rank alone would let the next one hang,
so it ends the process: whoever started it runs the rest again.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import several

from silent.defects import inject

SPEC, CRASH = "defect.json", "crash-{}.txt"


def main() -> None:
    home, train_one = Path.cwd(), several.train_one

    def train_with_defect() -> None:
        attempt = Path(os.environ["BSL_RUN_DIR"]) / "attempts" / os.environ["BSL_ATTEMPT"]
        run_one(attempt, int(os.environ["RANK"]), train_one)
        os.chdir(home)

    several.train_one = train_with_defect
    several.main()


def run_one(attempt: Path, rank: int, train_one: Callable[[], None]) -> None:
    """Train one attempt with its defect; end the process if it fails in a way that the trainer does not record."""
    spec = json.loads((attempt / SPEC).read_text()) if (attempt / SPEC).exists() else {}
    with ExitStack() as undo:
        try:
            inject(spec, rank, undo)
            train_one()
        except BaseException:
            (attempt / CRASH.format(rank)).write_text(traceback.format_exc())
            os._exit(1)


if __name__ == "__main__":
    main()
