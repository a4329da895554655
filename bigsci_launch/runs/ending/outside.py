"""Who ended the ranks of an attempt from outside, and why it ended then.

`ended.json` is written before ranks are ended: by a watcher that ends a hang, or for a person who asks for it. The
request does not prove that they ended because of it: ranks may crash, finish, or be preempted in between. So what the
ranks left comes first, and only an end that they do not explain is that of `ended.json`.
"""

from __future__ import annotations

from pathlib import Path

from bigsci_launch.runs.ending.blame import NOTHING, EndFinding, find_hang
from bigsci_launch.runs.ending.failures import make_failure
from bigsci_launch.runs.ending.records import Ranks, Record
from bigsci_launch.runs.layout import AttemptDir, read_record
from bigsci_launch.runs.watching.ended import EndedBy, modified

COUNTED = ("order of start", "order of the files", "number in the file name")
"""What numbers processes whose rank is unknown: `numbered_by` of a verdict."""


def failed_before(attempt: AttemptDir, failure: Record, ended: EndedBy) -> bool:
    """Whether a rank failed before it was to be ended.

    Both moments are those of files in one folder: clocks of nodes may differ. A record that is only in the output of
    the job has no file, and is compared by its own time.
    """
    rank = failure["rank"]
    moments = [modified(path) for path in (attempt.error_file(rank), attempt.exit_file(rank))]
    moment = min((each for each in moments if each is not None), default=failure["time"])
    return moment is not None and ended.written is not None and moment < ended.written


def find_outside(ended: EndedBy, exit_code: int | None, world_size: int, ranks: Ranks) -> EndFinding | None:
    """Return why an attempt ended whose own records do not say it; None if its ranks ended by themselves after all."""
    if ended.is_hang:
        was_told = any(rank["exit"].get("terminated") is not None for rank in ranks.values())
        return find_ended_hang(ended, world_size, ranks) if exit_code != 0 or was_told else None
    has_left = exit_code == 0 and ended.act != "kill"
    return EndFinding("stopped" if has_left else "cancelled", None, [], evidence=[ended.sentence])


def find_ended_hang(ended: EndedBy, world_size: int, ranks: Ranks) -> EndFinding:
    """Return the hang that a watcher ended. Suspects are those of its evidence, else those that ranks complain of."""
    complained = find_hang(world_size, ranks, [])
    suspects = read_suspects(ended.bundle)
    if suspects:
        found = suspects[0]
        first = make_failure(found["rank"], ranks.get(found["rank"], NOTHING), found["why"], None)
        first = {**first, "node": found["node"], "coordinate": found["coordinate"]}
        known = [{name: each[name] for name in ("rank", "node", "coordinate")} for each in suspects]
        collectives = complained.collectives if complained else []
        return EndFinding("hang", first, [], known, collectives, [ended.sentence])
    if complained is not None:
        return complained._replace(evidence=[ended.sentence, *complained.evidence], status_of=None)
    return EndFinding("hang", None, [], evidence=[ended.sentence])


def read_suspects(bundle: str | None) -> list[Record]:
    """Return the ranks that the verdict of a bundle accuses, if their numbers are those of the program."""
    verdict = read_record(Path(bundle) / "verdict.json").get("verdict") if bundle else None
    found = verdict.get("suspects") if isinstance(verdict, dict) else None
    named = [each for each in found or [] if {"rank", "node", "coordinate", "why"} <= set(each)]
    return [] if any(each.get("numbered_by") in COUNTED for each in named) else named
