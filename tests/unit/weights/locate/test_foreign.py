"""Folders that other libraries wrote: equal to themselves; one change in any part is found there; damage is exit 4."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

FOREIGN = Path(__file__).parents[1] / "foreign"
FOLDERS = {
    "trainer": {"weights", "optimizer", "scheduler", "random states", "training arguments", "trainer state"},
    "accelerate": {"weights", "optimizer", "scheduler", "random states", "other"},
    "fsdp-full": {"weights", "optimizer", "scheduler"},
    "lightning": set(),
    "adapter": set(),
    "sharded/whole": set(),
    "sharded/shards": set(),
}
Change = Callable[[Path], None]


def flip_last(path: Path) -> None:
    """Flip a bit of the last byte, which is a tensor's in a safetensors file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def in_record(record: str, change: Callable[[bytes], bytes]) -> Change:
    """Change one record of a torch file."""

    def rewrite(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        (name,) = (name for name in records if name.endswith(f"/{record}"))
        assert change(records[name]) != records[name]
        records[name] = change(records[name])
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data)

    return rewrite


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1, *data[1:]])


def in_text(old: str, new: str) -> Change:
    def rewrite(path: Path) -> None:
        path.write_text(path.read_text().replace(old, new, 1))

    return rewrite


LAST_EPOCH = in_record("data.pkl", replaced(b"last_epochq\x03K\x02", b"last_epochq\x03K\x03"))
CHANGES: list[tuple[str, Change, str]] = [
    ("trainer/model.safetensors", flip_last, "weights"),
    ("trainer/optimizer.pt", in_record("data/5", flipped), "optimizer"),
    ("trainer/optimizer.pt", in_record("data.pkl", replaced(b"weight_decay", b"weight_decoy")), "optimizer"),
    ("trainer/scheduler.pt", LAST_EPOCH, "scheduler"),
    ("trainer/rng_state.pth", in_record("data/0", flipped), "random states"),
    ("trainer/training_args.bin", in_record("data.pkl", replaced(b"foreign", b"Foreign")), "training arguments"),
    ("trainer/trainer_state.json", in_text('"global_step": 2', '"global_step": 3'), "trainer state"),
    ("trainer/trainer_state.json", in_text('"loss": 2', '"loss": 3'), "trainer state"),
    ("accelerate/model.safetensors", flip_last, "weights"),
    ("accelerate/optimizer.bin", in_record("data/3", flipped), "optimizer"),
    ("accelerate/scheduler.bin", in_record("data.pkl", replaced(b"last_epoch", b"lost_epoch")), "scheduler"),
    ("accelerate/random_states_0.pkl", in_record("data.pkl", replaced(b"MT19937", b"MT19938")), "random states"),
    ("accelerate/custom_checkpoint_0.pkl", in_record("data/0", flipped), "other"),
    ("accelerate/custom_checkpoint_0.pkl", in_record("data.pkl", replaced(b"K\x03", b"K\x04")), "other"),
    ("fsdp-full/pytorch_model_fsdp.bin", in_record("data/0", flipped), "weights"),
    ("fsdp-full/optimizer.bin", in_record("data/0", flipped), "optimizer"),
    ("lightning/epoch=0-step=4.ckpt", in_record("data/0", flipped), ""),
    ("lightning/epoch=0-step=4.ckpt", in_record("data.pkl", replaced(b"global_stepq", b"glabal_stepq")), ""),
    ("adapter/adapter_model.safetensors", flip_last, ""),
    ("sharded/shards/model-00002-of-00003.safetensors", flip_last, ""),
]  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Copies a foreign folder; returns the original and the copy."""

    def copy(name: str) -> tuple[Path, Path]:
        shutil.copytree(FOREIGN / name, tmp_path / name)
        return FOREIGN / name, tmp_path / name

    return copy


@pytest.mark.parametrize("name", FOLDERS)
def test_a_foreign_folder_is_equal_to_its_copy(name: str, copied: Any, diff: Any) -> None:
    answer = diff(*copied(name), "--json")
    document = answer.document
    assert (answer.code, document["equal"], document["notes"], document["not_read"]) == (0, True, [], [])
    components = document["components"]
    assert {counts["component"] for counts in components} == FOLDERS[name]
    for key in ("compared", "values_compared"):
        assert not components or sum(counts[key] for counts in components) == document[key]


@pytest.mark.parametrize(
    ("file", "change", "component"), CHANGES, ids=[f"{row[0]}-{i}" for i, row in enumerate(CHANGES)]
)
def test_one_change_in_a_foreign_folder_is_found_in_its_component(
    file: str, change: Change, component: str, copied: Any, diff: Any
) -> None:
    a, b = copied(file.rpartition("/")[0])
    change(b / Path(file).name)
    answer = diff(a, b, "--json")
    assert answer.code == 1
    differing = {
        counts["component"]
        for counts in answer.document["components"]
        if counts["different"] or counts["values_different"]
    }
    assert differing == ({component} if component else set())


@pytest.mark.parametrize("file", sorted({row[0] for row in CHANGES}))
def test_a_damaged_file_of_a_foreign_folder_is_named(file: str, copied: Any, diff: Any) -> None:
    a, b = copied(file.rpartition("/")[0])
    damaged = b / Path(file).name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    answer = diff(a, b, "--json")
    assert answer.code == 4
    assert [item["file"] for item in answer.document["unreadable"]] == [str(damaged)]


@pytest.mark.parametrize(("name", "lost"), [("trainer", "optimizer.pt"), ("accelerate", "scheduler.bin")])
def test_a_lost_component_is_on_one_side_only(name: str, lost: str, copied: Any, diff: Any) -> None:
    a, b = copied(name)
    (b / lost).unlink()
    answer = diff(a, b, "--json")
    found = {part["component"]: part for part in answer.document["components"]}[lost.partition(".")[0]]
    assert (answer.code, found["compared"], found["values_compared"]) == (1, 0, 0)
    assert found["different"] + found["values_different"] > 0


def test_each_component_has_a_line_after_the_headline(copied: Any, diff: Any, check_text: Any) -> None:
    check_text(diff(*copied("accelerate")).text)


def test_a_file_against_a_folder_is_counted_by_the_parts_of_the_folder(tmp_path: Path, diff: Any) -> None:
    """What was compared is counted, and in no part of which nothing was."""
    weights = {"a.weight": torch.randn(4, 4), "b.weight": torch.randn(3)}
    state = {"state": {0: {"exp_avg": torch.randn(4, 4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    torch.save(state, folder / "optimizer.pt")
    torch.save({"model": weights, "optimizer": state}, tmp_path / "both.pt")
    torch.save({"optimizer": state}, tmp_path / "state.pt")

    def parts(*sides: Path) -> dict[str, tuple[int, int, int]]:
        """Return tensors and values that were compared, and tensors that differ, of each component."""
        names = ("compared", "values_compared", "different")
        components = diff(*sides, "--json").document["components"]
        return {part["component"]: tuple(part[name] for name in names) for part in components}

    compared = {"optimizer": (1, 3, 0)}
    for file, first in ((tmp_path / "both.pt", (2, 0, 0)), (tmp_path / "state.pt", (0, 0, 2))):
        assert parts(file, folder) == parts(folder, file) == {"weights": first, **compared}
    # By its name, the file is one of weights.
    (folder / "model.safetensors").unlink()
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save({"optimizer": state, "scheduler": {"last_epoch": 3}}, tmp_path / "state.pt")
    assert parts(tmp_path / "state.pt", folder) == {**compared, "scheduler": (0, 1, 0)}


@pytest.mark.parametrize(
    "other", ["whole", "small-shards", "whole/model.safetensors", "shards/model.safetensors.index.json"]
)
def test_one_model_is_equal_however_it_is_sharded(other: str, diff: Any) -> None:
    answer = diff(FOREIGN / "sharded/shards", FOREIGN / "sharded" / other, "--json")
    assert (answer.code, answer.document["compared"], answer.document["notes"]) == (0, 16, [])


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_change_in_a_folder_of_fsdp_is_never_equal(folder: str, copied: Any, diff: Any) -> None:
    a, b = copied("fsdp-sharded")
    file = b / folder / "__0_0.distcp"
    data = file.read_bytes()
    # A storage begins after its name and its padding, whose length is between the two.
    padding = data.index(b"/data/0FB") + len(b"/data/0FB")
    at = padding + 2 + int.from_bytes(data[padding : padding + 2], "little")
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert diff(a, b).code != 0
    file.unlink()
    assert diff(a, b).code == 4
