"""The least of a controller that a slot needs: it listens, takes down what slots say, and passes on orders."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bigsci_launch
from bigsci_launch.door import Door
from tests.support.waiting import wait_until

RUNNER = Path(bigsci_launch.__file__).parent / "assets" / "diagnostics" / "rank_runner.py"
TOKEN = "secret"
Message = dict[str, Any]


class ToyController:
    """Everything that one slot says, in order; and the runner of the slot."""

    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.said: list[Message] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._door = Door([self._server], TOKEN, 4096)
        self._connection: socket.socket | None = None
        self._is_silent = False
        self.stopped_at = 0.0
        self.runner: subprocess.Popen[str] | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def start_slot(self, *options: str, program: list[str], **slurm: str) -> None:
        """Start the runner of slot 1; with variables of Slurm, that of a task."""
        argv = [sys.executable, "-I", "-S", str(RUNNER), "--attempt-dir", str(self.attempt), "--topology", "dp=2"]
        argv += ["--ranks-per-node", "2", *([] if slurm else ["--slot", "1"]), *options, "--", *program]
        host, port = self._server.getsockname()
        address = {"BSL_CONTROLLER": f"{host}:{port}", "BSL_CONTROLLER_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
        script = {"MASTER_ADDR": "where-the-script-runs", "MASTER_PORT": "1"}
        self.runner = subprocess.Popen(
            argv, env={**os.environ, **script, **address, **slurm}, stderr=subprocess.PIPE, text=True
        )
        self.wait_for("hello")

    def order(self, what: str, **fields: Any) -> None:
        assert self._connection is not None
        self._connection.sendall(json.dumps({"do": what, **fields}).encode() + b"\n")

    def begin(self, generation: int, rank: int = 1, world_size: int = 2) -> None:
        self.order(
            "begin",
            generation=generation,
            rank=rank,
            world_size=world_size,
            topology={"tp": 1, "pp": 1, "dp": world_size},
            local_world_size=world_size,
            node_rank=0,
            nodes=["here"] * world_size,
            master_addr="127.0.0.1",
            master_port=12345,
        )

    def wait_for(self, what: str, after: int = 0, timeout_s: float = 180, **fields: Any) -> Message:
        """Return the first message with these fields that is not among the first `after`."""

        def found() -> list[Message]:
            wanted = {"say": what, **fields}
            return [each for each in self.said[after:] if all(each.get(key) == wanted[key] for key in wanted)]

        wait_until(lambda: bool(found()), timeout_s, evidence=lambda: f"no {what} {fields} in {self.said}")
        return found()[0]

    def fall_silent(self) -> None:
        """Say nothing from now on, and read nothing, as a node that is gone."""
        self._is_silent = True

    def close(self) -> None:
        for each in (self._connection, self._server):
            if each is not None:
                each.close()
        if self.runner is not None:
            if self.runner.poll() is None:
                self.runner.send_signal(signal.SIGKILL)
            self.runner.wait()
            assert self.runner.stderr is not None
            self.runner.stderr.close()

    def record(self, folder: str, rank: int = 1) -> Message:
        return json.loads((self.attempt / folder / f"rank-{rank:04d}.json").read_text())

    def serving(self, generation: int, rank: int = 1) -> Message:
        """Return the record of the process that serves a rank in a generation, once it is there."""

        def found() -> bool:
            path = self.attempt / "pids" / f"rank-{rank:04d}.json"
            return path.exists() and json.loads(path.read_text())["generation"] == generation

        wait_until(found)
        return self.record("pids", rank)

    def log(self, name: str = "rank-0001") -> list[str]:
        path = self.attempt / "logs" / f"{name}.log"
        return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []

    def _serve(self) -> None:
        try:
            while not (guests := self._door.poll(1)):
                continue
            self._connection = guests[0].link
            self._connection.settimeout(1)
            self.said.append({"say": "hello", **json.loads(guests[0].words)})
            threading.Thread(target=self._heartbeat, daemon=True).start()
            rest = b""
            while not self._is_silent:
                try:
                    chunk = self._connection.recv(65536)
                except TimeoutError:
                    continue
                *lines, rest = (rest + chunk).split(b"\n")
                self.said += [message for line in lines if (message := json.loads(line))["say"] != "beat"]
                if not chunk:
                    return
        except (OSError, ValueError):
            return

    def _heartbeat(self) -> None:
        try:
            while not self._is_silent:
                self.order("beat")
                time.sleep(0.5)
        except OSError:
            return


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
