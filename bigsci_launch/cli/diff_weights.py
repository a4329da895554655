"""`bsl diff-weights`: compare two sets of weights, or check one against itself."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console

if TYPE_CHECKING:
    from bigsci_launch.runs.restart.restart import Restart
    from bigsci_launch.weights.compare.comparison import Comparison, Selection
    from bigsci_launch.weights.compare.reading import ReadPlan
    from bigsci_launch.weights.explain.seam import Seam
    from bigsci_launch.weights.files.sources import Weights

# The reader of the files reports what it cannot read, with exit code 4.
PATH = click.Path(path_type=Path, readable=False)


def _finite(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no distance", ctx, parameter)
    return value


@click.command("diff-weights", short_help="Compare weights tensor by tensor and bit by bit.")
@click.argument("a", type=PATH, required=False)
@click.argument("b", type=PATH, required=False)
@click.option("--audit", type=PATH, metavar="DIR", help="Check one checkpoint against itself instead.")
@click.option(
    "--seam",
    nargs=2,
    type=PATH,
    metavar="LOG_A LOG_B",
    help="Measure the loss jump between two logs; alone or with A B.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    callback=_finite,
    metavar="REL",
    help="Largest relative L2 distance that counts as equal.",
)
@click.option("--include", multiple=True, metavar="REGEX", help="Compare only tensors whose name matches (repeatable).")
@click.option("--exclude", multiple=True, metavar="REGEX", help="Leave out tensors whose name matches (repeatable).")
@click.option("--jobs", type=click.IntRange(min=1, max=256), metavar="N", help="Threads that read and compare.")
@click.option("--sample", metavar="SHARE", help="Read only a share of each tensor, such as 1%, for a first look.")
@click.option("--digests", is_flag=True, help="Compare the digests recorded when A and B were saved, not the bytes.")
@click.option("--html", type=PATH, metavar="FILE", help="Write the answer as a page with a heat map over (pp, tp).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def diff_weights(
    ctx: click.Context,
    a: Path | None,
    b: Path | None,
    audit: Path | None,
    seam: tuple[Path, Path] | None,
    tolerance: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    jobs: int | None,
    sample: str | None,
    digests: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare the weights in A with those in B, tensor by tensor and bit by bit.

    A and B are DeepSpeed or universal checkpoints, folders of Trainer or accelerate, folders of .pt or .safetensors
    files, an index of shards, single files, per-rank weight dumps or digests of them, dumps of printed tensors, or
    runs, by name or directory (their latest checkpoint). Every file in a folder is compared, at any depth.
    Neither torch nor any code inside the files is run.

    Exit code: 0 equal, 1 different, 4 not everything was read (the rest is still compared).

    \b
    Examples:
      bsl diff-weights runs/demo/checkpoints/global_step10 runs/again/checkpoints/global_step10
      bsl diff-weights runs/demo/dumps/step-000010-after runs/again/dumps/step-000011-before
      bsl diff-weights --audit runs/demo
      bsl diff-weights --sample 1% runs/big/checkpoints/global_step10 runs/again/checkpoints/global_step10
      bsl diff-weights a/ b/ --seam first.log second.log --json | jq .findings
    """
    from bigsci_launch.weights.compare.comparison import parse_selection

    _require_sides(ctx, a, b, audit, seam)
    if tolerance is not None and not a:
        raise click.UsageError("--tolerance is for A and B: copies in one checkpoint are equal or not", ctx)
    if not a and (jobs or sample or digests):
        raise click.UsageError("--jobs, --sample and --digests are for A and B", ctx)
    selection = parse_selection(include, exclude)
    wanted = _Wanted(jobs, None if sample is None else parse_share(ctx, sample), digests)
    found = _audited(audit, selection) if audit else _compared(a, b, selection, tolerance, wanted) if a and b else None
    jump = _seam(seam) if seam else None
    restart = _restart(seam) if seam else None
    if found is None and jump is not None and restart is not None and jump.loss.is_changed:
        found = _compared_around(restart, jump.loss.step, selection)
    _answer(ctx, found, _Seams(jump, restart) if jump else None, html, as_json)


def _require_sides(
    ctx: click.Context, a: Path | None, b: Path | None, audit: Path | None, seam: tuple[Path, Path] | None
) -> None:
    if audit and a:
        raise click.UsageError("--audit looks at one checkpoint alone: leave out A and B", ctx)
    if a and not b:
        raise click.UsageError("B is missing: name two sides, or one with --audit", ctx)
    if not (a or audit or seam):
        raise click.UsageError("name A and B, or --audit DIR, or --seam LOG_A LOG_B", ctx)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """How the user wants the bytes of A and B to be read."""

    jobs: int | None
    sample: float | None
    digests: bool


def parse_share(ctx: click.Context, text: str) -> float:
    """Parse a share such as `1%` or `0.01`.

    Raises:
        click.UsageError: it is none, or not between 0 and 1.
    """
    try:
        share = float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise click.UsageError(f"--sample {text}: name a share between 0 and 1, such as 1% or 0.01", ctx)
    return share


