"""The time of a step: terms add up, batches count linearly, and measured effects are reproduced."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.price.constants import PRIOR
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.hardware import A100
from bigsci_launch.plan.price.step_time import drift_on, predict_step, step_seconds
from bigsci_launch.plan.price.terms import LAUNCHES, MESSAGES, TERMS, rates_of
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology

NETWORK = TERMS.index("network")


def seconds(setup: Setup) -> float:
    return predict_step(count_work(setup, A100), PRIOR).seconds


def test_terms_and_the_quick_path_agree(bloom: Setup) -> None:
    work = count_work(bloom, A100)
    step = predict_step(work, PRIOR)
    assert sum(step.terms) + work.unexplained_seconds == pytest.approx(step.seconds)
    assert step_seconds(work, rates_of(PRIOR)) == pytest.approx(step.seconds)


def test_priors_alone_are_near_what_bloom_took(bloom: Setup) -> None:
    # 105 s were logged; nothing of the model is fitted here.
    assert 70 < seconds(bloom) < 150


@given(st.integers(1, 40))
def test_time_is_linear_in_micro_batches(factor: int) -> None:
    setup = Setup(ModelShape(24, 2048, 16, 8192, 1024, 50257), Topology(tp=2, pp=4, dp=2), 2, 64, 8, "uniform")
    base, more = predict_step(count_work(setup, A100), PRIOR), seconds(setup.with_batch_size(64 + 4 * factor))
    assert more == pytest.approx(base.seconds + factor * base.micro_batch_seconds)


def test_a_lone_stage_does_not_wait(bloom: Setup) -> None:
    alone = replace(bloom, topology=Topology(tp=8, pp=1, dp=1))
    assert predict_step(count_work(alone, A100), PRIOR).bubble == 0


@pytest.mark.parametrize(("pp", "first", "further"), [(1, 0, 0), (2, 2, 2), (4, 6, 4)])
def test_each_message_between_stages_may_wait(bloom: Setup, pp: int, first: int, further: int) -> None:
    """A micro-batch passes each boundary twice. Of one more, a stage between two others waits for all four messages."""
    setup = replace(bloom, topology=Topology(tp=4, pp=pp, dp=1), micro_batch_size=2, global_batch_size=16)
    waiting = replace(setup, technique=replace(setup.technique, hop_wait=0.5))
    free, slow = (predict_step(count_work(each, A100), PRIOR) for each in (setup, waiting))
    assert slow.seconds - free.seconds == pytest.approx(0.5 * (first + 7 * further))
    assert slow.micro_batch_seconds - free.micro_batch_seconds == pytest.approx(0.5 * further)
    assert slow.terms[MESSAGES] - free.terms[MESSAGES] == pytest.approx(slow.seconds - free.seconds)
    assert step_seconds(count_work(waiting, A100), rates_of(PRIOR)) == pytest.approx(slow.seconds)


def test_the_bubble_is_that_of_the_textbook_where_stages_are_even() -> None:
    setup = Setup(
        ModelShape(96, 12288, 96, 49152, 2048, 51200), Topology(tp=8, pp=8, dp=1), 1, 64, 8, "type:transformer"
    )
    step = predict_step(count_work(setup, A100), PRIOR)
    # The head makes the last stage slower, so the others wait a little less for the pipeline to fill.
    assert step.bubble == pytest.approx(7 / 71, abs=0.01)


def test_head_sizes_that_are_no_multiple_of_8_are_slow(bloom: Setup) -> None:
    def with_heads(heads: int) -> float:
        return seconds(replace(bloom, shape=replace(bloom.shape, hidden_size=13824, num_attention_heads=heads)))

    assert with_heads(128) > 1.2 * with_heads(96)  # 13824 / 128 = 108; a third slower was measured


def test_uneven_stages_wait_for_the_fullest(bloom: Setup) -> None:
    even = replace(bloom, shape=replace(bloom.shape, num_layers=72), partition_method="type:transformer")
    uneven = replace(even, shape=replace(bloom.shape, num_layers=73))
    assert uneven.layers_per_stage.count(7) == 1
    assert seconds(uneven) / seconds(even) > 1 + 1 / 72 + 0.01


def test_recomputation_costs_a_forward_pass(bloom: Setup) -> None:
    assert 1.2 < seconds(bloom) / seconds(replace(bloom, technique=Technique("unfused"))) < 4 / 3


def test_only_replicas_pay_for_gradients(bloom: Setup) -> None:
    alone = replace(bloom, topology=Topology(tp=4, pp=12, dp=1), global_batch_size=256)
    assert count_work(alone, A100).step[NETWORK] == 0
    assert count_work(bloom, A100).step[NETWORK] > 0


def test_drift_counts_from_its_day_on() -> None:
    day = date(2022, 2, 25).toordinal()
    assert drift_on(day - 1, 0.95, day) == 1
    assert drift_on(day, 0.95, day) == 0.95
    assert drift_on(None, 0.95, day) == 0.95
    assert drift_on(day, 0.95, None) == 1


def test_launches_hide_behind_the_work_unless_each_is_waited_for(bloom: Setup) -> None:
    free, blocking = seconds(bloom), seconds(replace(bloom, has_blocking_launches=True))
    assert free < blocking
    tiny = replace(bloom, shape=replace(bloom.shape, hidden_size=448, ffn_hidden_size=1792, num_attention_heads=14))
    tiny = replace(tiny, topology=Topology(tp=2, pp=12, dp=16), micro_batch_size=1)
    # A small model waits for its launches either way.
    assert 1 < seconds(replace(tiny, has_blocking_launches=True)) / seconds(tiny) < 2
    assert predict_step(count_work(tiny, A100), PRIOR).terms[LAUNCHES] > 0.2 * seconds(tiny)
    assert predict_step(count_work(bloom, A100), PRIOR).terms[LAUNCHES] < 0.01 * free
