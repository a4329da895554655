"""One look at a run that takes as long as it needs: what seems silent is watched for two steps first.

Ages of files prove little on a login node, whose clock may be off by minutes. What this process sees change does.
"""

from __future__ import annotations

import time
from dataclasses import replace

from bigsci_launch.runs.watching.beat import Health
from bigsci_launch.units import format_age
from bigsci_launch.watch.loop import Glance, Watcher

LEAST_S, MOST_S = 10.0, 300.0
"""How long a run that shows nothing new is watched: twice as long as its steps usually take, within these."""
PAUSE_S = 1.0


def look_once(watcher: Watcher) -> Glance:
    """Return what is known of the run. If nothing new is seen and nothing is found, it is not known to be healthy.

    What other watchers have found may be over: it counts if nothing is seen to move.
    """
    began = time.monotonic()
    glance = watcher.tick(serves=False)
    while glance.is_running and not glance.has_own:
        waited = time.monotonic() - began
        if glance.silence.lasts_s < waited - PAUSE_S:
            return glance  # something new has come
        if waited >= min(max(2 * (glance.silence.usual_s or 0.0), LEAST_S), MOST_S):
            return _unmoved(glance if glance.look is not None else watcher.look(), waited)
        time.sleep(PAUSE_S)
        glance = watcher.tick(serves=False)
    return glance


def _unmoved(glance: Glance, waited: float) -> Glance:
    if glance.health is Health.FINDING or (glance.look is not None and glance.look.is_moving):
        return glance
    seen = f": {glance.look.sentence}" if glance.look is not None else ""
    sentence = f"nothing new was seen in {format_age(waited)}{seen}"
    return replace(glance, health=Health.BLIND, sentence=sentence, blind=(*glance.blind, sentence))
