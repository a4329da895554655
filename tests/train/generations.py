"""Leads real ranks through generations, as agents and the controller of `survive` do, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.recover.generation import Membership
from bigsci_launch.recover.generation import Slot as Place
from bigsci_launch.recover.members import WantedLayout, choose_members
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology
from tests.support.ports import find_port

from .conftest import Attempt, make_config
from .rank_processes import RankProcess, StartRank

SLOT = Path(__file__).parent / "programs" / "slot.py"
GRACE_S = 10.0


@dataclass
class Slot:
    """A process that may be a rank, and its agent's end of the socket."""

    process: RankProcess
    connection: socket.socket
    log: Path
    rank: int | None = None
    words: list[dict[str, Any]] = field(default_factory=list)
    held: bytes = b""
    is_connected: bool = True

    @property
    def number(self) -> int:
        return int(self.log.stem.removeprefix("p"))

    def hang_up(self) -> None:
        """Close the agent's end of the socket."""
        self.is_connected = False
        self.connection.close()

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self.connection.recv(65536)
        self.is_connected = bool(data)
        *lines, self.held = (self.held + data).split(b"\n")
        self.words += [{**json.loads(line), "time": time.time()} for line in lines]

    def said(self, word: str, generation: int | None = None) -> list[dict[str, Any]]:
        return [
            each
            for each in self.words
            if each["word"] == word and (generation is None or each.get("generation") == generation)
        ]


