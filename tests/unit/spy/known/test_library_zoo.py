"""Every reproduction of the hang lab is named as the right known hang, or as none if there is no signature for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.known.library import name_hang, read_library

ZOO = Path(__file__).parents[1] / "recordings" / "zoo"
RECORDINGS = sorted(path.stem for path in ZOO.glob("*.json"))
LIBRARY = read_library()

KNOWN = {
    "H07": "groups-in-other-order",
    "H13": "new-group-on-one-rank",
    "H15-file": "one-rank-leaves",
    "H15-signal": "one-rank-leaves",
    "H32": "gil-held-in-c",
    "H33": "gil-held-in-c",
    "H35": "fork-with-lock",
    "H36-lock": "data-loader-worker-lock",
    "H36-stopped": "data-loader-worker-stopped",
    "H38": "pool-worker-killed",
    "H39": "output-pipe-full",
    "H40": "stale-build-lock",
    "H41": "dataset-file-lock",
    "H42": "forgotten-breakpoint",
    "H43": "silent-server",
    "H45": "rendezvous-incomplete",
    "H46": "rendezvous-incomplete",
    "H47-atexit": "collective-after-error",
    "H47-finally": "collective-after-error",
    "H48": "exit-waits-for-thread",
    "H50": "compiler-at-work",
    "H51": "index-built-on-one-rank",
    "H52": "collective-in-destructor",
    "H55": "stopped-process",
    "H55-traced": "left-under-debugger",
    "H61": "unkillable-process",
    "H62": "memory-map-locked",
    "H63": "mapped-dataset-fault",
    "H64": "checkpoint-in-progress",
    "H65": "disk-full",
    "H67": "file-server-lost",
    "H68": "file-server-lost",
    "H70-unseen": "rank-killed",
    "H72-exited": "step-outlives-rank",
    "H76": "stopped-process",
    "H77": "one-rank-leaves",
    "H80": "transport-stalled",
    "H81": "transport-stalled",
    "H100": "one-rank-is-late",
    "H101": "one-rank-is-late",
    "H102": "checkpoint-in-progress",
    "H103": "first-step-compiles",
}
"""The known hang of each reproduction; a class that is not listed has none."""


@pytest.mark.parametrize("recording", RECORDINGS)
def test_the_known_hang_of_a_reproduction(recording: str) -> None:
    match = re.fullmatch(r"(.+)-\d+-ranks-culprit-\d+", recording)
    assert match
    document = json.loads((ZOO / f"{recording}.json").read_text())
    evidence = Bundle(document["collection"], tuple(document["nodes"])).evidence()
    known = name_hang(evidence, judge(evidence), LIBRARY).signature
    assert (known.name if known else None) == KNOWN.get(match[1])
