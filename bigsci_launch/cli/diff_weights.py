"""`bsl diff-weights`: compare two sets of weights, or check one against itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bigsci_launch.cli import console

if TYPE_CHECKING:
    from bigsci_launch.weights.compare.comparison import Comparison, Selection
    from bigsci_launch.weights.explain.seam import Seam
    from bigsci_launch.weights.files.sources import Weights

# The reader of the files reports what it cannot read, with exit code 4.
PATH = click.Path(path_type=Path, readable=False)


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
    metavar="REL",
    help="Largest relative L2 distance that counts as equal.",
)
@click.option("--include", multiple=True, metavar="REGEX", help="Compare only tensors whose name matches (repeatable).")
@click.option("--exclude", multiple=True, metavar="REGEX", help="Leave out tensors whose name matches (repeatable).")
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
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare the weights in A with those in B, tensor by tensor and bit by bit.

    A and B are DeepSpeed or universal checkpoints, folders of .pt or .safetensors files, single files, per-rank weight
    dumps or digests of them, dumps of printed tensors, or runs, by name or directory (their latest checkpoint).
    Neither torch nor any code inside the files is run.

    Exit code: 0 equal, 1 different, 4 something could not be read (the rest is still compared).

    \b
    Examples:
      bsl diff-weights runs/demo/checkpoints/global_step10 runs/again/checkpoints/global_step10
      bsl diff-weights runs/demo/dumps/step-000010-after runs/again/dumps/step-000011-before
      bsl diff-weights --audit runs/demo
      bsl diff-weights a/ b/ --seam first.log second.log --json | jq .findings
    """
    from bigsci_launch.weights.compare.comparison import parse_selection

    _require_sides(ctx, a, b, audit, seam)
    if tolerance is not None and not a:
        raise click.UsageError("--tolerance is for A and B: copies in one checkpoint are equal or not", ctx)
    selection = parse_selection(include, exclude)
    found = _audited(audit, selection) if audit else _compared(a, b, selection, tolerance) if a and b else None
    jump = _seam(seam) if seam else None
    _answer(ctx, found, jump, html, as_json)


def _require_sides(
    ctx: click.Context, a: Path | None, b: Path | None, audit: Path | None, seam: tuple[Path, Path] | None
) -> None:
    if audit and a:
        raise click.UsageError("--audit looks at one checkpoint alone: leave out A and B", ctx)
    if a and not b:
        raise click.UsageError("B is missing: name two sides, or one with --audit", ctx)
    if not (a or audit or seam):
        raise click.UsageError("name A and B, or --audit DIR, or --seam LOG_A LOG_B", ctx)


def _compared(a: Path, b: Path, selection: Selection, tolerance: float | None) -> Comparison:
    from bigsci_launch.weights.compare.compare import compare_weights
    from bigsci_launch.weights.locate.locate import open_weights

    left = _with_checkpoint(open_weights(_weights_folder(a), "a"))
    right = _with_checkpoint(open_weights(_weights_folder(b), "b"))
    with console.late_progress("comparing", max(len(left.sources), len(right.sources))) as report_progress:
        found = compare_weights(left, right, selection=selection, tolerance=tolerance, report_progress=report_progress)
    if not found.differences and not found.apart:
        return found
    from bigsci_launch.weights.explain.explain import explain

    return explain(found, left, right)


def _audited(path: Path, selection: Selection) -> Comparison:
    from bigsci_launch.weights.compare.compare import require_numpy
    from bigsci_launch.weights.locate.locate import open_weights

    require_numpy("an audit measures tensors")
    from bigsci_launch.weights.explain.audit import audit_weights

    weights = _with_checkpoint(open_weights(_weights_folder(path), "a"))
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


def _with_checkpoint(weights: Weights) -> Weights:
    """Return a dump together with the checkpoint that its run saved at the same step; other weights unchanged."""
    from bigsci_launch.runs.layout import checkpoint_of_dump
    from bigsci_launch.weights.locate.locate import open_weights

    saved = checkpoint_of_dump(weights.sources[0].path.parent) if weights.layout == "rank dumps" else None
    return weights if saved is None else replace(weights, moments_from=open_weights(saved))


def _seam(logs: tuple[Path, Path]) -> Seam:
    from bigsci_launch.weights.explain.seam import measure_seam, read_log

    return measure_seam(read_log(logs[0]), read_log(logs[1]))


def _answer(ctx: click.Context, found: Comparison | None, jump: Seam | None, html: Path | None, as_json: bool) -> None:
    from bigsci_launch.weights.show.report import COLUMNS, as_document, closing_line, summary_lines, table_rows

    document: dict[str, Any] | None = None
    if jump is not None:
        from bigsci_launch.weights.compare.comparison import with_finding
        from bigsci_launch.weights.explain.seam import seam_document, seam_finding

        document = seam_document(jump)
        found = with_finding(found, seam_finding(jump, is_equal=found.is_equal if found else None))
    assert found is not None
    if as_json:
        console.answer_json(as_document(found, document))
    else:
        for line in summary_lines(found):
            console.answer(line)
        if found.differences:
            console.answer_table(COLUMNS, table_rows(found))
        if closing := closing_line(found):
            console.answer(closing)
    if html is not None:  # last, so that the answer is not lost if the page cannot be written
        from bigsci_launch.weights.show.page import write_page

        write_page(found, html)
    ctx.exit(found.exit_code)
