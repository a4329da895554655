"""What is known of one generation from its begin to its end. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigsci_launch.recover.generation import FailureKind, Formation, GenerationFailure, Instant
from bigsci_launch.recover.orders import RankEnded, RanksSeen
from bigsci_launch.recover.phases import Phases

STOPPED = "stopped by SIGSTOP"
"""How the words of a runner begin that has killed its rank because something had stopped it."""
KILL_AFTER_S = 5.0
"""After the grace: the runner is told to kill a rank if it has not said that it did."""
DROP_AFTER_S = 15.0
"""After the grace: a seat whose rank cannot be killed is given up."""
FINAL_S = 10.0
"""How long a rank may take to exit after it has said that its error is final."""
LOOK_S = 3.0
"""How long the next generation may wait for the last words of this one, if the disk is slow."""


class Running:
    """The state of one generation."""

    def __init__(self, generation: Formation, began: Instant) -> None:
        self.generation = generation
        self.began = began
        self.ranks = {seat.number: rank for rank, seat in enumerate(generation.seats)}
        """The rank in each seat."""
        self.inside = set(range(len(generation.seats)))
        """Ranks whose processes have neither ended nor left."""
        self.done: set[int] = set()
        """Ranks that have ended with 0."""
        self.first_done: Instant | None = None
        self.phases = Phases(len(generation.seats))
        self.lost_peers: list[tuple[Instant, str]] = []
        """When ranks said that a peer is gone, and how."""
        self.finals: dict[int, float] = {}
        """When ranks said that their error is final, by rank."""
        self.failures: list[GenerationFailure] = []
        self.final: RankEnded | None = None
        self.killed: set[int] = set()
        """Ranks that were killed because they did not leave."""
        self.ended: Instant | None = None
        """When the last rank had left."""
        self.is_looked_at = False
        self.seen: RanksSeen | None = None

    @property
    def number(self) -> int:
        return self.generation.number

    @property
    def has_finished(self) -> bool:
        """Whether every rank has ended with 0."""
        return len(self.done) == len(self.ranks)

    def seat(self, rank: int) -> int:
        return self.generation.seats[rank].number

    def failure(
        self, kind: FailureKind, now: Instant, rank: int, event: RankEnded | None = None, words: str | None = None
    ) -> GenerationFailure:
        """Return the failure of a rank, with what the end of its process says about it."""
        seat = self.generation.seats[rank]
        failure = GenerationFailure(
            kind, now.time, rank, seat.number, seat.node, step=self.phases.step_of(rank), words=words
        )
        if event is None:
            return failure
        was_stopped = kind == "died" and (event.words or "").startswith(STOPPED)
        return replace(
            failure,
            kind="stopped" if was_stopped else kind,
            code=event.code,
            signal=event.signal,
            died=event.time,
            words=words or event.words,
            status=event.status,
        )

    def ranks_with_words(self) -> tuple[int, ...]:
        """Return the ranks that may have said why they failed: those that no other process has killed."""
        own = (failure for failure in self.failures if failure.kind == "died" and failure.signal in (None, "SIGABRT"))
        return tuple(sorted({failure.rank for failure in own if failure.rank is not None}))

    def failures_with_words(self) -> list[GenerationFailure]:
        """Return the failures, with the last words that were found on disk for those without any."""
        words = self.seen.words if self.seen else {}
        return [
            replace(failure, words=failure.words or (words.get(failure.rank) if failure.rank is not None else None))
            for failure in self.failures
        ]

    def blame_nobody(self, kind: FailureKind, now: Instant, words: str) -> GenerationFailure:
        return GenerationFailure(kind, now.time, step=self.phases.step, words=words)

    def note_left_alone(self, rank: int, now: Instant) -> None:
        """Note that a rank has left the generation before it was told to."""
        self.inside.discard(rank)
        self.lost_peers.append((now, f"rank {rank} has left on its own"))

    def note_ended_while_ending(self, rank: int, event: RankEnded, now: Instant, *, stays: bool) -> None:
        """Note the end of a process after the generation had failed. `stays`: it should have left without ending."""
        fenced = next((one for one in self.failures if one.rank == rank and one.kind in ("hung", "stopped")), None)
        if event.is_final and self.final is None:
            self.final = event
        if fenced is not None:
            ended = self.failure(fenced.kind, now, rank, event, fenced.words)
            self.failures[self.failures.index(fenced)] = replace(ended, noticed=fenced.noticed)
        elif event.was_told and event.signal == "SIGKILL":
            self.killed.add(rank)
            self.failures += [self.failure("stuck", now, rank, event)] if stays else []
        elif not event.is_good and (stays or not event.was_told):
            self.failures.append(self.failure("died", now, rank, event))

    def kill_message(self, why: str) -> dict[str, Any]:
        return {"do": "kill", "generation": self.number, "why": why}
