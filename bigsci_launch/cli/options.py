"""Options that many commands have, and what Tab completes in them."""

from __future__ import annotations

import click

from bigsci_launch.cli import completion

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completion.keys,
    help="Override a value of the file.",
)
RUN = click.argument("run", required=False, shell_complete=completion.runs)
RUN_OR_FOLDER = click.argument("run", required=False, metavar="[RUN|FOLDER]", shell_complete=completion.runs)
RUN_REQUIRED = click.argument("run", shell_complete=completion.runs)
RUNS = click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=completion.runs)
