"""The answer of `bsl why`: text and JSON from an ending. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bigsci_launch.endings.ending import Culprit, JobEnding
from bigsci_launch.endings.exits import signal_of
from bigsci_launch.endings.statements import Statement

SCHEMA_VERSION = 1
NEXT = {
    "hang": "while it hangs the next time: `bsl spy --jobid JOBID`; TORCH_FR_BUFFER_SIZE=2000 keeps the last calls",
    "mismatch": "run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names both calls",
    "rendezvous": "see whether all ranks started and reach MASTER_ADDR, MASTER_PORT: the log of a missing one says it",
    "network": "the rank that ended first has another reason in its log, or its node in `sinfo -R`",
    "node_failure": "submit it again without that node: `sinfo -R` says what Slurm holds against it",
    "preempted": "submit it again: it resumes from its newest checkpoint, if it wrote one",
    "requeued": "Slurm starts it again: `squeue -j JOBID`",
    "time_limit": "submit it again from its newest checkpoint, or ask for more time (--time)",
    "cancelled": "`sacct -j JOBID -o State%30` says who cancelled it",
    "launch_failed": "mend the command or the request, and submit it again",
    "crashed": "read what the first failing rank printed before it",
    "unknown": "give all logs of the ranks, and the output of the job: `bsl why FOLDER`",
}
KILLED = (
    "SIGKILL comes from outside the program, mostly because memory ran out: see the kernel log of that node, and "
    "`sacct -j JOBID -o JobID,State,MaxRSS,ReqMem`"
)
NAMES = {"out_of_memory": "out of memory", "node_failure": "node failure", "time_limit": "time limit"}


@dataclass(frozen=True, slots=True)
class Why:
    """Why a run or a job ended, for people and programs."""

    about: str
    """`run demo`, `job 1234` or the files."""
    kind: str
    sentence: str
    first: str
    """Who failed first, or why that is not known."""
    culprit: Culprit = field(default_factory=Culprit)
    is_certain: bool = True
    evidence: tuple[Statement, ...] = ()
    notes: tuple[str, ...] = ()
    """What else supports it, or limits it."""
    next: str = ""
    read: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.kind not in ("unknown", "running")


def why_of(ending: JobEnding, about: str, read: tuple[str, ...], notes: tuple[str, ...] = ()) -> Why:
    """Return the answer for an ending that logs show."""
    culprit = ending.culprit
    first = str(culprit) if culprit else f"not known: {ending.why_not_known}" if ending.why_not_known else "not known"
    return Why(
        about=about,
        kind=ending.kind,
        sentence=ending.sentence,
        first="none" if ending.kind == "finished" else first,
        culprit=culprit,
        is_certain=ending.is_certain,
        evidence=ending.evidence,
        notes=notes,
        next=ending.next or (KILLED if was_killed(ending) else NEXT.get(ending.kind, "")),
        read=read,
    )


def was_killed(ending: JobEnding) -> bool:
    """Whether a process was killed, and nothing says by whom."""
    return ending.kind == "crashed" and bool(ending.evidence) and signal_of(ending.evidence[0]) == "SIGKILL"


def why_lines(why: Why) -> list[str]:
    """Return the answer as lines `name   value`, and what to do next."""
    kind = NAMES.get(why.kind, why.kind.replace("_", " ")) + ("" if why.is_certain else ", most likely")
    ended = kind if why.sentence == kind else f"{kind}: {why.sentence}"
    facts = [("ended", ended), ("first failure", why.first)]
    facts += [("evidence", f"{each.place}  {each.said}" if each.place else each.said) for each in why.evidence]
    facts += [("note", each) for each in why.notes]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts] + ([f"next: {why.next}"] if why.next else [])


def why_document(why: Why) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "about": why.about,
        "kind": why.kind,
        "is_certain": why.is_certain,
        "sentence": why.sentence,
        "first_failure": {
            "is_known": bool(why.culprit),
            "text": why.first,
            "ranks": list(why.culprit.ranks),
            "tasks": list(why.culprit.tasks),
            "local_rank": why.culprit.local_rank,
            "node": why.culprit.node,
        },
        "evidence": [_evidence(each) for each in why.evidence],
        "notes": list(why.notes),
        "next": why.next or None,
        "read": list(why.read),
    }


def _evidence(each: Statement) -> dict[str, Any]:
    return {
        "file": each.file or None,
        "line": (each.is_counted and each.line) or None,
        "said": each.said,
        "word": each.word.name,
        "speaker": each.word.speaker,
        "kind": each.kind,
        "rank": each.by,
        "node": each.node,
    }
