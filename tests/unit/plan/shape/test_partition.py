"""Stages as DeepSpeed makes them: recorded vectors, the document's cases, and DeepSpeed itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.shape.parameters import ModelShape, cut_model
from bigsci_launch.plan.shape.partition import (
    Layer,
    PartitionRule,
    cut_balanced,
    cut_filling,
    cut_layers,
    cut_uniformly,
    weigh_layers,
)

RECORDED = json.loads((Path(__file__).parents[1] / "partition_deepspeed_0_5_10.json").read_text())["cases"]
SLOTS = "type:transformer|embedding"


def shape(num_layers: int) -> ModelShape:
    return ModelShape(num_layers, 64, 4, 256, 32, 1024)


def layers_per_stage(num_layers: int, pp: int, method: str, rule: PartitionRule) -> tuple[int, ...]:
    return cut_model(shape(num_layers), method, pp, rule).transformer_layers_per_stage


@pytest.mark.parametrize(
    ("num_layers", "pp", "method", "expected"),
    [
        (78, 12, "type:transformer", (7,) * 11 + (1,)),
        (106, 12, SLOTS, (8, *(9,) * 10, 8)),
        (100, 6, SLOTS, (16, 17, 17, 17, 17, 16)),
        (82, 12, SLOTS, (6, *(7,) * 10, 6)),
        (94, 12, SLOTS, (7, *(8,) * 10, 7)),
        (70, 12, SLOTS, (5, *(6,) * 10, 5)),
    ],
)
def test_stages_of_the_early_2022_partitioner(num_layers: int, pp: int, method: str, expected: tuple[int, ...]) -> None:
    assert layers_per_stage(num_layers, pp, method, PartitionRule.FILL) == expected


@pytest.mark.parametrize(("num_layers", "pp", "num_empty"), [(72, 48, 12), (42, 16, 2), (80, 24, 4), (94, 48, 1)])
def test_the_early_2022_partitioner_leaves_stages_empty(num_layers: int, pp: int, num_empty: int) -> None:
    assert layers_per_stage(num_layers, pp, "type:transformer", PartitionRule.FILL).count(0) == num_empty
    assert layers_per_stage(num_layers, pp, "type:transformer", PartitionRule.BALANCE).count(0) == 0


@pytest.mark.parametrize("rule", PartitionRule)
def test_embeddings_alone_on_their_stages(rule: PartitionRule) -> None:
    # The document wished for this at TP1 PP96, but DeepSpeed cannot run it: neither end has a transformer block.
    assert layers_per_stage(94, 96, SLOTS, rule) == (0, *(1,) * 94, 0)


def test_vectors_recorded_from_the_old_rule() -> None:
    for weights, parts, bounds in RECORDED:
        assert cut_filling(weights, parts) == bounds, (weights, parts)


@pytest.mark.torch
@pytest.mark.parametrize("num_cases", [300, pytest.param(3000, marks=pytest.mark.long)])
def test_the_present_rule_is_deepspeeds_on_random_cases(num_cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runtime = pytest.importorskip("deepspeed.runtime.utils")
    source = random.Random(4312)
    for _ in range(num_cases):
        largest = source.choice([1, 1, 2, 10, 10**9])
        least = source.choice([0, 1])
        weights = [source.randint(least, largest) for _ in range(source.randint(1, 40))]
        parts = source.randint(1, 20)
        theirs = [int(bound) for bound in runtime.partition_balanced(weights, parts)]
        assert cut_balanced(weights, parts) == theirs, (weights, parts)
        theirs = [int(bound) for bound in runtime.partition_uniform(len(weights), parts)]
        assert cut_uniformly(len(weights), parts) == theirs


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 12))
def test_bounds_are_a_cut(weights: list[int], parts: int) -> None:
    for bounds in (cut_balanced(weights, parts), cut_filling(weights, parts), cut_uniformly(len(weights), parts)):
        assert bounds[0] == 0
        assert bounds[-1] == len(weights)
        assert len(bounds) == parts + 1
        assert bounds == sorted(bounds)


@given(st.lists(st.integers(0, 4), min_size=3, max_size=9))
def test_balance_has_the_least_spread_that_any_cut_has_on_two_parts(weights: list[int]) -> None:
    spreads = [abs(sum(weights[:cut]) - sum(weights[cut:])) for cut in range(1, len(weights))]
    cut = cut_balanced(weights, 2)[1]
    assert abs(sum(weights[:cut]) - sum(weights[cut:])) == min(spreads)


def test_the_rule_follows_the_version() -> None:
    assert PartitionRule.of_deepspeed("0.5.10") is PartitionRule.FILL
    assert PartitionRule.of_deepspeed("0.12.4+542dc0d5") is PartitionRule.FILL
    assert PartitionRule.of_deepspeed("0.12.5") is PartitionRule.BALANCE
    assert PartitionRule.of_deepspeed("0.19.8") is PartitionRule.BALANCE


def test_types_are_searched_as_deepspeed_does() -> None:
    layers = [Layer("EmbeddingPipe", 7), Layer("function"), Layer("ParallelTransformerLayerPipe", 5)]
    assert weigh_layers(layers, "type:TRANSFORMER") == (0, 0, 1)
    assert weigh_layers(layers, "type:embed|transformer") == (1, 0, 1)
    assert weigh_layers(layers, "type:pipe:ignored") == (1, 0, 1)
    assert weigh_layers(layers, "parameters") == (7, 0, 5)


@pytest.mark.parametrize("method", ["profile", "type:mamba", "type:(", "best"])
def test_methods_that_deepspeed_refuses(method: str) -> None:
    with pytest.raises(ValueError, match="partition method"):
        cut_layers([Layer("TransformerLayer", 5)], method, 1)
