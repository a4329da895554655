"""What a rank was doing at a look, from its stack: waiting for other ranks, or at work in a phase of the step. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bigsci_launch.printable import one_line
from bigsci_launch.slow.straggler import StepPhase
from bigsci_launch.spy.evidence.known_code import (
    DATA_FETCHING_FILES,
    DATA_LOADER_FILES,
    POINT_TO_POINT,
    bare_name,
    is_backward_engine,
    is_installed,
    phase_of,
)
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, is_idle
from bigsci_launch.spy.taxonomy import HangClass

PHASE_OF_CLASS = {
    HangClass.SAVE_IN_PROGRESS: StepPhase.SAVE,
    HangClass.BARRIER_MEANT: StepPhase.EVALUATION,
    HangClass.PREPARES_ALONE: StepPhase.DATA,
}
_FRAME = re.compile(r"(.*?) \((.*):(\d+)\)")
_COLLECTS = re.compile(r"\bgc\.collect\(")
_WAITS = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(")
"""Calls without a frame of their own that wait for other ranks, or for a device that does."""
_DATA_NAMES = re.compile(r"(^|_)(get|next|load|read|fetch)_\w*batch|^__getitem__$|collate", re.IGNORECASE)
_OPTIMIZER_NAMES = re.compile(r"optim|clip_grad|zero_grad", re.IGNORECASE)
_OPTIMIZER_FILE = re.compile(r"/optim/|/optimizer")
MODULE = "torch/nn/modules/module.py"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a stack shows. While the thread is asleep, `may_wait` means that it waits for others: native code that
    communicates has no frame. `is_pointed` is whether it sends to one other rank or receives from it, as stages do.
    """

    phase: StepPhase
    site: str | None
    waits: bool = False
    may_wait: bool = False
    is_idle: bool = False
    is_pointed: bool = False


def read_stack(text: str) -> tuple[Frame, ...]:
    """Parse `main (train.py:3);step (train.py:9)`, outermost first, to frames, innermost first."""
    found = (_FRAME.fullmatch(part) for part in reversed(text.split(";")))
    return tuple(Frame(match[1], match[2], int(match[3])) for match in found if match)


def activity_of(text: str, line: str = "") -> Activity:
    """Return what a stack shows; `line` is its innermost line in the source, or nothing."""
    stack = ThreadStack(0, None, False, False, read_stack(text))
    operation = stack.outer_operation
    phase = StepPhase.GARBAGE_COLLECTION if _COLLECTS.search(line) else phase_of_frames(stack.frames)
    return Activity(
        phase=phase,
        site=_site(stack),
        waits=operation is not None,
        may_wait=operation is None and (stack.native_call is not None or bool(_WAITS.search(line))),
        is_idle=is_idle(stack),
        is_pointed=operation in POINT_TO_POINT,
    )


def phase_of_frames(frames: tuple[Frame, ...]) -> StepPhase:
    """Return the phase. A save or an evaluation holds others: its forward passes are its own. So does a backward pass,
    which may compute a forward pass again, while an optimizer may be given a closure that does all of the step."""
    for frame in reversed(frames):
        known = phase_of(frame.function, frame.file)
        if known in PHASE_OF_CLASS:
            return PHASE_OF_CLASS[known]
    order = ((_is_data, StepPhase.DATA), (_is_backward, StepPhase.BACKWARD), (_is_forward, StepPhase.FORWARD))
    for is_in, phase in (*order, (_is_optimizer, StepPhase.OPTIMIZER)):
        if any(map(is_in, frames)):
            return phase
    return StepPhase.UNKNOWN


def _is_data(frame: Frame) -> bool:
    of_loader = frame.file.endswith((*DATA_LOADER_FILES, *DATA_FETCHING_FILES))
    return of_loader or bool(_DATA_NAMES.search(bare_name(frame.function)))


def _is_backward(frame: Frame) -> bool:
    return is_backward_engine(frame.function, frame.file) or bare_name(frame.function) == "backward"


def _is_forward(frame: Frame) -> bool:
    return frame.file.endswith(MODULE) or bare_name(frame.function) == "forward"


def _is_optimizer(frame: Frame) -> bool:
    return bool(_OPTIMIZER_NAMES.search(frame.function) or _OPTIMIZER_FILE.search(frame.file))


def _site(stack: ThreadStack) -> str | None:
    """`train.py:31 forward`: the innermost frame of the program itself, else the innermost that is no wrapper."""
    own = next((frame for frame in stack.frames if not is_installed(frame.file)), stack.site)
    return one_line(f"{own.place} {bare_name(own.function)}") if own else None
