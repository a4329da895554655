"""The line that a trainer prints for each step, in the format of Megatron-LM: its labels and its parser.

    iteration 805/ 115311 | elapsed time per iteration (s): 13.19 | global batch size:   192 | lm loss: 4.531E+00 |

Megatron-LM and deepspeedai's Megatron-DeepSpeed give milliseconds, bigscience's Megatron-DeepSpeed seconds, and
`bsl train` both. Launchers put a rank or a time before the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SECONDS = "elapsed time per iteration (s)"
MILLISECONDS = "elapsed time per iteration (ms)"
BATCH_SIZE = "global batch size"
LOSS = "lm loss"
GRAD_NORM = "grad norm"
SKIPPED = "number of skipped iterations"

_LINE = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|([^\r\n]*)")
_SIZE = re.compile(rf"{BATCH_SIZE}:\s*(\d+)")
_LABELS = (SECONDS, MILLISECONDS, LOSS, GRAD_NORM, SKIPPED)
_NUMBERS = {label: re.compile(rf"{re.escape(label)}:\s*([-+.\w]+)") for label in _LABELS}


@dataclass(frozen=True, slots=True)
class IterationLine:
    """The figures of a step in a line. Missing ones are None, as the loss of a skipped step. The loss may be NaN."""

    step: int
    loss: float | None
    seconds: float | None
    global_batch_size: int | None
    total_steps: int | None = field(default=None, compare=False)
    grad_norm: float | None = field(default=None, compare=False)
    is_skipped: bool = field(default=False, compare=False)


def parse_iterations(text: str) -> Iterator[IterationLine]:
    """Yield the steps of a log in the order of its lines; a step that was repeated comes twice."""
    for match in _LINE.finditer(text):
        yield _parse_fields(int(match[1]), int(match[2]), match[3])


def _parse_fields(step: int, total_steps: int, fields: str) -> IterationLine:
    seconds, milliseconds, loss = (_number(label, fields) for label in (SECONDS, MILLISECONDS, LOSS))
    if seconds is None and milliseconds is not None:
        seconds = milliseconds / 1000
    size = _SIZE.search(fields)
    return IterationLine(
        step,
        loss,
        seconds,
        int(size[1]) if size else None,
        total_steps,
        _number(GRAD_NORM, fields),
        bool(_number(SKIPPED, fields)),
    )


def _number(label: str, fields: str) -> float | None:
    found = _NUMBERS[label].search(fields)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
