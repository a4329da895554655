"""What a step of the uneven engine costs next to DeepSpeed's, on the same even layout: CPU seconds of all ranks.

    python benchmarks/uneven_cost.py [--steps 60] [--hidden 128] [--page PAGE]

Two stages, two replicas, without failures, in fp32, with ZeRO-1; and the uneven engine again with `survive`, f = 1. All
jobs run at the same time, so what else the machine does hits all. In windows of `WINDOW` steps, the CPU seconds of the
four ranks of each job are read from /proc.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, LIMIT_S, write_run_file

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files, read_json

WARM_UP, WINDOW = 5, 5
TICK = os.sysconf("SC_CLK_TCK")
EVEN = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1}
UNEVEN = {**EVEN, "engine": "uneven", "data_parallel_size": None}
JOBS: dict[str, dict[str, Any]] = {
    "DeepSpeed": {"parallelism": EVEN},
    "uneven": {"parallelism": UNEVEN},
    "uneven with survive": {"parallelism": UNEVEN, "survive": {"failures": 1, "standby": False}},
}
BEGIN, END = "<!-- cost -->", "<!-- /cost -->"


class MeasuredJob:
    """A job, and the CPU seconds of its ranks at the end of each window."""

    def __init__(self, folder: Path, name: str, more: dict[str, Any]) -> None:
        path = write_run_file(folder, name, Layout(1, 1, 1, "fp32", 0.0), folder / "corpus", None, more)
        self._run, self._at = RunDir(folder / "runs" / name), WARM_UP
        self.seconds: list[float] = []
        with path.with_suffix(".out").open("wb") as output:
            command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def look(self) -> None:
        """Note the CPU seconds if a window has ended."""
        attempt = self._run.latest_attempt()
        if attempt is not None and _step_of(attempt) >= self._at:
            pids = [int(read_json(path)["pid"]) for path in rank_files(attempt.pids, ".json").values()]
            if len(found := [each for each in map(_cpu_s, pids) if each is not None]) == len(pids):
                self.seconds.append(sum(found))
            self._at += WINDOW

    @property
    def per_step(self) -> list[float]:
        """CPU seconds of a step, one for each window."""
        return [(after - before) / WINDOW for before, after in zip(self.seconds, self.seconds[1:], strict=False)]


def _step_of(attempt: AttemptDir) -> int:
    path = attempt.event_file(0)
    return max((each["step"] for each in read_events(path) if each["kind"] == "heartbeat"), default=0) - 1


def _cpu_s(pid: int) -> float | None:
    """Return the CPU seconds of all threads of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(folder: Path, steps: int, hidden: int) -> dict[str, MeasuredJob]:
    """Run all jobs at the same time.

    Raises:
        SystemExit: one has failed.
    """
    draw_corpus(folder / "corpus")
    (folder / "sites").mkdir(exist_ok=True)
    (folder / "sites" / "four.yaml").write_text("description: four ranks here\nscheduler: local\nranks_per_node: 4\n")
    more: dict[str, Any] = {
        "model": {"biases": False, "hidden_size": hidden, "sequence_length": 64},
        "training": {"steps": steps},
        "checkpoint": {"save_interval": None},
        "monitor": {"watch": "off", "eval_interval": None},
        "guards": {"interval": "off"},
        "slurm": {"site": "four"},
    }
    jobs = {name: MeasuredJob(folder, name.lower().replace(" ", "-"), {**more, **keys}) for name, keys in JOBS.items()}
    until = time.monotonic() + 4 * LIMIT_S
    while any(job.process.poll() is None for job in jobs.values()) and time.monotonic() < until:
        for job in jobs.values():
            job.look()
        time.sleep(0.05)
    for name, job in jobs.items():
        if job.process.wait(60):
            raise SystemExit(f"{name} has failed: see {folder}")
    return jobs


def page_of(jobs: dict[str, MeasuredJob], hidden: int) -> str:
    """Return the table."""
    rows = [f"| {name} | {_shown(job.per_step)} | {len(job.per_step)} |" for name, job in jobs.items()]
    even, uneven, surviving = (median(jobs[name].per_step) for name in JOBS)
    head = f"| hidden {hidden} | CPU s of a step, all ranks: median (quartiles) | windows of {WINDOW} steps |"
    words = (
        f"The uneven engine takes {uneven / even:.2f} times as much as DeepSpeed, and {surviving / uneven:.2f} times"
    )
    return "\n".join([head, "|---|---:|---:|", *rows, "", f"{words} as much with `survive` as without."])


def _shown(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="uneven-cost-"))
    text = page_of(measure(folder, options.steps, options.hidden), options.hidden)
    shutil.rmtree(folder, ignore_errors=True)
    print(text, f"load: {os.getloadavg()[0]:.0f}", sep="\n")
    if options.page:
        before, rest = options.page.read_text().split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
