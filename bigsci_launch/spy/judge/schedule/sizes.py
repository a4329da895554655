"""Whether the members of a group may give different sizes to an operation: they may if they have done so before, and
the collective has ended."""

from __future__ import annotations

from collections.abc import Iterable

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder


def ended_unevenly(recorders: Iterable[Recorder], operation: str, but: tuple[str, int]) -> bool:
    """Whether a collective of this operation has ended on ranks that gave it different sizes, in any group. `but`
    (group, number) is the one in question, which may have ended in an error."""
    sizes_of: dict[tuple[str, int], str] = {}
    for recorder in recorders:
        for group, number, sizes in _ended(recorder, operation):
            if (group, number) != but and sizes_of.setdefault((group, number), sizes) != sizes:
                return True
    return False


def _ended(recorder: Recorder, operation: str) -> Iterable[tuple[str, int, str]]:
    """Yield (group, number, sizes) of every such collective of a rank that has ended, the newest first."""
    back: dict[str, int] = {}
    unfinished = frozenset(recorder.open_positions)
    for position in range(len(recorder.stream) - 1, -1, -1):
        token = recorder.tokens[recorder.stream[position]]
        later = back.get(token.group, 0)
        back[token.group] = later + 1
        if token.operation == operation and position not in unfinished:
            yield token.group, recorder.last_sequence[token.group] - later, token.sizes
