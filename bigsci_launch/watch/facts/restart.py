"""Whether the loss jumped when the attempt resumed, and what the weights show of it: one finding, once."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bigsci_launch.checkpoints.around import audit_restart
from bigsci_launch.checkpoints.restart import Restart, find_restart
from bigsci_launch.runs.watching.ledger import RunFinding
from bigsci_launch.watch.watched import WatchedRun

RESTART_STEPS = (1, 5, 20)
"""After how many steps of a restart its loss is compared with that before: a mean over several steps is firmer."""


class RestartWatch:
    """Compares the loss across the restart, as soon as there are steps. `num_steps` counts those that were seen."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._checks = list(RESTART_STEPS)
        self.num_steps = 0

    def findings(self) -> Iterator[RunFinding]:
        """Yield a finding if the loss has jumped, and it was not found before."""
        run, attempt = self._watched.run, self._watched.attempt
        if run is None or attempt is None or not self._checks or self.num_steps < self._checks[0]:
            return
        self._checks = [number for number in self._checks if number > self.num_steps]
        restart = find_restart(run, attempt)
        if restart is not None and restart.is_changed:
            self._checks = []
            yield _restart_finding(restart)


def _restart_finding(restart: Restart) -> RunFinding:
    audit = audit_restart(restart)
    causes = (*restart.causes, *audit.causes)
    sentence = "; ".join((restart.sentence, *causes[:1]))
    details = (*causes[1:], *(f"unknown: {text}" for text in restart.not_known), *filter(None, [audit.unknown]))
    step = restart.jump.step if restart.jump is not None else None
    name = restart.attempt.name
    return RunFinding("restart_spike", f"restart:{name}", sentence, time.time(), name, step, details=details)
