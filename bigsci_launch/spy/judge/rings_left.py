"""What the rings that ranks have left show of a run that has ended: it supports the answer why it ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.last_calls import find_in_rings, places_of
from bigsci_launch.spy.judge.rules.failures import find_resized, words_of_resized

MOST_FACTS = 4


def what_rings_show(evidence: Evidence) -> tuple[str, ...]:
    """Return what does not match in the last calls, else where the ranks were; then whose calls are not known.

    Nothing if no ring was kept, as after a good end.
    """
    rings = [seen.rank for seen in evidence.ranks if seen.ring is not None]
    if not rings:
        return ()
    facts = [*_other_sizes(evidence), *(fact.words for fact in find_in_rings(evidence))]
    without = [seen.rank for seen in evidence.ranks if seen.ring is None and not (seen.exit and seen.exit.is_clean)]
    unknown = [f"the last calls of {evidence.names(without)} are not known: no ring was kept"] if without else []
    return (*(facts[:MOST_FACTS] or [places_of(evidence, rings)]), *unknown)


def _other_sizes(evidence: Evidence) -> Iterator[str]:
    """Yield the ranks whose last collective had another size than always, if a backend aborted a rank."""
    if any(seen.exit is not None and seen.exit.signal == "SIGABRT" for seen in evidence.ranks):
        for departure in find_resized(evidence):
            yield f"{evidence.name(departure.rank)} {words_of_resized(departure)}, as its ring shows"
