"""`bsl diff-weights`: compare two sets of weights, or check one against itself."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import JSON
from bigsci_launch.progress import Progress

if TYPE_CHECKING:
    from bigsci_launch.weights.answer import Question, WeightsAnswer

# The reader of the files reports what it cannot read, with exit code 4.
PATH = click.Path(path_type=Path, readable=False)


def _finite(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a distance", ctx, parameter)
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
@click.option("--html", type=PATH, metavar="FILE", help="Write an HTML page with a heat map over (pp, tp).")
@JSON
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
    from bigsci_launch.checkpoints.around import digests_of, open_sides, with_seam
    from bigsci_launch.weights.answer import Question, answer_question
    from bigsci_launch.weights.compare.comparison import parse_selection
    from bigsci_launch.weights.compare.reading import DEFAULT_JOBS, ReadPlan

    _require_sides(ctx, a, b, audit, seam)
    if tolerance is not None and not a:
        raise click.UsageError("--tolerance is for A and B: copies in one checkpoint are equal or not", ctx)
    if not a and (jobs or sample or digests):
        raise click.UsageError("--jobs, --sample and --digests are for A and B", ctx)
    selection = parse_selection(include, exclude)
    share = None if sample is None else parse_share(ctx, sample)
    sides = open_sides(*(path for path in (audit, a, b) if path))
    plan = ReadPlan(jobs or DEFAULT_JOBS, share, digests_of(sides) if digests else {})
    question = Question(sides, selection, tolerance, plan)
    if seam:
        question = with_seam(question, seam)
    with _progress(question) as report_progress:
        answer = answer_question(question, report_progress)
    _show(answer, html, as_json)
    ctx.exit(answer.found.exit_code)


def _require_sides(
    ctx: click.Context, a: Path | None, b: Path | None, audit: Path | None, seam: tuple[Path, Path] | None
) -> None:
    if audit and a:
        raise click.UsageError("--audit looks at one checkpoint alone: leave out A and B", ctx)
    if a and not b:
        raise click.UsageError("B is missing: name two sides, or one with --audit", ctx)
    if not (a or audit or seam):
        raise click.UsageError("name A and B, or --audit DIR, or --seam LOG_A LOG_B", ctx)


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


def _progress(question: Question) -> AbstractContextManager[Progress]:
    from bigsci_launch.checkpoints.around import UNASKED_BYTES

    if len(question.sides) < 2:
        return console.late_progress("auditing", sum(len(side.sources) for side in question.sides))
    left, share = question.sides[0], question.plan.sample or 1.0
    if left.num_bytes() > UNASKED_BYTES:
        _hint_at_srun()
    return console.late_bytes("comparing", lambda: int(left.num_bytes() * share))


def _hint_at_srun() -> None:
    """Print how to compare on a node of its own, where this may be a login node: with Slurm, and outside a job."""
    import os
    import shlex
    import sys

    from bigsci_launch.scheduler.command import has_command

    if has_command("srun") and "SLURM_JOB_ID" not in os.environ:
        console.talk(f"hint: on a node of its own: srun --nodes=1 --exclusive bsl {shlex.join(sys.argv[1:])}")


def _show(answer: WeightsAnswer, html: Path | None, as_json: bool) -> None:
    from bigsci_launch.weights.show.report import COLUMNS, closing_line, summary_lines, table_rows

    found = answer.found
    if as_json:
        console.answer_json(answer.document)
    else:
        console.answer_wrapped(summary_lines(found))
        if found.differences:
            console.answer_table(COLUMNS, table_rows(found), spare=(">max ulp", ">max abs"))
        if closing := closing_line(found):
            console.answer(closing)
    if html is not None:  # last, so that the answer is not lost if the page cannot be written
        from bigsci_launch.weights.show.page import write_page

        write_page(found, html)
