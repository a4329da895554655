"""Runs the tests of Slurm on several versions of it, and writes docs/measurements/slurm-matrix.md from what was run.

    python benchmarks/slurm_matrix.py run 24.11 26.05 20.11
    python benchmarks/slurm_matrix.py run 24.11 --only test_watch.py --only test_chain.py
    python benchmarks/slurm_matrix.py page

Each file of tests/slurm runs by itself where that version is installed (slurm/minicluster/with-slurm.sh). A test that
fails is run again alone, twice at most, and each outcome is a row of benchmarks/rows/slurm-matrix.jsonl. The page shows
the newest row of each test, and each failure: a file that was mended is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import slurm_matrix_page

PROJECT = Path(__file__).parents[1]
TESTS = PROJECT / "tests" / "slurm"
ROWS = Path(__file__).parent / "rows" / "slurm-matrix.jsonl"
REQUEUES = Path(__file__).parent / "rows" / "slurm-requeue.jsonl"
REPORTS = PROJECT / "build" / "slurm-matrix"
"""In the project's folder, which a command under another version sees."""
WITH_SLURM = PROJECT / "slurm" / "minicluster" / "with-slurm.sh"
AGAIN = 2
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("versions", nargs="+", help="20.11, 22.05, 24.11 or 26.05")
    run.add_argument("--only", action="append", default=[], metavar="FILE", help="a file of tests/slurm, or FILE::TEST")
    run.add_argument("--marks", default="not torch and not long")
    commands.add_parser("page")
    options = parser.parse_args()
    if options.command == "run":
        for version in options.versions:
            run_version(version, options.only or sorted(path.name for path in TESTS.glob("test_*.py")), options.marks)
    slurm_matrix_page.write(read_rows(ROWS), read_rows(REQUEUES))


def run_version(version: str, wanted: Sequence[str], marks: str) -> None:
    keep([root_of(version)])
    for name in wanted:
        rows = run_tests(version, [name], marks)
        for _ in range(AGAIN):
            keep(rows)
            failed = [f"{row['file']}::{row['test']}" for row in rows if row["outcome"] == "failed"]
            if not failed:
                break
            rows = run_tests(version, failed, marks)


def run_tests(version: str, wanted: Sequence[str], marks: str) -> list[Row]:
    """Run files, or single tests, and return a row for each test."""
    report = REPORTS / f"{version}-{os.getpid()}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "-m", marks]
    words += [str(TESTS / each) for each in wanted]
    done = subprocess.run([*enter(version), *words], cwd=PROJECT, capture_output=True, text=True)
    rows = list(rows_of(report, version)) if report.exists() else []
    counts = " ".join(f"{row['test']}={row['outcome']}" for row in rows if row["outcome"] != "passed")
    seconds = sum(row["seconds"] for row in rows)
    print(f"{version} {' '.join(wanted)}: {len(rows)} tests, {seconds:.0f} s {counts}", flush=True)
    if not rows and done.returncode != 5:  # 5: the marks leave no test of the file
        raise SystemExit(f"{done.stdout}{done.stderr}")
    report.with_suffix(".log").write_text(done.stdout + done.stderr)
    return rows


def enter(version: str) -> list[str]:
    return ["bash", str(WITH_SLURM), version]


def rows_of(report: Path, version: str) -> Iterator[Row]:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        yield {
            "version": version,
            "file": f"{case.get('classname', '').rpartition('.')[2]}.py",
            "test": case.get("name"),
            "outcome": outcome,
            "seconds": round(float(case.get("time", 0)), 1),
            "when": when,
            "words": "" if bad is None else first_line(bad.get("message") or ""),
        }


def first_line(text: str) -> str:
    return re.sub(r"/\S*/", "", text.strip().partition("\n")[0])[:160]


def root_of(version: str) -> Row:
    """Make the root file system of a version, if it is not there; return its version, size and how long that took."""
    began = time.monotonic()
    subprocess.run([*enter(version), "--make"], cwd=PROJECT, check=True)
    seconds = time.monotonic() - began
    done = subprocess.run([*enter(version), "slurmctld", "-V"], cwd=PROJECT, capture_output=True, text=True, check=True)
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bigsci-launch" / "slurm" / version
    size = subprocess.run(["du", "-sxm", str(root)], capture_output=True, text=True, check=True).stdout.split()[0]
    made = {"made_s": round(seconds)} if seconds > 10 else {}
    return {"version": version, "package": done.stdout.split()[-1], "mib": int(size), **made}


def keep(rows: Sequence[Row]) -> None:
    with ROWS.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
