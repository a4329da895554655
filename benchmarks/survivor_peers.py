"""Kills ranks of the loop of `survivor_kills.py` under torchft and NVIDIA's in-process restart.

    python benchmarks/survivor_peers.py torchft|nvrx [--seed 0] [--kills 5]

They are not among our dependencies: run it with a Python that has `torchft` or `nvidia-resiliency-ext`. Four gloo ranks
do steps of 0.1 s and more, on this machine. Each time, a rank is killed with kill -9, and the seconds are counted until
every rank that is left has done a step that began after it. With torchft, a new process takes the rank at once, and the
next kill waits until it has done steps. With NVRx, a process that waits takes its place. Time-outs: torchft's defaults,
but 1 s instead of 60 to wait for others; of NVRx, `--heartbeat-timeout` instead of its 30 s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

LOOPS = Path(__file__).parent / "surviving"
RANKS, LIMIT_S, PAUSE_S = 4, 300.0, "0.1"


class PeerRanks:
    """The processes of one job, by the numbers that they were started with."""

    def __init__(self, peer: str, spares: int, heartbeat_timeout_s: float) -> None:
        self._peer, self._folder = peer, Path(tempfile.mkdtemp(prefix="survivor-peer-"))
        size = RANKS if peer == "torchft" else RANKS + spares
        self._environment = {
            **os.environ, "PAUSE_S": PAUSE_S, "ACTIVE": str(RANKS), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()), "LOCAL_WORLD_SIZE": str(size),
            "HEARTBEAT_TIMEOUT_S": str(heartbeat_timeout_s),
        }  # fmt: skip
        self._lighthouse: subprocess.Popen[bytes] | None = None
        if peer == "torchft":
            port = _free_port()
            argv = [Path(sys.executable).with_name("torchft_lighthouse"), "--min_replicas", "1"]
            self._lighthouse = subprocess.Popen(
                [*map(str, argv), "--bind", f"[::]:{port}", "--join_timeout_ms", "1000"]
            )
            self._environment["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        self.processes = {number: self._start(number) for number in range(size)}

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, str(LOOPS / f"with_{self._peer}.py")]
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        with (self._folder / f"{number}.log").open("ab") as log:
            return subprocess.Popen(
                argv, cwd=self._folder, env={**self._environment, **own}, stdout=log, stderr=subprocess.STDOUT
            )

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Return when a process has begun and done its steps."""
        text = (self._folder / f"{number}.log").read_text()
        found = re.findall(r"^step \d+ loss \S+ from (\S+) to (\S+)$", text, re.MULTILINE)
        return [(float(began), float(done)) for began, done in found]

    def active(self) -> list[int]:
        """Return the processes that have done a step lately."""
        now = time.time()
        return [number for number in self.processes if any(now - done < 5 for _, done in self.steps(number)[-1:])]

    def wait(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > until:
                sys.exit(f"the ranks have not come so far in {LIMIT_S:g} s: {self._folder}")
            time.sleep(0.02)

    def injure(self, draw: random.Random) -> float:
        """Kill a rank, and return the seconds until all others have done a step that began after that."""
        self.wait(lambda: len(self.active()) == RANKS)
        time.sleep(1 + draw.random())
        active = self.active()
        victim = draw.choice(active)
        self.processes[victim].send_signal(signal.SIGKILL)
        began = time.time()
        self.processes[victim].wait()
        if self._peer == "torchft":
            self.processes[victim] = self._start(victim)
        else:
            del self.processes[victim]
        rest = [number for number in active if number != victim]
        self.wait(lambda: all(any(start > began for start, _ in self.steps(number)) for number in rest))
        return max(next(done for start, done in self.steps(number) if start > began) for number in rest) - began

    def end(self) -> None:
        for each in (*self.processes.values(), *([self._lighthouse] if self._lighthouse else [])):
            each.kill()
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills ranks of a loop under torchft or NVRx.")
    parser.add_argument("peer", choices=("torchft", "nvrx"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0)
    options = parser.parse_args()
    ranks, draw = PeerRanks(options.peer, options.kills, options.heartbeat_timeout), random.Random(options.seed)
    try:
        seconds = []
        for _ in range(options.kills):
            seconds.append(ranks.injure(draw))
            print(f"{options.peer}: {seconds[-1]:.2f} s", flush=True)
    finally:
        ranks.end()
    print(f"{options.peer}: p50 {median(seconds):.2f} s, most {max(seconds):.2f} s, of {len(seconds)}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