def _compared(a: Path, b: Path, selection: Selection, tolerance: float | None, wanted: _Wanted) -> Comparison:
    from bigsci_launch.watch.seam import UNASKED_BYTES, with_checkpoint
    from bigsci_launch.weights.compare.compare import compare_weights
    from bigsci_launch.weights.locate.locate import open_weights

    left = with_checkpoint(open_weights(_weights_folder(a), "a"))
    right = with_checkpoint(open_weights(_weights_folder(b), "b"))
    plan = _read_plan(left, right, wanted)
    share = wanted.sample or 1.0
    if left.num_bytes() > UNASKED_BYTES:
        _hint_at_srun()
    with console.late_bytes("comparing", lambda: int(left.num_bytes() * share)) as report_progress:
        found = compare_weights(
            left, right, selection=selection, tolerance=tolerance, plan=plan, report_progress=report_progress
        )
    if found.extent.is_sample or not (found.differences or found.apart):
        return found  # the patterns in a difference are those of whole tensors
    from bigsci_launch.weights.explain.explain import explain

    return explain(found, left, right)


def _hint_at_srun() -> None:
    """Print how to compare on a node of its own, where this may be a login node: there is Slurm, and this is no job."""
    import os
    import shlex
    import sys

    from bigsci_launch.scheduler.command import has_command

    if has_command("srun") and "SLURM_JOB_ID" not in os.environ:
        console.talk(f"hint: on a node of its own: srun --nodes=1 --exclusive bsl {shlex.join(sys.argv[1:])}")


def _read_plan(a: Weights, b: Weights, wanted: _Wanted) -> ReadPlan:
    from bigsci_launch.weights.compare.reading import DEFAULT_JOBS, ReadPlan

    digests = {**_recorded_digests(a), **_recorded_digests(b)} if wanted.digests else {}
    return ReadPlan(wanted.jobs or DEFAULT_JOBS, wanted.sample, digests)


def _recorded_digests(weights: Weights) -> dict[Path, str]:
    """Return the digests of a checkpoint's files, recorded by the ranks that saved them.

    Raises:
        CheckpointError: there are none.
    """
    from bigsci_launch.errors import CheckpointError
    from bigsci_launch.runs.verify import recorded_digests

    try:
        return recorded_digests(weights.sources[0].path.parent)
    except CheckpointError as error:
        raise CheckpointError(
            f"no digests to compare: {error.message}", hint="leave out --digests to compare the bytes"
        ) from error


def _audited(path: Path, selection: Selection) -> Comparison:
    from bigsci_launch.watch.seam import with_checkpoint
    from bigsci_launch.weights.compare.compare import require_numpy
    from bigsci_launch.weights.locate.locate import open_weights

    require_numpy("an audit measures tensors")
    from bigsci_launch.weights.explain.audit import audit_weights

    weights = with_checkpoint(open_weights(_weights_folder(path), "a"))
    with console.late_progress("auditing", len(weights.sources)) as report_progress:
        return audit_weights(weights, selection=selection, report_progress=report_progress)


def _weights_folder(path: Path) -> Path:
    """Return the checkpoints folder of a run that is named, or given by its directory; else the path itself."""
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.runs.layout import RunDir

    with suppress(PermissionError):
        run = RunDir(path if path.exists() else runs_root() / path)
        if run.record.is_file():
            return run.checkpoints
    return path


def _seam(logs: tuple[Path, Path]) -> Seam:
    from bigsci_launch.weights.explain.seam import measure_seam, read_log

    return measure_seam(read_log(logs[0]), read_log(logs[1]))


@dataclass(frozen=True, slots=True)
class _Seams:
    """The seam between two logs, and what is recorded of that restart if the second log is that of an attempt."""

    seam: Seam
    restart: Restart | None


def _restart(logs: tuple[Path, Path]) -> Restart | None:
    """Return what the run of the second log knows of its restart; None if the log lies in no run."""
    from bigsci_launch.runs.attempts import run_of
    from bigsci_launch.runs.layout import attempt_of_log
    from bigsci_launch.runs.restart.restart import find_restart

    attempt = attempt_of_log(logs[1])
    return None if attempt is None else find_restart(run_of(attempt), attempt)


def _compared_around(restart: Restart, step: int, selection: Selection) -> Comparison | None:
    """Compare the dumps on both sides of a restart (`step` is the first after it), else audit the checkpoint between.

    None if the run has neither, or if what it has is too large or cannot be read: nobody asked for it.
    """
    from bigsci_launch.errors import BslError
    from bigsci_launch.watch.seam import UNASKED_BYTES, weights_around

    around = weights_around(restart, step, UNASKED_BYTES)
    if around is None:
        return None
    with suppress(BslError):
        if around.after is None:
            return _audited(around.before, selection)
        return _compared(around.before, around.after, selection, None, _Wanted(None, None, False))
    return None


def _answer(ctx: click.Context, found: Comparison | None, at: _Seams | None, html: Path | None, as_json: bool) -> None:
    from bigsci_launch.weights.show.report import COLUMNS, as_document, closing_line, summary_lines, table_rows

    document: dict[str, Any] | None = None
    if at is not None:
        from bigsci_launch.weights.compare.comparison import with_finding
        from bigsci_launch.weights.explain.seam import causes_in, seam_document, seam_finding

        causes = [*(at.restart.causes if at.restart else ()), *causes_in(found)]
        document = seam_document(at.seam, causes)
        is_equal = found.is_equal if found and not found.is_audit else None
        found = with_finding(found, seam_finding(at.seam.loss, is_equal=is_equal, causes=causes))
    assert found is not None
    if as_json:
        console.answer_json(as_document(found, document))
    else:
        console.answer_wrapped(summary_lines(found))
        if found.differences:
            console.answer_table(COLUMNS, table_rows(found), spare=(">max ulp", ">max abs"))
        if closing := closing_line(found):
            console.answer(closing)
    if html is not None:  # last, so that the answer is not lost if the page cannot be written
        from bigsci_launch.weights.show.page import write_page

        write_page(found, html)
    ctx.exit(found.exit_code)
