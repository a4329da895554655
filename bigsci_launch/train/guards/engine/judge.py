"""What `bsl train` does with findings: it remembers them, and says which checkpoints are sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import Violation, by_cause
from bigsci_launch.train.guards.findings import Findings
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.rank.events import RankReport

_KEPT = 10


class Judge(Findings):
    """The judge of one rank. It remembers what the guards have found since the run was started or loaded."""

    def __init__(self, config: RunConfig, topology: Topology, rank: int, report: RankReport) -> None:
        first_of_last = rank == topology.rank_at(pp=topology.pp - 1)
        stops, places = config.guards.action == "stop", Places.of_topology(topology, rank)
        super().__init__(places, report, announces=first_of_last, stops=stops, hint=self._say_what_is_sound)
        self._found: list[str] = []
        self._began = 0
        self._passed: int | None = None
        self._saved: list[int] = []

    def begin(self, step: int) -> None:
        """Note that this attempt trains on from the state after `step`, as it was loaded, or 0."""
        self._began = step

    def judge(self, step: int, found: Sequence[Violation]) -> None:
        """Gather what all ranks have found and act on it; a collective call.

        Raises:
            GuardError: something was found, and `guards.action` is to stop.
        """
        if violations := self.gather(found):
            self.act(step, by_cause(violations))

    def act(self, step: int, violations: Sequence[Violation]) -> None:
        """Remember and announce what was found, and stop the run if it is to be stopped; the same on all ranks.

        Raises:
            GuardError: something was found, and `guards.action` is to stop.
        """
        self._found += [f"step {step}: {self.describe(violation)}" for violation in violations]
        super().act(step, violations)

    def _say_what_is_sound(self) -> str:
        return f"{checked_text(self._passed, self._saved, self._began)}; with guards.action: warn the run continues"

    def passed(self, step: int) -> None:
        """Note that a whole check after `step` found nothing."""
        self._passed = step

    def saved(self, step: int) -> None:
        """Note that the state after `step` has been saved."""
        self._saved.append(step)

    def skipped(self, step: int, **fields: Any) -> None:
        """Record that the optimizer skipped `step`."""
        if self._announces:
            self._records.event("skipped", skipped_step=step, **fields)

    def health(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of the state after `step` says of the guards.

        `passed` is None if the gradients of that step were not checked.
        """
        passed = False if self._found else (True if self._passed == step else None)
        return {"passed": passed, "step": step, "findings": self._found[:_KEPT]}


def checked_text(passed: int | None, saved: Sequence[int], began: int) -> str:
    """Return what is known to be sound: `passed` is the last checked step, `saved` are the steps saved.

    The attempt `began` with the state after that step.
    """
    known = (
        f"no step was checked since this attempt began after step {began}"
        if passed is None
        else f"the last check that passed was after step {passed}"
    )
    suspect = [step for step in saved if passed is None or step > passed]
    if not suspect:
        return f"{known}, and nothing has been saved since"
    return f"{known}; {checkpoint_tag(suspect[0])} is the first suspect checkpoint: resume from one before it"
