"""What AdamW's moments must satisfy in any healthy run, whatever the data: numbers that no recurrence can produce.

With g_i the gradients, m_t = (1-b1) sum_i b1^(t-i) g_i and v_t = (1-b2) sum_i b2^(t-i) g_i^2. By Cauchy-Schwarz,

    |m_t| <= (1-b1)/sqrt(1-b2) * sqrt(sum_{j<t} (b1^2/b2)^j) * sqrt(v_t),

so one wrong bit in an exponent shows at once. A run that begins with moments that kept |m| <= C sqrt(v)
t steps ago adds (b1^2/b2)^t C^2 to the square of that factor. Clipping to a norm c also makes |m| <= c and v <= c^2,
because no single gradient exceeds the norm. A padded row of the vocabulary never receives a gradient: its moments are
zero. Rounding moves these limits by far less than the margin that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flow.ratios import power, ratio, root
from bigsci_launch.train.guards.state import OptimizerPartition
from bigsci_launch.train.parallel.tensor import VocabularyParallelTable

CHECK = "moments"
ABSURD = 1e6
"""No weight, and no moment without clipping, comes near this in a run that trains."""

_MARGIN = 1.1
# Squares of gradients below this vanish in 32 bits, so that their moments have no limit to keep.
_TINY = 1e-16
_FIRST, _SECOND = "first moment", "second moment"


@dataclass(frozen=True, slots=True)
class MomentLimits:
    """How large moments may be: `factor` times the root of the second one, and `size` altogether."""

    factor: float
    size: float


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of a partition, which belong to the parameter called `name`."""

    name: str
    start: int
    stop: int


def moment_factor(betas: Sequence[float], num_steps: int, before: float = 0.0) -> float:
    """Return the largest |m|/sqrt(v) that `num_steps` steps can lead to; `before` was the largest at their beginning.

    With `before` 0 the moments were zero.
    """
    first, second = betas
    decay = first * ratio(first, second) if first else 0.0
    kept = power(decay, num_steps)
    total = num_steps if decay == 1 else sum_of_powers(decay, num_steps)
    remains = kept * before * before if kept and before else 0.0
    return root(ratio((1 - first) ** 2, 1 - second) * total + remains)


def sum_of_powers(base: float, count: int) -> float:
    """Return the sum of the first `count` powers of `base`, from 1 on; infinite if it is too large for a float."""
    if not math.isfinite(base):
        return math.inf if count > 1 else float(count)
    return ratio(1 - power(base, count), 1 - base)


def largest_size(clip: float, before: float) -> float:
    """Return how large |m| and the root of v may be with gradients of norm `clip` at most (0: not clipped).

    `before` was the largest when the attempt began: a moment that keeps its own size may be rounded above it.
    """
    return max(clip, before) * _MARGIN if clip > 0 else ABSURD


def largest_factor(first: Tensor, second: Tensor) -> float:
    """Return the largest |m|/sqrt(v) of these moments; infinity if there is no limit that they keep."""
    factors = (
        float(
            ((one.abs() - _TINY).clamp_(min=0) / two.sqrt())
            .nan_to_num_(nan=0.0, posinf=math.inf, neginf=math.inf)
            .max()
        )
        for one, two in _portions([first, second])
    )
    return max(factors, default=0.0)


