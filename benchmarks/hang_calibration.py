"""How often verdicts of each strength were right, and how often each reason to look at a rank pointed at the right one.

    python benchmarks/hang_calibration.py BUNDLES...

BUNDLES are folders that `benchmarks/foreign_hangs.py --bundles` has kept; the recordings of the hang lab are added. The
figures are printed as two tables. Those of `Strength` and `Reason` in `spy/judge/conclusion.py` are copied from them,
where there are enough cases.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from foreign.scoring import FAILURES  # noqa: E402
from foreign.table import all_cases  # noqa: E402

from bigsci_launch.errors import BslError  # noqa: E402
from bigsci_launch.hang_lab.zoo import find_reproduction  # noqa: E402
from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle  # noqa: E402
from bigsci_launch.spy.evidence.ranks import Evidence  # noqa: E402
from bigsci_launch.spy.judge.verdict import judge  # noqa: E402

ZOO = HERE.parent / "tests" / "unit" / "spy" / "recordings" / "zoo"
NAME = re.compile(r"(.+)-(\d+)-ranks-culprit-(\d+)")


@dataclass(frozen=True, slots=True)
class Example:
    """Evidence with the truth: whether the job hangs or has crashed, the guilty ranks, the states that are right."""

    evidence: Evidence
    guilty: frozenset[int]
    states: frozenset[str]


def lab_examples() -> Iterator[Example]:
    for path in sorted(ZOO.glob("*.json")):
        match = NAME.fullmatch(path.stem)
        assert match
        reproduction, count, culprit = find_reproduction(match[1]), int(match[2]), int(match[3])
        document = json.loads(path.read_text())
        evidence = Bundle(document["collection"], tuple(document["nodes"])).evidence()
        guilty = reproduction.suspects(culprit, reproduction.topology(count)) if reproduction.is_hang else frozenset()
        yield Example(evidence, guilty, frozenset(state.value for state in reproduction.states))


def foreign_examples(folders: list[Path]) -> Iterator[Example]:
    cases = {case.name: case for case in all_cases()}
    for folder in folders:
        for facts in sorted(folder.glob("*/ask-*/truth.json")):
            case, phase = cases[facts.parent.parent.name], json.loads(facts.read_text())["phase"]
            if phase != "reached":
                continue
            try:
                evidence = read_bundle(facts.parent).evidence()
            except BslError:
                continue
            guilty = frozenset(case.culprits or case.involved) if case.state in FAILURES else frozenset()
            yield Example(evidence, guilty, frozenset((case.state, *case.also)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="*", type=Path)
    folders = parser.parse_args().bundles
    by_strength: dict[str, list[bool]] = defaultdict(list)
    by_reason: dict[str, list[bool]] = defaultdict(list)
    for example in (*lab_examples(), *foreign_examples(folders)):
        conclusion = judge(example.evidence)
        said = {suspect.rank for suspect in conclusion.suspects}
        if conclusion.state.value not in ("unknown", "waiting"):
            is_right = conclusion.state.value in example.states and said <= (example.guilty or said)
            by_strength[conclusion.strength.name].append(is_right)
        if example.guilty and conclusion.look_first:
            first = conclusion.look_first[0]
            by_reason[first.reason.name].append(first.rank in example.guilty)
    for title, table in (("strength", by_strength), ("reason", by_reason)):
        print(f"{title:16} {'right':>6} {'of':>6}  share")
        for name, found in sorted(table.items()):
            print(f"{name:16} {sum(found):6} {len(found):6}  {sum(found) / len(found):.2f}")


if __name__ == "__main__":
    main()