class Generations:
    """A run of `survive`, led by the test: of the trainer, or of a loop with `Survivor`."""

    def __init__(
        self,
        start_rank: StartRank,
        folder: Path,
        dataset: Path,
        topology: str,
        loop: Path | None = None,
        **sections: Any,
    ) -> None:
        self._start_rank, self._loop = start_rank, loop
        self.topology = Topology.parse(topology)
        self.run = RunDir(folder)
        self.folder: AttemptDir = self.run.attempt(self.run.next_attempt_name())
        self.folder.make()
        config = make_config(self.topology, dataset, {"survive": True, **sections})
        self.folder.config.write_text(dump_resolved(config))
        self._sockets = Path(tempfile.mkdtemp(prefix="bsl-slot-"))
        self._nodes: list[str] = []
        self._before: Membership | None = None
        self.number = -1
        self.stuck: list[int] = []
        self.slots: list[Slot] = []
        self.retired: list[Slot] = []

    @property
    def attempt(self) -> Attempt:
        """The records, as those of an attempt that the launcher started."""
        return Attempt(self.run, self.folder, tuple(slot.process for slot in self.members))

    @property
    def members(self) -> list[Slot]:
        return sorted((slot for slot in self.slots if slot.rank is not None), key=lambda slot: slot.rank or 0)

    def rank(self, number: int) -> Slot:
        return next(slot for slot in self.slots if slot.rank == number)

    def start(self, count: int, suffering: Mapping[int, str] | None = None) -> None:
        """Start processes that wait. `suffering` tells, by their numbers from 0, what happens to them and when."""
        for number in range(count):
            name = f"p{len(self.slots) + len(self.retired)}"
            path, log = self._sockets / name, self.folder.path / f"{name}.log"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                environment = {
                    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
                    "LOCAL_RANK": "0",
                    "BSL_RUN_DIR": str(self.run.path),
                    "BSL_ATTEMPT": self.folder.name,
                    **({"LOOP": str(self._loop)} if self._loop else {}),
                    **({"SUFFER": suffering[number]} if suffering and number in suffering else {}),
                }
                process = self._start_rank([str(SLOT), str(path)], environment, log)
                listener.settimeout(60)
                self.slots.append(Slot(process, listener.accept()[0], log))

    def fill_up(self, topology: str) -> None:
        """Begin a generation in which all ranks of a topology have processes, new ones where they are missing."""
        self.start(Topology.parse(topology).world_size - len(self.slots))
        self.begin(topology)

    def until(self, condition: Callable[[], bool], limit_s: float = 180) -> None:
        """Read what the processes say until `condition()` is true."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not within {limit_s} s:\n{self.story()}"
            connected = {slot.connection: slot for slot in self.slots if slot.is_connected}
            for found in select.select(list(connected), [], [], 0.05)[0]:
                connected[found].read()

    def begin(self, topology: str | None = None, nodes: Sequence[str] | None = None) -> None:
        """Begin a generation with the slots that wait; ranks that have survived keep their numbers.

        Where replicas must leave, the controller's rule says who stays.
        """
        self.topology = Topology.parse(topology) if topology else self.topology
        size = self.topology.world_size
        self._nodes = list(nodes or self._nodes or ())
        self.until(lambda: len([slot for slot in self.slots if slot.said("warm")]) >= size, 180)
        if self._before is not None and self.topology.dp < self._before.topology.dp:
            self._let_replicas_leave(self._before)
        else:
            self._fill(size)
        self._before = Membership(self.topology, tuple(self._place(slot) for slot in self.members))
        self.number += 1
        port = find_port()
        for slot in self.members:
            slot.tell(
                do="begin",
                generation=self.number,
                rank=slot.rank,
                world_size=size,
                topology={"tp": self.topology.tp, "pp": self.topology.pp, "dp": self.topology.dp},
                local_world_size=size,
                node_rank=0,
                nodes=self._nodes or ["node"] * size,
                master_addr="127.0.0.1",
                master_port=port,
            )

    def _fill(self, size: int) -> None:
        taken = {slot.rank for slot in self.slots if slot.rank is not None and slot.rank < size}
        free = [rank for rank in range(size) if rank not in taken]
        for slot in self.slots:
            if slot.rank is None or slot.rank >= size:
                slot.rank = free.pop(0) if free else None
        assert not free, self.story()

    def _let_replicas_leave(self, before: Membership) -> None:
        numbers = {slot.number for slot in self.slots}
        left = {place.number: place for place in before.slots if place.number in numbers}
        line = choose_members(WantedLayout(before.topology, shrink=True), left, before)
        assert isinstance(line, Membership), line
        assert line.topology == self.topology
        for slot in self.slots:
            slot.rank = line.rank_of(slot.number)

    def _place(self, slot: Slot) -> Place:
        node = self._nodes[slot.rank or 0] if self._nodes else "node"
        return Place(slot.number, node, host=node, local_rank=0, runner_pid=slot.process.pid)

    def kill(self, *ranks: int) -> None:
        """Kill ranks, and wait until they are gone."""
        killed = [self.rank(number) for number in ranks]
        for slot in killed:
            slot.process.send_signal(signal.SIGKILL)
        for slot in killed:
            slot.process.wait(180)
        self._retire(killed)

    def _retire(self, gone: Sequence[Slot]) -> None:
        for slot in gone:
            self.slots.remove(slot)
            self.retired.append(slot)
            slot.hang_up()

    def end(self, why: str = "test") -> list[int]:
        """End the generation: survivors leave, or are killed and returned."""
        members = self.members
        for slot in members:
            slot.tell(do="end", generation=self.number, why=why, grace_s=GRACE_S)
        ended = time.time()

        def is_late() -> bool:
            progress = [each["time"] for slot in members for each in slot.said("leaving")]
            return time.time() > max([ended, *progress]) + GRACE_S

        self.until(lambda: all(slot.said("left", self.number) for slot in members) or is_late(), 4 * GRACE_S)
        stuck = [slot.rank for slot in members if slot.rank is not None and not slot.said("left", self.number)]
        self.kill(*stuck)
        self.stuck += stuck
        return stuck

    def replace(self, *ranks: int) -> None:
        """Kill ranks, end the generation, and begin the next one with new processes in their places."""
        self.kill(*ranks)
        self.recover()

    def recover(self, suffering: Mapping[int, str] | None = None) -> None:
        """End the generation, and begin the next one with new processes in the places of those that are gone."""
        self.end()
        self.start(self.topology.world_size - len(self.slots), suffering)
        self.begin()

    def lead(self, *suffering: Mapping[int, str], limit_s: float = 180) -> None:
        """Recover from all that happens until every rank has ended with 0.

        The processes that replace others for the first time suffer what the first of `suffering` says, and so on.
        """
        end = time.monotonic() + limit_s
        fates = list(suffering)
        while True:
            assert time.monotonic() < end, f"not within {limit_s} s:\n{self.story()}"
            assert self.number < 8, f"too many generations:\n{self.story()}"
            self.until(lambda: bool(self._gone()) or self._is_done() or self._is_lost(), end - time.monotonic())
            if self._is_done():
                return
            gone = self._gone()
            assert not any(slot.said("final") for slot in gone), self.story()
            self._retire(gone)
            self.recover(fates.pop(0) if fates and gone else None)

    def _gone(self) -> list[Slot]:
        return [slot for slot in self.members if slot.process.poll() is not None and not self._has_finished(slot)]

    def _has_finished(self, slot: Slot) -> bool:
        """Whether a process has ended well: with 0, and after it has said so."""
        return slot.process.poll() == 0 and bool(slot.said("finished"))

    def _is_done(self) -> bool:
        return all(self._has_finished(slot) for slot in self.members)

    def _is_lost(self) -> bool:
        """Whether ranks have said for a while that a peer is gone, and none is known to be."""
        lost = [word["time"] for slot in self.members for word in slot.said("lost", self.number)]
        return bool(lost) and time.time() - min(lost) > 2.0

    def step(self) -> int:
        """The last step that a rank has said it has done in this generation."""
        return max((each["step"] for slot in self.members for each in slot.said("stepped", self.number)), default=0)

    def until_step(self, step: int, limit_s: float = 180) -> None:
        """Wait until some rank records that it is in a step after `step`."""
        ranks = range(self.topology.world_size)
        beats = lambda rank: self.attempt.events(rank, "heartbeat")  # noqa: E731
        self.until(lambda: any(each["step"] > step for rank in ranks for each in beats(rank)[-1:]), limit_s)

    def finish(self, limit_s: float = 180) -> list[int]:
        """Wait for the exit codes of all members."""
        end = time.monotonic() + limit_s
        self.until(lambda: all(slot.process.poll() is not None for slot in self.members), limit_s)
        return [slot.process.wait(max(0.1, end - time.monotonic())) for slot in self.members]

    def story(self) -> str:
        """What every process has said and printed."""
        lines = []
        for slot in (*self.retired, *self.slots):
            words = [{key: value for key, value in word.items() if key != "time"} for word in slot.words]
            lines.append(f"--- rank {slot.rank}, {slot.log.name}: {words[-8:]}\n{slot.log.read_text()[-2500:]}")
        return "\n".join(lines)

    def close(self) -> None:
        for slot in self.slots:
            slot.process.kill()
            slot.connection.close()
        for slot in self.slots:
            slot.process.wait(180)
        shutil.rmtree(self._sockets, ignore_errors=True)
