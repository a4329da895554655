"""Entries of distributed checkpoints that belong to single ranks, and flat buckets, on two topologies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bigsci_launch.weights.files.sources import Contents
from bigsci_launch.weights.files.tensors import NOWHERE, Segment, StoredTensor, StoredValue
from bigsci_launch.weights.match.single_ranks import without_single_ranks


def value(name: str, text: str = "1", file: str = "__0_0.distcp") -> StoredValue:
    return StoredValue(name, NOWHERE, Path(file), text.encode(), text)


def tensor(name: str, *shape: int) -> StoredTensor:
    return StoredTensor(name, "other", NOWHERE, "F32", shape, (Segment(Path("__0_0.distcp"), 0, 4),))


def left(a: Sequence[StoredValue | StoredTensor], b: Sequence[StoredValue | StoredTensor]) -> tuple[list[str], ...]:
    """Return the names that are still to be compared, on both sides."""
    sides = (
        Contents(
            tuple(entry for entry in side if isinstance(entry, StoredTensor)),
            values=tuple(entry for entry in side if isinstance(entry, StoredValue)),
        )
        for side in (a, b)
    )
    kept_a, kept_b, _ = without_single_ranks(*sides)
    return tuple([entry.name for entry in (*side.tensors, *side.values)] for side in (kept_a, kept_b))


def of_ranks(count: int) -> list[StoredValue]:
    """A value that each rank has under the same name, and one that the last rank has alone."""
    return [value(f"rng (rank {rank}).x", file=f"__{rank}_0.distcp") for rank in range(count)]


def loaders(count: int, stated: int | None = None) -> list[StoredValue]:
    found = [value(f"dataloader.dp_rank_{rank}") for rank in range(count)]
    return [*found, value("dataloader.world_size", str(count if stated is None else stated))]


def grid(*places: str, shape: str) -> list[StoredValue]:
    return [value(f"rng_state/shard_{place}_{shape}.0.x") for place in places]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of_ranks(2), of_ranks(3)),
        (loaders(1), loaders(4)),
        (grid("0.0", "0.1", shape="1.2"), grid("0.0", "1.0", shape="2.1")),
    ],
    ids=["rank", "loader", "grid"],
)
def test_other_ranks_are_left_out(a: list[StoredValue], b: list[StoredValue]) -> None:
    assert left([*a, value("step")], [*b, value("step")]) == (["step"], ["step"])
    assert left(a, a) == ([entry.name for entry in a],) * 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of_ranks(2), of_ranks(3)[:1] + of_ranks(3)[2:]),
        (of_ranks(2), []),
        (loaders(2), loaders(2, stated=3)),
        (loaders(2), loaders(3)[1:]),
        (loaders(2), loaders(3)[:-1]),
        (loaders(3), [*loaders(3)[1:3], value("dataloader.world_size", "2")]),
        (grid("0.0", "0.1", shape="1.2"), grid("0.0", shape="1.2")),
        (grid("0.0", "0.1", shape="1.2"), grid("0.0", "0.1", shape="1.3")),
        (grid("0", shape="1"), [value("rng_state/shard_0_1.0"), value("rng_state/shard_0_1.1")]),
        ([value("world_size", "2")], [value("world_size", "3")]),
    ],
)
def test_what_a_side_lost_is_compared(a: list[StoredValue], b: list[StoredValue]) -> None:
    assert left(a, b) == ([entry.name for entry in a], [entry.name for entry in b])


def test_buckets_that_are_cut_otherwise_are_not_read() -> None:
    def buckets(count: int, size: int) -> list[StoredTensor | StoredValue]:
        names = [f"optimizer.distributed.dp_group_idx_{index}" for index in range(count)]
        found: list[StoredTensor | StoredValue] = [tensor(f"{name}.gbuf_idx_0.exp_avg", size) for name in names]
        return [*found, *(value(f"chained_0.{name}.per_bucket_numel/shard_0_1.0") for name in names)]

    def not_read(a: list[StoredTensor | StoredValue], b: list[StoredTensor | StoredValue]) -> tuple[int, int]:
        sides = [
            Contents(
                tuple(entry for entry in side if isinstance(entry, StoredTensor)),
                values=tuple(entry for entry in side if isinstance(entry, StoredValue)),
            )
            for side in (a, b)
        ]
        kept = without_single_ranks(*sides)
        assert all(len(s.tensors) + len(s.values) + len(s.not_read) for s in kept[:2])
        return len(kept[0].not_read), len(kept[1].not_read)

    assert not_read(buckets(2, 8), buckets(2, 8)) == (0, 0)
    assert not_read(buckets(2, 8), buckets(1, 16)) == (4, 2)
    assert not_read(buckets(2, 8), [value("step")]) == (0, 0)
    # The same sizes, but over pp instead of tp: only the random states say so.
    of_tp, of_pp = grid("0.0", "0.1", shape="1.2"), grid("0.0", "1.0", shape="2.1")
    assert not_read([*buckets(2, 8), *of_tp], [*buckets(2, 8), *of_pp]) == (4, 4)
