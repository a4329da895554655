"""Does a run start again after an attempt ended? Part of chain.py; pure.

A chain is the starts of a run that nobody asked for after the first. It is bounded by progress, by count and by time. A
start made progress if it reached a step, or left a checkpoint, beyond all starts before it. What is not known is not
"none": a few starts of a program that shows no steps may follow each other, and then the chain stops and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Any

MAX_UNKNOWN = 3
"""Starts in a row whose progress is not known."""
MAX_OUTSIDE = 3
"""Starts in a row that were ended from outside before they made progress."""
MAX_UNSAVED = 3
"""Starts in a row that made steps, but left no newer checkpoint: each repeats the same steps."""
OUTSIDE = ("node_failure", "preempted", "requeued", None)
"""Reasons that say nothing about the program. None: the start left no record of its end, as when its host died."""


class Mark(NamedTuple):
    """The newest checkpoint: its step, None if its name does not say it, and when it was saved (since the epoch)."""

    step: int | None
    time: float


class Chain(NamedTuple):
    """The bounds of a chain."""

    by: str
    max_starts: int
    max_hours: float | None = None
    total_steps: int | None = None
    """Last step of `bsl train`; None for another program."""
    only_preempted: bool = False
    """Whether only a preemption is continued: `slurm.requeue` without `slurm.chain`."""


class Start(NamedTuple):
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


class Progress(NamedTuple):
    """What a start made. `is_made` is None if it is not known; `has_saved`: it left a newer checkpoint."""

    is_made: bool | None
    has_saved: bool
    step: int | None
    """The last step of this start and all before it."""


class Decision(NamedTuple):
    """What happens after a start. `action`: `continue`, `finished` or `stop`; `sentence` says why."""

    action: str
    sentence: str
    progress: str
    """`made`, `none` or `unknown`, of the last start."""
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def decide(chain: Chain, starts: list[Start], now: float, before: Mark | None = None) -> Decision:
    """Return whether a run continues after the last of `starts`. `before` is the checkpoint before the first."""
    last, made = starts[-1], measure(chain, starts, before)
    here = made[-1]
    words = {True: "made", False: "none", None: "unknown"}[here.is_made]

    def answer(action: str, sentence: str) -> Decision:
        return Decision(action, sentence, words, here.step)

    if is_finished(chain, last):
        return answer("finished", "the run is finished" + (f": step {here.step}" if here.step else ""))
    if last.is_cancelled or last.reason == "cancelled":
        who = "`bsl cancel` ended it" if last.is_cancelled else "somebody cancelled the job"
        return answer("stop", f"{who}")
    bound = bound_reached(chain, starts, now) or no_progress(chain, starts, made)
    if bound:
        return answer("stop", bound)
    return answer("continue", f"{ended(last)}; {progress_text(starts, made)}")


def is_finished(chain: Chain, last: Start) -> bool:
    """Whether the run is over. A program that left with 0 before the last step that it prints is not."""
    if chain.total_steps is not None:
        saved = last.checkpoint.step if last.checkpoint else None
        return last.reason == "finished" or (saved or 0) >= chain.total_steps
    is_early = last.total_steps is not None and (last.step or 0) < last.total_steps
    return last.reason == "finished" and not is_early


def bound_reached(chain: Chain, starts: list[Start], now: float) -> str | None:
    """Return why no start may follow, whatever progress was made; None if one may."""
    if len(starts) >= chain.max_starts:
        return f"this was start {len(starts)}, and slurm.chain.max_starts is {chain.max_starts}"
    first = next((start.started for start in starts if start.started is not None), None)
    if chain.max_hours is not None and first is not None and now - first > chain.max_hours * 3600:
        hours = (now - first) / 3600
        return f"the first start was {hours:.3g} hours ago, and slurm.chain.max_hours is {chain.max_hours:g}"
    return None


def measure(chain: Chain, starts: list[Start], before: Mark | None) -> list[Progress]:
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
        found.append(Progress(is_made, has_saved, known or (0 if shows_steps else None)))
    return found


def is_newer(mark: Mark | None, than: Mark | None) -> bool:
    if mark is None or than is None:
        return mark is not None
    if mark.step is not None and than.step is not None:
        return mark.step > than.step
    return mark.time > than.time


def no_progress(chain: Chain, starts: list[Start], made: list[Progress]) -> str | None:
    """Return why the chain stops for want of progress; None if it does not."""
    here = made[-1]
    if here.is_made is None:
        return unknown_text() if count_back(made, lambda each: each.is_made is None) >= MAX_UNKNOWN else None
    if not here.is_made:
        return stalled(starts, made)
    own = [progress for start, progress in zip(starts, made) if start.reason not in OUTSIDE]
    saves = chain.total_steps is not None or any(progress.has_saved for progress in made)
    unsaved = count_back(own, lambda each: not each.has_saved)
    if saves and starts[-1].reason not in OUTSIDE and unsaved >= MAX_UNSAVED:
        return f"{unsaved} starts made steps (up to {here.step}), but none left a newer checkpoint: each repeats them"
    return None


def stalled(starts: list[Start], made: list[Progress]) -> str | None:
    """Return why the chain stops after a start that made no progress; None if it was ended from outside too early."""
    last, step = starts[-1], made[-1].step
    if last.reason in OUTSIDE:
        early = 0
        for start, progress in zip(reversed(starts), reversed(made)):
            if progress.is_made is not False or start.reason not in OUTSIDE:
                break
            early += 1
        if early <= MAX_OUTSIDE:
            return None
        reasons = ", ".join(start.reason or "no record" for start in starts[-early:])
        return f"{early} starts in a row were ended from outside ({reasons}) before they made a step"
    if len(starts) == 1:
        return f"its first start made no step; {ended(last)}"
    return f"no step since the start before (step {step}); {ended(last)}"


def count_back(found: list[Progress], holds: Any) -> int:
    """Return for how many starts, counted from the last, something holds."""
    number = 0
    for each in reversed(found):
        if not holds(each):
            break
        number += 1
    return number


def unknown_text() -> str:
    return (
        f"whether the run makes progress is not known: {MAX_UNKNOWN} starts printed no `iteration N/ M |` line and "
        "left no newer checkpoint in the run directory"
    )


def ended(start: Start) -> str:
    return f"start {start.name} ended: {start.reason}" if start.reason else f"start {start.name} left no record"


def progress_text(starts: list[Start], made: list[Progress]) -> str:
    """Return what the last start made, in half a sentence."""
    here, before = made[-1], (made[-2].step if len(made) > 1 else 0)
    if here.is_made is None:
        number = count_back(made, lambda each: each.is_made is None)
        return f"its progress is not known (start {number} of at most {MAX_UNKNOWN} like that)"
    if not here.is_made:
        return f"it was ended from outside before it made a step (step {here.step})"
    if here.step is None:
        return "it left a newer checkpoint"
    return f"it reached step {here.step}" + (f", from {before}" if before else "")
