"""What words around a stack say about its origin: a label, a separator, a heading, the name of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bigsci_launch.spy.inputs.looks import named_rank, node_of

RANK = re.compile(r"(?<!local[-_ ])(?<!node[-_ ])\b(?:global[-_ ]?)?rank[-_ :=#]{0,3}(\d{1,7})(?!\d)", re.IGNORECASE)
LOCAL_RANK = re.compile(r"\blocal[-_ ]?rank[-_ :=#]{0,3}(\d{1,7})|^(?:default|trainer|worker)(\d{1,7})$", re.IGNORECASE)
PID = re.compile(r"\b(?:pid|process)[-_ :=#]{0,3}(\d{1,9})(?!\d)", re.IGNORECASE)
NODE = re.compile(
    r"\b(?:host(?:name)?|node(?:name)?|machine|ip)[ :=]{1,3}([\w.-]{1,80})|//([\w.-]{1,80})", re.IGNORECASE
)
HOST = re.compile(r"(?=[A-Za-z])(?=[\w.-]*\d)[\w.-]{1,80}")
TAGGED = re.compile(r"\d+,(\d{1,7})")
"""`mpirun --tag-output`: job and rank."""
NODE_AND_LOCAL = re.compile(r"([\w.-]{1,80}):(\d{1,7})")
"""`torchrun --role $(hostname): --tee 3`."""
FILE = re.compile(r"\S+\.(?:txt|out|log|err|dump|stacks?)")
NO_HOST = re.compile(r"(?:rank|pid|process|thread|worker|default|trainer|stack|dump|py-?spy|local)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TextOrigin:
    """Where a stack is from: what is not known is empty or None. `task` is a label that is only a number."""

    node: str = ""
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    task: int | None = None

    @property
    def is_known(self) -> bool:
        return self != TextOrigin()

    def within(self, outer: TextOrigin) -> TextOrigin:
        """Return this origin, with what only the one around it says."""
        return TextOrigin(
            self.node or outer.node,
            outer.rank if self.rank is None else self.rank,
            outer.local_rank if self.local_rank is None else self.local_rank,
            self.pid,
            outer.task if self.task is None else self.task,
        )


def origin_of(words: str) -> TextOrigin:
    """Return what a separator or a heading says: `node-0 PID 1234`, `Rank 3: http://n0:25999`, `rank-3.txt`."""
    if FILE.fullmatch(words):
        path = Path(words)
        return TextOrigin(node_of(path), named_rank(path))
    rank, local, pid, node = RANK.search(words), LOCAL_RANK.search(words), PID.search(words), NODE.search(words)
    name = (node[1] or node[2]) if node else ""
    if not name:
        hosts = (word.rstrip(":,;") for word in words.split()[:3])
        name = next((word for word in hosts if HOST.fullmatch(word) and not NO_HOST.match(word)), "")
    return TextOrigin(
        name,
        int(rank[1]) if rank else None,
        int(local[1] or local[2]) if local else None,
        int(pid[1]) if pid else None,
    )


def origin_of_label(label: str) -> TextOrigin:
    """Return what the label of lines says: a task, a rank, or a node."""
    if label.isdigit():
        return TextOrigin(task=int(label))
    if tagged := TAGGED.fullmatch(label):
        return TextOrigin(rank=int(tagged[1]))
    if numbered := NODE_AND_LOCAL.fullmatch(label):
        return TextOrigin(numbered[1], local_rank=int(numbered[2]))
    found = origin_of(label)
    if found.is_known or not label:
        return found
    return TextOrigin(node=next((part for part in label.split("/")[1:] if part), label))
