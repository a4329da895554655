"""Starts one rank and records who it is, what it prints and how it ends. Stand-alone, standard library only.

    python -I -S rank_runner.py --attempt-dir DIR --topology tp=2,pp=2,dp=2 --ranks-per-node 2 -- PROGRAM ARGS

srun starts one runner per task; the local launcher starts one per rank and passes `--rank`. The program finds RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, BSL_RUN_DIR and BSL_ATTEMPT in its environment. The runner writes
`pids/rank-NNNN.json`, `logs/rank-NNNN.log` (each line with its time, UTC) and `exits/rank-NNNN.json` under DIR, and
exits as the program did: with its exit code, or 128 + signal.

With `--survive` the runner is the agent of a slot, and serves one rank after another: see rank_slot.py.

The runner must never be the reason why training ends. A record that it cannot write, such as on a full disk, goes to
stderr as a line of its own, `rank_runner: record exits/rank-0003 {...}`, from which the report of the end takes it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.dont_write_bytecode = True  # others could replace it, under a umask that lets them
if "__file__" in globals():
    # -I leaves it out. What is imported hours later, from Python's own folders, is not looked for here first.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from rank_log import StampedLog
from rank_process import TERMINATION_LAG_S, Output, Rank, end_with_parent, parse_topology, start_program, watch_stacks
from rank_rings import Rings

STOP_SIGNALS = ("USR2", "USR1", "TERM", "INT")
REST_GRACE_S = 5.0
"""How long processes that a local program has left may take to end after TERM."""
ORPHAN_GRACE_S = 60
"""How long a program may take to end after TERM when its local launcher has died."""


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.rank is not None or options.slot is not None:
        end_with_parent(signal.SIGTERM)  # no rank outlives its launcher (Slurm does that itself)
    if options.survive is not None:
        from rank_levels import serve

        return serve(options)
    return Runner(options).run(options.program)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start one rank and record how it runs and ends.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--topology", type=parse_topology, required=True, help="tp=2,pp=2,dp=2")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rank", type=int, help="global rank; default: Slurm's variables")
    parser.add_argument("--survive", choices=("restart", "in_place"), help="run the ranks that the controller assigns")
    parser.add_argument("--standby", action="store_true", help="keep a second process ready, with --survive in_place")
    parser.add_argument("--check", action="store_true", help="test the node after a rank has died, with --survive")
    parser.add_argument("--slot", type=int, help="number of the slot; default: Slurm's variables")
    parser.add_argument("--again", type=int, help="PID of the runner of this slot that this one follows")
    parser.add_argument(
        "--stop-signal", choices=STOP_SIGNALS, default="USR2", help="signal that asks the program to save and stop"
    )
    parser.add_argument("--log-limit-mib", type=int, default=0, help="largest size of a log; 0: no limit")
    parser.add_argument(
        "--ring", default="none", help="folder on this node for the last calls; auto: choose one; none: keep no calls"
    )
    parser.add_argument("program", nargs="+")
    return parser.parse_args(arguments)


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


class Runner:
    """Runs the program of one rank, from its start to its end."""

    def __init__(self, options: argparse.Namespace) -> None:
        where = place(options)
        name = f"rank-{where['rank']:04d}"
        attempt: Path = options.attempt_dir.absolute()
        log = StampedLog(attempt / "logs" / f"{name}.log", options.log_limit_mib << 20)
        self.rank = Rank(options, where, options.topology, Rings(options.ring, attempt, name), log)
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[int] = []
        self.parent = os.getppid()
        self.stop_signal = signal.Signals["SIG" + options.stop_signal]
        self.is_local = options.rank is not None
        self.forwarded = forwarded_signals(self.stop_signal, is_local=self.is_local)
        if options.ring != "none" and self.rank.rings.why:
            log.feed(f"rank_runner: the last calls are not kept: {self.rank.rings.why}\n".encode())

    def run(self, program: list[str]) -> int:
        """Start the program, log its output, wait for its end, and return the exit code for the runner."""
        rank = self.rank
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGURG):
            signal.signal(number, self.receive)
        if self.is_local:
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
        if self.is_local and (status != 0 or rank.terminated is not None):
            self.end_rest()
        if status != 0 and rank.terminated is None:
            time.sleep(TERMINATION_LAG_S)
        output.end()
        code = rank.end(status)
        rank.end_rings(status)
        return code

    def end_rest(self) -> None:
        """End what a program has left that failed or was told to end: the command of a shell. Slurm does it itself."""
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


if __name__ == "__main__":
    sys.exit(main())
