"""Sequence parallelism: ranks with a part of every sequence train as ranks that have them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import with_long

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

STEPS = 5
MODERN = {
    **{"norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 96, "biases": False, "positions": "rotary"},
    **{"tied_embeddings": False, "embedding_norm": True, "num_key_value_heads": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"training": {"precision": "bf16"}},
    "modern": {"model": MODERN},
    "alibi": {"model": {"positions": "alibi"}, "training": {"activation_checkpointing": True}},
    "dropout": {"model": {"dropout": 0.1}},
}
# "modern" trains in fp32 too; test_parity.py has alibi and recomputed layers, and "dropout" is resumed.
FURTHER = ("fp32", "alibi")


def case(kind: str, *, splits: bool = True, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    sections = CASES[kind]
    return {
        "model": {"num_layers": 2, **sections.get("model", {})},
        "training": {"steps": steps, **sections.get("training", {}), **more.pop("training", {})},
        "parallelism": {"sequence_parallel": splits},
        "guards": {"interval": 1},
        **more,
    }


@pytest.fixture(scope="module")
def two(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def broken(kind: str) -> dict[str, Any]:
        return case("bf16", faults=[{"kind": kind, "step": 3}])

    return train_several(
        tmp_path_factory.mktemp("two"),
        "tp=2",
        [
            *((kind, case(kind)) for kind in CASES),
            *((f"{kind} whole", case(kind, splits=False)) for kind in CASES),
            ("stopped", case("dropout", training={"stop_after_steps": 2})),
            ("stopped", case("dropout")),
            ("unreduced", broken("unreduced_tp_gradients")),
            ("scaled", broken("scaled_gradients")),
        ],
        further=[name for kind in FURTHER for name in (kind, f"{kind} whole")] + ["dropout whole", "scaled"],
    )


def compare(split: Any, whole: Any, kind: str) -> None:
    """In bf16, each rank rounds the gradients of norms for its own tokens; the first loss has the same bits."""
    mine, theirs = split.steps(), whole.steps()
    assert sorted(mine) == sorted(theirs) == list(range(1, STEPS + 1)), (split.error(0), whole.error(0))
    assert kind != "bf16" or mine[1]["loss_hex"] == theirs[1]["loss_hex"]
    of_loss, of_norm = (2e-5, 2e-3) if kind == "bf16" else (1e-6, 1e-5)
    for step in mine:
        assert mine[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=of_loss), step
        assert mine[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=of_norm), step


@pytest.mark.parametrize("kind", with_long(CASES, (*FURTHER, "dropout")))
def test_parts_of_sequences_train_as_whole_ones(kind: str, two: Any) -> None:
    compare(two[kind], two[f"{kind} whole"], kind)


@pytest.mark.parametrize("kinds", with_long([("bf16",), ("fp32", "modern")], [("fp32", "modern")]), ids="-".join)
@pytest.mark.parametrize("topology", ["tp=2,pp=2", "tp=2,dp=2"])
def test_stages_and_replicas_train_as_one(
    topology: str, kinds: tuple[str, ...], train_several: Any, tmp_path: Path
) -> None:
    split = [(kind, case(kind)) for kind in kinds]
    whole = [(f"{kind} whole", case(kind, splits=False)) for kind in kinds]
    four = train_several(tmp_path, topology, [*split, *whole])
    for kind in kinds:
        compare(four[kind], four[f"{kind} whole"], kind)


@pytest.mark.long  # test_overlap.py holds this for whole sequences
def test_overlapped_sums_change_no_bit(train_several: Any, tmp_path: Path) -> None:
    overlapped = {**(sections := case("bf16")), "parallelism": {**sections["parallelism"], "overlap": ["data"]}}
    runs = train_several(tmp_path, "tp=2,dp=2", [("plain", sections), ("overlapped", overlapped)])
    plain, mine = ([each["loss_hex"] for each in runs[name].steps().values()] for name in ("plain", "overlapped"))
    assert plain == mine and len(plain) == STEPS


@pytest.mark.parametrize("kind", with_long(CASES, FURTHER))
def test_guards_have_nothing_to_say_of_a_healthy_run(kind: str, two: Any) -> None:
    assert [two[kind].events(rank, "guard") for rank in range(2)] == [[], []]


@pytest.mark.parametrize("name", with_long(["unreduced", "scaled"], ["scaled"]))
def test_guards_stop_a_wrong_step(name: str, two: Any) -> None:
    assert two[name].error(0)["step"] == 3


def test_a_resumed_run_has_the_same_losses_to_the_last_bit(two: Any) -> None:
    whole = {step: record["loss_hex"] for step, record in two["dropout"].steps().items()}
    parts = {**two["stopped"].steps(), **two["stopped+"].steps()}
    assert {step: record["loss_hex"] for step, record in parts.items()} == whole
