"""The other watchers of a run: a dead one is itself a finding, because people rely on it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.beat import LEAST_SILENCE_S, MISSED, Beat, agent_of, read_beats
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.units import format_age


class OtherWatchers:
    """Signs of life as this watcher has seen them change: clocks of two machines may be minutes apart."""

    def __init__(self, run: RunDir, own_name: str) -> None:
        self._run = run
        self._own_name = own_name
        self._seen: dict[str, tuple[float, float]] = {}

    def findings(self, attempt: str, now: float) -> Iterator[RunFinding]:
        """Yield a finding for the agent of this attempt if it is dead. `now` is the watcher's monotonic clock."""
        for beat in read_beats(self._run):
            if beat.name == self._own_name or beat.name != agent_of(attempt) or beat.ended:
                continue
            if (silent_s := self._dead_for(beat, now)) is not None:
                sentence = f"the watcher {beat.name} on {beat.host} is dead: no sign of life for {format_age(silent_s)}"
                yield RunFinding("watcher_dead", f"watcher_dead:{attempt}", sentence, time.time(), attempt)

    def _dead_for(self, beat: Beat, now: float) -> float | None:
        """Return for how long a watcher has been dead; None if it lives, or nobody can tell yet."""
        moment, since = self._seen.get(beat.name, (None, now))
        if moment != beat.time:
            self._seen[beat.name] = (beat.time, now)
            since = now
        if beat.is_here:
            return max(0.0, time.time() - beat.time) if beat.is_dead(time.time()) else None
        silent_s = now - since
        return silent_s if silent_s > max(LEAST_SILENCE_S, MISSED * beat.every_s) else None
