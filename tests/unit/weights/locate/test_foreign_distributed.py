"""Folders that Megatron-core, torchtitan and Lightning wrote on one rank and on two: one state on every topology."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

FOREIGN = Path(__file__).parents[1] / "foreign" / "distributed"
SIDES = {"megatron": ("tp2", "tp1"), "torchtitan": ("dp2", "dp1"), "lightning": ("dp2", "dp1")}


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copies a folder of one trainer on one topology."""

    def copy(trainer: str, topology: str, name: str = "copy") -> Path:
        return Path(shutil.copytree(FOREIGN / trainer / topology, tmp_path / name))

    return copy


def metadata_of(folder: Path) -> tuple[Path, Any]:
    (path,) = folder.rglob(".metadata")
    return path, pickle.loads(path.read_bytes())


def change_element(folder: Path, name: str, offset: tuple[int, ...]) -> None:
    """Change the last element of the box of a tensor that begins at an offset in the whole."""
    path, metadata = metadata_of(folder)
    (info,) = (
        at for index, at in metadata.storage_data.items() if (index.fqn, tuple(index.offset or ())) == (name, offset)
    )
    file = path.parent / info.relative_path
    raw = bytearray(file.read_bytes())
    held = bytes(raw[info.offset : info.offset + info.length])
    wide = torch.load(BytesIO(held)).contiguous().flatten()[-1:].numpy().tobytes()
    with zipfile.ZipFile(BytesIO(held)) as archive:
        (storage,) = (record for record in archive.infolist() if "/data/" in record.filename)
        content = archive.read(storage)
    begin = info.offset + held.index(content, storage.header_offset)
    at = begin + content.rindex(wide)
    raw[at + 3] ^= 0x40
    file.write_bytes(raw)


@pytest.mark.parametrize("trainer", SIDES)
def test_one_state_is_equal_on_every_topology(trainer: str, diff: Any) -> None:
    a, b = (FOREIGN / trainer / side for side in SIDES[trainer])
    document = diff(a, b, "--json").document
    assert (document["equal"], document["not_read"], document["unreadable"]) == (True, [], [])
    assert diff(a, b).code == 0


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_what_belongs_to_single_ranks_is_counted(diff: Any, check_text: Any, trainer: str) -> None:
    wide, single = SIDES[trainer]
    check_text(*diff(FOREIGN / trainer / wide, FOREIGN / trainer / single, "--json").document["notes"])


@pytest.mark.parametrize(
    ("trainer", "name", "offset", "shown", "at"),
    [
        ("megatron", "embedding.word_embeddings.weight", (8, 0), "embedding.word_embeddings.weight", [15, 7]),
        (
            "megatron",
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
            (0, 18, 0),
            "decoder.layers.mlp.linear_fc1.weight",
            [0, 23, 7],
        ),
        ("torchtitan", "tokens.weight", (3, 0), "tokens.weight", [5, 3]),
        ("torchtitan", "optimizer.state.tokens.weight.exp_avg_sq", (0, 0), "tokens.weight", [2, 3]),
        ("lightning", "state_dict.net.tokens.weight", (3, 0), "net.tokens.weight", [5, 3]),
    ],
)
def test_one_element_is_named_by_its_index_in_the_whole(
    trainer: str, name: str, offset: tuple[int, ...], shown: str, at: list[int], copied: Any, diff: Any
) -> None:
    wide, single = SIDES[trainer]
    changed = copied(trainer, wide)
    change_element(changed, name, offset)
    for other in (wide, single):
        answer = diff(FOREIGN / trainer / other, changed, "--json")
        assert answer.code == 1
        assert [(item["tensor"], item["first_at"]) for item in answer.document["different"]] == [(shown, at)]


@pytest.mark.parametrize("trainer", SIDES)
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-400])])
def test_every_lost_or_short_file_of_a_rank_is_named(trainer: str, damage: Any, copied: Any, diff: Any) -> None:
    wide, single = SIDES[trainer]
    folder = copied(trainer, wide)
    for file in sorted(folder.rglob("*.distcp")):
        whole = file.read_bytes()
        damage(file)
        for arguments in ((FOREIGN / trainer / single, folder), ("--audit", folder)):
            answer = diff(*arguments, "--json")
            assert answer.code == 4
            assert str(file) in [item["file"] for item in answer.document["unreadable"]]
        file.write_bytes(whole)


def test_values_next_to_the_tensors_are_compared(copied: Any, diff: Any) -> None:
    folder = copied("megatron", "tp2")
    path = folder / "iter_0000004/common.pt"
    common = torch.load(path, weights_only=False)
    common["opt_param_scheduler"]["max_lr"] = 0.5
    common["args"].hidden_size = 9
    torch.save(common, path)
    values = diff(FOREIGN / "megatron/tp1", folder, "--json").document["values"]
    assert {(value["value"], value["a"]["text"], value["b"]["text"]) for value in values} == {
        ("common.opt_param_scheduler.max_lr", "0.01", "0.5"),
        ("common.args.hidden_size", "8", "9"),
    }


