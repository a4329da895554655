"""Invariants of weights and of AdamW's moments that hold for every shard alone, without a copy to compare with.

With the recurrences m' = b1 m + (1 - b1) g and v' = b2 v + (1 - b2) g**2, both from zero, Cauchy and Schwarz give
m**2 <= (1 - b1)**2 / ((1 - b2) (1 - b1**2 / b2)) * v whenever b1**2 < b2, for every sequence of gradients: |m| is at
most 7.3 sqrt(v) for betas 0.9 and 0.999, and 1.2 sqrt(v) for 0.9 and 0.95.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.train.attach.watched import moments_of
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flow.ratios import ratio, root

ABSURD = 1e18
"""A weight or a moment of this size is damage: its square is beyond 32 bits."""
_CHUNK = 1 << 20
# Rounding of a few thousand steps, and squares of gradients that are too small for 32 bits.
_SLACK, _SMALLEST = 1.02, 1e-18


def moment_bound(beta1: float, beta2: float) -> float:
    """Return the largest |m| / sqrt(v) that AdamW can produce; infinite if there is no bound."""
    decay = ratio(beta1 * beta1, beta2)
    if not (decay < 1 and beta2 < 1):
        return math.inf
    return ratio(1 - beta1, root((1 - beta2) * (1 - decay)))


@torch.no_grad()
def find_absurd(tensors: Mapping[str, Tensor], rank: int, what: str = "") -> Iterator[Violation]:
    """Find tensors with an element that is not finite or of an absurd size. `what` is written before their names."""
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel() and tensor.is_floating_point()}
    if not filled:
        return
    largest = torch.stack([_largest(tensor) for tensor in filled.values()]).tolist()
    for (name, tensor), value in zip(filled.items(), largest, strict=True):
        if not math.isfinite(value):
            count = int((~torch.isfinite(tensor)).sum())
            text = f"{count} of {tensor.numel()} elements are not finite"
            yield Violation("non-finite", f"{what}{name}", (rank,), text)
        elif value > ABSURD:
            yield Violation("magnitude", f"{what}{name}", (rank,), f"has an element of size {value:.3g}")


def _largest(tensor: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor, ord=math.inf).to(torch.float64)
    return found


@torch.no_grad()
def find_wrong_moments(
    optimizer: torch.optim.Optimizer, states: Sequence[tuple[str, Tensor]], rank: int
) -> Iterator[Violation]:
    """Find moments on this rank that AdamW cannot have produced from any gradients."""
    bounds = {
        id(tensor): moment_bound(*(float(beta) for beta in group["betas"]))
        for group in optimizer.param_groups
        if len(group.get("betas") or ()) == 2  # others have other recurrences
        for tensor in group["params"]
    }
    seen: list[tuple[str, float]] = []
    measured = []
    for name, tensor in states:
        moments = moments_of(optimizer, tensor)
        yield from find_absurd({key: value for key, value in moments.items() if key != "exp_avg_sq"}, rank, f"{name}: ")
        if {"exp_avg", "exp_avg_sq"} <= moments.keys() and moments["exp_avg"].numel() and id(tensor) in bounds:
            # In 16 bits v stops growing long before it is what the recurrence says.
            is_exact = moments["exp_avg_sq"].dtype in (torch.float32, torch.float64)
            bound = bounds[id(tensor)] if is_exact else math.inf
            seen.append((name, bound))
            measured.append(_extremes(moments["exp_avg"], moments["exp_avg_sq"], bound))
    if measured:
        for (name, bound), extremes in zip(seen, torch.stack(measured).tolist(), strict=True):
            yield from _judge(name, bound, extremes, rank)


def _extremes(first: Tensor, second: Tensor, bound: float) -> Tensor:
    """Return the smallest and the largest v, and the largest |m| - bound * sqrt(v)."""
    found = []
    factor = bound * _SLACK if math.isfinite(bound) else 0.0
    for m, v in zip(torch.split(first.reshape(-1), _CHUNK), torch.split(second.reshape(-1), _CHUNK), strict=True):
        beyond = (m.abs() - factor * v.clamp(min=0).sqrt()).max().double() if factor else v.new_zeros(()).double()
        found.append(torch.stack([v.min().double(), v.max().double(), beyond]))
    table = torch.stack(found)
    return torch.stack([table[:, 0].min(), table[:, 1].max(), table[:, 2].max()])


def _judge(name: str, bound: float, extremes: Sequence[float], rank: int) -> Iterator[Violation]:
    smallest, largest, beyond = extremes
    if not math.isfinite(smallest) or not math.isfinite(largest):
        yield Violation("non-finite", f"{name}: exp_avg_sq", (rank,), "has elements that are not finite")
    elif smallest < 0:
        yield Violation(
            "moments", f"{name}: exp_avg_sq", (rank,), f"has an element of {smallest:.3g}: squares are not negative"
        )
    elif largest > ABSURD**2:
        yield Violation("magnitude", f"{name}: exp_avg_sq", (rank,), f"has an element of size {largest:.3g}")
    elif beyond > _SMALLEST:
        text = (
            f"an element of exp_avg is more than {bound:.3g} times the root of exp_avg_sq, which no gradients can cause"
        )
        yield Violation("moments", name, (rank,), text)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers that every rank must have alike: settings and the step count of each group."""
    found: dict[str, float] = {}
    for number, group in enumerate(optimizer.param_groups):
        place = f"of optimizer group {number}"
        found[f"step count {place}"] = steps_of_group(optimizer, group)
        for key in ("lr", "eps", "weight_decay"):
            found[f"{key} {place}"] = float(group.get(key) or 0.0)
        for index, beta in enumerate(group.get("betas") or (0.0, 0.0)):
            found[f"beta{index + 1} {place}"] = float(beta)
    return found


def steps_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the highest step count in a group; 0 before the first step. Unused parameters are behind."""
    counts = [
        float(optimizer.state[each]["step"]) for each in group["params"] if "step" in optimizer.state.get(each, {})
    ]
    return max(counts, default=0.0)
