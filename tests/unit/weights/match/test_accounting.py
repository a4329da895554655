"""The law of the matching: no entry of either side is lost, whatever the files are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bigsci_launch.weights.files.boxes import chunks_of
from bigsci_launch.weights.files.sources import Weights
from bigsci_launch.weights.files.tensors import StoredTensor, StoredValue
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.locate.locate import open_weights
from bigsci_launch.weights.match.batches import PairBatch
from bigsci_launch.weights.match.pairing import pair_weights

NAMES = ("w", "fc.w", "fc.b", "module.w", "net.fc.w", "fc._orig_mod.w", "rng")
PREFIXES = ("", "", "module.", "_orig_mod.", "model.")
CONTAINERS: tuple[tuple[str, ...], ...] = ((), (), ("model",), ("state_dict",), ("app", "model"), ("net",))
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"epoch": 3},
    {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}},
    {"ema": {"w": torch.ones(3), "fc.w": torch.zeros(3)}, "rng": torch.ones(5), "w": 7},
)
FILES = ("one .pt", "one .safetensors", "shards .pt", "shards .safetensors")
RANKS = ("dp ranks", "tp ranks", "ranks without places")


@st.composite
def side_plans(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    return {
        "names": names,
        "prefix": draw(st.sampled_from(PREFIXES)),
        "container": draw(st.sampled_from(CONTAINERS)),
        "extras": draw(st.sampled_from(EXTRAS)),
        "layout": draw(st.sampled_from((*FILES, *RANKS))),
        "shards": [draw(st.integers(1, 3)) for _ in names],
        "is_tied": draw(st.booleans()),
        "is_replicated": draw(st.booleans()),
        "num_ranks": draw(st.integers(1, 3)),
    }


def write_side(folder: Path, plan: dict[str, Any]) -> Path:
    """Write one side as planned; its tensors have four rows each, of their own bytes."""
    tensors = {
        f"{plan['prefix']}{name}": torch.full((4, 2), float(number)) for number, name in enumerate(plan["names"], 1)
    }
    layout = plan["layout"]
    if plan["is_tied"] and layout.endswith(".pt"):
        tensors["head.w"] = next(iter(tensors.values()))
    folder.mkdir()
    if layout.startswith("one"):
        path = folder / f"model{layout.removeprefix('one ')}"
        write_file(path, tensors, plan)
        return path
    if layout.startswith("shards"):
        numbers = [*plan["shards"], 1]
        for shard in set(numbers):
            held = {name: tensors[name] for name, number in zip(tensors, numbers, strict=False) if number == shard}
            write_file(folder / f"model-0000{shard}-of-00003{layout.removeprefix('shards ')}", held, plan)
        return folder
    for rank in range(plan["num_ranks"]):
        at = {"dp ranks": f"w-pp0-tp0-dp{rank}", "tp ranks": f"w-pp0-tp{rank}-dp0"}.get(layout, f"part_{rank}")
        parts = {
            name: tensor if plan["is_replicated"] else tensor.chunk(plan["num_ranks"])[rank].clone()
            for name, tensor in tensors.items()
            if rank < len(tensor.chunk(plan["num_ranks"]))
        }
        write_file(folder / f"{at}.pt", parts, plan)
    return folder


def write_file(path: Path, tensors: dict[str, torch.Tensor], plan: dict[str, Any]) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path, {"made_by": "a test"} if plan["extras"] else None)
        return
    tree: dict[str, Any] = dict(tensors)
    for key in reversed(plan["container"]):
        tree = {key: tree}
    torch.save({**plan["extras"], **tree}, path)


def entries_of_sources(weights: Weights) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for source in weights.sources:
        contents = read_contents(source, weights.metadata)
        for entry in (*contents.tensors, *contents.values):
            found.update(identities(entry))
    return found


def identities(entry: StoredTensor | StoredValue) -> list[Any]:
    """Return what stays of an entry when it is renamed, moved or joined: its bytes, or its content and file."""
    if isinstance(entry, StoredValue):
        return [(entry.path, entry.content)]
    return [segment for chunk in chunks_of(entry) for segment in chunk.tensor.segments]


@pytest.mark.slow
@given(plan_a=side_plans(), plan_b=side_plans())
def test_every_entry_is_in_a_pair_or_counted(
    tmp_path_factory: pytest.TempPathFactory, plan_a: dict[str, Any], plan_b: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("sides")
    a, b = (open_weights(write_side(folder / side, plan)) for side, plan in (("a", plan_a), ("b", plan_b)))
    pairing = pair_weights(a, b)
    batches = [batch if isinstance(batch, PairBatch) else batch.read() for batch in pairing.batches]
    batches += pairing.rest()
    assert not any(batch.unreadable or batch.not_read for batch in batches)
    for index, side in enumerate((a, b)):
        held = entries_of_sources(side)
        for batch in batches:
            for pair in (*batch.pairs, *batch.values):
                entry = pair[index]
                held.subtract(identities(entry) if entry is not None else ())
        lost = sum(count for count in held.values() if count > 0)
        counts = [count for batch in batches for count in batch.left_out if count.side == "AB"[index]]
        assert lost == sum(count.num_tensors + count.num_values for count in counts), (held, counts)
