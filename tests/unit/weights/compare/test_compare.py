"""`bsl diff-weights A B` from the outside: its output, its JSON document, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.texts import has_parts

pytestmark = pytest.mark.slow

RANKS = [(rank, {"rank": str(rank), "dp": str(rank // 2 % 2), "pp": str(rank // 4), "tp": str(rank % 2)})
         for rank in range(8)]  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path, save_arrays: Callable[..., Path]) -> Callable[..., tuple[Path, Path]]:
    """Two safetensors files from two dictionaries of arrays."""

    def make(a: dict[str, Any], b: dict[str, Any]) -> tuple[Path, Path]:
        return save_arrays(tmp_path / "a.safetensors", a), save_arrays(tmp_path / "b.safetensors", b)

    return make


def test_few_differing_elements_are_named_by_their_index(pair: Any, diff: Any, check_text: Any) -> None:
    a = np.arange(200, dtype=np.float32).reshape(10, 20)
    b = a.copy()
    b[3, 17] += 1.5
    one = diff(*pair({"w": a, "v": a}, {"w": b, "v": b})).text
    b[7, 2] -= 9
    answer = diff(*pair({"w": a, "v": a}, {"w": b, "v": b}), "--json").document["different"][0]
    assert (answer["first_at"], answer["worst_at"]) == ([3, 17], [7, 2])
    check_text(one, diff(*pair({"w": a, "v": a}, {"w": b, "v": b})).text)


def test_equal_checkpoints_are_equal_to_the_bit(tmp_path: Path, tiny: Any, diff: Any) -> None:
    tiny().write(tmp_path / "a")
    tiny().write(tmp_path / "b")
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    document = answer.document
    assert (answer.code, document["schema_version"], document["equal"], document["different"]) == (0, 1, True, [])
    # Per model-parallel rank 14 or 7 tensors of 16 bits, 21 fp32 tensors cut over 2 dp ranks, 2 steps each, one RNG.
    assert document["compared"] > 100


def test_dumps_name_the_stage_and_every_rank_of_it(
    tmp_path: Path, save_arrays: Any, diff: Any, check_text: Any
) -> None:
    weights = {"0.w": np.ones((4, 4), np.float32), "tied_modules.embed.norm.weight": np.full(8, 0.9961, np.float32)}
    for side, when in (("a", "step-000005-after"), ("b", "step-000006-before")):
        for rank, metadata in RANKS:
            arrays = dict(weights)
            if side == "b" and metadata["pp"] == "1":
                arrays["tied_modules.embed.norm.weight"] = np.ones(8, np.float32)
            save_arrays(tmp_path / side / when / f"rank-{rank:04d}.safetensors", arrays, metadata)
    answer = diff(tmp_path / "a/step-000005-after", tmp_path / "b/step-000006-before")
    assert answer.code == 1
    check_text(answer.text)
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert [entry["coordinate"] for entry in document["different"]] == [
        {"pp": 1, "tp": tp, "dp": dp} for dp in range(2) for tp in range(2)
    ]
    assert {entry["likely"] for entry in document["different"]} == {"reset to default"}
    assert document["findings"][0]["coordinates"][3] == {"pp": 1, "tp": 1, "dp": 1}


def test_each_kind_is_told_apart(pair: Any, diff: Any) -> None:
    ramp = np.linspace(0.5, 3, 64, dtype=np.float32)
    nudged, negative, payload, nan = ramp.copy(), ramp.copy(), ramp.copy(), ramp.copy()
    nudged[7] = np.nextafter(nudged[7], np.float32(9))
    negative[3], nan[9] = 0.0, np.nan
    payload[5] = np.nan
    signed, other_payload = negative.copy(), payload.copy()
    signed[3] = -0.0
    other_payload.view(np.uint32)[5] += 1
    a = {"same": ramp, "ulp": ramp, "zero": negative, "payload": payload, "nan": ramp, "gone": ramp, "shape": ramp,
         "dtype": ramp, "double": ramp}  # fmt: skip
    b = {"same": ramp, "ulp": nudged, "zero": signed, "payload": other_payload, "nan": nan, "new": ramp,
         "shape": ramp.reshape(8, 8), "dtype": ramp.astype(np.float16), "double": ramp * 2}  # fmt: skip
    answer = diff(*pair(a, b), "--json")
    assert answer.code == 1
    found = {entry["tensor"]: entry for entry in answer.document["different"]}
    kinds = {name: entry["kind"] for name, entry in found.items()}
    assert kinds == {
        "ulp": "value", "zero": "bits", "payload": "bits", "nan": "nan", "gone": "missing", "new": "extra",
        "shape": "shape", "dtype": "dtype", "double": "value",
    }  # fmt: skip
    assert (found["ulp"]["max_ulp"], found["ulp"]["fraction"]) == (1, 1 / 64)
    assert found["gone"]["b"] is None
    assert found["gone"]["a"]["shape"] == [64]
    assert found["shape"]["max_abs"] is None
    likely = {name: entry["likely"] for name, entry in found.items() if entry["likely"]}
    assert likely == {
        "zero": "equal values, other bits", "payload": "equal values, other bits", "nan": "NaN", "gone": "missing",
        "new": "extra", "dtype": "dtype rounding only", "double": "scaled by a constant",
    }  # fmt: skip
    json.loads(answer.result.stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("sides", ["ab", "ba"])
def test_a_nan_is_said_before_what_the_other_numbers_are(pair: Any, diff: Any, check_text: Any, sides: str) -> None:
    """All numbers of both sides are 1, the default of a norm: still, what differs is the NaN."""
    ones, with_nan = np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)
    with_nan[1, 2] = np.nan
    a, b = (ones, with_nan) if sides == "ab" else (with_nan, ones)
    check_text(diff(*pair({"w": a}, {"w": b})).text)


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_tolerance_is_a_distance(pair: Any, diff: Any, value: str) -> None:
    sides = pair({"w": np.ones(4)}, {"w": np.zeros(4)})
    assert diff(*sides, "--tolerance", value).code == 2


def test_permuted_shards_are_found_by_their_bits(tmp_path: Path, save_arrays: Any, diff: Any, check_text: Any) -> None:
    values = [np.random.default_rng(rank).standard_normal((3, 5)).astype(np.float32) for rank in range(8)]
    for rank, metadata in RANKS:
        save_arrays(tmp_path / f"a/rank-{rank:04d}.safetensors", {"w": values[rank]}, metadata)
        save_arrays(tmp_path / f"b/rank-{rank:04d}.safetensors", {"w": values[rank ^ 1]}, metadata)
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert {entry["likely"] for entry in document["different"]} == {"permuted shards"}
    assert document["findings"][0]["tensors"] == ["w"]
    check_text(document["findings"][0]["claim"])


def test_one_tp_rank_apart_is_named(tmp_path: Path, save_arrays: Any, diff: Any, check_text: Any) -> None:
    values = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    for rank, metadata in RANKS:
        save_arrays(tmp_path / f"a/rank-{rank:04d}.safetensors", {"w": values}, metadata)
        drifted = values + (0.01 * values**2 if metadata["tp"] == "1" else 0)
        save_arrays(tmp_path / f"b/rank-{rank:04d}.safetensors", {"w": drifted.astype(np.float32)}, metadata)
    check_text(diff(tmp_path / "a", tmp_path / "b").text)
    different = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    assert [entry["coordinate"]["tp"] for entry in different] == [1] * 4


def test_masters_and_moments_can_be_left_out_by_the_names_that_the_answer_shows(
    tmp_path: Path, tiny: Any, diff: Any
) -> None:
    tiny().write(tmp_path / "a")
    other = tiny()
    for params in other.state.values():
        for roles in params.values():
            roles["exp_avg"] *= 1.5
    other.write(tmp_path / "b")
    paths = (tmp_path / "a", tmp_path / "b")
    answer = diff(*paths, "--json")
    assert answer.code == 1
    assert {(e["coordinate"]["pp"], e["coordinate"]["tp"]) for e in answer.document["different"]} == set(other.state)
    assert diff(*paths, "--exclude", "exp_avg$").code == 0
    document = diff(*paths, "--include", "exp_avg", "--json").document
    assert {entry["role"] for entry in document["different"]} == {"exp_avg"}


def test_a_restarted_and_a_lost_optimizer_are_named(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    tiny().write(tmp_path / "a")
    restarted = tiny(optimizer_step=1.0)
    for params in restarted.state.values():
        for roles in params.values():
            roles["exp_avg"].zero_()
    restarted.write(tmp_path / "b")
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    claims = {finding["pattern"]: finding["claim"] for finding in document["findings"]}
    check_text(claims["optimizer step restarted"], claims["optimizer state lost"])
    masters = [entry for entry in document["different"] if entry["role"] == "fp32"]
    assert not masters


def test_other_steps_are_said_to_be_other_steps(tmp_path: Path, tiny: Any, diff: Any, check_text: Any) -> None:
    tiny(step=20).write(tmp_path / "a")
    later = tiny(step=30)
    for params in later.state.values():
        for roles in params.values():
            roles["fp32"] += 0.01
            roles["exp_avg"] *= 2
            roles["exp_avg_sq"] *= 4
    later.write(tmp_path / "b")
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert answer.code == 1
    check_text(*(f"{finding['pattern']}: {finding['claim']}" for finding in answer.document["findings"]))


def test_a_torch_folder_against_a_safetensors_folder(tmp_path: Path, save_arrays: Any, diff: Any) -> None:
    tensors = {"w": torch.randn(5, 3).bfloat16(), "t": torch.randn(4, 6)}
    (tmp_path / "a").mkdir()
    torch.save({"module": tensors | {"t": tensors["t"].t().contiguous().t()}}, tmp_path / "a/model.pt")
    save_arrays(tmp_path / "b/model.safetensors", tensors)
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    tensors["t"][2, 2] += 1
    save_arrays(tmp_path / "b/model.safetensors", tensors)
    (entry,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    assert (entry["tensor"], entry["max_abs"], entry["fraction"]) == ("t", pytest.approx(1, rel=1e-5), 1 / 24)


def test_files_cut_at_other_places_are_paired_by_name(tmp_path: Path, save_arrays: Any, diff: Any) -> None:
    one, two = np.arange(4.0), np.arange(6.0)
    save_arrays(tmp_path / "a/model.safetensors", {"one": one, "two": two})
    save_arrays(tmp_path / "b/model-1-of-2.safetensors", {"one": one})
    save_arrays(tmp_path / "b/model-2-of-2.safetensors", {"two": two})
    assert diff(tmp_path / "a", tmp_path / "b").code == 0


def test_tolerance_include_and_exclude(pair: Any, diff: Any) -> None:
    base = np.linspace(1, 2, 100, dtype=np.float32)
    paths = pair({"near": base, "far": base}, {"near": base * np.float32(1.0001), "far": base[::-1].copy()})
    assert diff(*paths, "--tolerance", "1e-3", "--json").document["within_tolerance"] == 1
    assert diff(*paths, "--tolerance", "1e-3").code == 1
    assert diff(*paths, "--tolerance", "1e-3", "--exclude", "^far").code == 0
    assert diff(*paths, "--include", "far", "--json").document["compared"] == 1
    wrong = diff(*paths, "--include", "(")
    assert (wrong.code, "--include: '('" in wrong.talk) == (2, True)


def damaged(folder: Path, what: str) -> str:
    """Damage a checkpoint and return the name of the file that must be named."""
    name = "layer_01-model_01-model_states.pt"
    victim = folder / name
    if what == "truncated":
        victim.write_bytes(victim.read_bytes()[:500])
    elif what == "missing":
        victim.unlink()
    elif what == "foreign":
        victim.write_bytes(b"not a checkpoint")
    elif what == "shard":
        name = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
        (folder / name).write_bytes((folder / name).read_bytes()[:700])
    elif what == "model states":
        name = "mp_rank_00_model_states.pt"
        (folder / name).write_bytes(b"")
    return name


@pytest.mark.parametrize("what", ["truncated", "missing", "foreign", "shard", "model states"])
def test_a_damaged_file_is_named_and_the_rest_is_compared(tmp_path: Path, tiny: Any, diff: Any, what: str) -> None:
    tiny().write(tmp_path / "a")
    folder = tiny().write(tmp_path / "b")
    whole = diff(tmp_path / "a", tmp_path / "a", "--json").document["compared"]
    name = damaged(folder, what)
    answer = diff(tmp_path / "a", tmp_path / "b")
    assert answer.code == 4
    assert f"could not read {folder / name}: " in answer.text
    document = diff(tmp_path / "a", tmp_path / "b", "--json").document
    assert [item["file"] for item in document["unreadable"]] == [str(folder / name)]
    assert not document["equal"]
    assert whole // 2 < document["compared"] < whole
    expected = {"missing"} if what == "missing" else set()
    assert {entry["kind"] for entry in document["different"]} == expected


def test_a_missing_tensor_is_named(tmp_path: Path, tiny: Any, diff: Any) -> None:
    tiny().write(tmp_path / "a")
    folder = tiny().write(tmp_path / "b")
    path = folder / "layer_02-model_00-model_states.pt"
    held = torch.load(path)
    del held["ln.weight"]
    torch.save(held, path)
    (entry,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["different"]
    place = {"pp": 1, "tp": 0, "dp": None}
    assert (entry["tensor"], entry["kind"], entry["coordinate"]) == ("2.ln.weight", "missing", place)


@pytest.mark.parametrize("other", ["nowhere", "empty", "/dev/null"])
def test_what_is_no_checkpoint_is_one_clear_error(tmp_path: Path, save_arrays: Any, diff: Any, other: str) -> None:
    (tmp_path / "empty").mkdir()
    answer = diff(save_arrays(tmp_path / "a.safetensors", {"w": np.zeros(2)}), tmp_path / other)
    assert (answer.code, answer.text) == (4, "")
    assert answer.talk.startswith(f"error: {tmp_path / other}: ") and answer.talk.count("error: ") == 1


def test_sides_with_nothing_in_common_are_an_error(pair: Any, diff: Any, check_text: Any) -> None:
    answer = diff(*pair({"w": np.zeros(2)}, {"v": np.zeros(2)}))
    nothing = diff(*pair({"w": np.zeros(2)}, {"w": np.zeros(2)}), "--include", "x")
    assert (answer.code, nothing.code) == (4, 4)
    check_text(answer.talk, nothing.talk)


def test_a_run_stands_for_its_latest_checkpoint(tmp_path: Path, tiny: Any, diff: Any) -> None:
    tiny().write(tmp_path / "run/checkpoints")
    (tmp_path / "run/run.json").write_text("{}")
    assert diff(tmp_path / "run", tmp_path / "run/checkpoints").code == 0


def test_without_numpy_equal_is_equal_and_different_asks_for_it(
    tmp_path: Path, tiny: Any, diff_without_numpy: Any
) -> None:
    tiny().write(tmp_path / "a")
    different = tiny()
    different.state[0, 0]["1.ln.weight"]["fp32"] += 1
    different.write(tmp_path / "b")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return diff_without_numpy(*(argument if argument[0] == "-" else tmp_path / argument for argument in arguments))

    assert run("a", "a").returncode == 0
    for answer in (run("a", "b"), run("--audit", "a")):
        assert answer.returncode == 1
        assert "numpy" in answer.stderr and "pip install '.[weights]'" in answer.stderr


def test_without_numpy_all_that_is_not_equal_is_in_one_error(pair: Any, diff_without_numpy: Any) -> None:
    a = {name: np.arange(8, dtype=np.float32) for name in "tuvwx"}
    b = {**a, "u": a["u"] + 1, "w": a["w"].astype(np.float16), "x": a["x"][:3]}
    answer = diff_without_numpy(*pair(a, b))
    assert answer.returncode == 1 and answer.stderr.count("error: ") == 1
    assert has_parts(answer.stderr, "3 tensors", "u, w, x", "numpy", "pip install '.[weights]'")


def test_the_document_has_the_published_keys(pair: Any, diff: Any) -> None:
    document = diff(*pair({"w": np.zeros(2)}, {"w": np.ones(2)}), "--json").document
    assert list(document) == [
        "schema_version", "a", "b", "equal", "compared", "within_tolerance", "different", "findings",
        "values_compared", "values", "components", "not_read", "unreadable", "notes", "bytes", "sample",
        "seam",
    ]  # fmt: skip
    assert list(document["different"][0]) == [
        "tensor", "role", "a", "b", "coordinate", "kind", "max_abs", "rel_l2", "max_ulp", "fraction", "first_at",
        "worst_at", "likely", "relation",
    ]  # fmt: skip
    assert list(document["findings"][0]) == ["pattern", "tensors", "coordinates", "claim"]
    assert (document["schema_version"], document["different"][0]["coordinate"]) == (1, None)


def test_neither_torch_nor_numpy_is_loaded_for_equal_weights(tmp_path: Path, tiny: Any) -> None:
    tiny().write(tmp_path / "a")
    different = tiny()
    different.state[0, 0]["1.ln.weight"]["fp32"] += 1
    different.write(tmp_path / "b")
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from bigsci_launch.cli.main import bsl\n"
        "result = CliRunner().invoke(bsl, ['diff-weights', *sys.argv[1:], '--json'])\n"
        "print(result.exit_code, *sorted({'torch', 'numpy', 'rich', 'safetensors'} & set(sys.modules)))\n"
    )

    def loaded(b: str) -> list[str]:
        command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / b)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ)).stdout.split()

    assert loaded("a") == ["0"]
    assert loaded("b") == ["1", "numpy"]
