"""Runs a program of one machine, and traces the calls of its processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bigsci_launch.content import packaged
from bigsci_launch.errors import BslError, RunDirError
from bigsci_launch.runs.control.request import TRACE, Request, put_request
from bigsci_launch.runs.layout import AttemptDir


def run_traced(folder: Path, request: Request, program: Sequence[str]) -> int:
    """Run `program` to its end with its calls traced into `folder`; return its exit code, or 128 + its signal.

    Raises:
        RunDirError: the folder holds files of another trace, or cannot be written.
        BslError: the program cannot be started.
    """
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RunDirError(f"{folder}: it is not empty", hint="name another folder with --output")
        put_request(AttemptDir(folder), request)
    except OSError as error:
        raise RunDirError(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    try:
        process = subprocess.Popen(program, env={**os.environ, **_variables(folder)})
    except OSError as error:
        shutil.rmtree(AttemptDir(folder).requests)
        folder.rmdir()
        raise BslError(f"cannot start {program[0]}: {(error.strerror or str(error)).lower()}") from error
    return _wait(process)


def _variables(folder: Path) -> dict[str, str]:
    site = packaged("diagnostics", "ring_site")
    path = os.environ.get("PYTHONPATH")
    return {
        "BSL_RING_DIR": str(folder),
        "BSL_TRACE": str(AttemptDir(folder).requests / f"{TRACE}.json"),
        "PYTHONPATH": f"{site}{os.pathsep}{path}" if path else str(site),
    }


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end. Ctrl-C reaches the program too, and it decides what becomes of it; TERM is passed on."""
    before = [
        (number, signal.signal(number, handler))
        for number, handler in (
            (signal.SIGINT, signal.SIG_IGN),
            (signal.SIGTERM, lambda *_: process.terminate()),
        )
    ]
    try:
        code = process.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
