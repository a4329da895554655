"""Remembers the nodes that an attempt has shown to be bad. Stand-alone, together with bad_words.py,
exit_*.py and safe_files.py: standard library only, Python 3.8 or newer.

    python -I -S bad_nodes.py --attempt-dir DIR --job-id 1234

Runs after exit_reason.py. It adds to `nodes.json` in the folder of runs: a rank's node if the rank failed and printed
that its GPU is broken; a node that Slurm lost; a node that failed the check before the ranks; a node that a watcher
accuses of the hang that it ended. A collective that timed out, a lost connection and a signal blame nobody. Whether a
silent node was lost is for Slurm to say: if it does not, the question stays open, and `bsl status` or `bsl submit` asks
again. `bad_nodes.json` in DIR has what was found, so that a node that somebody forgives is not remembered a second time
for the same attempt.

With `--job-id`, the nodes are also left out of the jobs of this run that wait: of those in the queue, and of this one,
if Slurm restarts it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import getpass
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if "__file__" in globals():
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # -I leaves it out
sys.dont_write_bytecode = True  # nothing is left in the attempt's tools

import safe_files
from bad_words import find_broken, may_be_broken
from exit_failures import failure_of, find_silent
from exit_outside import read_ended_by
from exit_records import LOG_TAIL_BYTES, is_after, node_of, plain, read_json, read_output, read_ranks, stamp_of, tail

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from exit_records import Ranks

    Record = dict[str, Any]

SCHEMA_VERSION = 1
DAY_S = 86400
# As in bigsci_launch/nodes/memory.py. None: until somebody forgives the node.
LASTS_S = {
    "ecc": 7 * DAY_S,
    "gpu": 7 * DAY_S,
    "lost": DAY_S,
    "failed_check": DAY_S,
    "slow": DAY_S,
    "hang": DAY_S,
    "by_hand": None,
}
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
SIGNS = (("exit", "time"), ("exit", "terminated"), ("event", "time"), ("pid", "started"))
SLURM_TIMEOUT_S = 5
SETTLED_S = 900
"""If Slurm still calls a silent node healthy this long after the end, it was not lost: sites give up after 300 s."""
EVIDENCE_LENGTH = 300
LOCK_TIMEOUT_S = 10.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""What file systems without locks answer. The rename still keeps the file whole."""


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    attempt = options.attempt_dir.absolute()
    memory = attempt.parent.parent.parent / "nodes.json"
    before = read_json(attempt / "bad_nodes.json")
    try:
        found, questions = examine(attempt, options.lost_nodes.split())
        known = {(each["node"], each["reason"]) for each in before.get("found", [])}
        entries = [entry_of(each, attempt, options.cluster) for each in found if NODE_NAME.fullmatch(str(each["node"]))]
        new = [entry for entry in entries if (entry["node"], entry["reason"]) not in known and is_in_force(entry)]
        if new:
            remember(memory, new)
        for entry in new:
            say(f"bsl: {entry['node']} is left out of later attempts{until(entry)}: {entry['evidence']}")
        for question in questions:
            say(f"bsl: {question['node']}: not remembered as bad, since it is not known: {question['evidence']}")
        if options.job_id:
            leave_out_of_jobs(options, memory, new)
        all_found = [*before.get("found", []), *new]
        write_json(attempt / "bad_nodes.json", describe(options, attempt, all_found, questions))
    except (OSError, ValueError, Unreadable) as error:
        say(f"bad_nodes: {error}")
        return 1
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Remember the nodes that an attempt has shown to be bad.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--cluster", default=os.environ.get("SLURM_CLUSTER_NAME") or None)
    parser.add_argument("--job-id", help="leave the nodes out of this job if it is restarted, and of those that wait")
    parser.add_argument("--lost-nodes", default="", help="nodes that Slurm says are down, separated by blanks")
    parser.add_argument("--ended", action="store_true", help="the attempt is known to be over, whatever exit.json says")
    parser.add_argument("--restart-count", type=int, default=0)
    parser.add_argument("--slurm-restarts", type=int, default=0, help="squeue's restart count when TERM came")
    return parser.parse_known_args(arguments)[0]  # the script passes all it knows


class Unreadable(Exception):
    """The memory cannot be read, so that nothing may be added to it."""


# ------------------------------------------------------------------------------------------- what the attempt shows


