"""Which program a run starts: `bsl train`, perhaps inside another program, or one of which nothing is known."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

TRAINER_MODULE = "bigsci_launch.train"
_SHELL = re.compile(r"(.*/)?((ba|da|k|z|tc|c|fi)?sh|su)")
_SHELL_SCRIPT = re.compile(r"-[a-z]*c")
"""The option of a shell before its script: `-c`, `-lc`."""


def is_shell(word: str) -> bool:
    """Whether a word of a command is a shell, which expands the variables of a script after `-c`."""
    return _SHELL.fullmatch(word) is not None


def script_at(command: Sequence[str]) -> int | None:
    """Return which word of a command is the script of a shell in it; None if none is."""
    after_shell = False
    for at, (word, following) in enumerate(pairwise(command), 1):
        after_shell = after_shell or is_shell(word)
        if after_shell and _SHELL_SCRIPT.fullmatch(word):
            return at if following else None
    return None


def starts_trainer(command: Sequence[str] | None) -> bool:
    """Whether `run.command` starts `bsl train`: without one, or where its words say so.

    It may be wrapped, as in `[numactl, --cpunodebind=0, python, -m, bigsci_launch.train]`, or be a line of a shell.
    """
    return command is None or any(_names_trainer(one, other) for one, other in pairwise(_words(command)))


def _names_trainer(one: str, other: str) -> bool:
    if other == "train":
        return PurePosixPath(one).name == "bsl"
    return other == TRAINER_MODULE and one == "-m"


def _words(command: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command, and those of the script of a shell in it."""
    script = script_at(command)
    for at, word in enumerate(command):
        yield from split_script(word) if at == script else [word]


def split_script(script: str) -> list[str]:
    """Return the words of a line of a shell, as far as they can be told."""
    try:
        return shlex.split(script)
    except ValueError:  # a quote that is not closed: the shell will say so
        return script.split()
