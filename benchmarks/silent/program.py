"""The ranks of the benchmark: `python -m silent.program RUN/ATTEMPT...` trains the attempts in turn, each with its
defect.

An attempt's `defect.json` names the defect and the ranks on which it acts. Everything is patched from outside the
package and is taken back before the next attempt. An attempt that fails on one rank alone would let the next one hang,
so it ends the process: whoever started it runs the rest again.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from bigsci_launch.train import several
from silent.defects import inject

SPEC, CRASH = "defect.json", "crash-{}.txt"


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from bigsci_launch.train import startup

    startup.start_torch()
    startup.start_deepspeed()
    home = Path.cwd()
    for name in map(Path, sys.argv[1:]):
        os.environ["BSL_RUN_DIR"], os.environ["BSL_ATTEMPT"] = str(name.parent.parent), name.name
        train_one(name, int(os.environ["RANK"]))
        os.chdir(home)
    import torch.distributed as dist

    dist.destroy_process_group()


def train_one(attempt: Path, rank: int) -> None:
    """Train one attempt with its defect; end the process if it fails in a way that the trainer does not record."""
    spec = json.loads((attempt / SPEC).read_text()) if (attempt / SPEC).exists() else {}
    with ExitStack() as undo:
        try:
            inject(spec, rank, undo)
            several._train_one()
        except BaseException:
            (attempt / CRASH.format(rank)).write_text(traceback.format_exc())
            os._exit(1)


if __name__ == "__main__":
    main()
