"""A rank of `bsl train` whose saves in the background are slow.

With LATE_COPIES in its environment, nothing is copied before the optimizer waits for it; with WRITE_S, a part is
written after that many seconds; with FAIL_AT, the rank raises an exception of its own in the step of that number.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bigsci_launch.train import __main__, startup

LATEST_S = 5.0


def start_deepspeed() -> None:
    plain_start()
    from bigsci_launch.train import loop
    from bigsci_launch.train.state import background, host_copies

    save: Any = background.BackgroundSave
    part: Any = background.RankPart
    if "LATE_COPIES" in os.environ:
        is_waited_for = threading.Event()
        save.wait_for_copies = after(is_waited_for.set, save.wait_for_copies)
        host_copies._copy_all = after(
            lambda: is_waited_for.wait(LATEST_S), after(is_waited_for.clear, host_copies._copy_all)
        )
    part.write = after(lambda: time.sleep(float(os.environ.get("WRITE_S", "0"))), part.write)
    train_batch, fail_at = loop._train_batch, os.environ.get("FAIL_AT")

    def fail(training: Any, progress: Any) -> float:
        if str(progress.step + 1) == fail_at:
            raise RuntimeError("an exception of this rank's own")
        return train_batch(training, progress)

    loop._train_batch = fail


def after(first: Callable[[], Any], work: Any) -> Any:
    def late(*arguments: Any) -> Any:
        first()
        return work(*arguments)

    return late


plain_start = startup.start_deepspeed
startup.start_deepspeed = start_deepspeed

if __name__ == "__main__":
    __main__.main()
