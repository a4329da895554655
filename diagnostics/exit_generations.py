"""What the controller of `survive` recorded of an attempt: its generations, and why it gave up. Part of exit_reason.py.

A generation that was overcome is no failure of the attempt: the records of its ranks are in `recover/gen-NNN`. What is
in `exits/` and `errors/` is about the last generation, unless the controller gave up after it had moved that too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import safe_files
from exit_blame import NOTHING, Finding
from exit_failures import make_failure
from exit_records import read_json

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from exit_records import Ranks

    Record = dict[str, Any]

CONSEQUENCES = ("lost_peer", "stuck")
"""Kinds of failures that follow from another one, if there is one."""
REASONS = {
    "left_early": "left_early",
    "lost_node": "node_failure",
    "hung": "hang",
    "stopped": "hang",
    "asked": "hang",
}
"""Why an attempt ended whose controller gave up after a failure of this kind; after any other, it crashed."""
MAX_NAMED = 4
ENDED_FROM_OUTSIDE = "the job was told to end"
"""What the controller says if it was ended itself: no reason of its own."""


class Generations(NamedTuple):
    """The generations of an attempt. `causes` has what ended each that ended by a failure, by its number."""

    number: int
    newest: int | None
    world_size: int | None
    causes: list[tuple[int, Record]]
    gave_up: Record | None

    @property
    def last_cause(self) -> Record | None:
        """What ended the newest generation; None if no failure did."""
        return self.causes[-1][1] if self.causes and self.causes[-1][0] == self.newest else None

    @property
    def is_judged(self) -> bool:
        """Whether the controller has recorded what ended the last generation, and began no other one. Ranks without an
        exit record then say nothing: they waited for a generation that did not begin, or were ended with the job."""
        return self.last_cause is not None and self.gave_up is not None

    @property
    def why_given_up(self) -> str | None:
        """Why the controller began no further generation; None if it did not give up, or was ended from outside."""
        why = " ".join(str((self.gave_up or {}).get("why") or "").split())
        return None if not why or why == ENDED_FROM_OUTSIDE else why


def read_generations(attempt: Path) -> Generations | None:
    """Return the generations of an attempt; None without `survive`."""
    records = read_lines(attempt / "recover" / "generations.jsonl")
    began = [each for each in records if each.get("event") == "began" and isinstance(each.get("generation"), int)]
    gave_up = [each for each in records if each.get("event") == "gave_up"]
    if not began and not gave_up:
        return None
    last = max(began, key=lambda each: each["generation"], default={})
    size = last.get("world_size")
    return Generations(
        len(began),
        last.get("generation"),
        size if isinstance(size, int) else None,
        find_causes(records),
        gave_up[-1] if gave_up else None,
    )


def read_lines(path: Path) -> list[Record]:
    """Return the complete records of a file of JSON lines."""
    found = []
    try:
        lines = safe_files.read_file(path).splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            record = safe_files.parse_json(line)
        except ValueError:
            continue
        found += [record] if isinstance(record, dict) else []
    return found


def find_causes(records: list[Record]) -> list[tuple[int, Record]]:
    """Return what ended each generation: the first failure that another one cannot have caused, else the first."""
    failed: dict[int, list[Record]] = {}
    for record in records:
        if record.get("event") == "failed" and isinstance(record.get("generation"), int):
            failed.setdefault(record["generation"], []).append(record)
    causes = []
    for number in sorted(failed):
        own = [each for each in failed[number] if each.get("kind") not in CONSEQUENCES]
        causes.append((number, (own or failed[number])[0]))
    return causes


def failed_text(cause: Record) -> str:
    """`rank 5 on n2 died (SIGKILL)`."""
    rank, node, kind = cause.get("rank"), cause.get("node"), cause.get("kind")
    where = f" on {node}" if node else ""
    who = f"rank {rank}{where}" if rank is not None else f"a rank{where}"
    how = cause.get("signal") or (f"exit code {cause['code']}" if cause.get("code") is not None else "")
    texts = {
        "died": f"{who} died" + (f" ({how})" if how else ""),
        "left_early": f"{who} left with exit code 0 before the others",
        "lost_runner": f"{who} lost its runner",
        "lost_node": f"node {node} was lost",
        "hung": f"{who} hung, and was fenced",
        "stopped": f"{who} was stopped, and was fenced",
        "lost_peer": f"{who} lost a peer, and no rank has died",
        "stuck": f"{who} did not leave in time, and was killed",
        "asked": "all ranks were asked to begin again",
    }
    return texts.get(str(kind), f"{who}: a failure of unknown kind {kind!r}")


def sentence(found: Generations) -> str | None:
    """`3 generations: rank 5 on n2 died (SIGKILL) in generation 0, node n1 was lost in generation 1`; None if there was
    only one."""
    if found.number < 2:
        return None
    named = [f"{failed_text(cause)} in generation {number}" for number, cause in found.causes]
    more = f", and {len(named) - MAX_NAMED} more failures" if len(named) > MAX_NAMED else ""
    return f"{found.number} generations: {', '.join(named[:MAX_NAMED]) or 'no failure'}{more}"


def archived(attempt: Path, found: Generations, ranks: Ranks) -> Ranks:
    """Return the ranks with the exits and errors of the last generation that failed, if the controller has moved them
    away before it gave up."""
    if found.why_given_up is None or not found.causes or any(rank["exit"] or rank["error"] for rank in ranks.values()):
        return ranks
    folder = attempt / "recover" / f"gen-{found.causes[-1][0]:03d}"
    return {
        number: {
            **rank,
            "exit": read_json(folder / "exits" / f"rank-{number:04d}.json"),
            "error": read_json(folder / "errors" / f"rank-{number:04d}.json"),
        }
        for number, rank in ranks.items()
    }


def overcome(found: Generations, ranks: Ranks) -> Ranks:
    """Return the ranks without the failures of a generation that was being replaced when the job was told to end. Their
    records have not been moved away yet."""
    if not found.is_judged or found.why_given_up is not None:
        return ranks
    return {
        number: rank if rank["exit"].get("terminated") else {**rank, "exit": {}, "error": {}}
        for number, rank in ranks.items()
    }


def present(found: Generations, ranks: Ranks) -> Ranks:
    """Return the ranks that the last generation had: earlier ones may have had more."""
    return {number: rank for number, rank in ranks.items() if found.world_size is None or number < found.world_size}


def given_up(found: Generations, finding: Finding, ranks: Ranks) -> Finding:
    """Return why an attempt ended whose controller gave up: its reason is the evidence, and the rank that ended the
    last generation failed first, as far as one is to blame, and the exit code is that of the controller. A rank that
    was fenced had hung, however it was killed."""
    why, cause = found.why_given_up, found.last_cause
    if why is None or finding.reason not in (
        "crashed",
        "left_early",
        "node_failure",
        "hang",
        "unknown",
        "launch_failed",
    ):
        return finding
    finding = finding._replace(evidence=[f"the controller gave up: {why}", *finding.evidence])
    if cause is None:
        return finding
    reason, rank = REASONS.get(str(cause.get("kind")), "crashed"), cause.get("rank")
    if rank is None:
        return finding._replace(reason=reason, status_of=None)
    if finding.first is not None and finding.first["rank"] == rank and reason in ("crashed", finding.reason):
        return finding._replace(reason=reason)
    first = make_failure(rank, ranks.get(rank, NOTHING), f"{failed_text(cause)}{words_of(cause)}", cause.get("died"))
    known = {name: cause.get(name) for name in ("node", "signal", "code", "step") if cause.get(name) is not None}
    failed = sorted({rank, *finding.failed})
    return finding._replace(reason=reason, first={**first, **known}, failed=failed, status_of=None)


def words_of(cause: Record) -> str:
    words = " ".join(str(cause.get("words") or "").split())
    return f": {words}" if words else ""
