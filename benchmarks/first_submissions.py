"""Five first submissions of one run at once: how many are accepted, and whose is `run.json`?

    python benchmarks/first_submissions.py --rounds 200 --commands 20

Each of `--rounds` starts five processes that wait for each other and then claim the run, as `bsl submit` does. Each of
`--commands` starts five `bsl submit --local --detach`. A round is good if exactly one was accepted, `run.json` is that
one's, the others were refused with a sentence, and nothing else is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Barrier, Pipe, Process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier as Gate
from pathlib import Path

from bigsci_launch.config.load import LoadedRun, load_run
from bigsci_launch.launch.claim import new_attempt
from bigsci_launch.launch.prepare import plan_submission
from bigsci_launch.runs.layout import RunDir

PROCESSES = 5
REFUSALS = ("is being submitted", "a run can have only one active attempt")


def write_run(folder: Path, name: str) -> Path:
    config = {
        "run": {"name": name, "command": ["sleep", "60"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return path


def claim(loaded: LoadedRun, folder: Path, gate: Gate, answer: Connection) -> None:
    request = plan_submission(loaded, working_directory=folder, python=sys.executable, local=True)
    gate.wait()
    try:
        with new_attempt(request, loaded.config):
            answer.send(json.loads(request.run.record.read_text())["run_id"])
    except FileExistsError:
        answer.send(None)


def claim_at_once(folder: Path, name: str) -> str:
    """Return what became of five processes that claim one new run."""
    loaded = load_run(write_run(folder, name))
    gate, pipes = Barrier(PROCESSES), [Pipe(duplex=False) for _ in range(PROCESSES)]
    processes = [Process(target=claim, args=(loaded, folder, gate, answer)) for _, answer in pipes]
    for process in processes:
        process.start()
    found = [answer.recv() for answer, _ in pipes]
    for process in processes:
        process.join()
    return judge(folder / "runs" / name, [run_id for run_id in found if run_id is not None])


def judge(run: Path, accepted: list[str]) -> str:
    record = run / "run.json"
    if not record.exists():
        return f"{len(accepted)} accepted, no run.json"
    own = json.loads(record.read_text())["run_id"] in accepted
    left = sorted(path.name for path in run.iterdir())
    is_clean = left == ["attempts", "control", "run.json"] and [path.name for path in (run / "attempts").iterdir()]
    rest = "nothing else left" if is_clean == ["0001"] else f"left: {left}"
    return f"{len(accepted)} accepted, run.json is {'its own' if own else 'of another'}, {rest}"


def submit_at_once(folder: Path, name: str) -> str:
    """Return what became of five commands that submit one new run; its launcher is ended."""
    argv = [sys.executable, "-m", "bigsci_launch", "submit", str(write_run(folder, name)), "--detach"]
    commands = [
        subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    ends = [(*command.communicate(timeout=120), command.returncode) for command in commands]
    run = RunDir(folder / "runs" / name)
    run_id = json.loads(run.record.read_text())["run_id"] if run.record.exists() else ""
    pids = [int(out) for out, _, code in ends if code == 0]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    untrue = [err for _, err, code in ends if code != 0 and not any(words in err for words in REFUSALS)]
    return judge(run.path, [run_id] * len(pids)) + (f"; said: {untrue[0].strip()}" if untrue else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Several first submissions of one run at once.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--commands", type=int, default=20)
    options = parser.parse_args()
    for what, number, trial in (
        ("claims", options.rounds, claim_at_once),
        ("commands", options.commands, submit_at_once),
    ):
        started, found = time.monotonic(), Counter[str]()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for index in range(number):
                found[trial(Path(folder), f"run-{index}")] += 1
        print(f"{number} rounds of {PROCESSES} {what} at once, {time.monotonic() - started:.0f} s")
        for words, count in found.most_common():
            print(f"  {count:4d}  {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
