"""Imports torch and DeepSpeed once and forks ranks: a rank then starts in a fraction of the time of a new process.

    python forked_ranks.py    reads lines {"program": [...], "environment": {...}, "log": FILE}

`program` is what follows `python` on a command line: `-m MODULE ARGUMENT...` or `FILE ARGUMENT...`. Prints a line
{"started": PID} for each, and {"ended": PID, "status": N} when it has ended, as `subprocess` counts (-9: SIGKILL). Ends
when its standard input ends. A forked rank differs from a new process in what it has imported, and in that all ranks
hash texts alike; those that Slurm and the tutorial start are new processes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any


class Become(BaseException):
    """Raised in a fork, which leaves the frames of the server and then runs its program."""

    def __init__(self, program: list[str]) -> None:
        self.program = program


def import_all() -> None:
    from bigsci_launch.train import startup

    # Which device a rank takes is its own matter: each fork chooses.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    startup.quieten_libraries()
    startup.start_deepspeed()
    # With `survive`, each rank would import them, and sympy with them.
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import bigsci_launch.train.loop
    import bigsci_launch.train.uneven.life  # noqa: F401

    # Collections in a fork, several of them at its end, skip what was imported: that saves half a second of CPU time.
    gc.collect()
    gc.freeze()


def serve() -> None:
    """Fork a rank for each line of the standard input, and report those that end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    held = b""
    while True:
        ready = select.select([0, reader], [], [])[0]
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)
            report_ended()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                start(json.loads(line), (reader, writer))


def start(request: dict[str, Any], pipe: tuple[int, int]) -> None:
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in pipe:
            os.close(descriptor)
        begin(request)
        raise Become(request["program"])
    print(json.dumps({"started": child}), flush=True)


def begin(request: dict[str, Any]) -> None:
    """Set up what a new process has: its environment, its path and its streams."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def report_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            print(json.dumps({"ended": found[0], "status": os.waitstatus_to_exitcode(found[1])}), flush=True)


def main() -> None:
    import_all()
    try:
        serve()
    except Become as rank:
        program = rank.program
    else:
        return
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
