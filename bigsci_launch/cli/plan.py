"""`bsl plan`: rank every layout of a model on a site; calibrate, predict, score and check.

`bsl plan FILE` searches; the other verbs are subcommands. A run file named like one is written `./calibrate`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bigsci_launch.cli import completion, console
from bigsci_launch.cli.options import JSON, SET

if TYPE_CHECKING:
    from bigsci_launch.config.schema.run import RunConfig
    from bigsci_launch.config.site import Site
    from bigsci_launch.plan.choose.answer import Answer
    from bigsci_launch.plan.price.calibration import Calibration
    from bigsci_launch.plan.survive.answer import SurvivalAnswer
    from bigsci_launch.plan.survive.findings import SurvivePrice

SEARCH = "search"
NO_RANKING = "--survive, --lose and --trace rank no layouts: leave out --free, --explain and --rejected"
PATH = click.Path(path_type=Path)
FROM_FILE = click.Path(path_type=Path, exists=True)


class SearchByDefault(click.Group):
    """A group whose first word may be a file, which means `search`. The group's help shows the options of `search`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [SEARCH, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] CONFIG")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="   or: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.commands[SEARCH].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(
    cls=SearchByDefault,
    short_help="Rank the layouts of a run by the time to finish.",
    epilog="Example: bsl plan configs/bloom-176b.yaml --top 5 --explain --html bloom.html",
)
def plan() -> None:
    """Rank every legal 3D layout of a run by the time to finish, before queueing a job.

    Each plan shows the predicted seconds per step with an error band, the throughput of a GPU, memory of the
    first/middle/last stage, the bubble, and the days to the end of the token budget. Plans are ranked by the days that
    3 of 4 such plans stay within. A narrow terminal shows fewer columns; --json has all of them.
    """


