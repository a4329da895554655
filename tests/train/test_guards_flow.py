"""Guards: wrong data and wrong gradients stop the run in their step, and are named.

All runs are trained in turn on the same four ranks (pp 2 x dp 2), broken from outside the package.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.texts import has_parts
from tests.support.tiers import with_long

pytestmark = pytest.mark.torch

Runs = dict[str, Any]
STEP = 4
PARTS = {
    "replayed": ("data: samples", "due in this step"),
    "same samples": ("data: samples", "same samples"),
    "shifted labels": ("data: samples on rank 2 ", "due in this step"),
    "scaled loss": ("loss gradient: logits", "on ranks 2-3 (pp1)", "8 times"),
    "scaled weight": ("layer gradients: ", "mlp.up.weight on rank 1 ", "8 times"),
    "unreduced": ("gradient reduction: ",),
    "other epsilon": ("settings of layers: ", "on ranks 0-1 (pp0)"),
    "shared masks": ("random states: dropout on ranks ",),
    "unclipped": ("clipping: group decay", "by 1; ", " 0."),
}


@pytest.fixture(scope="module")
def runs(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def sections(name: str, precision: str) -> dict[str, Any]:
        is_seen_unarmed = name in ("replayed", "same samples", "shifted labels", "unclipped")
        return {
            "run": {"name": name.replace(" ", "-")},
            "model": {"dropout": 0.1 if name == "shared masks" else 0.0},
            # Half as many micro-batches as elsewhere: their calls are what takes time.
            "training": {"steps": 6, "precision": precision, "micro_batch_size": 4},
            "optimizer": {"clip_grad": 0.05, "warmup_steps": 0, "learning_rate": 1e-2},
            "guards": {"interval": 50 if is_seen_unarmed else 1},
        }

    scenarios = [
        ("healthy", sections("healthy", "bf16")),
        ("healthy fp32", sections("healthy", "fp32")),
        *((name, sections(name, "bf16")) for name in PARTS),
    ]
    found: Runs = train_several(
        tmp_path_factory.mktemp("flow"), "pp=2,dp=2", scenarios, "broken_flow", further=["healthy fp32"]
    )
    return found


@pytest.mark.parametrize("name", with_long(["healthy", "healthy fp32"], ["healthy fp32"]))
def test_a_healthy_run_is_silent(runs: Runs, name: str) -> None:
    assert [runs[name].error(rank) for rank in range(4)] == [None] * 4
    assert sorted(runs[name].steps()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", PARTS)
def test_a_defect_stops_the_run_in_its_step(runs: Runs, name: str) -> None:
    step, message = runs[name].stopped()
    assert step == STEP and has_parts(message, *PARTS[name]), message
    assert not list(runs[name].run.checkpoints.glob("global_step*"))


def test_a_loss_that_one_tp_rank_computes_otherwise_is_found_and_hangs_nobody(
    train_several: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sections = {"training": {"steps": 6, "precision": "bf16"}, "guards": {"interval": 1}}
    scenarios = [(name, {**sections, "run": {"name": name.replace(" ", "-")}}) for name in ("unknown loss", "healthy")]
    runs = train_several(tmp_path_factory.mktemp("loss"), "tp=2", scenarios, "broken_flow")
    errors = [runs["unknown loss"].error(rank) for rank in range(2)]
    assert all(errors) and errors[0]["step"] == STEP
    assert "loss function" in errors[0]["message"]
    assert runs["healthy"].error(0) is None
