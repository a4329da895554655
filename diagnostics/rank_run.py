"""The program of a rank, from its start to its end, and the signals that it gets. For rank_runner.py."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time

from rank_log import StampedLog
from rank_process import TERMINATION_LAG_S, Output, Rank, start_program, watch_stacks
from rank_rings import Rings

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from types import FrameType

REST_GRACE_S = 5.0
"""How long processes that a local program has left may take to end after TERM."""
ORPHAN_GRACE_S = 60
"""How long a program may take to end after TERM when its local launcher has died."""


def place(options: argparse.Namespace) -> dict[str, int]:
    """Return global rank, local rank, node rank and their counts, from `--rank` or from Slurm's variables."""
    if options.rank is not None:
        world_size = math.prod(options.topology.values())
        return {"rank": options.rank, "local_rank": options.rank, "node_rank": 0, "world_size": world_size,
                "local_world_size": world_size}  # fmt: skip
    variable = os.environ
    return {"rank": int(variable["SLURM_PROCID"]), "local_rank": int(variable["SLURM_LOCALID"]),
            "node_rank": int(variable["SLURM_NODEID"]), "world_size": int(variable["SLURM_NTASKS"]),
            "local_world_size": options.ranks_per_node}  # fmt: skip


def forwarded_signals(stop: signal.Signals, is_local: bool) -> dict[signal.Signals, signal.Signals]:
    """Return which signal the program gets for a signal to the runner.

    Slurm signals every process of a step itself, and USR2 kills those that do not handle it (data loaders, compilers).
    All but this runner ignore URG: job scripts send it.
    """
    if is_local:
        return {signal.SIGUSR2: stop, signal.SIGTERM: signal.SIGTERM, signal.SIGURG: stop}
    return {signal.SIGURG: stop}


def new_rank(options: argparse.Namespace, where: dict[str, int], kind: type[Rank] = Rank) -> Rank:
    """Return a rank at a place, with its log and the folder of its ring."""
    name, attempt = kind.name_of(where["rank"]), options.attempt_dir.absolute()
    log, rings = new_log(options, name), Rings(options.ring, attempt, name)
    if options.ring != "none" and rings.why:
        log.feed(f"rank_runner: the last calls are not kept: {rings.why}\n".encode())
    return kind(options, where, options.topology, rings, log)


def new_log(options: argparse.Namespace, name: str) -> StampedLog:
    path: Path = options.attempt_dir.absolute() / "logs" / f"{name}.log"
    return StampedLog(path, options.log_limit_mib << 20)


class Runner:
    """Runs the program of one rank, from its start to its end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank = self.make_rank(options)
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self.parent = os.getppid()
        self.stop_signal = signal.Signals["SIG" + options.stop_signal]
        self.is_local = options.rank is not None
        self.forwarded = forwarded_signals(self.stop_signal, is_local=self.is_local)

    def make_rank(self, options: argparse.Namespace) -> Rank:
        return new_rank(options, place(options))

    def run(self, program: list[str]) -> int:
        """Start the program, log its output, wait for its end, and return the exit code for the runner."""
        rank = self.rank
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGURG):
            signal.signal(number, self.receive)
        if self.owns_rest:
            from rank_program import adopt_orphans

            adopt_orphans()
        try:
            self.process = self.start(program)
        except OSError as error:
            return rank.end_unstarted(program[0], error)
        rank.write_pid(self.process.pid)
        watch_stacks(rank.rings)
        for early in self.received:
            self.process.send_signal(early)
        assert self.process.stdout is not None
        output = Output(self.process.stdout, rank.log)
        status = self.process.wait()
        if self.must_end_rest(status):
            self.end_rest()
        if status != 0 and rank.terminated is None:
            time.sleep(TERMINATION_LAG_S)
        output.end()
        code = rank.end(status)
        rank.end_rings(status)
        return code

    @property
    def owns_rest(self) -> bool:
        """Whether what the program leaves belongs to this runner. Slurm ends it itself."""
        return self.is_local

    def must_end_rest(self, status: int) -> bool:
        return self.owns_rest and (status != 0 or self.rank.terminated is not None)

    def end_rest(self) -> None:
        """End what a program has left that failed or was told to end, such as the command of a shell."""
        from rank_program import end_all_below

        end_all_below(REST_GRACE_S)

    def start(self, program: list[str]) -> subprocess.Popen[bytes]:
        return start_program(program, {**os.environ, **self.rank.environment()}, self.stop_signal)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the program, or keep it until the program has started."""
        if number == signal.SIGTERM and self.rank.terminated is None:
            self.note_termination()
        if self.process is None:
            self.received.append(forwarded_signals(self.stop_signal, is_local=True)[signal.Signals(number)])
        elif number in self.forwarded and self.process.returncode is None:
            self.process.send_signal(self.forwarded[signal.Signals(number)])

    def note_termination(self) -> None:
        self.rank.note_termination()
        if os.getppid() != self.parent:
            signal.signal(signal.SIGALRM, lambda *_: self.process.kill() if self.process else None)
            signal.alarm(ORPHAN_GRACE_S)
