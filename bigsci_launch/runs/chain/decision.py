"""Does a run start again after an attempt ended? Pure.

A chain is the automatic starts of a run after the first. It is bounded by progress, by count and by time. A
start made progress if it reached a step, or left a checkpoint, beyond all starts before it. What is not known is not
"none": a few starts of a program that shows no steps may follow each other, and then the chain stops and reports that.

A user's request goes before progress: after `exit` and `kill`, no start follows; after `restart`, one does. A hang that
a watcher ended is tried again from the same step, because the next start has other nodes, but not for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bigsci_launch.runs.chain.records import Action, ChainRecord, MadeProgress
from bigsci_launch.runs.watching.ended import RESTART, EndedBy

MAX_UNKNOWN = 3
"""Starts in a row whose progress is not known."""
MAX_OUTSIDE = 3
"""Starts in a row that were ended from outside before they made progress."""
MAX_AT_STEP = 3
"""Starts in a row that ended at the same step, the last of them because a watcher ended a hang."""
MAX_UNSAVED = 3
"""Starts in a row that made steps, but left no newer checkpoint: each repeats the same steps."""
OUTSIDE = ("node_failure", "preempted", "requeued", None)
"""Reasons that say nothing about the program. None: the start left no record of its end, as when its host died."""

PLANNED = ("stopped", "time_limit")
"""Reasons of starts that ended because their time was over, or because a person asked."""


class Mark(NamedTuple):
    """The newest checkpoint: its step, None if its name does not say it, and when it was saved (since the epoch)."""

    step: int | None
    time: float


class ChainStart(NamedTuple):
    """What is known of one start."""

    name: str
    reason: str | None
    """As in exit.json; None if it left none."""
    step: int | None
    """The last step that it made; 0: none; None: its program shows no steps."""
    checkpoint: Mark | None
    """The newest checkpoint after it."""
    started: float | None = None
    total_steps: int | None = None
    """The last step of the run, as its program prints it."""
    is_cancelled: bool = False
    ended_by: EndedBy | None = None

    @property
    def was_requested(self) -> bool:
        """Whether a person asked that this start ends and the next one begins."""
        return self.ended_by is not None and self.ended_by.act == RESTART

    @property
    def is_ended_hang(self) -> bool:
        """Whether a watcher ended a hang, and the records of the ranks say nothing else."""
        return self.ended_by is not None and self.ended_by.is_hang and self.reason == "hang"


class StartProgress(NamedTuple):
    """What a start made. `is_made` is None if it is not known; `has_saved`: it left a newer checkpoint."""

    is_made: bool | None
    has_saved: bool
    step: int | None
    """The last step of this start and all before it."""


class ChainDecision(NamedTuple):
    """What happens after a start, and why."""

    action: Action
    sentence: str
    progress: MadeProgress
    """Of the last start."""
    step: int | None


def decide(chain: ChainRecord, starts: list[ChainStart], now: float, before: Mark | None = None) -> ChainDecision:
    """Return whether a run continues after the last of `starts`. `before` is the checkpoint before the first."""
    last, made = starts[-1], measure(chain, starts, before)
    here = made[-1]
    words: MadeProgress = "unknown" if here.is_made is None else "made" if here.is_made else "none"

    def answer(action: Action, sentence: str) -> ChainDecision:
        return ChainDecision(action, sentence, words, here.step)

    if is_finished(chain, last):
        return answer("finished", "the run is finished" + (f": step {here.step}" if here.step else ""))
    if last.is_cancelled:
        return answer("stop", "`bsl cancel` ended it")
    if last.ended_by is not None and not last.ended_by.continues:
        return answer("stop", last.ended_by.sentence)
    if last.reason == "cancelled" and not last.was_requested:
        return answer("stop", "the job was cancelled")
    bound = bound_reached(chain, starts, now)
    bound = bound or (None if last.was_requested else no_progress(chain, starts, made))
    if bound:
        return answer("stop", bound)
    if last.was_requested and last.ended_by is not None:
        return answer("continue", last.ended_by.sentence)
    return answer("continue", f"{ended(last)}; {progress_text(starts, made)}")


def is_finished(chain: ChainRecord, last: ChainStart) -> bool:
    """Whether the run is over. A program that left with 0 before the last step that it prints is not."""
    if chain.total_steps is not None:
        saved = last.checkpoint.step if last.checkpoint else None
        return last.reason == "finished" or (saved or 0) >= chain.total_steps
    if last.total_steps is None:
        return last.reason == "finished"
    return last.reason in ("finished", "stopped") and (last.step or 0) >= last.total_steps


def bound_reached(chain: ChainRecord, starts: list[ChainStart], now: float) -> str | None:
    """Return why no start may follow, whatever progress was made; None if one may."""
    if len(starts) >= chain.max_starts:
        return f"this was start {len(starts)}, and slurm.chain.max_starts is {chain.max_starts}"
    first = next((start.started for start in starts if start.started is not None), None)
    if chain.max_hours is not None and first is not None and now - first > chain.max_hours * 3600:
        hours = (now - first) / 3600
        return f"the first start was {hours:.3g} hours ago, and slurm.chain.max_hours is {chain.max_hours:g}"
    return None


def measure(chain: ChainRecord, starts: list[ChainStart], before: Mark | None) -> list[StartProgress]:
    """Return what each start made. A program that has shown steps once, and shows none now, made none."""
    shows_steps = chain.total_steps is not None or any(start.step is not None for start in starts)
    reached, mark, found = 0, before, []
    for start in starts:
        step = 0 if start.step is None and shows_steps else start.step
        has_saved = is_newer(start.checkpoint, mark)
        is_made = True if has_saved else None if step is None else step > reached
        if start.reason == "launch_failed":
            is_made = False
        reached, mark = max(reached, step or 0), start.checkpoint or mark
        known = max(reached, (mark.step or 0) if mark else 0)
        found.append(StartProgress(is_made, has_saved, known or (0 if shows_steps else None)))
    return found


def is_newer(mark: Mark | None, than: Mark | None) -> bool:
    if mark is None or than is None:
        return mark is not None
    if mark.step is not None and than.step is not None:
        return mark.step > than.step
    return mark.time > than.time


def no_progress(chain: ChainRecord, starts: list[ChainStart], made: list[StartProgress]) -> str | None:
    """Return why the chain stops for want of progress; None if it does not."""
    here = made[-1]
    if here.is_made is None:
        return unknown_text() if num_unknown(starts, made) >= MAX_UNKNOWN else None
    if not here.is_made:
        return stalled(starts, made)
    own = [
        each
        for start, each in zip(starts, made, strict=True)
        if start.reason not in OUTSIDE and not start.was_requested
    ]
    saves = chain.total_steps is not None or any(progress.has_saved for progress in made)
    unsaved = count_back(own, lambda each: not each.has_saved)
    if saves and starts[-1].reason not in OUTSIDE and unsaved >= MAX_UNSAVED:
        return f"{unsaved} starts made steps (up to {here.step}), but left no newer checkpoint: each repeats the same"
    return None


def stalled(starts: list[ChainStart], made: list[StartProgress]) -> str | None:
    """Return why the chain stops after a start that made no progress; None if it was ended from outside too early."""
    last, step = starts[-1], made[-1].step
    if last.is_ended_hang:
        at = starts_at_step(starts, made)
        return f"{len(at)} starts ended {at_step(step)}: {reasons_text(at)}" if len(at) >= MAX_AT_STEP else None
    if last.reason in OUTSIDE:
        early = 0
        for start, progress in zip(reversed(starts), reversed(made), strict=True):
            if progress.is_made is not False or start.reason not in OUTSIDE:
                break
            early += 1
        if early <= MAX_OUTSIDE:
            return None
        return (
            f"{early} starts in a row were stopped externally ({reasons_of(starts[-early:])}) before completing a step"
        )
    if len(starts) == 1:
        return f"its first start completed no step; {ended(last)}"
    return f"no progress since the previous start (step {step}); {ended(last)}"


def starts_at_step(starts: list[ChainStart], made: list[StartProgress]) -> list[ChainStart]:
    """Return the starts that failed where the last one did: from the one that made the last progress on.

    One that stopped there as planned, or was taken off its nodes, did not fail there.
    """
    behind = count_back(made, lambda each: each.is_made is False)
    return [start for start in starts[-behind - 1 :] if start.reason not in (*OUTSIDE, *PLANNED)]


def at_step(step: int | None) -> str:
    return f"at step {step}" if step else "before completing a step"


def reasons_of(starts: list[ChainStart]) -> str:
    """`preempted, no record`."""
    return ", ".join(start.reason or "no record" for start in starts)


def reasons_text(starts: list[ChainStart]) -> str:
    """`hang: no step for 62 s`, where all reasons are one, else all of them; with the message of the last watcher."""
    same = len({start.reason for start in starts}) == 1
    why = starts[-1].ended_by.why if starts[-1].ended_by else ""
    return (str(starts[-1].reason) if same else reasons_of(starts)) + (f": {why}" if why else "")


def num_unknown(starts: list[ChainStart], made: list[StartProgress]) -> int:
    """Return for how many starts in a row, up to the last, progress is not known. A person's restarts do not count."""
    counted = [each for start, each in zip(starts, made, strict=True) if not start.was_requested]
    return count_back(counted, lambda each: each.is_made is None)


