"""What the ending of a job is: its kind, the statement that shows it, and whom that names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.endings.exits import signal_of
from bigsci_launch.endings.statements import Statement
from bigsci_launch.topology.naming import name_ranks
from bigsci_launch.topology.ranks import compress_ranks

MOST_EVIDENCE = 8


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first failing ranks, tasks or node, as far as they are known."""

    ranks: tuple[int, ...] = ()
    tasks: tuple[int, ...] = ()
    local_rank: int | None = None
    node: str | None = None

    def __bool__(self) -> bool:
        return bool(self.ranks or self.tasks) or self.local_rank is not None or self.node is not None

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        local = f"local rank {self.local_rank}" if self.local_rank is not None else ""
        if self.ranks:
            return name_ranks(self.ranks) + (f" ({local})" if local else "") + where
        if self.tasks:
            return f"task{'s' if len(self.tasks) > 1 else ''} {compress_ranks(self.tasks)}{where}"
        if local:
            return local + where
        return f"node {self.node}" if self.node else "not known"


@dataclass(frozen=True, slots=True)
class JobEnding:
    """Why a job ended. `kind` is `unknown` if nothing says it."""

    kind: str
    sentence: str
    culprit: Culprit = Culprit()
    why_not_known: str = ""
    """Why no culprit is named."""
    is_certain: bool = True
    evidence: tuple[Statement, ...] = ()
    next: str = ""


def ending_of(first: Statement, evidence: Sequence[Statement], culprit: Culprit, why: str = "") -> JobEnding:
    return JobEnding(
        kind=first.kind,
        sentence=sentence_of(first, culprit),
        culprit=culprit,
        why_not_known="" if culprit else why or "nothing says which rank or node was first",
        is_certain=first.word.is_sure,
        evidence=tuple({(each.place, each.said): each for each in evidence}.values())[:MOST_EVIDENCE],
        next=first.word.next,
    )


def sentence_of(each: Statement, culprit: Culprit) -> str:
    """Return what a statement says, with the names that it holds."""
    signal = signal_of(each)
    how = signal or (f"with exit code {each.code}" if each.code is not None else "")
    names = {"who": str(culprit) if culprit else "a process", "how": how, "came": "some", "size": "all"}
    for name in ("node", "server", "what"):
        names[name] = each.named.get(name, "unknown")
    return each.word.says.format_map(_Named({**names, **each.named})).rstrip(", ")


class _Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "unknown"


def named_by(first: Statement, others: Sequence[Statement] = ()) -> Culprit:
    """Return who a statement names, else who says it: the first of the same kind that names a rank or a node.

    What another process reports is not where it was reported: those that name come first then.
    """
    naming = [each for each in others if each.named_ranks or each.tasks or "node" in each.named]
    for each in (*naming, first, *others) if first.is_reported else (first, *others):
        if each.word.speaker == "witness":
            culprit = Culprit(each.named_ranks, each.tasks, _local(each), each.named.get("node") or each.speaker.node)
        elif each.word.speaker == "cause":
            by = (each.by,) if each.by is not None else ()
            culprit = Culprit(each.named_ranks or by, (), each.speaker.local_rank, each.speaker.node)
        else:
            culprit = Culprit()
        if culprit:
            return culprit
    return Culprit()


def _local(each: Statement) -> int | None:
    text = each.named.get("local_rank", "")
    return int(text) if text.isdigit() and len(text) < 6 else None
