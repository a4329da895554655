"""The error boundary of the command line: the only place that turns an error into a message and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import BslError, ConfigError

HABITS = {
    **dict.fromkeys(("ls", "ps", "squeue", "sacct", "runs", "jobs"), "list"),
    **dict.fromkeys(("run", "start", "launch", "sbatch", "srun", "apply", "resume", "restart"), "submit"),
    **dict.fromkeys(("kill", "scancel", "stop", "end", "abort"), "cancel"),
    **dict.fromkeys(("show", "info", "describe", "scontrol", "get"), "status"),
    **dict.fromkeys(("log", "tail", "attach", "cat"), "logs"),
    **dict.fromkeys(("delete", "remove", "del"), "rm"),
    **dict.fromkeys(("stack", "stacks", "dump", "hang", "py-spy", "pystack"), "spy"),
    **dict.fromkeys(("diff", "compare"), "diff-weights"),
    **dict.fromkeys(("check", "validate", "lint"), "config"),
    **dict.fromkeys(("sinfo", "node"), "nodes"),
    **dict.fromkeys(("man", "usage"), "help"),
    **dict.fromkeys(("cluster start", "cluster create", "cluster launch"), "cluster up"),
    **dict.fromkeys(("cluster stop", "cluster delete", "cluster destroy", "cluster rm"), "cluster down"),
    **dict.fromkeys(("cluster info", "cluster list", "cluster ls", "cluster show"), "cluster status"),
    "cluster kill": "cluster kill-node",
    **dict.fromkeys(("config validate", "config lint"), "config check"),
    **dict.fromkeys(("config print", "config get", "config cat"), "config show"),
    **dict.fromkeys(("checkpoint check", "checkpoint validate"), "checkpoint verify"),
    **dict.fromkeys(("checkpoint rm", "checkpoint delete", "checkpoint clean"), "checkpoint prune"),
    "trace show": "trace last",
}
"""What other tools call the commands."""


class Habitual(click.Group):
    """A group that names the command that a word of another tool means."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            typed = " ".join((*ctx.command_path.split()[1:], args[0]))
            if typed in HABITS:
                ctx.fail(f"No such command {args[0]!r}. Did you mean `bsl {HABITS[typed]}`?")
        return super().resolve_command(ctx, args)


class Boundary(Habitual):
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
            ctx.exit(console.INTERRUPTED)
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