def count_back(found: list[StartProgress], holds: Callable[[StartProgress], bool]) -> int:
    """Return for how many starts, counted from the last, something holds."""
    number = 0
    for each in reversed(found):
        if not holds(each):
            break
        number += 1
    return number


def unknown_text() -> str:
    return (
        f"progress of the run is unknown: {MAX_UNKNOWN} starts printed no `iteration N/ M |` line and "
        "left no newer checkpoint in the run directory"
    )


def ended(start: ChainStart) -> str:
    return f"start {start.name} ended: {start.reason}" if start.reason else f"start {start.name} left no record"


def progress_text(starts: list[ChainStart], made: list[StartProgress]) -> str:
    """Return what the last start made, in half a sentence."""
    here, before = made[-1], (made[-2].step if len(made) > 1 else 0)
    if here.is_made is None:
        return f"its progress is unknown (start {num_unknown(starts, made)} of at most {MAX_UNKNOWN} like that)"
    if not here.is_made and starts[-1].is_ended_hang:
        where = f"no step beyond {here.step}" if here.step else "it completed no step"
        return f"{where} (end {len(starts_at_step(starts, made))} of at most {MAX_AT_STEP} there)"
    if not here.is_made:
        return f"it was stopped externally before completing a step (step {here.step})"
    if here.step is None:
        return "it left a newer checkpoint"
    return f"it reached step {here.step}" + (f", from {before}" if before else "")
