"""The `bsl` group and its error boundary: the only place that turns an error into a message and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from bigsci_launch import __version__
from bigsci_launch.cli import console
from bigsci_launch.cli.cancel import cancel
from bigsci_launch.cli.checkpoint import checkpoint
from bigsci_launch.cli.cluster import cluster
from bigsci_launch.cli.config import config
from bigsci_launch.cli.control import control
from bigsci_launch.cli.data import data
from bigsci_launch.cli.demo import demo
from bigsci_launch.cli.diff_weights import diff_weights
from bigsci_launch.cli.hang_lab import hang_lab
from bigsci_launch.cli.list import list_
from bigsci_launch.cli.logs import logs
from bigsci_launch.cli.nodes import nodes
from bigsci_launch.cli.notify import notify
from bigsci_launch.cli.plan import plan
from bigsci_launch.cli.rehearse import rehearse
from bigsci_launch.cli.spy import spy
from bigsci_launch.cli.status import status
from bigsci_launch.cli.submit import submit
from bigsci_launch.cli.trace import trace
from bigsci_launch.cli.train import train
from bigsci_launch.cli.watch import watch
from bigsci_launch.cli.why import why
from bigsci_launch.errors import BslError, ConfigError


class Boundary(click.Group):
    """Prints an error and its hint on stderr and exits with its code; BSL_DEBUG=1 lets the traceback through."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BslError as error:
            if os.environ.get("BSL_DEBUG") == "1":
                raise
            console.talk(error_text(error))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            console.talk("interrupted")
            ctx.exit(130)
        except BrokenPipeError:
            # The reader went away (`bsl logs | head`): not an error, but Python must not complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(141)
        except OSError as error:
            ctx.exit(report_system_error(error))

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:  # `--help` and `--version` print before a command is invoked
            sys.exit(report_system_error(error))


def report_system_error(error: OSError) -> int:
    """Print the system's error and return the exit code: another user's file, or a full disk."""
    if os.environ.get("BSL_DEBUG") == "1":
        raise error
    where = "" if error.filename is None else f"{error.filename}: "
    said = BslError(f"{where}{(error.strerror or str(error)).lower()}", hint="set BSL_DEBUG=1 to see the traceback")
    console.talk(error_text(said))
    return said.exit_code


LONGEST_LINE = 4000
"""Characters of an error: a damaged file may have one value of a million, and the error quotes it."""


def error_text(error: BslError) -> str:
    """Return what the user reads: one line per problem, then the hint."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    lines = [f"error: {problem}" for problem in problems] or [f"error: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ..." for line in lines)


@click.group(
    cls=Boundary,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: bsl submit configs/demo.yaml --dry-run",
)
@click.version_option(__version__, prog_name="bsl")
@click.option("-v", "--verbose", count=True, help="Log more to stderr (-vv: everything).")
def bsl(verbose: int) -> None:
    """Launch 3D-parallel training on Slurm, see what every rank is doing, and compare weights."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(console.PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


bsl.add_command(cancel)
bsl.add_command(checkpoint)
bsl.add_command(cluster)
bsl.add_command(config)
bsl.add_command(control)
bsl.add_command(data)
bsl.add_command(demo)
bsl.add_command(diff_weights)
bsl.add_command(hang_lab)
bsl.add_command(list_)
bsl.add_command(logs)
bsl.add_command(nodes)
bsl.add_command(notify)
bsl.add_command(plan)
bsl.add_command(rehearse)
bsl.add_command(spy)
bsl.add_command(status)
bsl.add_command(submit)
bsl.add_command(trace)
bsl.add_command(train)
bsl.add_command(watch)
bsl.add_command(why)


def main() -> None:
    """Run the command that the words after `bsl` name."""
    console.open_closed_streams()
    bsl(prog_name="bsl")
