"""How fast plain PyTorch and torchtitan train the GPT of phase `speed` on the same card: what `bsl train` could reach.

Four ways, each in a process of its own: a plain loop that keeps bf16 weights with fp32 masters and fp32 gradients, as
`bsl train` does, and torchtitan's own trainer with fp32 weights under bf16 autocast; each eager, and with its layers
compiled. All begin with the same weights and see the same tokens. The next process imports while one is measured.

torchtitan 0.2.2 is its last release for torch 2.11: 0.3.0 imports `DataParallelMeshDims`, which that torch lacks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.tflops import MODEL_PASSES, full_flops
from on_gpu.card import Card
from on_gpu.programs.peer_gpt import Work
from on_gpu.record import Record, run_phase
from on_gpu.speed import BILLION, TINY, WARM_UP

LIMIT_S = 70.0
"""For all ways together: the phase has 75 s, and some have passed when it begins."""
WORTH_S = 18.0
"""With less time left, no further way begins."""
POLL_S = 0.05
OUT_OF_MEMORY = "out of memory"
ROUNDING = 0.01
"""How far apart bf16 may leave the same loss of different kernels."""
DRIFT = 0.05
"""The same after some updates; and how far the first loss may be from that of endlessly many random weights."""


@dataclass(frozen=True, slots=True)
class Way:
    """A program of `on_gpu.programs`, eager or compiled, how many steps count, and how long it may take."""

    name: str
    program: str
    compiled: bool
    measured: int
    limit_s: float


WAYS = (
    Way("plain loop", "peer_loop", False, 5, 28),
    Way("torchtitan", "peer_titan", False, 3, 28),
    Way("torchtitan, compiled", "peer_titan", True, 3, 40),
    Way("plain loop, compiled", "peer_loop", True, 3, 35),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The steps that a program reported, and why there are not enough; no words if there are."""

    steps: tuple[dict[str, Any], ...]
    words: str


class Program:
    """A way as a process, which imports and then waits for its turn."""

    def __init__(self, way: Way, work: Work, log: Path) -> None:
        self.way, self.work, self._log = way, work, log
        command = [sys.executable, "-m", f"on_gpu.programs.{way.program}", json.dumps(asdict(work))]
        with log.open("wb") as out:
            # One thread, as under torchrun.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def take_turn(self, until: float) -> Outcome:
        """Let it train, until it has reported all steps, ended, or used up its time; then end it."""
        until = min(until, time.monotonic() + self.way.limit_s)
        assert self._process.stdin
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()
            while self._process.poll() is None and len(self._steps()) < self.work.steps and time.monotonic() < until:
                time.sleep(POLL_S)
            code = self._process.poll()
        finally:
            self.end()
        steps = self._steps()
        return Outcome(steps, "" if len(steps) == self.work.steps else self._why(code))

    def end(self) -> None:
        """Kill it, in whatever state it is."""
        self._process.kill()
        self._process.wait(20)

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines(keepends=True)

    def _steps(self) -> tuple[dict[str, Any], ...]:
        return tuple(json.loads(each) for each in self._lines() if each.startswith('{"step"') and each.endswith("\n"))

    def _why(self, code: int | None) -> str:
        lines = [each.strip() for each in self._lines() if each.strip()] or ["nothing was printed"]
        print(f"{self.way.name}:", *lines[-40:], sep="\n", file=sys.stderr)
        memory = [each for each in lines if OUT_OF_MEMORY in each]
        said = (memory or lines)[-1][:300]
        return f"its time was over; the last line was: {said}" if code is None else f"exit code {code}: {said}"


def run(record: Record, card: Card) -> None:
    """Measure one way after the other, while there is time."""
    until = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        losses = _measure(record, card, _ways(record), Path(folder), until)
    _compare(record, losses)


def _ways(record: Record) -> Sequence[Way]:
    """Return what can be measured: torchtitan may not be installed."""
    if importlib.util.find_spec("torchtitan"):
        return WAYS
    record.row(case="torchtitan", words="not tried: it is not installed; benchmarks/gpu_wheels.sh fetches it")
    return [each for each in WAYS if each.program != "peer_titan"]


