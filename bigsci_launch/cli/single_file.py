"""The commands of `bsl.pyz`: those that a login node needs on which nothing can be installed."""

from __future__ import annotations

import click

from bigsci_launch import __version__
from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Boundary
from bigsci_launch.cli.diff_weights import diff_weights
from bigsci_launch.cli.slow import slow
from bigsci_launch.cli.spy import spy
from bigsci_launch.cli.why import why
from bigsci_launch.errors import BslError

COMMANDS = (spy, why, slow, diff_weights)


class SingleFile(Boundary):
    """A group that says which commands are missing in it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise BslError(
                f"bsl.pyz has no `{args[0]}`: it has {', '.join(sorted(self.commands))}",
                hint="install bsl for the other commands: docs/how-to/install.md",
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=SingleFile,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: python3 bsl.pyz why 1234",
)
@click.version_option(__version__, "-V", "--version", prog_name="bsl")
def single_file() -> None:
    """Find out why a job hangs, ended or is slow, and compare weights, where nothing can be installed."""


for _command in COMMANDS:
    single_file.add_command(_command)


def main() -> None:
    console.open_closed_streams()
    single_file(prog_name="bsl.pyz")
