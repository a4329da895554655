"""What is known of one generation from its begin to its end. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from bigsci_launch.recover.generation import FailureKind, GenerationFailure, Instant, RankGroup, cause_first
from bigsci_launch.recover.members import WantedLayout, replicas_for
from bigsci_launch.recover.orders import RankEnded, RanksSeen
from bigsci_launch.recover.phases import Phases
from bigsci_launch.runs.control.request import Request

STOPPED = "stopped by SIGSTOP"
"""How the words of a runner begin that has killed its rank because something had stopped it."""
KILL_AFTER_S = 5.0
"""After the grace: the runner is asked to kill a rank if it has not reported that it did."""
DROP_AFTER_S = 15.0
"""After the grace: a slot whose rank cannot be killed is given up."""
FINAL_S = 10.0
"""How long a rank may take to exit after it has said that its error is final."""
LOOK_S = 3.0
"""How long the next generation may wait for the last words of this one, if the disk is slow."""


class JobStage(Enum):
    """What the controller is about."""

    GATHER = "gather"
    RUN = "run"
    END = "end"
    LEAVE = "leave"


class Running:
    """The state of one generation."""

    def __init__(self, generation: RankGroup, began: Instant) -> None:
        self.generation = generation
        self.began = began
        self.ranks = {slot.number: rank for rank, slot in enumerate(generation.slots)}
        """The rank in each slot."""
        self.inside = set(range(len(generation.slots)))
        """Ranks whose processes have neither ended nor left."""
        self.done: dict[int, GenerationFailure] = {}
        """Ranks that have ended with 0, or after they had finished, in that order, each with the failure that it is if
        others still needed it."""
        self.finished: set[int] = set()
        """Ranks that have said that the training is over for them. Programs that say nothing are not among them."""
        self.first_done: Instant | None = None
        self.phases = Phases(len(generation.slots))
        self.lost_peers: list[tuple[Instant, str]] = []
        """When ranks said that a peer is gone, and how."""
        self.finals: dict[int, float] = {}
        """When ranks said that their error is final, by rank."""
        self.progressed = began.clock
        """When a rank last said that it makes progress with leaving."""
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
        """Whether every rank is done."""
        return len(self.done) == len(self.ranks)

    def newest_step(self, *, stays: bool) -> int | None:
        """Return the newest step of the generation, as far as it is known. `stays`: ranks say it; otherwise it was
        looked for when the generation had ended."""
        return self.phases.step if stays else (self.seen.step if self.seen else None)

    def has_stepped(self, *, stays: bool) -> bool:
        """Whether a step was finished, by every rank if they say it."""
        return self.phases.has_stepped if stays else self.newest_step(stays=False) is not None

    def slot(self, rank: int) -> int:
        return self.generation.slots[rank].number

    def failure(
        self, kind: FailureKind, now: Instant, rank: int, event: RankEnded | None = None, words: str | None = None
    ) -> GenerationFailure:
        """Return the failure of a rank, with what the end of its process says about it."""
        slot = self.generation.slots[rank]
        failure = GenerationFailure(
            kind,
            rank,
            slot.node,
            step=self.phases.step_of(rank),
            words=words,
            noticed=now.time,
            slot=slot.number,
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

    def judged_failures(self, lives: Callable[[str | None], bool], *, stays: bool) -> list[GenerationFailure]:
        """Return the failures, the cause first, as all that has happened shows them. `lives` says whether a node does;
        `stays`: ranks say when they have finished.

        A runner is lost before the last one of its node is. Where every failure is only about lost peers, the cause is
        the rank that was the first to leave with 0. And where a guard ended them, it is one that the guard accuses.
        """
        known = [
            replace(each, kind="lost_node") if each.kind == "lost_runner" and not lives(each.node) else each
            for each in self.failures_with_words()
        ]
        found = cause_first(known)
        if found and self.done and not stays and all(each.is_about_others for each in found):
            first = next(iter(self.done.values()))
            return [replace(first, status=found[0].status), *found]
        return self._accused_first(found)

    def _accused_first(self, found: list[GenerationFailure]) -> list[GenerationFailure]:
        """Return the failures, those of ranks that a guard accuses first, if a guard ended the first one.

        All ranks raise what the guard has found, and which of them ends first says nothing. An accused rank may have
        been killed before it did. Where the guard accuses none, no rank is the cause.
        """
        raised = found[0] if found else None
        whom = self.seen.accused.get(raised.rank) if raised and raised.rank is not None and self.seen else None
        if raised is None or whom is None:
            return found
        accused = [rank for rank in whom if rank < len(self.generation.slots)]
        if not accused:
            return [replace(raised, rank=None, slot=None, node=None), *found]
        first = [self._accused_failure(rank, raised, found) for rank in accused]
        return [*first, *(each for each in found if each.rank not in accused)]

    def _accused_failure(
        self, rank: int, raised: GenerationFailure, found: list[GenerationFailure]
    ) -> GenerationFailure:
        """Return the failure of an accused rank, with what the guard has found."""
        slot = self.generation.slots[rank]
        unknown = replace(raised, rank=rank, slot=slot.number, node=slot.node, code=None, signal=None, died=None)
        own = next((each for each in found if each.rank == rank), unknown)
        return replace(own, kind="died" if own.kind == "stuck" else own.kind, words=raised.words)

    def blame_nobody(self, kind: FailureKind, now: Instant, words: str) -> GenerationFailure:
        return GenerationFailure(kind, step=self.phases.step, words=words, noticed=now.time)

    def note_word(self, rank: int, word: str, clock: float) -> None:
        """Note that a rank has finished, that its error is final, or that it makes progress with leaving."""
        if word == "finished":
            self.finished.add(rank)
        elif word == "final":
            self.finals.setdefault(rank, clock)
        else:
            self.progressed = clock

    def note_left_alone(self, rank: int, now: Instant) -> None:
        """Note that a rank has left the generation before it was asked to."""
        self.inside.discard(rank)
        self.lost_peers.append((now, f"rank {rank} left on its own"))

    def note_ended_while_ending(self, rank: int, event: RankEnded, now: Instant, *, stays: bool) -> None:
        """Note the end of a process after the generation had failed. `stays`: it should have left without ending."""
        fenced = next((one for one in self.failures if one.rank == rank and one.kind in ("hung", "stopped")), None)
        if event.is_final and self.final is None:
            self.final = event
        if fenced is not None:
            ended = self.failure(fenced.kind, now, rank, event, fenced.words)
            self.failures[self.failures.index(fenced)] = replace(ended, noticed=fenced.noticed)
        elif event.was_requested and event.signal == "SIGKILL":
            self.killed.add(rank)
            self.failures += [self.failure("stuck", now, rank, event)] if stays else []
        elif event.is_good and not event.was_requested:
            self.failures.append(self.failure("left_early", now, rank, event))
        elif not event.is_good and (stays or not event.was_requested):
            self.failures.append(self.failure("died", now, rank, event))

    def why_last(self, cause: GenerationFailure) -> str | None:
        """Return why there can be no generation after this one, which `cause` ended; None if there can."""
        if self.final is not None:
            return f"a new generation would hit the same error: {cause}"
        if cause.kind == "left_early" and self.done:
            return f"{cause}, which lost the connection to it"
        if not self.done:
            return None
        first = min(self.done)
        how = "finished" if first in self.finished else "ended with exit code 0"
        return f"rank {first} had already {how}: {cause}"

    def would_grow(self, wanted: WantedLayout, spares: int) -> bool:
        """Whether more replicas fit with so many free slots."""
        dp = self.generation.topology.dp
        more = replicas_for(wanted, len(self.inside) + spares) if dp < wanted.topology.dp else dp
        return isinstance(more, int) and more > dp

    def takes_end(self, rank: int, event: RankEnded, stage: JobStage, *, stays: bool) -> bool:
        """Whether the end of a process is a good one, which is then noted by its rank. `stays`: ranks say when they
        have finished. One that has not has left in the middle, even with 0; one that has is done, however and by
        whomever it was ended, unless its generation ends for another reason."""
        has_finished = stays and rank in self.finished
        if has_finished and stage is not JobStage.END:
            return True
        if stage is not JobStage.LEAVE and (event.was_requested or (stays and not has_finished)):
            return False
        return event.is_good

    def kill_message(self, why: str) -> dict[str, Any]:
        return {"do": "kill", "generation": self.number, "why": why}


def why_refused(request: Request, run: Running | None, stage: JobStage) -> str | None:
    """Return why a request comes too early or too late; None if it is for the generation that runs."""
    if run is not None and stage is JobStage.RUN and request.generation == run.number:
        return None
    newest = f"generation {run.number}" if run else "no generation"
    state = {JobStage.RUN: "runs", JobStage.END: "is ending", JobStage.LEAVE: "was the last"}
    return f"it is for generation {request.generation}, but {newest} {state.get(stage, 'has ended')}"
