"""The records of generations as the controller writes them: `recover/generations.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.topology import Topology


class GenerationRecords:
    """Appends what a controller would. `clock` is its time, seconds since the epoch."""

    def __init__(self, attempt: AttemptDir, clock: float | None = None) -> None:
        self.attempt = attempt
        self.clock = time.time() if clock is None else clock
        self.number = -1

    def write(self, event: str, **fields: Any) -> None:
        self.attempt.recover.mkdir(parents=True, exist_ok=True)
        record = {"time": self.clock, "event": event, "generation": self.number, **fields}
        with self.attempt.generations.open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def begins(self, topology: Topology, nodes: Sequence[str], spares: Sequence[str] = ()) -> None:
        """Begin the next generation; `nodes` has the node of each rank."""
        self.number += 1
        members = [{"rank": rank, "slot": rank, "node": node, "host": node} for rank, node in enumerate(nodes)]
        self.write(
            "began",
            world_size=topology.world_size,
            topology=topology.as_dict(),
            members=members,
            spares=[{"slot": len(nodes) + at, "node": node} for at, node in enumerate(spares)],
            master=f"{nodes[0]}:20000",
        )

    def comes_back(self, step: int, source: str, *, joined: float, restored: float, first: float, **more: Any) -> None:
        """All ranks join, restore the state after `step`, and finish the next one."""
        self.write("phase", phase="joined", seconds=joined)
        self.write("phase", phase="restored", seconds=restored, step=step, source=source, why=more.get("why"))
        self.write("phase", phase="first_step", seconds=first, step=step + 1)

    def fails(self, kind: str, rank: int | None, node: str, *, noticed_s: float | None = 0.1, **fields: Any) -> None:
        died = None if noticed_s is None else self.clock - noticed_s
        common = {"code": None, "signal": None, "step": None, "words": None, "slot": rank}
        self.write("failed", **{**common, **fields}, kind=kind, rank=rank, node=node, died=died, noticed=self.clock)

    def ends(self, step: int | None, seconds: float, killed: Sequence[int] = ()) -> None:
        """All ranks have left, `seconds` after the failure."""
        self.clock += seconds
        self.write("ended", step=step, seconds=seconds, killed=list(killed))