def examine(attempt: Path, down: list[str]) -> tuple[list[Record], list[Record]]:
    """Return the nodes that are bad, each with reason, evidence and rank, and those about which Slurm must say more."""
    output = read_output(attempt)
    ranks = read_ranks(attempt, output.unwritten)
    ended = read_json(attempt / "exit.json")
    found = [*broken_gpus(attempt, ranks), *failed_checks(attempt)]
    said = {node: f"Slurm says that {node} is down" for node in down}
    said.update({node: f"srun: error: Node failure on {node}" for node in output.lost_nodes})
    first = ended.get("first_failure") or {}
    if ended.get("reason") == "node_failure" and str(first.get("error", "")).startswith("Slurm lost the node"):
        said.setdefault(first["node"], first["error"])
    found += [finding(node, "lost", text, rank_on(ranks, node)) for node, text in sorted(said.items())]
    by = read_ended_by(attempt)
    if by is not None and by.is_hang and ended.get("reason") == "hang":
        found += [finding(node, "hang", by.why, rank_on(ranks, node)) for node in by.nodes]
    questions = []
    for silent in find_silent(ranks).lost if by is None else ():  # ranks that somebody killed leave no record either
        if silent["node"] not in said:
            state = slurm_says(silent["node"])
            if state is not None and is_lost(state):
                found.append(finding(silent["node"], "lost", f"{silent['error']}; Slurm: {state}", silent["rank"]))
            elif state is None or time.time() - end_of(attempt, ranks) < SETTLED_S:
                questions.append(finding(silent["node"], "lost", str(silent["error"]), silent["rank"]))
    return found, questions


def end_of(attempt: Path, ranks: Ranks) -> float:
    """Return when the attempt ended: as recorded, else by the last sign of its ranks; now, if nothing says it."""
    ended = read_json(attempt / "exit.json").get("ended")
    signs = [rank[kind][name] for rank in ranks.values() for kind, name in SIGNS if rank[kind].get(name)]
    return float(ended or max(signs, default=time.time()))


def finding(node: str, reason: str, evidence: str, rank: int | None) -> Record:
    return {"node": node, "reason": reason, "evidence": evidence[:EVIDENCE_LENGTH], "rank": rank}


def rank_on(ranks: Ranks, node: str) -> int | None:
    """Return the first rank on a node; None if none started there."""
    return min((number for number, rank in ranks.items() if node_of(rank) == node), default=None)


def broken_gpus(attempt: Path, ranks: Ranks) -> Iterator[Record]:
    """Yield one finding for each node where a rank failed and said before that its GPU is broken."""
    seen: set[tuple[str, str]] = set()
    for number, rank in sorted(ranks.items()):
        node = node_of(rank)
        if node is None or failure_of(number, rank) is None:
            continue
        for text in own_lines(attempt / "logs" / f"rank-{number:04d}.log", rank["exit"].get("terminated")):
            broken = find_broken(text)
            if broken is not None and (node, broken.reason) not in seen:
                seen.add((node, broken.reason))
                meaning = f" ({broken.meaning})" if broken.meaning else ""
                yield finding(node, broken.reason, f"{text[: EVIDENCE_LENGTH - len(meaning)]}{meaning}", number)


def own_lines(log: Path, terminated: float | None) -> Iterator[str]:
    """Yield the last lines of a rank that may speak of its GPU, up to the moment when it was told to end."""
    for line in tail(log, LOG_TAIL_BYTES):
        if may_be_broken(line) and not is_after(stamp_of(line), terminated):
            yield plain(line)


def failed_checks(attempt: Path) -> Iterator[Record]:
    """Yield the nodes that failed the check before the ranks."""
    for node in read_json(attempt / "check" / "result.json").get("nodes", []):
        if node.get("verdict") == "failed":
            yield finding(node["node"], "failed_check", f"node check: {node['why']}", None)


def slurm_says(node: str) -> str | None:
    """Return the state of a node in Slurm's words, such as `down* (Not responding)`; None if it does not answer."""
    answer = ask("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T (%E)")
    return answer.splitlines()[0] if answer else None


def is_lost(state: str) -> bool:
    """Whether Slurm says that a node is down, or does not answer (`*`)."""
    word = state.split(" ")[0].lower()
    return word.endswith("*") or word.rstrip("*~#!%$@^-") in ("down", "fail", "failing", "error")


