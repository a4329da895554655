"""The search: its plans are legal by independent checks, ranked, and found quickly."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.check import check_run
from bigsci_launch.config.load import resolve_run
from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.config.rules.table import LAYOUT_RULES
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.technique import Framework
from bigsci_launch.config.site import Site, load_site
from bigsci_launch.plan.choose.answer import Answer, find_plans, request_plans
from bigsci_launch.plan.choose.screen import METHODS, axes_of, micro_batches
from bigsci_launch.plan.choose.search import Plan, SearchResult, search, with_free_heads, with_free_layers
from bigsci_launch.plan.price.balance import PRICED_METHODS, settle_method
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND, Calibration, calibration_of, expected_on
from bigsci_launch.plan.price.hardware import A100
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.ramp import phases_of
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology

from ..conftest import changed

pytestmark = pytest.mark.slow


def found(config: RunConfig, site: Site, nodes: str | None = None) -> Answer:
    return find_plans(request_plans(config, site, calibration_of(site), nodes=nodes), free=None)


def every(result: SearchResult) -> list[Plan]:
    return [*result.plans, *result.doubtful, *result.out_of_memory]


def run_of(base: RunConfig, setup: Setup) -> RunConfig:
    """Return the run file that a setup describes."""
    axes = setup.topology
    config = changed(
        base,
        "parallelism",
        tensor_parallel_size=axes.tp,
        pipeline_parallel_size=axes.pp,
        data_parallel_size=axes.dp,
        partition_method=setup.partition_method,
    )
    config = changed(config, "slurm", nodes=setup.num_nodes)
    return changed(config, "training", micro_batch_size=setup.micro_batch_size)


def independently_legal(config: RunConfig, site: Site, setup: Setup) -> list[str]:
    """Return what is wrong with a setup by config.check, and by an independent count of layers."""
    wrong = [finding.text for finding in check_run(run_of(config, setup), site) if finding.severity == "error"]
    layers = setup.layers_per_stage
    if min(layers) < 1 or sum(layers) != setup.shape.num_layers or len(layers) != setup.topology.pp:
        wrong.append(f"stages {layers}")
    return wrong


def test_every_plan_of_bloom_is_legal_by_the_checks_of_run_files(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    answer = found(config, site, nodes="40:48")
    assert answer.result is not None
    plans = every(answer.result)
    assert len(plans) > 50
    for plan in plans:
        assert not independently_legal(config, site, plan.setup), plan.setup


@given(
    st.integers(1, 6),
    st.integers(1, 24),
    st.sampled_from([1, 2, 3, 4, 8, 12]),
    st.sampled_from([16, 48, 64, 96]),
    st.integers(1, 200),
)
def test_every_plan_of_any_model_is_legal(nodes: int, layers: int, heads: int, hidden: int, batch: int) -> None:
    site = load_site("jean-zay-a100-2022")
    config, _, _ = resolve_run(Path(__file__).parents[4] / "configs/bloom-176b-2022.yaml")
    config = changed(config, "model", num_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    config = changed(config, "training", global_batch_size=batch, rampup=None)
    shape = ModelShape.of_config(config)
    base = Setup(shape, Topology(tp=1, pp=1, dp=8 * nodes), 1, batch, 8, "type:transformer|embedding")
    result = search([base], [nodes], Limits(48), Calibration(), per_parameter=False)
    for plan in every(result):
        assert plan.setup.num_nodes == nodes
        assert not independently_legal(config, site, plan.setup), plan.setup
    names = {rule.name for rule in LAYOUT_RULES}
    assert {entry.rule.name for entry in result.refused} <= names


def one_by_one(base: Setup, nodes: int, limits: Limits) -> tuple[dict[str, int], set[tuple[object, ...]]]:
    """Ask every rule about every setup, as the search does not: refusals by rule, and the legal layouts."""
    refused: Counter[str] = Counter()
    legal = set()
    ep = base.topology["ep"]
    for tp, pp, dp in axes_of(nodes * base.ranks_per_node // ep):
        for size in (size for size in micro_batches(base) if size == 1 or size * dp * ep <= base.global_batch_size):
            for method in list(dict.fromkeys((base.partition_method, *METHODS, *PRICED_METHODS)))[
                : 99 if pp > 1 else 1
            ]:
                if method in PRICED_METHODS and base.shape.num_layers < pp:
                    continue
                topology = Topology(tp=tp, pp=pp, dp=dp, ep=ep)
                setup = replace(base, topology=topology, micro_batch_size=size, partition_method=method)
                setup = settle_method(setup, Calibration())
                broken = next((rule.name for rule in LAYOUT_RULES if rule.check(setup, limits)), None)
                if broken:
                    refused[broken] += 1
                else:
                    legal.add((topology, size, setup.layers_per_stage))
    return dict(refused), legal


@pytest.mark.parametrize(
    ("nodes", "change"),
    [
        (6, {}),
        (5, {"partition_method": "uniform", "global_batch_size": 120, "micro_batch_size": 3}),
        (4, {"shape": ModelShape(7, 14336, 112, 57344, 2048, 250680, num_key_value_heads=4)}),
        (12, {"partition_method": "type:mamba"}),
        (6, {"topology": Topology(tp=1, pp=1, dp=16, ep=3), "global_batch_size": 192}),
    ],
)
def test_what_is_counted_is_what_every_rule_says_of_every_setup(
    bloom: Setup, nodes: int, change: dict[str, object]
) -> None:
    base = replace(bloom, **change)  # type: ignore[arg-type]
    limits = Limits(11, (96,))
    refused, legal = one_by_one(base, nodes, limits)
    result = search([base], [nodes], limits, Calibration(), per_parameter=False)
    assert {entry.rule.name: entry.count for entry in result.refused} == refused
    plans = [plan.setup for plan in every(result)]
    assert len(plans) == len(legal)
    assert {(setup.topology, setup.micro_batch_size, setup.layers_per_stage) for setup in plans} == legal
    for entry in result.refused:
        first = next(found for rule in LAYOUT_RULES if (found := rule.finding(entry.setup, limits)))
        assert (first.rule, first.text) == (entry.rule.name, entry.example)


def test_context_and_expert_parallelism_stay_as_configured(bloom: Setup) -> None:
    base = replace(bloom, framework="megatron", topology=Topology(tp=4, cp=2, ep=2, pp=2, dp=6))
    result = search([base], [24], Limits(), Calibration(), per_parameter=False)
    plans = [plan.setup for plan in every(result)]
    assert len({setup.topology for setup in plans}) > 3
    for setup in plans:
        assert (setup.topology["cp"], setup.topology["ep"], setup.topology.world_size) == (2, 2, 192)
        assert setup.global_batch_size % (setup.micro_batch_size * 2 * setup.topology.dp) == 0


def test_the_search_reports_its_progress(bloom: Setup) -> None:
    reported: list[int] = []
    search(
        [bloom, replace(bloom, shape=replace(bloom.shape, num_layers=71))],
        range(44, 49),
        Limits(),
        Calibration(),
        per_parameter=True,
        report_progress=lambda percent, text="": reported.append(percent),
    )
    assert reported == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_layouts_of_half_a_thousand_node_counts_are_counted_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 of the counts from 512 to 1024, of a 405B model; when all layouts were made, one took 4 seconds."""
    shape = ModelShape(
        126, 16384, 128, 53248, 8192, 128256, positions="rotary", tied_embeddings=False, num_key_value_heads=8
    )
    base = Setup(shape, Topology(tp=8, pp=16, dp=64), 1, 2048, 8, METHODS[0])
    made, make = Counter[str](), Setup.__init__

    def count(setup: Setup, *arguments: Any, **more: Any) -> None:
        made["setups"] += 1
        make(setup, *arguments, **more)

    monkeypatch.setattr(Setup, "__init__", count)
    result = search([base], range(512, 1025, 16), Limits(), Calibration(), per_parameter=False)
    refused = sum(entry.count for entry in result.refused)
    assert refused > 100_000
    assert made["setups"] < refused / 5


