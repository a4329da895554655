"""Measures what `bsl spy` costs a healthy job, and checks that it leaves no process stopped, even if it is killed.

    python benchmarks/spy_harm.py [--ranks 8] [--windows 6] [--window-s 10] [--kills 20] [--seed 1] [--output FILE]

Eight gloo ranks train a small model on this machine, and rank 0 records the time of every step. In every other time
window, `bsl spy` looks at the job repeatedly, on the same cores. Then it is killed with SIGKILL at random moments of a
look. At the end every thread of every rank must run as before: none stopped or traced, steps continue, and nothing of
`bsl spy` is left behind. Writes a table in Markdown, and exits with 1 if a process was harmed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.procfs import read_process

START_S, LEFT_BEHIND_S = 240, 40
UNHARMED = "no thread is stopped or traced, nothing is left behind, and the steps continue"
LAUNCHER = """
import os, subprocess, sys
ranks = int(sys.argv[1])
env = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], OMP_NUM_THREADS="1")
started = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=dict(env, RANK=str(rank))) for rank in range(ranks)]
[process.wait() for process in started]
"""
RANK = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
batch = torch.randn(64, 256)
steps = open(sys.argv[1], "a", buffering=1) if dist.get_rank() == 0 else None
while True:
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad = None
    if steps:
        steps.write(f"{time.monotonic()}\\n")
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps per second of the job in one time window, and the looks during it."""

    is_watched: bool
    steps_per_s: float
    num_looks: int


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="bsl-") as name, healthy_job(Path(name), options.ranks) as launcher:
        folder, steps = Path(name), Path(name) / "steps"
        wait_for_steps(steps, 20, START_S)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        turns = [number % 2 == 1 for number in range(options.windows)]
        windows = [watch(launcher, folder, steps, options.window_s, is_watched) for is_watched in turns]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        num_looks = sum(window.num_looks for window in windows)
        cpu_s = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / max(num_looks, 1)
        generator = random.Random(options.seed)
        for number in range(options.kills):
            kill_a_look(launcher, folder, generator.uniform(0.1, 2.5))
            talk(f"killed {number + 1} of {options.kills}")
        harmed = harmed_processes(launcher) + left_behind(folder)
        wait_for_steps(steps, count_lines(steps) + 20, START_S)
    text = table(options, windows, cpu_s, harmed)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    if harmed:
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what bsl spy does to a healthy job.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


@contextmanager
def healthy_job(folder: Path, ranks: int) -> Iterator[int]:
    """Start a launcher whose children train, and yield its pid."""
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "rank.py").write_text(RANK)
    argv = [sys.executable, str(folder / "launcher.py"), str(ranks), str(20_000 + os.getpid() % 20_000)]
    job = subprocess.Popen([*argv, str(folder / "rank.py"), str(folder / "steps")], start_new_session=True)
    try:
        yield job.pid
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def wait_for_steps(path: Path, count: int, limit_s: float) -> None:
    """Wait until the job has made `count` steps.

    Raises:
        SystemExit: it did not make them within `limit_s`.
    """
    end = time.monotonic() + limit_s
    while count_lines(path) < count:
        if time.monotonic() > end:
            sys.exit("the job makes no progress")
        time.sleep(0.2)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def watch(launcher: int, folder: Path, steps: Path, window_s: float, is_watched: bool) -> Window:
    """Measure one time window, with or without looks."""
    began, before, num_looks = time.monotonic(), count_lines(steps), 0
    while time.monotonic() < began + window_s:
        if is_watched:
            subprocess.run(look(launcher, folder), capture_output=True, timeout=120, check=False)
            num_looks += 1
        else:
            time.sleep(0.1)
    window = Window(is_watched, (count_lines(steps) - before) / (time.monotonic() - began), num_looks)
    talk(str(window))
    return window


def look(launcher: int, folder: Path) -> list[str]:
    output = str(folder / "evidence")
    return [sys.executable, "-m", "bigsci_launch", "spy", "--local", "--pid", str(launcher), "--output", output]


def kill_a_look(launcher: int, folder: Path, after_s: float) -> None:
    """Kill `bsl spy` with SIGKILL during a look; the processes it started must end on their own."""
    process = subprocess.Popen(look(launcher, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    process.kill()
    process.wait()


def harmed_processes(launcher: int) -> list[str]:
    """Return the threads of the job that are stopped or traced."""
    found = []
    for pid in children_of(launcher):
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(line.partition(":")[::2] for line in (task / "status").read_text().splitlines())
            state, tracer = fields["State"].split()[0], int(fields["TracerPid"])
            if state in ("T", "t") or tracer:
                found.append(f"thread {task.name} of pid {pid}: state {state}, tracer {tracer}")
    return found


def children_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def left_behind(folder: Path) -> list[str]:
    """Return the processes of looks that still run after every time limit of a look has passed."""
    end = time.monotonic() + LEFT_BEHIND_S
    while (orphans := our_orphans()) and time.monotonic() < end:
        time.sleep(0.5)
    return [f"process {pid} was left behind" for pid in orphans]


def our_orphans() -> list[int]:
    """Return the orphans of killed looks: processes with our mark in their environment, adopted by init."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_ours = process.name.isdigit() and MARK.encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        now = read_process(int(process.name)) if is_ours else None
        if now is not None and now.parent_pid == 1:
            found.append(now.pid)
    return found


def table(options: argparse.Namespace, windows: list[Window], cpu_s: float, harmed: list[str]) -> str:
    """Return the result in Markdown."""
    alone = [window.steps_per_s for window in windows if not window.is_watched]
    watched = [window.steps_per_s for window in windows if window.is_watched]
    num_looks = sum(window.num_looks for window in windows)
    slower = 1 - statistics.median(watched) / statistics.median(alone)
    lines = [
        f"{options.ranks} gloo ranks train on {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), in alternating "
        f"windows of {options.window_s:g} s:",
        "",
        "| | steps per second, median | each window |",
        "|---|---:|---|",
        f"| alone | {statistics.median(alone):.2f} | {', '.join(f'{each:.2f}' for each in alone)} |",
        f"| `bsl spy`, continuously | {statistics.median(watched):.2f} "
        f"| {', '.join(f'{each:.2f}' for each in watched)} |",
        "",
        f"The job is {slower:.0%} slower while {num_looks} looks share its cores; each takes {cpu_s:.2f} s of CPU.",
        f"{options.kills} looks killed with SIGKILL at random moments: {'; '.join(harmed) or UNHARMED}.",
    ]
    return "\n".join(lines)


def talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


MARK = f"BSL_HARM_{os.getpid()}=1"

if __name__ == "__main__":
    os.environ[MARK.removesuffix("=1")] = "1"
    main()
