"""The loss at a restart: what counts as a jump, and what the weights say about it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.errors import BslError
from bigsci_launch.weights.explain.seam import Iteration, measure_seam, read_log, seam_finding

MEGATRON = (
    " iteration     {step:4d}/    2000 | consumed samples: 40 | consumed tokens: 81920 | "
    "elapsed time per iteration (s): 123.69 | learning rate: 1.000E-04 | global batch size: 8 | "
    "lm loss: {loss:.6E} | grad norm: 1.234 | number of nan iterations: 0 | TFLOPs: 130.34 |\n"
)
CURRENT = (
    "2026-11-21T01:02:03.123456Z [rank 7 dp1 pp1 tp1 step {step}]  iteration {step:8d}/{step:8d} | "
    "consumed samples: 40 | elapsed time per iteration (ms): 250.5 | lm loss: {loss:.6E} | loss scale: 1.0 |\n"
)


def write(path: Path, losses: dict[int, float], line: str = MEGATRON) -> Path:
    path.write_text("noise\n" + "".join(line.format(step=step, loss=loss) for step, loss in losses.items()))
    return path


def curve(first: int, last: int, noise: float = 0.02, seed: int = 0) -> dict[int, float]:
    random = np.random.default_rng(seed)
    return {step: 10 * step**-0.2 + noise * random.standard_normal() for step in range(first, last + 1)}


@pytest.mark.parametrize(("line", "seconds"), [(MEGATRON, 123.69), (CURRENT, 0.2505)])
def test_both_formats_and_both_units_are_read(tmp_path: Path, line: str, seconds: float) -> None:
    found = read_log(write(tmp_path / "log", {5: 3.25, 6: float("nan")}, line))
    assert found[5] == Iteration(5, 3.25, pytest.approx(seconds))
    assert math.isnan(found[6].loss)


def test_a_line_printed_again_after_a_requeue_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    skipped = " iteration 6/ 2000 | learning rate: 1.000E-04 | number of skipped iterations:   1 |\n"
    path.write_text(MEGATRON.format(step=5, loss=3.0) + MEGATRON.format(step=5, loss=2.0) + skipped)
    assert {step: iteration.loss for step, iteration in read_log(path).items()} == {5: 2.0}


def test_a_smooth_restart_is_no_jump_and_a_spike_is(tmp_path: Path, diff: Any) -> None:
    whole = curve(1, 60)
    before = {step: loss for step, loss in whole.items() if step <= 50}
    after = {step: loss for step, loss in whole.items() if step > 50}
    a, b = write(tmp_path / "a.log", before), write(tmp_path / "b.log", after, CURRENT)
    smooth = diff("--seam", a, b)
    assert smooth.code == 0, smooth.text
    assert "within its usual movement" in smooth.text
    spike = diff("--seam", a, write(tmp_path / "c.log", {step: loss + 1.0 for step, loss in after.items()}), "--json")
    assert spike.code == 1
    seam = spike.document["seam"]
    assert (seam["step"], seam["is_jump"], seam["seconds_before"]) == (51, True, 123.69)
    assert seam["jump"] == pytest.approx(1, abs=0.15)
    assert seam["spreads"] > 15
    assert spike.document["findings"][0]["pattern"] == "restart spike"


def test_a_page_and_a_document_of_two_logs_alone_name_no_weights(tmp_path: Path, diff: Any) -> None:
    logs = [write(tmp_path / f"{name}.log", curve(1, 20)) for name in "ab"]
    answer = diff("--seam", *logs, "--html", tmp_path / "page.html", "--json")
    assert (answer.document["a"], answer.document["b"], answer.document["seam"]["equal_steps"]) == (None, None, 20)
    page = (tmp_path / "page.html").read_text()
    assert "<h1>the losses of 20 steps" in page and "Where it differs" not in page
    refused = diff("--seam", *logs, "--tolerance", "1")
    assert (refused.code, "--tolerance is for A and B" in refused.talk) == (2, True)


def test_overlapping_logs_compare_the_same_step(tmp_path: Path, diff: Any) -> None:
    whole = curve(1, 60)
    after = {step: loss for step, loss in whole.items() if step > 50}
    a = write(tmp_path / "a.log", whole)
    exact = diff("--seam", a, write(tmp_path / "b.log", after))
    assert (exact.code, exact.text.strip()) == (
        0,
        "the losses of 10 steps from 51 on are equal to the last printed digit",
    )
    drifted = {step: loss + (0.004 if step > 50 else 0) for step, loss in after.items()}
    answer = diff("--seam", a, write(tmp_path / "c.log", drifted))
    assert answer.code == 1
    assert "the same step: the restart changed the run" in answer.text


def test_equal_weights_and_another_loss_point_at_data_and_rng(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    weights = save_arrays(tmp_path / "w.safetensors", {"w": np.ones(3)})
    whole = curve(1, 60)
    logs = (
        write(tmp_path / "a.log", whole),
        write(tmp_path / "b.log", {step: loss + 0.003 for step, loss in whole.items() if step > 50}),
    )
    answer = diff(weights, weights, "--seam", *logs)
    assert answer.code == 1
    assert answer.text.splitlines()[1].endswith("Weights equal: look at data order and RNG")
    other = save_arrays(tmp_path / "v.safetensors", {"w": np.full(3, 1.5)})
    assert "look at data order" not in diff(weights, other, "--seam", *logs).text


def test_a_loss_that_is_no_number_is_a_jump() -> None:
    before = {step: Iteration(step, 3.0 + step % 2, None) for step in range(1, 20)}
    seam = measure_seam(before, {20: Iteration(20, float("nan"), None)})
    assert seam.loss.is_jump
    assert seam_finding(seam.loss, is_equal=None).is_fault


def test_too_few_steps_are_said_to_be_too_few() -> None:
    seam = measure_seam({1: Iteration(1, 3.0, None)}, {2: Iteration(2, 9.0, None)})
    assert (seam.loss.spread, seam.loss.is_jump, seam.loss.verdict) == (None, False, "unknown")
    assert "too few earlier steps" in seam_finding(seam.loss, is_equal=None).claim


def test_logs_that_cannot_be_used_are_errors(tmp_path: Path, diff: Any) -> None:
    good = write(tmp_path / "a.log", curve(5, 20))
    (tmp_path / "empty.log").write_text("nothing here\n")
    cases = [
        ((tmp_path / "none.log", good), 4, "no such file or directory"),
        ((good, tmp_path / "empty.log"), 4, "has no step lines"),
        ((good, write(tmp_path / "early.log", curve(1, 3))), 1, "the second log begins before the first"),
    ]
    for logs, code, message in cases:
        answer = diff("--seam", *logs)
        assert answer.code == code
        assert message in answer.talk
    with pytest.raises(BslError):
        read_log(tmp_path)
