"""What the end of an attempt shows about its nodes: which are left out of later jobs, and which questions stay open.

It adds to the memory of bad nodes: a rank's node if the rank failed and printed that its GPU is broken; a node that
Slurm lost; a node that failed the check before the ranks; a node that a watcher accuses of the hang that it ended. A
collective that timed out, a lost connection and a signal blame no node. Whether a silent node was lost is for Slurm to
say: if it does not, the question stays open, and `bsl status` or `bsl submit` asks again. `bad_nodes.json` of the
attempt has what was found, so that a node that was forgiven is not remembered a second time for the same attempt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bigsci_launch.errors import SlurmError
from bigsci_launch.nodes.broken import find_broken, may_be_broken
from bigsci_launch.nodes.memory import LASTS_S, NODE_NAME, BadNode, add_nodes, left_out, make_entry, read_nodes
from bigsci_launch.runs.ending.failures import failure_of, find_silent
from bigsci_launch.runs.ending.records import (
    LOG_TAIL_BYTES,
    Ranks,
    is_after,
    node_of,
    plain,
    read_output,
    read_ranks,
    stamp_of,
    tail,
)
from bigsci_launch.runs.layout import AttemptDir, node_memory, read_record, write_json
from bigsci_launch.runs.watching.ended import read_ended_by
from bigsci_launch.scheduler.hostlist import expand_hostlist

SCHEMA_VERSION = 1
SIGNS = (("exit", "time"), ("exit", "terminated"), ("event", "time"), ("pid", "started"))
SLURM_TIMEOUT_S = 5
SETTLED_S = 900
"""If Slurm still calls a silent node healthy this long after the end, it was not lost: sites give up after 300 s."""
EVIDENCE_LENGTH = 300


@dataclass(frozen=True, slots=True)
class NodeSign:
    """Something that an attempt has shown about a node, and the first rank on it."""

    node: str
    reason: str
    evidence: str
    rank: int | None

    def as_entry(self, attempt: AttemptDir, cluster: str | None, since: float) -> BadNode:
        lasts_s = LASTS_S[self.reason]
        expires = None if lasts_s is None else since + lasts_s
        entry = make_entry(self.node, self.reason, self.evidence, cluster=cluster)
        seen = replace(entry, since=since, expires=expires, rank=self.rank)
        return replace(seen, run=attempt.run.name, attempt=attempt.name)


def examine(
    attempt: AttemptDir, *, cluster: str | None, down: Sequence[str] = (), is_over: bool = False
) -> tuple[list[BadNode], list[str]]:
    """Remember the nodes that an attempt has shown to be bad, if that was not done before. Return them, and what is to
    be said. `down` are those that Slurm calls down; `is_over`: the attempt has ended, whatever exit.json says.

    Raises:
        RunDirError: the memory cannot be read or written, and nothing was added.
        OSError: `bad_nodes.json` cannot be written.
    """
    before = read_record(attempt.bad_nodes).get("found", [])
    ranks = read_ranks(attempt, read_output(attempt).unwritten)
    found, questions = find_bad(attempt, ranks, down)
    known = {(each["node"], each["reason"]) for each in before}
    since = end_of(attempt, ranks)
    entries = [each.as_entry(attempt, cluster, since) for each in found if NODE_NAME.fullmatch(each.node)]
    fresh = [entry for entry in entries if (entry.node, entry.reason) not in known]
    new = left_out(fresh, cluster=cluster, now=time.time())  # it may be long ago
    if new:
        add_nodes(node_memory(attempt.run.path.parent), new)
    has_ended = is_over or read_record(attempt.exit).get("exit_code") is not None
    document = {
        "schema_version": SCHEMA_VERSION,
        "is_final": has_ended and not questions,
        "found": [*before, *(asdict(entry) for entry in new)],
        "open": [asdict(question) for question in questions],
    }
    write_json(attempt.bad_nodes, document)
    said = [f"{entry.node} is left out of later attempts{until(entry)}: {entry.evidence}" for entry in new]
    open_questions = (
        f"{each.node}: not recorded as bad, since that is not certain: {each.evidence}" for each in questions
    )
    return new, [*said, *open_questions]


def find_bad(attempt: AttemptDir, ranks: Ranks, down: Sequence[str]) -> tuple[list[NodeSign], list[NodeSign]]:
    """Return the nodes that are bad, and those about which Slurm must say more."""
    ended = read_record(attempt.exit)
    found = [*broken_gpus(attempt, ranks), *failed_checks(attempt)]
    said = {node: f"Slurm reports {node} as down" for node in down}
    said.update({node: f"srun: error: Node failure on {node}" for node in read_output(attempt).lost_nodes})
    first = ended.get("first_failure") or {}
    if ended.get("reason") == "node_failure" and str(first.get("error", "")).startswith("Slurm lost the node"):
        said.setdefault(first["node"], first["error"])
    found += [seen(node, "lost", text, rank_on(ranks, node)) for node, text in sorted(said.items())]
    by = read_ended_by(attempt)
    if by is not None and by.is_hang and ended.get("reason") == "hang":
        found += [seen(node, "hang", by.why, rank_on(ranks, node)) for node in by.nodes]
    questions = []
    for silent in find_silent(ranks).lost if by is None else ():  # ranks that were killed leave no record either
        if silent["node"] not in said:
            state, is_lost = slurm_says(silent["node"])
            if is_lost:
                found.append(seen(silent["node"], "lost", f"{silent['error']}; Slurm: {state}", silent["rank"]))
            elif state is None or time.time() - end_of(attempt, ranks) < SETTLED_S:
                questions.append(seen(silent["node"], "lost", str(silent["error"]), silent["rank"]))
    return found, questions


def end_of(attempt: AttemptDir, ranks: Ranks) -> float:
    """Return when the attempt ended: as recorded, else by the last sign of its ranks; now, if nothing shows it."""
    ended = read_record(attempt.exit).get("ended")
    signs = [rank[kind][name] for rank in ranks.values() for kind, name in SIGNS if rank[kind].get(name)]
    return float(ended or max(signs, default=time.time()))


def seen(node: str, reason: str, evidence: str, rank: int | None) -> NodeSign:
    return NodeSign(node, reason, evidence[:EVIDENCE_LENGTH], rank)


def rank_on(ranks: Ranks, node: str) -> int | None:
    """Return the first rank on a node; None if none started there."""
    return min((number for number, rank in ranks.items() if node_of(rank) == node), default=None)


def broken_gpus(attempt: AttemptDir, ranks: Ranks) -> Iterator[NodeSign]:
    """Yield one finding for each node where a rank failed and said before that its GPU is broken."""
    named: set[tuple[str, str]] = set()
    for number, rank in sorted(ranks.items()):
        node = node_of(rank)
        if node is None or failure_of(number, rank) is None:
            continue
        for text in own_lines(attempt.log_file(number), rank["exit"].get("terminated")):
            broken = find_broken(text)
            if broken is not None and (node, broken.reason) not in named:
                named.add((node, broken.reason))
                meaning = f" ({broken.meaning})" if broken.meaning else ""
                yield seen(node, broken.reason, f"{text[: EVIDENCE_LENGTH - len(meaning)]}{meaning}", number)


def own_lines(log: Path, terminated: float | None) -> Iterator[str]:
    """Yield the last lines of a rank that may be about its GPU, up to the moment when it was asked to end."""
    for line in tail(log, LOG_TAIL_BYTES):
        if may_be_broken(line) and not is_after(stamp_of(line), terminated):
            yield plain(line)


def failed_checks(attempt: AttemptDir) -> Iterator[NodeSign]:
    """Yield the nodes that failed the check before the ranks."""
    for node in read_record(attempt.check_result).get("nodes", []):
        if node.get("verdict") == "failed":
            yield seen(node["node"], "failed_check", f"node check: {node['why']}", None)


def slurm_says(node: str) -> tuple[str | None, bool]:
    """Return the state of a node in Slurm's words, such as `down* (Not responding)`, and whether that means that it is
    lost; None if Slurm does not answer."""
    from bigsci_launch.scheduler.slurm import query_nodes

    try:
        found = query_nodes(node, timeout_s=SLURM_TIMEOUT_S)
    except SlurmError:
        return None, False
    if not found:
        return None, False
    state, why = found[0].raw_state, f" ({found[0].reason})" if found[0].reason else ""
    return f"{state}{why}", found[0].is_given_up or state.endswith("*")


def until(entry: BadNode) -> str:
    if entry.expires is None:
        return ""
    return time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(entry.expires))


# ------------------------------------------------------------------------------------------- jobs that wait


def leave_out_remembered(attempt: AttemptDir, job_id: str, cluster: str | None) -> list[str]:
    """Leave all remembered bad nodes out of a job of the run that waits: a requeued one, or one just queued. Return
    what is to be said.

    Raises:
        RunDirError: the memory cannot be read.
    """
    entries = read_nodes(node_memory(attempt.run.path.parent))
    return leave_out(job_id, {entry.node for entry in left_out(entries, cluster=cluster, now=time.time())})


def waiting_jobs(job_id: str) -> list[str]:
    """Return the jobs in the queue with the comment of this one: the comment names the run."""
    comment = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%k")
    if not comment or not comment.startswith("bsl:"):
        return []
    lines = (ask("squeue", "--noheader", "--states=PENDING", "--format=%i|%k") or "").splitlines()
    return [line.partition("|")[0] for line in lines if line.partition("|")[2] == comment.splitlines()[0]]


def leave_out(job_id: str, bad: set[str]) -> list[str]:
    """Add nodes to those that a job excludes, apart from those that it demands: it could never start. Return what is to
    be said. Slurm refuses to change a job that runs, and accepts it once the job has been sent back to the queue."""
    if not bad:
        return []
    shown = ask("scontrol", "--oneliner", "show", "job", job_id)
    match = re.search(r"\bExcNodeList=(\S+)", shown or "")
    if match is None:
        return [f"job {job_id}: Slurm does not report which nodes it excludes, so nothing was changed"]
    listed = names_in(match[1])
    demanded = re.search(r"\bReqNodeList=(\S+)", shown or "")
    bad = bad - set(names_in(demanded[1])) if demanded else bad
    if not bad - set(listed):
        return []
    names = ",".join(sorted({*listed, *bad}))
    done = ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={names}")
    said = "leaves out" if done is not None else "could not be changed: it does not leave out"
    return [f"job {job_id} {said} {names}"]


def names_in(hostlist: str) -> list[str]:
    """Return the names of a hostlist as Slurm shows it."""
    try:
        return [] if hostlist == "(null)" else expand_hostlist(hostlist)
    except ValueError:
        return [hostlist]


def ask(*argv: str) -> str | None:
    """Return what a command of Slurm prints; None if it fails, is missing, or does not answer."""
    from bigsci_launch.scheduler.command import ask_slurm

    answer = ask_slurm(*argv, timeout_s=SLURM_TIMEOUT_S)
    return answer.words if answer.is_done else None
