"""`training.micro_batch_size: auto` on real ranks: whichever rank runs out of memory, and wherever, all ranks take a
smaller size together, and train on the same samples as a run that was started with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.runs.checkpoints import digests_path
from bigsci_launch.runs.sizes.record import FoundSize, read_found_size

from .conftest import Attempt

pytestmark = pytest.mark.torch

STEPS = 4
LATE = 3
START = 4
"""The largest size that fits at first, so that a step has several micro-batches."""
LIMIT_S = 5.0
"""How long a step may take in which a rank runs out of memory, with everything that is tried and done again."""
Train = Callable[..., dict[str, Attempt]]


@dataclass(frozen=True)
class Shortage:
    """A rank that runs out of memory at a place, from a step on, with micro-batches above a size."""

    place: str
    rank: int
    step: int = LATE
    above: int = 1
    call: int = 1

    @property
    def name(self) -> str:
        return f"{self.place}-{self.rank}-{self.step}"

    @property
    def fault(self) -> dict[str, Any]:
        return {"kind": "out_of_memory", **vars(self)}


def sections(*shortages: Shortage, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    return {
        "model": {"dropout": 0.1},
        "training": {"steps": STEPS, "micro_batch_size": "auto", "precision": precision, **more.pop("training", {})},
        "checkpoint": {"save_interval": STEPS},
        "guards": {"interval": 2},
        "faults": [each.fault for each in shortages],
        **more,
    }


def found(attempt: Attempt) -> FoundSize:
    size = read_found_size(attempt.run)
    assert size is not None
    return size


def sizes(attempt: Attempt) -> tuple[tuple[int, int], ...]:
    """Return after which steps the run has taken which sizes."""
    changes = dict[int, int]()
    for each in found(attempt).history:
        changes[each.step] = each.size
    return tuple(changes.items())


def run_at(history: Sequence[tuple[int, int]], precision: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the attempts of a run that had these sizes from the beginning, as the run file says."""
    ends = [step for step, _ in history[1:]] + [None]
    attempts = []
    for (start, size), end in zip(history, ends, strict=True):
        training = {"micro_batch_size": size, "stop_after_steps": None if end is None else end - start}
        attempts.append((name_of(history), sections(precision=precision, training=training)))
    return attempts


def name_of(history: Sequence[tuple[int, int]]) -> str:
    return "fixed-" + "-".join(f"{step}.{size}" for step, size in history)


def require_same(attempt: Attempt, fixed: Sequence[Attempt]) -> None:
    """Check that losses, samples and the last checkpoint are those of the run with fixed sizes."""
    steps: dict[int, dict[str, Any]] = {}
    for each in fixed:
        steps |= each.steps()
    for key in ("loss_hex", "consumed_samples", "micro_batch_size"):
        assert {n: step[key] for n, step in attempt.steps().items()} == {n: step[key] for n, step in steps.items()}
    saved, wanted = (each.run.checkpoints / checkpoint_tag(STEPS) for each in (attempt, fixed[-1]))
    for rank in range(len(attempt.processes)):
        mine, theirs = (json.loads(digests_path(folder, rank).read_text()) for folder in (saved, wanted))
        for key in ("tensors", "optimizer", "random"):
            assert mine[key] == theirs[key], (rank, key)


def require_agreed(
    train_several: Train, folder: Path, topology: str, precision: str, cases: Sequence[Shortage]
) -> None:
    """Run all cases, and compare each with a run that had its sizes from the beginning."""
    first = Shortage("forward", 0, step=1, above=START)
    named = [(each.name, sections(first, each, precision=precision)) for each in cases]
    attempts = train_several(folder, topology, named)
    for each in cases:
        attempt = attempts[each.name]
        assert set(attempt.steps()) == set(range(1, STEPS + 1)), (each, attempt.error(0))
        assert sizes(attempt)[0][1] > sizes(attempt)[-1][1] == 1, (each, found(attempt))
        assert max(step["seconds"] for step in attempt.steps().values()) < LIMIT_S, each
    histories = {sizes(attempts[each.name]) for each in cases}
    fixed = train_several(
        folder / "fixed", topology, [one for each in sorted(histories) for one in run_at(each, precision)]
    )
    for each in cases:
        history = sizes(attempts[each.name])
        name = name_of(history)
        require_same(attempts[each.name], [fixed[name], *([fixed[f"{name}+"]] if len(history) > 1 else [])])


def test_all_ranks_agree_after_one_has_run_out_of_memory(train_several: Train, tmp_path: Path) -> None:
    cases = [
        Shortage("forward", 0, call=3),
        Shortage("forward", 3),
        Shortage("collective", 1, call=4),
        Shortage("collective", 2, call=9),
        Shortage("loss", 2),
        Shortage("backward", 1, call=2),
        Shortage("backward", 3),
        Shortage("receive_activation", 2),
        Shortage("receive_gradient", 0),
        Shortage("load", 3),
        Shortage("accumulation", 1),
        Shortage("tied_reduction", 3),
        Shortage("reduction", 0, step=2),
    ]
    require_agreed(train_several, tmp_path, "tp=2,pp=2", "fp32", cases)


def test_all_replicas_agree(train_several: Train, tmp_path: Path) -> None:
    cases = [
        Shortage("forward", 1),
        Shortage("backward", 2, call=2),
        Shortage("reduction", 3),
        Shortage("accumulation", 0, step=2),
    ]
    require_agreed(train_several, tmp_path, "pp=2,dp=2", "bf16", cases)
