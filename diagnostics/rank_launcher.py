"""A launcher in place of a rank, such as torchrun, and its workers, which are the ranks. For rank_runner.py.

    rank_runner.py --ranks-per-task 8 ... -- torchrun train.py

The launcher is no rank: its records are called `launcher-0001`. Its workers are known by the RANK that it gives them. A
worker is a Python program, and `ring_site/sitecustomize.py` is first on its path: before anything else it becomes a
runner, which starts the same program again, as its rank. The launcher sees the process that it has started end as the
program does. A program that is not Python, or that ignores PYTHONPATH, runs without these records.

torchrun finds what it needs in variables of its own, such as PET_NNODES. The line of a shell finds NNODES, NODE_RANK,
NPROC_PER_NODE, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shlex
import signal
import sys
from pathlib import Path

from rank_log import say
from rank_process import Rank, start_program
from rank_program import below
from rank_rings import SITE, Rings, first_on_path
from rank_run import Runner, new_log, new_rank, place

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import argparse
    import subprocess
    from types import FrameType

# As in ring_site/sitecustomize.py: what starts the runner of a worker, as a line of a shell.
RUNNER_VARIABLE = "BSL_WORKER_RUNNER"
OF_A_WORKER = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_THE_RUN = ("topology", "ranks_per_node", "stop_signal", "log_limit_mib", "ring")
"""Options that the runners of workers have, too."""


class Launcher(Rank):
    """A launcher and its records. Its number counts launchers."""

    @staticmethod
    def name_of(number: int) -> str:
        return f"launcher-{number:04d}"

    @classmethod
    def make(cls, options: argparse.Namespace) -> Launcher:
        where = place(options)
        name, attempt = cls.name_of(where["rank"]), options.attempt_dir.absolute()
        made = cls(options, where, options.topology, Rings("none", attempt, name), new_log(options, name))
        made.identity, made.coordinate = {"launcher": made.number}, {}
        return made

    def environment_of(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the whole environment of the launcher."""
        world_size = math.prod(self.topology.values())
        where = {
            "NNODES": str(world_size // options.ranks_per_task),
            "NPROC_PER_NODE": str(options.ranks_per_task),
            "NODE_RANK": str(self.number),
            **{name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ},
        }
        found = {
            **os.environ,
            **self.environment(),
            **where,
            **{f"PET_{name}": value for name, value in where.items()},
            "WORLD_SIZE": str(world_size),
            "PYTHONPATH": first_on_path(Path(__file__).resolve().parent / SITE),
            RUNNER_VARIABLE: shlex.join(self.runner_of_workers(options)),
        }
        return {name: value for name, value in found.items() if name not in OF_A_WORKER}

    def runner_of_workers(self, options: argparse.Namespace) -> list[str]:
        program = str(Path(__file__).absolute().with_name("rank_runner.py"))
        given = [f"--{name.replace('_', '-')}={as_text(getattr(options, name))}" for name in OF_THE_RUN]
        given += [f"--attempt-dir={self.attempt}", f"--launcher={self.number}", f"--launcher-pid={os.getpid()}"]
        return [sys.executable, "-I", "-S", program, *given, *(["--local"] if options.rank is not None else [])]

    def numbers(self) -> dict[str, str]:
        return {}

    def recorder_files(self) -> list[str]:
        return []


def as_text(value: object) -> str:
    """Return the value of an option as it is written on a command line."""
    return ",".join(f"{axis}={size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


class LauncherRunner(Runner):
    """Runs a launcher. The request to save and stop is for its workers alone, whose runners take URG for it."""

    def make_rank(self, options: argparse.Namespace) -> Rank:
        made = Launcher.make(options)
        self.environment = made.environment_of(options)
        return made

    def start(self, program: list[str]) -> subprocess.Popen[bytes]:
        return start_program(program, self.environment, self.stop_signal)

    @property
    def owns_rest(self) -> bool:
        return True

    def must_end_rest(self, _status: int) -> bool:
        """Ranks do not outlive their launcher. Slurm would kill them at once, and they would leave no record."""
        return True

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            super().receive(number, frame)
        elif self.is_local:  # Slurm signals every process of a step itself
            for pid, _, _ in below(os.getpid(), set()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGURG)


class Worker(Rank):
    """A rank that a launcher has started, perhaps in place of one that has ended."""

    def numbers(self) -> dict[str, str]:
        return {}  # its launcher has set them


class WorkerRunner(Runner):
    """Runs the program of a worker, and ends as it does: by the same signal, which its launcher would see otherwise."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if os.getsid(0) != os.getpid():  # else the launcher signals the whole session, as torchrun does
            self.forwarded = {**self.forwarded, signal.SIGTERM: signal.SIGTERM}

    def make_rank(self, options: argparse.Namespace) -> Rank:
        made = new_rank(options, worker_place(options), Worker)
        made.node = made.host if options.local else made.node
        made.more = {"launcher": options.launcher}
        with contextlib.suppress(OSError):
            (made.attempt / "exits" / f"{made.name}.json").unlink()
        return made

    def start(self, program: list[str]) -> subprocess.Popen[bytes]:
        return start_program(program, {**os.environ, **self.rank.environment()}, self.stop_signal, is_tied=True)

    def run(self, program: list[str]) -> int:
        code = super().run(program)
        status = self.process.returncode if self.process is not None else 0
        if code != 0 and status < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its own
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return code


def worker_place(options: argparse.Namespace) -> dict[str, int]:
    """Return the place of a worker, which its launcher has given it."""
    rank, local_rank = int(os.environ["RANK"]), os.environ.get("LOCAL_RANK", "")
    node = 0 if options.local else int(os.environ.get("SLURM_NODEID", 0))
    return {"rank": rank, "local_rank": int(local_rank) if local_rank.isdecimal() else rank % options.ranks_per_node,
            "node_rank": node, "world_size": math.prod(options.topology.values()),
            "local_world_size": options.ranks_per_node}  # fmt: skip


def run_worker(options: argparse.Namespace) -> int:
    """Run the program of a worker as its rank. One that the run does not have runs without records."""
    where, size = worker_place(options), os.environ.get("WORLD_SIZE", "")
    expected = where["world_size"]
    if where["rank"] < expected and size in ("", str(expected)):
        with contextlib.suppress(OSError):  # what runners report belongs to the output of the job
            os.dup2(os.open(f"/proc/{options.launcher_pid}/fd/2", os.O_WRONLY | os.O_APPEND), 2)
        return WorkerRunner(options).run(options.program)
    say(f"rank_runner: no records of rank {where['rank']}: its world has {size or '?'} ranks, the run has {expected}")
    os.execvp(options.program[0], options.program)
