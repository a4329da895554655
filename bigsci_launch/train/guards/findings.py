"""What ranks have found: gathered on every rank, announced by one, and the end of the run. So all ranks act alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bigsci_launch.errors import GuardError
from bigsci_launch.train.guards.copies import Violation, merge
from bigsci_launch.train.guards.interval import IntervalChoice
from bigsci_launch.train.guards.places import Places
from bigsci_launch.train.guards.records import GuardRecords
from bigsci_launch.train.rank.collective import gather

_SHOWN = 20


class Findings:
    """What one rank does with findings. The rank that `announces` prints and records them.

    `hint` says what is known to be sound when the run stops.
    """

    def __init__(
        self, places: Places, records: GuardRecords, *, announces: bool, stops: bool, hint: Callable[[], str]
    ) -> None:
        self._places, self._records = places, records
        self._announces, self._stops, self._hint = announces, stops, hint

    def name_by(self, places: Places) -> None:
        """Name ranks by other places than those that the run was submitted with."""
        self._places = places

    def gather(self, found: Sequence[Violation]) -> list[Violation]:
        """Return what all ranks have found, one finding per check and tensor; a collective call."""
        return merge(violation for each in gather([*found]) for violation in each)

    def describe(self, violation: Violation) -> str:
        """`data-parallel copies: head.weight on rank 1 (dp1 pp0 tp0): differs from the copy on rank 0`."""
        return f"{violation.check}: {violation.tensor} on {self._places.describe(violation.ranks)}: {violation.text}"

    def act(self, step: int, violations: Sequence[Violation]) -> None:
        """Announce what was found, causes first, and stop the run if it is to be stopped; the same on all ranks.

        Raises:
            GuardError: something was found, and it is to stop the run.
        """
        sentences = [self.describe(violation) for violation in violations]
        if self._announces:
            self._announce(step, violations, sentences)
        if self._stops and violations:
            more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
            text, first = f"step {step}: {sentences[0]}{more}", violations[0]
            raise GuardError(text, hint=self._hint(), accused=first.accused, suspects=first.ranks)

    def say_interval(self, choice: IntervalChoice) -> None:
        """Print and record how often `interval: auto` checks from now on."""
        if self._announces:
            print(f"guards: {choice}", flush=True)
            self._records.event("guards", **choice.record())

    def _announce(self, step: int, violations: Sequence[Violation], sentences: Sequence[str]) -> None:
        for violation, sentence in zip(violations, sentences, strict=True):
            coordinates = [self._places.coordinate(rank).as_dict() for rank in violation.ranks]
            fields = {"check": violation.check, "tensor": violation.tensor, "coordinates": coordinates}
            self._records.event("guard", **fields, accused=list(violation.accused), text=sentence)
        print(*(f"guard: step {step}: {sentence}" for sentence in sentences[:_SHOWN]), sep="\n", flush=True)


def find_load_differences(saved: Mapping[str, Any], loaded: Mapping[str, Any], rank: int) -> Iterator[Violation]:
    """Find what a load did not restore as it was saved: digests and numbers, by name."""
    for name in dict.fromkeys([*saved, *loaded]):
        before, now = saved.get(name), loaded.get(name)
        if before != now:
            text = f"{'differ' if name.startswith('random states') else 'differs'} from what was saved"
            if before is None or now is None:
                text = "was saved and not loaded" if now is None else "was not saved"
            elif isinstance(before, (int, float)) or name == "step count":
                text = f"is {now}, but {before} was saved"
            yield Violation("load", name, (rank,), text)
