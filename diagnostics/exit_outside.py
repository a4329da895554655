"""Who ended the ranks of an attempt from outside, and why it ended then. Part of exit_reason.py and chain.py.

`ended.json` is written before ranks are ended: by a watcher that ends a hang, or for a person who asks for it. That
somebody wanted to end them does not show that they did: ranks may crash, finish, or be preempted in between. So what
the ranks left comes first, and only an end that they do not explain is that of `ended.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exit_blame import NOTHING, Finding, find_hang
from exit_failures import make_failure
from exit_records import read_json

if TYPE_CHECKING:
    from typing import Any

    from exit_records import Ranks

    Record = dict[str, Any]

HANG = "end_ranks"
"""What a watcher does to a hang. All other acts are a person's."""
RESTART = "restart"
WISHES = {"exit": "to exit", RESTART: "to restart", "kill": "to kill it"}
COUNTED = ("order of start", "order of the files", "number in the file name")
"""What numbers processes where nobody knows their rank: `numbered_by` of a verdict."""


class EndedBy(NamedTuple):
    """Contents of `ended.json`. `written` is when, by the clock of the file system."""

    act: str
    who: str
    why: str
    continues: bool
    step: int | None = None
    bundle: str | None = None
    nodes: tuple[str, ...] = ()
    written: float | None = None

    @property
    def is_hang(self) -> bool:
        return self.act == HANG

    @property
    def intent(self) -> str:
        """Half of the truth where the attempt ended for another reason: `agent was about to end the ranks: ...`."""
        why = f": {self.why}" if self.why else ""
        return f"{self.who} was about to end the ranks{why}" if self.is_hang else self.sentence

    @property
    def sentence(self) -> str:
        """`alice asked to exit: the loss is NaN`; `agent ended the ranks: no step for 62 s`."""
        why = f": {self.why}" if self.why else ""
        if self.is_hang:
            return f"{self.who} ended the ranks{why}"
        after = f" after step {self.step}" if self.step is not None else ""
        return f"{self.who} asked {WISHES.get(self.act, 'to end it')}{after}{why}"


def read_ended_by(attempt: Path) -> EndedBy | None:
    """Return who ended the ranks of an attempt; None if nobody did, or if the record is torn."""
    path = attempt / "ended.json"
    record = read_json(path)
    if not record.get("act"):
        return None
    step = record.get("step")
    return EndedBy(
        act=str(record["act"]),
        who=str(record.get("who") or "somebody"),
        why=" ".join(str(record.get("why") or "").split()),
        continues=bool(record.get("continues")),
        step=step if isinstance(step, int) else None,
        bundle=record.get("bundle") or None,
        nodes=tuple(str(node) for node in record.get("nodes") or ()),
        written=modified(path),
    )


def modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def failed_before(attempt: Path, failure: Record, ended: EndedBy) -> bool:
    """Whether a rank failed before anybody set out to end it.

    Both moments are those of files in one folder: clocks of nodes may differ. A record that is only in the output of
    the job has no file, and is compared by its own time.
    """
    name = f"rank-{failure['rank']:04d}.json"
    moments = [modified(attempt / folder / name) for folder in ("errors", "exits")]
    moment = min((each for each in moments if each is not None), default=failure["time"])
    return moment is not None and ended.written is not None and moment < ended.written


def find_outside(ended: EndedBy, exit_code: int | None, world_size: int, ranks: Ranks) -> Finding | None:
    """Return why an attempt ended whose own records do not say it; None if its ranks ended by themselves after all."""
    if ended.is_hang:
        was_told = any(rank["exit"].get("terminated") is not None for rank in ranks.values())
        return find_ended_hang(ended, world_size, ranks) if exit_code != 0 or was_told else None
    has_left = exit_code == 0 and ended.act != "kill"
    return Finding("stopped" if has_left else "cancelled", None, [], evidence=[ended.sentence])


def find_ended_hang(ended: EndedBy, world_size: int, ranks: Ranks) -> Finding:
    """Return the hang that a watcher ended. Suspects are those of its evidence, else those that ranks complain of."""
    complained = find_hang(world_size, ranks, [])
    suspects = read_suspects(ended.bundle)
    if suspects:
        found = suspects[0]
        first = make_failure(found["rank"], ranks.get(found["rank"], NOTHING), found["why"], None)
        first = {**first, "node": found["node"], "coordinate": found["coordinate"]}
        known = [{name: each[name] for name in ("rank", "node", "coordinate")} for each in suspects]
        collectives = complained.collectives if complained else []
        return Finding("hang", first, [], known, collectives, [ended.sentence])
    if complained is not None:
        return complained._replace(evidence=[ended.sentence, *complained.evidence], status_of=None)
    return Finding("hang", None, [], evidence=[ended.sentence])


def read_suspects(bundle: str | None) -> list[Record]:
    """Return the ranks that the verdict of a bundle accuses, if their numbers are those of the program."""
    verdict = read_json(Path(bundle) / "verdict.json").get("verdict") if bundle else None
    found = verdict.get("suspects") if isinstance(verdict, dict) else None
    named = [each for each in found or [] if {"rank", "node", "coordinate", "why"} <= set(each)]
    return [] if any(each.get("numbered_by") in COUNTED for each in named) else named
