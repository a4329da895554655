"""Cuts that would hang or crash are refused before anything starts, with rule and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.check import layer_names
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import load_run
from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.plan.choose.answer import configured_setup
from bigsci_launch.plan.choose.check import check_plan
from bigsci_launch.plan.choose.preflight import find_stage_refusals, preflight, remedy
from bigsci_launch.plan.shape.parameters import ModelShape, pipeline_layers
from tests.support.texts import has_parts

DEMO = Path(__file__).parents[4] / "configs/demo.yaml"
LAYER, NORM, TABLE, POSITIONS = "TransformerLayer", "FinalNorm", "VocabularyEmbedding", "LearnedPositions"


def rules(*stages: list[str], tied: bool = True, tp: int = 1, precision: str = "bf16") -> list[tuple[int, str]]:
    found = find_stage_refusals(stages, tied=tied, tp=tp, precision=precision)
    return [(int(refusal.text.split()[1]), refusal.rule) for refusal in found]


@pytest.mark.parametrize(
    ("stages", "options", "expected"),
    [
        ([[TABLE, POSITIONS, LAYER], [LAYER, NORM, TABLE]], {}, []),
        ([[TABLE, POSITIONS, LAYER], [LAYER, NORM], [TABLE]], {}, [(2, "equal parameter groups")]),
        ([[TABLE, POSITIONS], [LAYER, NORM, TABLE]], {"precision": "fp32"}, [(0, "equal parameter groups")]),
        (
            [[TABLE, LAYER], [NORM], ["OutputEmbedding"]],
            {"tied": False},
            [(1, "equal parameter groups")] * 1 + [(2, "equal parameter groups")],
        ),
        ([[TABLE, LAYER], []], {}, [(1, "equal parameter groups")]),
        # The norm is a copy over tp, the table one over pp: the second tp rank has nothing of its own.
        ([[TABLE, LAYER], [LAYER], [NORM, TABLE]], {"tp": 2}, [(2, "parameters of its own")]),
        ([[TABLE, LAYER], [LAYER], [NORM, TABLE]], {"tp": 1}, []),
        ([[TABLE, LAYER], [LAYER], [NORM, TABLE]], {"tp": 2, "precision": "fp32"}, []),
        ([[TABLE, LAYER], [LAYER], [NORM, "OutputEmbedding"]], {"tp": 2, "tied": False}, []),
    ],
)
def test_each_rule(stages: list[list[str]], options: dict[str, Any], expected: list[tuple[int, str]]) -> None:
    assert rules(*stages, **options) == expected


def demo(num_layers: int, pp: int) -> Any:
    overrides = [f"model.num_layers={num_layers}", f"parallelism.pipeline_parallel_size={pp}"]
    return load_run(DEMO, [*overrides, "parallelism.tensor_parallel_size=1", "parallelism.data_parallel_size=1"])


def test_the_prequels_hang_is_refused_with_a_remedy() -> None:
    """Four layers on four stages: only the tied embedding is left for the last."""
    config: RunConfig = demo(4, 4).config
    (refusal,) = preflight(config)
    assert refusal.rule == "equal parameter groups"
    assert has_parts(refusal.text, "stage 3", "VocabularyEmbedding: ") and "would hang" in refusal.price
    assert remedy(config).startswith("set parallelism.pipeline_parallel_size to 3, ")
    assert preflight(config, 3) == []


def refusals(config: RunConfig, site: Site) -> list[Finding]:
    """Return what `bsl plan check` and `bsl submit` say about it."""
    found = check_plan(config, site, configured_setup(config, site, None), None)
    return [finding for finding in found if finding.rule.startswith("preflight")]


def with_tied_norm(pp: int) -> Any:
    loaded = demo(4, pp)
    fault = FaultSpec(kind="tied_norm", step=1)
    return loaded, loaded.config.model_copy(update={"faults": [fault]})


def test_a_tied_norm_without_gradient_on_the_last_stage_is_refused() -> None:
    loaded, config = with_tied_norm(2)
    (refusal,) = preflight(config)
    assert refusal.rule == "tied gradients on every holder"
    assert has_parts(refusal.text, "stage 1", "tied norm.weight", "tied norm.bias") and "would crash" in refusal.price
    assert remedy(config).startswith("tie only")
    precision = config.training.model_copy(update={"precision": "fp32"})
    (waits,) = preflight(config.model_copy(update={"training": precision}))
    assert "would wait forever" in waits.price
    (finding,) = refusals(config, loaded.site)
    assert (finding.rule, finding.severity) == (f"preflight: {refusal.rule}", "error")
    assert finding.text.endswith(remedy(config))
    assert finding.text.startswith(f"{refusal.rule}: {refusal.text}; ")


def test_one_stage_or_an_untied_output_has_nothing_to_sum() -> None:
    _, config = with_tied_norm(1)
    assert preflight(config) == []
    _, config = with_tied_norm(2)
    untied = config.model.model_copy(update={"tied_embeddings": False})
    assert preflight(config.model_copy(update={"model": untied})) == []


def test_bsl_plan_check_and_submit_refuse_it_too() -> None:
    loaded = demo(4, 4)
    findings = refusals(loaded.config, loaded.site)
    assert [(finding.severity, finding.keys[0]) for finding in findings] == [
        ("error", "parallelism.pipeline_parallel_size")
    ]
    assert "pipeline_parallel_size to 3" in findings[0].text
    healthy = demo(4, 2)
    assert not refusals(healthy.config, healthy.site)


def test_the_names_that_a_pattern_is_searched_in_are_those_of_the_pipelines_layers() -> None:
    for positions in ("learned", "rotary", "alibi"):
        for is_tied in ("true", "false"):
            for has_norm in ("true", "false"):
                sizes = (f"positions={positions}", f"tied_embeddings={is_tied}", f"embedding_norm={has_norm}")
                config = load_run(DEMO, [f"model.{size}" for size in sizes]).config
                layers = pipeline_layers(ModelShape.of_config(config))
                assert layer_names(config.model) == tuple(dict.fromkeys(layer.name for layer in layers))