@plan.command(SEARCH, hidden=True, epilog="Example: bsl plan configs/bloom-176b.yaml --top 5 --explain")
@click.argument("config", type=PATH)
@click.option("--nodes", metavar="N|A:B", help="Node counts to try; default: slurm.nodes.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Plans to show.")
@SET
@click.option("--calibration", type=PATH, metavar="FILE", help="Constants to use; default: the site's.")
@click.option("--free", type=click.Choice(["layers", "heads"]), help="Try nearby layer counts or head counts too.")
@click.option("--explain", is_flag=True, help="Compare the winner with the runner-up, term by term.")
@click.option("--rejected", is_flag=True, help="Show how many layouts each rule refused, with an example.")
@click.option("--survive", metavar="f=N", help="Plan for N nodes that fail at the same time, without a restart.")
@click.option("--lose", metavar="NODE,...", help="Show what the loss of nodes does; with --survive, default f=1.")
@click.option("--trace", type=FROM_FILE, metavar="FILE", help="Replay a trace of lost nodes; also f=1.")
@click.option("--html", type=PATH, metavar="FILE", help="Write an HTML page with plots.")
@JSON
@click.pass_context
def search(
    ctx: click.Context,
    config: Path,
    nodes: str | None,
    top: int,
    overrides: tuple[str, ...],
    calibration: Path | None,
    free: Literal["layers", "heads"] | None,
    explain: bool,
    rejected: bool,
    survive: str | None,
    lose: str | None,
    trace: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Rank every legal layout of the run in CONFIG. Exit with 1 if none fits."""
    from bigsci_launch.config.load import resolve_run
    from bigsci_launch.plan.choose.answer import find_plans, request_plans
    from bigsci_launch.plan.show.page import render_page
    from bigsci_launch.plan.show.report import head_lines
    from bigsci_launch.plan.survive.findings import price_of_survive

    if survive is not None or lose is not None or trace:
        if free or explain or rejected:
            raise click.UsageError(NO_RANKING)
        _survive(config, overrides, calibration, nodes, survive, lose, trace, html, as_json=as_json)
        return
    run, site, _ = resolve_run(config, overrides)
    request = request_plans(run, site, _calibration_for(run, site, calibration), nodes=nodes)
    if not as_json:
        console.answer_wrapped(head_lines(request))
    with console.late_progress("searching", 100) as report_progress:
        answer = find_plans(request, free=free, report_progress=report_progress)
    price = price_of_survive(run, site, request.calibration) if request.refusal is None else None
    if html:
        _write_page(html, render_page(answer))
    if as_json:
        _answer_json(answer, price, top)
    else:
        _answer_text(answer, price, top, explain=explain, rejected=rejected)
    ctx.exit(int(answer.result is not None and not answer.result.plans))


def _calibration_for(run: RunConfig, site: Site, path: Path | None) -> Calibration | None:
    from bigsci_launch.plan.calibrate.own_runs import calibration_for

    known = calibration_for(run, site, path)
    if known.problem:
        console.talk(known.problem)
    return known.calibration


def _survive(
    config: Path,
    overrides: tuple[str, ...],
    calibration: Path | None,
    nodes: str | None,
    survive: str | None,
    lose: str | None,
    trace: Path | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    from bigsci_launch.config.load import resolve_run
    from bigsci_launch.plan.show import survival as words
    from bigsci_launch.plan.survive.answer import answer_survival

    run, site, _ = resolve_run(config, overrides)
    found = _calibration_for(run, site, calibration)
    with console.late_progress("planning", 100) as report_progress:
        answer = answer_survival(
            run, site, found, nodes=nodes, survive=survive, lose=lose, trace=trace, report_progress=report_progress
        )
    if html:
        from bigsci_launch.plan.show.survival_page import render_survival

        _write_page(html, render_survival(answer))
    if as_json:
        console.answer_json(words.survival_document(answer))
    else:
        _answer_survival(answer, found)


def _answer_survival(answer: SurvivalAnswer, calibration: Calibration | None) -> None:
    from bigsci_launch.plan.show import survival as words

    console.answer_lines(words.head_lines(answer))
    _say_assumed(calibration)
    console.answer_table(words.TEMPLATE_COLUMNS, words.template_cells(answer.survival))
    shown = words.shown_numbers(answer.survival)
    console.answer_table(words.NODES_COLUMNS, words.nodes_cells(answer.survival, shown))
    console.answer_lines(words.expected_lines(answer))
    if answer.node_mtbf_h:
        console.answer_table(words.STRATEGY_COLUMNS, words.strategy_cells(answer))
    if answer.trace:
        console.answer_lines(words.trace_lines(answer))
        console.answer_table(words.REPLAY_COLUMNS, words.replay_cells(answer))
    if answer.loss:
        console.answer_lines(words.loss_lines(answer))
        console.answer_table(words.LOSS_COLUMNS, words.loss_cells(answer.loss))


def _answer_json(answer: Answer, price: SurvivePrice | None, top: int) -> None:
    from bigsci_launch.plan.show import report
    from bigsci_launch.plan.survive.findings import survive_document

    console.answer_json({**report.answer_document(answer, top), "survive": survive_document(price)})


def _say_assumed(calibration: Calibration | None) -> None:
    from bigsci_launch.plan.price.hardware import assumed_line

    line = assumed_line(calibration.gpu) if calibration else None
    if line:
        console.answer(line)


def _answer_text(answer: Answer, price: SurvivePrice | None, top: int, *, explain: bool, rejected: bool) -> None:
    from bigsci_launch.plan.survive.findings import survive_lines

    _answer_plans(answer, top, explain=explain, rejected=rejected)
    if explain:
        console.answer_lines(survive_lines(price))


def _answer_plans(answer: Answer, top: int, *, explain: bool, rejected: bool) -> None:
    from bigsci_launch.plan.show import explain as words
    from bigsci_launch.plan.show import report, table

    result = answer.result
    if result is None:
        return
    if listed := result.listed(top):
        width = console.terminal_width() or table.PIPE_WIDTH
        console.answer_table(*table.plan_table(answer, listed, width))
    console.answer_wrapped(report.result_lines(answer, result))
    if not result.plans:
        console.talk(f"hint: {report.out_of_memory_hint(answer.request.configured)}")
    if rejected:
        console.answer_table(report.REFUSED_COLUMNS, report.refused_cells(result))
    if explain and len(result.plans) > 1:
        best, other = result.plans[:2]
        console.answer_table(words.EXPLAIN_COLUMNS, words.explain_cells(best, other))
        console.answer_wrapped(words.explain_lines(best, other))


def _write_page(path: Path, page: str) -> None:
    from bigsci_launch.pages import write_page

    write_page(path, page)
    console.talk(f"wrote {path}")


@plan.command(epilog="Example: bsl plan calibrate rows.csv --site jean-zay-a100 -o jean-zay-a100.json")
@click.argument("sources", nargs=-1, required=True, metavar="(ROWS.csv|RUN|LOG)...", type=FROM_FILE)
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="Where to write the calibration.")
@click.option(
    "--site", "site_name", metavar="NAME", shell_complete=completion.sites, help="Site on which the runs were measured."
)
def calibrate(sources: tuple[Path, ...], output: Path, site_name: str | None) -> None:
    """Fit the constants of a cluster to measured runs.

    A source is a CSV of measured rows, a run directory of bsl, or a log of Megatron, DeepSpeed, torchtitan or NeMo that
    shows its arguments. Prints each constant with its interval, the error on left-out runs, drift, and which runs would
    help. Without --site, the site and the GPU are those that the rows name; a calibration that names no site has the
    band of none everywhere.
    """
    from bigsci_launch.plan.calibrate.calibrate import calibrate as fit
    from bigsci_launch.plan.calibrate.physics import require_possible
    from bigsci_launch.plan.calibrate.place import place_of
    from bigsci_launch.plan.calibrate.report import CONSTANT_COLUMNS, constant_cells, fit_lines
    from bigsci_launch.plan.calibrate.sources import read_sources
    from bigsci_launch.plan.price.calibration import dump_calibration
    from bigsci_launch.typed_path import write_typed

    measurements, left = read_sources(sources)
    for reason in left:
        console.talk(f"not used: {reason}")
    place = place_of(measurements, site_name)
    for remark in place.remarks:
        console.talk(remark)
    command = " ".join(["bsl", "plan", *sys.argv[2:]])
    names = list(map(str, sources))
    with console.late_progress("calibrating", 100) as report:
        found = fit(measurements, place.gpu, site=place.site, sources=names, command=command, report_progress=report)
    require_possible(found.constants, found.gpu)
    write_typed(output, dump_calibration(found))
    console.answer_table(CONSTANT_COLUMNS, constant_cells(found))
    console.answer_lines(fit_lines(found))
    _say_assumed(found)
    console.talk(f"wrote {output}")


@plan.command(
    short_help="Append predictions to rows.",
    epilog="Example: bsl plan predict rows.csv --calibration jean-zay-a100.json -o predicted.csv",
)
@click.argument("rows", type=PATH)
@click.option("--calibration", type=PATH, metavar="FILE", help="Constants to use; default: the site's, else guesses.")
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="Where to write the table.")
@click.option(
    "--site",
    "site_name",
    metavar="NAME",
    shell_complete=completion.sites,
    help="Site of the rows; default: that of the runs.",
)
def predict(rows: Path, calibration: Path | None, output: Path, site_name: str | None) -> None:
    """Append predictions to every row that can be priced, and report why the others cannot.

    pred_band is the half-width of the band as a fraction: 9 of 10 measurements lie within. pred_closeness is 1 for a
    setup that was measured, and 0 for one that is like none, or from another site, with another framework or attention.
    """
    from bigsci_launch.plan.calibrate.place import calibration_named
    from bigsci_launch.plan.calibrate.predict import far_line, predict_row, predicted_csv
    from bigsci_launch.plan.calibrate.rows import read_rows
    from bigsci_launch.typed_path import write_typed

    known = calibration_named(calibration, site_name)
    columns, table = read_rows(rows)
    predicted = [predict_row(row, known) for row in table]
    write_typed(output, predicted_csv(columns, predicted))
    missing = [one for one in predicted if one.reason]
    for one in missing:
        console.talk(f"not priced: {one.row.name}: {one.reason}")
    if far := far_line(predicted):
        console.talk(f"warning: {far}")
    _say_assumed(known)
    console.answer(f"{len(predicted) - len(missing)} of {len(predicted)} rows priced: {output}")


@plan.command(
    short_help="Compare predictions with measurements.", epilog="Example: bsl plan score predicted.csv --json"
)
@click.argument("predicted", type=PATH)
@JSON
def score(predicted: Path, as_json: bool) -> None:
    """Compare predictions with measurements: errors, order inside sections, memory, out of memory."""
    from bigsci_launch.plan.calibrate.rows import read_rows
    from bigsci_launch.plan.calibrate.score import score_document, score_lines, score_rows

    found = score_rows(read_rows(predicted)[1])
    if as_json:
        console.answer_json(score_document(found))
        return
    console.answer_lines(score_lines(found))


@plan.command(
    short_help="Check the arithmetic of the whole run.",
    epilog="Example: bsl plan check configs/bloom-176b.yaml --starts 2022-03-11",
)
@click.argument("config", type=PATH)
@SET
@click.option(
    "--starts", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="First day of the run; default: today."
)
@click.option("--calibration", type=PATH, metavar="FILE", help="Constants to use; default: the site's.")
@JSON
@click.pass_context
def check(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    starts: click.DateTime | None,
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Check the arithmetic of the whole run. Each finding names its keys and its price. Exit with 1 on an error."""
    from datetime import datetime

    from bigsci_launch.config.finding import worst_first
    from bigsci_launch.config.load import resolve_run
    from bigsci_launch.plan.choose.check import check_document, check_everything, check_lines
    from bigsci_launch.plan.survive.findings import survive_findings

    run, site, _ = resolve_run(config, overrides)
    day = starts.date() if isinstance(starts, datetime) else None
    known = _calibration_for(run, site, calibration)
    findings = check_everything(run, site, known, starts=day)
    if not any(finding.is_error for finding in findings):
        findings = worst_first([*findings, *survive_findings(run, site, known)])
    if as_json:
        console.answer_json(check_document(run.run.name, findings))
    else:
        console.answer_lines(check_lines(run.run.name, findings))
        _say_assumed(known)
    if any(finding.is_error for finding in findings):
        ctx.exit(1)
