"""Times `bsl spy` and the one-line `srun ... py-spy dump` on 384 real processes and 48 nodes of a real Slurm.

    python benchmarks/spy_scale.py [--nodes 48] [--ranks-per-node 8] [--rounds 3] [--output FILE]

Starts a mini cluster (this needs root and the distribution's Slurm packages) and submits a plain batch job of Python
processes, one of which hangs in another place. The tools look at it in turn, so that load affects them alike.

The one-liner is that of BLOOM's chronicle, `srun --jobid ... sh -c '... | xargs -I {} py-spy dump --native --pid {}'`,
with `--overlap`, and with pids from `scontrol listpids` instead of `ps aux | grep python`: all nodes of a mini cluster
are on one host, where ps shows the processes of all of them. A second variant leaves out `--native`. Both pause and
dump each process once; `bsl spy` looks twice, a second apart, and ends with a verdict. Writes a table in Markdown. The
goal is to be no slower than the chronicle's one-liner.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BSL = [sys.executable, "-m", "bigsci_launch"]
PROGRAM = """
import os, time
from pathlib import Path
def load_batch(): time.sleep(3000)
def all_reduce(): time.sleep(3000)
def train_step(rank): load_batch() if rank == {odd} else all_reduce()
rank = int(os.environ["SLURM_PROCID"])
Path("{folder}", f"ready-{{rank}}").touch()
train_step(rank)
"""
ONE_LINER = (
    "scontrol listpids {job}.0 $SLURMD_NODENAME | awk 'NR > 1 {{print $1}}' "
    "| xargs -I {{}} {py_spy} dump {native} --pid {{}}"
)
CHRONICLE, LEAN, OURS = "chronicle's one-liner", "without --native", "bsl spy"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the job: wall seconds, processes whose stacks were read, lines of output."""

    seconds: float
    num_stacks: int
    num_lines: int


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as name:
        folder = Path(name)
        num_ranks = options.nodes * options.ranks_per_node
        odd = num_ranks // 2 + 9
        with mini_cluster(folder / "cluster", options), hung_job(folder, options, odd) as job:
            lookers: dict[str, Callable[[Path], Look]] = {
                CHRONICLE: lambda out: one_liner(job, options.nodes, out, "--native"),
                LEAN: lambda out: one_liner(job, options.nodes, out, ""),
                OURS: lambda out: bsl_spy(job, out),
            }
            looks: dict[str, list[Look]] = {looker: [] for looker in lookers}
            for number in range(options.rounds):
                for index, (looker, look) in enumerate(lookers.items()):
                    looks[looker].append(look(folder / f"{index}-{number}"))
                    talk(f"round {number + 1}: {looker}: {looks[looker][-1].seconds:.1f} s")
            verdict = json.loads((folder / f"2-{options.rounds - 1}" / "verdict.json").read_text())
    named = [suspect["rank"] for suspect in verdict["verdict"]["suspects"]]
    text = table(options, looks, verdict["verdict"]["claim"], named == [odd])
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    if ratio(looks, CHRONICLE) > 1 or named != [odd] or looks[OURS][-1].num_stacks != num_ranks:
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times bsl spy against srun and py-spy on many nodes.")
    parser.add_argument("--nodes", type=int, default=48)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


@contextmanager
def mini_cluster(directory: Path, options: argparse.Namespace) -> Iterator[None]:
    """Run a Slurm of many nodes on this machine while the `with` block runs commands."""
    os.environ |= {"BSL_CLUSTER_DIR": str(directory), "SLURM_CONF": str(directory / "slurm.conf")}
    sizes = ["--nodes", str(options.nodes), "--gpus-per-node", str(options.ranks_per_node)]
    try:
        run([*BSL, "cluster", "up", *sizes])
        yield
    finally:
        subprocess.run([*BSL, "cluster", "down"], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def hung_job(folder: Path, options: argparse.Namespace, odd: int) -> Iterator[str]:
    """Run a plain batch job; yield its id once all ranks have reached the place where they stay."""
    (folder / "program.py").write_text(PROGRAM.format(odd=odd, folder=folder))
    (folder / "job.sh").write_text(f"#!/bin/sh\nsrun {sys.executable} -I -S {folder}/program.py\n")
    sizes = [f"--nodes={options.nodes}", f"--ntasks-per-node={options.ranks_per_node}"]
    job = run(["sbatch", "--parsable", f"--output={folder}/job.out", *sizes, f"{folder}/job.sh"]).strip()
    try:
        end = time.monotonic() + 120
        while len(list(folder.glob("ready-*"))) < options.nodes * options.ranks_per_node:
            if time.monotonic() > end:
                sys.exit(f"the job did not start: {(folder / 'job.out').read_text()}")
            time.sleep(0.2)
        yield job
    finally:
        run(["scancel", job])
        while run(["squeue", "-h", "-j", job]).strip():
            time.sleep(0.2)


def one_liner(job: str, nodes: int, folder: Path, native: str) -> Look:
    """Look as the chronicle did by hand."""
    folder.mkdir()
    py_spy = Path(sys.executable).parent / "py-spy"
    began = time.monotonic()
    argv = ["srun", "--overlap", f"--jobid={job}", "--gres=gpu:0", f"--nodes={nodes}", "--ntasks-per-node=1"]
    run([*argv, f"--output={folder}/trace-%N.out", "sh", "-c", ONE_LINER.format(job=job, py_spy=py_spy, native=native)])
    seconds = time.monotonic() - began
    texts = [path.read_text() for path in folder.glob("trace-*.out")]
    num_stacks = sum(text.count("(active)") + text.count("(idle)") for text in texts)
    return Look(seconds, num_stacks, sum(len(text.splitlines()) for text in texts))


def bsl_spy(job: str, folder: Path) -> Look:
    """Look with bsl, end to end: from the shell to the report and the stored evidence."""
    began = time.monotonic()
    report = run([*BSL, "spy", "--jobid", job, "--output", str(folder)])
    seconds = time.monotonic() - began
    coverage = json.loads((folder / "verdict.json").read_text())["coverage"]
    return Look(seconds, coverage["ranks_read"], len(report.splitlines()))


def table(options: argparse.Namespace, looks: dict[str, list[Look]], claim: str, is_right: bool) -> str:
    """Return the result in Markdown."""
    lines = [
        "| | median s | fastest s | stacks read | lines to read |",
        "|---|---|---|---|---|",
    ]
    for looker, found in looks.items():
        last = found[-1]
        fastest = min(look.seconds for look in found)
        lines.append(f"| {looker} | {median(found):.2f} | {fastest:.2f} | {last.num_stacks} | {last.num_lines} |")
    ratios = f"{ratio(looks, CHRONICLE):.2f} of the chronicle's one-liner, {ratio(looks, LEAN):.2f} of the one without"
    return "\n".join(
        [
            f"{options.nodes} nodes x {options.ranks_per_node} plain Python processes on one machine with "
            f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), {options.rounds} rounds in turn:",
            "",
            *lines,
            "",
            f"`bsl spy` takes {ratios}. Its sentence ({'right' if is_right else 'WRONG'}): {claim}",
        ]
    )


def ratio(looks: dict[str, list[Look]], peer: str) -> float:
    """Return the median time of `bsl spy` divided by that of `peer`."""
    return median(looks[OURS]) / median(looks[peer])


def median(looks: list[Look]) -> float:
    return statistics.median(look.seconds for look in looks)


def run(argv: list[str]) -> str:
    """Run a command and return its output; exit if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:4])} ...: exit {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
