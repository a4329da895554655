"""Imports torch once and forks ranks, so that a lab that starts many short jobs waits for torch only once.

    python nursery.py        reads lines {"arguments": [... of rank_runner.py], "environment": {...}, "output": FILE}

Prints the process ID of each runner. The runner is rank_runner.py itself, in a fork, and writes the usual records
(pids/, logs/, exits/). Such a rank differs from a normally started one only in /proc/PID/environ and in its outermost
frames. Ends, with its runners, when its standard input ends. Stand-alone: the standard library and torch.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rank_process
import rank_run
import rank_runner
import torch.distributed


class Become(BaseException):
    """Raised in a forked rank to leave the runner's frames and run the program instead."""

    def __init__(self, program: list[str]) -> None:
        self.program = program


class Fork:
    """A forked child with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: Any) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkedRunner(rank_run.Runner):
    """A runner whose program runs in a fork of this process. PROGRAM is `PYTHON FILE ARGUMENTS`."""

    def start(self, program: list[str]) -> Any:
        reader, writer = os.pipe()
        child = os.fork()
        if child:
            os.close(writer)
            return Fork(child, os.fdopen(reader, "rb"))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.close(reader)
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)
        os.close(writer)
        os.environ.update(self.rank.environment())
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch has already read it, before the fork
        if self.rank.rings.folder is not None:
            record_calls()
        raise Become(program[1:])


def record_calls() -> None:
    """Do what the start of Python does for a new rank that keeps a ring: here, torch was loaded before the fork."""
    import ring_torch

    site = runpy.run_path(str(Path(rank_runner.__file__).parent / "ring_site" / "sitecustomize.py"))
    for name in site["WhenImported"].NAMES:
        if name in sys.modules:
            ring_torch.watch(sys.modules[name])


def serve() -> None:
    """Fork a runner for each line of the standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            begin_runner(request)
            os._exit(run_rank(request["arguments"]))
        print(child, flush=True)


def begin_runner(request: dict[str, Any]) -> None:
    """Set up what a newly started process has: its own session, environment and streams."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["environment"])
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)


def run_rank(arguments: list[str]) -> int:
    options = rank_runner.parse_arguments(arguments)
    rank_process.end_with_parent(signal.SIGTERM)
    return ForkedRunner(options).run(options.program)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the runners
    try:
        serve()
    except Become as rank:
        program = rank.program
    else:
        return
    sys.argv = program
    sys.path[0] = str(Path(program[0]).parent)
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
