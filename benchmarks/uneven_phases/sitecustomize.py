"""Kills a rank of an uneven run (SIGKILL) at a phase of its step or of a recovery, for `uneven_kills.py`.

UNEVEN_KILLS has the kills of a run, separated by commas: GENERATION:RANK:PHASE:COUNT, where COUNT says which passage of
the phase in that generation it is; for `anywhere`, milliseconds after the first forward pass.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from typing import Any

UNEVEN = "bigsci_launch.train.uneven"
PHASES = {
    "anywhere": (f"{UNEVEN}.stage", "UnevenStage.forward"),
    "forward": (f"{UNEVEN}.stage", "UnevenStage.forward"),
    "backward": ("torch.distributed.pipelining.stage", "PipelineStage.backward_one_chunk"),
    "reduce": (f"{UNEVEN}.reduction", "_sum_together"),
    # The last thing before the sum over all ranks, and the first after it.
    "barrier": (f"{UNEVEN}.engine", "square_norm"),
    "apply": (f"{UNEVEN}.engine", "UnevenEngine.take_step"),
    "applied": (f"{UNEVEN}.optimizer", "MasterAdamW.take"),
    "meeting": (f"{UNEVEN}.life", "UnevenLife._meet"),
    "copy": (f"{UNEVEN}.life", "_carry_out"),
}
EARLY = ("apply", "meeting", "copy")
"""Phases at whose beginning the rank dies; in the others it dies at the end."""
WAIT_S = 600.0


def stand_at_phases() -> None:
    """Wrap the functions once the rank has imported all of them."""
    kills = [kill.split(":") for kill in os.environ["UNEVEN_KILLS"].split(",")]
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if f"{UNEVEN}.life" in sys.modules and hasattr(sys.modules[f"{UNEVEN}.life"], "_carry_out"):
            for phase in {phase for _, _, phase, _ in kills}:
                _stand_at(
                    phase,
                    {(int(number), int(rank)): int(count) for number, rank, each, count in kills if each == phase},
                )
            return
        time.sleep(0.02)


def _stand_at(phase: str, kills: dict[tuple[int, int], int]) -> None:
    module, path = PHASES[phase]
    owner: Any = sys.modules[module]
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original, passed = getattr(owner, name), dict.fromkeys(kills, 0)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        here = int(os.environ.get("BSL_GENERATION", 0)), int(os.environ.get("RANK", -1))
        is_due = here in kills and _passes(phase, passed, here, kills[here])
        if is_due and phase in EARLY:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, run)


def _passes(phase: str, passed: dict[tuple[int, int], int], here: tuple[int, int], count: int) -> bool:
    """Count a passage, and return whether it is the one."""
    passed[here] += 1
    if phase != "anywhere":
        return passed[here] == count
    if passed[here] == 1:
        threading.Timer(count / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return False


if os.environ.get("UNEVEN_KILLS"):
    threading.Thread(target=stand_at_phases, daemon=True).start()
