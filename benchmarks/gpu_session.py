"""What one card shows of `bsl` in ten minutes; `benchmarks/gpu_session.sh` starts it.

    python benchmarks/gpu_session.py OUT [--only PHASE ...] [--tiny]

The phases run in the order of their worth, each in a process of its own and within its own limit, all within 9.5
minutes. Each leaves `OUT/PHASE.json` and `OUT/PHASE.log`, which are complete at any moment. `OUT/session.json` and the
table on stdout say what became of each phase: `passed`, `failed` (a check did not hold), `crashed`, `cut short` (its
limit, or that of the session) or `not begun`. The exit code is 0 if all passed. Without a GPU, and with `--tiny`, the
sizes are those of a test of this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from on_gpu.card import TINY

from bigsci_launch.safe_files import write_file

LIMIT_S = 570.0
LEAVE_S = 3.0
WITHOUT_CARD = 3.0
"""How many times longer a phase may take in tiny sizes: the limits are a card's, and a CPU may have other work."""
"""How long a phase has to end its ranks after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One module of `on_gpu`. Those in `along` run at the same time: what they show is no time."""

    name: str
    limit_s: float
    along: tuple[str, ...] = ()


PHASES = (
    Phase("speed", 150),
    Phase("peer", 75),
    Phase("tests", 130, along=("memory", "hangs")),
    Phase("memory", 130),
    Phase("hangs", 130),
    Phase("micro_batches", 110),
    Phase("survive", 90),
    Phase("cost", 90),
    Phase("kernels", 100),
)
"""In the order of their worth; a phase that runs along with an earlier one begins with it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a phase."""

    phase: str
    state: str
    why: str
    seconds: float


class Running:
    """The process of a phase, and its two files."""

    def __init__(self, phase: Phase, out: Path, limit_s: float) -> None:
        self.phase, self._json, self._log = phase, out / f"{phase.name}.json", out / f"{phase.name}.log"
        self._json.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._until = self._began + min(phase.limit_s, limit_s)
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", f"on_gpu.{phase.name}", str(self._json)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> Ended:
        """Wait for the end or the limit, and write into the phase's JSON what became of it."""
        is_late = False
        try:
            self._process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            self.stop()
        seconds = time.monotonic() - self._began
        document = self._document()
        if document["state"] == "running":
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
            late = f"after {seconds:.0f} s; the last line was: {lines[-1][:200]}"
            crash = f"exit code {self._process.returncode}: {lines[-1][:200]}"
            document |= {"state": "cut short", "why": late} if is_late else {"state": "crashed", "why": crash}
        document["seconds"] = round(seconds, 1)
        write_file(self._json, json.dumps(document, indent=1) + "\n")
        return Ended(self.phase.name, document["state"], document["why"], round(seconds, 1))

    def stop(self) -> None:
        """End the processes of the phase, in whatever state they are."""
        for number, grace_s in ((signal.SIGTERM, LEAVE_S), (signal.SIGKILL, 0.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s + 0.1)

    def _document(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._json.read_text())
        except (OSError, ValueError):
            found = {"phase": self.phase.name, "state": "running", "checks": [], "rows": []}
        return found


def run_session(out: Path, phases: Sequence[Phase]) -> list[Ended]:
    """Run the phases one after the other, and write `session.json` after each."""
    until = time.monotonic() + LIMIT_S
    out.mkdir(parents=True, exist_ok=True)
    ended: dict[str, Ended] = {}
    for phase in phases:
        left = until - time.monotonic()
        if phase.name in ended:
            continue
        if left < 5:
            ended[phase.name] = Ended(phase.name, "not begun", "the time of the session was used up", 0.0)
            continue
        along = [each for each in phases if each.name in phase.along and each.name not in ended]
        running = [Running(each, out, left) for each in (phase, *along)]
        try:
            ended |= {each.phase.name: each.end() for each in running}
        finally:
            for each in running:
                each.stop()
        write_file(out / "session.json", json.dumps([asdict(each) for each in ended.values()], indent=1) + "\n")
    return list(ended.values())


def main() -> None:
    names = [each.name for each in PHASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the JSON and log of each phase")
    parser.add_argument("--only", nargs="+", metavar="PHASE", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--tiny", action="store_true", help="the sizes of a CPU, to see whether everything starts")
    options = parser.parse_args()
    if options.tiny:
        os.environ[TINY] = "1"
    longer = WITHOUT_CARD if options.tiny else 1.0
    phases = [replace(each, limit_s=longer * each.limit_s) for each in PHASES if each.name in options.only]
    ended = run_session(options.out, phases)
    for each in ended:
        print(f"{each.phase:14} {each.state:10} {each.seconds:6.1f} s  {each.why}")
    sys.exit(any(each.state != "passed" for each in ended))


if __name__ == "__main__":
    main()
