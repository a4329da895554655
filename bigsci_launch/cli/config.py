"""`bsl config`: check and show run files, list sites, print the schema."""

from __future__ import annotations

from pathlib import Path

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Habitual
from bigsci_launch.cli.options import JSON, SET
from bigsci_launch.errors import ConfigError

FILE = click.argument("file", type=click.Path(path_type=Path))


@click.group(
    cls=Habitual,
    short_help="Check and show run files, list sites.",
    epilog="Example: bsl config check configs/demo.yaml",
)
def config() -> None:
    """Check a run file, show its values and where they come from, list sites."""


@config.command(epilog="Example: bsl config check configs/demo.yaml --set training.steps=100")
@FILE
@SET
@JSON
@click.pass_context
def check(ctx: click.Context, file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Find every problem in a run file, each with its place. Exit code: 0 no problem, 2 problems."""
    from bigsci_launch.config.load import load_run
    from bigsci_launch.config.report import check_document, summary, warning_lines

    try:
        run = load_run(file, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        console.answer_json(check_document(str(file), None, error))
        ctx.exit(error.exit_code)
    if as_json:
        console.answer_json(check_document(str(file), run))
        return
    for line in warning_lines(run):
        console.talk(f"warning: {line}")
    console.answer(f"{file}: ok; {summary(run)}")


@config.command(epilog="Example: bsl config show configs/demo.yaml --set parallelism.data_parallel_size=4")
@FILE
@SET
@JSON
def show(file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value as it will be used, and where it comes from. The output is itself a run file."""
    from bigsci_launch.config.load import load_run
    from bigsci_launch.config.report import show_document, show_text, warning_lines

    run = load_run(file, overrides)
    if as_json:
        console.answer_json(show_document(run))
        return
    for line in warning_lines(run):
        console.talk(f"warning: {line}")
    console.answer(show_text(run).rstrip("\n"))


@config.command(epilog="Example: bsl config sites")
@JSON
def sites(as_json: bool) -> None:
    """List the sites that a run file in this folder can name."""
    from bigsci_launch.config.report import site_rows, sites_document
    from bigsci_launch.config.site import list_sites

    found = list_sites(Path())
    if as_json:
        console.answer_json(sites_document(found))
    else:
        console.answer_table(("site", "scheduler", ">ranks per node", "description"), site_rows(found))


@config.command(
    short_help="Print the JSON Schema of run files or site files.",
    epilog="Example: bsl config schema run > run.schema.json",
)
@click.argument("name", type=click.Choice(["run", "site"]), default="run")
def schema(name: str) -> None:
    """Print the JSON Schema of run files or site files, which lets editors complete and check them."""
    from bigsci_launch.config.reference import json_schema_text

    console.answer(json_schema_text("site" if name == "site" else "run").rstrip("\n"))
