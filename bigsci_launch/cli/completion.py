"""`bsl completion`, and what Tab completes: runs, jobs, sites and keys of run files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from bigsci_launch.cli import console
from bigsci_launch.errors import BslError

if TYPE_CHECKING:
    from pydantic import BaseModel

VARIABLE = "_BSL_COMPLETE"
FILES = {
    "bash": (".local/share/bash-completion/completions/bsl", "open a new shell"),
    "zsh": (".zfunc/_bsl", "put `fpath+=~/.zfunc` before `compinit` in ~/.zshrc, and open a new shell"),
    "fish": (".config/fish/completions/bsl.fish", "open a new shell"),
}
"""Where each shell looks for it below the home folder, and what is left to do."""
SHELL = click.argument("shell", required=False, type=click.Choice(sorted(FILES)))


def runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from bigsci_launch.runs.find import runs_root
    from bigsci_launch.runs.layout import find_runs

    with suppress(BslError, OSError):
        return [run.name for run in find_runs(runs_root()) if run.name.startswith(incomplete)]
    return []


def jobs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the number of a job of the caller that waits or runs."""
    from bigsci_launch.scheduler.slurm import queued_scripts

    with suppress(BslError, OSError):
        return [job.job_id for job in queued_scripts(os.getuid()) if job.job_id.startswith(incomplete)]
    return []


def sites(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from bigsci_launch.config.site import find_sites

    return [name for name in find_sites() if name.startswith(incomplete)]


def keys(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a key of a run file, such as `training.steps`."""
    from bigsci_launch.config.schema.run import RunConfig

    return [key for key in _keys(RunConfig) if key.startswith(incomplete)]


def _keys(model: type[BaseModel]) -> Iterator[str]:
    from bigsci_launch.config.problems import section_in

    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        yield from (f"{name}.{key}" for key in _keys(section)) if section is not None else [name]


@click.group(short_help="Let Tab complete names and keys.", epilog="Example: bsl completion install")
def completion() -> None:
    """Let Tab complete commands, options, runs, jobs, sites and keys."""


@completion.command(epilog="Example: bsl completion show bash")
@SHELL
def show(shell: str | None) -> None:
    """Print the lines that a shell reads; default: those of $SHELL."""
    console.answer(_source(_shell(shell)))


@completion.command(epilog="Example: bsl completion install zsh")
@SHELL
def install(shell: str | None) -> None:
    """Write them to where the shell looks for them; default: for $SHELL."""
    from bigsci_launch.safe_files import write_file

    name = _shell(shell)
    file, then = FILES[name]
    path = Path.home() / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _source(name) + "\n")
    console.answer(f"wrote {path}")
    console.talk(f"next: {then}")


def _shell(name: str | None) -> str:
    found = name or Path(os.environ.get("SHELL", "")).name
    if found not in FILES:
        raise click.UsageError(f"name a shell, {', '.join(sorted(FILES))}: $SHELL is {found or 'not set'}")
    return found


def _source(shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of FILES"
    return kind(click.Group(), {}, "bsl", VARIABLE).source()
