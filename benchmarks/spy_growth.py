"""Measures how the analysis grows: CPU time and length of the report at 384, 4,096 and 32,768 ranks.

    python benchmarks/spy_growth.py [--ring 2000] [--sizes 384,4096,32768] [--output FILE]

It analyses synthetic jobs (see spy_synthetic.py), each in a separate process: a rank that left out a collective, with
recorders of `--ring` collectives each and with none, and a rank that waits for its data loader. Times are CPU seconds,
which depend little on other load: from the parsed documents of a bundle to the evidence, to the verdict, and to the
report in 80 columns. Writes a table in Markdown. Exits with 1 if a report has more than 40 lines or 80 columns, or if a
rank costs more than three times as much in the largest job as in the smallest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from spy_synthetic import SyntheticJob

from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.report import to_lines
from bigsci_launch.topology import Topology

TOPOLOGIES = {384: Topology(4, 12, 8), 4096: Topology(8, 16, 32), 32768: Topology(8, 16, 256)}
COLUMNS, LINES, GROWTH = 80, 40, 3.0
JOBS = ("skip, recorded", "skip, stacks only", "data loader, stacks only")
Row = dict[str, Any]


def main() -> None:
    options = parse_arguments()
    if options.one:
        print(json.dumps(measure(options.one, TOPOLOGIES[options.sizes[0]], options.ring)))
        return
    rows = [run_one(job, size, options.ring) for job in JOBS for size in options.sizes]
    text = table(rows, options.ring)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    if not is_readable(rows) or not is_near_linear(rows):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures how the analysis of bsl spy grows with the number of ranks.")
    parser.add_argument("--ring", type=int, default=2000)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(TOPOLOGIES))
    parser.add_argument("--one", choices=JOBS, help="Measure one job in this process (for internal use).")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def run_one(job: str, size: int, ring: int) -> Row:
    """Measure in a new process, so that nothing is warm and the memory is only this job's."""
    argv = [sys.executable, __file__, "--one", job, "--sizes", str(size), "--ring", str(ring)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{job}, {size} ranks: {done.stderr[-800:]}")
    row: Row = json.loads(done.stdout)
    print(row, file=sys.stderr, flush=True)
    return row


def measure(job: str, topology: Topology, ring: int) -> Row:
    """Return the CPU seconds of each part of the analysis of one job, and its results."""
    culprit = topology.world_size // 2 + topology.tp + 1
    cause = "loader" if "loader" in job else "skip"
    made = SyntheticJob(topology, culprit, cause, ring if "recorded" in job else 0)  # type: ignore[arg-type]
    bundle = made.bundle()
    times = [time.process_time()]
    evidence = bundle.evidence()
    times.append(time.process_time())
    conclusion = judge(evidence)
    times.append(time.process_time())
    lines = to_lines(evidence, conclusion, COLUMNS)
    times.append(time.process_time())
    suspects = [suspect.rank for suspect in conclusion.suspects]
    return {
        "job": job,
        "ranks": topology.world_size,
        "seconds": [after - before for before, after in pairwise(times)],
        "lines": len(lines),
        "columns": max(len(line.text) for line in lines),
        "document_bytes": len(json.dumps(to_document(evidence, conclusion))),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "says": f"names rank {culprit}" if suspects == [culprit] else f"{len(suspects)} suspects",
    }


def is_readable(rows: list[Row]) -> bool:
    return all(row["lines"] <= LINES and row["columns"] <= COLUMNS for row in rows)


def is_near_linear(rows: list[Row]) -> bool:
    """Return whether a rank of the largest job costs at most three times as much as one of the smallest."""
    for job in JOBS:
        costs = [sum(row["seconds"]) / row["ranks"] for row in rows if row["job"] == job]
        if costs[-1] > GROWTH * costs[0]:
            return False
    return True


def table(rows: list[Row], ring: int) -> str:
    """Return the result in Markdown."""
    lines = [
        "| job | ranks | evidence s | verdict s | report s | ms per rank | lines x columns | JSON | memory | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        evidence_s, verdict_s, report_s = row["seconds"]
        lines.append(
            f"| {row['job']} | {row['ranks']:,} | {evidence_s:.2f} | {verdict_s:.2f} | {report_s:.2f} "
            f"| {sum(row['seconds']) / row['ranks'] * 1e3:.2f} | {row['lines']} x {row['columns']} "
            f"| {row['document_bytes'] / 1e3:.0f} KB | {row['memory_bytes'] / 1e6:,.0f} MB | {row['says']} |"
        )
    head = f"CPU seconds on a machine with {os.cpu_count()} cores; recorders hold {ring} collectives each:"
    return "\n".join([head, "", *lines])


if __name__ == "__main__":
    main()
