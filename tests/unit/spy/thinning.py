"""Recorded hangs by name, and the same with less evidence: what was not read is not known, which is not "absent".

`zoo/H10-4-ranks-culprit-0 without recorded collectives without topology` is a recording as the kernel would show it an
hour later, and two kinds of `LESS` taken away. `signatures/NAME` are the recordings of known hangs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.evidence.samples import GONE_STATES

from .conftest import RECORDINGS, an_hour_later

SIGNATURES = Path(__file__).parents[3] / "diagnostics" / "signatures"
Document = dict[str, Any]
Change = Callable[[Document], None]


def without_samples(*keys: str) -> Change:
    def change(document: Document) -> None:
        for node in document["nodes"]:
            for rank in node["ranks"]:
                for sample in rank["samples"]:
                    for key in keys:
                        sample.pop(key, None)

    return change


def without_records(document: Document) -> None:
    document["collection"] = {
        key: value for key, value in document["collection"].items() if key not in ("errors", "tracebacks", "heartbeats")
    }


def without_bsl(document: Document) -> None:
    """A job that `bsl` did not start: no exits are recorded, and it is not known which ranks to expect."""
    without_records(document)
    document["collection"].update(exits=[], expected=[])


def without_topology(document: Document) -> None:
    document["collection"].update(topology=None, world_size=None)


def without_states(document: Document) -> None:
    """The kernel's letter of no process that has stacks. Without these, the letter is all that is known of it."""
    for node in document["nodes"]:
        for rank in node["ranks"]:
            for sample in rank["samples"]:
                if sample.get("state") not in GONE_STATES and ("stack" in sample or "same_stack" in sample):
                    sample["state"] = "?"


def without_second_look(document: Document) -> None:
    """Only the first look. How long threads have slept is a part of every look."""
    for node in document["nodes"]:
        for rank in node["ranks"]:
            *_, last = rank["samples"] or [{}]
            rank["samples"] = rank["samples"][:1]
            for sample in rank["samples"]:
                sample.update({key: last[key] for key in ("thread_idle_s",) if key in last})


def only_recorders(document: Document) -> None:
    """Dumps of flight recorders alone, as files that torch left behind."""
    for node in document["nodes"]:
        for rank in node["ranks"]:
            held = [sample["recorder"] for sample in rank["samples"] if "recorder" in sample]
            rank["samples"] = [{"mono": 0.0, "state": "?", "recorder": recorder} for recorder in held[-1:]]


LESS: dict[str, Change] = {
    "recorded collectives": without_samples("recorder"),
    "sockets": without_samples("sockets", "connections"),
    "calls and threads": without_samples("system_call", "thread_waits", "thread_times"),
    "records of the run": without_records,
    "a run of bsl": without_bsl,
    "topology": without_topology,
    "kernel functions": without_samples("wchan", "thread_waits"),
    "CPU time": without_samples("cpu_ticks", "voluntary", "involuntary", "thread_times", "run_delay_ns"),
    "states": without_states,
    "sleeping times": without_samples("thread_idle_s"),
    "a second look": without_second_look,
    "anything but recorders": only_recorders,
    "stacks": without_samples("stack", "same_stack"),
}
"""What may be missing, by name."""


def all_names() -> list[str]:
    """Return the names of all recordings of jobs."""
    found = [str(path.relative_to(RECORDINGS).with_suffix("")) for path in sorted(RECORDINGS.rglob("*.json"))]
    jobs = [name for name in found if not name.startswith("frameworks/")]
    return jobs + [f"signatures/{path.parent.name}" for path in sorted(SIGNATURES.glob("*/recording"))]


@lru_cache(maxsize=4)
def _text(name: str, later: bool) -> str:
    """The recording as text of {collection, nodes}."""
    if name.startswith("signatures/"):
        folder = SIGNATURES / name.partition("/")[2] / "recording"
        nodes = [json.loads(path.read_text()) for path in sorted((folder / "nodes").glob("*.json"))]
        document = {"collection": json.loads((folder / "collection.json").read_text()), "nodes": nodes}
    else:
        document = json.loads((RECORDINGS / f"{name}.json").read_text())
        if "nodes" not in document:
            document = {"collection": {"topology": None}, "nodes": [document]}
    return json.dumps(an_hour_later(document) if later else document)


def document_of(name: str, later: bool = True) -> Document:
    """Return the documents of a recording, without what its name says; `later` is whether an hour has passed.

    Raises:
        KeyError: no kind of evidence has that name.
        OSError: there is no such recording.
    """
    recording, *missing = name.split(" without ")
    document: Document = json.loads(_text(recording, later))
    for kind in missing:
        LESS[kind](document)
    return document


def evidence_of(name: str) -> Evidence:
    """Return the evidence of a recording, without what its name says."""
    document = document_of(name)
    return Bundle(document["collection"], tuple(document["nodes"])).evidence()
