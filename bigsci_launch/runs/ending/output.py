"""What the words of srun, NCCL, gloo and the shell say about the end of an attempt. Pure.

srun has words for ranks that left before the others, and job.out holds the records that a rank could not write to a
full disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.file_names import rank_of_name
from bigsci_launch.safe_files import parse_json
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.topology.ranks import expand_ranks

# What the store at which ranks meet reports, before there is a group.
STORE = re.compile(r"wait timeout after (\d+) ?ms, keys: |store based barrier|waiting for clients", re.IGNORECASE)
GROUP = re.compile(r"\[(PG [^\]]*?) Rank \d+\]")
STEP = r"(?:StepId=|step:)\S+"
FIRST_LEFT = re.compile(r"^srun: (?:\S+: )*first task exited (\d+)s ago", re.IGNORECASE)
TASKS = re.compile(rf"^srun: (?:\S+: )*{STEP} tasks? ([0-9,-]+): (running|exited)$")
TASK_ENDED = re.compile(r"^srun: (?:\S+: )*(error: \S+: tasks? |Terminating|.*_step_signal: Terminating)")
# The line of the local launcher, and of the controller of `survive`.
STILL_RUN = re.compile(
    r"bsl: (?:giving up: )?ranks \[?([0-9,\- ]+)\]? still run ([0-9.]+) s after the first rank ended"
)
START = re.compile(r"^(?:\S+Z )?bsl: start attempt=(\S+)")
UNWRITTEN = re.compile(r"^(?:\d+: )?rank_runner: record (pids|exits)/(\S+) (\{.*\})$")
NO_ROOM = re.compile(
    r"^(?:\d+: )?rank_runner: cannot write (/.*): \[Errno \d+\] (No space left on device|Disk quota exceeded)"
)
LABEL = re.compile(r"^\d+: ")
SHELL_LINE = re.compile(r"^.*?: line \d+: ")
NOISE = re.compile(
    r"\bbsl: |exited with exit code|^srun: (Terminating|Force Terminated)|CANCELLED AT|^rank_runner: ", re.IGNORECASE
)
ERROR = re.compile(r"not found|no such file|denied|cannot|can't|error|unable|invalid|fail|refused", re.IGNORECASE)
Launched = Mapping[int, tuple[int, ...]]
NOTHING_LAUNCHED: Launched = MappingProxyType({})
NUM_CAUSES = 2
CAUSE_LENGTH = 500


class JobOutput(NamedTuple):
    """What job.out shows about one attempt. A rank is the task of srun with its number, or is `launched` by one."""

    lines: tuple[str, ...] = ()
    told: tuple[Statement, ...] = ()
    """What the lines say about the end, by the table of words."""
    running: tuple[int, ...] = ()
    """Ranks that srun ended because they still ran long after the first had ended."""
    left: tuple[int, ...] = ()
    """Ranks that had ended with 0 by then; empty if it does not say."""
    waited_s: float = 0.0
    lost_nodes: tuple[str, ...] = ()
    unwritten: Mapping[tuple[str, int], dict[str, Any]] = MappingProxyType({})
    """Records that ranks could not write, by folder and rank."""
    no_room: str | None = None
    """What could not be written because the disk was full: then a record that is missing proves nothing."""
    launched: Launched = NOTHING_LAUNCHED
    """The ranks that each task has started, if the tasks are launchers."""

    def ranks_of(self, tasks: Iterable[int]) -> list[int]:
        return ranks_of_tasks(tasks, self.launched)


def ranks_of_tasks(tasks: Iterable[int], launched: Launched) -> list[int]:
    return [rank for task in tasks for rank in launched.get(task, (task,))]


def parse_output(text: str, attempt: str, launched: Launched = NOTHING_LAUNCHED) -> JobOutput:
    """Return what a job's output shows about `attempt`; a requeued job appends to the output of its first start."""
    lines = lines_of_attempt(text, attempt)
    running, left, waited_s = read_stragglers(lines, launched)
    told = read_statements("\n".join(lines), "job.out", Speaker(), read_words()).statements
    lost = [node for each in told if each.kind == "node_failure" for node in _nodes(each.named.get("node", ""))]
    unwritten, no_room = read_unwritten(lines), read_no_room(lines)
    return JobOutput(tuple(lines), told, running, left, waited_s, tuple(lost), unwritten, no_room, launched)


