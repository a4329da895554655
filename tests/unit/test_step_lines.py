"""The lines of a step, as trainers print them and as they are read: a line of each form, as its program prints it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from bigsci_launch.errors import ConfigError
from bigsci_launch.step_lines import (
    LONGEST_OWN_LINE,
    SURE,
    StepForm,
    StepLine,
    StepReader,
    check_forms,
    known_forms,
    own_form,
    parse_steps,
)
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
BRIDGE = (
    " [2025-10-12 10:00:11.482913] iteration        2/     100 | consumed samples:          512 | "
    "elapsed time per iteration (ms): 4021.3 | learning rate: 3.0E-06 | global batch size:   512 | "
    "lm loss: 1.180000E+01 | mtp_1 loss: 1.19E+01 | loss scale: 1.0 | grad norm: 12.113 |"
)
MEGATRON_DEEPSPEED = (
    " iteration       11/   50000 | consumed samples:         5632 | consumed tokens:     11534336 | "
    "elapsed time per iteration (ms): 52728.1 | learning rate: 1.499E-05 | global batch size:   512 | "
    "lm loss: 1.376514E+01 | loss scale: 65536.0 | grad norm: 459.628 | actual seqlen:  2048 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 9.710 | TFLOPs: 167.52 |"
)
AVERAGED = " iteration        3/      10 | elapsed time per iteration (ms): 4000.5/3900.1 | lm loss: NAN |"
SKIPPED = " iteration        4/      10 | global batch size:     8 | number of skipped iterations:   1 |"
NEOX = (
    " samples/sec: 51.200 | iteration       10/  320000 | elapsed time per iteration (ms): 100.3 | "
    "learning rate: 1.234E-04 | approx flops per GPU: 55.1TFLOPS | lm_loss: 1.070000E+01 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)
NEMO = (
    " 0: Training epoch 0, iteration 29/99 | lr: 5.8e-06 | global_batch_size: 32 | global_step: 29 | "
    "reduced_train_loss: 2.782 | train_step_timing in s: 0.1903 | consumed_samples: 960 | val_loss: 2.861"
)
NEMO_BAR = (
    "Epoch 0: :   0%|          | 20/300000 [53:56<13485:46:11, v_num=0, reduced_train_loss=10.30, "
    "global_step=19.00, consumed_samples=3840.0, train_step_timing in s=8.710, val_loss=10.10]"
)
TITAN = (
    "[rank0]:[titan] 2026-01-11 20:13:44,754 - root - INFO - {}step:  2  {}loss: 12.2273  {}grad_norm:  0.5423  "
    "{}memory: 47.71GiB(34.12%)  tps: 51,352  tflops: 99.08  mfu: 10.02%"
)
COLOURS = TITAN.format("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[38;2;54;234;195m")
PASTED = COLOURS.replace("\x1b", "")
SWIFT = (
    "{'loss': 0.6675415, 'grad_norm': 0.23077478, 'learning_rate': 4.324e-05, 'epoch': 0.27815, "
    "'global_step/max_steps': '601/2161', 'percentage': '27.81%', 'elapsed_time': '8h 8m 1s', 'memory(GiB)': 87.61}"
)
ARCTIC = (
    "iter:  130/3000   4% | loss: 16.5469 | iter time: 1.038s | iter tflops: 909.8 | lr: 8.667E-04 | "
    "seqlen: 16.38K | step time: 0.996s | step tflops: 947.4 | epoch: 0 | MA 2.84 GB"
)
NANOTRON = (
    "05/01/2024 10:00:11 [INFO|DP=0|PP=0|TP=0]: iteration: 91 / 1000 | consumed_tokens: 93.2K | "
    "elapsed_time_per_iteration_ms: 2.3K | tokens_per_sec: 450K | tokens_per_sec_per_gpu: 7.2K | "
    "global_batch_size: 1.02K | lm_loss: 10.8 | lr: 0.0003 | model_tflops_per_gpu: 300 | grad_norm: 3.1"
)
OLMO = (
    "2024-05-01 10:00:11.123\thost-0:0\tolmo.train:966\tINFO\t[step=7/739328,epoch=0]\n"
    "    train/CrossEntropyLoss=11.25\n    train/Perplexity=76,879\n    throughput/total_tokens=4,194,304"
)
OLMO_CORE = "INFO\t[step=30/1000,epoch=1,eta=1h2m]\n    train/CE loss=3.25\n    train/PPL=25.8"
LEVANTER = (
    "2026-01-05T10:00:11 - 0 - tqdm_loggable.tqdm_logging - INFO :: Progress on:train {} rate:{} "
    "remaining:1:05:15 elapsed:31:40 postfix:loss=9.31"
)
MAXTEXT = (
    "completed step: 9, seconds: 4.012, TFLOP/s/device: 131.105, Tokens/s/device: 9012.301, "
    "total_weights: 65536, loss: 10.714"
)
LITGPT = "Epoch 1 | iter 16 step 4 | loss train: 3.800, val: n/a | iter time: 400.11 ms (step) remaining time: 1:02:03"
VERL = (
    "(TaskRunner pid=2931) step:3 - global_seqlen/min:112000 - actor/entropy:0.41 - actor/pg_loss:-0.0300 - "
    "actor/grad_norm:0.21 - training/global_step:3 - timing_s/step:92.1 - perf/throughput:1210.3"
)
COMPOSER = (
    "[batch=12/500]:\n\t Train time/batch: 11\n\t Train loss/train/total: 1.8421\n[Eval batch=1/3] Eval on x data"
)
IN_EPOCHS = "[epoch=3][batch=12/500]:\n\t Train loss/train/total: 1.8421"
BAR = " 67%|######7   | 20/30 [3:18:33<1:27:13, 523.37s/it]"
DICT = "{'loss': 0.739, 'grad_norm': 1.7368, 'learning_rate': 6.3e-05, 'epoch': 2.0}"
QUOTED = "{'loss': '0.739', 'grad_norm': '1.7368', 'learning_rate': '6.3e-05', 'epoch': '2.0'}"
LIGHTNING = "Epoch 2:  47%|####7     | 7/15 [00:10<00:12,  1.20it/s, v_num=0, train_loss=2.310]"
TUNE = "1|20|Loss: 1.2345678:  10%|#         | 20/200 [00:30<04:30,  1.52s/it]"
NANOGPT = "iter 10: loss 4.2000, time 91.08ms, mfu 24.47%"
PIPELINE = "steps: 10 loss: 2.3026 iter time (s): 0.123 samples/sec: 1234.567"
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
FORMS = {
    "bigscience": (BLOOM, StepLine(12695, 2.463556, 105.22, 2048, 115311, 0.174)),
    "Megatron-LM": (MEGATRON_LM, StepLine(1, 11.92634, 271.607, 1024, 24000, 5.96)),
    "Megatron-Bridge": (BRIDGE, StepLine(2, 11.8, 4.0213, 512, 100, 12.113)),
    "Megatron-DeepSpeed": (MEGATRON_DEEPSPEED, StepLine(11, 13.76514, 52.7281, 512, 50000, 459.628)),
    "bsl train": (format_step(OURS), StepLine(805, 4.531072, 13.19, 192, 115311, 1.021)),
    "bsl train in fp16": (
        format_step(replace(OURS, loss_scale=65536.0)),
        StepLine(805, 4.531072, 13.19, 192, 115311, 1.021),
    ),
    "skipped": (SKIPPED, StepLine(4, None, None, 8, 10, is_skipped=True)),
    "GPT-NeoX": (NEOX, StepLine(10, 10.7, 0.1003, None, 320000)),
    "NeMo": (NEMO, StepLine(30, 2.782, 0.1903, 32, 100)),
    "NeMo, bar": (NEMO_BAR, StepLine(20, 10.3, 8.71)),
    "torchtitan": (TITAN.format("", "", "", ""), StepLine(2, 12.2273, grad_norm=0.5423)),
    "torchtitan in colours": (COLOURS, StepLine(2, 12.2273, grad_norm=0.5423)),
    "torchtitan from a page": (PASTED, StepLine(2, 12.2273, grad_norm=0.5423)),
    "DeepSpeed": (PIPELINE, StepLine(10, 2.3026, 0.123)),
    "Trainer": (f"{BAR}\n{DICT}", StepLine(20, 0.739, total_steps=30, grad_norm=1.7368, epochs=2.0)),
    "Trainer of version 5": (f"{BAR}{QUOTED}", StepLine(20, 0.739, total_steps=30, grad_norm=1.7368, epochs=2.0)),
    "Trainer in JSON": (DICT.replace("'", '"'), StepLine(None, 0.739, grad_norm=1.7368, epochs=2.0)),
    "Lightning": (LIGHTNING, StepLine(37, 2.31)),
    "Composer": (COMPOSER, StepLine(12, 1.8421, total_steps=500)),
    "Composer in epochs": (IN_EPOCHS, StepLine(1012, 1.8421)),
    "nanotron": (NANOTRON, StepLine(91, 10.8, 2.3, 1020, 1000, 3.1)),
    "OLMo": (OLMO, StepLine(7, 11.25, total_steps=739328)),
    "OLMo-core": (OLMO_CORE, StepLine(30, 3.25, total_steps=1000)),
    "levanter": (LEVANTER.format("19.0it/70.0it", "76.8s/it"), StepLine(19, 9.31, 76.8, total_steps=70)),
    "levanter, many steps": (LEVANTER.format("1.23kit/10.0kit", "1.6it/s"), StepLine(1230, 9.31, total_steps=10000)),
    "MaxText": (MAXTEXT, StepLine(10, 10.714, 4.012)),
    "LitGPT": (LITGPT, StepLine(4, 3.8)),
    "nanoGPT": (NANOGPT, StepLine(11, 4.2, 0.09108)),
    "torchtune": (TUNE, StepLine(20, 1.2345678)),
    "verl": (VERL, StepLine(3, -0.03, 92.1, grad_norm=0.21)),
    "ms-swift": (SWIFT, StepLine(601, 0.6675415, total_steps=2161, grad_norm=0.23077478, epochs=0.27815)),
    "ms-swift in JSON": (
        SWIFT.replace("'", '"'),
        StepLine(601, 0.6675415, total_steps=2161, grad_norm=0.23077478, epochs=0.27815),
    ),
    "a loop of one's own": ("step 120 loss 2.3461", StepLine(120, 2.3461)),
    "another": ("[rank0]: Iter 12/5000, Loss: 2.5e-1, 412 ms", StepLine(12, 0.25, total_steps=5000)),
    "ArcticTraining": (ARCTIC, StepLine(130, 16.5469, 1.038, total_steps=3000)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_trainers_line_is_read(name: str) -> None:
    text, expected = FORMS[name]
    (found,) = StepReader().steps_in(f"noise\n{text}\nnoise\n")
    assert found._replace(seconds=None) == expected._replace(seconds=None)
    assert found.seconds == (None if expected.seconds is None else pytest.approx(expected.seconds))
    one_by_one = StepReader()
    assert [seen for line in text.splitlines() if (seen := one_by_one.read(line))] == [found]


def test_each_known_form_is_sound_and_has_a_line_here() -> None:
    check_forms()
    texts = [text for text, _ in FORMS.values()]
    unread = [form for form in known_forms() if not any(form.holds in text for text in texts)]
    assert {form.name for form in unread} == {"Trainer, evaluation"}


@pytest.mark.parametrize("name", ["Trainer", "ms-swift"])
def test_an_evaluation_is_no_step(name: str) -> None:
    text = FORMS[name][0].replace("'loss'", "'eval_loss'").replace("'grad_norm'", "'eval_runtime'")
    (found,) = StepReader().steps_in(text)
    assert (found.is_evaluation, found.loss, found.step) == (True, FORMS[name][1].loss, FORMS[name][1].step)
    assert found.seconds is not None and list(parse_steps(text)) == []


@pytest.mark.parametrize(
    "line", ["epoch 2 step 4 loss 2.5", "step 4: train loss 2.5, val loss 2.6", "step 4 lossless", "stepper 4 loss 2"]
)
def test_a_line_that_may_mean_another_number_is_no_step_of_a_loop_of_ones_own(line: str) -> None:
    assert StepReader().read(line) is None


def test_a_loss_may_be_no_number() -> None:
    ((step, found),) = parse_steps(AVERAGED)
    assert found.loss is not None
    assert (step, math.isnan(found.loss), found.seconds) == (3, True, 4.0005)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_told_apart_whatever_ends_them(end: str) -> None:
    text = end.join(["time (ms)", BLOOM, "[rank 3] noise about iteration 7", SKIPPED, MEGATRON_LM])
    assert [(step, line.loss) for step, line in parse_steps(text)] == [(12695, 2.463556), (4, None), (1, 11.92634)]


def test_a_value_that_is_none_is_left_out() -> None:
    line = "iteration 1/ 2 | lm loss: soon | elapsed time per iteration (s): 1.2.3 |"
    assert list(parse_steps(line)) == [(1, StepLine(1, total_steps=2))]


def test_the_bar_of_an_evaluation_is_not_that_of_the_training() -> None:
    others = "Map: 100%|##| 900/900 [00:10<00:00, 9000 examples/s]\n 50%|##   | 2/4 [00:05<00:05,  1.2s/it]"
    ((step, line),) = parse_steps(f"{BAR}\n{others}\n{DICT}")
    assert (step, line.total_steps) == (20, 30)


def test_what_a_library_prints_counts_only_where_the_program_prints_nothing() -> None:
    text = "\n".join([BLOOM, PIPELINE, LIGHTNING, BLOOM])
    assert [step for step, _ in parse_steps(text)] == [12695, 12695]


def test_a_line_of_another_program_counts_only_at_the_beginning_of_a_log() -> None:
    assert [step for step, _ in parse_steps(f"{VERL}\n{BLOOM}")] == [3, 12695]
    reader = StepReader()
    assert len(list(reader.steps_in(f"{BLOOM}\n" * SURE))) == SURE
    assert (reader.read(VERL), reader.read(ARCTIC)) == (None, None)
    assert reader.read(BLOOM) is not None


def test_an_own_form_has_what_its_groups_have() -> None:
    form = own_form(r"\[(?P<index>\d+) of (?P<total>\d+)\] L=(?P<loss>\S+) (?P<milliseconds>\d+) ms")
    ((step, line),) = parse_steps(f"{BLOOM}\nx [41 of 1,000] L=2.5e-1 250 ms\n".replace("1,000", "1000"), [form])
    assert (step, line.total_steps, line.loss, line.seconds) == (42, 1000, 0.25, 0.25)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"step (\d+)", "no group `step`"),
        (r"(?P<step>\d+", "no regular expression"),
        (r"(?P<step>\d+) (?P<los>\d+)", "unknown group los"),
        (r"(?P<step>\d+)(a+)+$", "repetition"),
        (r"(?P<step>\d+)(?:(x|y))*$", "choice"),
        (r"(?P<step>\d+)(?:[^|]*\|){2,9}$", "repetition"),
    ],
)
def test_an_own_form_that_is_of_no_use_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        own_form(pattern)


def test_an_own_form_may_have_optional_parts() -> None:
    form = own_form(r"step=(?P<step>\d+)(?: loss=(?P<loss>[\d.(+*]+))?")
    assert [line.loss for _, line in parse_steps("step=1\nstep=2 loss=0.5", [form])] == [None, 0.5]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"line": "(?P<step>x)"}, "holds is missing"),
        ({"holds": "x", "line": "(?P<step>x)", "los": "x"}, "unknown key los"),
        ({"holds": "x", "line": "(?P<step>x)", "loss": "(x)"}, "loss has a group"),
        ({"holds": "x", "line": "(?P<step>x)", "loss": "("}, "loss is no regular expression"),
        ({"holds": "x", "line": "x"}, "no group `step`"),
    ],
)
def test_a_form_of_a_user_is_refused_by_its_file(fields: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^mine\.ini: \[mine\]: .*{words}"):
        StepForm("mine.ini", "mine", fields).check()


def test_a_form_of_a_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_lines").mkdir()
    (tmp_path / "step_lines" / "mine.ini").write_text("[mine]\nholds = schritt\nline = schritt (?P<step>\\d+)\n")
    monkeypatch.setenv("BSL_PATH", str(tmp_path))
    assert [step for step, _ in parse_steps("schritt 7\n" + BLOOM)] == [7, 12695]


def hostile() -> Iterator[str]:
    """Lines that are long, and nearly those of a form."""
    for text, _ in FORMS.values():
        for line in text.splitlines():
            half = line[: len(line) // 2]
            yield half * (20_000 // max(1, len(half)))
            yield line[:-1] + "9" * 20_000
            yield line + " " * 20_000 + "x"


def test_no_line_takes_long() -> None:
    reader = StepReader()
    began = time.process_time()
    lines = list(hostile())
    for line in lines:
        reader.read(line)
    assert (time.process_time() - began) / len(lines) < 0.02


def test_the_longest_line_for_an_own_form_is_short() -> None:
    reader = StepReader([own_form(r"(?P<step>\d+).*a.*b.*c$")])
    began = time.process_time()
    assert reader.read("1" + "ab" * 10 + " " * LONGEST_OWN_LINE * 9) is None
    assert time.process_time() - began < 1


PIECES = sorted({piece for text, _ in FORMS.values() for piece in text.replace("\n", " ").split(" ")})


@given(some.lists(some.one_of(some.sampled_from(PIECES), some.text(max_size=8)), max_size=40).map(" ".join))
def test_no_text_is_an_error(text: str) -> None:
    for found in StepReader().steps_in(text):
        assert found.step is None or isinstance(found.step, int)


@given(some.sampled_from(sorted(FORMS)), some.integers(0, 400), some.binary(max_size=6))
def test_no_damaged_line_is_an_error(name: str, at: int, damage: bytes) -> None:
    raw = FORMS[name][0].encode()
    text = (raw[:at] + damage + raw[at + len(damage) :]).decode("utf-8", "replace")
    list(StepReader().steps_in(text))
