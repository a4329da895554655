"""A rank for `cost.py`: trains an attempt like `bsl train`, whose steps are measured in turns (`cost_turns.py`).

    python -m on_gpu.cost_rank RUN/ATTEMPT    (a rank's environment, with the ring, BSL_COST_STEPS and BSL_COST_GO)

It imports everything, and waits for the file BSL_COST_GO before it trains. Rank 0 writes `cost.json` at the beginning
of the last step; then the ranks are ended. Waits for the device that torch makes by itself are counted by its
`set_sync_debug_mode`, which does not see those of the threads of gloo and NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import several
from guards_every_step import time_guards, timed

from bigsci_launch.safe_files import write_file
from on_gpu.cost_turns import RESULT, Turns, turns_of

NEVER = 10**9
WARNING = "called a synchronizing CUDA operation"
OWN = ("bigsci_launch", "deepspeed")


class Look:
    """What rank 0 has seen so far. `chosen` are the intervals that the guards chose after each check."""

    def __init__(self, turns: Turns, path: Path) -> None:
        self._turns, self._path = turns, path
        self.step = 0
        self._spent: dict[int, float] = defaultdict(float)
        self._chosen: list[int] = []
        self._digested = {"device": 0, "host": 0}
        self._records: list[int] = []
        self._syncs: Counter[str] = Counter()

    def begin(self, step: int) -> None:
        """Change over to what `step` is for."""
        turns, self.step = self._turns, step
        if step in turns.ring:
            use_ring(is_on=step % 2 == 1)
        elif step == turns.ring.stop:
            use_ring(is_on=True)
        if step in (turns.every.start, turns.every.stop):
            self._records.append(records_so_far())
        if step == turns.syncs.start:
            count_syncs(self._syncs)
        if step == turns.last:
            self._write()

    def interval(self, step: int) -> int:
        return 2 if step in self._turns.checked else NEVER

    def note(self, seconds: float) -> None:
        """Note what the guards took in the present step."""
        self._spent[self.step] += seconds

    def note_interval(self, interval: int) -> None:
        if self.step in self._turns.checked:
            self._chosen.append(interval)

    def note_digest(self, where: str, num_bytes: int) -> None:
        if self.step in self._turns.checked:
            self._digested[where] += num_bytes

    def settle(self) -> None:
        """Wait for the device where work of the guards alone is timed."""
        import torch

        if self.step in self._turns.every and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _write(self) -> None:
        turns = self._turns
        found = {
            "every_ms": [1e3 * self._spent[step] for step in turns.every],
            "intervals": self._chosen,
            "digested": {where: count / (len(turns.checked) / 2) for where, count in self._digested.items()},
            "records": (self._records[1] - self._records[0]) / len(turns.every),
            "syncs": {place: count / len(turns.syncs) for place, count in self._syncs.most_common()},
        }
        if os.environ["RANK"] == "0":
            write_file(self._path, json.dumps(found))


def look_at_guards(look: Look) -> None:
    """Have the guards check as the step's turn says, and time what they do."""
    from bigsci_launch.train.guards.engine.watch import EngineGuards

    before_step, choose = timed(EngineGuards.before_step, look.note, look.settle), EngineGuards._choose_interval

    own: list[int] = []

    def begin(guards: EngineGuards, step: int) -> None:
        look.begin(step)
        if not own:
            own.append(guards.interval)
        guards.interval = look.interval(step)
        before_step(guards, step)

    def choose_interval(guards: EngineGuards, cost: float, seconds: float) -> None:
        # What the turn says is no choice of the guards, which they may leave as it is.
        guards.interval = own[-1]
        choose(guards, cost, seconds)
        own.append(guards.interval)
        look.note_interval(guards.interval)

    time_guards(look.note, look.settle)
    EngineGuards.before_step, EngineGuards._choose_interval = begin, choose_interval  # type: ignore[method-assign]


def look_at_digests(look: Look) -> None:
    """Count the bytes whose digests are computed on the device, and those that are copied to the host for it."""
    from bigsci_launch.train.device import digest

    on_device, bytes_of = digest.digests_on_device, digest.bytes_of

    def counted_on_device(tensors: Any) -> list[int]:
        look.note_digest("device", sum(each.nbytes for each in tensors))
        return on_device(tensors)

    def counted_on_host(tensor: Any) -> memoryview:
        look.note_digest("host", tensor.nbytes)
        return bytes_of(tensor)

    digest.digests_on_device, digest.bytes_of = counted_on_device, counted_on_host


def use_ring(*, is_on: bool) -> None:
    """Let the calls of torch.distributed go through the ring, or past it."""
    for owner, name, wrapper in RINGED:
        setattr(owner, name, wrapper if is_on else wrapper._bsl_original)


def ringed() -> list[tuple[Any, str, Any]]:
    """Return what the ring has wrapped: owner, name, and the wrapper."""
    import torch.distributed as dist

    owners = (dist, dist.distributed_c10d, dist.distributed_c10d.Work)
    return [
        (owner, name, each)
        for owner in owners
        for name, each in list(vars(owner).items())
        if callable(each) and hasattr(each, "_bsl_original")
    ]


RINGED: list[tuple[Any, str, Any]] = []


def records_so_far() -> int:
    """Return the records of this process in all its threads."""
    ring = sys.modules["ring_hook"].opened()
    read: Callable[[bytes], dict[str, Any]] = sys.modules["ring_file"].read_ring
    return sum(lane["count"] for lane in read(Path(ring.path).read_bytes())["lanes"]) if ring else 0


def count_syncs(found: Counter[str]) -> None:
    """From now on, count the waits for the device by the line of `bsl` or DeepSpeed that made them."""
    import torch

    if not torch.cuda.is_initialized():
        return

    def show(message: Any, *_: Any) -> None:
        if WARNING in str(message):
            found[place()] += 1

    synchronize = torch.cuda.synchronize

    def counted(*args: Any, **named: Any) -> None:
        found[place()] += 1
        synchronize(*args, **named)

    warnings.filterwarnings("always", message=WARNING)
    warnings.showwarning, torch.cuda.synchronize = show, counted
    torch.cuda.set_sync_debug_mode("warn")


def place() -> str:
    """Return the innermost line that is called now and belongs to `bsl` or DeepSpeed."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        parts = Path(frame.f_code.co_filename).parts
        for own in OWN:
            if own in parts:
                return f"{'/'.join(parts[parts.index(own) :])}:{line}"
    return "elsewhere"


def main() -> None:
    """Train the attempt on the command line."""
    train_one = several.train_one
    look = Look(turns_of(int(os.environ["BSL_COST_STEPS"])), Path(sys.argv[1]) / RESULT)

    def watched() -> None:
        RINGED.extend(ringed())
        look_at_guards(look)
        look_at_digests(look)
        while not Path(os.environ["BSL_COST_GO"]).exists():
            time.sleep(0.02)
        train_one()

    several.train_one = watched
    several.main()


if __name__ == "__main__":
    main()
