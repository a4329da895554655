"""What snapshots and the copies of buddies cost while nothing fails.

    python benchmarks/recovery_cost.py [--steps 60] [--page docs/measurements/recovery.md]

Four gloo ranks (pp 2, dp 2, bf16) train a GPT whose step takes at least a second, with `survive` and a snapshot after
every second step. So steps with and without one alternate in one run, and whatever else the machine does meets both
alike: the cost is the difference between the steps that follow a snapshot and the others. torch's asynchronous
checkpoint writes as many bytes after every second step of a loop that computes as long.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ranks import draw_corpus, require_success, start_ranks
from recovering.cases import LAYOUTS
from recovering.injured_run import run_undisturbed, steps_of, write_run_file

from bigsci_launch.runs.layout import RunDir

LAYOUT = LAYOUTS[0]
FIRST = 4
"""Steps before it are left out: caches are cold."""
BEGIN, END = "<!-- cost -->", "<!-- /cost -->"
SIZES = {"hidden_size": 384, "num_layers": 6, "sequence_length": 128, "vocab_size": 300}
BYTES_PER_ELEMENT = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery-cost-"))
    moments, num_bytes = train(folder, options.steps)
    seconds = statistics.median(intervals(moments, FIRST))
    peer = save(folder, num_bytes, options.steps, seconds)
    text = table_of({"snapshot and buddy copy": moments, "asynchronous checkpoint": peer}, num_bytes)
    print(text)
    if options.page:
        page = options.page.read_text()
        before, rest = page.split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    shutil.rmtree(folder)


def train(folder: Path, steps: int) -> tuple[list[float], int]:
    """Return the moments at which steps ended, and the bytes of the largest snapshot of a rank."""
    draw_corpus(folder / "corpus")
    survive = {"snapshot_steps": 2, "standby": False}
    path = write_run_file(folder, "cost", LAYOUT, folder / "corpus", survive)
    document = json.loads(path.read_text())
    document["model"] |= SIZES
    document["training"] |= {"steps": steps}
    document["checkpoint"] = {}
    document["monitor"] = {"watch": "off", "ring": "none"}
    document["guards"] = {"interval": "off"}
    path.write_text(json.dumps(document))
    run = RunDir(folder / "runs" / "cost")
    run_undisturbed(path, run)
    attempt = run.latest_attempt()
    assert attempt is not None
    records = steps_of(attempt, LAYOUT)
    hidden, layers, vocab = SIZES["hidden_size"], SIZES["num_layers"], SIZES["vocab_size"]
    num_parameters = layers // LAYOUT.pp * 12 * hidden**2 + vocab * hidden
    return [float(each["time"]) for each in records], BYTES_PER_ELEMENT * num_parameters // LAYOUT.dp


def save(folder: Path, num_bytes: int, steps: int, seconds: float) -> list[float]:
    """Return the moments at which the steps of the loop ended that saves asynchronously."""
    processes = start_ranks(
        LAYOUT.ranks,
        ["recovering.async_save", str(folder / "saved"), str(num_bytes), str(steps), str(seconds)],
        lambda rank: folder / f"async-{rank}.log",
        {},
    )
    log = folder / "async-0.log"
    require_success(processes, log, timeout_s=10 * steps * seconds)
    last = log.read_text().strip().splitlines()[-1]
    return [float(word) for word in last.split()][1:]


def intervals(moments: Sequence[float], first: int) -> list[float]:
    """Return the seconds between the ends of steps; those before step `first` are left out."""
    return [after - before for before, after in zip(moments[first:], moments[first + 1 :], strict=False)]


def table_of(found: dict[str, list[float]], num_bytes: int) -> str:
    lines = ["| after every second step | MB per rank | pairs | step without | step after it | difference |"]
    lines.append("|---|---|---|---|---|---|")
    for name, moments in found.items():
        each = intervals(moments, FIRST)
        # FIRST is even, and moments begin with step 1: the first interval left follows an odd step, without a snapshot.
        plain, burdened = each[0::2], each[1::2]
        pairs = list(zip(plain, burdened, strict=False))
        differences = [after - before for before, after in pairs]
        middle = statistics.median(plain)
        error = 1.25 * statistics.stdev(differences) / math.sqrt(len(differences))
        lines.append(
            f"| {name} | {num_bytes / 1e6:.0f} | {len(pairs)} | {middle:.2f} s | {statistics.median(burdened):.2f} s | "
            f"{statistics.median(differences) / middle:+.1%} +- {error / middle:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
