"""A run that carries itself: 60 steps under a time limit of about 20, with one preemption, one killed node, one crash.

    python benchmarks/carried_run.py [--by requeue|queue] [--page docs/how-to/continue.md]

Starts a mini cluster of four isolated nodes and submits a tiny GPT on two of them (4 ranks, tp 2 x pp 2), once. From
then on nothing asks for the run: the program only does harm. After the first start, a job of higher priority takes the
nodes of one, in the next a node is killed as by a power cut, in the next a rank gets SIGKILL. The others run into their
time limit. Each start is read from the run directory afterwards. Needs root and Slurm's packages; takes six minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

BEGIN, END = "<!-- carried -->", "<!-- /carried -->"
STEPS, LIMIT_S = 60, 1500
CONFIG = Path(__file__).parents[1] / "configs" / "minicluster.yaml"
COLUMNS = ("start", "nodes", "steps", "what was done to it", "ended", "decision of the job script")


@dataclass(frozen=True, slots=True)
class Site:
    """A folder for the run, and the directory of a mini cluster."""

    folder: Path
    cluster: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "BSL_CLUSTER_DIR": str(self.cluster), "SLURM_CONF": str(self.cluster / "slurm.conf")}

    def run(self, *argv: str) -> str:
        """Run a program against the cluster.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(argv, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr}")
        return done.stdout.strip()

    def bsl(self, *argv: str) -> str:
        return self.run(sys.executable, "-m", "bigsci_launch", *argv)


def settings(site: Site, by: str) -> list[str]:
    """Return the options of the one submission."""
    values = {
        "run.name": "carried",
        "run.root": str(site.folder / "runs"),
        "data.prefix": str(site.folder / "corpus" / "text"),
        "slurm.nodes": "2",
        "slurm.partition": "preemptible",
        "slurm.time_limit": "00:02:00",
        "slurm.chain.by": by,
        "parallelism.data_parallel_size": "1",
        "training.steps": str(STEPS),
        "training.global_batch_size": "4",
        "checkpoint.save_interval": "5",
        "monitor.exit_margin_s": "60",
        "faults": "[{kind: slow, rank: 0, step: 1, seconds: 1.5}]",
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def prepare_corpus(site: Site) -> None:
    """Make a dataset of some of Python's own source code."""
    source = Path(json.__file__).parent.parent / "asyncio"
    site.bsl("data", "prepare", str(source), "--output", "corpus/text", "--vocab-size", "512", "--glob", "*.py")


def steps_of(attempt: AttemptDir) -> list[int]:
    """Return the steps that a start made, in order."""
    records = (record for path in sorted(attempt.events.glob("*.jsonl")) for record in read_events(path))
    return sorted({record["step"] for record in records if record["kind"] == "step"})


def nodes_of(attempt: AttemptDir) -> list[str]:
    """Return the nodes of a start, the first one first."""
    return list(dict.fromkeys(json.loads(path.read_text())["node"] for path in sorted(attempt.pids.glob("*.json"))))


def job_of(attempt: AttemptDir) -> str:
    return str(
        json.loads(attempt.path.parent.joinpath(attempt.base_name).joinpath(attempt.job.name).read_text())["job_id"]
    )


def preempt(site: Site, attempt: AttemptDir) -> str:
    """Take the nodes for a job of higher priority."""
    site.run("sbatch", "--exclusive", f"--nodelist={','.join(nodes_of(attempt))}", "--nodes=2", "--output=/dev/null",
             "--partition=debug", "--wrap=sleep 5")  # fmt: skip
    return "preempted (40 s of grace)"


def kill_node(site: Site, attempt: AttemptDir) -> str:
    """Cut the power of the last node."""
    node = nodes_of(attempt)[-1]
    site.bsl("cluster", "kill-node", node)
    return f"node {node} killed"


def kill_rank(site: Site, attempt: AttemptDir) -> str:
    """Kill the last rank."""
    place = json.loads(max(attempt.pids.glob("*.json")).read_text())
    with suppress(RuntimeError):  # the step that kills may be ended together with the job's own
        site.run("srun", f"--jobid={job_of(attempt)}", "--overlap", "--gres=gpu:0", "--mpi=none", "--ntasks=1",
                 "--nodes=1", f"--nodelist={place['node']}", "kill", "-9", str(place["pid"]))  # fmt: skip
    return f"rank {place['rank']} got SIGKILL"


HARM: tuple[Callable[[Site, AttemptDir], str], ...] = (preempt, kill_node, kill_rank)
"""What is done, each to one of the starts after the first, when it has made `AFTER` steps."""
AFTER = 6


@dataclass(slots=True)
class Carried:
    """What happened: the run, what was done to which attempt, and how long it took (seconds)."""

    run: RunDir
    done: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def is_over(run: RunDir) -> bool:
    """Whether the newest start says that no other follows."""
    newest = run.latest_attempt()
    try:
        return newest is not None and json.loads(newest.next.read_text())["action"] != "continue"
    except (OSError, ValueError):
        return False


def carry(site: Site, by: str, tell: Callable[[str], None]) -> Carried:
    """Submit the run once, do the harm, and wait until it is over."""
    site.bsl("submit", str(CONFIG), *settings(site, by))
    found, began = Carried(RunDir((site.folder / "runs" / "carried").resolve())), time.monotonic()
    while not is_over(found.run) and time.monotonic() - began < LIMIT_S:
        time.sleep(0.5)
        attempts = found.run.attempts()
        newest = attempts[-1]
        is_due = len(attempts) > 1 and len(found.done) < len(HARM) and newest.name not in found.done
        if is_due and len(steps_of(newest)) >= AFTER:
            found.done[newest.name] = HARM[len(found.done)](site, newest)
            tell(f"{time.monotonic() - began:4.0f} s  {newest.name}: {found.done[newest.name]}")
    found.seconds = time.monotonic() - began
    return found


def rows(found: Carried) -> list[tuple[str, ...]]:
    """Return what is known of each start, under `COLUMNS`."""
    table = []
    for attempt in found.run.attempts():
        steps, end, following = steps_of(attempt), _read(attempt.exit), _read(attempt.next)
        table.append(
            (
                attempt.name,
                ", ".join(nodes_of(attempt)),
                f"{steps[0]} to {steps[-1]}" if steps else "none",
                found.done.get(attempt.name, "nothing"),
                str(end.get("reason", "no record")),
                f"{following.get('action', 'none')}: {following.get('sentence', '')}",
            )
        )
    return table


def steps_made(found: Carried) -> list[int]:
    """Return every step that was made, once."""
    return sorted({step for attempt in found.run.attempts() for step in steps_of(attempt)})


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def as_markdown(table: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page(page: Path, text: str) -> None:
    """Replace what is between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=("requeue", "queue"), default="requeue")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as folder:  # short, because sockets are created in it
        site = Site(Path(folder), Path(folder) / "c")
        try:
            site.bsl("cluster", "up", "--nodes", "4", "--isolated")
            prepare_corpus(site)
            found = carry(site, options.by, lambda line: print(line, file=sys.stderr, flush=True))
            table, left, whole = rows(found), site.run("squeue", "-h"), steps_made(found)
        finally:
            site.bsl("cluster", "down")
    text = as_markdown(table)
    text += f"\n\n{len(table)} starts, {found.seconds:.0f} s, {len(whole)} of {STEPS} steps, by {options.by}; "
    text += f"jobs left in the queue: {len(left.splitlines())}."
    print(text)
    if options.page:
        write_page(options.page, text)
    return 0 if whole == list(range(1, STEPS + 1)) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
