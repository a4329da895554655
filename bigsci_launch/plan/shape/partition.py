"""Computes which layers DeepSpeed's pipeline puts on which stage, without importing DeepSpeed.

Two rules are in use. `FILL` (before DeepSpeed#4312) finds the smallest bottleneck and fills one stage after another up
to it, so the last stages come up short: 78 layers on 12 stages are 7 x 11 + 1. `BALANCE` (since then) minimises the
difference between the heaviest and the lightest stage. Both may leave stages empty. Such plans are refused, so the
rules are reproduced here with their quirks. `balance` has a better rule; its cuts arrive here as methods that name the
layers of every stage.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate

from bigsci_launch.config.rules.own_cut import parse_layer_counts

FIRST_BALANCE_RELEASE = (0, 12, 5)
"""First release of DeepSpeed with the rule of DeepSpeed#4312."""

_BOTTLENECK_TOLERANCE = 1e-3


class PartitionRule(Enum):
    """How DeepSpeed cuts a list of weights into stages; depends on its version."""

    FILL = "fill"
    BALANCE = "balance"

    @classmethod
    def of_deepspeed(cls, version: str) -> PartitionRule:
        """Return the rule of a DeepSpeed release such as `0.5.10` or `0.16.2+cu121`."""
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        return cls.FILL if numbers < FIRST_BALANCE_RELEASE else cls.BALANCE


@dataclass(frozen=True, slots=True)
class Layer:
    """One item of the pipeline's layer list: its class name, as regular expressions see it, and its parameters."""

    name: str
    num_parameters: int = 0
    is_transformer: bool = False


@dataclass(frozen=True, slots=True)
class Stages:
    """A cut of `layers` into stages: `bounds[i]` is the first item of stage i, the last bound the number of items."""

    layers: tuple[Layer, ...]
    bounds: tuple[int, ...]

    @property
    def transformer_layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of every stage, first stage first."""
        return tuple(
            sum(layer.is_transformer for layer in self.layers_of(stage)) for stage in range(len(self.bounds) - 1)
        )

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        return self.layers[self.bounds[stage] : self.bounds[stage + 1]]


def cut_layers(
    layers: Sequence[Layer], method: str, num_stages: int, rule: PartitionRule = PartitionRule.BALANCE
) -> Stages:
    """Return the stages that DeepSpeed's `PipelineModule(partition_method=method)` makes of `layers`.

    Args:
        layers: the pipeline's layer list in order, including items without weights.
        method: `uniform`, `parameters` or `type:REGEX`; the regex is searched in class names, cases ignored, and
            ends at a second colon, as in DeepSpeed. Or `time:COUNTS` or `memory:COUNTS`, the transformer layers of
            every stage.
        num_stages: pipeline-parallel size.
        rule: the rule of the DeepSpeed version that will run.

    Raises:
        ValueError: an unknown method, a regex that is none or matches no layer, or counts of another model.
    """
    items = tuple(layers)
    method = method.lower()
    if (counts := parse_layer_counts(method)) is not None:
        return Stages(items, cut_at_counts(items, counts, num_stages))
    if method == "uniform":
        return Stages(items, tuple(cut_uniformly(len(items), num_stages, rule)))
    return Stages(items, _cut_weights(weigh_layers(items, method), num_stages, rule))


def cut_at_counts(layers: Sequence[Layer], counts: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return bounds such that stage i has `counts[i]` transformer layers; each stage but the first begins with one.

    What follows the layers is on the last stage, even if that has none.

    Raises:
        ValueError: the counts are for another number of stages or layers.
    """
    places = [place for place, layer in enumerate(layers) if layer.is_transformer]
    if len(counts) != num_stages or sum(counts) != len(places):
        raise ValueError(
            f"the method names {sum(counts)} layers on {len(counts)} stages; there are {len(places)} on {num_stages}"
        )
    places.append(places[-1] + 1)
    firsts = list(accumulate(counts))[:-1]
    return (0, *(places[first] for first in firsts), len(layers))


def weigh_layers(layers: Sequence[Layer], method: str) -> tuple[int, ...]:
    """Return the weight that `method` gives to every layer.

    Raises:
        ValueError: the method is unknown, or its regex is invalid or matches no layer.
    """
    if method == "parameters":
        return tuple(layer.num_parameters for layer in layers)
    if not method.startswith("type:"):
        raise ValueError(f"partition method {method!r} is not one of uniform, parameters, type:REGEX, time, memory")
    try:
        pattern = re.compile(method.split(":")[1], re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"partition method {method!r} has an invalid regular expression: {error}") from error
    weights = tuple(int(pattern.search(layer.name) is not None) for layer in layers)
    if not any(weights):
        raise ValueError(f"partition method {method!r} matches no layer")
    return weights


