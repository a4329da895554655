"""Reports why an attempt ended, from what its ranks left behind. Stand-alone, standard library only.

    python -I -S exit_reason.py --attempt-dir DIR --world-size 8 --started 1795226527 --exit-code 137

Writes `exit.json` to DIR, prints the reason on stderr and the exit code of the training on stdout. That is the code of
the first rank that failed; srun's own is the highest of all ranks, including those that it killed itself. Without
`--exit-code` the attempt has not ended yet: the record is provisional, in case the batch script is killed before.

The operator needs the first failure, which 383 later messages bury: when a rank dies, the others fail with "connection
closed", and the launcher ends the rest with TERM. So ranks that were told to end do not count as failures, broken
connections count only if there is no other error, and the earliest of the remaining failures is the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
AXES = ("dp", "pp", "ep", "cp", "tp")
"""The order of the axes in a coordinate, as in bigsci_launch/topology."""
LOG_TAIL_BYTES = 8192
EVENT_TAIL_BYTES = 8192
STAMP = re.compile(rb"^\d{4}-\d\d-\d\dT[0-9:.]+Z ")
# What gloo, NCCL and plain sockets say when the rank at the other end is gone.
CASCADE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken ?pipe|closed by (peer|remote)|remote (process|peer|error)"
    r"|ConnectionResetError|caused pair closure|socket closed|no route to host|DistNetworkError|failed to recv, got 0",
    re.IGNORECASE,
)
LOST_NODE = "none of the {} ranks on {} left an exit record: the node was lost, or they were all killed at once"

Record = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    ranks = read_ranks(options.attempt_dir)
    document = describe(options, ranks)
    write_record(options.attempt_dir / "exit.json", document)
    print(summary(document), file=sys.stderr, flush=True)
    if document["exit_code"] is not None:
        print(document["exit_code"], flush=True)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Say why an attempt ended.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--started", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--exit-code", type=int, help="of srun or the launcher; if left out, not known yet")
    parser.add_argument("--job-id")
    parser.add_argument("--restart-count", type=int, default=0)
    parser.add_argument("--terminated", type=float, help="when the script itself got TERM, seconds since the epoch")
    parser.add_argument("--stop-requested", action="store_true", help="ranks were told to save and stop")
    parser.add_argument("--slurm-reason", default="", help="squeue's reason when TERM came")
    parser.add_argument("--lost-nodes", default="", help="nodes that were down when TERM came, separated by blanks")
    parser.add_argument("--slurm-restarts", type=int, default=0, help="squeue's restart count when TERM came")
    return parser.parse_args(arguments)


def read_ranks(attempt: Path) -> dict[int, Record]:
    """Return what each rank left: its `pid`, `exit` and `error` records (empty if missing) and its last event."""
    names = {path.stem for folder in ("pids", "exits", "errors") for path in (attempt / folder).glob("rank-*.json")}
    return {int(name.partition("-")[2]): read_rank(attempt, name) for name in sorted(names)}


def read_rank(attempt: Path, name: str) -> Record:
    return {
        "pid": read_json(attempt / "pids" / f"{name}.json"),
        "exit": read_json(attempt / "exits" / f"{name}.json"),
        "error": read_json(attempt / "errors" / f"{name}.json"),
        "event": last_event(attempt / "events" / f"{name}.jsonl"),
        "said": last_line(attempt / "logs" / f"{name}.log"),
    }


def describe(options: argparse.Namespace, ranks: dict[int, Record]) -> Record:
    """Return the contents of `exit.json`."""
    lost, killed = find_silent(ranks) if options.exit_code else ([], [])
    lost = find_lost(ranks, options.lost_nodes.split()) or lost
    failures = find_failures(ranks) + killed
    failures.sort(key=lambda failure: (failure["is_cascade"], failure["time"] or 0.0))
    reason = decide_reason(options, ranks, failures, lost)
    first = first_failure(reason, failures, lost)
    return {
        "schema_version": SCHEMA_VERSION,
        "reason": reason,
        "exit_code": exit_code_of(first) if options.exit_code and first else options.exit_code,
        "first_failure": first,
        "failed_ranks": sorted(failure["rank"] for failure in failures),
        "world_size": options.world_size,
        "num_started": sum(1 for rank in ranks.values() if rank["pid"]),
        "slurm_reason": options.slurm_reason if options.slurm_reason not in ("", "None") else None,
        "attempt": options.attempt_dir.name,
        "job_id": options.job_id,
        "restart_count": options.restart_count,
        "started": options.started,
        "ended": time.time(),
    }


def decide_reason(
    options: argparse.Namespace, ranks: dict[int, Record], failures: list[Record], lost: list[Record]
) -> str:
    if lost or options.slurm_reason == "NodeDown":
        return "node_failure"
    has_own_failure = any(not failure["is_cascade"] for failure in failures)
    if has_own_failure and options.exit_code != 0:
        return "crashed"
    if options.terminated is not None:
        return reason_of_termination(options)
    if options.exit_code == 0:
        return "stopped" if was_stopped(options, ranks) else "finished"
    return "crashed" if ranks else "launch_failed"


def reason_of_termination(options: argparse.Namespace) -> str:
    """Return why the whole job got TERM."""
    if options.slurm_reason == "TimeLimit":
        return "time_limit"
    if options.slurm_restarts > options.restart_count:
        return "requeued"
    return "cancelled"


def was_stopped(options: argparse.Namespace, ranks: dict[int, Record]) -> bool:
    """Whether training ended before its last step because it was told to. Without events: whether it was told to."""
    ends = {rank["event"].get("reason") for rank in ranks.values() if rank["event"].get("kind") == "end"}
    return bool(ends - {"finished"}) if ends else bool(options.stop_requested)


def find_failures(ranks: dict[int, Record]) -> list[Record]:
    """Return every failed rank, whether it failed on its own or because of others."""
    return [failure for number, rank in ranks.items() if (failure := failure_of(number, rank)) is not None]


def failure_of(number: int, rank: Record) -> Record | None:
    """Return how a rank failed; None if it ended well, still runs, or was told to end before anything went wrong."""
    end, error = rank["exit"], rank["error"]
    if not end and not error:
        return None
    ended_well = bool(end) and (end.get("code") == 0 or end.get("clean_end"))
    failed_at = (error or end).get("time")
    terminated = end.get("terminated")
    if ended_well or (terminated is not None and (failed_at is None or failed_at >= terminated)):
        return None
    words = f"{error.get('type')}: {error.get('message')}" if error else end.get("error") or rank["said"]
    was_killed = end.get("signal") is not None
    return {
        **identity(number, rank),
        "signal": end.get("signal"),
        "code": end.get("code"),
        "step": error.get("step"),
        "error": None if was_killed and not error else words or None,
        "time": failed_at,
        # A rank that TERM ended was told to end, even if its runner did not see it: TERM may reach the program first.
        "is_cascade": end.get("signal") == "SIGTERM"
        or (not was_killed and bool(error.get("lost_peer") or CASCADE.search(words or ""))),
    }


def find_lost(ranks: dict[int, Record], nodes: list[str]) -> list[Record]:
    """Return one failure for each node that Slurm lost."""
    members = {node: [(n, rank) for n, rank in ranks.items() if identity(n, rank)["node"] == node] for node in nodes}
    return [silent_failure(found, f"Slurm lost the node {node}") for node, found in members.items() if found]


def find_silent(ranks: dict[int, Record]) -> tuple[list[Record], list[Record]]:
    """Return failures of ranks that started but left no exit record: one per node without any, and one per other rank.

    A runner writes a record even if it is told to end; only a runner that is killed, or dies with its node, does not.
    If no rank at all left a record, everything was killed at once, and no rank was the first.
    """
    nodes: dict[str, list[tuple[int, Record]]] = {}
    for number, rank in ranks.items():
        nodes.setdefault(identity(number, rank)["node"] or "?", []).append((number, rank))
    silent = {node: [(n, rank) for n, rank in members if not rank["exit"]] for node, members in nodes.items()}
    whole = {node for node, members in nodes.items() if len(silent[node]) == len(members)}
    if len(whole) == len(nodes):
        return [], []
    lost = [silent_failure(silent[node], LOST_NODE.format(len(nodes[node]), node)) for node in nodes if node in whole]
    killed = [
        silent_failure([member], "left no exit record: its runner was killed")
        for node, members in silent.items()
        if node not in whole
        for member in members
    ]
    return lost, killed


def silent_failure(members: list[tuple[int, Record]], why: str) -> Record:
    number, rank = members[0]
    last_seen = max((member["event"].get("time", 0.0) for _, member in members), default=0.0)
    return {
        **identity(number, rank),
        "signal": None,
        "code": None,
        "step": rank["event"].get("step"),
        "error": why,
        "time": last_seen or None,
        "is_cascade": False,
    }


def first_failure(reason: str, failures: list[Record], lost: list[Record]) -> Record | None:
    found = [*lost, *failures] if reason == "node_failure" else failures
    if reason not in ("crashed", "node_failure") or not found:
        return None
    return {key: value for key, value in found[0].items() if key != "is_cascade"}


def exit_code_of(failure: Record) -> int:
    """Return the exit code of the rank that failed first: 128 + signal if a signal ended it, 1 if it was lost."""
    if failure["signal"] is not None:
        return 128 + getattr(signal, failure["signal"], 0)
    return int(failure["code"] or 1)


def identity(number: int, rank: Record) -> Record:
    """Return rank, node and coordinate, from whichever record has them."""
    known = rank["pid"] or rank["exit"] or rank["error"]
    return {"rank": number, "node": known.get("node"), "coordinate": known.get("coordinate")}


def summary(document: Record) -> str:
    """Return one line for the job's output."""
    code = document["exit_code"]
    text = f"bsl: attempt {document['attempt']} ended: {document['reason']}"
    text += f" (exit code {code})" if code is not None else " (provisional: it has not ended yet)"
    failure = document["first_failure"]
    return text if failure is None else f"{text}; first failure: {failure_text(failure)}"


def failure_text(failure: Record) -> str:
    where = failure["coordinate"] or {}
    coordinate = f" ({' '.join(f'{axis}{where[axis]}' for axis in AXES if axis in where)})" if where else ""
    how = failure["error"] or failure["signal"] or f"exit code {failure['code']}"
    return f"rank {failure['rank']}{coordinate} on {failure['node']}: {how}"


def read_json(path: Path) -> Record:
    """Return the record in `path`; an empty one if it is missing or torn."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def last_event(path: Path) -> Record:
    """Return the last complete record of an event file; an empty one if there is none."""
    for line in reversed(tail(path, EVENT_TAIL_BYTES)):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    return {}


def last_line(path: Path) -> str:
    """Return the last line that is not empty, without its time."""
    lines = (STAMP.sub(b"", line).strip() for line in reversed(tail(path, LOG_TAIL_BYTES)))
    return next((line.decode(errors="replace")[:500] for line in lines if line), "")


def tail(path: Path, size: int) -> list[bytes]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            return stream.read().splitlines()
    except OSError:
        return []


def write_record(path: Path, record: Record) -> None:
    """Write `record` next to `path` and rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
