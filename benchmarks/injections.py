"""Injects failures into runs on a real Slurm, and judges what `bsl` says of each.

    python benchmarks/injections.py --json --page docs/measurements/injections.md > all.json
    python benchmarks/injections.py --only slurmd-silent --earlier all.json --page docs/measurements/injections.md

Needs root and Slurm's packages: it starts mini clusters and small file systems of its own, and removes them. Each
failure declares what is true of it (`injected/cases_*.py`); `bsl status` and the `bsl logs` that it advises are run as
a user would, and compared with that (`injected/judge.py`). A row that is wrong is shown as wrong.

Exits with 1 if a row is wrong or was not made.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from injected import cases_control, cases_held_out, cases_jobs, cases_ranks
from injected.case import COLUMNS, Fault, Injection, Look, Row
from injected.field import Field, MiniCluster, NotMade, Refused
from injected.judge import judge
from injected.page import FOLDER, counts_text, document, page, parse_row, shortened

CASES = (*cases_ranks.CASES, *cases_jobs.CASES, *cases_control.CASES, *cases_held_out.CASES)
NODES = {"isolated": 16, "shared": 2, "preempting": 2, "rebooting": 2}
AT_A_TIME = {"isolated": 4, "shared": 1, "preempting": 1, "rebooting": 1}
SAID = ("state", "ended", "first failure", "cause", "evidence", "waits because", "lost node", "node ", "next:")
LINE_LENGTH = 200
talking = threading.Lock()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Inject failures into runs on a mini Slurm, and judge the answers.")
    parser.add_argument("--only", default="*", help="names, or patterns, with commas; 'held-out/*' is a group")
    parser.add_argument("--list", action="store_true", help="list the injections and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--page", type=Path, help="write the page")
    parser.add_argument("--earlier", type=Path, help="an earlier --json: its rows stand for what is not made now")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the runs")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that clusters and mounts end with this process
    patterns = options.only.split(",")
    cases = [case for case in CASES if any(is_chosen(case, pattern) for pattern in patterns)]
    if options.list:
        for case in cases:
            print(f"{case.group:8s} {case.name:20s} {case.cluster:11s} {case.what}")
        return
    if not cases:
        sys.exit(f"--only {options.only}: no such injection; --list shows them all")
    rows = run_all(cases, keep=options.keep)
    if options.earlier:
        rows = merged(json.loads(options.earlier.read_text()), rows)
    if options.page:
        options.page.write_text(page(rows))
    if options.json:
        print(json.dumps(document(rows), indent=1))
    print(counts_text(rows), file=sys.stderr)
    sys.exit(1 if any(row.verdict in ("wrong", "not made") for row in rows) else 0)


def is_chosen(case: Injection, pattern: str) -> bool:
    """Whether the pattern is for the name, or for the group and the name."""
    return any(fnmatch.fnmatch(name, pattern) for name in (case.name, f"{case.group}/{case.name}"))


def merged(earlier: dict[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Return the rows of an earlier run, replaced by those of this one, in the order of the table."""
    known = {row["name"]: row for row in earlier["rows"]}
    made = {row.injection.name: row for row in rows}
    return [
        made.get(case.name) or parse_row(case, known[case.name])
        for case in CASES
        if case.name in made or case.name in known
    ]


def run_all(cases: Sequence[Injection], keep: bool) -> list[Row]:
    """Make all failures, each on the kind of cluster that it needs; the kinds at the same time."""
    work = Path(tempfile.mkdtemp(prefix="bsl-injected-", dir="/tmp"))
    found: dict[str, Row] = {}
    try:
        with small_disks(work) as disks:
            if any(case.needs_torch for case in cases):
                prepare_corpus(work)
            kinds = sorted({case.cluster for case in cases})
            with ThreadPoolExecutor(len(kinds)) as pool:
                for rows in pool.map(lambda kind: run_kind(kind, cases, work, disks), kinds):
                    found.update({row.injection.name: row for row in rows})
    finally:
        if keep:
            print(f"the runs are in {work}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)
    return [found[case.name] for case in cases]


def run_kind(kind: str, cases: Sequence[Injection], work: Path, disks: Path) -> list[Row]:
    chosen = [case for case in cases if case.cluster == kind]
    cluster = MiniCluster.up(kind, NODES[kind])
    try:
        with ThreadPoolExecutor(AT_A_TIME[kind]) as pool:
            # A folder with the name of the failure would put that name into the answers.
            fields = [Field(cluster, work / f"{kind[0]}{number:02d}", disks) for number in range(len(chosen))]
            return list(pool.map(run_case, chosen, fields))
    finally:
        cluster.down()


def run_case(case: Injection, field: Field) -> Row:
    began = time.monotonic()
    grades, faults, problem = dict.fromkeys(COLUMNS, "-"), (), ""
    looks: list[Look] = []
    try:
        for look in case.inject(field):
            looks.append(look)
        grades, faults = judge(case.truths, looks)
    except Refused as error:
        grades["cause"], faults = "wrong", (Fault("cause", "wrong", f"`bsl submit` refuses it: {error}"),)
    except (NotMade, OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}"
    except Exception:
        problem = traceback.format_exc(limit=-2)
    row = Row(case, grades, faults, said(looks), time.monotonic() - began, problem)
    with talking:
        print(f"{row.verdict:9s} {case.name:20s} {row.seconds:4.0f} s", file=sys.stderr)
        for text in [problem] if problem else [f"{f.column}, {f.grade}: {f.what}" for f in faults]:
            print(f"            {shortened(text)}", file=sys.stderr, flush=True)
    return row


def said(looks: Sequence[Look]) -> tuple[str, ...]:
    """Return the lines of each look that say why, and what to do."""
    lines = []
    for look in looks:
        chosen = [line for line in look.text.splitlines() if line.startswith(SAID)]
        lines += [f"[{look.moment}]"] if look.moment and chosen else []
        lines += [FOLDER.sub("DIR", line)[:LINE_LENGTH] for line in chosen]
    return tuple(lines)


def prepare_corpus(work: Path) -> None:
    source = Path(json.__file__).parent
    words = ["data", "prepare", str(source), "--glob", "*.py", "--output", str(work / "corpus" / "text")]
    command = [sys.executable, "-m", "bigsci_launch", *words, "--vocab-size", "512"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def small_disks(work: Path) -> Iterator[Path]:
    """Small file systems that can be full or stand still. They exist before the nodes, which then see them."""
    disks = work / "disks"
    with ExitStack() as stack:
        for name, options in (("bytes", "size=3m"), ("inodes", "size=30m,nr_inodes=150"), ("tiny", "size=16k")):
            mount(stack, disks / name, ["-t", "tmpfs", "-o", options, "none"])
        image = work / "frozen.img"
        with image.open("wb") as stream:
            stream.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        mount(stack, disks / "frozen", ["-o", "loop", str(image)])
        yield disks


def mount(stack: ExitStack, folder: Path, argv: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["mount", *argv, str(folder)], check=True)
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)


if __name__ == "__main__":
    main()
