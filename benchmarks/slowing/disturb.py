"""Makes some ranks slow in some steps, as the schedule in `BSL_SLOW_SCHEDULE` says, and writes down by how much.

Most disturbances are sleeps: a sleep stands for work, and takes no core from ranks that share the machine. A quota is
one of the rank's own cgroup, and a slow link a limit on the network device that leads to one other rank. What was added
to each step is measured, apart from those two, and written next to the schedule as `notes-RANK.jsonl`; so is how long
the rank was busy.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US, LEAST_QUOTA_US = 20_000, 1_000
LONGEST_S = 0.01
"""How long a packet may last on a slow link, and so the least burst."""


class Disturber:
    """The disturbances of this rank. It learns from undisturbed steps how long a step is, how often each place of the
    program is passed in a step, and what a step takes of the core and of each link."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        schedule = Path(os.environ["BSL_SLOW_SCHEDULE"])
        self._schedule = json.loads(schedule.read_text())
        self._notes = schedule.with_name(f"notes-{rank}.jsonl")
        self._step, self._began = -1, 0.0
        self._lengths: list[float] = []
        self._cores: list[float] = []
        self._sent: list[dict[str, float]] = []
        self._so_far: tuple[float, dict[str, float]] = (0.0, {})
        self._passed: dict[str, int] = {}
        self._usual: dict[str, int] = {}
        self._pause = self._added = 0.0
        self._busy = busy_s()
        self._limit: Limit | None = None
        gc.callbacks.append(self._collected)

    @property
    def step(self) -> int:
        """The step as the ring counts it."""
        ring = sys.modules["ring_hook"].opened()
        return -1 if ring is None else int(ring.step)

    def _due(self) -> dict[str, Any] | None:
        found = (each for each in self._schedule if each["first"] <= self._step <= each["last"])
        return next((each for each in found if self._rank in each["ranks"]), None)

    def _is_quiet(self) -> bool:
        return not any(each["first"] <= self._step <= each["last"] for each in self._schedule)

    def _follow(self) -> None:
        step, now = self.step, time.monotonic()
        if step == self._step:
            return
        cores, sent = time.process_time(), bytes_sent()
        if self._is_quiet() and self._step > 3:
            self._lengths = [*self._lengths[-15:], now - self._began]
            self._cores = [*self._cores[-15:], cores - self._so_far[0]]
            more = {name: count - self._so_far[1].get(name, count) for name, count in sent.items()}
            self._sent = [*self._sent[-15:], more]
            self._usual = dict(self._passed)
        busy = busy_s()
        with self._notes.open("a") as notes:
            held = {"step": self._step, "added": self._added, "busy": busy - self._busy}
            notes.write(json.dumps(held) + "\n")
        self._busy = busy
        self._step, self._began, self._passed, self._added, self._so_far = step, now, {}, 0.0, (cores, sent)
        self._limit_now(self._due())

    def _limit_now(self, due: dict[str, Any] | None) -> None:
        """Begin or end a quota or a slow link."""
        kind = due["kind"] if due is not None and due["kind"] in ("quota", "link") else None
        if kind is None and self._limit is not None:
            self._limit.end()
            self._limit = None
        if due is not None and kind is not None and self._limit is None:
            self._limit = self._quota(due) if kind == "quota" else self._link(due)

    def _quota(self, due: dict[str, Any]) -> Limit:
        cores = median(self._cores) / (median(self._lengths) * (1 + due["share"]))
        return Quota(self._rank, max(LEAST_QUOTA_US, round(PERIOD_US * cores)))

    def _link(self, due: dict[str, Any]) -> Limit:
        peer = next(each for each in due["ranks"] if each != self._rank)
        count = median(each.get(f"to{peer}", 0.0) for each in self._sent)
        return Link(f"to{peer}", max(1.0, count) / self._seconds(due))

    def at(self, kind: str, every: int = 1, lasts: float = 0.0) -> None:
        """Sleep, if this place is disturbed now. It is passed in every `every`-th step, and usually `lasts` seconds."""
        self._follow()
        self._passed[kind] = self._passed.get(kind, 0) + 1
        due = self._due()
        if due is None:
            return
        if due["kind"] == kind:
            self._sleep(self._seconds(due) * every / max(1, self._usual.get(kind, 1)))
        elif due["kind"] == "device":
            self._sleep(due["share"] * lasts)

    def moved(self, lasts: float) -> float:
        """Return how much longer a layer lasts now, which is less than nothing on the stage whose work is moved to the
        other one."""
        self._follow()
        self._passed["stage"] = self._passed.get("stage", 0) + 1
        due = next((each for each in self._schedule if each["first"] <= self._step <= each["last"]), None)
        if due is None or due["kind"] != "stage":
            return 0.0
        seconds = min(lasts, self._seconds(due) / max(1, self._usual.get("stage", 1)))
        here = self._rank in due["ranks"]
        self._added += seconds if here else 0.0
        return seconds if here else -seconds

    def _sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self._added += time.monotonic() - began

    def _seconds(self, due: dict[str, Any]) -> float:
        return float(due["share"] * median(self._lengths)) if self._lengths else 0.0

    def collect(self, every: int) -> None:
        """Collect garbage in every `every`-th step, with a pause inside, if that is what is disturbed now."""
        self._follow()
        due = self._due()
        if due is not None and due["kind"] == "garbage" and self._step % every == 0:
            began, self._pause = time.monotonic(), self._seconds(due) * every
            gc.collect()
            self._added += time.monotonic() - began

    def _collected(self, stage: str, info: dict[str, int]) -> None:
        if stage == "start" and self._pause and info["generation"] == 2:
            pause, self._pause = self._pause, 0.0
            time.sleep(pause)


class Limit:
    """What is put on, and taken off."""

    def end(self) -> None:
        raise NotImplementedError


class Quota(Limit):
    """A CPU quota of this process alone, in a cgroup of its own below the one that it is in."""

    def __init__(self, rank: int, quota_us: int) -> None:
        self._before = CGROUPS / own_cgroup()
        self._folder = self._before / f"bsl-slow-runs-{os.getpid()}"
        self._folder.mkdir(exist_ok=True)
        (self._folder / "cpu.shares").write_text("131072")
        (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def end(self) -> None:
        (self._before / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()


class Link(Limit):
    """A limit of so many bytes a second on what this rank sends through a device."""

    def __init__(self, device: str, rate: float) -> None:
        self._device = device
        burst = max(3_000, int(rate * LONGEST_S))
        words = f"tc qdisc replace dev {device} root tbf rate {rate * 8:.0f}bit burst {burst} limit 4000000"
        subprocess.run(words.split(), check=True)

    def end(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", self._device, "root"], check=True)


def own_cgroup() -> str:
    """Return the path of this process below the folder of the CPU controller."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(path.lstrip("/") for _, controllers, path in lines if "cpu" in controllers.split(","))


def busy_s() -> float:
    """Return for how long this thread has been on a core, or ready without one, as the kernel counts."""
    return sum(map(int, Path("/proc/thread-self/schedstat").read_text().split()[:2])) / 1e9


def bytes_sent() -> dict[str, float]:
    """Return how many bytes each device of this rank's network has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {name.strip(): float(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines)}


def before(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Have `first` called before each call of `owner.name`."""
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        first()
        return original(*arguments, **named)

    setattr(owner, name, call)
