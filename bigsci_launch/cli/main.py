"""The `bsl` group with all its commands."""

from __future__ import annotations

import logging
import sys

import click

from bigsci_launch import __version__
from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Boundary
from bigsci_launch.cli.cancel import cancel
from bigsci_launch.cli.checkpoint import checkpoint
from bigsci_launch.cli.cluster import cluster
from bigsci_launch.cli.completion import completion
from bigsci_launch.cli.config import config
from bigsci_launch.cli.control import control
from bigsci_launch.cli.data import data
from bigsci_launch.cli.demo import demo
from bigsci_launch.cli.diff_weights import diff_weights
from bigsci_launch.cli.hang_lab import hang_lab
from bigsci_launch.cli.help import help_
from bigsci_launch.cli.list import list_
from bigsci_launch.cli.logs import logs
from bigsci_launch.cli.mcp import mcp
from bigsci_launch.cli.metrics import metrics
from bigsci_launch.cli.nodes import nodes
from bigsci_launch.cli.notify import notify
from bigsci_launch.cli.open import open_
from bigsci_launch.cli.plan import plan
from bigsci_launch.cli.rehearse import rehearse
from bigsci_launch.cli.rm import rm
from bigsci_launch.cli.slow import slow
from bigsci_launch.cli.spy import spy
from bigsci_launch.cli.status import status
from bigsci_launch.cli.submit import submit
from bigsci_launch.cli.top import top
from bigsci_launch.cli.trace import trace
from bigsci_launch.cli.train import train
from bigsci_launch.cli.watch import watch
from bigsci_launch.cli.why import why


@click.group(
    cls=Boundary,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: bsl submit configs/demo.yaml --dry-run",
)
@click.version_option(__version__, "-V", "--version", prog_name="bsl")
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
bsl.add_command(completion)
bsl.add_command(config)
bsl.add_command(control)
bsl.add_command(data)
bsl.add_command(demo)
bsl.add_command(diff_weights)
bsl.add_command(hang_lab)
bsl.add_command(help_)
bsl.add_command(list_)
bsl.add_command(logs)
bsl.add_command(mcp)
bsl.add_command(metrics)
bsl.add_command(nodes)
bsl.add_command(notify)
bsl.add_command(open_)
bsl.add_command(plan)
bsl.add_command(rehearse)
bsl.add_command(rm)
bsl.add_command(slow)
bsl.add_command(spy)
bsl.add_command(status)
bsl.add_command(submit)
bsl.add_command(top)
bsl.add_command(trace)
bsl.add_command(train)
bsl.add_command(watch)
bsl.add_command(why)


def main() -> None:
    console.use_utf8()
    console.open_closed_streams()
    bsl(prog_name="bsl")
