"""What the engine says of the hang lab's recordings: state, ranks, exact class and first look, each by itself.

    python benchmarks/hang_recordings.py

The recordings (tests/unit/spy/recordings/zoo) are of hangs that had just begun, at which nobody may be accused yet.
They are judged as they are, and as the kernel would show them an hour later: whoever did not run between the looks
sleeps on.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from hang_page import figures  # noqa: E402

from bigsci_launch.hang_lab.judgement import judge, read_verdict  # noqa: E402
from bigsci_launch.hang_lab.zoo import find_reproduction  # noqa: E402
from bigsci_launch.spy.evidence.bundle import Bundle  # noqa: E402
from bigsci_launch.spy.judge.facts import deciding_thread_ran  # noqa: E402
from bigsci_launch.spy.judge.verdict import judge as judge_evidence  # noqa: E402
from bigsci_launch.spy.show.document import to_document  # noqa: E402

ZOO = HERE.parent / "tests" / "unit" / "spy" / "recordings" / "zoo"
NAME = re.compile(r"(.+)-(\d+)-ranks-culprit-(\d+)")
Row = dict[str, Any]


def row_of(path: Path, later_s: float) -> Row:
    """Return the verdict on a recording, of which every rank that stood still has slept for `later_s` more."""
    match = NAME.fullmatch(path.stem)
    assert match
    reproduction, culprit = find_reproduction(match[1]), int(match[3])
    topology = reproduction.topology(int(match[2]))
    document = json.loads(path.read_text())
    bundle = Bundle(document["collection"], tuple(document["nodes"]))
    if later_s:
        let_time_pass(bundle, later_s)
    evidence = bundle.evidence()
    answer = to_document(evidence, judge_evidence(evidence))
    verdict = read_verdict(answer)
    said = {**answer["verdict"], "suspects": sorted(verdict.suspects), "look_first": list(verdict.look_first)}
    judgement = judge(verdict, reproduction, culprit, topology)
    names = {"name": reproduction.name, "topology": str(topology), "culprit": culprit}
    return {**names, "verdict": said, "judgement": judgement.value}


def let_time_pass(bundle: Bundle, seconds: float) -> None:
    still = {(seen.node, seen.pid): seen for seen in bundle.evidence().ranks if deciding_thread_ran(seen) is False}
    for node in bundle.nodes:
        for rank in node["ranks"]:
            seen = still.get((node["node"], rank["pid"]))
            if seen is not None:
                rank["samples"][-1]["thread_idle_s"] = {str(seen.thread.tid if seen.thread else seen.pid): seconds}


def main() -> None:
    print("| | as recorded | an hour later |\n|---|---:|---:|")
    series = [[row_of(path, later_s) for path in sorted(ZOO.glob("*.json"))] for later_s in (0.0, 3600.0)]
    for name in figures(series[0]):
        shares = [figures(rows)[name] for rows in series]
        print(f"| {name} right | {' | '.join(f'{sum(found)} of {len(found)}' for found in shares)} |")
    counts = [Counter(row["judgement"] for row in rows) for rows in series]
    for judgement in dict.fromkeys(name for count in counts for name in count):
        print(f"| {judgement} | {' | '.join(str(count[judgement]) for count in counts)} |")


if __name__ == "__main__":
    main()
