"""Kills a rank of an uneven run (SIGKILL) at a phase of a step or of a recovery, for `uneven_kills.py`.

UNEVEN_KILLS has the kills of a run as JSON, see `Kill` there: `count` says which passage of the phase in `step` it is,
or in the recovery from the kill `after`; for `anywhere`, milliseconds after the step has begun. A rank that dies leaves
a file with the name of the kill in UNEVEN_KILLED, with its generation, so no kill is done twice. UNEVEN_LIFE is the
class that says when a step begins: ranks of DeepSpeed's engine have only that, and the phase `anywhere`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

UNEVEN = "bigsci_launch.train.uneven"
LIFE = os.environ.get("UNEVEN_LIFE", "")
PHASES = {
    "anywhere": (LIFE.rpartition(".")[0], LIFE.rpartition(".")[2] + ".before_step"),
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


class PhaseKills:
    """The kills of a run, in one of its ranks."""

    def __init__(self) -> None:
        self._kills: list[dict[str, Any]] = json.loads(os.environ["UNEVEN_KILLS"])
        self._folder = Path(os.environ["UNEVEN_KILLED"])
        self._step: int | None = None
        self._passed: dict[str, int] = {}

    def stand_at_phases(self) -> None:
        """Wrap the functions once the rank has imported all of them."""
        until = time.monotonic() + WAIT_S
        while not _is_imported() and time.monotonic() < until:
            time.sleep(0.02)
        if time.monotonic() < until:
            self._wrap("anywhere", self._begin_step)
            for phase in {each["phase"] for each in self._kills}:
                self._wrap(phase, functools.partial(self._pass, phase), is_early=phase in EARLY)

    def _wrap(self, phase: str, look: Any, *, is_early: bool = True) -> None:
        module, path = PHASES[phase]
        owner: Any = sys.modules[module]
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_early:
                look(*args)
            result = original(*args, **kwargs)
            if not is_early:
                look(*args)
            return result

        setattr(owner, name, run)

    def _begin_step(self, _life: Any, step: int) -> None:
        self._step, self._passed = step, {}

    def _pass(self, phase: str, *_: Any) -> None:
        for kill in self._kills:
            if kill["phase"] == phase and kill["rank"] == int(os.environ.get("RANK", -1)) and self._is_time(kill):
                passed = self._passed[kill["name"]] = self._passed.get(kill["name"], 0) + 1
                if phase == "anywhere":
                    threading.Timer(kill["count"] / 1e3, self._die, (kill,)).start()
                elif passed == kill["count"]:
                    self._die(kill)

    def _is_time(self, kill: dict[str, Any]) -> bool:
        if kill["after"] is None:
            return bool(self._step == kill["step"])
        first = self._folder / kill["after"]
        return first.exists() and int(first.read_text() or 1 << 30) < _generation()

    def _die(self, kill: dict[str, Any]) -> None:
        try:
            with (self._folder / kill["name"]).open("x") as mark:
                mark.write(str(_generation()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def _is_imported() -> bool:
    module, _, name = LIFE.rpartition(".")
    return hasattr(sys.modules.get(module), name) and (
        UNEVEN not in module or hasattr(sys.modules[module], "_carry_out")
    )


def _generation() -> int:
    return int(os.environ.get("BSL_GENERATION", 0))


if os.environ.get("UNEVEN_KILLS"):
    threading.Thread(target=PhaseKills().stand_at_phases, daemon=True).start()
