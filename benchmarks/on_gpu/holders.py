"""Which processes hold memory of the card, looked at again and again."""

from __future__ import annotations

import subprocess
import threading
import time

QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits")
LOOK_S = 0.25


class Holders:
    """Looks until `close`. `seen` has the last moment at which a process held memory, and how many MiB at most."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}
        self.looks = 0
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def held_s(self, pid: int, since: float) -> float | None:
        """Return how long after a moment a process still held memory; None if it was never seen."""
        return max(0.0, self.seen[pid][0] - since) if pid in self.seen else None

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            moment = time.time()
            try:
                done = subprocess.run(QUERY, capture_output=True, text=True, timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                continue
            self.looks += done.returncode == 0
            for line in done.stdout.splitlines():
                self._note(line, moment)

    def _note(self, line: str, moment: float) -> None:
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            mib = float(used) if used.strip().replace(".", "").isdigit() else 0.0
            most = self.seen.get(int(pid), (0.0, 0.0))[1]
            self.seen[int(pid)] = moment, max(most, mib)
