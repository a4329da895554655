"""Entries of a distributed checkpoint that belong to single ranks, such as random states and the place in the data.

Another topology has other ranks, so there is nothing to compare them with. Their names say to which rank they belong:

    rng_state/shard_0.1_1.2       objects of Megatron-core: the place in a grid of ranks, and the size of the grid
    dataloader.dp_rank_1          the data loader of torchtitan, with `dataloader.world_size`
    rng (rank 3)                  what each rank saved under the same name

The distributed optimizer of Megatron-core can save its flat buckets, whose parameters are cut and ordered by tp and pp.
What is in which place is not saved, so buckets that are cut otherwise are not compared:

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(..).bucket_idx_0.exp_avg
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import NotRead, StoredTensor, StoredValue
from bigsci_launch.weights.formats.dcp import OF_RANK
from bigsci_launch.weights.match.batches import OF_SINGLE_RANKS, LeftOut, StoredEntry, left_out, summed
from bigsci_launch.weights.match.entries import entries_of

# The grid has as many dims as the place. Further numbers are the indices of a list inside the object.
IN_GRID = re.compile(r"(.+/shard_)(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)(?:\..*)?", re.DOTALL)
NAMED_RANK = re.compile(r"(.+ \(rank )(\d+)\)(?:\..*)?", re.DOTALL)
LOADER = re.compile(r"((?:.*\.)?dp_rank_)(\d+)(?:\..*)?", re.DOTALL)
LOADERS = "world_size"
MAX_RANKS = 1 << 20
BUCKET = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\..+", re.DOTALL)
CUT_OTHERWISE = (
    "a flat part of an optimizer, which the other side cuts otherwise: no file records where its parameters are"
)

RankGrid = tuple[int, ...]


def without_single_ranks(a: Contents, b: Contents) -> tuple[Contents, Contents, list[LeftOut]]:
    """Return contents without what belongs to single ranks of different topologies; and the counts of that.

    Buckets of an optimizer that are cut otherwise are listed as not read.
    """
    out_a, out_b = of_single_ranks(entries_of(a), entries_of(b))
    a, b = _without_buckets(a, b, is_cut_otherwise=any("/shard_" in entry.name for entry in out_a))
    if not out_a and not out_b:
        return a, b, []
    counts = [left_out("A", OF_SINGLE_RANKS, entry) for entry in out_a]
    counts += [left_out("B", OF_SINGLE_RANKS, entry) for entry in out_b]
    return _without(a, out_a), _without(b, out_b), summed(counts)


def _without_buckets(a: Contents, b: Contents, *, is_cut_otherwise: bool) -> tuple[Contents, Contents]:
    buckets_a, buckets_b = ([entry for entry in entries_of(side) if _is_of_bucket(entry)] for side in (a, b))
    shapes_a, shapes_b = (
        {(entry.name, entry.shape) for entry in buckets if isinstance(entry, StoredTensor)}
        for buckets in (buckets_a, buckets_b)
    )
    if not shapes_a or not shapes_b or (shapes_a == shapes_b and not is_cut_otherwise):
        return a, b
    return _with_not_read(a, buckets_a), _with_not_read(b, buckets_b)


def _with_not_read(contents: Contents, buckets: Sequence[StoredEntry]) -> Contents:
    not_read = (*contents.not_read, *map(_bucket_not_read, buckets))
    return replace(_without(contents, buckets), not_read=not_read)


def _is_of_bucket(entry: StoredEntry) -> bool:
    return "dp_group_idx_" in entry.name and BUCKET.fullmatch(entry.name) is not None


def _bucket_not_read(entry: StoredEntry) -> NotRead:
    type_ = f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, StoredTensor) else "a value"
    return NotRead(entry.name, type_, entry.path, CUT_OTHERWISE)


def _without(contents: Contents, entries: Iterable[StoredEntry]) -> Contents:
    out = {id(entry) for entry in entries}
    return replace(
        contents,
        tensors=tuple(tensor for tensor in contents.tensors if id(tensor) not in out),
        values=tuple(value for value in contents.values if id(value) not in out),
    )


def of_single_ranks(a: Sequence[StoredEntry], b: Sequence[StoredEntry]) -> tuple[list[StoredEntry], list[StoredEntry]]:
    """Return the entries of both sides that belong to single ranks, where each side has those of other ranks.

    Each side must have the entries of all its ranks: what a side lost is missing, and no other topology.
    """
    families_a, families_b = [_family(entry.name) for entry in a], [_family(entry.name) for entry in b]
    layouts_a, layouts_b = _layouts(a, families_a), _layouts(b, families_b)
    others = {family for family in layouts_a.keys() & layouts_b.keys() if layouts_a[family] != layouts_b[family]}
    counts = {_loaders(family) for family in others if family.endswith("dp_rank_")}
    return (
        [entry for entry, family in zip(a, families_a, strict=True) if family in others or entry.name in counts],
        [entry for entry, family in zip(b, families_b, strict=True) if family in others or entry.name in counts],
    )


def _family(name: str) -> str:
    """Return what the names of an entry on all ranks begin with; empty if it does not belong to a rank."""
    for hint, pattern in (("/shard_", IN_GRID), (" (rank ", NAMED_RANK), ("dp_rank_", LOADER)):
        if hint in name and (match := pattern.fullmatch(name)):
            return match[1]
    return ""


def _loaders(family: str) -> str:
    return f"{family.removesuffix('dp_rank_')}{LOADERS}"


def _layouts(entries: Sequence[StoredEntry], families: Sequence[str]) -> dict[str, RankGrid]:
    """Return by family the grid of its ranks, or their number, where every rank has its entries."""
    texts = {entry.name: entry.text for entry in entries if isinstance(entry, StoredValue)}
    members: dict[str, set[str]] = {}
    for entry, family in zip(entries, families, strict=True):
        if family:
            members.setdefault(family, set()).add(entry.name)
    found: dict[str, RankGrid] = {}
    for family, names in members.items():
        if family.endswith("/shard_"):
            places, layout = _in_grid(names)
        else:
            pattern = LOADER if family.endswith("dp_rank_") else NAMED_RANK
            places = {(int(match[2]),) for name in names if (match := pattern.fullmatch(name))}
            stated = texts.get(_loaders(family), "") if pattern is LOADER else str(_num_ranks(entries))
            layout = (int(stated),) if stated.isdecimal() and len(stated) < 10 else ()
        if layout and math.prod(layout) == len(places) <= MAX_RANKS and places == _all_places(layout):
            found[family] = layout
    return found


def _in_grid(names: Iterable[str]) -> tuple[set[RankGrid], RankGrid]:
    """Return the places of objects in their grid, and the grid; it is empty if they have different ones."""
    places, grids = set(), set()
    for name in names:
        if match := IN_GRID.fullmatch(name):
            place = tuple(map(int, match[2].split(".")))
            places.add(place)
            grids.add(tuple(map(int, match[3].split(".")))[: len(place)])
    return places, grids.pop() if len(grids) == 1 else ()


def _all_places(layout: RankGrid) -> set[RankGrid]:
    return set(itertools.product(*map(range, layout)))


def _num_ranks(entries: Iterable[StoredEntry]) -> int:
    return len({match[1] for entry in entries for name in _files(entry) if (match := OF_RANK.match(name))})


def _files(entry: StoredEntry) -> set[str]:
    if isinstance(entry, StoredValue):
        return {entry.path.name}
    pieces = [chunk.tensor for chunk in entry.chunks] or [entry]
    return {segment.path.name for piece in pieces for segment in piece.segments}
