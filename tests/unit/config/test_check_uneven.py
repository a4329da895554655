"""What `parallelism.engine: uneven` refuses: all of it in one error, which names each key and what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.check import check_run
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import load_run
from bigsci_launch.config.rules.described import DescribedLayout
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import load_site
from bigsci_launch.topology import Topology
from tests.train.uneven_settings import OFF, UNEVEN

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


def config(**sections: dict[str, object]) -> RunConfig:
    document = load_run(DEMO).config.model_dump(mode="json")
    sections = {"parallelism": {"tensor_parallel_size": 1, **UNEVEN}, **OFF, **sections}
    for section, values in sections.items():
        document[section] = {**(document[section] or {}), **values}
    return RunConfig.model_validate(document)


def findings(**sections: dict[str, object]) -> list[Finding]:
    return [each for each in check_run(config(**sections), load_site("local")) if each.rule == "uneven"]


def test_what_it_can_do_is_accepted_on_any_number_of_ranks() -> None:
    assert findings() == []
    layout = DescribedLayout.of_run(config(), load_site("local"))
    assert layout.topology == Topology(dp=load_site("local").config.ranks_per_node)


def test_all_that_it_cannot_do_is_one_error() -> None:
    wrong = {**UNEVEN, "sequence_parallel": True, "zero_stage": 2, "data_parallel_size": 2}
    (found,) = findings(parallelism=wrong, training={"precision": "fp16", "micro_batch_size": "auto"})
    keys = ("sequence_parallel", "data_parallel_size", "zero_stage")
    wanted = {"parallelism.engine", *(f"parallelism.{key}" for key in keys)}
    assert {*found.keys} == wanted | {"training.precision", "training.micro_batch_size"}
    assert found.severity == "error"


def test_tensor_parallel_ranks_form_a_stage() -> None:
    parallelism = {**UNEVEN, "tensor_parallel_size": 2}
    assert findings(parallelism=parallelism) == []
    ranks = load_site("local").config.ranks_per_node
    assert DescribedLayout.of_run(config(parallelism=parallelism), load_site("local")).topology == Topology(
        tp=2, dp=ranks // 2
    )
    wrong = check_run(config(parallelism={**UNEVEN, "tensor_parallel_size": 3}), load_site("local"))
    assert "tp divides" in [each.rule for each in wrong]


@pytest.mark.parametrize(("fewest", "is_refused"), [(1, False), (2, False), (3, True)])
def test_every_number_of_ranks_must_have_pipelines(fewest: int, is_refused: bool) -> None:
    """With 4 layers, pipelines of 3 stages could not also have 5."""
    found = findings(parallelism={"tensor_parallel_size": 1, **UNEVEN, "pipeline_parallel_size": fewest})
    assert bool(found) == is_refused


@pytest.mark.parametrize(("failures", "is_said"), [(1, False), (99, True)])
def test_an_f_that_cannot_be_kept_is_said(failures: int, is_said: bool) -> None:
    found = findings(survive={"failures": failures})
    assert [(each.severity, each.keys[0]) for each in found] == [("warning", "survive.failures")] * is_said


def test_deepspeed_needs_none_of_it() -> None:
    assert findings(parallelism={"engine": "deepspeed"}) == []
