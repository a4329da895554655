"""What the controller of `survive` recorded of an attempt, for the report of its end.

A generation that was overcome is not a failure of the attempt: the records of its ranks are in `recover/gen-NNN`.
`exits/` and `errors/` are about the last generation, unless the controller gave up after it had moved that too.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.runs.ending.blame import NOTHING, EndFinding
from bigsci_launch.runs.ending.failures import make_failure
from bigsci_launch.runs.ending.records import Ranks
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.generations.failures import rank_failure_text
from bigsci_launch.runs.generations.read import parse_records
from bigsci_launch.runs.generations.records import ENDED_ON_REQUEST, Generation, RankFailure
from bigsci_launch.runs.layout import AttemptDir, read_record

REASONS = {
    "left_early": "left_early",
    "lost_node": "node_failure",
    "hung": "hang",
    "stopped": "hang",
    "asked": "hang",
}
"""Why an attempt ended whose controller gave up after a failure of this kind; after any other, it crashed."""
REPLACED = ("crashed", "left_early", "node_failure", "hang", "unknown", "launch_failed")
"""Reasons that the ranks of the last generation show, and about which the controller knows more."""
MAX_NAMED = 4


def read_survived(attempt: AttemptDir) -> Survived | None:
    """Return what the controller recorded; None if it recorded nothing of the kind."""
    found = parse_records(read_events(attempt.generations))
    return Survived(attempt, found.all, found.gave_up) if found.all or found.gave_up else None


@dataclass(frozen=True, slots=True)
class Survived:
    """The generations of an attempt, the oldest first; none if the controller gave up before the first one."""

    attempt: AttemptDir
    generations: tuple[Generation, ...]
    gave_up: str | None

    @property
    def newest(self) -> Generation | None:
        return self.generations[-1] if self.generations else None

    @property
    def last_cause(self) -> RankFailure | None:
        """What ended the newest generation; None if no failure did."""
        return self.newest.cause if self.newest else None

    @property
    def is_judged(self) -> bool:
        """Whether the controller has recorded what ended the last generation, and began no other one. Ranks without an
        exit record then say nothing: they waited for a generation that did not begin, or were ended with the job."""
        return self.last_cause is not None and self.gave_up is not None

    @property
    def why_given_up(self) -> str | None:
        """Why no further generation began; None if the controller did not give up, or was ended from outside."""
        return None if self.gave_up == ENDED_ON_REQUEST else self.gave_up

    @property
    def sentence(self) -> str | None:
        """`3 generations: rank 5 on n2 died (SIGKILL) in generation 0, node n1 was lost in generation 1`; None if there
        was only one."""
        if len(self.generations) < 2:
            return None
        failed = [each for each in self.generations if each.failures]
        named = [f"{rank_failure_text(each.cause, each, most=0)} in generation {each.number}" for each in failed]
        more = f", and {len(named) - MAX_NAMED} more failures" if len(named) > MAX_NAMED else ""
        return f"{len(self.generations)} generations: {', '.join(named[:MAX_NAMED]) or 'no failure'}{more}"

    def last_ranks(self, ranks: Ranks) -> Ranks:
        """Return the ranks of the last generation, as it left them: earlier ones may have had more."""
        size = self.newest.world_size if self.newest else None
        present = {number: rank for number, rank in ranks.items() if size is None or number < size}
        return self._without_overcome(self._with_archived(present))

    def _with_archived(self, ranks: Ranks) -> Ranks:
        """With the exits and errors of the last generation that failed, if the controller has moved them away before it
        gave up."""
        failed = [each.number for each in self.generations if each.failures]
        if self.why_given_up is None or not failed or any(rank["exit"] or rank["error"] for rank in ranks.values()):
            return ranks
        moved = AttemptDir(self.attempt.generation(failed[-1]))
        return {
            number: {
                **rank,
                "exit": read_record(moved.exit_file(number)),
                "error": read_record(moved.error_file(number)),
            }
            for number, rank in ranks.items()
        }

    def _without_overcome(self, ranks: Ranks) -> Ranks:
        """Without the failures of a generation that was being replaced when the job was told to end. Their records have
        not been moved away yet."""
        if not self.is_judged or self.why_given_up is not None:
            return ranks
        return {
            number: rank if rank["exit"].get("terminated") else {**rank, "exit": {}, "error": {}}
            for number, rank in ranks.items()
        }

    def given_up(self, finding: EndFinding, ranks: Ranks) -> EndFinding:
        """Return why an attempt ended whose controller gave up: its reason is the evidence, and the rank that ended the
        last generation failed first, as far as one is to blame, and the exit code is that of the controller. A rank
        that was fenced had hung, however it was killed."""
        cause = self.last_cause
        if self.why_given_up is None or finding.reason not in REPLACED:
            return finding
        finding = finding._replace(evidence=[f"the controller gave up: {self.why_given_up}", *finding.evidence])
        if cause is None:
            return finding
        reason, rank = REASONS.get(cause.kind, "crashed"), cause.rank
        if rank is None:
            return finding._replace(reason=reason, status_of=None)
        if finding.first is not None and finding.first["rank"] == rank and reason in ("crashed", finding.reason):
            return finding._replace(reason=reason)
        words = rank_failure_text(cause, self.newest, most=None)
        first = make_failure(rank, ranks.get(rank, NOTHING), words, cause.died)
        known = {name: getattr(cause, name) for name in ("node", "signal", "code", "step")}
        first.update({name: value for name, value in known.items() if value is not None})
        return finding._replace(reason=reason, first=first, failed=sorted({rank, *finding.failed}), status_of=None)
