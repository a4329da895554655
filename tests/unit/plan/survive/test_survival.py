"""The plan for losses: every number of nodes is covered, exactly and never worse than whole replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.survival import Survival, best_on, plan_survival, step_seconds
from bigsci_launch.topology import Topology

pytestmark = pytest.mark.slow

Plans = Callable[[int], Survival]


def require_sound(survival: Survival) -> None:
    """Check what must hold of every plan."""
    replica, need = survival.replica, survival.failures + 1
    assert set(range(survival.guaranteed_nodes, survival.num_nodes + 1)) <= set(survival.by_nodes)
    before = 0.0
    for number, found in sorted(survival.by_nodes.items()):
        composition, templates = found.composition, found.tier.templates
        assert found.num_nodes == number == sum(composition.sizes) + found.num_idle
        assert found.num_idle >= 0
        assert sum(composition.micro_batches) == replica.num_micro_batches
        assert min(composition.micro_batches) >= 1
        assert len(composition.sizes) >= found.tier.replicas
        slowest = max(
            templates[size].seconds(count)
            for size, count in zip(composition.sizes, composition.micro_batches, strict=True)
        )
        assert composition.seconds == slowest
        assert found.seconds == step_seconds(replica, composition)
        if number >= survival.guaranteed_nodes:
            assert len(composition.sizes) >= need
            assert survival.samples_per_second(number) >= before
            before = survival.samples_per_second(number)
            if found.whole_seconds:
                assert found.seconds <= found.whole_seconds * 1.001
    for tier in survival.tiers:
        enough = replica.with_replicas(tier.replicas)
        for size, template in tier.templates.items():
            assert (template.size, len(template.counts)) == (size, size * replica.stages_per_node)
            assert sum(template.counts) == replica.setup.shape.num_layers
            for stage, layers in enumerate(template.counts):
                assert layers <= enough.cut_model.most_layers(stage, len(template.counts))


@pytest.mark.parametrize("failures", range(4))
def test_bloom_on_48_nodes(bloom_plan: Plans, failures: int) -> None:
    survival = bloom_plan(failures)
    require_sound(survival)
    assert survival.guaranteed_nodes == [10, 14, 15, 20][failures]
    assert min(survival.by_nodes) == 10
    assert survival.by_nodes[48].composition.sizes == (6,) * 8


@pytest.mark.parametrize("failures", range(4))
@pytest.mark.parametrize("num_nodes", [12, 13, 20])
def test_a_toy_on_any_number_of_nodes(toy_replica: Callable[..., Replica], failures: int, num_nodes: int) -> None:
    survival = plan_survival(toy_replica(failures), num_nodes)
    require_sound(survival)
    assert survival.tier.fewest_nodes >= 2


@pytest.mark.parametrize("batch", [2, 3, 5, 7])
def test_few_micro_batches_leave_nodes_idle(toy_replica: Callable[..., Replica], batch: int) -> None:
    survival = plan_survival(toy_replica(1, batch=batch), 20)
    require_sound(survival)
    assert all(len(found.composition.sizes) <= batch for found in survival.by_nodes.values())


def test_fewer_micro_batches_than_replicas_are_refused(toy_replica: Callable[..., Replica]) -> None:
    with pytest.raises(ConfigError, match=r"2 micro batches .* 3 replicas"):
        plan_survival(toy_replica(2, batch=2), 20)


def test_the_same_every_time(bloom_replica: Replica, bloom_plan: Plans) -> None:
    again, before = plan_survival(bloom_replica, 48), bloom_plan(1)
    assert again.sizes == before.sizes
    assert again.extra_sizes == before.extra_sizes
    for number, found in before.by_nodes.items():
        assert again.by_nodes[number].composition == found.composition
    assert [{s: t.counts for s, t in tier.templates.items()} for tier in again.tiers] == [
        {s: t.counts for s, t in tier.templates.items()} for tier in before.tiers
    ]


@pytest.mark.parametrize("failures", [1, 3])
def test_the_sufficient_sizes_suffice_without_the_others(bloom_plan: Plans, failures: int) -> None:
    survival = bloom_plan(failures)
    fewest = survival.tier.fewest_nodes
    assert survival.sizes[0] == fewest
    totals = {0}
    every: set[int] = set()
    for count in range(1, 48 // fewest + 1):
        totals = {total + size for total in totals for size in survival.sizes}
        every |= totals if count > failures else set()
    assert set(range(survival.guaranteed_nodes, 49)) <= every


def test_an_extra_template_is_worth_it(bloom_plan: Plans) -> None:
    """Without any one of them the mean throughput above the guarantee falls."""
    survival = bloom_plan(1)

    def mean(left_out: tuple[int, int] | None = None) -> float:
        tiers = [
            tier.with_sizes(size for size in tier.templates if (tier.replicas, size) != left_out)
            for tier in survival.tiers
        ]
        found = [best_on(survival.replica, tiers, number) for number in range(14, 49)]
        return sum(1 / each.seconds for each in found if each)

    assert survival.extra_sizes
    assert all(mean(extra) < mean() * 0.998 for extra in survival.extra_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("failures", [5, 9, 12, 40])
def test_too_many_failures_name_the_f_that_works(bloom_replica: Replica, failures: int) -> None:
    for num_nodes in (20, 9):
        asked = replace(bloom_replica, failures=failures)
        with pytest.raises(ConfigError, match=rf"f={failures}: {num_nodes} nodes do not hold") as caught:
            plan_survival(asked, num_nodes)
        if num_nodes == 9:
            assert caught.value.hint == "more nodes"
            continue
        possible = int(str(caught.value.hint).removeprefix("--survive f=").removesuffix(" is possible"))
        assert possible == 3
        require_sound(plan_survival(replace(bloom_replica, failures=possible), num_nodes))


def test_a_model_that_fits_no_number_of_nodes(bloom_replica: Replica) -> None:
    setup = replace(bloom_replica.setup, shape=replace(bloom_replica.setup.shape, num_layers=1))
    with pytest.raises(ConfigError, match="no number of nodes") as caught:
        plan_survival(replace(bloom_replica, setup=setup), 48)
    assert "tensor_parallel_size" in str(caught.value.hint)


@pytest.mark.parametrize("layers", [1, 2])
def test_tiny_models(toy_replica: Callable[..., Replica], layers: int) -> None:
    replica = toy_replica(1, layers=layers, memory_gib=80.0)
    setup = replace(replica.setup, topology=Topology(tp=2, pp=1, dp=2))
    survival = plan_survival(replace(replica, setup=setup), 4)
    require_sound(survival)
    assert survival.guaranteed_nodes == 2
    assert survival.by_nodes[1].composition.sizes == (1,)


def test_below_the_guarantee_f_falls(bloom_plan: Plans) -> None:
    survival = bloom_plan(3)
    left = {number: survival.failures_left(len(found.composition.sizes)) for number, found in survival.by_nodes.items()}
    assert {left[number] for number in range(20, 49)} == {3}
    assert (left[19], left[15], left[14], left[13], left[10]) == (2, 2, 1, 0, 0)


def test_outside_of_the_plan_nothing_runs_and_nothing_is_faster(bloom_plan: Plans) -> None:
    survival = bloom_plan(1)
    assert survival.samples_per_second(9) == survival.samples_per_second(0) == 0
    assert survival.samples_per_second(60) == survival.samples_per_second(48) == 2048 / survival.by_nodes[48].seconds
    assert survival.whole_samples_per_second(5) == 0
    assert survival.by_nodes[47].num_whole == 7


def test_progress_is_in_percent(toy_replica: Callable[..., Replica]) -> None:
    seen: list[int] = []
    plan_survival(toy_replica(1), 9, report_progress=lambda num_done, text="": seen.append(num_done))
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (9, 100)
