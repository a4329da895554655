"""`bsl slow` next to `traceml-ai`, in the same runs: who is slow, and in which phase?

    python -m venv traceml && traceml/bin/pip install traceml-ai
    python benchmarks/slow_compared.py --traceml traceml --work /tmp/compared --page docs/measurements/slow-compared.md

The program of `slow_runs.py` runs on four ranks under `traceml run`, with its `trace_step` around each step, and keeps
rings. One rank is disturbed from step 20 to the end. TraceML runs in an environment of its own, with the torch of this
one. Of each, the answer at the end of the run counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slow_looks import hurry
from slow_runs import NICE, RANKS, WORDS

from bigsci_launch.content import packaged
from bigsci_launch.slow.answer import Asked, who_is_slow

FIRST, LAST = 20, 90
KINDS = ("none", "loader", "forward", "backward", "garbage")
SHARES = (0.2, 0.5)
TIMEOUT_S = 400
PRIORITY = "import os, pathlib; 'RANKS_NICE' in os.environ and "
PRIORITY += "pathlib.Path('/proc/self/autogroup').write_text(os.environ['RANKS_NICE'])"
"""Run at the start of each Python of TraceML's environment: its launcher makes sessions, which the kernel weighs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run, and what both say of it. `verdict` is TraceML's, with the rank that it calls a straggler, if any."""

    style: str
    kind: str
    share: float
    rank: int
    found: list[dict[str, Any]]
    verdict: str
    why: str
    accused: int | None
    phase: str | None


def run(style: str, kind: str, share: float, rank: int, options: argparse.Namespace) -> Row:
    folder = options.work / f"{style}-{kind}-{share:g}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rings").mkdir(parents=True)
    due = {"kind": kind, "share": share, "ranks": [rank], "first": FIRST, "last": LAST + 10}
    (folder / "schedule.json").write_text(json.dumps([due] if kind != "none" else []))
    here = Path(__file__).parent
    torch_site = Path(torch.__file__).parents[1]
    path = [packaged("diagnostics", "ring_site"), here, here / "slowing", options.traceml_site, torch_site]
    more = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "BSL_RING_DIR": str(folder / "rings"),
        "BSL_SLOW_SCHEDULE": str(folder / "schedule.json"),
        "OMP_NUM_THREADS": "1",
        **({"RANKS_NICE": str(NICE)} if os.geteuid() == 0 else {}),
    }
    argv = [options.traceml / "bin" / "traceml", "run", "--nproc-per-node", RANKS, "--logs-dir", folder / "logs"]
    argv += ["--run-name", "run", here / "slowing" / "traced.py", "--args", style, LAST]
    with (folder / "log").open("wb") as log:
        command = list(map(str, argv))
        subprocess.run(command, env={**os.environ, **more}, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False)
    summary = next((folder / "logs").rglob("final_summary.json"), None)
    if summary is None:
        sys.exit(f"TraceML has left no summary: {(folder / 'log').read_text()[-2000:]}")
    return _row(style, kind, share, rank, who_is_slow(str(folder / "rings")), json.loads(summary.read_text()))


def _row(style: str, kind: str, share: float, rank: int, asked: Asked, summary: dict[str, Any]) -> Row:
    found = [
        {"ranks": each.ranks, "phase": each.phase, "ms": each.cost.ms_per_step} for each in asked.answer.stragglers
    ]
    said = summary["primary_diagnosis"]
    evidence = said.get("evidence") or {}
    is_rank = "STRAGGLER" in said["kind"]
    accused = evidence.get("worst", {}).get("rank") if is_rank else None
    return Row(style, kind, share, rank, found, said["status"], said["summary"], accused, evidence.get("phase"))


HEAD = """<!-- Made by `python benchmarks/slow_compared.py --traceml FOLDER --work FOLDER --page FILE`. -->

# `bsl slow` next to TraceML

The [program](../../benchmarks/slow_compared.py) of [who makes a job slow](slow.md) runs on four ranks of gloo under
`traceml run`, with `trace_step` around each step as its manual says, and keeps rings: both see the same run. One rank
is disturbed from step {first} to the end, step {last}, by a share of an undisturbed step. Of each, the answer at the
end of the run counts: of `bsl slow`, about its newest 60 steps. The machine has two cores and is busy.

TraceML ({version}) has a verdict for slow input and for slow compute of one rank, and none for a garbage collection or
for saves. DDP makes the backward passes of all ranks equally long, so that a rank which is slow in backward cannot be
seen from the times of the passes. TraceML needs the two lines in the loop and no rings; `bsl slow` needs the rings.
Of a garbage collection, its `STRAGGLER` compares a rank that waited with the slow one, and says that the cause is not
measured: that counts as no rank named.

| slowed by | rank | `bsl slow` | TraceML |
|---|---|---|---|
"""


def page_of(rows: Sequence[Row], version: str) -> str:
    """Return the page of all rows."""
    lines = [_line(row) for row in rows]
    slowed = [row for row in rows if row.kind != "none"]
    ours = sum({rank for each in row.found for rank in each["ranks"]} == {row.rank} for row in slowed)
    theirs = sum(row.accused == row.rank for row in slowed)
    innocent = sum(any(set(each["ranks"]) != {row.rank} for each in row.found) for row in rows)
    others = sum(row.accused is not None and (row.kind == "none" or row.accused != row.rank) for row in rows)
    closing = f"\nNamed: `bsl slow` {ours}, TraceML {theirs} of {len(slowed)}. Innocent: {innocent} and {others}.\n"
    return HEAD.format(first=FIRST, last=LAST, version=version) + "\n".join(lines) + "\n" + closing


def _line(row: Row) -> str:
    kind = f"{row.style}, {WORDS[row.kind]}" + (f", {row.share:.0%}" if row.share else "")
    ours = "; ".join(f"rank {each['ranks'][0]}, {each['phase']}, {each['ms']:.0f} ms" for each in row.found) or "-"
    named = f": rank {row.accused}, {row.phase}" if row.accused is not None else ""
    return f"| {kind} | {row.rank if row.kind != 'none' else '-'} | {ours} | {row.verdict}{named} |"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--traceml", type=Path, required=True, help="virtual environment with traceml-ai")
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--styles", default="ddp,fsdp2")
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--page", type=Path)
    given = options.parse_args()
    given.traceml_site = next((given.traceml.absolute() / "lib").glob("python*/site-packages"))
    (given.traceml_site / "priority.pth").write_text(PRIORITY)
    hurry(NICE if os.geteuid() == 0 else 0)
    rows: list[Row] = []
    draw = random.Random(0)
    for style in given.styles.split(","):
        for kind in given.kinds.split(","):
            for share in SHARES if kind != "none" else (0.0,):
                row = run(style, kind, share, draw.randrange(RANKS), given)
                print(row, flush=True)
                rows.append(row)
                (given.work / f"{style}-{kind}-{share:g}.json").write_text(json.dumps(asdict(row)))
    if given.page:
        installed = next(given.traceml_site.glob("traceml_ai-*.dist-info")).name.removesuffix(".dist-info")
        given.page.write_text(page_of(rows, installed.replace("_", "-").replace("ai-", "ai ")))


if __name__ == "__main__":
    main()
