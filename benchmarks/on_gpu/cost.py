"""What the guards and the ring cost on the card, and how often the host waits for it.

A GPT trains on one rank over NCCL, and on two that share the card over gloo. The steps of a run take turns
(`cost_turns.py`): every second one is checked, then what the guards do in unchecked steps is timed, then every second
one is without the ring, and in the last ones the waits for the device are counted by the line that makes them. What a
record of the ring takes is measured apart, on the host.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ring_cost
from defect_matrix import write
from guards_cost import AIM, Size, differences, sections, step_seconds
from ranks import Process, start_ranks

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.topology import Topology
from on_gpu.card import Card
from on_gpu.cost_turns import RESULT, Turns, turns_of
from on_gpu.record import Record, run_phase
from on_gpu.trained import draw_tokens

LIMIT_S = 86.0
FIRST_LIMIT_S = 56.0
"""After this long the first case is given up, so that there is time for the second one."""
NAMED = 12
"""Lines that wait for the device, which get a row of their own."""
ALONE, TWO = Topology(tp=1, pp=1, dp=1), Topology(tp=2, pp=1, dp=1)


@dataclass(frozen=True, slots=True)
class CostCase:
    """What is trained, and how many steps each block of turns has."""

    name: str
    size: Size
    turns: Turns


def cases(card: Card) -> tuple[CostCase, ...]:
    """Return the cases: 350M parameters in bf16 on the card."""
    if card.is_tiny:
        sizes = [Size(each, 64, 2, 512, 8, "bf16", device=card.device) for each in (ALONE, TWO)]
        steps = (8, 8)
    else:
        model = (1024, 24, 50257)
        alone = Size(ALONE, *model, 64, "bf16", heads=16, length=1024, micro_batch=16, device=card.device)
        two = Size(TWO, *model, 1, "bf16", heads=16, length=1024, micro_batch=1, device=card.device)
        sizes, steps = [alone, two], (10, 8)
    names = ("one rank", "two ranks that share the device, tp 2")
    return tuple(CostCase(*each) for each in zip(names, sizes, map(turns_of, steps), strict=True))


class CostRun:
    """The ranks of one case. They import everything at once, and train after `go`."""

    def __init__(self, case: CostCase, folder: Path) -> None:
        self.case, self._folder = case, folder
        folder.mkdir()
        size = case.size
        draw_tokens(folder / "tokens", size.vocabulary, 4 * size.length * size.samples + 1)
        document = sections(size, folder / "tokens", case.turns.last, "cost")
        document["training"]["share_devices"] = size.topology.world_size > 1
        self.attempt: AttemptDir = write(folder / "run", document)
        self._ranks = self._start()

    def _start(self) -> list[Process]:
        rings = self._folder / "rings"
        rings.mkdir()
        more = {
            "PYTHONPATH": ring_cost.path_of_python(ring_cost.RING_SITE, Path(ring_cost.__file__).parent),
            "BSL_RING_DIR": str(rings),
            "BSL_COST_STEPS": str(len(self.case.turns.ring)),
            "BSL_COST_GO": str(self._folder / "go"),
        }
        module = ["on_gpu.cost_rank", str(self.attempt.path)]
        return start_ranks(self.case.size.topology.world_size, module, self._log, more)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def go(self, until: float) -> dict[str, Any] | None:
        """Train, and return what rank 0 has found; None if it has ended, or is not done in time."""
        (self._folder / "go").touch()
        result = self.attempt.path / RESULT
        while not result.exists():
            if time.monotonic() > until or any(rank.poll() is not None for rank in self._ranks):
                return None
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait(20)

    def last_words(self) -> str:
        """Return the last line that each rank has printed."""
        logs = [
            self._log(number).read_text(errors="replace").strip().splitlines() for number in range(len(self._ranks))
        ]
        return " / ".join(lines[-1][:200] if lines else "nothing was printed" for lines in logs)


def run(record: Record, card: Card) -> None:
    """Measure a record of the ring while the ranks import, then one case after the other."""
    began, longer = time.monotonic(), 3.0 if card.is_tiny else 1.0
    with tempfile.TemporaryDirectory() as text, ThreadPoolExecutor(1) as pool:
        record_us = pool.submit(measure_record_us)
        started: list[CostRun] = []
        try:
            for number, case in enumerate(cases(card)):
                started.append(CostRun(case, Path(text) / str(number)))
            for each, limit_s in zip(started, (FIRST_LIMIT_S, LIMIT_S), strict=True):
                found = each.go(began + longer * limit_s)
                record.check(f"{each.case.name}: came to its end", found is not None, each.last_words())
                each.end()
                if found is not None:
                    note(record, card, each, found, record_us)
        finally:
            for each in started:
                each.end()


def measure_record_us() -> float:
    """Return the microseconds that a recorded all_reduce takes more than a bare one on this host."""
    cpu = str(max(os.sched_getaffinity(0)))
    parts = ring_cost.parts([ring_cost.run_turn(ring_cost.RING, 16, ring_cost.BLOCK, cpu, ring_cost.WARM_STEPS + 2)])
    return parts["in step"] - parts["bare in step"]


def note(record: Record, card: Card, each: CostRun, found: dict[str, Any], record_us: Future[float]) -> None:
    """Record what a case has shown. What cannot be computed is a failed check, and the next part follows."""
    parts = (
        lambda: note_guards(record, card, each, found),
        lambda: note_ring(record, card, each, found, record_us.result(None if card.is_tiny else LIMIT_S)),
        lambda: note_syncs(record, card, each.case.name, found["syncs"]),
    )
    for part in parts:
        try:
            part()
        except (Exception, SystemExit) as error:
            record.check(f"{each.case.name}: could be evaluated", False, f"{type(error).__name__}: {error}"[:300])


def note_guards(record: Record, card: Card, each: CostRun, found: dict[str, Any]) -> None:
    """Record what the guards cost, and whether their share is what is promised."""
    seconds = block(each, each.case.turns.checked)
    said = next(one for one in read_events(each.attempt.event_file(0)) if one["kind"] == "guards")
    plain_ms = 1e3 * median(value for step, value in seconds.items() if step % 2)
    check_ms, every_ms = 1e3 * median(differences(seconds)), median(found["every_ms"])
    interval = found["intervals"][-1]
    share = (max(check_ms, 0.0) / interval + every_ms) / plain_ms
    record.row(
        case=each.case.name,
        model=each.case.size.words,
        step_ms=plain_ms,
        check_ms=check_ms,
        run_says_ms=1e3 * said["seconds"],
        first_interval=said["interval"],
        interval=interval,
        every_step_ms=every_ms,
        share=share,
        share_of_every_step=every_ms / plain_ms,
        digested_on_device_mib=found["digested"]["device"] / 2**20,
        digested_on_host_mib=found["digested"]["host"] / 2**20,
    )
    figures = f"{share:.3%} at an interval of {interval}: a check {check_ms:.2f} ms, every step {every_ms:.3f} ms"
    if card.is_tiny:
        exist = min(plain_ms, every_ms, interval, said["seconds"]) > 0
        record.check(f"{each.case.name}: the figures of the guards exist", exist, figures)
    else:
        record.check(f"{each.case.name}: the guards take at most {AIM:.1%}", share <= AIM, figures)
    if card.is_gpu and not card.is_tiny:
        on_device = found["digested"]["device"] > 100 * found["digested"]["host"]
        record.check(f"{each.case.name}: digests are computed on the device", on_device, str(found["digested"]))


def note_ring(record: Record, card: Card, each: CostRun, found: dict[str, Any], record_us: float) -> None:
    """Record what the ring costs by its records, and by steps with it and without it."""
    seconds = block(each, each.case.turns.ring)
    bare_ms = 1e3 * median(value for step, value in seconds.items() if step % 2 == 0)
    more_ms = [-1e3 * value for value in differences(seconds)]
    share = found["records"] * record_us / 1e3 / bare_ms
    record.row(
        case=each.case.name,
        records_per_step=found["records"],
        record_us=record_us,
        share=share,
        step_without_ms=bare_ms,
        more_with_ms=median(more_ms),
        more_with_ms_from_to=[min(more_ms), max(more_ms)],
    )
    words = f"{found['records']:.0f} records of {record_us:.2f} us in a step of {bare_ms:.1f} ms: {share:.3%}"
    if card.is_tiny:
        record.check(f"{each.case.name}: the figures of the ring exist", min(found["records"], record_us) > 0, words)
    else:
        record.check(f"{each.case.name}: the ring takes at most {AIM:.1%}", 0 < share <= AIM, words)


def note_syncs(record: Record, card: Card, case: str, syncs: dict[str, float]) -> None:
    """Record how often the host waits for the device in an unchecked step, and in which lines."""
    if not card.is_gpu:
        record.row(case=case, waits_per_step="not tried: there is no GPU")
        return
    own = sum(count for place, count in syncs.items() if place.startswith("bigsci_launch"))
    record.row(case=case, waits_per_step=sum(syncs.values()), in_lines_of_bsl=own, lines=len(syncs))
    for place, count in list(syncs.items())[:NAMED]:
        record.row(case=case, waits_in=place, per_step=count)
    record.check(f"{case}: waits for the device were seen", bool(syncs), "at least the loss is read in each step")


def block(each: CostRun, steps: Sequence[int]) -> dict[int, float]:
    """Return the seconds of the steps of a block, from the beginning of each to that of the next."""
    return {step: value for step, value in step_seconds(each.attempt).items() if step in steps}


if __name__ == "__main__":
    run_phase(run)
