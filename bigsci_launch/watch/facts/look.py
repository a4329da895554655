"""One look at the ranks of a job that shows nothing new: what `bsl spy` says, and the evidence that it leaves."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from bigsci_launch.errors import BslError
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.spy.answer import SpyAnswer, answer_from, store_evidence
from bigsci_launch.spy.evidence.stack_classes import merge_stacks
from bigsci_launch.spy.look.collect import collect
from bigsci_launch.spy.look.target import Target, target_of_job, target_of_local_run, target_of_process
from bigsci_launch.spy.taxonomy import HangClass, State
from bigsci_launch.watch.watched import WatchedRun

FRAMES_COMPARED = 3
"""Innermost frames of a stack that say where a rank is; line numbers change with every commit."""


class Keep(Enum):
    """The looks whose evidence is stored."""

    FAILURE = "those that found a failure"
    DOUBT = "those that did not find progress"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Look:
    """The result of a look at the ranks.

    `state` is None if the ranks could not be examined; `sentence` is then the reason. `nodes` are those of the
    suspects, if a node may be the cause. `is_stopped`: the suspects are stopped. `signature` is equal for looks that
    found the ranks in the same places. `bundle` is None if the evidence was not stored. `hang_at` is when ranks that
    sleep until then may be called hung, on this machine's monotonic clock; None if that is not known.
    """

    state: State | None
    sentence: str
    suspects: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    signature: str = ""
    confidence: float = 0.0
    is_stopped: bool = False
    details: tuple[str, ...] = ()
    bundle: Path | None = None
    hang_at: float | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the ranks will not continue without intervention."""
        return self.state is not None and self.state.is_failure

    @property
    def is_moving(self) -> bool:
        """Whether ranks were seen to make progress."""
        return self.state in (State.PROGRESSING, State.SLOW, State.FINISHED)


def take_look(watched: WatchedRun, job: JobInfo, settle_s: float, keep: Keep) -> Look:
    """Look at the ranks of the job for `settle_s` seconds and longer. Never raises: not being able to look is an
    answer."""
    try:
        target = _target(watched, job)
        target = replace(target, request={**target.request, "settle_s": settle_s})
        found = collect(target)
        answer = answer_from(found)
    except BslError as error:
        return Look(None, error.message)
    look = look_of(answer)
    if not (look.is_failure or keep is Keep.ALL or (keep is Keep.DOUBT and not look.is_moving)):
        return look
    folder = target.evidence_folder(time.time())
    try:
        store_evidence(folder, found, answer)
    except BslError as error:
        return replace(look, details=(*look.details, f"the evidence is not stored: {error.message}"))
    return replace(look, bundle=folder)


def _target(watched: WatchedRun, job: JobInfo) -> Target:
    if watched.pid is not None:
        return target_of_process(watched.pid)
    if watched.is_local:
        assert watched.run is not None and watched.attempt is not None
        return target_of_local_run(watched.run, watched.attempt)
    return target_of_job(job, watched.run, watched.attempt)


def look_of(answer: SpyAnswer) -> Look:
    """Return an answer as a watcher keeps it."""
    conclusion, evidence = answer.conclusion, answer.evidence
    suspects = tuple(sorted({suspect.rank for suspect in conclusion.suspects}))
    nodes = {seen.node for seen in evidence.ranks if seen.rank in suspects and seen.node}
    known = conclusion.signature
    reasons = dict.fromkeys(suspect.why for suspect in conclusion.suspects)
    return Look(
        state=conclusion.state,
        sentence=_sentence(answer),
        suspects=suspects,
        nodes=tuple(sorted(nodes)) if may_be_the_node(conclusion.hang_class) else (),
        signature=_signature(answer),
        confidence=conclusion.confidence,
        is_stopped=conclusion.hang_class is HangClass.PROCESS_STOPPED,
        hang_at=None if conclusion.hang_in_s is None else time.monotonic() + conclusion.hang_in_s,
        details=(
            *([f"known hang {known.name}: {known.explanation} {known.remedy}".strip()] if known else []),
            *(why for why in reasons if why not in conclusion.claim),
        ),
    )


def _sentence(answer: SpyAnswer) -> str:
    """Return the claim. If it is of a failure and accuses no rank, the rank to look at first is in front of it, as what
    it is: where to look, and no accusation."""
    conclusion = answer.conclusion
    if not conclusion.state.is_failure or conclusion.suspects or not conclusion.look_first:
        return conclusion.claim
    first = conclusion.look_first[0]
    return f"{answer.evidence.name(first.rank)} is where to look first ({first.why}): {conclusion.claim}"


def may_be_the_node(hang_class: HangClass | None) -> bool:
    """Whether another node may help: not if ranks call other collectives than their peers, as programs make them."""
    return hang_class is not None and not hang_class.is_divergence


def _signature(answer: SpyAnswer) -> str:
    """Return a name for where the ranks are: the class of the hang, and the innermost calls, whatever their lines."""
    hang_class = answer.conclusion.hang_class
    places = {
        tuple((frame.function, Path(frame.file).name) for frame in found.frames[:FRAMES_COMPARED])
        for found in merge_stacks(answer.evidence.ranks)
    }
    if not places:
        return ""
    text = repr((hang_class.value if hang_class else None, sorted(places)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