def _portions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors of one length into portions, so that a check needs little memory; on a CPU they fit into a cache."""
    size = 1 << 18 if tensors[0].device.type == "cpu" else 1 << 26
    for start in range(0, tensors[0].numel(), size):
        yield [each[start : start + size] for each in tensors]


def find_wrong_moments(
    part: OptimizerPartition, state: Mapping[str, Any], limits: MomentLimits, rank: int
) -> Iterator[Violation]:
    """Find masters and moments of a partition that are not finite, too large, or negative where squares are."""
    values = {"fp32 master": part.master.detach(), _FIRST: state.get("exp_avg"), _SECOND: state.get("exp_avg_sq")}
    if part.master.numel() and not _is_sound(values, limits):
        for label, tensor in values.items():
            if tensor is not None:
                yield from _name_wrong(part, label, values, limits, rank)


def _is_sound(values: Mapping[str, Tensor | None], limits: MomentLimits) -> bool:
    moments = [values.get(_FIRST), values.get(_SECOND)]
    present = [each for each in (values["fp32 master"], *moments) if each is not None]
    if len(present) == 2:  # one moment is gone, which the seal of the state reports
        return False
    return all(_is_portion_sound(portion, limits) for portion in _portions(present))


def _is_portion_sound(portion: Sequence[Tensor], limits: MomentLimits) -> bool:
    """Return whether a portion of masters, and of moments if there are any, is sound; NaN fails every comparison."""
    master, *moments = portion
    if not _largest(master) < ABSURD:
        return False
    if not moments:
        return True
    first, second = moments
    lowest, highest = (float(each) for each in torch.aminmax(second))
    if not (lowest >= 0 and highest <= limits.size * limits.size and _largest(first) <= limits.size):
        return False
    if math.isinf(limits.factor):
        return True
    factor = limits.factor * _MARGIN
    excess = torch.addcmul(second * -(factor * factor), first, first)
    return float(excess.max()) <= _TINY**2


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude without a copy of the tensor; NaN if it holds one."""
    lowest, highest = (float(each) for each in torch.aminmax(tensor))
    return max(-lowest, highest)


def _name_wrong(
    part: OptimizerPartition, label: str, values: Mapping[str, Tensor | None], limits: MomentLimits, rank: int
) -> Iterator[Violation]:
    for name, (start, size) in part.slices.items():
        pieces = {key: each[start : start + size] for key, each in values.items() if each is not None}
        if text := _explain(label, pieces, limits):
            yield Violation(CHECK, f"{label} of {name}", (rank,), text)


def _explain(label: str, pieces: Mapping[str, Tensor], limits: MomentLimits) -> str | None:
    piece = pieces[label]
    if not piece.numel():
        return None
    if wrong := piece.numel() - int(torch.isfinite(piece).sum()):
        return f"{wrong} of {piece.numel()} elements are not finite"
    largest = float(piece.abs().max())
    if label == _SECOND and float(piece.min()) < 0:
        return f"holds {float(piece.min()):.3g}, though it is a mean of squares"
    most = {_FIRST: limits.size, _SECOND: limits.size * limits.size}.get(label, ABSURD)
    if largest > most:
        return f"holds {largest:.3g}, and no run comes to more than {most:.3g}"
    if label == _FIRST and _SECOND in pieces:
        factor = largest_factor(piece, pieces[_SECOND])
        if factor > limits.factor * _MARGIN:
            return f"is {factor:.3g} times the root of the second moment; AdamW's betas allow {limits.factor:.3g}"
    return None


def padding_of(module: nn.Module, part: OptimizerPartition, vocabulary: int) -> list[Range]:
    """Return where a partition holds rows that pad the vocabulary."""
    tables = {id(each.weight): each for each in module.modules() if isinstance(each, VocabularyParallelTable)}
    found = []
    for name, parameter in module.named_parameters():
        table = tables.get(id(parameter))
        mapping = getattr(parameter, "_hp_mapping", None)
        if table is None or mapping is None or name not in part.slices:
            continue
        begins = max(0, vocabulary - table.first_token) * parameter.shape[1]
        start, size = part.slices[name]
        first = max(0, begins - mapping.lp_fragment_address.start)
        if first < size:
            found.append(Range(name, start + first, start + size))
    return found


def find_used_padding(ranges: Sequence[Range], tensors: Mapping[str, Tensor], rank: int) -> Iterator[Violation]:
    """Find padded rows that are not zero in any of `tensors`, which are named in words."""
    for each in ranges:
        for label, tensor in tensors.items():
            if count := int(torch.count_nonzero(tensor[each.start : each.stop])):
                text = f"{count} elements of rows that only pad the vocabulary are not zero"
                yield Violation("padding", f"{label} of {each.name}", (rank,), text)
