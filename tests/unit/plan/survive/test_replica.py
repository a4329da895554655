"""What pipelines need and take: the same prices and the same rule of memory as `bsl plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bigsci_launch.errors import ConfigError
from bigsci_launch.plan.price.memory import count_memory, judge_fit, weigh_memory
from bigsci_launch.plan.price.price import price_setup, price_stage_memory
from bigsci_launch.plan.shape.parameters import count_stage_parameters
from bigsci_launch.plan.shape.setup import Technique
from bigsci_launch.plan.survive.replica import Replica
from bigsci_launch.plan.survive.templates import Template
from bigsci_launch.topology import Topology


def is_too_much(replica: Replica, stage: int, num_stages: int, num_layers: int) -> bool:
    """Return whether a stage runs out of memory, as `bsl plan` decides it for f + 1 replicas."""
    topology = Topology(tp=replica.setup.topology.tp, pp=num_stages, dp=replica.fewest_replicas)
    found = replica.calibration
    terms = count_memory(replace(replica.setup, topology=topology), stage, num_layers)
    need, _ = weigh_memory(terms, found.constants, found.gpu)
    is_known = found.knows_need_of(replica.setup)
    fit = judge_fit(replica.setup, need, found.gpu, is_known=is_known)
    return fit == "does not fit" or (fit == "doubtful" and not is_known)


@pytest.mark.parametrize(("pp", "dp"), [(12, 8), (12, 4), (24, 4), (12, 16), (8, 16)])
def test_even_layouts_cost_what_plan_says(bloom_replica: Replica, pp: int, dp: int) -> None:
    setup = replace(bloom_replica.setup, topology=Topology(tp=4, pp=pp, dp=dp))
    replica = replace(bloom_replica, setup=setup)
    template = Template(1, setup.layers_per_stage, replica.cut_model)
    seconds = template.seconds(setup.num_micro_batches) + replica.once_per_step(pp, dp)
    assert seconds == pytest.approx(price_setup(setup, replica.calibration).seconds, rel=0.01)
    assert replica.whole_seconds(dp) == pytest.approx(seconds)


def test_without_messages_and_bubbles_the_price_is_exact(bloom_replica: Replica) -> None:
    setup = replace(bloom_replica.setup, topology=Topology(tp=4, pp=1, dp=1))
    replica = replace(bloom_replica, setup=setup)
    assert replica.whole_seconds(1) is None, "176B on one stage"
    seconds = Template(1, (70,), replica.cut_model).seconds(1024) + replica.once_per_step(1, 1)
    assert seconds == pytest.approx(price_setup(setup, replica.calibration).seconds, rel=1e-9)


def test_the_need_is_that_of_plan(bloom_replica: Replica) -> None:
    setup = replace(bloom_replica.setup, topology=Topology(tp=4, pp=12, dp=2))
    needs = [price_stage_memory(setup, stage, bloom_replica.calibration).need_gib for stage in range(12)]
    assert bloom_replica.need_gib(setup.layers_per_stage) == pytest.approx(max(needs))


def test_fewer_replicas_need_more_nodes(bloom_replica: Replica) -> None:
    assert [bloom_replica.with_replicas(count).fewest_nodes for count in (1, 2, 3, 4, 8)] == [10, 7, 5, 5, 4]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_templates_fit_and_one_layer_or_node_beyond_does_not(bloom_replica: Replica, replicas: int) -> None:
    replica = bloom_replica.with_replicas(replicas)
    fewest = replica.fewest_nodes
    assert fewest is not None
    assert replica.template(fewest - 1) is None
    for size in (fewest, fewest + 1, fewest + 3):
        template = replica.template(size)
        assert template is not None
        assert (len(template.counts), sum(template.counts)) == (2 * size, 70)
        assert not any(is_too_much(replica, stage, 2 * size, n) for stage, n in enumerate(template.counts))
    num_stages = 2 * (fewest - 1)
    most = [
        next(count for count in range(70, -1, -1) if count == 0 or not is_too_much(replica, stage, num_stages, count))
        for stage in range(num_stages)
    ]
    assert sum(most) < 70, "one node fewer holds the model after all"


def test_a_stage_takes_as_many_layers_as_fit(bloom_replica: Replica) -> None:
    """The limits of the cut are tight: one layer more on any stage does not fit."""
    for stage in range(14):
        most = bloom_replica.cut_model.most_layers(stage, 14)
        assert not is_too_much(bloom_replica, stage, 14, most)
        assert is_too_much(bloom_replica, stage, 14, most + 1)


def test_uneven_pipelines_keep_more_micro_batches_than_even_ones(toy_replica: Callable[..., Replica]) -> None:
    """12 micro batches may be split 1 and 11: a stage may keep 11 of them, not 6."""
    replica = replace(toy_replica(batch=12), setup=replace(toy_replica(batch=12).setup, technique=Technique("unfused")))
    even = replace(replica.setup, topology=Topology(tp=2, pp=16, dp=2))
    uneven = replace(even, global_batch_size=22)
    needs = []
    for setup in (even, uneven):
        terms = count_memory(setup, 0, 3)
        needs.append(weigh_memory(terms, replica.calibration.constants, replica.calibration.gpu)[0])
    assert needs[0] < needs[1]
    assert replica.need_gib((3,) * 16) == pytest.approx(needs[1])
    # Whole replicas share them evenly.
    whole = replace(replica, setup=even)
    between = replace(whole.calibration, gpu=replace(whole.calibration.gpu, memory_gib=sum(needs) / 2))
    assert replace(whole, calibration=between).whole_seconds(2) is not None
    assert replace(whole, calibration=between).cut_model.most_layers(0, 16) < 3


def test_host_memory_raises_n0(bloom_replica: Replica) -> None:
    state = 12 * 4 * sum(count_stage_parameters(bloom_replica.setup.shape, 4, (70,)))
    assert bloom_replica.host_gib(7) == pytest.approx(state / 7 / 2**30, rel=0.01)
    assert replace(bloom_replica, node_memory_gib=300.0).fewest_nodes == 7
    small = replace(bloom_replica, node_memory_gib=200.0)
    assert small.fewest_nodes == 10
    assert small.host_gib(10) <= 200 < small.host_gib(9)
    assert small.template(9) is None
    assert small.template(10) is not None
    # No pipeline has more nodes than the model has layers for.
    assert replace(bloom_replica, node_memory_gib=50.0).fewest_nodes is None


def test_bytes_are_those_of_every_parameter(bloom_replica: Replica) -> None:
    model = bloom_replica.model_bytes
    whole = 4 * sum(count_stage_parameters(bloom_replica.setup.shape, 4, (70,)))
    assert sum(unit.weights for unit in model.units) == pytest.approx(2 * whole, rel=1e-3)
    assert sum(unit.state for unit in model.units) == 6 * sum(unit.weights for unit in model.units)
    assert model.tied
    untied = replace(bloom_replica.setup, shape=replace(bloom_replica.setup.shape, tied_embeddings=False))
    other = replace(bloom_replica, setup=untied).model_bytes
    assert not other.tied
    assert other.embedding == model.embedding
    assert other.head.weights - model.head.weights == 2 * 250880 * 14336


def test_a_stage_must_not_span_nodes(bloom_replica: Replica) -> None:
    for tp in (16, 3):
        setup = replace(bloom_replica.setup, topology=Topology(tp=tp, pp=4, dp=1))
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size: {tp} ranks .* 8 ranks of a node"):
            replace(bloom_replica, setup=setup)


def test_a_model_with_fewer_layers_than_a_node_has_stages_fits_no_node(bloom_replica: Replica) -> None:
    shape = replace(bloom_replica.setup.shape, num_layers=1)
    tiny = replace(bloom_replica, setup=replace(bloom_replica.setup, shape=shape))
    assert (tiny.most_nodes, tiny.fewest_nodes, tiny.template(1)) == (0, None, None)


def test_the_more_replicas_the_less_host_memory_each_needs(bloom_replica: Replica) -> None:
    one_state = bloom_replica.num_state_bytes / 7 / 2**30
    assert bloom_replica.host_gib(7) == pytest.approx(one_state), "f 1, two replicas: a shard and a copy of the other"
    assert bloom_replica.with_replicas(8).host_gib(7) == pytest.approx(one_state / 4)
    assert bloom_replica.with_replicas(1).host_gib(7) == pytest.approx(one_state), "no other replica, no copy"
