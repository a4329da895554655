"""A loss: every node that is left is used exactly once, and what no copy is left of is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.survive.loss import Loss, plan_loss
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.survival import Survival, plan_survival

NODES = [f"node{index}" for index in range(1, 49)]


@pytest.fixture(scope="module")
def toy(toy_replica: Callable[..., Replica]) -> Survival:
    """8 layers, f = 1, n0 = 3 on 12 nodes."""
    return plan_survival(toy_replica(1), 12)


def require_sound(survival: Survival, nodes: list[str], loss: Loss) -> None:
    used = [node for pipeline in loss.after for node in pipeline]
    assert sorted([*used, *loss.idle]) == sorted({*nodes} - {*loss.lost})
    assert tuple(sorted(map(len, loss.after))) == loss.composition.sizes
    assert sum(loss.composition.micro_batches) == survival.replica.num_micro_batches
    assert min(loss.composition.micro_batches) >= 1
    assert loss.seconds >= loss.composition.seconds
    assert loss.failures_left == min(survival.failures, len(loss.after) - 1)
    num_left = len(nodes) - len(loss.lost)
    if num_left >= survival.guaranteed_nodes:
        assert loss.failures_left == survival.failures
    for phase in (loss.transfer.now, loss.transfer.afterwards):
        assert not {node for link in phase.links for node in link} & {*loss.lost}
    # Memory: a pipeline is of a template that fits with so many replicas, on the nodes of its size.
    fits = [tier for tier in survival.tiers if tier.replicas <= len(loss.after)]
    assert any({*loss.composition.sizes} <= {*tier.templates} for tier in fits)


@pytest.mark.slow
@pytest.mark.parametrize("failures", range(4))
def test_bloom_loses_any_nodes(bloom_plan: Callable[[int], Survival], failures: int) -> None:
    survival = bloom_plan(failures)
    rng = random.Random(failures)
    for lost in (["node3", "node7"], *(rng.sample(NODES, count) for count in (1, 3, 8, 20, 28, 33, 38))):
        loss = plan_loss(survival, NODES, lost)
        require_sound(survival, NODES, loss)
        if len(lost) <= failures:
            assert not loss.transfer.lost


def test_every_pair_and_triple_of_a_toy(toy: Survival) -> None:
    for count in (1, 2, 3):
        for lost in combinations(NODES[:12], count):
            require_sound(toy, NODES[:12], plan_loss(toy, NODES[:12], lost))


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_few_micro_batches_survive_any_loss(toy_replica: Callable[..., Replica], batch: int) -> None:
    survival = plan_survival(toy_replica(1, batch=batch), 13)
    rng = random.Random(batch)
    for count in range(1, 14 - min(survival.by_nodes)):
        for _ in range(6):
            lost = rng.sample(NODES[:13], count)
            require_sound(survival, NODES[:13], plan_loss(survival, NODES[:13], lost))


def test_losses_from_every_number_of_nodes(toy: Survival) -> None:
    """Also from numbers at which some nodes were idle before, and some of those are lost."""
    rng = random.Random(5)
    for number in toy.by_nodes:
        nodes = NODES[:number]
        for count in range(1, number - min(toy.by_nodes) + 1):
            lost = rng.sample(nodes, count)
            require_sound(toy, nodes, plan_loss(toy, nodes, lost))
            require_sound(toy, nodes, plan_loss(toy, nodes, nodes[-count:]))


def test_nothing_lost_changes_nothing(toy: Survival) -> None:
    loss = plan_loss(toy, NODES[:12], [])
    assert loss.before == loss.after
    assert loss.transfer.now.num_bytes == loss.transfer.afterwards.num_bytes == 0
    assert loss.seconds == pytest.approx(loss.seconds_before)


def test_a_node_named_twice_is_lost_once(toy: Survival) -> None:
    twice = plan_loss(toy, NODES[:12], ["node3", "node3"])
    assert twice == plan_loss(toy, NODES[:12], ["node3"])
    assert twice.lost == ("node3",)


def test_an_unknown_node_is_named(toy: Survival) -> None:
    with pytest.raises(ConfigError, match="--lose node13: ") as caught:
        plan_loss(toy, NODES[:12], ["node3", "node13"])
    assert caught.value.hint == "its nodes: node1 to node12, 12"


def test_more_nodes_than_planned_are_refused(toy: Survival) -> None:
    with pytest.raises(ConfigError, match="13 nodes"):
        plan_loss(toy, NODES[:13], ["node3"])


def test_f_falls_and_then_the_run_stops(bloom_plan: Callable[[int], Survival]) -> None:
    survival = bloom_plan(1)
    assert plan_loss(survival, NODES, NODES[14:]).failures_left == 1
    assert plan_loss(survival, NODES, NODES[13:]).failures_left == 0
    assert plan_loss(survival, NODES, NODES[10:]).failures_left == 0
    with pytest.raises(ConfigError, match=r"9 nodes .* 10"):
        plan_loss(survival, NODES, NODES[9:])


def test_two_buddies_lose_the_state_that_only_they_had(bloom_plan: Callable[[int], Survival]) -> None:
    survival = bloom_plan(1)
    # Node i of pipeline j and node i of pipeline j + 1 have the two copies of a shard.
    loss = plan_loss(survival, NODES, ["node2", "node8"])
    assert {part.kind for part in loss.transfer.lost} == {"state"}
    layers = survival.by_nodes[48].tier.templates[6].counts[2:4]
    first = sum(survival.by_nodes[48].tier.templates[6].counts[:2])
    assert [part.unit for part in loss.transfer.lost] == [f"layer {n}" for n in range(first, first + sum(layers))]
    assert all(part.share == pytest.approx(1 / 8) for part in loss.transfer.lost)
    assert not plan_loss(survival, NODES, ["node2", "node9"]).transfer.lost
    assert not plan_loss(survival, NODES, ["node2", "node14"]).transfer.lost
    # With f = 2 every shard has a third copy.
    assert not plan_loss(bloom_plan(2), NODES, ["node2", "node8"]).transfer.lost
    # The same nodes of all pipelines take the weights too.
    every = plan_loss(survival, NODES, NODES[1::6])
    assert {part.kind for part in every.transfer.lost} == {"weights", "state"}


def test_seconds_are_bytes_over_the_rate_of_the_busiest_node(toy: Survival) -> None:
    loss = plan_loss(toy, NODES[:12], ["node1"])
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for (source, target), count in loss.transfer.now.links.items():
        sent[source] = sent.get(source, 0) + count
        received[target] = received.get(target, 0) + count
    rate = toy.replica.calibration.constants.network_gb_per_s * 1e9
    assert loss.transfer_seconds == pytest.approx(max(*sent.values(), *received.values()) / rate)
    assert loss.transfer_seconds > 0


def test_pipelines_too_few_for_their_shards_are_not_formed(bloom_plan: Callable[[int], Survival]) -> None:
    """Three replicas fit 6 nodes each, two do not: 17 nodes must not become two pipelines of 6."""
    plan = bloom_plan(1)
    one, two, three = plan.tiers
    survival = replace(plan, tiers=(one, two.with_sizes([10]), three.with_sizes([6])))
    for num_left in (15, 16, 17):
        assert plan_loss(survival, NODES, NODES[num_left:]).composition.sizes != (6, 6)
    assert plan_loss(survival, NODES, NODES[18:]).composition.sizes == (6, 6, 6)
