"""The console line, as Megatron's parsers read it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bigsci_launch.train.steps.log_line import StepResult, format_step, step_record

RESULT = StepResult(
    step=805,
    num_steps=115311,
    consumed_samples=154560,
    sequence_length=2048,
    learning_rate=5.065e-05,
    global_batch_size=192,
    micro_batch_size=2,
    loss=4.5310721397399902,
    grad_norm=1.0213,
    num_skipped=0,
    num_nan=0,
    seconds=13.1894,
    tflops=110.478,
    utilization=None,
)
LINE = (
    " iteration      805/  115311 | consumed samples:       154560 | consumed tokens:    316538880 | "
    "elapsed time per iteration (s): 13.19 | elapsed time per iteration (ms): 13189.4 | "
    "learning rate: 5.065E-05 | global batch size:   192 | "
    "lm loss: 4.531072E+00 | grad norm: 1.021 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 | samples per second: 14.557 | TFLOPs: 110.48 |"
)


def test_line_is_bigsciences() -> None:
    assert format_step(RESULT) == LINE


def test_a_parser_of_megatron_logs_reads_it() -> None:
    """Megatron-DeepSpeed's tools split at ` | ` and take `name: value`."""
    fields = dict(re.findall(r"([a-z][\w ()]*?):\s+([-+.\dE]+) \|", format_step(RESULT), re.IGNORECASE))
    assert float(fields["lm loss"]) == 4.531072
    assert float(fields["elapsed time per iteration (s)"]) == 13.19
    assert float(fields["TFLOPs"]) == 110.48


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"iteration\s+(\d+)/\s*(\d+)", ("805", "115311")),
        (r"elapsed time per iteration \(s\): ([\d.]+)", ("13.19",)),
        (r"elapsed time per iteration \((?:s|ms)\): *([\d.]+)", ("13.19",)),
        (r"elapsed time per iteration \(ms\):\s+([0-9.]+)(?:\s|$|\|)", ("13189.4",)),
        (
            r"iteration +(\d+)/.*per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+\-]+).*grad norm: ([\d.]+)",
            ("805", "13189.4", "4.531072E+00", "1.021"),
        ),
        (r"consumed samples:\s+(\d+) \|", ("154560",)),
        (r"global batch size:\s+(\d+) \| lm loss: ([\d.E+-]+) \| grad norm", ("192", "4.531072E+00")),
        (r"number of skipped iterations:\s+(\d+) \| number of nan iterations:\s+(\d+)", ("0", "0")),
    ],
)
def test_patterns_that_people_use_find_what_they_look_for(pattern: str, expected: tuple[str, ...]) -> None:
    """Of the kind in scripts around Megatron-LM and both Megatron-DeepSpeeds, which print milliseconds or seconds."""
    match = re.search(pattern, format_step(RESULT))
    assert match is not None
    assert match.groups() == expected


def test_fp16_shows_its_loss_scale() -> None:
    line = format_step(replace(RESULT, loss_scale=65536.0))
    assert " | lm loss: 4.531072E+00 | loss scale: 65536.0 | grad norm: 1.021 | " in line
    assert step_record(replace(RESULT, loss_scale=65536.0))["loss_scale"] == 65536.0


def test_utilization_shows_where_the_peak_is_known() -> None:
    assert format_step(replace(RESULT, utilization=0.3541)).endswith("TFLOPs: 110.48 | utilization: 35.4 % |")


def test_the_record_holds_the_loss_to_the_last_bit() -> None:
    record = step_record(RESULT)
    assert float.fromhex(record["loss_hex"]) == RESULT.loss


def test_memory_of_a_gpu_is_in_line_and_record() -> None:
    memory = {"memory_allocated": 60 << 30, "memory_reserved": 64 << 30, "memory_retries": 2}
    on_gpu = replace(RESULT, memory=memory)
    assert format_step(on_gpu).endswith(" | memory: 60.00 of 64.00 GiB reserved |")
    assert step_record(on_gpu).items() >= memory.items()
    assert not {key for key in step_record(RESULT) if key.startswith("memory")}