def _measure(record: Record, card: Card, ways: Sequence[Way], folder: Path, until: float) -> dict[str, list[float]]:
    """Return the losses of each way that trained."""
    waiting = [_start(way, _work(card, way), folder) for way in ways[:1]]
    losses: dict[str, list[float]] = {}
    try:
        for number, way in enumerate(ways):
            left = until - time.monotonic()
            if left < WORTH_S:
                record.row(case=way.name, words=f"not begun: {left:.0f} s were left")
                continue
            waiting += [_start(each, _work(card, each), folder) for each in ways[number + 1 : number + 2]]
            outcome = _take_turn(record, card, waiting[number], folder, until)
            losses |= {way.name: [each["loss"] for each in outcome.steps]} if outcome.steps else {}
    finally:
        for program in waiting:
            program.end()
    return losses


def _work(card: Card, way: Way) -> Work:
    gpt = TINY[0] if card.is_tiny else BILLION
    config = gpt.config(card, Path("tokens"), 1)
    return Work(
        layers=gpt.layers,
        hidden=gpt.hidden,
        heads=gpt.heads,
        length=gpt.length,
        vocabulary=gpt.vocabulary,
        rows=config.padded_vocab_size,
        micro_batch=gpt.micro_batch,
        micro_batches=gpt.micro_batches,
        steps=WARM_UP + way.measured,
        # Without a GPU, inductor takes half a minute.
        backend=None if not way.compiled else "inductor" if card.is_gpu else "aot_eager",
        device=card.device,
        flops_per_token=full_flops(ModelShape.of_config(config), 1, 1, MODEL_PASSES) / gpt.length,
    )


def _start(way: Way, work: Work, folder: Path) -> Program:
    return Program(way, work, folder / f"{way.name}, {work.micro_batch}.log")


def _take_turn(record: Record, card: Card, program: Program, folder: Path, until: float) -> Outcome:
    """Measure a way, and with half the micro batch if it ran out of memory."""
    outcome = program.take_turn(until)
    _note(record, card, program, outcome)
    half = program.work.micro_batch // 2
    if OUT_OF_MEMORY in outcome.words and half:
        smaller = replace(program.work, micro_batch=half, micro_batches=2 * program.work.micro_batches)
        program = _start(program.way, smaller, folder)
        try:
            outcome = program.take_turn(until)
        finally:
            program.end()
        _note(record, card, program, outcome)
    _judge(record, program, outcome)
    return outcome


def _note(record: Record, card: Card, program: Program, outcome: Outcome) -> None:
    work, steps = program.work, outcome.steps[WARM_UP:]
    seconds = median(each["seconds"] for each in steps) if steps else None
    tflops = work.flops_per_token * work.tokens / seconds / 1e12 if seconds else None
    last = outcome.steps[-1] if outcome.steps else {}
    record.row(
        case=program.way.name,
        micro_batch=work.micro_batch,
        micro_batches=work.micro_batches,
        measured=len(steps),
        seconds=seconds,
        tokens_per_s=round(work.tokens / seconds) if seconds else None,
        tflops=tflops,
        mfu=tflops / card.peak_tflops if tflops and card.peak_tflops else None,
        allocated_gib=last.get("allocated_gib"),
        reserved_gib=last.get("reserved_gib"),
        first_step_s=outcome.steps[0]["seconds"] if outcome.steps else None,
        losses=[round(each["loss"], 4) for each in outcome.steps],
        logged_tokens_per_s=last.get("logged_tokens_per_s"),
        logged_mfu=last.get("logged_mfu"),
        words=outcome.words,
    )


def _judge(record: Record, program: Program, outcome: Outcome) -> None:
    name, losses = program.way.name, [each["loss"] for each in outcome.steps]
    record.check(f"{name}: all steps were trained", not outcome.words, outcome.words)
    if not losses:
        return
    expected = program.work.first_loss
    is_expected = abs(losses[0] - expected) < DRIFT
    record.check(f"{name}: the first loss is that of random weights", is_expected, f"{losses[0]:.4f}, {expected:.4f}")
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    record.check(f"{name}: the loss falls", falls, f"{losses[0]:.4f} to {losses[-1]:.4f}")


def _compare(record: Record, losses: Mapping[str, Sequence[float]]) -> None:
    """Check that all ways compute the same model: by their first loss, and the compiled ones by that of every step."""
    first = [each[0] for each in losses.values()]
    said = ", ".join(f"{name} {each[0]:.4f}" for name, each in losses.items()) or "none trained"
    record.check("all ways begin with the same loss", bool(first) and max(first) - min(first) < ROUNDING, said)
    for name in losses:
        if (compiled := f"{name}, compiled") in losses:
            apart = max(abs(one - other) for one, other in zip(losses[name], losses[compiled], strict=False))
            record.check(f"{compiled}: has the losses of {name}", apart < DRIFT, f"at most {apart:.4f} apart")


if __name__ == "__main__":
    run_phase(run)
