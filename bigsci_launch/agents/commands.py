"""Asks a question by running the command of `bsl` that answers it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from bigsci_launch.agents.fit import ToolAnswer, answer_of
from bigsci_launch.content import module_argv
from bigsci_launch.errors import BslError

OptionValue: TypeAlias = str | int | float | Iterable[str] | None
NO_OPTIONS: Mapping[str, OptionValue] = MappingProxyType({})
LONGEST_S = 600.0


class BadQuestion(BslError):
    """An argument of a tool that no command would take for a value."""

    exit_code = 2


def ask(
    command: str, *values: str | None, options: Mapping[str, OptionValue] = NO_OPTIONS, newest_count: bool = False
) -> ToolAnswer:
    """Run a command with `--option=value` and then `values`; those that are None are left out. An answer is what it
    prints, errors included.

    No value can pass for an option, and the command has no stdin: that of this process is the agent's.

    Raises:
        BadQuestion: a value has a NUL character.
    """
    words = [*command.split(), *_option_words(options), "--", *(value for value in values if value is not None)]
    if any("\0" in word for word in words):
        raise BadQuestion("a NUL character is in an argument", hint="leave it out")
    argv = [*module_argv(sys.executable, "bigsci_launch"), *words]
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""}
    title = f"bsl {' '.join(word for word in words if word != '--')}"
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return answer_of(f"{title}: no answer within {LONGEST_S:.0f} s", "", newest_count=newest_count)
    text = "\n".join(part.decode("utf-8", "replace").rstrip("\n") for part in (done.stdout, done.stderr) if part)
    return answer_of(f"{title}: exit code {done.returncode}", text, newest_count=newest_count)


def _option_words(options: Mapping[str, OptionValue]) -> list[str]:
    words = []
    for name, value in options.items():
        values = [value] if isinstance(value, (str, int, float)) else value or ()
        words += [f"--{name}={each}" for each in values]
    return words
