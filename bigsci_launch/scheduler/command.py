"""Runs Slurm's commands; no other module does. Every call has a time limit and keeps the command and its output.

Slurm's commands read many options from the environment (SLURM_*, SBATCH_*, SQUEUE_*, ...). Inside an allocation the
variables of the outer job would change the meaning of a call, so all are removed except those that select a cluster.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bigsci_launch.errors import SlurmError, SlurmRefused, SlurmUnanswered, SlurmUnavailable

DEFAULT_TIMEOUT_S = 30.0
_SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SALLOC|SCONTROL|PMI|PMIX)_.*")
_KEPT = frozenset(
    {
        "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT",
        "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS",
    }
)  # fmt: skip
# How Slurm 20.11 to 26.05 say that the cluster cannot be reached, as opposed to refusing a request.
_UNAVAILABLE = re.compile(
    r"Unable to contact slurm controller|Could not establish a configuration source|cannot stat file"
    r"|Socket timed out|(?:controller|slurmctld|Controller is) in standby mode|Connection refused|authentication error"
    r"|failed to fetch config|Could not find config file|If munged is up|Invalid authentication credential",
    re.IGNORECASE,
)
# How they say that the request was sent, and that its answer was lost.
_UNANSWERED = re.compile(
    r"Socket timed out|Zero Bytes were transmitted or received|Unexpected missing socket|Connection reset|Broken pipe",
    re.IGNORECASE,
)
_NO_CONTACT = re.compile(rf"Unable to contact slurm controller|in standby mode|{_UNANSWERED.pattern}", re.IGNORECASE)
_ASKS = (("squeue",), ("sinfo",), ("sacct",), ("scontrol", "show"), ("scontrol", "--oneliner", "show"))
AGAIN_AFTER_S = 2.0
"""Slurm's commands look for slurmctld for MessageTimeout, 10 s by default. One that fails sooner met a restart, or a
change to another slurmctld, and is repeated once."""
# What Slurm itself writes to the stderr of a program that it runs: errors, and a remark of no use.
_ERROR = re.compile(r"(srun|slurmstepd)(-[^:]*)?: (error|fatal|Force Terminated)")
_REMARK = "srun: cluster configuration lacks support for cpu binding"


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended: its arguments, exit status and output."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def has_command(name: str) -> bool:
    """Whether the command is installed. That does not mean that a cluster answers."""
    return shutil.which(name) is not None


def scrubbed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables from which Slurm's commands take options."""
    return {name: value for name, value in environment.items() if not is_scrubbed(name)}


def is_scrubbed(name: str) -> bool:
    """Whether Slurm's commands must not see the variable `name`."""
    return _SCRUBBED.fullmatch(name) is not None and name not in _KEPT


def run_slurm(
    argv: Sequence[str],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    check: bool = True,
    cwd: Path | None = None,
    extra_environment: Mapping[str, str] | None = None,
) -> Completed:
    """Run one of Slurm's commands and return its result.

    With `check` False any exit status is returned, unless the command reports that Slurm is unavailable. A question, or
    a request that was not sent, is repeated once if slurmctld was gone for a moment.

    Raises:
        SlurmUnavailable: the command is missing, Slurm is not configured here, or its controller does not answer.
            SlurmUnanswered if it may have got the request.
        SlurmRefused: the exit status is not 0; the message contains Slurm's own.
    """
    if not has_command(argv[0]):
        raise SlurmUnavailable(
            f"{argv[0]}: command not found", hint=f"run on a machine with Slurm, or {_LOCAL_HINT}", argv=argv
        )
    environment = {**scrubbed_environment(os.environ), **(extra_environment or {})}
    began = time.monotonic()
    completed = _run(tuple(argv), timeout_s, cwd, environment)
    if time.monotonic() - began < AGAIN_AFTER_S and _may_repeat(completed):
        time.sleep(AGAIN_AFTER_S)
        completed = _run(tuple(argv), timeout_s, cwd, environment)
    if completed.returncode != 0:
        if is_unavailable(completed):
            raise unavailable(completed, slurm_text(completed.stderr))
        if check:
            raise refused(completed)
    return completed


def _may_repeat(completed: Completed) -> bool:
    """Whether slurmctld may answer in a moment, and cannot do twice what it is asked for."""
    if completed.returncode == 0 or not _NO_CONTACT.search(completed.stderr):
        return False
    is_sent = _UNANSWERED.search(completed.stderr) is not None
    return not is_sent or any(completed.argv[: len(words)] == words for words in _ASKS)


class CommandAnswer(NamedTuple):
    """Whether Slurm did what it was asked for; `words` are its output, or why not."""

    is_done: bool
    words: str
    is_lost: bool = False
    """Whether the answer got lost: Slurm may have done it."""


