"""Writes docs/measurements/slurm-matrix.md from the rows of slurm_matrix.py and requeue_speed.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "slurm-matrix.md"
Row = dict[str, Any]
Outcomes = Mapping[tuple[str, str, str], Row]
"""The newest row of each test, by version, file and name."""

ACTIONS: dict[str, tuple[str, ...]] = {
    "`bsl cluster up`, `status`, `down`": ("test_cluster.py::*", "test_cluster_guide.py::*", "test_many_nodes.py::*"),
    "clusters that die, or end halfway": ("test_cluster_[nrs]*::*",),
    "`bsl submit`, to the end of a run": (
        "test_submit.py::test_a_run*",
        "test_submit.py::test_a_hostile*",
        "test_submit.py::test_a_refused*",
        "test_submit.py::test_a_submission*",
        "test_submit.py::test_nothing*",
        "test_submission.py::*",
    ),
    "submissions without an answer": ("test_lost_answers.py::*",),
    "why a run ended, and which rank": (
        "test_exit_reason.py::*",
        "test_submit.py::test_a_killed*",
        "test_submit.py::test_a_program*",
        "test_submit.py::test_an_exit*",
        "test_submit.py::test_ranks_are*",
        "test_submit.py::test_the_time*",
    ),
    "`bsl status`": ("test_status.py::*", "test_submit.py::test_a_job_that*"),
    "`bsl cancel`, requests to stop": (
        "test_control.py::*",
        "test_submit.py::test_cancel*",
        "test_submit.py::test_ranks_that*",
    ),
    "`bsl spy`": ("test_spy.py::*", "test_spy_jobs.py::test_a_step*", "test_readme.py::*"),
    "... on job arrays": ("test_spy_jobs.py::*array*",),
    "... on heterogeneous jobs": ("test_spy_jobs.py::*heterogeneous*", "test_spy_jobs.py::*torchx*"),
    "`bsl watch`": ("test_watch.py::*",),
    "`slurm.chain`": (
        "test_chain.py::*chain*",
        "test_chain.py::*leaves*",
        "test_chain.py::*links*",
        "test_chain.py::test_cancel*",
        "test_chain.py::*60_steps*",
    ),
    "requeues, preemption": ("test_chain.py::*preempted*", "test_submit.py::*requeued*", "test_nodes.py::*requeued*"),
    "expedited requeues": ("test_chain.py::*expedited_run*",),
    "... and an error where Slurm has none": ("test_chain.py::*expedited_requeue*",),
    "lost nodes, `bsl nodes`": (
        "test_nodes.py::test_a_[knc]*",
        "test_nodes.py::test_a_run*",
        "test_nodes.py::test_a_rank*",
        "test_nodes.py::*slow*",
    ),
    "`survive`": ("test_survive.py::*",),
    "`bsl train`": ("test_training.py::*",),
    "keys of the site, staged files, containers": ("test_site_keys.py::*",),
    "torchrun and other launchers in a task": ("test_launchers.py::*",),
    "`bsl rehearse`": ("test_rehearse.py::*",),
    "`bsl diff-weights` in a job": ("test_diff_weights.py::*",),
    "`bsl hang-lab` on nodes": ("test_hang_lab.py::*",),
    "jobs that only sacct knows (slurmdbd)": ("test_accounting.py::*",),
}

HEAD = """# Slurm from 20.11 to 26.05

`bsl` promises to work with Slurm 20.11 and newer. Here, its tests on a real Slurm were run on the versions that Debian
has packages of, each in a root file system of its own. Only what was run is in the tables; times are UTC. Written by

```bash
python benchmarks/slurm_matrix.py run 20.11 24.11 26.05
```

The two cores had much other work, so the seconds are upper bounds: up to 20 processes at once until 12:30, 40 to 97
after 12:50, when most tests failed that are listed below. A test that fails is run again alone.
The eight of 20.11 are those of accounting: its slurmdbd starts with MariaDB 10.11, and the cluster does not come up;
the cause is not known.

`make slurm-matrix VERSION=24.11` does the same without this page, and `make test` runs five tests that read what Slurm
prints on 24.11 too, if it can be installed. The unit tests read outputs of all these versions
(`tests/unit/scheduler/recorded`).
"""
REQUEUE = """
## Expedited requeues

`slurm.requeue: expedite` is `sbatch --requeue=expedite`, of Slurm 25.11 and newer, where the site has
`SlurmctldParameters=enable_expedited_requeue`. Seconds from the kill, or from the end of the script, to the next start:
the median of some rounds, the shortest and the longest. Written by

```bash
bash slurm/minicluster/with-slurm.sh 26.05 .venv/bin/python benchmarks/requeue_speed.py --rounds 3
python benchmarks/slurm_matrix.py page
```

