"""Memory of a rank: the need, what the allocator adds, and when it is too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.plan.price.constants import PRIOR
from bigsci_launch.plan.price.hardware import A100
from bigsci_launch.plan.price.memory import (
    MemoryTerms,
    count_memory,
    judge_fit,
    predict_stage_memory,
    weigh_memory,
)
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology


def need(setup: Setup, stage: int = 0) -> float:
    return predict_stage_memory(setup, stage, PRIOR, A100).need_gib


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 6, 12]), st.integers(1, 8), st.integers(1, 8))
def test_more_nodes_never_need_more_memory(tp: int, pp: int, dp: int, more: int) -> None:
    """With ZeRO-1, more replicas shard the optimizer state. Nothing else changes if the micro batches are the same;
    with the same batch, fewer micro batches are in flight."""
    shape = ModelShape(24, 2048, 16, 8192, 1024, 50257)
    batch = dp * (dp + more) * 8
    few = Setup(shape, Topology(tp=tp, pp=pp, dp=dp), 1, batch, 8, "type:transformer")
    many = replace(few, topology=Topology(tp=tp, pp=pp, dp=dp + more))
    for stage in (0, pp - 1):
        assert need(many, stage) <= need(few, stage)


def test_unsharded_optimizer_state_is_not_shared_out(bloom: Setup) -> None:
    assert need(replace(bloom, technique=replace(bloom.technique, zero_stage=0))) > need(bloom) + 30


def test_the_first_stage_keeps_most_micro_batches(bloom: Setup) -> None:
    middle = [count_memory(bloom, stage).kept_gib for stage in range(1, 11)]
    assert middle == sorted(middle, reverse=True)
    assert count_memory(bloom, 11).kept_gib == count_memory(bloom, 10).kept_gib / 2 * 5 / 6


def test_a_gate_and_shared_keys_change_what_a_layer_keeps(bloom: Setup) -> None:
    """Per token in 16 bits: 8 bytes of an output of the MLP instead of 4, and 4 of each element of a key head."""
    kept = replace(bloom, technique=Technique("unfused"))
    shape, tp = kept.shape, kept.topology.tp
    gated = replace(kept, shape=replace(shape, activation="swiglu"))
    grouped = replace(kept, shape=replace(shape, num_key_value_heads=shape.num_attention_heads // 4))
    h, ffn = shape.hidden_size, shape.ffn_hidden_size
    layers = min(kept.num_micro_batches, kept.topology.pp) * kept.layers_per_stage[0]
    per_byte = layers * kept.tokens_per_micro_batch / tp / 2**30
    before = count_memory(kept, 0).kept_gib
    assert count_memory(gated, 0).kept_gib - before == pytest.approx(4 * ffn * per_byte)
    assert before - count_memory(grouped, 0).kept_gib == pytest.approx(3 * h * per_byte)


def test_without_recomputation_activations_fill_the_gpu(bloom: Setup) -> None:
    everything = replace(bloom, technique=Technique("unfused"))
    assert judge_fit(bloom, need(bloom), A100, is_known=True) == "fits"
    assert judge_fit(everything, need(everything), A100, is_known=False) == "does not fit"


@pytest.mark.parametrize(
    ("share", "known", "guessed"),
    [
        (0.80, "fits", "fits"),
        (0.92, "fits", "tight"),
        (0.96, "tight", "tight"),
        (1.01, "doubtful", "doubtful"),
        (1.05, "does not fit", "doubtful"),
        (1.20, "does not fit", "does not fit"),
    ],
)
def test_the_word_depends_on_how_well_the_need_is_known(bloom: Setup, share: float, known: str, guessed: str) -> None:
    other = replace(bloom, framework="deepspeed")
    assert judge_fit(other, share * A100.memory_gib, A100, is_known=True) == known
    assert judge_fit(other, share * A100.memory_gib, A100, is_known=False) == guessed


def test_freed_blocks_go_back_when_memory_gets_short() -> None:
    roomy, full = MemoryTerms(10, 1, 20, 1), MemoryTerms(46, 1, 20, 1)
    need_gib, shown = weigh_memory(roomy, PRIOR, A100)
    assert shown - need_gib == pytest.approx((PRIOR.activation_factor - 1) * 20)
    need_gib, shown = weigh_memory(full, PRIOR, A100)
    assert need_gib > 0.97 * A100.memory_gib
    assert shown == need_gib


def test_gathered_inputs_are_kept_while_there_is_memory(bloom: Setup) -> None:
    technique = Technique(sequence_parallel=True, overlap=frozenset(("tensor",)))
    eager = replace(bloom, framework="other", topology=Topology(tp=8, pp=1, dp=8), technique=technique)
    terms = count_memory(eager, 0)
    both = 2 * 2 * 70 * 2 * 2048 * 14336 * 7 / 8
    assert terms.gathered_gib == pytest.approx(both / 2**30)
    roomy = replace(terms, resident_gib=1.0, optimizer_gib_per_byte=0.0, kept_gib=1.0)
    need_gib, shown = weigh_memory(roomy, PRIOR, A100)
    assert need_gib == weigh_memory(replace(roomy, gathered_gib=0.0), PRIOR, A100)[0]
    assert shown - need_gib > terms.gathered_gib
    pipelined = replace(eager, topology=Topology(tp=8, pp=2, dp=4))
    assert not count_memory(pipelined, 0).gathered_gib
    assert not count_memory(replace(eager, technique=replace(technique, kernels="compiled")), 0).gathered_gib
