"""Slows one rank of foreign programs down, and asks `bsl slow` who it is, without any preparation of the program.

    python benchmarks/slow_looks.py --results slow-looks                  # a folder; about an hour
    python benchmarks/slow_looks.py --results slow-looks --page docs/measurements/slow-looks.md

Four ranks on gloo (slowed/loop.py), data-parallel in three styles: DDP, FSDP2, and all_reduce by hand. One rank is
slowed down by KIND and by a share of the undisturbed step; that of the quota needs root, to make a cgroup. What was
seen is kept, and judged when all is done, or again with --page. The rules were made with the runs of DDP; the others
were judged once. Exits with 1 if an innocent rank was named.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigsci_launch.slow.looks import answer_of_bundle, look_at
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.look.target import target_of_process

Row = dict[str, Any]
LOOP = Path(__file__).parent / "slowed" / "loop.py"
PHASES = {
    "loader": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer",
    "gc": "garbage collection", "quota": "outside of Python", "none": None,
}  # fmt: skip
QUOTA = Path(f"/sys/fs/cgroup/cpu/bsl-slow-looks-{os.getpid()}")
PERIOD_US, SHARES = 100000, 1 << 17
NUM_RANKS = 4
START_S, MORE_S = 240.0, 40.0
MARK_BEGIN, MARK_END = "<!-- table -->", "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Slowed:
    """One run: what slows which rank down, and by how much of a step."""

    style: str
    kind: str
    share: float
    slow: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does `bsl slow` find the slow rank of a program that it never saw?")
    parser.add_argument("--styles", default="ddp,fsdp2,manual")
    parser.add_argument("--kinds", default="none,none,none,loader,forward,backward,gc,quota")
    parser.add_argument("--shares", default="0.2,0.5")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each look")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0, help="of the ranks and looks; on a busy machine, -15, as root")
    parser.add_argument("--results", type=Path, default=Path("slow-looks"), help="folder for what was seen")
    parser.add_argument("--page", type=Path, help="look at nothing: write the table of --results into this page")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    options.results.mkdir(exist_ok=True)
    hurry(options.nice)
    if not options.page:
        for number, case in enumerate(cases(options)):
            with gzip.open(options.results / f"{case.style}-{number:02d}-{case.kind}.json.gz", "wt") as stream:
                json.dump(run(case, options), stream)
            print(number, case, flush=True)
    kept = options.styles.split(",")
    files = [path for path in sorted(options.results.glob("*.gz")) if path.name.partition("-")[0] in kept]
    rows = [judged(json.loads(gzip.decompress(path.read_bytes()))) for path in files]
    show(rows, options.page)
    sys.exit(1 if any(row["innocent"] for row in rows) else 0)


def hurry(nice: int) -> None:
    """Give this program and what it starts so much priority: the kernel weighs sessions, and processes in them."""
    if nice:
        with suppress(OSError):
            os.setsid()
        Path("/proc/self/autogroup").write_text(str(nice))
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def cases(options: argparse.Namespace) -> Iterator[Slowed]:
    chance = random.Random(options.seed)
    for style in options.styles.split(","):
        for kind in options.kinds.split(","):
            for share in map(float, options.shares.split(",")) if kind != "none" else (0.0,):
                yield Slowed(style, kind, share, chance.randrange(NUM_RANKS))


def run(case: Slowed, options: argparse.Namespace) -> Row:
    """Start a program, look at it, and return what was seen and what is true."""
    with tempfile.TemporaryDirectory(prefix="slow-looks-") as name, started(case, options, Path(name)) as launcher:
        folder = Path(name)
        wait_until(lambda: len(list(folder.glob("steps.*.begun"))) == NUM_RANKS or limit(case, folder), launcher)
        began = time.monotonic()
        bundle = look_at(target_of_process(launcher.pid), options.seconds)
        seen = {"collection": dict(bundle.collection), "nodes": list(bundle.nodes)}
        return {**asdict(case), "true": true_share(case, folder), "seconds": time.monotonic() - began, **seen}


def judged(kept: Row) -> Row:
    """Return what is said of a run, next to what is true."""
    answer = answer_of_bundle(Bundle(kept["collection"], tuple(kept["nodes"])))
    guilty = {kept["slow"]} if kept["kind"] != "none" else set()
    named = [each for each in answer.stragglers if guilty and set(each.ranks) == guilty]
    innocent = {rank for each in answer.stragglers for rank in each.ranks} - guilty
    row = {
        **{key: kept[key] for key in ("style", "kind", "share", "slow", "seconds", "true")},
        "named": bool(named), "innocent": sorted(innocent), "undecided": answer.undecided,
        "wanted": PHASES[kept["kind"]], "phase": str(named[0].phase) if named else None,
        "found": named[0].cost.share if named else None,
        "site": named[0].site if named else None, "causes": list(named[0].causes) if named else [],
        "cost": statistics.fmean(
            node["cpu_s"] / node["looked_s"] / len(node["ranks"]) for node in kept["nodes"] if node.get("looked_s")
        ),
        "imbalances": [each.ranks for each in answer.imbalances],
    }  # fmt: skip
    print(row)
    return row


@contextmanager
def started(case: Slowed, options: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    torchrun = Path(sys.executable).parent / "torchrun"
    argv = [
        "nice",
        "-n",
        str(options.nice),
        torchrun,
        "--standalone",
        "--nproc-per-node",
        str(NUM_RANKS),
        LOOP,
        case.kind,
        str(case.share),
    ]
    argv += [str(case.slow), case.style, folder / "steps", str(options.seconds + MORE_S)]
    with (folder / "log").open("wb") as log:
        more = {**os.environ, "RANKS_NICE": str(options.nice)}
        launcher = subprocess.Popen(list(map(str, argv)), stdout=log, stderr=log, env=more, start_new_session=True)
    try:
        yield launcher
    finally:
        launcher.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        with suppress(OSError):
            QUOTA.rmdir()


def wait_until(is_true: Any, launcher: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while not is_true():
        if launcher.poll() is not None or time.monotonic() > until:
            sys.exit("the program did not start")
        time.sleep(0.1)


def limit(case: Slowed, folder: Path) -> bool:
    """Put the rank that asks for it into a cgroup with a quota. Always false: it has not begun yet."""
    asked = folder / "steps.pid"
    if case.kind == "quota" and asked.exists() and asked.read_text() and not (folder / "steps.ready").exists():
        pid, cores = asked.read_text().split()
        QUOTA.mkdir(exist_ok=True)
        (QUOTA / "cpu.shares").write_text(str(SHARES))
        (QUOTA / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (QUOTA / "cpu.cfs_quota_us").write_text(str(max(1000, int(PERIOD_US * float(cores)))))
        (QUOTA / "cgroup.procs").write_text(pid)
        (folder / "steps.ready").touch()
    return False


def true_share(case: Slowed, folder: Path) -> float | None:
    """Return the share of a step that was added to it: as its rank measured it, and for a quota as steps got longer."""
    with suppress(OSError, ValueError, statistics.StatisticsError):
        found = json.loads((folder / f"steps.{case.slow}").read_text())
        after = statistics.fmean(found["after"])
        return 1 - found["before"] / after if case.kind == "quota" else found["spent"] / after
    return None


def show(rows: Sequence[Row], page: Path | None) -> None:
    text = "\n".join((*table(rows), "", closing(rows)))
    if page is None:
        print(text)
        return
    before, _, rest = page.read_text().partition(MARK_BEGIN)
    page.write_text(f"{before}{MARK_BEGIN}\n\n{text}\n\n{MARK_END}{rest.partition(MARK_END)[2]}")


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| program | slowed by | runs | named | phase right | innocent named | undecided | step: added, found |"
    yield "|---|---|---|---|---|---|---|---|"
    for style in dict.fromkeys(row["style"] for row in rows):
        for kind, share in dict.fromkeys((row["kind"], row["share"]) for row in rows if row["style"] == style):
            yield line(
                style, kind, share, [r for r in rows if (r["style"], r["kind"], r["share"]) == (style, kind, share)]
            )
    slowed = [row for row in rows if row["kind"] != "none"]
    for name, part in (("all that are slowed down", slowed), ("all undisturbed", [r for r in rows if r not in slowed])):
        yield line(name, "", 0.0, part)


def closing(rows: Sequence[Row]) -> str:
    cost = statistics.fmean(row["cost"] for row in rows)
    return f"A look takes {cost:.1%} of a core of the node for each rank, most of it py-spy's."


def line(style: str, kind: str, share: float, rows: Sequence[Row]) -> str:
    named = [row for row in rows if row["named"]]
    right = sum(row["phase"] == row["wanted"] for row in named)
    shares = "; ".join(f"{_percent(row['true'])}, {_percent(row['found'])}" for row in named) if kind else ""
    by = f"{kind} {share:.0%}" if share else kind
    innocent, undecided = sum(bool(row["innocent"]) for row in rows), sum(row["undecided"] is not None for row in rows)
    return f"| {style} | {by} | {len(rows)} | {len(named)} | {right} | {innocent} | {undecided} | {shares} |"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    main()
