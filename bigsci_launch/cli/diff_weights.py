"""`bsl diff-weights`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console

if TYPE_CHECKING:
    from bigsci_launch.weights.comparison import Comparison


@click.command("diff-weights")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--tolerance", type=click.FloatRange(min=0.0), metavar="REL", help="Relative L2 distance that counts as equal."
)
@click.option("--include", multiple=True, metavar="REGEX", help="Compare only tensors whose name matches (repeatable).")
@click.option("--exclude", multiple=True, metavar="REGEX", help="Leave out tensors whose name matches (repeatable).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def diff_weights(
    ctx: click.Context,
    a: Path,
    b: Path,
    tolerance: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the weights in A with those in B, tensor by tensor and bit by bit.

    A and B are DeepSpeed checkpoints, folders of .pt or .safetensors files, single files, per-rank weight dumps, or
    runs (their latest checkpoint). Neither torch nor any code inside the files is run.

    Exit code: 0 equal, 1 different, 4 something could not be read (the rest is still compared).

    \b
    Examples:
      bsl diff-weights runs/demo/checkpoints/global_step10 runs/again/checkpoints/global_step10
      bsl diff-weights runs/demo/dumps/step-000010-after runs/again/dumps/step-000011-before
      bsl diff-weights a/ b/ --json | jq .findings
    """
    from bigsci_launch.weights.compare import compare_weights, explain
    from bigsci_launch.weights.comparison import parse_selection
    from bigsci_launch.weights.locate import open_weights

    selection = parse_selection(include, exclude)
    left, right = open_weights(_weights_folder(a), "a"), open_weights(_weights_folder(b), "b")
    with console.late_progress("comparing", max(len(left.sources), len(right.sources))) as advance:
        found = compare_weights(left, right, selection=selection, tolerance=tolerance, advance=advance)
    _answer(explain(found), as_json)
    ctx.exit(found.exit_code)


def _weights_folder(path: Path) -> Path:
    """The checkpoints of a run where the user names its directory, else the path itself."""
    from bigsci_launch.runs.layout import RunDir

    run = RunDir(path)
    return run.checkpoints if run.record.is_file() else path


def _answer(comparison: Comparison, as_json: bool) -> None:
    from bigsci_launch.weights.report import COLUMNS, as_document, summary_lines, table_rows

    if as_json:
        console.answer_json(as_document(comparison))
        return
    for line in summary_lines(comparison):
        console.answer(line)
    if comparison.differences:
        console.answer_table(COLUMNS, table_rows(comparison))
