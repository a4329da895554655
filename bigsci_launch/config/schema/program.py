"""Which program a run starts: `bsl train`, perhaps inside another program, or one of which nothing is known."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

TRAINER_MODULE = "bigsci_launch.train"
_SHELL_SCRIPT = re.compile(r"-[a-z]*c")
"""The option of a shell before its script: `-c`, `-lc`."""


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
    before = ""
    for word in command:
        yield from _split(word) if _SHELL_SCRIPT.fullmatch(before) else [word]
        before = word


def _split(script: str) -> list[str]:
    try:
        return shlex.split(script)
    except ValueError:  # a quote that is not closed: the shell will say so
        return script.split()
