"""Exchanges what ranks have found, tells it, and stops the run; all ranks get all findings, so they act alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import GuardError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.copies import Violation, by_cause, describe, merge
from bigsci_launch.train.rank_events import RankReport

_SHOWN = 20
_KEPT = 10


class Judge:
    """The judge of one rank. It remembers what the guards have found since the run was started or loaded."""

    def __init__(self, config: RunConfig, topology: Topology, rank: int, report: RankReport) -> None:
        self._stops, self._topology, self._report = config.guards.action == "stop", topology, report
        at = topology.coordinate(rank)
        self._tells = (at.pp_rank, at.tp_rank, at.dp_rank) == (topology.pp - 1, 0, 0)
        self._findings: list[str] = []
        self._began = 0
        self._passed: int | None = None
        self._saved: list[int] = []

    def begin(self, step: int) -> None:
        """Note that this attempt trains on from the state after `step`, as it was loaded, or 0."""
        self._began = step

    def gather(self, found: Sequence[Violation]) -> list[Violation]:
        """Return what all ranks have found; a collective call."""
        everywhere: list[Any] = [None] * self._topology.world_size
        dist.all_gather_object(everywhere, list(found))
        return merge(violation for each in everywhere for violation in each)

    def judge(self, step: int, found: Sequence[Violation]) -> None:
        """Gather what all ranks have found and act on it; a collective call.

        Raises:
            GuardError: something was found, and `guards.action` is to stop.
        """
        if violations := self.gather(found):
            self.act(step, by_cause(violations))

    def act(self, step: int, violations: Sequence[Violation]) -> None:
        """Tell what was found, causes first, and stop the run if it is to be stopped; the same on all ranks.

        Raises:
            GuardError: `guards.action` is to stop.
        """
        sentences = [describe(violation, self._topology) for violation in violations]
        self._findings += [f"step {step}: {sentence}" for sentence in sentences]
        if self._tells:
            self._tell(step, violations, sentences)
        if self._stops:
            more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
            raise GuardError(
                f"step {step}: {sentences[0]}{more}",
                hint=self._hint(),
                accused=violations[0].accused,
                suspects=violations[0].ranks,
            )

    def _tell(self, step: int, violations: Sequence[Violation], sentences: Sequence[str]) -> None:
        for violation, sentence in zip(violations, sentences, strict=True):
            coordinates = [self._topology.coordinate(rank).as_dict() for rank in violation.ranks]
            fields = {"check": violation.check, "tensor": violation.tensor, "coordinates": coordinates}
            self._report.event("guard", **fields, accused=list(violation.accused), text=sentence)
        print(*(f"guard: step {step}: {sentence}" for sentence in sentences[:_SHOWN]), sep="\n", flush=True)

    def _hint(self) -> str:
        return f"{checked_words(self._passed, self._saved, self._began)}; with guards.action: warn the run continues"

    def passed(self, step: int) -> None:
        """Note that a whole check after `step` found nothing."""
        self._passed = step

    def saved(self, step: int) -> None:
        """Note that the state after `step` has been saved."""
        self._saved.append(step)

    def skipped(self, step: int, **fields: Any) -> None:
        """Record that the optimizer skipped `step`."""
        if self._tells:
            self._report.event("skipped", skipped_step=step, **fields)

    def health(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of the state after `step` says of the guards.

        `passed` is None if the gradients of that step were not checked.
        """
        passed = False if self._findings else (True if self._passed == step else None)
        return {"passed": passed, "step": step, "findings": self._findings[:_KEPT]}


def checked_words(passed: int | None, saved: Sequence[int], began: int) -> str:
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
