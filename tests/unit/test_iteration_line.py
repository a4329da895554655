"""The line of a step, as trainers print it and as it is read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bigsci_launch.iteration_line import IterationLine, parse_iterations
from bigsci_launch.train.steps.log_line import StepResult, format_step

BLOOM = (
    " [default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 | "
    "elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 | "
    "lm loss: 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |"
)
MEGATRON_LM = (
    "[default0]: [2025-05-27 15:23:07] iteration        1/    24000 | consumed samples:          1024 | "
    "elapsed time per iteration (ms): 271607.0 | throughput per GPU (TFLOP/s/GPU): 40.4 | "
    "learning rate: 1.500000E-06 | global batch size:  1024 | lm loss: 1.192634E+01 | loss scale: 1.0 | "
    "grad norm: 5.960 | num zeros: 0.0 | params norm: 238.330 | number of skipped iterations:    0 | "
    "number of nan iterations:    0 |"
)
MEGATRON_DEEPSPEED = (
    " iteration       11/   50000 | consumed samples:         5632 | consumed tokens:     11534336 | "
    "elapsed time per iteration (ms): 52728.1 | learning rate: 1.499E-05 | global batch size:   512 | "
    "lm loss: 1.376514E+01 | loss scale: 65536.0 | grad norm: 459.628 | actual seqlen:  2048 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 9.710 | TFLOPs: 167.52 |"
)
AVERAGED = " iteration        3/      10 | elapsed time per iteration (ms): 4000.5/3900.1 | lm loss: NAN |"
SKIPPED = " iteration        4/      10 | global batch size:     8 | number of skipped iterations:   1 |"
OURS = StepResult(
    step=805,
    num_steps=115311,
    consumed_samples=154560,
    sequence_length=2048,
    learning_rate=5.065e-05,
    global_batch_size=192,
    micro_batch_size=2,
    loss=4.531072,
    grad_norm=1.0213,
    num_skipped=0,
    num_nan=0,
    seconds=13.19,
    tflops=110.478,
    utilization=0.354,
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (BLOOM, IterationLine(12695, 2.463556, 105.22, 2048)),
        (MEGATRON_LM, IterationLine(1, 11.92634, 271.607, 1024)),
        (MEGATRON_DEEPSPEED, IterationLine(11, 13.76514, 52.7281, 512)),
        (format_step(OURS), IterationLine(805, 4.531072, 13.19, 192)),
        (format_step(replace(OURS, loss_scale=65536.0)), IterationLine(805, 4.531072, 13.19, 192)),
        (SKIPPED, IterationLine(4, None, None, 8)),
    ],
    ids=["bigscience", "Megatron-LM", "Megatron-DeepSpeed", "bsl train", "bsl train in fp16", "skipped"],
)
def test_every_trainers_line_is_read(line: str, expected: IterationLine) -> None:
    assert list(parse_iterations(line)) == [expected]


def test_a_loss_may_be_no_number() -> None:
    (found,) = parse_iterations(AVERAGED)
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert found.seconds == 4.0005


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_told_apart_whatever_ends_them(end: str) -> None:
    text = end.join(["time (ms)", BLOOM, "[rank 3] noise about iteration 7", SKIPPED, MEGATRON_LM])
    assert [(line.step, line.loss) for line in parse_iterations(text)] == [(12695, 2.463556), (4, None), (1, 11.92634)]


def test_a_value_that_is_none_is_left_out() -> None:
    assert list(parse_iterations("iteration 1/ 2 | lm loss: soon | elapsed time per iteration (s): 1.2.3 |")) == [
        IterationLine(1, None, None, None)
    ]
