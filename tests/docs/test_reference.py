"""Generated pages are fresh, every command shows an example, and the options are those of the reviewed list."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "help" / "options.txt"
SOURCES = [path for folder in ("bigsci_launch", "diagnostics", "slurm") for path in sorted((ROOT / folder).rglob("*"))]


def commands(command: click.Command = bsl, path: str = "bsl") -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name, depth first, including hidden ones."""
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from commands(command.commands[name], f"{path} {name}")


def help_of(path: str, command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=path, terminal_width=200, max_content_width=200))


def test_generated_pages_are_fresh() -> None:
    argv = [sys.executable, str(ROOT / "docs" / "reference" / "generate.py"), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `make docs`"


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*found, id=found[0]) for found in commands() if not found[1].hidden]
)
def test_help_shows_an_example_of_the_command(path: str, command: click.Command) -> None:
    text = help_of(path, command)
    example = text[text.index("Example") :] if "Example" in text else ""
    assert re.search(rf"(^|\s){path}\b", example), f"`{path} --help` shows no example of itself:\n{text}"


@pytest.mark.parametrize(("path", "command"), [pytest.param(*found, id=found[0]) for found in commands()])
def test_lists_of_commands_fit_on_a_small_terminal(path: str, command: click.Command) -> None:
    text = command.get_help(click.Context(command, info_name=path, terminal_width=80, max_content_width=80))
    listed = text.partition("Commands:")[2]
    assert "..." not in listed


def test_options_are_those_of_the_reviewed_list(check_golden: Callable[[Path, str], None]) -> None:
    lines = []
    for path, command in commands():
        lines.append(path)
        for parameter in command.params:
            words = "|".join([*parameter.opts, *parameter.secondary_opts])
            value = "" if getattr(parameter, "is_flag", False) or getattr(parameter, "count", False) else "=VALUE"
            lines.append(f"{path} {words}{value}" if isinstance(parameter, click.Option) else f"{path} <{words}>")
    check_golden(GOLDEN, "\n".join(lines) + "\n")


def test_every_variable_has_a_meaning_and_every_meaning_a_variable() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    named = set(re.findall(r"^\| `(BSL_[A-Z_]+)`", page, re.MULTILINE))
    files = [path for path in SOURCES if path.suffix in (".py", ".sh", ".j2", ".yaml") and "assets" not in path.parts]
    used = {name for path in files for name in re.findall(r"\bBSL_[A-Z_]*[A-Z]\b", path.read_text())}
    assert used == named
