"""`survive` on the card: what snapshots cost, whether ranks that are killed change a number, and what they leave.

Ranks share the card and talk over gloo. Each injured run is compared with an undisturbed one on the same device:
`recovering/judged.py` wants the losses and weights of that, bit for bit unless replicas were lost. All runs go side by
side. A rank that sleeps in each step keeps the injured ones alive until all standbys wait.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ranks import draw_corpus
from recovering.cases import Case, Injury, Layout
from recovering.injured_run import Done, run_injured, run_undisturbed, steps_of, write_run_file
from recovering.judged import Outcome, judge

from bigsci_launch.runs.layout import RunDir
from on_gpu.card import Card
from on_gpu.descendants import adopt_orphans, end_below
from on_gpu.holders import Holders
from on_gpu.record import Record, run_phase
from on_gpu.snapshots import ON_CARD, TINY, copy_alone, train_in_turns

LIMIT_S = 86.0
BACK_S = 4.0
"""How long the driver may take to give the memory of processes back that have ended."""
SLACK_BYTES = 64 << 20
LEFT_S = 3.0
NAP_S, TINY_NAP_S = 0.3, 0.05
"""What rank 0 sleeps in a step. An injury comes later in it, when the ranks compute."""

TWO_REPLICAS = Layout(1, 1, 2, "fp32", 0.0)
CASES = (
    Case(1, TWO_REPLICAS, (Injury("kill", "in a step", 1, NAP_S + 0.03, (1,)),)),
    Case(2, Layout(1, 2, 1, "bf16", 0.1), (Injury("kill", "in a save", 0, 0.0, (0,)),)),
    Case(3, TWO_REPLICAS, (Injury("runner", "in a step", 1, NAP_S + 0.03, (1,)),)),
)
"""No victim is the rank that records the steps, whose memory is compared. A rank takes 10 s to import what it needs on
such a machine, and 16 cores: nine runs at the same time did not get to their injuries in 66 s."""
TINY_CASES = (replace(CASES[0], injuries=(Injury("kill", "in the first step", 0, 0.8, (1,)),)),)
"""Some steps later than that. Without standbys: a busy machine with two cores takes its time to start them."""


@dataclass(frozen=True, slots=True)
class Injured:
    """What became of an injured run, and what was done to it."""

    outcome: Outcome
    done: tuple[Done, ...]
    peaks: tuple[float, float] | None
    """Peak bytes of a step on the rank that records them, before the injury and at the end; None on a CPU."""


class Runs:
    """All runs, side by side: a reference of each layout, and the injured ones."""

    def __init__(self, folder: Path, card: Card, pool: ThreadPoolExecutor) -> None:
        self._folder, self._card, self._pool = folder, card, pool
        self._corpus = folder / "corpus"
        draw_corpus(self._corpus)
        self._references: dict[Layout, Future[RunDir]] = {}

    def begin(self, case: Case) -> Future[Injured]:
        """Begin an injured run, and that of its layout that is not disturbed."""
        reference = self._references.get(case.layout)
        if reference is None:
            reference = self._references[case.layout] = self._pool.submit(self._undisturbed, case.layout)
        return self._pool.submit(self._injured, case, reference)

    def _undisturbed(self, layout: Layout) -> RunDir:
        name = f"sound-{layout.name}"
        run_undisturbed(write_run_file(self._folder, name, layout, self._corpus, None, self._more()), self._run(name))
        return self._run(name)

    def _injured(self, case: Case, reference: Future[RunDir]) -> Injured:
        name = f"case-{case.seed}"
        nap = {"kind": "slow", "rank": 0, "step": 1, "seconds": TINY_NAP_S if self._card.is_tiny else NAP_S}
        more = {**self._more(), "faults": [nap]}
        survive = {"standby": not self._card.is_tiny}
        path, run = write_run_file(self._folder, name, case.layout, self._corpus, survive, more), self._run(name)
        code, done = run_injured(path, run, case, self._folder / "injuries" / name)
        return Injured(judge(case, code, done, run, reference.result(LIMIT_S)), tuple(done), peaks(run, case, done))

    def _run(self, name: str) -> RunDir:
        return RunDir(self._folder / "runs" / name)

    def _more(self) -> dict[str, Any]:
        training = {"device": self._card.device, "share_devices": True, "deterministic": True}
        # Large enough that an engine that was not freed can be seen.
        model = {} if self._card.is_tiny else {"hidden_size": 512, "num_attention_heads": 8, "sequence_length": 128}
        return {"training": training, "model": model, "monitor": {"watch": "off"}}


def peaks(run: RunDir, case: Case, done: list[Done]) -> tuple[float, float] | None:
    """Return the median peak of three steps before the injury, and of the last three."""
    attempt = run.latest_attempt()
    steps = [each for each in steps_of(attempt, case.layout) if "memory_allocated" in each] if attempt and done else []
    before = [each["memory_allocated"] for each in steps if each["time"] < done[0].time][-3:]
    after = [each["memory_allocated"] for each in steps][-3:]
    return (median(before), median(after)) if before and after else None


def run(record: Record, card: Card) -> None:
    """Copy alone, then run everything else side by side."""
    began = time.monotonic()
    adopt_orphans()
    attempted(record, "a snapshot alone", lambda: note_copy(record, card))
    free = free_bytes(card)
    holders = Holders()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text:
        pool = ThreadPoolExecutor(3 if card.is_tiny else 5)
        try:
            work(record, card, Path(text), pool, holders, began + LIMIT_S)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            end_below(os.getpid())
            holders.close()
    note_rest(record, card, free)


def work(record: Record, card: Card, folder: Path, pool: ThreadPoolExecutor, holders: Holders, until: float) -> None:
    """Begin all runs, and record each as it was."""
    runs = Runs(folder, card, pool)
    begun = [(case, runs.begin(case)) for case in (TINY_CASES if card.is_tiny else CASES)]
    size = TINY if card.is_tiny else ON_CARD
    (folder / "snapshots").mkdir()
    in_turns = pool.submit(train_in_turns, size, card, folder / "snapshots", until - time.monotonic())
    for case, future in begun:
        words = f"{case.injuries[0]} of {case.layout.name}"
        attempted(record, words, partial(note_injured, record, words, future, until, holders))
    attempted(record, "snapshots in turns", lambda: note_turns(record, in_turns.result(until - time.monotonic())))


def attempted(record: Record, name: str, call: Callable[[], None]) -> None:
    """Call, and turn what goes wrong into a failed check, so that the rest of the phase is not lost."""
    try:
        call()
    except (Exception, SystemExit) as error:
        record.check(f"{name}: could be measured", False, f"{type(error).__name__}: {error}"[-1500:])


def note_copy(record: Record, card: Card) -> None:
    found = copy_alone(TINY if card.is_tiny else ON_CARD, card)
    record.row(snapshot="a copy alone", **found)
    record.check("a copy has the bits of the state", found["is_equal"])
    if card.is_gpu:
        record.check("a copy is in locked memory", found["is_locked"])
    if card.is_gpu and not card.is_tiny:
        share = found["host_bytes_taken"] / found["bytes"]
        record.check("a copy takes its bytes of host memory, and not more", share < 1.2, f"{share:.2f} times its bytes")


def note_turns(record: Record, found: dict[str, Any]) -> None:
    record.row(snapshot="after every second step", **found)
    record.check("steps with and without a snapshot were measured", found["pairs"] > 0)


def note_injured(record: Record, words: str, future: Future[Injured], until: float, holders: Holders) -> None:
    """Record a run: whether it continued with the same numbers, and what the dead left on the card."""
    injured = future.result(until - time.monotonic())
    outcome = injured.outcome
    held = [(pid, holders.held_s(pid, done.time)) for done in injured.done for pid in done.pids]
    record.row(
        injury=words,
        exit_code=outcome.exit_code,
        generations=outcome.num_generations,
        replicas=outcome.dp,
        restored_from=outcome.sources,
        steps_done_again=outcome.steps_replayed,
        largest_difference=outcome.largest_difference,
        seconds=outcome.seconds,
        peak_bytes=injured.peaks,
        memory_held_after_kill_s=[seconds for _, seconds in held],
        memory_held_mib=[holders.seen[pid][1] for pid, seconds in held if seconds is not None],
    )
    continued = outcome.exit_code == 0 and outcome.num_generations > 1 and not outcome.problems
    detail = "; ".join(outcome.problems) or outcome.said or f"{outcome.num_generations} generations"
    record.check(f"{words}: continues with the numbers of the undisturbed run", continued, detail)
    note_memory(record, words, injured, [seconds for _, seconds in held if seconds is not None])


def note_memory(record: Record, words: str, injured: Injured, held: list[float]) -> None:
    """Check, on a GPU, that neither the dead nor those that survived keep memory of a generation that is over."""
    if held:
        record.check(f"{words}: the dead hold no memory", max(held) <= LEFT_S, f"{max(held):.1f} s after the kill")
    if injured.peaks is not None and injured.outcome.dp == injured.outcome.case.layout.dp:
        before, after = injured.peaks
        kept = after <= 1.1 * before + SLACK_BYTES
        record.check(f"{words}: no engine is kept", kept, f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} after")


def free_bytes(card: Card) -> int | None:
    """Return what is free on the card, or None without one. What this process has used and freed is given back."""
    if not card.is_gpu:
        return None
    import torch

    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def note_rest(record: Record, card: Card, before: int | None) -> None:
    """Record whether the card has its memory back after all processes have ended."""
    if before is None:
        record.row(card="what is left on it was not tried: there is no GPU")
        return
    until = time.monotonic() + BACK_S
    while (left := before - (free_bytes(card) or 0)) > SLACK_BYTES and time.monotonic() < until:
        time.sleep(0.2)
    record.row(card="after all runs", left_bytes=left)
    record.check("the memory of all dead processes is free again", left <= SLACK_BYTES, f"{left / 2**20:.0f} MiB")


if __name__ == "__main__":
    run_phase(run)
