"""Sides with different tp, pp, dp or formats, compared as one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.weights.files.elements import read_elements
from bigsci_launch.weights.files.pool import FilePool
from bigsci_launch.weights.files.tensors import Place, StoredTensor
from bigsci_launch.weights.formats.safetensors_file import read_safetensors
from bigsci_launch.weights.match.logical import common_whole, join_tp
from bigsci_launch.weights.match.sharding import ShardingHints

pytestmark = pytest.mark.slow

# Where each matrix of the tiny model is cut over tp.
DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "embed.weight": 0}


def cut_of(name: str) -> int | None:
    return next((dim for suffix, dim in DIMS.items() if name.endswith(suffix)), None)


@pytest.fixture
def reshaped(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """The tiny checkpoint of tp 2 x pp 2 x dp 2, cut for another topology: the same model to the bit."""

    def make(tp: int, pp: int, dp: int) -> Any:
        source, target = tiny(tp=2, pp=2, dp=2), tiny(tp=tp, pp=pp, dp=dp)
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for stage in range(2):
            for name in source.shapes(stage):
                for role in ("fp32", "exp_avg", "exp_avg_sq"):
                    parts = [source.state[stage, rank][name][role] for rank in range(2)]
                    dim = cut_of(name)
                    whole.setdefault(name, {})[role] = parts[0] if dim is None else torch.cat(parts, dim)
        for (_, rank), params in target.state.items():
            for name, roles in params.items():
                dim = cut_of(name)
                for role in roles:
                    full = whole[name][role]
                    roles[role] = full if dim is None else full.chunk(tp, dim)[rank].contiguous()
        return target

    return make


@pytest.mark.parametrize("topology", [(1, 1, 1), (1, 2, 3), (2, 1, 1), (4, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_one_model_is_equal_at_every_topology(
    tmp_path: Path, tiny: Any, reshaped: Any, diff: Any, topology: tuple[int, int, int]
) -> None:
    tiny(tp=2, pp=2, dp=2).write(tmp_path / "a")
    reshaped(*topology).write(tmp_path / "b")
    for sides in (("a", "b"), ("b", "a")):
        document = diff(*(tmp_path / side for side in sides), "--json").document
        assert (document["equal"], any("shards are joined" in note for note in document["notes"])) == (True, True)
        # 7 or 13 parameters of 4 roles, and the tied copy at the other end.
        assert document["compared"] >= 4 * 13


@pytest.mark.parametrize("role", ["fp32", "exp_avg"])
@pytest.mark.parametrize("name", ["1.up.weight", "2.down.weight", "2.down.bias", "1.ln.weight"])
def test_one_element_is_found_across_topologies(
    tmp_path: Path, tiny: Any, reshaped: Any, diff: Any, name: str, role: str
) -> None:
    tiny(tp=2, pp=2, dp=2).write(tmp_path / "a")
    other = reshaped(1, 1, 1)
    other.state[0, 0][name][role].view(-1)[-1] += 1000
    other.write(tmp_path / "b")
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    named = {(entry["tensor"], entry["role"]) for entry in document["different"]}
    assert named == {(name, role)} | ({(name, "weight")} if role == "fp32" else set())
    assert max(entry["max_abs"] for entry in document["different"]) == pytest.approx(1000, rel=0.01)


def test_a_checkpoint_against_dumps_of_its_ranks(tmp_path: Path, tiny: Any, diff: Any, save_arrays: Any) -> None:
    checkpoint = tiny(tp=2, pp=2, dp=2)
    checkpoint.write(tmp_path / "a")

    def dump(folder: Path, change: float) -> None:
        for rank in range(8):
            pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
            weights = {name: roles["fp32"].bfloat16() for name, roles in checkpoint.state[pp, tp].items()}
            if change and (pp, dp, tp) == (1, 1, 0):
                weights["tied_modules.embed.weight"][0, 0] += change
            metadata = {"pp": str(pp), "tp": str(tp), "dp": str(dp)}
            save_arrays(folder / f"rank-{rank:04d}.safetensors", weights, metadata)

    dump(tmp_path / "same", 0.0)
    assert diff(tmp_path / "a", tmp_path / "same").code == 0
    dump(tmp_path / "other", 1.0)
    answer = diff(tmp_path / "a", tmp_path / "other", "--json")
    (entry,) = answer.document["different"]
    assert entry["coordinate"] == {"pp": 1, "tp": 0, "dp": 1}
    assert any("(exp_avg, exp_avg_sq, fp32)" in note for note in answer.document["notes"])


def test_masters_against_weights_differ_by_rounding_only(
    tmp_path: Path, tiny: Any, diff: Any, save_arrays: Any
) -> None:
    checkpoint = tiny(tp=1, pp=1, dp=1)
    weights = {name: roles["fp32"].bfloat16() for name, roles in checkpoint.state[0, 0].items()}
    save_arrays(tmp_path / "b/model.safetensors", weights)
    for name, roles in checkpoint.state[0, 0].items():
        folder = tmp_path / "a/zero" / name
        folder.mkdir(parents=True)
        for role, value in roles.items():
            torch.save({"param": value}, folder / f"{role}.pt")
        torch.save(torch.tensor(20.0), folder / "step.pt")
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert {entry["likely"] for entry in answer.document["different"]} == {"dtype rounding only"}
    assert diff(tmp_path / "a", tmp_path / "b", "--tolerance", "0.004").code == 0
    assert diff(tmp_path / "a", tmp_path / "a").code == 0


@given(data=st.data())
def test_any_cut_joins_to_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    from safetensors.numpy import save_file

    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    num_parts = data.draw(st.integers(2, 4))
    full = np.arange(np.prod(shape) * num_parts, dtype=np.int32)
    full = full.reshape(*shape[:dim], shape[dim] * num_parts, *shape[dim + 1 :])
    path = tmp_path_factory.mktemp("join") / "w.safetensors"
    pieces = np.split(full, num_parts, axis=dim)
    save_file({str(number): np.ascontiguousarray(piece) for number, piece in enumerate(pieces)}, path)
    file = read_safetensors(path)
    parts = [
        StoredTensor("w", "weight", Place(tp=number), "I32", entry.shape, (entry.segment,))
        for number, entry in ((n, file.entries[str(n)]) for n in range(num_parts))
    ]
    joined = join_tp(parts, dim, ShardingHints(), Place())
    start = data.draw(st.integers(0, full.size - 1))
    stop = data.draw(st.integers(start + 1, full.size))
    assert joined.shape == full.shape
    assert read_elements(joined, start, stop, FilePool()).tolist() == full.reshape(-1)[start:stop].tolist()


def test_hints_settle_what_shapes_leave_open(tmp_path: Path, save_arrays: Any) -> None:
    square = np.arange(16, dtype=np.int32).reshape(4, 4)

    def shards(name: str, pieces: list[np.ndarray]) -> list[StoredTensor]:
        path = save_arrays(tmp_path / f"{name}.safetensors", {str(n): piece for n, piece in enumerate(pieces)})
        entries = read_safetensors(path).entries
        return [
            StoredTensor("l.w", "weight", Place(tp=n), "I32", entries[str(n)].shape, (entries[str(n)].segment,))
            for n in range(len(pieces))
        ]

    halves, whole = shards("halves", np.split(square, 2, 1)), shards("whole", [square])
    found = common_whole(halves, whole, ShardingHints())
    assert found is not None
    assert (found.shape, found.dim) == ((4, 4), 1)
    assert common_whole(shards("thirds", [square[:, :3]]), whole, ShardingHints()) is None
    gated = ShardingHints(in_halves=(r"l\.w",))
    mixed = [np.concatenate([square[:1], square[2:3]]), np.concatenate([square[1:2], square[3:4]])]
    joined = join_tp(shards("gated", mixed), 0, gated, Place())
    assert read_elements(joined, 0, 16, FilePool()).reshape(4, 4).tolist() == square.tolist()


def test_a_value_that_one_rank_lacks_is_a_difference(tmp_path: Path, tiny: Any, diff: Any) -> None:
    """The models then have other parameters, so that entries are paired by name; that of rank 1 is no partner."""
    whole, lacking = (tiny(pp=1).write(tmp_path / side) for side in "ab")
    states = torch.load(lacking / "mp_rank_00_model_states.pt", weights_only=False)
    del states["param_shapes"][1]["1.ln.bias"]
    torch.save(states, lacking / "mp_rank_00_model_states.pt")
    assert diff(whole, lacking).code == 1


def test_a_flat_tensor_in_another_shape_is_a_difference(tmp_path: Path, tiny: Any, diff: Any) -> None:
    whole, reshaped = (tiny(dp=1).write(tmp_path / side) for side in "ab")
    shard = reshaped / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    masters = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0] = masters[0].reshape(1, -1)
    torch.save(state, shard)
    assert diff(whole, reshaped).code == 1


def test_a_flat_tensor_under_a_second_name_is_an_entry_of_that_name(tmp_path: Path, tiny: Any, diff: Any) -> None:
    whole, more = (tiny(dp=1).write(tmp_path / side) for side in "ab")
    shard = more / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    moments = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    moments["twin"] = moments["exp_avg"]
    torch.save(state, shard)
    answer = diff(whole, more)
    assert answer.code == 1
    assert "twin" in answer.text


@pytest.mark.parametrize("size", [0, -1, True, 1 << 60])
def test_an_impossible_topology_is_not_taken(size: int, tmp_path: Path, tiny: Any, diff: Any) -> None:
    whole, odd = (tiny(dp=1).write(tmp_path / side) for side in "ab")
    states = torch.load(odd / "mp_rank_00_model_states.pt", weights_only=False)
    states["checkpoint_parallel_dimensions"]["pp_degree"] = size
    torch.save(states, odd / "mp_rank_00_model_states.pt")
    answer = diff(whole, odd)
    assert answer.code == 1
    assert "pp_degree" in answer.text
