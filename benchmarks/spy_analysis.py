"""Times the analysis alone: `bsl spy --bundle` and torchfrtrace on the recorded collectives of 384 ranks.

    python benchmarks/spy_analysis.py [--topology tp=4,pp=12,dp=8] [--ring 2000] [--rounds 3] [--output FILE]

Writes a synthetic job in which one rank left out one collective (see spy_synthetic.py) twice: as pickles of torch's
flight recorder, which both tools read, and as a bundle of `bsl spy`, with the same collectives and the stacks. The
tools run in turn, each as a whole command. torchfrtrace gets the table of groups without which it crashes on gloo.
Writes a table in Markdown. Exits with 1 if a goal is missed: at most 2 s of CPU for the bundle (CPU time depends little
on other load), and the right rank named.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spy_synthetic import SyntheticJob

from bigsci_launch.spy.evidence.bundle import write_bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.topology import Topology

GOAL_S = 2.0
TIMEOUT_S = 900
BSL = [sys.executable, "-m", "bigsci_launch", "spy", "--json", "--bundle"]
TORCH = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
CALL_S = 0.02
"""Time between two collectives of a rank, in the timestamps of the entries."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One run of a tool: wall and CPU seconds, and whether it named the culprit and nobody else."""

    seconds: float
    cpu_s: float
    says: str
    is_right: bool


def main() -> None:
    options = parse_arguments()
    topology = Topology.parse(options.topology)
    job = SyntheticJob(topology, culprit=topology.world_size // 2 + 9, ring=options.ring)
    engine_s = min(time_engine(job) for _ in range(options.rounds))
    with tempfile.TemporaryDirectory(prefix="bsl-") as name:
        pickles, bundle = Path(name) / "pickles", Path(name) / "bundle"
        pickles.mkdir()
        for rank in range(topology.world_size):
            (pickles / f"rank_{rank}").write_bytes(pickle.dumps(dump_of(job, rank)))
        write_bundle(bundle, job.bundle(), {}, "")
        tools: dict[str, Sequence[str]] = {
            "torchfrtrace, pickles": [*TORCH, str(pickles), "--prefix", "rank_"],
            "bsl spy, the same pickles": [*BSL, str(pickles), "--topology", str(topology)],
            "bsl spy, a bundle": [*BSL, str(bundle)],
        }
        answers: dict[str, list[Answer]] = {tool: [] for tool in tools}
        for number in range(options.rounds):
            for tool, argv in tools.items():
                answers[tool].append(ask(argv, job))
                last = answers[tool][-1]
                talk(f"round {number + 1}: {tool}: {last.seconds:.2f} s, {last.cpu_s:.2f} s of CPU: {last.says}")
        sizes = {"pickles": size_of(pickles), "bundle": size_of(bundle)}
    text = table(job, answers, sizes, engine_s)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    ours = answers["bsl spy, a bundle"]
    if not all(answer.is_right for answer in ours) or statistics.median(answer.cpu_s for answer in ours) > GOAL_S:
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the analysis of recorded collectives against torchfrtrace.")
    parser.add_argument("--topology", default="tp=4,pp=12,dp=8")
    parser.add_argument("--ring", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def dump_of(job: SyntheticJob, rank: int) -> dict[str, Any]:
    """Return the recorder of `rank` as torch pickles it, with the table of groups that gloo leaves out."""
    recorder = job.recorder(rank)
    groups = {"0": tuple(range(job.topology.world_size)), **job.groups(rank)}
    numbers = dict(recorder["last_sequence"])
    unfinished = {recorder["first_record"] + position for position in recorder["open"]}
    entries: list[dict[str, Any]] = []
    for position in range(len(recorder["stream"]) - 1, -1, -1):
        group, description, operation, sizes, types = recorder["tokens"][recorder["stream"][position]]
        record = recorder["first_record"] + position
        entries.append(
            {
                "record_id": record,
                "pg_id": 0,
                "process_group": (group, description),
                "collective_seq_id": numbers[group],
                "p2p_seq_id": 0,
                "op_id": record,
                "profiling_name": f"gloo:{operation}",
                "time_created_ns": 1_795_228_186 * 10**9 + int(record * CALL_S * 1e9),
                "input_sizes": eval_sizes(sizes),
                "output_sizes": eval_sizes(sizes),
                "input_dtypes": [types.strip("[]'")],
                "output_dtypes": [types.strip("[]'")],
                "state": "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": record not in unfinished,
                "timeout_ms": 1_800_000,
                "is_p2p": False,
                "thread_id": str(rank),
                "thread_name": "python",
                "frames": job.recorded_frames(recorder["stream"][position]),
            }
        )
        numbers[group] -= 1
    return {
        "version": "2.10",
        "rank": rank,
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(list(ranks))}
            for name, ranks in groups.items()
        },
        "pg_status": {},
        "entries": entries[::-1],
    }


def eval_sizes(text: str) -> list[list[int]]:
    """Parse sizes such as `[[2, 64]]` into lists."""
    return [[int(size) for size in re.findall(r"\d+", text)]]


def ask(argv: Sequence[str], job: SyntheticJob) -> Answer:
    """Run a tool once."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    says = first_words(done.stdout + done.stderr)
    return Answer(seconds, cpu_s, says, is_right(says, job.culprit))


def first_words(text: str) -> str:
    """Return the first finding in the output of either tool."""
    claim = re.search(r'"claim": "([^"]*)"', text)
    if claim:
        return claim[1]
    finding = re.search(r"missing ranks: \{[\d, ]+\}|error msg: Culprit rank [^\n]*", text)
    return finding[0] if finding else text.strip().splitlines()[-1][:200] if text.strip() else "nothing"


def is_right(says: str, culprit: int) -> bool:
    """Return whether the finding names the culprit and no other rank before it."""
    found = re.match(rf"rank {culprit}\b|missing ranks: \{{{culprit}\}}", says)
    return found is not None


def time_engine(job: SyntheticJob) -> float:
    """Return the seconds of the engine alone, on evidence in memory, in its first run in this process."""
    pid = os.fork()
    if pid == 0:
        evidence = job.bundle().evidence()
        began = time.monotonic()
        judge(evidence)
        os._exit(min(int((time.monotonic() - began) * 100), 255))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) / 100


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(job: SyntheticJob, answers: Mapping[str, Sequence[Answer]], sizes: Mapping[str, int], engine_s: float) -> str:
    """Return the result in Markdown."""
    lines = ["| | median s | fastest s | CPU s | right | first words |", "|---|---|---|---|---|---|"]
    for tool, found in answers.items():
        seconds = [answer.seconds for answer in found]
        cpu_s = statistics.median(answer.cpu_s for answer in found)
        right = "yes" if all(answer.is_right for answer in found) else "no"
        lines.append(
            f"| {tool} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {cpu_s:.2f} | {right} "
            f"| {found[-1].says[:90]} |"
        )
    return "\n".join(
        [
            f"{job.topology.world_size} ranks ({job.topology}) x {job.ring} recorded collectives on one machine with "
            f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}); pickles {sizes['pickles'] / 1e6:.0f} MB, bundle "
            f"{sizes['bundle'] / 1e6:.1f} MB; rank {job.culprit} left out one collective:",
            "",
            *lines,
            "",
            f"The engine of `bsl spy` alone, on evidence in memory: {engine_s:.2f} s.",
        ]
    )


def talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
