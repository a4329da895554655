"""Checks that rows which only pad the vocabulary are zero: they never receive a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.engine.state import OptimizerPartition
from bigsci_launch.train.guards.flat import Flat
from bigsci_launch.train.parallel.tensor import VocabularyParallelTable


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of a partition, which belong to the parameter called `name`."""

    name: str
    start: int
    stop: int


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


def find_used_padding(ranges: Sequence[Range], flats: Sequence[Flat], rank: int) -> Iterator[Violation]:
    """Find padded rows that are not zero in any of the tensors of a partition."""
    places = [(each, flat) for each in ranges for flat in flats]
    counts = [torch.count_nonzero(flat.tensor[each.start : each.stop]) for each, flat in places]
    for (each, flat), count in zip(places, torch.stack(counts).tolist() if counts else (), strict=True):
        if count:
            text = f"{count} elements of rows that only pad the vocabulary are not zero"
            yield Violation("padding", flat.title.format(each.name), (rank,), text)
