"""The connection of a rank process to the agent of its slot: JSON lines over a Unix socket that it has inherited.

A thread reads it. When the generation that this process takes part in is over, the thread ends the communication in
which the process may be blocked, and does so again until the process has left.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bigsci_launch.safe_files import parse_json
from bigsci_launch.topology import Topology

VARIABLE = "BSL_SLOT_FD"
SWEEP_S = 0.03
"""Seconds between attempts to end blocked communication: connections that were being made may have been missed."""


_LOOK_S, _CONNECT_S = 0.02, 2.0


class GenerationOver(Exception):
    """The generation that this process takes part in is over."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation as the controller begins it on this process."""

    generation: int
    rank: int
    topology: Topology
    local_world_size: int
    node_rank: int
    nodes: Sequence[str]
    master_addr: str
    master_port: int

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Begin:
        """Return what a `begin` object says."""
        plain = {each.name: message[each.name] for each in fields(cls)}
        return cls(**{**plain, "topology": Topology(**message["topology"]), "nodes": tuple(message["nodes"])})

    @property
    def environment(self) -> dict[str, str]:
        """The variables that launchers set for a rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.topology.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "BSL_GENERATION": str(self.generation),
        }


class Channel:
    """The connection. `release` is called, from its thread, to end the communication of a generation that is over."""

    def __init__(self, descriptor: int, release: Callable[[], None]) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._release = release
        self._changed = threading.Condition()
        self._begins: deque[Begin] = deque()
        self._over = -1
        self._present: int | None = None
        threading.Thread(target=self._read, name="bsl-slot", daemon=True).start()

    def say(self, word: str, **fields: Any) -> None:
        """Say a word to the agent. If it is gone, the reading thread ends the process."""
        line = json.dumps({"word": word, **fields}).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            os._exit(1)

    def wait_for_begin(self) -> Begin:
        """Return the next generation that this process takes part in, and enter it."""
        with self._changed:
            while True:
                while self._begins:
                    begin = self._begins.popleft()
                    if begin.generation > self._over:
                        self._present = begin.generation
                        return begin
                self._changed.wait()

    def is_over(self, grace_s: float = 0.0) -> bool:
        """Return whether the present generation is over, or is within `grace_s`."""
        with self._changed:
            return self._changed.wait_for(self._is_over, grace_s)

    def _is_over(self) -> bool:
        return self._present is not None and self._present <= self._over

    def require_present(self) -> None:
        """Return if the present generation still runs.

        Raises:
            GenerationOver: it does not.
        """
        if self.is_over():
            raise GenerationOver(f"generation {self._present} is over")

    def wait_for_end(self) -> None:
        """Return once the present generation is over."""
        with self._changed:
            self._changed.wait_for(self._is_over)

    def leave(self) -> None:
        """Note that this process no longer communicates in the present generation; nothing is ended after that."""
        with self._changed:
            self._present = None

    def _read(self) -> None:
        held = b""
        while True:
            timeout = SWEEP_S if self.is_over() else None
            if select.select([self._socket], [], [], timeout)[0]:
                data = self._receive()
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    self._take(parse_json(line))
            with self._changed:
                if self.is_over():
                    self._release()

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            # The runner is gone: no other process would end this one, or know of it.
            os._exit(1)
        return data

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["do"] == "begin":
                self._begins.append(Begin.of_message(message))
            elif message["do"] == "end":
                self._over = max(self._over, message["generation"])
            self._changed.notify_all()


def wait_for_store(begin: Begin, channel: Channel) -> None:
    """Return once rank 0 listens. torch's own attempt to connect could not be interrupted.

    Raises:
        GenerationOver: the generation ended before that.
    """
    if begin.rank == 0:
        return
    while True:
        channel.require_present()
        try:
            socket.create_connection((begin.master_addr, begin.master_port), _CONNECT_S).close()
            return
        except OSError:
            time.sleep(_LOOK_S)
