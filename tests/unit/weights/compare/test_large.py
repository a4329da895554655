"""What makes `bsl diff-weights` fit for large checkpoints: threads, portions, samples, recorded digests."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.checkpoints.folder import CheckpointRecord, list_files, write_digests, write_record
from bigsci_launch.checkpoints.verify import file_digest
from bigsci_launch.weights.compare import work
from bigsci_launch.weights.compare.sample import sample_blocks

Sides = tuple[Path, Path]
NUM_FILES, NUM_ELEMENTS = 6, 3000


@pytest.fixture
def sides(tmp_path: Path, save_arrays: Callable[..., Path]) -> Sides:
    """Two equal checkpoints of several files with several tensors each."""
    source = np.random.default_rng(0)
    for number in range(NUM_FILES):
        arrays = {f"{number}.{name}": source.standard_normal(NUM_ELEMENTS, np.float32) for name in ("up", "down")}
        for side in ("a", "b"):
            save_arrays(tmp_path / side / f"model-{number}.safetensors", arrays)
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portion is 4 KiB, so that a small tensor has several."""
    monkeypatch.setattr(work, "PORTION_BYTES", 4096)


def flip(path: Path, position: int) -> None:
    """Flip one bit, at a position from the end of the file if it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def names(document: dict[str, Any]) -> list[str]:
    return [entry["tensor"] for entry in document["different"]]


@pytest.mark.parametrize("jobs", [1, 3, 16])
@pytest.mark.parametrize("options", [(), ("--include", "down|up")], ids=["as files", "as tensors"])
def test_one_bit_in_any_portion_is_found_by_any_number_of_threads(
    sides: Sides, diff: Any, small_portions: None, jobs: int, options: tuple[str, ...]
) -> None:
    assert diff(*sides, "--jobs", jobs, *options).code == 0
    size = sides[1].joinpath("model-3.safetensors").stat().st_size
    for position in (-1, -4097, -9000, -12001, 200 - size):
        flip(sides[1] / "model-3.safetensors", position)
        answer = diff(*sides, "--jobs", jobs, "--json", *options)
        assert answer.code in (1, 4), position
        if position != 200 - size:  # that one is in the header
            assert names(answer.document) == ["3.up" if position >= -12000 else "3.down"]
            assert answer.document["compared"] == 2 * NUM_FILES
        flip(sides[1] / "model-3.safetensors", position)


def test_files_with_the_same_bytes_are_parsed_once(sides: Sides, diff: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigsci_launch.weights.match import pairing

    parsed: list[Path] = []
    read = pairing.read_contents

    def counting(source: Any, metadata: Any) -> Any:
        parsed.append(source.path)
        return read(source, metadata)

    monkeypatch.setattr(pairing, "read_contents", counting)
    document = diff(*sides, "--json").document
    assert document["compared"] == 2 * NUM_FILES
    assert {path.parent for path in parsed} == {sides[0]}
    # Neither is a file parsed twice that differs, or that cannot be read.
    flip(sides[1] / "model-3.safetensors", -1)
    for side in sides:
        flip(side / "model-4.safetensors", 3)
    parsed.clear()
    document = diff(*sides, "--json").document
    assert {item["file"] for item in document["unreadable"]} == {str(side / "model-4.safetensors") for side in sides}
    assert len(parsed) == NUM_FILES + 1
    assert sides[1] / "model-3.safetensors" in parsed


def test_the_same_bytes_in_a_shard_of_another_index_prove_nothing(sides: Sides, diff: Any) -> None:
    """What an index says about a shard belongs to its contents."""
    for side, extra in zip(sides, ({}, {"gone": "model-0.safetensors"}), strict=True):
        listed = {f"{n}.{name}": f"model-{n}.safetensors" for n in range(NUM_FILES) for name in ("up", "down")}
        (side / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**listed, **extra}}))
    answer = diff(*sides)
    assert answer.code == 4
    assert "gone" in answer.text


@pytest.mark.slow
@pytest.mark.parametrize("is_renamed", [False, True], ids=["file by file", "by name"])
def test_many_files_need_few_open_files(tmp_path: Path, save_arrays: Any, is_renamed: bool) -> None:
    for number in range(120):
        for side in ("a", "b"):
            name = f"other-{number}" if is_renamed and side == "b" else f"model-{number}"
            save_arrays(tmp_path / side / f"{name}.safetensors", {f"{number}.w": np.arange(4)})
    done = subprocess.run(
        [sys.executable, "-m", "bigsci_launch", "diff-weights", "a", "b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("120 tensors compared")


def test_a_sample_never_says_equal(tmp_path: Path, save_arrays: Any, diff: Any, check_text: Any) -> None:
    ramp = np.arange(1 << 20, dtype=np.float32)
    for side in ("a", "b"):
        save_arrays(tmp_path / side / "model.safetensors", {"w": ramp, "short": ramp[:100]})
    answer = diff(tmp_path / "a", tmp_path / "b", "--sample", "1%")
    assert answer.code == 4
    assert "equal" not in answer.text
    check_text(answer.text)
    document = diff(tmp_path / "a", tmp_path / "b", "--sample", "0.01", "--json").document
    assert (document["equal"], document["different"], document["sample"]) == (False, [], True)


def test_a_difference_in_a_sample_is_certain(tmp_path: Path, save_arrays: Any, diff: Any, check_text: Any) -> None:
    ramp = np.arange(1 << 20, dtype=np.float32)
    save_arrays(tmp_path / "a" / "model.safetensors", {"w": ramp, "v": ramp})
    save_arrays(tmp_path / "b" / "model.safetensors", {"w": ramp * 2, "v": ramp})
    answer = diff(tmp_path / "a", tmp_path / "b", "--sample", "1%")
    assert answer.code == 1
    check_text(answer.text)
    (entry,) = diff(tmp_path / "a", tmp_path / "b", "--sample", "1%", "--json").document["different"]
    assert (entry["tensor"], entry["a"]["shape"], entry["kind"]) == ("w", [1 << 20], "value")
    assert entry["rel_l2"] == pytest.approx(1)
    # The first element, 0, is the same doubled; the last is the largest, and a sample has it.
    assert (entry["first_at"], entry["worst_at"]) == ([1], [(1 << 20) - 1])


@pytest.mark.parametrize("num_elements", [1, 1023, 2048, 100_000, 1 << 20, (1 << 26) + 7])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.49, 0.9])
def test_a_sample_is_spread_over_the_whole_tensor(num_elements: int, share: float) -> None:
    blocks = sample_blocks(num_elements, share)
    assert blocks == sample_blocks(num_elements, share)
    assert all(0 <= start < stop <= num_elements for start, stop in blocks)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(blocks))
    taken = sum(stop - start for start, stop in blocks)
    assert taken >= min(num_elements, num_elements * share / 2)
    if len(blocks) > 1:
        assert blocks[0][0] == 0
        assert blocks[-1][1] > num_elements - 1024 - 1


@pytest.mark.parametrize("share", ["0", "100%", "1.5", "much", "-1%"])
def test_a_share_that_is_none_is_refused(sides: Sides, diff: Any, share: str) -> None:
    assert diff(*sides, f"--sample={share}").code == 2


def saved(folder: Path, tiny: Any) -> Path:
    """Write a checkpoint with the digests of its files, as `bsl train` does."""
    target: Path = tiny().write(folder)
    digests = {path.name: file_digest(path) for path in sorted(target.iterdir())}
    topology = {"tp": 1, "pp": 1, "dp": 1}
    write_digests(target, 0, {"files": digests})
    write_record(target, CheckpointRecord(20, 0, topology, "bf16", {}, list_files(target)))
    return target


def test_recorded_digests_replace_reading_and_the_answer_says_so(
    tmp_path: Path, tiny: Any, diff: Any, check_text: Any
) -> None:
    a, b = saved(tmp_path / "a", tiny), saved(tmp_path / "b", tiny)
    answer = diff(a, b, "--digests")
    assert answer.code == 0, answer.text
    check_text(answer.text.splitlines()[0])
    num_bytes = diff(a, b, "--digests", "--json").document["bytes"]
    assert num_bytes["by_digest"] > 0 == num_bytes["read"]


def test_files_whose_recorded_digests_differ_are_read(tmp_path: Path, tiny: Any, diff: Any) -> None:
    b = tiny()
    b.layers[1, 0, "ln.weight"] = b.state[0, 0]["1.ln.weight"]["fp32"].bfloat16() * 2
    a, b = saved(tmp_path / "a", tiny), saved(tmp_path / "b", lambda: b)
    by_digest, by_bytes = (diff(a, b, *options, "--json").document for options in (["--digests"], []))
    assert names(by_digest) == names(by_bytes) != []
    assert by_digest["different"] == by_bytes["different"]


def test_a_file_that_no_longer_has_its_recorded_size_is_read(tmp_path: Path, tiny: Any, diff: Any) -> None:
    a, b = saved(tmp_path / "a", tiny), saved(tmp_path / "b", tiny)
    layer = b / "layer_01-model_00-model_states.pt"
    layer.write_bytes(layer.read_bytes()[:-100])
    answer = diff(a, b, "--digests")
    assert answer.code == 4
    assert f"could not read {layer}" in answer.text


@pytest.mark.slow
def test_without_recorded_digests_there_is_nothing_to_compare(sides: Sides) -> None:
    command = [sys.executable, "-m", "bigsci_launch", "diff-weights", *map(str, sides), "--digests"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "--digests" in done.stderr