@lru_cache(maxsize=4096)
def _cut_weights(weights: tuple[int, ...], num_stages: int, rule: PartitionRule) -> tuple[int, ...]:
    return tuple((cut_balanced if rule is PartitionRule.BALANCE else cut_filling)(weights, num_stages))


def cut_uniformly(num_items: int, num_parts: int, rule: PartitionRule = PartitionRule.BALANCE) -> list[int]:
    """Return bounds of `num_parts` runs of equal length. The remainder goes to the last run (FILL), or one each to the
    first runs (BALANCE; since DeepSpeed 0.10.1, DeepSpeed#4053). With fewer items than parts, the last parts are
    empty."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, remainder = divmod(num_items, num_parts)
    if rule is PartitionRule.FILL:
        return [size * part for part in range(num_parts)] + [num_items]
    return [size * part + min(part, remainder) for part in range(num_parts + 1)]


def cut_filling(weights: Sequence[int], num_parts: int) -> list[int]:
    """Return bounds by the rule before DeepSpeed#4312: bisect the bottleneck to 1e-3, then fill each part below it."""
    if len(weights) <= num_parts:
        return cut_uniformly(len(weights), num_parts)
    sums = list(accumulate(weights))
    low, high = sums[-1] / num_parts, float(sums[-1])
    while high > low + _BOTTLENECK_TOLERANCE:
        middle = low + (high - low) / 2
        if _fill(sums, num_parts, middle)[1]:
            high = middle
        else:
            low = middle + _BOTTLENECK_TOLERANCE
    return _fill(sums, num_parts, high)[0]


def _fill(sums: list[int], num_parts: int, bottleneck: float) -> tuple[list[int], bool]:
    """Return bounds of parts filled one by one below `bottleneck`, and whether all items found a place.

    Two quirks of the original are kept, because they produced the stages of real runs. The part that reaches the end is
    weighed without its first item. If not even the first item fits, the next target starts from the total.
    """
    num_items = len(sums)
    bounds, target = [0], bottleneck
    while len(bounds) < num_parts:
        bound = bisect_left(sums, target)
        if bound == num_items:
            rest = sums[-1] - sums[bounds[-1]]
            return bounds + [num_items] * (num_parts + 1 - len(bounds)), rest < bottleneck
        bounds.append(bound)
        target = sums[bound - 1] + bottleneck
    return [*bounds, num_items], target >= sums[-1]


def cut_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Return bounds by the rule of DeepSpeed#4312: the least (heaviest - lightest part), of equals the latest cut."""
    if len(weights) <= num_parts:
        return cut_uniformly(len(weights), num_parts)
    return _balance(tuple(weights)).bounds(num_parts)


class _Balance:
    """Balanced cuts of one list of weights. A cut into n parts is built on all cuts of its beginnings into n - 1, so
    cuts into different numbers of parts share their work."""

    def __init__(self, weights: tuple[int, ...]) -> None:
        self._sums = [0, *accumulate(weights)]
        self._heaviest: list[float] = list(self._sums)
        self._lightest: list[float] = list(self._sums)
        self._cuts: list[list[int]] = []

    def bounds(self, num_parts: int) -> list[int]:
        for parts in range(len(self._cuts) + 2, num_parts + 1):
            self._extend(parts)
        bounds = [len(self._sums) - 1]
        for cut in reversed(self._cuts[: num_parts - 1]):
            bounds.append(cut[bounds[-1]])
        return [0, *reversed(bounds)]

    def _extend(self, parts: int) -> None:
        sums, heaviest, lightest = self._sums, self._heaviest, self._lightest
        rows = [_best_last_cut(sums, heaviest, lightest, end, parts) for end in range(parts, len(sums))]
        self._cuts.append([0] * parts + [cut for cut, _, _ in rows])
        self._heaviest = [0.0] * parts + [most for _, most, _ in rows]
        self._lightest = [0.0] * parts + [least for _, _, least in rows]


_balance = lru_cache(maxsize=64)(_Balance)


def _best_last_cut(
    sums: list[int], heaviest: list[float], lightest: list[float], end: int, parts: int
) -> tuple[int, float, float]:
    """Return where the last of `parts` parts of the first `end` items begins, and the heaviest and lightest part.

    Searches backwards and stops as soon as the last part exceeds the mean of the others by more than the best spread,
    because from there it only grows.
    """
    best_cut, best_spread, best = 0, float("inf"), (0.0, 0.0)
    for cut in range(end - 1, parts - 2, -1):
        last = sums[end] - sums[cut]
        if last * (parts - 1) - sums[cut] > best_spread * (parts - 1):
            break
        most, least = max(heaviest[cut], last), min(lightest[cut], last)
        if most - least < best_spread:
            best_cut, best_spread, best = cut, most - least, (most, least)
    return best_cut, *best
