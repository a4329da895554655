"""One rank of `bsl train` on the card: a GPT on random tokens, until enough steps are recorded."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ranks import start_ranks

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from on_gpu.card import Card

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Gpt:
    """A model and how one rank trains it; `micro_batches` of them make a step. `more` are further keys of `model`."""

    name: str
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int
    micro_batches: int
    recomputes: bool | Literal["selective"] = False
    precision: str = "bf16"
    compiles: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.micro_batch * self.micro_batches

    def config(self, card: Card, prefix: Path, steps: int) -> RunConfig:
        """Return the run file."""
        return RunConfig.model_validate(
            {
                "run": {"name": "card"},
                "model": {
                    **{"num_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads},
                    **{"sequence_length": self.length, "vocab_size": self.vocabulary, **self.more},
                },
                "training": {
                    **{"steps": steps, "micro_batch_size": self.micro_batch, "global_batch_size": self.samples},
                    **{"precision": self.precision, "compile": self.compiles},
                    **{"device": card.device, "activation_checkpointing": self.recomputes},
                },
                "data": {"prefix": str(prefix)},
                "monitor": {"peak_tflops_per_rank": card.peak_tflops or 0.1},
                # Guards are measured apart; their first checks would be among these few steps.
                "guards": {"interval": "off"},
            }
        )


@dataclass(frozen=True, slots=True)
class Trained:
    """What the rank recorded. `words` says why there are fewer steps than asked for, or is empty."""

    words: str
    steps: tuple[dict[str, Any], ...]
    start_s: float
    """Seconds from its turn to the end of its first step; it has imported what it needs before."""

    @property
    def allocated_gib(self) -> float:
        """The peak of torch's tensors; 0 on a CPU."""
        return max((each.get("memory_allocated", 0) for each in self.steps), default=0) / 2**30

    @property
    def reserved_gib(self) -> float:
        """The peak of torch's pool; 0 on a CPU."""
        return max((each.get("memory_reserved", 0) for each in self.steps), default=0) / 2**30


def draw_tokens(prefix: Path, vocabulary: int, count: int) -> None:
    """Write random tokens."""
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(draw.integers(vocabulary, size=count))


class ReadyRank:
    """A rank that imports at once and trains when it is its turn: until it has recorded `steps` steps."""

    def __init__(
        self, gpt: Gpt, card: Card, folder: Path, steps: int, module: Sequence[str] = ("on_gpu.programs.ready_rank",)
    ) -> None:
        self.gpt, self._steps = gpt, steps
        folder.mkdir(parents=True)
        draw_tokens(folder / "tokens", gpt.vocabulary, 2 * gpt.length * gpt.samples + 1)
        run = RunDir(folder / "run")
        self._attempt = run.attempt(run.next_attempt_name())
        self._attempt.make()
        self._attempt.config.write_text(dump_resolved(gpt.config(card, folder / "tokens", steps + 1)))
        place = {"BSL_RUN_DIR": str(run.path), "BSL_ATTEMPT": self._attempt.name}
        (self._process,) = start_ranks(1, module, self._attempt.log_file, place, stdin=subprocess.PIPE)

    def take_turn(self, limit_s: float) -> Trained:
        """Let it train, and end it: a save would take longer."""
        began = time.monotonic()
        assert self._process.stdin
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()
            return _follow(self._attempt, self._process, self._steps, began, limit_s)
        finally:
            self.end()

    def end(self) -> None:
        """Kill it, in whatever state it is."""
        self._process.kill()
        self._process.wait(20)


def train_alone(gpt: Gpt, card: Card, folder: Path, steps: int, limit_s: float) -> Trained:
    """Train one rank in `folder` until it has recorded `steps` steps."""
    return ReadyRank(gpt, card, folder, steps).take_turn(limit_s)


def _follow(attempt: AttemptDir, rank: subprocess.Popen[bytes], steps: int, began: float, limit_s: float) -> Trained:
    start_s = 0.0
    while True:
        code = rank.poll()
        found = recorded_steps(attempt)
        if found and not start_s:
            start_s = time.monotonic() - began - (0 if len(found) == 1 else sum(each["seconds"] for each in found[1:]))
        if len(found) >= steps or code is not None or time.monotonic() - began > limit_s:
            break
        time.sleep(POLL_S)
    words = "" if len(found) >= steps else _why(attempt, code, limit_s)
    return Trained(words, tuple(found[:steps]), start_s)


def recorded_steps(attempt: AttemptDir, rank: int = 0) -> list[dict[str, Any]]:
    """Return the `step` records so far."""
    path = attempt.event_file(rank)
    return [each for each in read_events(path) if each["kind"] == "step"] if path.exists() else []


def _why(attempt: AttemptDir, code: int | None, limit_s: float) -> str:
    error = attempt.error_file(0)
    if error.exists():
        said = read_json(error)
        return f"{said['type']}: {said['message'].splitlines()[0][:200]}"
    if code is None:
        return f"not within {limit_s:.0f} s"
    lines = attempt.log_file(0).read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
    return f"exit {code}: {lines[-1][:200]}"
