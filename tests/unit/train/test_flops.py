"""TFLOP/s against the chronicle of BLOOM's preparation."""

from __future__ import annotations

import pytest

from bigsci_launch.train.flops import FlopCounter

# layers, hidden, samples, seconds, GPUs, TFLOPs as reported; s 2048, V 250880, activation checkpointing.
ROWS = [
    (72, 14336, 2048, 123.69, 384, 130.34),
    (72, 14336, 2048, 121.48, 384, 132.71),
    (84, 13824, 2048, 143.89, 384, 121.45),
    (80, 13824, 2048, 147.04, 320, 135.92),
    (96, 12288, 2048, 136.73, 384, 115.73),
    (78, 13824, 2048, 121.28, 384, 133.93),
    (84, 13312, 2048, 129.17, 384, 125.63),
    (6, 14336, 512, 130.43, 8, 143.48),
    (72, 14336, 1568, 113.01, 384, 109.22),
]
BEFORE_THE_FIX = (80, 13824, 2048, 147.43, 320, 130.53)
"""Logged before the formula was corrected: 3.8 % under."""


def counter(layers: int, hidden: int, *, checkpointing: bool = True, ffn: int | None = None) -> FlopCounter:
    return FlopCounter(layers, hidden, ffn or 4 * hidden, 2048, 250880, checkpointing, hidden, 1)


@pytest.mark.parametrize(("layers", "hidden", "samples", "seconds", "gpus", "reported"), ROWS)
def test_reported_rows(layers: int, hidden: int, samples: int, seconds: float, gpus: int, reported: float) -> None:
    computed = counter(layers, hidden).tflops_per_rank(samples, seconds, gpus)
    assert computed == pytest.approx(reported, abs=0.0101)


def test_the_row_before_the_fix_is_known_to_differ() -> None:
    layers, hidden, samples, seconds, gpus, reported = BEFORE_THE_FIX
    assert counter(layers, hidden).tflops_per_rank(samples, seconds, gpus) == pytest.approx(135.55, abs=0.01)
    assert reported == pytest.approx(135.55 / 1.038, abs=0.1)


def test_without_checkpointing_the_layers_have_a_pass_less_and_the_head_has_not() -> None:
    with_it, without = counter(72, 14336), counter(72, 14336, checkpointing=False)
    head = 6 * 8 * 2048 * 14336 * 250880
    assert without.step_flops(8) - head == pytest.approx((with_it.step_flops(8) - head) * 3 / 4)


def test_model_flops_are_six_per_weight_and_token_and_twelve_per_score() -> None:
    """PaLM's count, appendix B: 6 N + 12 L h s per token, where N has the head and neither norms nor biases."""
    layers, h, s, vocabulary = 24, 2048, 2048, 250880
    weights = layers * 12 * h * h + h * vocabulary
    per_token = 6 * weights + 12 * layers * h * s
    for checkpointing in (False, True):
        counted = counter(layers, h, checkpointing=checkpointing)
        assert counted.model_flops(3) == pytest.approx(3 * s * per_token)
        assert counted.utilization(3, 2.0, 4, 100.0) == pytest.approx(3 * s * per_token / (2.0 * 4 * 100e12))


def test_is_the_published_formula() -> None:
    layers, h, s, v, samples = 10, 512, 2048, 250880, 16
    published = 24 * 4 * samples * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert counter(layers, h).step_flops(samples) == pytest.approx(published)


def test_another_mlp_width_counts() -> None:
    assert counter(10, 512, ffn=1024).step_flops(1) < counter(10, 512).step_flops(1)