In the mini cluster, slurmctld gives a node up after 10 s, and a plain requeue waits for 15 s, until the credential of
the first start has expired. Slurm's defaults are 300 s and 120 s. *A job waits*: it needs more nodes than are free, and
runs for 60 s.
"""
HELD = """
Slurm holds an expedited job whose script fails on healthy nodes, instead of ending it as failed. So the job script of a
run that will not start again first asks for `Requeue=0`, and the job ends as FAILED (`tests/slurm/test_chain.py`).
"""


def write(rows: Sequence[Row], requeues: Sequence[Row]) -> None:
    roots: dict[str, Row] = {row["version"]: {} for row in rows}
    for row in rows:
        if "package" in row:
            roots[row["version"]].update(row)
    tests = [row for row in rows if "test" in row]
    newest = {(row["version"], row["file"], row["test"]): row for row in tests}
    versions = sorted(roots)
    parts = [HEAD, *totals(versions, roots, newest), *actions(versions, newest), *files(versions, newest),
             *failures(tests, newest), *skips(newest)]  # fmt: skip
    if requeues:
        parts += [REQUEUE.strip("\n"), "", *requeue_table(requeues), HELD.rstrip("\n")]
    PAGE.write_text("\n".join(parts) + "\n")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def counts(rows: Sequence[Row]) -> str:
    found = {what: sum(row["outcome"] == what for row in rows) for what in ("passed", "failed", "skipped")}
    return ", ".join(f"{number} {what}" for what, number in found.items() if number) or "not run"


def of(newest: Outcomes, version: str, pattern: str = "*") -> list[Row]:
    return [
        row for (seen, file, test), row in newest.items() if seen == version and fnmatch(f"{file}::{test}", pattern)
    ]


def totals(versions: Sequence[str], roots: Mapping[str, Row], newest: Outcomes) -> Iterator[str]:
    lines = []
    for version in versions:
        rows, root = of(newest, version), roots[version]
        times = sorted(row["when"] for row in rows)
        minutes = sum(row["seconds"] for row in rows) / 60
        disk = f"{root['mib']} MiB" if "mib" in root else ""
        span = f"{times[0]} to {times[-1].partition(' ')[2]}" if times else ""
        lines.append([f"{root.get('package', version)}", disk, counts(rows), f"{minutes:.0f}", span])
    yield from table(["version", "disk", "tests", "minutes", "when"], lines)


def actions(versions: Sequence[str], newest: Outcomes) -> Iterator[str]:
    yield "\n## What works\n\nNumbers count tests that passed.\n"
    lines = [
        [action, *(cell(newest, version, patterns) for version in versions)] for action, patterns in ACTIONS.items()
    ]
    yield from table(["action", *versions], lines)


def cell(newest: Outcomes, version: str, patterns: Sequence[str]) -> str:
    rows = [row for pattern in patterns for row in of(newest, version, pattern)]
    passed, failed = ([row for row in rows if row["outcome"] == what] for what in ("passed", "failed"))
    if failed:
        return f"**{len(failed)} of {len(rows)} fail**"
    if not passed:
        return "skipped" if rows else "not run"
    return f"works ({len(passed)})" + (f", {len(rows) - len(passed)} skipped" if len(rows) > len(passed) else "")


def files(versions: Sequence[str], newest: Outcomes) -> Iterator[str]:
    yield "\n## Every file of `tests/slurm`\n"
    lines = []
    for file in sorted({file for _, file, _ in newest}):
        found = [of(newest, version, f"{file}::*") for version in versions]
        lines.append([f"`{file}`", *(file_cell(rows) for rows in found)])
    yield from table(["file", *versions], lines)


def file_cell(rows: Sequence[Row]) -> str:
    return f"{counts(rows)}; {sum(row['seconds'] for row in rows):.0f} s" if rows else "not run"


def failures(tests: Sequence[Row], newest: Outcomes) -> Iterator[str]:
    failed: dict[tuple[str, str, str], list[Row]] = {}
    for row in tests:
        if row["outcome"] == "failed":
            failed.setdefault((row["version"], row["file"], row["test"]), []).append(row)
    if not failed:
        return
    yield "\n## What failed, also if it passed later\n"
    lines = []
    for (version, file, test), rows in failed.items():
        last = newest[version, file, test]
        then = f"passed {last['when'].partition(' ')[2]}" if last["outcome"] == "passed" else "not passed yet"
        words = " ".join(rows[-1]["words"].replace("\\n", " ").replace("|", "/").replace("`", "'").split())[:90]
        lines.append([version, f"`{file}` {test}", str(len(rows)), rows[-1]["when"], f"`{words}`", then])
    yield from table(["version", "test", "failed", "last", "its words", "then"], lines)


def skips(newest: Outcomes) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for (version, _, test), row in sorted(newest.items()):
        if row["outcome"] == "skipped":
            reasons.setdefault((test, row["words"]), []).append(version)
    if reasons:
        yield "\n## What was skipped\n"
        yield from table(
            ["test", "on", "why"], [[test, ", ".join(on), why] for (test, why), on in sorted(reasons.items())]
        )
        yield ""


def requeue_table(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        modes = {mode: [row for row in rows if (row["case"], row["mode"]) == (case, mode)] for mode in MODES}
        lines.append([case, *(spread(found) for found in modes.values())])
    version, when = rows[-1]["version"], rows[-1]["when"]
    yield from table([f"Slurm {version}, {when}", *(f"`{mode}`" for mode in MODES)], lines)


MODES = ("--requeue", "--requeue=expedite")


def spread(rows: Sequence[Row]) -> str:
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    if not seconds:
        return f"no start; {', '.join(sorted({row['state'] for row in rows}))}" if rows else "not run"
    return f"{median(seconds):.1f} s ({min(seconds)} to {max(seconds)}, {len(seconds)} rounds)"