def was_step_cancelled(output: JobOutput) -> bool:
    """Whether the step that runs the ranks was cancelled: Slurm prints that before srun reports a rank that ended."""
    cancelled = [each.line for each in output.told if each.word.name == "slurm: step cancelled"]
    ended = (number for number, line in enumerate(output.lines, 1) if TASK_ENDED.search(line))
    return bool(cancelled) and min(cancelled) < next(ended, len(output.lines) + 1)


def lines_of_attempt(text: str, attempt: str) -> list[str]:
    """Return the lines from the attempt's start to the next one's. All of them, if no line shows that it started."""
    lines = [line.rstrip() for line in text.split("\n")]
    starts = [(at, match[1]) for at, line in enumerate(lines) if (match := START.search(line))]
    own = [at for at, name in starts if name == attempt]
    first = own[-1] if own else 0
    last = next((at for at, name in starts if at > first and name != attempt), len(lines))
    return lines[first:last]


def read_stragglers(
    lines: list[str], launched: Launched = NOTHING_LAUNCHED
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Return the ranks that were ended because they still ran, those that had ended, and the seconds between."""
    tasks: dict[str, list[int]] = {"running": [], "exited": []}
    waited_s = None
    for line in lines:
        if match := FIRST_LEFT.match(line):
            waited_s = float(match[1])
        elif match := STILL_RUN.search(line):
            waited_s = float(match[2])
            tasks["running"] += expand_ranks(match[1].replace(" ", ""))
        elif waited_s is not None and (match := TASKS.match(line)):
            tasks[match[2]] += ranks_of_tasks(expand_ranks(match[1]), launched)
    return tuple(tasks["running"]), tuple(tasks["exited"]), waited_s or 0.0


def read_unwritten(lines: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the records that ranks put into their output because they could not write the file."""
    records = {}
    for line in lines:
        match = UNWRITTEN.match(line)
        rank = rank_of_name(match[2]) if match else None
        if match and rank is not None:
            with suppress(ValueError):
                records[match[1], rank] = parse_json(match[3])
    return records


def read_no_room(lines: list[str]) -> str | None:
    """Return what the first rank that met a full disk said about it; None if none did."""
    found = next((match for line in lines if (match := NO_ROOM.match(line))), None)
    return f"{found[2]}: {found[1]} could not be written" if found else None


def launch_cause(lines: tuple[str, ...]) -> str | None:
    """Return why nothing was started: the message of the shell or of Slurm; None if there is none."""
    kept: list[str] = []
    for line in lines:
        text = SHELL_LINE.sub("", LABEL.sub("", line.strip()))
        if text and not NOISE.search(text) and text not in kept:
            kept.append(text)
    errors = [text for text in kept if ERROR.search(text)] or kept
    return "; ".join(errors[-NUM_CAUSES:])[:CAUSE_LENGTH] or None


def collective_of(text: str) -> dict[str, Any]:
    """Return backend, group, operation, sequence number and limit of a collective that timed out; None if not said."""
    fields = {
        name: match[1] if (match := re.search(pattern, text)) else None
        for name, pattern in (
            ("operation", r"\bOpType=(\w+)"),
            ("sequence", r"\bSeqNum=(\d+)"),
            ("timeout_ms", r"\bTimeout\(ms\)=(\d+)"),
        )
    }
    if gloo := re.search(r"Timed out waiting (\d+) ?ms for (recv|send) operation", text, re.IGNORECASE):
        fields["operation"], fields["timeout_ms"] = gloo[2].lower(), gloo[1]
    if store := STORE.search(text):
        fields["operation"], fields["timeout_ms"] = (
            "wait for a key of the store" if store[1] else "rendezvous",
            store[1],
        )
    group = GROUP.search(text)
    return {
        "backend": "nccl" if "watchdog" in text.lower() else "store" if store else "gloo",
        "group": group[1] if group else None,
        "operation": fields["operation"],
        "sequence": int(fields["sequence"]) if fields["sequence"] else None,
        "timeout_ms": int(fields["timeout_ms"]) if fields["timeout_ms"] else None,
    }


def collective_text(collective: dict[str, Any]) -> str:
    """`ALLREDUCE, SeqNum=178, of PG ID 2 PG GUID 4(DP)`."""
    words = [collective["operation"] or f"a collective of {collective['backend']}"]
    words += [f"SeqNum={collective['sequence']}"] if collective["sequence"] is not None else []
    words += [f"of {collective['group']}"] if collective["group"] else []
    return ", ".join(words)


def _nodes(hostlist: str) -> list[str]:
    try:
        return expand_hostlist(hostlist) if hostlist else []
    except ValueError:
        return [hostlist]
