"""Nothing in a folder is left out in silence: files at any depth, files of unknown formats, several checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigsci_launch.errors import CheckpointError
from bigsci_launch.weights.locate import walk as walk_module
from bigsci_launch.weights.locate.locate import open_weights

Pair = Callable[[dict[str, bytes]], tuple[Path, Path]]


@pytest.fixture
def pair(tmp_path: Path, save_arrays: Callable[..., Path]) -> Pair:
    """Makes two equal folders with `model.safetensors` and the given files."""

    def make(files: dict[str, bytes]) -> tuple[Path, Path]:
        save_arrays(tmp_path / "a/model.safetensors", {"w": np.arange(4.0)})
        for name, content in files.items():
            (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / name).write_bytes(content)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        return tmp_path / "a", tmp_path / "b"

    return make


def test_files_below_other_tensor_files_are_read_too(pair: Pair, save_arrays: Any, diff: Any) -> None:
    a, b = pair({})
    for side in (a, b):
        save_arrays(side / "one/two/three/four/deep.safetensors", {"v": np.zeros(3)})
    assert diff(a, b).code == 0
    save_arrays(b / "one/two/three/four/deep.safetensors", {"v": np.ones(3)})
    answer = diff(a, b, "--json")
    assert (answer.code, [item["tensor"] for item in answer.document["different"]]) == (1, ["v"])


def test_links_are_followed_but_never_in_a_circle_and_never_up(pair: Pair, save_arrays: Any, tmp_path: Path) -> None:
    a, _ = pair({})
    save_arrays(tmp_path / "blobs/real.safetensors", {"v": np.zeros(3)})
    (a / "linked.safetensors").symlink_to(tmp_path / "blobs/real.safetensors")
    (a / "sub").mkdir()
    (a / "sub/up").symlink_to(tmp_path)
    (a / "sub/round").symlink_to(a)
    (a / "same").symlink_to("sub")
    assert [source.label for source in open_weights(a).sources] == ["linked", "model"]


def test_a_folder_that_is_far_too_large_is_one_clear_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = pair({f"file{index}.txt": b"x" for index in range(5)})
    monkeypatch.setattr(walk_module, "MAX_ENTRIES", 5)
    with pytest.raises(CheckpointError, match="more than 5 files"):
        open_weights(a)
    monkeypatch.setattr(walk_module, "MAX_ENTRIES", 6)
    monkeypatch.setattr(walk_module, "MAX_DEPTH", 0)
    (a / "sub").mkdir()
    (a / "file0.txt").unlink()
    (nested,) = open_weights(a).broken
    assert (nested.path, " 0 " in nested.why) == (a, True)


def test_what_cannot_be_opened_is_named(pair: Pair, diff: Any) -> None:
    a, b = pair({})
    os.mkfifo(b / "pipe.bin")
    (b / "gone.safetensors").symlink_to("nowhere")
    answer = diff(a, b, "--json")
    unread = {item["file"] for item in answer.document["unreadable"]}
    assert (answer.code, unread) == (4, {f"{b}/gone.safetensors", f"{b}/pipe.bin"})
    assert diff(b / "pipe.bin", a).talk.startswith(f"error: {b}/pipe.bin: ")


@pytest.mark.parametrize(
    "names",
    [
        ("checkpoint-10", "checkpoint-20"),
        ("checkpoint_0", "checkpoint_1"),
        ("iter_0000010", "iter_0000020"),
        ("global_step10", "global_step20"),
        ("step-10", "step-20"),
        ("step1000-unsharded", "step2000-unsharded"),
        ("gpt--val_loss=2.10-step=10-last", "gpt--val_loss=1.90-step=20"),
        ("epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"),
        ("epoch=0-step=10.ckpt", "last.ckpt"),
    ],
)
@pytest.mark.parametrize("inside", ["", "run/checkpoints"])
def test_of_several_checkpoints_one_must_be_named(
    names: tuple[str, str], inside: str, tmp_path: Path, save_arrays: Any
) -> None:
    for name in names:
        save_arrays(tmp_path / inside / name / "model.safetensors", {"w": np.zeros(2)})
    with pytest.raises(CheckpointError, match="several checkpoints, but no `latest` file") as caught:
        open_weights(tmp_path)
    assert caught.value.hint == f"name one of {', '.join(sorted(names))}"
    assert [source.label for source in open_weights(tmp_path / inside / names[0]).sources] == ["model"]
    shutil.rmtree(tmp_path / inside / names[1])
    assert [source.label for source in open_weights(tmp_path).sources] == ["model"]


def test_several_lightning_files_are_several_checkpoints(tmp_path: Path) -> None:
    for name in ("epoch=0-step=10.ckpt", "last.ckpt"):
        torch.save({"state_dict": {"w": torch.zeros(2)}}, tmp_path / name)
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("pointer", "text", "chosen"),
    [
        ("latest", "checkpoint-20", "checkpoint-20"),
        ("latest_checkpointed_iteration.txt", "10\n", "iter_0000010"),
        ("latest_checkpointed_iteration.txt", "release", "release"),
    ],
)
def test_the_file_that_names_the_newest_checkpoint_chooses(
    pointer: str, text: str, chosen: str, tmp_path: Path, save_arrays: Any
) -> None:
    for name in ("checkpoint-10", "checkpoint-20", "iter_0000010", "iter_0000020", "release"):
        save_arrays(tmp_path / name / "model.safetensors", {"w": np.zeros(2)})
    if chosen != "release":
        shutil.rmtree(tmp_path / "release")
    (tmp_path / pointer).write_text(text)
    assert [source.path.parent.name for source in open_weights(tmp_path).sources] == [chosen]


@pytest.mark.parametrize("text", ["../elsewhere", "/etc", ".", "gone", "\0", "a\nb", ""])
def test_that_file_never_leads_out_of_the_folder(text: str, tmp_path: Path, save_arrays: Any) -> None:
    save_arrays(tmp_path / "elsewhere/model.safetensors", {"w": np.zeros(2)})
    save_arrays(tmp_path / "here/checkpoint-10/model.safetensors", {"w": np.zeros(2)})
    (tmp_path / "here/latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest: (names|is empty)"):
        open_weights(tmp_path / "here")


def test_what_is_next_to_the_chosen_checkpoint_is_compared_too(tmp_path: Path, tiny: Any, diff: Any) -> None:
    """Trainer and accelerate put DeepSpeed's folder next to their own files."""
    for side in ("a", "b"):
        tiny().write(tmp_path / side)
        torch.save({"last_epoch": 2}, tmp_path / side / "scheduler.pt")
        (tmp_path / side / "trainer_state.json").write_text('{"global_step": 2}')
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    torch.save({"last_epoch": 3}, tmp_path / "b/scheduler.pt")
    (value,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["values"]
    assert (value["value"], value["a"]["text"], value["b"]["text"]) == ("scheduler.last_epoch", "2", "3")


def test_a_universal_checkpoint_has_more_than_its_parameters(tmp_path: Path, diff: Any) -> None:
    for side in ("a", "b"):
        (tmp_path / side / "zero/w").mkdir(parents=True)
        torch.save({"param": torch.zeros(3)}, tmp_path / side / "zero/w/fp32.pt")
        torch.save({"global_steps": 2}, tmp_path / side / "mp_rank_00_model_states.pt")
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    torch.save({"global_steps": 3}, tmp_path / "b/mp_rank_00_model_states.pt")
    (value,) = diff(tmp_path / "a", tmp_path / "b", "--json").document["values"]
    assert (value["value"].rpartition(".")[2], value["a"]["text"], value["b"]["text"]) == ("global_steps", "2", "3")


def test_a_torch_file_is_read_whatever_its_suffix(pair: Pair, diff: Any) -> None:
    a, b = pair({})
    for side, value in ((a, 0.0), (b, 1.0)):
        torch.save({"v": torch.full((2,), value)}, side / "weights.model")
    assert [item["tensor"] for item in diff(a, b, "--json").document["different"]] == ["v"]
    assert diff(a / "weights.model", b / "weights.model").code == 1
    torch.save({"v": torch.zeros(2)}, b / "weights.model", _use_new_zipfile_serialization=False)
    assert diff(a, b).code == 0


@pytest.mark.parametrize(
    "name", ["model.onnx", "tf_model.h5", "flax_model.msgpack", "model.nemo", "onnx/model", "weights"]
)
def test_a_file_of_an_unknown_format_is_equal_only_if_its_bytes_are(name: str, pair: Pair, diff: Any) -> None:
    a, b = pair({name: b"\x08\x07\x00weights" * 100})
    assert (diff(a, b).code, diff(a, b).text.count("note")) == (0, 0)
    (b / name).write_bytes(b"\x08\x07\x00weightz" * 100)
    answer = diff(a, b, "--json")
    (other,) = answer.document["not_read"]
    assert (answer.code, other["entry"], other["type"], other["file"]) == (4, name, "a file", str(a / name))
    (b / name).unlink()
    (alone,) = diff(a, b, "--json").document["not_read"]
    assert "bytes differ" in other["why"] and "only A" in alone["why"]
    assert diff(b, a).code == 4


def test_files_that_hold_no_weights_are_noted(pair: Pair, diff: Any, check_text: Any) -> None:
    names = [
        "config.json",
        "README.md",
        "modeling.py",
        "merges",
        "tokenizer.model",
        "runs/events.out.tfevents.1.vm",
        ".cache/x",
    ]
    a, b = pair({name: b"one" for name in names} | {"same.json": b"{}", "alone.txt": b"x"})
    (b / "alone.txt").unlink()
    for name in names:
        (b / name).write_bytes(b"\0\xff" if "." in name else b"two")
    answer = diff(a, b, "--json")
    assert answer.code == 0
    check_text(*answer.document["notes"])
    assert diff(a, b / "model.safetensors", "--json").document["notes"] == []


def test_two_files_of_one_stem_keep_their_own_counterparts(pair: Pair, diff: Any) -> None:
    a, b = pair({})
    for side in (a, b):
        torch.save({"w": torch.ones(4)}, side / "model.bin")
    assert diff(a, b).code == 0
    torch.save({"w": torch.zeros(4)}, b / "model.bin")
    assert diff(a, b).code == 1