def ask(*argv: str) -> str | None:
    """Return what a command of Slurm prints; None if it fails, is missing, or does not answer."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# ------------------------------------------------------------------------------------------- the memory


def entry_of(found: Record, attempt: Path, cluster: str | None) -> Record:
    since, lasts_s = end_of(attempt, read_ranks(attempt)), LASTS_S[found["reason"]]
    return {
        "cluster": cluster,
        **found,
        "run": attempt.parent.parent.name,
        "attempt": attempt.name,
        "by": getpass.getuser(),
        "since": since,
        "expires": None if lasts_s is None else since + lasts_s,
    }


def is_in_force(entry: Record) -> bool:
    """Whether an entry has not expired: an attempt may be examined long after its end."""
    return entry["expires"] is None or entry["expires"] > time.time()


def until(entry: Record) -> str:
    if entry["expires"] is None:
        return ""
    return time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(entry["expires"]))


def remember(memory: Path, entries: list[Record]) -> None:
    """Add entries to the memory. One with the same cluster, node and reason is replaced."""
    with locked(memory):
        keys = {key_of(entry) for entry in entries}
        kept = [entry for entry in read_memory(memory) if key_of(entry) not in keys]
        write_json(memory, {"schema_version": SCHEMA_VERSION, "nodes": [*kept, *entries]})


def key_of(entry: Record) -> tuple[Any, ...]:
    return entry.get("cluster"), entry.get("node"), entry.get("reason")


def read_memory(memory: Path) -> list[Record]:
    """Return the entries of the memory; none if there is no such file.

    Raises:
        Unreadable: the file is damaged, or a later version wrote it.
    """
    try:
        document = safe_files.read_json(memory)
        if document["schema_version"] != SCHEMA_VERSION:
            raise Unreadable(f"{memory}: written by another version of bsl: nothing was added")
        return list(document["nodes"])
    except FileNotFoundError:
        return []
    except (ValueError, LookupError, TypeError) as error:
        raise Unreadable(f"{memory}: not a memory of nodes ({error!r}): nothing was added") from error


@contextlib.contextmanager
def locked(memory: Path) -> Iterator[None]:
    """Keep others from changing the memory, where the file system has locks."""
    handle = safe_files.open_lock(memory.with_name(f".{memory.name}.lock"))
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unreadable(f"{memory}: locked for {LOCK_TIMEOUT_S:g} s: nothing was added") from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(handle)


def describe(options: argparse.Namespace, attempt: Path, found: list[Record], questions: list[Record]) -> Record:
    """Return the contents of the attempt's `bad_nodes.json`. It is final once nothing about the end can change."""
    has_ended = options.ended or read_json(attempt / "exit.json").get("exit_code") is not None
    is_final = has_ended and not questions
    return {"schema_version": SCHEMA_VERSION, "is_final": is_final, "found": found, "open": questions}


def write_json(path: Path, document: Record) -> None:
    """Replace the file at `path` by `document`."""
    safe_files.write_file(path, json.dumps(document, indent=1) + "\n")


# ------------------------------------------------------------------------------------------- jobs that wait


def leave_out_of_jobs(options: argparse.Namespace, memory: Path, new: list[Record]) -> None:
    """Leave bad nodes out of this run's jobs in the queue, and of this job if Slurm restarts it.

    Slurm refuses to change a job that runs, and accepts it as soon as the job has been sent back to the queue.
    """
    for job_id in waiting_jobs(options.job_id) if new else []:
        leave_out(job_id, {entry["node"] for entry in new})
    if options.slurm_restarts > options.restart_count:
        leave_out(options.job_id, remembered(memory, options.cluster))


def leave_out_remembered(attempt: Path, job_id: str) -> None:
    """Leave all remembered bad nodes out of a job of the run that waits: a requeued one, or one just queued."""
    try:
        bad = remembered(attempt.absolute().parent.parent.parent / "nodes.json", os.environ.get("SLURM_CLUSTER_NAME"))
    except Unreadable as error:
        say(f"bad_nodes: {error}")
        return
    if bad:
        leave_out(job_id, bad)


def remembered(memory: Path, cluster: str | None) -> set[str]:
    """Return the nodes that are remembered as bad here. A cluster whose name is not known may be this one."""
    here = [each for each in read_memory(memory) if None in (cluster, each["cluster"]) or each["cluster"] == cluster]
    return {each["node"] for each in here if is_in_force(each)}


def waiting_jobs(job_id: str) -> list[str]:
    """Return the jobs in the queue with the comment of this one: the comment names the run."""
    comment = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%k")
    if not comment or not comment.startswith("bsl:"):
        return []
    lines = (ask("squeue", "--noheader", "--states=PENDING", "--format=%i|%k") or "").splitlines()
    return [line.partition("|")[0] for line in lines if line.partition("|")[2] == comment.splitlines()[0]]


def leave_out(job_id: str, bad: set[str]) -> None:
    """Add nodes to those that a job excludes, apart from those that it demands: it could never start."""
    shown = ask("scontrol", "--oneliner", "show", "job", job_id)
    match = re.search(r"\bExcNodeList=(\S+)", shown or "")
    if match is None:
        say(f"bsl: job {job_id}: Slurm does not say what it excludes, so that nothing was changed")
        return
    listed = expand(match[1])
    demanded = re.search(r"\bReqNodeList=(\S+)", shown or "")
    bad = bad - set(expand(demanded[1])) if demanded else bad
    if not bad - set(listed):
        return
    names = ",".join(sorted({*listed, *bad}))
    done = ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")
    said = "leaves out" if done is not None else "could not be changed: it does not leave out"
    say(f"bsl: job {job_id} {said} {names}")


def expand(hostlist: str) -> list[str]:
    """Return the names of a hostlist as Slurm shows it."""
    return [] if hostlist == "(null)" else (ask("scontrol", "show", "hostnames", hostlist) or hostlist).split()


def say(text: str) -> None:
    """Write a line at once. Output may be on a disk that is full."""
    with contextlib.suppress(OSError):
        os.write(2, f"{' '.join(text.splitlines())}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
