"""The loss at a restart: what counts as a jump, and what the weights say about it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bigsci_launch.checkpoints.around import attempt_of_log
from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.step_lines import StepLine
from bigsci_launch.weights.explain.seam import LossLog, measure_seam, read_log, seam_finding

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


def made(losses: dict[int, float]) -> LossLog:
    return LossLog(Path("a.log"), {step: StepLine(step, loss) for step, loss in losses.items()})


def curve(first: int, last: int, noise: float = 0.02, seed: int = 0) -> dict[int, float]:
    random = np.random.default_rng(seed)
    return {step: 10 * step**-0.2 + noise * random.standard_normal() for step in range(first, last + 1)}


@pytest.mark.parametrize(("line", "seconds"), [(MEGATRON, 123.69), (CURRENT, 0.2505)])
def test_both_formats_and_both_units_are_read(tmp_path: Path, line: str, seconds: float) -> None:
    found = read_log(write(tmp_path / "log", {5: 3.25, 6: float("nan")}, line)).lines
    assert (found[5].loss, found[5].seconds) == (3.25, pytest.approx(seconds))
    assert found[6].loss is not None and math.isnan(found[6].loss)


def test_a_line_printed_again_after_a_requeue_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    skipped = " iteration 6/ 2000 | learning rate: 1.000E-04 | number of skipped iterations:   1 |\n"
    path.write_text(MEGATRON.format(step=5, loss=3.0) + MEGATRON.format(step=5, loss=2.0) + skipped)
    assert {step: iteration.loss for step, iteration in read_log(path).lines.items()} == {5: 2.0}


def test_a_smooth_restart_is_no_jump_and_a_spike_is(tmp_path: Path, diff: Any) -> None:
    whole = curve(1, 60)
    before = {step: loss for step, loss in whole.items() if step <= 50}
    after = {step: loss for step, loss in whole.items() if step > 50}
    a, b = write(tmp_path / "a.log", before), write(tmp_path / "b.log", after, CURRENT)
    smooth = diff("--seam", a, b, "--json")
    assert (smooth.code, smooth.document["seam"]["verdict"]) == (0, "no jump")
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
    assert re.search(r"<h1>.*\b20\b", page) and "differs" not in page
    refused = diff("--seam", *logs, "--tolerance", "1")
    assert (refused.code, "--tolerance" in refused.talk) == (2, True)


def test_overlapping_logs_compare_the_same_step(tmp_path: Path, diff: Any, check_text: Any) -> None:
    whole = curve(1, 60)
    after = {step: loss for step, loss in whole.items() if step > 50}
    a = write(tmp_path / "a.log", whole)
    exact = diff("--seam", a, write(tmp_path / "b.log", after))
    drifted = {step: loss + (0.004 if step > 50 else 0) for step, loss in after.items()}
    answer = diff("--seam", a, write(tmp_path / "c.log", drifted))
    assert (exact.code, answer.code) == (0, 1)
    check_text(exact.text, answer.text)


def test_equal_weights_and_another_loss_point_at_data_and_rng(
    tmp_path: Path, diff: Any, save_arrays: Any, check_text: Any
) -> None:
    weights = save_arrays(tmp_path / "w.safetensors", {"w": np.ones(3)})
    whole = curve(1, 60)
    logs = (
        write(tmp_path / "a.log", whole),
        write(tmp_path / "b.log", {step: loss + 0.003 for step, loss in whole.items() if step > 50}),
    )
    answer = diff(weights, weights, "--seam", *logs)
    assert answer.code == 1
    other = save_arrays(tmp_path / "v.safetensors", {"w": np.full(3, 1.5)})
    check_text(answer.text, diff(weights, other, "--seam", *logs).text)


def test_a_loss_that_is_no_number_is_a_jump() -> None:
    seam = measure_seam(made({step: 3.0 + step % 2 for step in range(1, 20)}), made({20: float("nan")}))
    assert seam.loss.is_jump
    assert seam_finding(seam.loss, is_equal=None).is_fault


REPORT = "{{'loss': {loss}, 'grad_norm': 1.5, 'learning_rate': 4.99e-05, 'epoch': {step}.5}}\n"


@pytest.mark.parametrize(
    ("losses", "report", "verdict", "num_equal"),
    [
        ({13: 1.05, 14: 1.1}, 13, "no jump", 0),
        ({13: 4.0, 14: 3.9}, 13, "spike", 0),
        ({12: 1.05, 13: 1.0}, 12, "equal", 1),
    ],
)
def test_reports_without_steps_continue_where_their_epochs_do(
    tmp_path: Path, losses: dict[int, float], report: int, verdict: str, num_equal: int
) -> None:
    whole = {step: 1.0 + 0.05 * (step % 3 == 0) - 0.001 * (step % 2) for step in range(1, 13)}
    before = read_log(write(tmp_path / "a.log", whole, REPORT))
    seam = measure_seam(before, read_log(write(tmp_path / "b.log", losses, REPORT))).loss
    assert (seam.unit, seam.step, seam.verdict, seam.num_equal) == ("report", report, verdict, num_equal)
    assert f"report {report}" in seam_finding(seam, is_equal=None).claim or verdict == "equal"


def test_reports_that_do_not_say_where_they_belong_are_an_error(tmp_path: Path) -> None:
    logs = [read_log(write(tmp_path / f"{name}.log", {1: 3.0, 2: 3.0}, REPORT)) for name in "ab"]
    for lines, words in (({1: StepLine(None, 3.0, epochs=1.7)}, "epoch 1.7"), ({1: StepLine(None, 3.0)}, "epochs")):
        with pytest.raises(BslError, match=words):
            measure_seam(logs[0], LossLog(tmp_path, lines, is_numbered=False))
    with pytest.raises(BslError, match="have no step"):
        measure_seam(made({1: 3.0}), logs[1])


def test_too_few_steps_are_said_to_be_too_few() -> None:
    seam = measure_seam(made({1: 3.0}), made({2: 9.0}))
    assert (seam.loss.spread, seam.loss.is_jump, seam.loss.verdict) == (None, False, "unknown")


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


@pytest.fixture
def resumed(tmp_path: Path, tiny: Any) -> Callable[..., RunDir]:
    """`resumed(rise, change)`: a run of two attempts, the second from a checkpoint of the first, changed before."""

    def make(rise: float, change: Callable[[Any], None] = lambda checkpoint: None) -> RunDir:
        run = RunDir(tmp_path / "runs" / "spiked")
        checkpoint = tiny()
        change(checkpoint)
        saved = checkpoint.write(run.checkpoints)
        write_json(run.record, {"name": "spiked", "topology": {"tp": 2, "pp": 2, "dp": 2}})
        whole = curve(1, 25)
        parts = {"0001": {s: x for s, x in whole.items() if s <= 20}}
        parts["0002"] = {s: x + rise for s, x in whole.items() if s > 20}
        for name, losses in parts.items():
            run.attempt(name).make()
            write(run.attempt(name).log_file(4), losses)
        event = {"kind": "load", "path": str(saved), "checkpoint_step": 20}
        run.attempt("0002").event_file(0).write_text(json.dumps(event) + "\n")
        return run

    return make


def apart(checkpoint: Any) -> None:
    for (pp, _), params in checkpoint.state.items():
        if pp == 1:
            params["tied_modules.embed.weight"]["exp_avg"].neg_()
            params["tied_modules.embed.weight"]["fp32"].add_(1)


def logs_of(run: RunDir) -> list[Path]:
    return [run.attempt(name).log_file(4) for name in ("0001", "0002")]


CAUSE = "tied copies apart: not reduced: tied_modules.embed.weight"


def test_a_jump_in_a_run_is_explained_by_the_checkpoint_between(resumed: Any, diff: Any) -> None:
    run = resumed(1.0, apart)
    answer = diff("--seam", *logs_of(run), "--json")
    assert answer.code == 1
    assert (answer.document["seam"]["verdict"], answer.document["seam"]["causes"]) == ("spike", [CAUSE])
    spike = answer.document["findings"][-1]
    assert spike["pattern"] == "restart spike" and " step 21," in spike["claim"] and spike["claim"].endswith(CAUSE)


def test_status_names_the_tensor_too(resumed: Any) -> None:
    run = resumed(1.0, apart)
    answer = CliRunner().invoke(bsl, ["status", str(run.path)])
    assert f"likely cause  {CAUSE}\n" in answer.stdout, answer.output
    assert "restart spike: " in answer.stdout


def test_a_sound_checkpoint_is_not_called_the_cause_nor_equal_weights(resumed: Any, diff: Any) -> None:
    run = resumed(1.0)
    answer = diff("--seam", *logs_of(run), "--json")
    assert answer.document["seam"]["causes"] == []
    assert answer.document["findings"][-1]["pattern"] == "restart spike"
    assert "likely cause  unknown" in CliRunner().invoke(bsl, ["status", str(run.path)]).stdout


def test_equal_dumps_around_a_jump_point_at_data_and_rng(
    resumed: Any, diff: Any, save_arrays: Any, check_text: Any
) -> None:
    run = resumed(1.0, apart)
    for step, when in ((20, "after"), (21, "before")):
        metadata = {"rank": "0", "dp": "0", "pp": "0", "tp": "0", "step": str(step), "when": when}
        save_arrays(run.dump_file(step, when, 0), {"w": np.ones(3, np.float32)}, metadata)
    assert diff("--seam", *logs_of(run), "--json").document["findings"][-1]["pattern"] == "data or random state"
    stated = CliRunner().invoke(bsl, ["status", str(run.path)]).stdout
    (cause,) = (line for line in stated.splitlines() if line.startswith("likely cause"))
    check_text(cause)


def test_nothing_is_read_if_the_loss_did_not_jump(resumed: Any, diff: Any) -> None:
    answer = diff("--seam", *logs_of(resumed(0.0, apart)), "--json")
    assert (answer.code, answer.document["a"], answer.document["seam"]["verdict"]) == (0, None, "no jump")


def test_a_log_outside_of_a_run_has_no_attempt(tmp_path: Path, resumed: Any) -> None:
    run = resumed(0.0)
    assert attempt_of_log(logs_of(run)[1]) == run.attempt("0002")
    copy = write(tmp_path / "copy.log", {1: 2.0})
    assert attempt_of_log(copy) is None
