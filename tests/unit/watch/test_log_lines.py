"""Lines of trainers as log_events. The lines of BLOOM and of other programs are as they were published."""

from __future__ import annotations

import math

import pytest

from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.read.log_lines import LineReader

BLOOM = (
    "[default7]: iteration    31219/  115311 | consumed samples:     47778736 | consumed tokens:  97850851328 | "
    "elapsed time per iteration (s): 106.36 | learning rate: 5.279E-05 | global batch size:  2048 | "
    "lm loss: 5.098124E+00 | grad norm: 960.351 | num zeros: 0.0 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 | samples per second: 19.256 | TFLOPs: 147.43 |"
)
MEGATRON_LM = (
    " [2025-08-01 10:27:03] iteration        2/    5000 | consumed samples:          512 | "
    "elapsed time per iteration (ms): 26496.5 | throughput per GPU (TFLOP/s/GPU): 114.0 | "
    "learning rate: 1.395349E-07 | global batch size:   256 | lm loss: 1.044817E+01 | loss scale: 1.0 | "
    "grad norm: 35.813 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
SKIPPED = (
    "iteration        1/  508626 | consumed samples:          288 | elapsed time per iteration (ms): 255940.5 | "
    "learning rate: 0.000E+00 | global batch size:   288 | loss scale: 4294967296.0 | "
    "number of skipped iterations:   1 | number of nan iterations:   0 |"
)
TITAN = (
    "[rank0]:[titan] 2025-06-04 08:51:58,557 - root - INFO - step: 10  loss: 10.7069  memory: 30.99GiB(32.62%)  "
    "tps: 7,034  tflops: 407.35  mfu: 41.19%"
)
AURORA = (
    "  [2025-09-11 14:09:57,403952][I][components/metrics:437:log] step: 18  loss:  8.5406  grad_norm: 42.4819  "
    "memory:  8.44GiB(13.20%)  tps: 6,712  tflops: 62.29  mfu: 20.89%"
)
NEMO = (
    " 0: Training epoch 0, iteration 29/99 | lr: 5.8e-06 | global_batch_size: 32 | global_step: 29 | "
    "reduced_train_loss: 2.782 | train_step_timing in s: 0.1903 | consumed_samples: 960 | val_loss: 2.861"
)


def read(line: str) -> LogEvent:
    found = LineReader().read(line)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "step", "seconds", "loss", "grad_norm", "size", "rank"),
    [
        (BLOOM, 31219, 106.36, 5.098124, 960.351, 2048, None),
        (MEGATRON_LM, 2, 26.4965, 10.44817, 35.813, 256, None),
        (TITAN, 10, None, 10.7069, None, None, 0),
        (AURORA, 18, None, 8.5406, 42.4819, None, None),
        (NEMO, 30, 0.1903, 2.782, None, 32, 0),
    ],
)
def test_steps_are_read(
    line: str,
    step: int,
    seconds: float | None,
    loss: float,
    grad_norm: float | None,
    size: int | None,
    rank: int | None,
) -> None:
    found = read(line)
    assert (found.kind, found.step, found.rank, found.batch_size) == ("step", step, rank, size)
    assert (found.loss, found.grad_norm) == (loss, grad_norm)
    assert found.seconds == (None if seconds is None else pytest.approx(seconds))


def test_times_are_compared_within_a_log() -> None:
    assert read(AURORA).time == pytest.approx(read(TITAN).time + 99 * 86400 + 19078.846952)  # type: ignore[operator]
    assert read(BLOOM).time is None
    assert read(f"2026-11-25T10:00:00.500000Z {BLOOM}").time == 1795600800.5


def test_a_skipped_step_is_said_to_be_one() -> None:
    assert (read(SKIPPED).text, read(SKIPPED).loss, read(BLOOM).text) == ("skipped", None, "")


