"""The steps that a start of a chain has printed, and whether its last one may be among those that are not printed."""

from __future__ import annotations

import pytest

from bigsci_launch.checkpoints.restart import read_losses
from bigsci_launch.runs.chain.starts import steps_of
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.signs import find_last_step
from bigsci_launch.runs.step_forms import forms_of


@pytest.mark.parametrize(
    ("steps", "total", "expected"),
    [
        ((), 60, (None, None)),
        ((13, 14), 60, (14, 60)),
        ((40, 50), 55, (50, 50)),
        ((40, 50), 60, (50, 60)),
        ((50,), 55, (50, 55)),
    ],
)
def test_the_steps_of_a_start(
    tmp_path_factory: pytest.TempPathFactory,
    steps: tuple[int, ...],
    total: int,
    expected: tuple[int | None, int | None],
) -> None:
    attempt = RunDir(tmp_path_factory.mktemp("run")).attempt("0001")
    attempt.make()
    attempt.log_file(0).write_text("".join(f" iteration {step}/ {total} | lm loss: 3.0 |\n" for step in steps))
    assert steps_of(attempt, has_records=False) == expected


def test_a_program_that_does_not_print_how_many_steps_there_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    attempt = RunDir(tmp_path_factory.mktemp("run")).attempt("0001")
    attempt.make()
    attempt.log_file(0).write_text("step:  7  loss: 12.25\nstep:  8  loss: 12.21\n")
    assert steps_of(attempt, has_records=False) == (8, None)


def test_the_form_of_the_run_file_is_that_of_its_requeues_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.attempt("0001").make()
    run.attempt("0001").step_line.write_text(r"at (?P<step>\d+)")
    [form] = forms_of(run.attempt("0001.r1"))
    assert form.line.pattern == r"at (?P<step>\d+)"
    assert len(forms_of(run.attempt("0002"))) > 9
    run.attempt("0001").step_line.write_bytes(b"\xff(")
    assert len(forms_of(run.attempt("0001"))) > 9


def test_the_output_that_requeues_share_has_steps_of_the_own_start_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The batch script repeats the last line of a rank that failed, and Slurm appends the output of the next start."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    first, second = run.attempt("0001"), run.attempt("0001.r1")
    first.make()
    second.make()
    first.log_file(0).write_text(" iteration 2/ 6 | lm loss: 2.0 |\n iteration 3/ 6 | lm loss: 1.0 |\n")
    second.log_file(0).write_text(" iteration 5/ 6 | lm loss: 0.9 |\n iteration 6/ 6 | lm loss: 0.8 |\n")
    first.job_output.write_text(
        "2026-11-21T02:59:32Z bsl: start attempt=0001 ranks=1\n"
        " iteration 2/ 6 | lm loss: 2.0 |\n"
        "bsl: first failure: rank 0 on n0: iteration 3/ 6 | lm loss: 1.0 |\n"
        "2026-11-21T02:59:52Z bsl: start attempt=0001.r1 ranks=1\n"
        "bsl: before: iteration 3/ 6 | lm loss: 1.0 |\n"
    )
    seen = find_last_step(second, {})
    assert seen is not None and (seen.step, seen.loss) == (6, 0.8)
    assert steps_of(second, has_records=False) == (6, 6)
    losses = read_losses(second, "begin")
    assert losses is not None and losses.by_step == {5: 0.9, 6: 0.8}
