"""Starts one rank and records who it is, what it prints and how it ends. Stand-alone, standard library only.

    python -I -S rank_runner.py --attempt-dir DIR --topology tp=2,pp=2,dp=2 --ranks-per-node 2 -- PROGRAM ARGS

srun starts one runner per task; the local launcher starts one per rank and passes `--rank`. The program finds RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, BSL_RUN_DIR and BSL_ATTEMPT in its environment. The runner writes
`pids/rank-NNNN.json`, `logs/rank-NNNN.log` (each line with its time, UTC) and `exits/rank-NNNN.json` under DIR, and
exits as the program did: with its exit code, or 128 + signal.

With `--survive` the runner is the agent of a slot, and serves one rank after another: see rank_slot.py. With
`--ranks-per-task` the program is a launcher, such as torchrun, whose workers are the ranks: see rank_launcher.py.

The runner must never be the reason why training ends. A record that it cannot write, such as on a full disk, goes to
stderr as a line of its own, `rank_runner: record exits/rank-0003 {...}`, from which the report of the end takes it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # others could replace it, under a umask that lets them
if "__file__" in globals():
    # -I leaves it out. What is imported hours later, from Python's own folders, is not looked for here first.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from rank_process import end_with_parent, parse_topology
from rank_run import Runner

STOP_SIGNALS = ("USR2", "USR1", "TERM", "INT")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.rank is not None or options.slot is not None:
        end_with_parent(signal.SIGTERM)  # no rank outlives its launcher (Slurm does that itself)
    if options.survive is not None:
        from rank_levels import serve

        return serve(options)
    if options.launcher is not None or options.ranks_per_task > 1:
        from rank_launcher import LauncherRunner, run_worker

        return run_worker(options) if options.launcher is not None else LauncherRunner(options).run(options.program)
    return Runner(options).run(options.program)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start one rank and record how it runs and ends.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--topology", type=parse_topology, required=True, help="tp=2,pp=2,dp=2")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--rank", type=int, help="global rank, or number of the launcher; default: Slurm's variables")
    parser.add_argument("--ranks-per-task", type=int, default=1, help="the program is a launcher of so many ranks")
    parser.add_argument("--launcher", type=int, help="the program is a worker of the launcher with this number")
    parser.add_argument("--launcher-pid", type=int, help="PID of the runner of that launcher")
    parser.add_argument("--local", action="store_true", help="the launcher was not started by Slurm, with --launcher")
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


if __name__ == "__main__":
    sys.exit(main())