@pytest.mark.parametrize(
    ("line", "kind", "step", "seconds"),
    [
        ("[default7]:valid loss at iteration 45000 | lm loss value: 2.327091E+00 |", "evaluated", 45000, None),
        (" validation loss at iteration 600 on validation set | lm loss value: 3.8E-01 |", "evaluated", 600, None),
        ("0: validation loss at iteration 238 [code] | lm loss value: 1.25 |", "evaluated", 238, None),
        ("saving checkpoint at iteration   45000 to /scratch/main", "saving", 45000, None),
        ("  successfully saved checkpoint at iteration   45000 to /scratch/main", "saved", 45000, None),
        ("successfully saved checkpoint from iteration     500 to x [ t 1/4, p 1/2 ]", "saved", 500, None),
        ("2026-11-25T10:00:00.500000Z saved /r/checkpoints/global_step20 in 3.21 s", "saved", 20, 3.21),
    ],
)
def test_evaluations_and_saves_are_read(line: str, kind: str, step: int, seconds: float | None) -> None:
    found = read(line)
    assert (found.kind, found.step, found.seconds) == (kind, step, seconds)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("  eval_interval ................................... 1000", "eval_interval=1000"),
        ("[default0]:  save_interval ................................... 100", "save_interval=100"),
        ("  save_interval ................................... None", "save_interval=0"),
    ],
)
def test_printed_arguments_are_settings(line: str, text: str) -> None:
    assert (read(line).kind, read(line).text) == ("settings", text)


@pytest.mark.parametrize(
    "line",
    [
        "[default3]:RuntimeError: CUDA error: unknown error",
        "Traceback (most recent call last):",
        "srun: error: jean-zay-iam41: task 40: Exited with exit code 1",
    ],
)
def test_errors_are_failures(line: str) -> None:
    assert (read(line).kind, read(line).text) == ("failed", line)


def test_the_end_of_a_program_is_one() -> None:
    line = "[exiting program after 1190.03 minutes] datetime: 2022-04-30 20:20:20"
    assert read(line).kind == "end"


@pytest.mark.parametrize(
    "line",
    [
        " 45%|####5     | 450/1000 [12:00<14:40,  1.60s/it]",
        "[default3]:time (ms) | forward-compute: 92.25 | optimizer: 42.31",
        "[2024-03-07 15:27:15,063] [INFO] [logging.py:96:log_dist] [Rank 0] step=200, skipped=4, lr=[0.0002]",
        "\x00\xff iteration | step: loss: {'loss': 1.2, 'epoch': }",
        "{'loss': [[[[, 'epoch': 1}",
    ],
)
def test_chatter_is_no_progress(line: str) -> None:
    assert read(line).kind == "output"


def test_lines_of_a_watchdog_say_nothing_of_the_program() -> None:
    pulse = "[2022-05-01 03:56:11] PULSE: tr11-176B-ml is running for 1-07:27:33 since 2022-04-29T20:28:38 (1528763)"
    assert LineReader().read(pulse) is None


def test_the_trainer_of_hugging_face_has_its_step_in_the_progress_bar() -> None:
    reader = LineReader()
    reader.read(" 67%|######7   | 20/30 [3:18:33<1:27:13, 523.37s/it]")
    found = reader.read("{'loss': 0.739, 'grad_norm': 1.7368723154067993, 'learning_rate': 6.3e-05, 'epoch': 2.0}")
    assert found is not None
    assert (found.kind, found.step, found.total_steps, found.loss) == ("step", 20, 30, 0.739)
    same_line = read("100%|###| 30/30 [4:58:32<00:00, 526.32s/it]{'loss': nan, 'grad_norm': '0.64', 'epoch': 3.0}")
    assert (same_line.step, same_line.grad_norm) == (30, 0.64)
    assert same_line.loss is not None and math.isnan(same_line.loss)


def test_a_report_without_a_progress_bar_is_a_step_without_a_number() -> None:
    found = read("{'loss': '2.1', 'grad_norm': '0.4', 'learning_rate': '4e-05', 'epoch': '0.2'}")
    assert (found.kind, found.step, found.loss) == ("step", None, 2.1)
    done = read("{'train_runtime': 17943.535, 'train_loss': 1.0313124020894369, 'epoch': 3.0}")
    assert done.kind == "output"
