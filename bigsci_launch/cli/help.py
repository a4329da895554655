"""`bsl help`: the help of a command, as `COMMAND --help` prints it."""

from __future__ import annotations

import click

from bigsci_launch.cli import console


@click.command("help", short_help="Show the help of a command.", epilog="Example: bsl help checkpoint verify")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of COMMAND, as `bsl COMMAND --help` does; without one, that of `bsl`."""
    context = ctx.find_root()
    for word in words:
        group = context.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"`{context.command_path}` has no commands below it")
        name, command, _ = group.resolve_command(context, [word])
        context = click.Context(command or group, context, name)
    console.answer(context.get_help())