def ask_slurm(*argv: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> CommandAnswer:
    """Run one of Slurm's commands where a refusal is an answer: sites forbid some on compute nodes."""
    try:
        done = run_slurm(argv, timeout_s=timeout_s, check=False)
    except SlurmError as error:
        return CommandAnswer(False, error.message, isinstance(error, SlurmUnanswered))
    if done.returncode == 0:
        return CommandAnswer(True, done.stdout.strip())
    return CommandAnswer(False, (done.stderr or done.stdout).strip() or f"{argv[0]} exited with {done.returncode}")


_LOCAL_HINT = "use `bsl submit --local` to run without it (`bsl cluster up` starts a small Slurm to try)"


def is_unavailable(completed: Completed) -> bool:
    """Whether a command failed because it found no cluster, as opposed to being refused."""
    return _UNAVAILABLE.search(completed.stderr) is not None or _UNANSWERED.search(completed.stderr) is not None


def unavailable(completed: Completed, why: str) -> SlurmUnavailable:
    """The error for a command that found no cluster, or got no answer."""
    is_sent = completed.returncode < 0 or _UNANSWERED.search(completed.stderr) is not None
    error = SlurmUnanswered if is_sent else SlurmUnavailable
    return error(
        f"{completed.argv[0]}: Slurm is not available: {why}",
        hint=f"check SLURM_CONF and that slurmctld runs (`scontrol ping`), or {_LOCAL_HINT}",
        argv=completed.argv,
        returncode=completed.returncode,
        stderr=completed.stderr,
    )


def refused(completed: Completed) -> SlurmRefused:
    """The error for a command that Slurm refused, with all its words: what a site's plugin says comes first in them."""
    words = "; ".join(_said(completed.stderr)) or f"exit status {completed.returncode} and no message"
    return SlurmRefused(
        f"{completed.argv[0]}: Slurm refused: {words}",
        argv=completed.argv,
        returncode=completed.returncode,
        stderr=completed.stderr,
    )


def slurm_text(stderr: str) -> str:
    """Return Slurm's own message on one line: its last three lines, without the prefix `sbatch: error: `."""
    return "; ".join(_said(stderr)[-3:])


def _said(stderr: str) -> list[str]:
    lines = (re.sub(r"^[a-z_]+: (?:error|fatal): ", "", line).strip() for line in stderr.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def _run(argv: tuple[str, ...], timeout_s: float, cwd: Path | None, environment: Mapping[str, str]) -> Completed:
    held = _HeldInterrupt()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=cwd,
            env=dict(environment),
        )
    except BaseException:
        held.release()
        raise
    try:
        held.release()
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        stderr = _stop(process)
        words = slurm_text(stderr)
        said = f" ({words})" if words else ""
        raise unavailable(Completed(argv, -1, "", stderr), f"no answer in {timeout_s:g} s{said}") from None
    except BaseException:
        _stop(process)
        raise
    return Completed(argv, process.returncode, stdout, stderr)


class _HeldInterrupt:
    """Ctrl-C waits from here to `release`: inside of Popen it would leave a command that is neither known nor ended."""

    def __init__(self) -> None:
        self._came = False
        before = signal.getsignal(signal.SIGINT)
        # An ignored signal must stay ignored in the command, which a handler here would undo.
        can_hold = callable(before) and threading.current_thread() is threading.main_thread()
        self._before = before if can_hold else None
        if can_hold:
            signal.signal(signal.SIGINT, self._keep)

    def _keep(self, *_: object) -> None:
        self._came = True

    def release(self) -> None:
        """Raises whatever Ctrl-C raises, if it came."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._came:
            signal.raise_signal(signal.SIGINT)


def stream_slurm(
    argv: Sequence[str],
    *,
    stdin: str,
    until: Callable[[], float],
    on_line: Callable[[str], None],
    extra_environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command that may never end, passing each line of its output on as it arrives; return its stderr.

    `until()` returns the deadline as a `time.monotonic()` value and is asked again after each line. At the deadline
    the command is ended; every line printed before has been passed on.

    Raises:
        SlurmUnavailable: the command is missing.
    """
    import tempfile  # slow to import, and programs of a job script never come here

    if not has_command(argv[0]):
        raise SlurmUnavailable(f"{argv[0]}: command not found", hint="run on a machine with Slurm", argv=argv)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as words:
        source.write(stdin.encode())
        source.seek(0)
        environment = {**scrubbed_environment(os.environ), **(extra_environment or {})}
        process = subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE, stderr=words, env=environment)
        try:
            _pass_lines(process, until, on_line)
        finally:
            if process.poll() is None:
                _end(process)
            if process.stdout is not None:
                process.stdout.close()
        words.seek(0)
        return words.read().decode("utf-8", "replace")


def _pass_lines(process: subprocess.Popen[bytes], until: Callable[[], float], on_line: Callable[[str], None]) -> None:
    assert process.stdout is not None
    tail = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, until() - time.monotonic())):
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                _wait(process, max(1.0, until() - time.monotonic()))
                return
            *lines, tail = (tail + data).split(b"\n")
            for line in lines:
                on_line(line.decode("utf-8", "replace"))


def _wait(process: subprocess.Popen[Any], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[Any]) -> None:
    """End `process`: TERM first, so that srun also ends its step."""
    process.terminate()
    if _wait(process, 2.0) is None:
        process.kill()
        process.wait()


def _stop(process: subprocess.Popen[str]) -> str:
    """End `process`: TERM first, so that srun also ends its step. Returns its stderr."""
    process.terminate()
    try:
        return process.communicate(timeout=2)[1] or ""
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.communicate(timeout=2)[1] or ""
    except subprocess.TimeoutExpired:
        # Sites wrap commands in scripts: what such a script has started may hold the pipe for as long as it likes.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return ""
