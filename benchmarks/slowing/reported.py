"""The foreign program, which prints a line for each step: `reported.py STYLE LAST_STEP SCHEDULE ONSET`.

The rank that is disturbed makes the file ONSET before the first such step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

with contextlib.suppress(OSError):  # each rank is a session of its own, and the kernel weighs those
    Path("/proc/self/autogroup").write_text(os.environ.get("RANKS_NICE", "0"))
os.environ["BSL_SLOW_SCHEDULE"] = sys.argv[3]
sys.path.insert(0, str(Path(__file__).parent))

import foreign

LINE = " iteration {}/ 1000000 | elapsed time per iteration (ms): {:.1f} | lm loss: 2.0E+00 |"
(DUE,) = json.loads(Path(sys.argv[3]).read_text())
before = [time.monotonic()]


@contextmanager
def reported(_model: Any) -> Iterator[None]:
    step = sys.modules["ring_hook"].opened().step
    if step == DUE["first"] and int(os.environ["RANK"]) in DUE["ranks"]:
        Path(sys.argv[4]).touch()
    yield
    now = time.monotonic()
    print(LINE.format(step + 1, 1e3 * (now - before[0])), flush=True)
    before[0] = now


if __name__ == "__main__":
    foreign.main(reported)
