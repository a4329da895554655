"""Where torch writes what it recorded itself, for rank_runner.py. Standard library, Python 3.8 or newer.

Only NCCL has a watchdog that writes such a dump: when a collective has timed out, before it ends the process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# As in node_identity.py: what the name of a dump begins with; torch appends the rank. The second is that of torch
# before 2.9.
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def variables(attempt: Path) -> dict[str, str]:
    """Return what has the dumps written into the attempt; nothing where the user has chosen a place, under any name.

    How many collectives are recorded is not set here: the older name of that setting makes a newer torch print a
    warning in each rank. `ring_hook.py` sets it where torch is old.
    """
    if any(name in os.environ for name in DUMP_VARIABLES):
        return {}
    prefix = attempt / "recorder" / "nccl_trace_rank_"
    with contextlib.suppress(OSError):
        prefix.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    wanted = {**dict.fromkeys(DUMP_VARIABLES, str(prefix)), DUMP_ON_TIMEOUT: "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def files(attempt: Path, rank: int) -> list[str]:
    """Return where torch may write the dump of a rank."""
    given = {**os.environ, **variables(attempt)}
    return [f"{prefix}{rank}" for prefix in dict.fromkeys(given.get(name) for name in DUMP_VARIABLES) if prefix]
