"""Measures how soon a job starts again after a requeue: a plain one, and an expedited one of Slurm 25.11 and newer.

    bash slurm/minicluster/with-slurm.sh 26.05 .venv/bin/python benchmarks/requeue_speed.py --rounds 3

A mini cluster of four nodes (root) runs one job of two nodes at a time, submitted with `--requeue` or
`--requeue=expedite`. Its second node is killed with its slurmd, also while a job for three nodes waits; or its script
asks for a requeue; or it fails. Rows are added to benchmarks/rows/slurm-requeue.jsonl, which slurm_matrix.py reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slurm_outputs import Recorder, cluster

ROWS = Path(__file__).parent / "rows" / "slurm-requeue.jsonl"
MODES = ("--requeue", "--requeue=expedite")
AGAIN = '[ "$SLURM_RESTART_COUNT" ] && sleep 600; sleep 3; date +%s.%N >asked.txt; '
KILLED, BUSY, ASKED, FAILED = "node killed", "node killed, a job waits", "the script requeues", "the script fails"
BODIES = {
    KILLED: "srun sleep 600",
    BUSY: "srun sleep 600",
    ASKED: f"{AGAIN} scontrol requeue $SLURM_JOB_ID; sleep 600",
    FAILED: f"{AGAIN} exit 1",
}
LIMITS_S = {FAILED: 25.0}
LIMIT_S = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(BODIES), action="append")
    options = parser.parse_args()
    for case in options.only or BODIES:
        for _ in range(options.rounds):
            for mode in MODES:
                row = one_round(case, mode)
                print(f"{case} {mode}: {row['seconds']} s, {row['state']}", flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def one_round(case: str, mode: str) -> dict[str, Any]:
    """Run one job on a cluster of its own, because killed nodes stay dead."""
    with (
        tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as folder,
        tempfile.TemporaryDirectory(dir="/tmp") as work,
        cluster(Path(folder), nodes=4) as environment,
    ):
        recorder = Recorder(Path(work), environment)
        version = recorder.run("sinfo", "-V").stdout.split()[-1]
        return {"version": version, "case": case, "mode": mode, **measure(recorder, case, mode)}


def measure(recorder: Recorder, case: str, mode: str) -> dict[str, Any]:
    """Return the seconds from the end of a start to the next, or None, and what the job was then."""
    starts, asked = recorder.folder / "starts.txt", recorder.folder / "asked.txt"
    body = f"date +%s.%N >>{starts}\ncd {recorder.folder}\n{BODIES[case]}"
    job = recorder.submit(body, "-N2", "--exclusive", "--time=10", mode)
    recorder.until(lambda: len(times(starts)) == 1, "the first start")
    if case in (KILLED, BUSY):
        if case == BUSY:
            recorder.submit("sleep 60", "-N3", "--exclusive")
        time.sleep(2)
        asked.write_text(f"{time.time()}\n")
        kill_last_node(recorder, job)
    recorder.until(lambda: bool(times(asked)), "the end of the first start")
    limit = times(asked)[0] + LIMITS_S.get(case, LIMIT_S)
    while time.time() < limit and len(times(starts)) < 2:
        time.sleep(0.2)
    seconds = round(times(starts)[1] - times(asked)[0], 1) if len(times(starts)) > 1 else None
    shown = recorder.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T|%l").stdout.strip()
    state, _, time_limit = shown.partition("|")
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return {"seconds": seconds, "state": state, "time_limit": time_limit, "when": now}


def kill_last_node(recorder: Recorder, job: str) -> None:
    nodes = recorder.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    victim = recorder.run("scontrol", "show", "hostnames", nodes).stdout.split()[-1]
    recorder.run(sys.executable, "-m", "bigsci_launch", "cluster", "kill-node", victim)


def times(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()] if path.exists() else []


if __name__ == "__main__":
    main()
