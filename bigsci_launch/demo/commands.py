"""Runs `bsl` as a user would, and keeps its output."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.content import module_argv
from bigsci_launch.errors import BslError


@dataclass(frozen=True, slots=True)
class Spoken:
    """A finished command: its words, its output and its exit code."""

    words: tuple[str, ...]
    stdout: str
    stderr: str
    returncode: int

    @property
    def line(self) -> str:
        return shlex.join(("bsl", *self.words))


def speak(words: Sequence[str], *, timeout_s: float, log: Path) -> Spoken:
    """Run `bsl WORDS` and append its output to `log`; after `timeout_s`, end it together with its children.

    Raises:
        BslError: the command took too long.
    """
    process = subprocess.Popen(
        [*module_argv(sys.executable, "bigsci_launch"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
        if isinstance(error, subprocess.TimeoutExpired):
            raise BslError(
                f"`bsl {shlex.join(words)}` took longer than {timeout_s:.0f} s", hint=f"see {log}"
            ) from error
        raise
    spoken = Spoken(tuple(words), stdout, stderr, process.returncode)
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"$ {spoken.line}\n{stdout}{stderr}[exit {process.returncode}]\n\n")
    return spoken


def require_success(spoken: Spoken, log: Path) -> Spoken:
    """Return `spoken` if it exited with 0.

    Raises:
        BslError: the command failed; the message quotes its last line, and its hint if it has one.
    """
    if spoken.returncode != 0:
        words = (spoken.stderr or spoken.stdout).strip().splitlines() or ["(no output)"]
        said = "; ".join(words[-2:] if words[-1].startswith("hint: ") else words[-1:])
        raise BslError(f"`{spoken.line}` exited with {spoken.returncode}: {said}", hint=f"see all output in {log}")
    return spoken
