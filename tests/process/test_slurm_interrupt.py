"""Ctrl-C while one of Slurm's commands is being started: the command is ended, whenever the signal comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, subprocess, sys
from bigsci_launch.scheduler.command import run_slurm

original = subprocess.Popen._execute_child

def interrupted(self, *arguments, **named):
    original(self, *arguments, **named)
    print(self.pid, flush=True)
    signal.raise_signal(signal.SIGINT)  # the command runs, and its Popen has not been returned yet

subprocess.Popen._execute_child = interrupted
try:
    run_slurm(["sinfo"], timeout_s=20)
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_command_that_was_just_started_ends_with_its_caller(tmp_path: Path) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sinfo").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    pid, said = done.stdout.split()
    assert said == "interrupted"
    assert not Path("/proc", pid).exists()


IGNORED = """
import signal
from bigsci_launch.scheduler.command import run_slurm
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(run_slurm(["sinfo"], timeout_s=20).stdout)
"""


def test_a_signal_that_is_ignored_stays_ignored_in_the_command(tmp_path: Path) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\nkill -INT $$; echo lives\n")
    (tmp_path / "sinfo").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", IGNORED], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "lives", done.stderr