def test_a_random_state_that_a_rank_lost_is_missing_on_the_same_topology_and_on_another(copied: Any, diff: Any) -> None:
    folder = copied("megatron", "tp2")
    path, metadata = metadata_of(folder)
    lost = "rng_state/shard_0.1_1.2"
    del metadata.state_dict_metadata[lost]
    metadata.storage_data = {at: info for at, info in metadata.storage_data.items() if at.fqn != lost}
    path.write_bytes(pickle.dumps(metadata))
    for other in SIDES["megatron"]:
        answer = diff(FOREIGN / "megatron" / other, folder)
        assert answer.code == 1
        assert "rng_state/shard_0." in answer.text


def test_plans_that_hold_something_else_are_compared(copied: Any, diff: Any) -> None:
    folder = copied("megatron", "tp2")
    path, metadata = metadata_of(folder)
    metadata.all_local_plans[0].items.append("something else")
    path.write_bytes(pickle.dumps(metadata))
    assert diff(FOREIGN / "megatron/tp2", folder).code == 1


def test_a_folder_of_megatron_without_its_common_values_is_not_whole(copied: Any, diff: Any) -> None:
    folder = copied("megatron", "tp2")
    (folder / "iter_0000004/common.pt").unlink()
    for arguments in ((FOREIGN / "megatron/tp1", folder), ("--audit", folder)):
        answer = diff(*arguments, "--json")
        assert answer.code == 4
        assert [Path(item["file"]).name for item in answer.document["unreadable"]] == ["common.pt"]


@pytest.mark.parametrize("trainer", SIDES)
def test_the_audit_of_what_a_trainer_wrote_finds_nothing(trainer: str, diff: Any) -> None:
    for side in SIDES[trainer]:
        answer = diff("--audit", FOREIGN / trainer / side, "--json")
        patterns = [finding["pattern"] for finding in answer.document["findings"]]
        # Megatron's own writer saved moments that were drawn, not trained: some second moments are below zero.
        assert patterns == (["negative second moment"] if trainer == "megatron" else [])
        assert answer.code == (1 if patterns else 0)


def claims(diff: Any, folder: Path) -> list[str]:
    """Return what an audit finds wrong."""
    answer = diff("--audit", folder, "--json")
    assert answer.code == 1
    return [finding["claim"] for finding in answer.document["findings"]]


def test_the_audit_finds_a_save_that_was_not_finished(copied: Any, diff: Any, check_text: Any) -> None:
    folder = copied("megatron", "tp2")
    (folder / "iter_0000004/metadata.json").unlink()
    check_text(*claims(diff, folder))


@pytest.mark.parametrize(
    ("trainer", "folder", "renamed"),
    [("megatron", "iter_0000004", "iter_0000005"), ("torchtitan", "checkpoint/step-2", "checkpoint/step-3")],
)
def test_the_audit_finds_another_step(
    trainer: str, folder: str, renamed: str, copied: Any, diff: Any, check_text: Any
) -> None:
    copy = copied(trainer, SIDES[trainer][0])
    (copy / folder).rename(copy / renamed)
    check_text(*claims(diff, copy / renamed))


def test_the_audit_finds_a_group_of_another_step(copied: Any, diff: Any, check_text: Any) -> None:
    folder = copied("megatron", "tp2")
    path = folder / "iter_0000004/common.pt"
    common = torch.load(path, weights_only=False)
    (group,) = common["optimizer"]["param_groups"]
    common["optimizer"]["param_groups"] += [group, {**group, "step": 1}]
    torch.save(common, path)
    check_text(*claims(diff, folder))


def test_a_folder_of_nemo_has_its_weights_inside(copied: Any, diff: Any, tmp_path: Path) -> None:
    """NeMo puts what Megatron-core writes into `weights`, and the configuration into `context`."""
    for side, topology in (("a", "tp2"), ("b", "tp1")):
        name = tmp_path / side / "model--val_loss=2.10-step=3-consumed_samples=32.0-last"
        shutil.copytree(FOREIGN / "megatron" / topology / "iter_0000004", name / "weights")
        (name / "context").mkdir()
        (name / "context/io.json").write_text(json.dumps({"run": 1}))
        (name / "context/model.yaml").write_text("hidden_size: 8\n")
    a, b = tmp_path / "a", tmp_path / "b"
    answer = diff(a, b, "--json")
    assert (answer.code, answer.document["compared"], answer.document["values_compared"]) == (0, 9, 26)
    (lost,) = b.rglob("__0_1.distcp")
    lost.unlink()
    answer = diff(a, b, "--json")
    assert answer.code == 4
    assert str(lost) in [item["file"] for item in answer.document["unreadable"]]