def test_it_finds_what_the_team_found(bloom_run: tuple[RunConfig, Site]) -> None:
    """tp 4, pp 12, dp 8, micro batch 2, with the embeddings as slots: two weeks of measuring, for BLOOM's engineers."""
    config, site = bloom_run
    answer = found(config, site)
    assert answer.result is not None
    best = answer.result.plans[0]
    assert (best.setup.topology, best.setup.micro_batch_size) == (Topology(tp=4, pp=12, dp=8), 2)
    assert best.setup.layers_per_stage == (5, *(6,) * 10, 5)
    # The run's own log says 105 s and about 150 TFLOP/s.
    assert best.price.seconds == pytest.approx(105, rel=0.03)


def test_it_does_not_need_the_answer_to_find_it(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    config = changed(config, "parallelism", tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=None)
    config = changed(config, "training", micro_batch_size=1)
    answer = found(config, site)
    assert answer.request.refusal is not None
    assert answer.result is not None
    best = answer.result.plans[0].setup
    assert (best.topology, best.micro_batch_size) == (Topology(tp=4, pp=12, dp=8), 2)


def test_plans_come_in_the_order_of_the_days_that_most_keep(bloom: Setup, jean_zay: Calibration) -> None:
    result = search([bloom], [48], Limits(), jean_zay, per_parameter=False)
    days = [plan.likely_days for plan in result.plans]
    assert days == sorted(days)
    assert {plan.price.fit for plan in result.plans} <= {"fits", "tight"}
    assert {plan.price.fit for plan in result.out_of_memory} == {"does not fit"}


def test_what_is_doubtful_is_listed_after_the_plans_and_never_first(
    bloom: Setup, bloom_run: tuple[RunConfig, Site]
) -> None:
    """A GPU that has a little less than the fastest plan needs: its price is unchanged, and it is no longer ranked."""
    base = replace(bloom, framework="megatron", technique=Technique(kernels="compiled"))
    phases = phases_of(bloom_run[0].training)
    whole = search([base], [48], Limits(), expected_on(A100), phases=phases, per_parameter=False)
    best = whole.plans[0]
    smaller = replace(A100, memory_gib=best.price.need_gib / 1.04)
    result = search([base], [48], Limits(), expected_on(smaller), phases=phases, per_parameter=False)
    assert best.setup in [plan.setup for plan in result.doubtful]
    assert all(plan.price.need_gib <= smaller.memory_gib for plan in result.plans)
    listed = result.listed(2)
    assert listed[:2] == result.plans[:2]
    assert best.setup in [plan.setup for plan in listed[2:]]


def test_uncalibrated_plans_have_the_widest_band(bloom: Setup) -> None:
    result = search([bloom], [48], Limits(), Calibration(), per_parameter=False)
    assert {plan.price.band for plan in result.plans} == {UNCALIBRATED_BAND}


def test_every_topology_once() -> None:
    found = list(axes_of(384))
    assert len(found) == len(set(found)) == 108  # 384 = 2^7 x 3: C(9, 2) x C(3, 2)
    assert {math.prod(sizes) for sizes in found} == {384}


def test_free_layers_and_heads_stay_near(bloom: Setup) -> None:
    assert [setup.shape.num_layers for setup in with_free_layers(bloom)] == list(range(64, 77))
    heads = [setup.shape.num_attention_heads for setup in with_free_heads(bloom)]
    assert heads == [56, 64, 112, 128, 224]


def test_the_whole_search_on_48_nodes_takes_less_than_a_processor_second(bloom: Setup, jean_zay: Calibration) -> None:
    """The fastest of three runs counts, so that other work on the machine does not matter."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        search([replace(bloom, micro_batch_size=1)], [48], Limits(), jean_zay, per_parameter=False)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 1


def test_cuts_by_price_are_among_the_plans_where_they_differ(bloom_run: tuple[RunConfig, Site]) -> None:
    """A cut by price is computed for each topology, even if the run file names one for its own topology."""
    config, site = bloom_run
    config = changed(changed(config, "run", command=None, framework=None), "training", attention="fused")
    once = found(config, site)
    settled = changed(config, "parallelism", partition_method="time:5,6,6,6,6,6,6,6,6,6,6,5")
    again = found(settled, site)
    for answer in (once, again):
        assert answer.result is not None
        plans = every(answer.result)
        names = {plan.setup.partition_method.split(":")[0] for plan in plans}
        assert "memory" in names
        priced = [plan.setup for plan in plans if plan.setup.partition_method.startswith(("time:", "memory:"))]
        assert all(sum(setup.layers_per_stage) == setup.shape.num_layers for setup in priced)
        assert len({setup.topology.pp for setup in priced}) > 1
    assert again.configured is not None and again.configured.setup.layers_per_stage == (5, *(6,) * 10, 5)


@pytest.mark.parametrize(
    ("framework", "layers", "stages"),
    [
        ("megatron", 70, {(14,) * 5, (10,) * 7, (7,) * 10}),
        ("torchtitan", 78, {(15, 16, 16, 16, 15), (7, *(8,) * 8, 7), (11, 12, 12, 11, 11, 11, 10)}),
    ],
)
def test_another_framework_gets_its_own_cut_only(
    bloom: Setup, framework: Framework, layers: int, stages: set[tuple[int, ...]]
) -> None:
    base = replace(bloom, framework=framework, shape=replace(bloom.shape, num_layers=layers))
    result = search([base], [40, 56], Limits(), Calibration(), per_parameter=False)
    found = {plan.setup.layers_per_stage for plan in every(result)}
    assert found >= stages
    assert len(found) == len({len(each) for each in found})


def test_another_program_gets_no_cut_by_price(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    another = changed(config, "run", command=["python", "pretrain_gpt.py"], framework="deepspeed")
    answer = found(another, site)
    assert answer.result is not None
    assert all(plan.setup.partition_method.startswith(("type:", "parameters")) for plan in answer.result.plans)
