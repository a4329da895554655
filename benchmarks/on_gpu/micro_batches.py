"""`training.micro_batch_size: auto` on the card, with memory that is really short.

One rank over NCCL finds the size on the whole card, and trains the same model with sizes by hand. Then another process
holds all but some GiB of the card (`ballast.py`), and takes more of it before a step: so that the step runs out of
memory, or so that torch has to empty its cache in two steps in a row. Two ranks that share the card over gloo follow.
On a CPU the shortages are injected, as the tests of the trainer do it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from on_gpu.card import Card
from on_gpu.micro_batch_rank import SQUEEZED
from on_gpu.micro_batch_runs import WARM_UP, CaseError, Change, Ranks, Trained
from on_gpu.record import Record, run_phase

LIMIT_S = 100.0
LATE = SQUEEZED["shortage"][0]
SAME_LOSS = 1e-2
"""Relative; in bf16, losses of the same samples in other micro-batches differ by rounding."""
LEFT_GIB = 0.5
"""What a rank may keep of the card between two attempts."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model and the samples of a step. Others leave `left_gib` of the card; None leaves all of it."""

    model: dict[str, int]
    batch: int
    left_gib: float | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.model["sequence_length"]

    def sections(self, size: int | str, steps: int, **more: Any) -> dict[str, Any]:
        """Return the sections of a run file."""
        training = {"steps": steps, "micro_batch_size": size, "global_batch_size": self.batch}
        return {"model": self.model, "training": training, **more}


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of a session. `within` is how much slower than the best size by hand the found one may be, and `timing`
    the bounds of what the time of a trial makes of a step, over what the step took."""

    whole: Job
    small: Job
    pair: Job
    within: float
    timing: tuple[float, float]


def _gpt(layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> dict[str, int]:
    return {
        **{"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
        **{"sequence_length": length, "vocab_size": vocabulary},
    }


_350M, _TINY = _gpt(24, 1024, 16, 1024, 50257), _gpt(2, 32, 4, 32, 300)
ON_CARD = Scale(
    whole=Job(_350M, 96),
    small=Job(_350M, 24, left_gib=16.0),
    pair=Job(_gpt(8, 1024, 16, 1024, 8192), 48, left_gib=12.0),
    within=0.02,
    timing=(0.6, 2.0),
)
TINY = Scale(Job(_TINY, 8), Job(_TINY, 8, 0.0), Job(_TINY, 16, 0.0), within=0.95, timing=(0.01, 100.0))


@dataclass(frozen=True, slots=True)
class Bench:
    """What the cases share."""

    record: Record
    card: Card
    scale: Scale
    alone: Ranks
    pair: Ranks

    def faults(self, *shortages: tuple[int, int]) -> list[dict[str, Any]]:
        """Return faults of rank 0 in the place of a small card: from a step on, sizes above another do not fit."""
        kind = {"kind": "out_of_memory", "rank": 0, "place": "forward"}
        return [{**kind, "step": step, "above": above} for step, above in shortages if self.card.is_tiny]

    def is_whole(self, name: str, trained: Trained, steps: int) -> bool:
        """Check that an attempt did all of its steps, each once."""
        numbers = [each["step"] for each in trained.steps]
        passed = not trained.error and numbers == list(range(1, steps + 1))
        self.record.check(name, passed, trained.error or f"steps {numbers}; sizes {trained.changes}")
        return passed


def whole_card(bench: Bench) -> None:
    """The size that is found on the whole card, next to sizes by hand."""
    job, steps = bench.scale.whole, WARM_UP + 3
    more = {"guards": {"interval": "off"}, "faults": bench.faults((1, 4))}
    auto = bench.alone.train("whole", job.sections("auto", steps, **more))
    bench.record.row(case="allocator", **{key: auto.done.get(key) for key in ("environment", "allocator")})
    _tell_search(bench, "whole card", auto)
    if not bench.is_whole("whole card: the search finds a size and the run trains with it", auto, steps):
        return
    size, mine = auto.sizes[-1], job.tokens / auto.step_s
    bench.record.row(case="whole card", size=size, is_auto=True, tokens_per_s=mine)
    _check_timing(bench, auto, size)
    legal = [each for each in (size, size // 2, 2 * size) if each and job.batch % each == 0]
    by_hand = {each: _speed_by_hand(bench, each, steps, more) for each in legal}
    rounded = {each: round(speed) for each, speed in by_hand.items()}
    detail = f"auto {size}: {mine:,.0f} tokens/s; by hand {rounded}"
    is_fast = mine >= max(by_hand.values()) * (1 - bench.scale.within)
    bench.record.check("auto is as fast as the best size by hand", is_fast, detail)


def _speed_by_hand(bench: Bench, size: int, steps: int, more: dict[str, Any]) -> float:
    """Return the tokens per second of a size; 0 if it does not fit."""
    job, name = bench.scale.whole, f"by hand, {size}"
    fixed = bench.alone.train(f"hand{size}", job.sections(size, steps, **more))
    speed = job.tokens / fixed.step_s if len(fixed.steps) == steps else 0.0
    left = fixed.done.get("left_gib", 0.0)
    bench.record.row(case="whole card", size=size, is_auto=False, tokens_per_s=speed, error=fixed.error, left_gib=left)
    bench.record.check(f"{name}: the card has its memory back", left <= LEFT_GIB, f"{left:.3f} GiB are left")
    return speed


def _check_timing(bench: Bench, auto: Trained, size: int) -> None:
    """Check that a trial has the time of the device, not that of asking it: with stages, the size depends on it."""
    trial = next(each for each in auto.trials if each["size"] == size and each["fits"])
    by_trial = trial["seconds"] * bench.scale.whole.batch / size
    low, high = bench.scale.timing
    detail = f"{by_trial:.3f} s of micro-batches by the trial, {auto.step_s:.3f} s measured"
    bench.record.check("a trial takes as long as in a step", low <= by_trial / auto.step_s <= high, detail)


def _tell_search(bench: Bench, case: str, trained: Trained) -> None:
    """Add a row for each size that was tried, and one for the whole search."""
    search = trained.search
    seconds = {after["mono"]: after["mono"] - before["mono"] for before, after in pairwise(search)}
    for each in trained.trials:
        used = each["used_bytes"]
        figures = {"seconds": seconds.get(each["mono"]), "micro_batch_s": each["seconds"]}
        figures["used_gib"] = None if used is None else used / 2**30
        bench.record.row(case=case, tried=each["size"], fits=each["fits"], after_step=each["step"], **figures)
    tried = [each["size"] for each in search if each["kind"] == "trial"]
    bench.record.row(
        case=case,
        predicted=tried[0] if tried else None,
        found=trained.changes[0][2] if trained.changes else None,
        trials=len(tried),
        search_s=search[-1]["mono"] - search[0]["mono"] if search else None,
        free_at_peak=trained.found.headroom if trained.found else None,
        changes=[asdict(each) for each in trained.found.history] if trained.found else [],
        squeezes=trained.done["squeezes"],
        error=trained.error,
    )


def shortage_alone(bench: Bench) -> None:
    """One rank on a small card; somebody takes more of it before a step."""
    _shortage(bench, "one rank", bench.alone, bench.scale.small)


def shortage_of_two(bench: Bench) -> None:
    """Two ranks that share a small card; the first one runs out of memory in a step."""
    bench.alone.end()
    _shortage(bench, "two ranks", bench.pair, bench.scale.pair)


def _shortage(bench: Bench, case: str, ranks: Ranks, job: Job) -> None:
    steps, name = LATE + 2, case.replace(" ", "-")
    sections = job.sections("auto", steps, faults=bench.faults((1, 4), (LATE, 2)))
    auto = ranks.train(name, sections, left_gib=job.left_gib, squeeze="shortage")
    _tell_search(bench, f"{case}, shortage", auto)
    if not bench.is_whole(f"{case}: a small card and a shortage end nothing", auto, steps):
        return
    tried, before = [each["size"] for each in auto.trials], auto.sizes[LATE - 2]
    bench.record.check(
        f"{case}: a smaller size is found on a small card", before < max(tried), f"{before} of {tried}: {auto.words}"
    )
    if _is_done_again(bench, case, auto, auto.changes[-1]):
        fixed = ranks.train(f"{name}-fixed", job.sections(auto.sizes[-1], steps), left_gib=job.left_gib)
        _compare_losses(bench, case, auto, fixed)


def _is_done_again(bench: Bench, case: str, auto: Trained, last: Change) -> bool:
    """Check that the step in which a rank ran out of memory was done again with a smaller size, on all ranks."""
    is_taken = last[:2] == (LATE - 1, "out_of_memory") and auto.sizes[LATE - 1 :] == [last[2]] * 3
    is_smaller = last[2] < auto.sizes[LATE - 2]
    is_told = all(each == auto.told[0] and each[-1] == "out_of_memory" for each in auto.told)
    name = f"{case}: a step that runs out of memory is done again with a smaller size on all ranks"
    detail = f"sizes {auto.sizes}, {auto.changes}: {auto.words}; the ranks say {auto.told}"
    bench.record.check(name, is_taken and is_smaller and is_told, detail)
    return is_taken and is_smaller


def _compare_losses(bench: Bench, case: str, auto: Trained, fixed: Trained) -> None:
    """Compare a run with one that had the smaller size from the beginning."""
    samples = [[each["consumed_samples"] for each in one.steps] for one in (auto, fixed)]
    apart = [abs(mine / wanted - 1) for mine, wanted in zip(auto.losses, fixed.losses, strict=False)]
    bench.record.row(case=f"{case}, losses", auto=auto.losses, fixed=fixed.losses, apart=apart, error=fixed.error)
    passed = samples[0] == samples[1] and max(apart, default=1.0) <= SAME_LOSS
    detail = f"samples {samples[0]} and {samples[1]}; losses differ by {max(apart, default=1.0):.1e}; {fixed.error}"
    bench.record.check(f"{case}: the samples and losses are those of a run at the smaller size", passed, detail)


def thrashing(bench: Bench) -> None:
    """One rank whose cache torch has to empty in two steps in a row."""
    job, steps = bench.scale.small, LATE + 3
    sections = job.sections("auto", steps, faults=bench.faults((1, 4)))
    auto = bench.alone.train("thrash", sections, left_gib=job.left_gib, squeeze="thrash")
    _tell_search(bench, "thrashing", auto)
    if not bench.is_whole("thrashing ends nothing", auto, steps):
        return
    retries = [each.get("memory_retries", 0) for each in auto.steps]
    grown = [step for step, (before, after) in enumerate(pairwise(retries), 2) if after > before]
    bench.record.row(case="thrashing", sizes=auto.sizes, memory_retries=retries, grown_in=grown)
    # Torch may have emptied its cache before the first squeeze as well: what other processes left free decides that.
    second = next((after for before, after in pairwise(grown) if after == before + 1), None)
    second = SQUEEZED["thrash"][-1] if bench.card.is_tiny else second
    bench.record.check("torch had to empty its cache in two steps in a row", second is not None, f"retries {retries}")
    if second is not None:
        last = auto.changes[-1]
        is_smaller = last[:2] == (second, "thrash") and last[2] < auto.sizes[second - 1]
        detail = f"{auto.changes}; sizes {auto.sizes}, retries {retries}"
        bench.record.check("two such steps in a row make the size smaller", is_smaller, detail)


CASES: Sequence[Callable[[Bench], None]] = (whole_card, shortage_alone, thrashing, shortage_of_two)


def run(record: Record, card: Card) -> None:
    """Run all cases; one that comes to no result is a failed check."""
    until = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as scratch:
        started = [Ranks(count, Path(scratch) / str(count), card, until) for count in (1, 2)]
        try:
            bench = Bench(record, card, TINY if card.is_tiny else ON_CARD, *started)
            for case in CASES:
                _attempt(bench, case)
        finally:
            for each in started:
                each.end()


def _attempt(bench: Bench, case: Callable[[Bench], None]) -> None:
    began = time.monotonic()
    try:
        case(bench)
    except (CaseError, OSError, LookupError, ValueError, ArithmeticError) as error:
        bench.record.check(f"{case.__name__} comes to a result", False, f"{type(error).__name__}: {error}"[:1500])
    bench.record.row(case=case.__name__, case_s=time.monotonic() - began)


if __name__ == "__main__":
    run_phase(run)
