"""Makes regression recordings from the evidence that `hang_confusion.py --bundles` has kept.

    python benchmarks/keep_recordings.py BUNDLES tests/unit/spy/recordings/lab

It writes one small file per reproduction and number of ranks, and varies the culprit's place so that all places occur.
It removes the names of machines, users and folders, and everything that no rule reads. A recording whose verdict
changes by that is not written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document

Document = dict[str, Any]
RANK_KEYS = ("rank", "pid", "world_size", "step")
SAMPLE_KEYS = (
    "mono", "state", "wchan", "cpu_ticks", "voluntary", "involuntary", "tracer_pid", "kill_pending", "core_dumping",
    "run_delay_ns", "major_faults", "io", "file_bytes", "socket_bytes", "child_ticks", "child_idle_s", "same_stack",
    "why", "unread",
)  # fmt: skip
RECORD_KEYS = (
    "rank", "pid", "code", "signal", "time", "terminated", "clean_end", "type", "message", "place", "source", "phase",
    "step", "first_step",
)  # fmt: skip
PATHS = (
    (re.compile(r"[\w./-]*/(site|dist)-packages/"), "/venv/"),
    (re.compile(r"[\w./-]*/lib/python3\.\d+/"), "/python/lib/"),
    (re.compile(r"[\w./-]*/lab/"), "/lab/"),
    (re.compile(r"/tmp/bsl-lab-\w+"), "/runs"),
)
NODE = "n0"
RING = 400
BUNDLE_NAME = re.compile(r"(\d+)-ranks-culprit-(\d+)-(prepared|unprepared)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes regression recordings from kept evidence.")
    parser.add_argument("bundles", type=Path)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--classes", default=".*", help="regular expression for the reproductions to take")
    parser.add_argument("--unprepared", action="store_true", help="take the runs without recorded collectives")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    options.recordings.mkdir(parents=True, exist_ok=True)
    preparation = "unprepared" if options.unprepared else "prepared"
    for name, num_ranks, culprit, folder in choose(options.bundles, re.compile(options.classes), preparation):
        path = options.recordings / f"{name}-{num_ranks}-ranks-culprit-{culprit}.json"
        bundle = read_bundle(folder)
        document = trim(bundle)
        before, after = verdict_of(bundle), verdict_of(Bundle(document["collection"], tuple(document["nodes"])))
        if before != after:
            print(f"{path.name}: not written, its verdict changed from {before} to {after}")
            continue
        for old in options.recordings.glob(f"{name}-{num_ranks}-ranks-culprit-*.json"):
            old.unlink()
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
        print(f"{path.name}: {path.stat().st_size / 1024:.1f} KiB")


def choose(bundles: Path, wanted: re.Pattern[str], preparation: str) -> Iterator[tuple[str, int, int, Path]]:
    """Yield (reproduction, ranks, culprit, folder), one per reproduction and number of ranks, with varying places."""
    for index, folder in enumerate(sorted(each for each in bundles.iterdir() if wanted.fullmatch(each.name))):
        kept: dict[int, list[tuple[int, Path]]] = {}
        for each in folder.iterdir():
            if (match := BUNDLE_NAME.fullmatch(each.name)) and match[3] == preparation:
                kept.setdefault(int(match[1]), []).append((int(match[2]), each))
        for num_ranks, found in sorted(kept.items()):
            culprit, path = sorted(found)[index % len(found)]
            yield folder.name, num_ranks, culprit, path


def verdict_of(bundle: Bundle) -> tuple[str, str | None, list[int]]:
    evidence = bundle.evidence()
    verdict = to_document(evidence, judge(evidence))["verdict"]
    return verdict["state"], verdict["class"], [suspect["rank"] for suspect in verdict["suspects"]]


def trim(bundle: Bundle) -> Document:
    """Return the documents of `bundle`, which has one node, without names and without what no rule reads."""
    collection = {key: bundle.collection.get(key) for key in ("topology", "world_size", "nodes_silent")}
    records = {
        key: [pick(record, RECORD_KEYS) for record in bundle.collection.get(key) or []]
        for key in ("expected", "exits", "errors", "tracebacks", "heartbeats")
    }
    nodes = [
        {
            "node": NODE,
            "clock_ticks_per_s": node.get("clock_ticks_per_s"),
            "problems": node.get("problems") or [],
            "locks": node.get("locks") or [],
            "ranks": [trim_rank(rank) for rank in node["ranks"]],
        }
        for node in bundle.nodes
    ]
    text = json.dumps({"collection": {"schema_version": 1, **collection, **records}, "nodes": nodes})
    for pattern, replacement in PATHS:
        text = pattern.sub(replacement, text)
    found: Document = json.loads(text)
    return found


def pick(document: Mapping[str, Any], keys: tuple[str, ...]) -> Document:
    return {key: document[key] for key in keys if document.get(key) is not None}


def trim_rank(rank: Mapping[str, Any]) -> Document:
    threads = {
        str(thread["tid"])
        for sample in rank["samples"]
        for thread in (sample.get("stack") or {}).get("threads", [])
    } | {str(rank.get("pid"))}  # fmt: skip
    samples = [trim_sample(sample, threads) for sample in rank["samples"]]
    if all(sample.get("recorder", {}).get("last_sequence") == {} for sample in samples):
        for sample in samples:
            sample.pop("recorder", None)
    return {**pick(rank, RANK_KEYS), "samples": samples}


def trim_sample(sample: Mapping[str, Any], threads: set[str]) -> Document:
    """Return `sample` with the times and waits of only the threads that have Python frames."""
    found = pick(sample, SAMPLE_KEYS)
    if "children" in sample:
        found["children"] = [trim_child(child) for child in sample["children"]]
    if call := sample.get("system_call"):
        found["system_call"] = pick(call, ("number", "name", "fd", "target", "socket", "other_ends"))
    for key in ("thread_times", "thread_idle_s"):
        if key in sample:
            found[key] = {tid: time for tid, time in sample[key].items() if tid in threads}
    waits = {
        wait: [tid for tid in tids if str(tid) in threads] for wait, tids in (sample.get("thread_waits") or {}).items()
    }
    if "thread_waits" in sample:
        found["thread_waits"] = {wait: tids for wait, tids in waits.items() if tids}
    if sample.get("stack"):
        found["stack"] = {"threads": [trim_thread(thread) for thread in sample["stack"]["threads"]]}
    sockets = [socket for socket in (sample.get("sockets") or {}).get("list", []) if tells(socket)]
    if sockets:
        found["sockets"] = {"list": [{key: socket[key] for key in socket if key != "fd"} for socket in sockets]}
    if (sample.get("memory_events") or {}).get("oom_kill"):
        found["memory_events"] = {"cgroup": "/job_7/step_0", "oom_kill": sample["memory_events"]["oom_kill"]}
    if "recorder" in sample:
        found["recorder"] = trim_recorder(sample["recorder"])
    return found


def trim_recorder(recorder: Mapping[str, Any]) -> Document:
    """Return `recorder` as a ring of `RING` entries would hold it."""
    cut = max(0, len(recorder.get("stream", [])) - RING)
    if not cut:
        return dict(recorder)
    return {
        **recorder,
        "first_record": recorder["first_record"] + cut,
        "stream": recorder["stream"][cut:],
        "open": [position - cut for position in recorder["open"] if position >= cut],
    }


def trim_child(child: Mapping[str, Any]) -> Document:
    found = pick(child, ("pid", "comm", "state", "wchan", "cpu_ticks"))
    if child.get("stack"):
        found["stack"] = {"threads": [trim_thread(thread) for thread in child["stack"]["threads"]]}
    return found


def trim_thread(thread: Mapping[str, Any]) -> Document:
    """Return `thread` with its frames up to the program's `main`; the frames that start a program are no evidence."""
    frames = []
    for frame in thread["frames"]:
        frames.append(frame)
        if frame["function"] == "main" and frame["file"].endswith("/step_loop.py"):
            break
    return {**pick(thread, ("tid", "name", "active", "owns_gil")), "frames": frames}


def tells(socket: Mapping[str, Any]) -> bool:
    """Return whether a socket is evidence of more than a rank talking to itself."""
    is_quiet = socket["state"] == "ESTABLISHED" and not (socket.get("tx") or socket.get("rx"))
    return not (is_quiet and socket["local"].startswith("127."))


if __name__ == "__main__":
    main()
