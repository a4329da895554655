"""Compares steps of a second with and without `Survivor`, while no rank is lost.

    python benchmarks/survivor_cost.py [--width 1448] [--steps 20] [ddp fsdp2 accelerate deepspeed]

Two gloo ranks on this machine, under `bsl submit`: the loops of `surviving/`, with a larger model, and a second in
which a rank waits in each step, as for a GPU. The plain loop and the surviving one run one after the other. The seconds
are those from one line of rank 0 to the next; the first steps are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

LOOPS = Path(__file__).parent / "surviving"
NAMES = {
    "ddp": ("plain", "ddp"),
    "fsdp2": ("plain_fsdp2", "fsdp2"),
    "accelerate": ("plain_accelerate", "with_accelerate"),
    "deepspeed": ("plain_deepspeed", "with_deepspeed"),
}
WARM_UP = 15
"""Steps in which standbys still start."""
NO_SHARED_MEMORY = (
    'import deepspeed\nimport deepspeed.ops\n\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
)


def loop_text(name: str, width: int, steps: int) -> str:
    """Return a loop with a larger model and longer steps, whose lines say when they were printed."""
    text = (LOOPS / f"{name}.py").read_text()
    changes = {
        "STEPS, GLOBAL_BATCH, MICRO_BATCH = 40,": f"STEPS, GLOBAL_BATCH, MICRO_BATCH = {steps + WARM_UP},",
        "nn.Linear(16, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 1)": (
            f"nn.Linear(16, {width}), nn.Linear({width}, {width}), nn.LayerNorm({width}), nn.Linear({width}, 1)"
        ),
        "        total = 0.0\n": "        import time\n        time.sleep(1.0)\n        total = 0.0\n",
        ':.9f}", flush=True)': ':.9f} at {time.time()}", flush=True)',
        "import deepspeed\n": NO_SHARED_MEMORY,
    }
    for before, after in changes.items():
        text = text.replace(before, after)
    return text


def step_seconds(folder: Path, name: str, width: int, steps: int, *, survives: bool) -> list[float]:
    """Run a loop, and return the seconds of its steps."""
    folder.mkdir()
    (folder / "loop.py").write_text(loop_text(name, width, steps))
    config = {
        "run": {"name": "loop", "command": [sys.executable, "loop.py"]},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "training": {"global_batch_size": 24, "micro_batch_size": 2, "steps": steps + WARM_UP},
        "monitor": {"watch": "off"},
        **({"survive": {"in_place": True}} if survives else {}),
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "bigsci_launch", "submit", "run.yaml", "--wait"]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(argv, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=True)
    log = (folder / "runs" / "loop" / "attempts" / "0001" / "logs" / "rank-0000.log").read_text()
    times = [float(each) for each in re.findall(r"step \d+ loss \S+ at (\S+)", log)][WARM_UP - 1 :]
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares steps with and without Survivor.")
    parser.add_argument("loops", nargs="*", default=list(NAMES))
    parser.add_argument("--width", type=int, default=1448)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="survivor-cost-"))
    numbers = options.width**2 + 21 * options.width + 1
    print(f"{numbers:,} parameters, {12 * numbers / 2**20:.0f} MiB of weights and moments, 2 ranks", flush=True)
    print("| loop | plain, s | with Survivor, s | difference, ms | % of a step |\n|---|---|---|---|---|")
    for loop in options.loops:
        plain, surviving = (
            median(step_seconds(folder / name, name, options.width, options.steps, survives=name != NAMES[loop][0]))
            for name in NAMES[loop]
        )
        more = surviving - plain
        print(f"| {loop} | {plain:.4f} | {surviving:.4f} | {1e3 * more:.1f} | {100 * more / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
