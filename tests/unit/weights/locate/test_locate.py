"""Which files a path means, and one clear error if it means none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigsci_launch.errors import CheckpointError
from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.formats.contents import read_contents
from bigsci_launch.weights.locate.dumps import place_in_name
from bigsci_launch.weights.locate.locate import open_weights


def test_a_deepspeed_checkpoint_knows_its_topology_and_its_tied_layer(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    tiny(tp=2, pp=2, dp=2).write(tmp_path)
    weights = open_weights(tmp_path)
    assert (weights.layout, weights.topology) == ("deepspeed", Topology(tp=2, pp=2, dp=2))
    assert weights.metadata.tied_keys() == ("embed",)
    assert weights.metadata.stage_of("2.up.weight") == 1
    assert weights.metadata.global_steps == 20
    assert not weights.broken
    assert len(weights.sources) == 6 + 4 + 8


def test_missing_shards_are_named_from_the_topology(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    folder = tiny(tp=2, pp=2, dp=2).write(tmp_path)
    gone = ["mp_rank_03_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt",
            "layer_01-model_01-model_states.pt"]  # fmt: skip
    for name in gone:
        (folder / name).unlink()
    broken = open_weights(folder).broken
    assert sorted(item.path.name for item in broken) == sorted(gone)
    assert all("tp=2,pp=2,dp=2" in item.why for item in broken)


def test_latest_chooses_and_a_dangling_latest_is_an_error(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    tiny(step=10).write(tmp_path)
    tiny(step=20).write(tmp_path)
    assert open_weights(tmp_path).metadata.global_steps == 20
    (tmp_path / "latest").write_text("global_step30")
    with pytest.raises(CheckpointError, match="global_step30") as caught:
        open_weights(tmp_path)
    assert "global_step10, global_step20" in (caught.value.hint or "")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="several checkpoints, but no `latest` file"):
        open_weights(tmp_path)


def test_the_only_checkpoint_needs_no_latest(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    tiny(step=10).write(tmp_path)
    (tmp_path / "latest").unlink()
    assert open_weights(tmp_path).metadata.global_steps == 10


def test_nested_files_of_megatron_are_found(tmp_path: Path, save_arrays: Callable[..., Path]) -> None:
    for rank in range(2):
        save_arrays(tmp_path / f"iter_0000100/mp_rank_0{rank}/w.safetensors", {"w": np.zeros(2)})
    sources = open_weights(tmp_path).sources
    assert [source.label for source in sources] == ["mp_rank_00/w", "mp_rank_01/w"]
    assert [source.place for source in sources] == [Place(pp=0, tp=0), Place(pp=0, tp=1)]


@pytest.mark.parametrize(
    ("stem", "place"),
    [
        ("after-000005-pp01-tp00-dp03", Place(1, 0, 3)),
        ("debug-805-pp11-tp1-dp4-global369-after-iteration-377074", Place(11, 1, 4)),
        ("tp_rank", Place()),
        ("stp1", Place()),
        ("model_pp2", Place(pp=2)),
    ],
)
def test_coordinates_in_file_names(stem: str, place: Place) -> None:
    assert place_in_name(stem) == place


@pytest.mark.parametrize("names", [[], ["notes.txt", "run.log"]], ids=["nothing", "other files"])
def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path, check_text: Any, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path)
    check_text(caught.value.message, caught.value.hint or "")


def test_a_missing_path_and_a_foreign_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a weights file"):
        open_weights(tmp_path / "notes.txt")


def test_links_and_folders_that_pose_as_files_are_told_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("again")
    (tmp_path / "again").symlink_to("round")
    with pytest.raises(CheckpointError, match="round: a symbolic link that is broken or points to itself"):
        open_weights(tmp_path / "round")
    folder = tmp_path / "folder"
    (folder / "model.pt").mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.bin")
    expected = r"model\.pt \(a folder\), model\.safetensors \(a broken link\), pipe\.bin \(not a regular file\)"
    with pytest.raises(CheckpointError, match=expected):
        open_weights(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give the right to read away")
def test_a_folder_without_the_right_to_read_is_one_clear_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secret = Path(folder) / "secret"
        secret.mkdir(mode=0o700)
        code = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from bigsci_launch.weights.locate.locate import open_weights\n"
            "from bigsci_launch.errors import CheckpointError\n"
            "os.setuid(65534)\n"
            "try: open_weights(Path(sys.argv[1]))\n"
            "except CheckpointError as error: print(error.message, '|', error.hint)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(secret)], capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith(f"{secret}: permission denied | "), done.stderr


def test_model_states_of_another_make_are_read_as_far_as_they_go(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    folder = tiny(tp=1, pp=1, dp=1).write(tmp_path)
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    flat = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
    for odd in (
        {"param_shapes": flat},
        {"param_shapes": [5]},
        {"param_shapes": None},
        {"checkpoint_parallel_dimensions": 3},
    ):
        torch.save({**states, **odd}, folder / "mp_rank_00_model_states.pt")
        assert open_weights(folder).topology == Topology(tp=1, pp=1, dp=1)
    torch.save([1, 2], folder / "mp_rank_00_model_states.pt")
    assert open_weights(folder).metadata.shapes == {0: {}}


def test_a_shard_of_another_make_is_named(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    folder = tiny(tp=1, pp=1, dp=1).write(tmp_path)
    weights = open_weights(folder)
    (source,) = (source for source in weights.sources if source.format == "optimizer")
    for odd in ({"param_slice_mappings": [5]}, {"single_partition_of_fp32_groups": 7}):
        shard = {"param_slice_mappings": [], "single_partition_of_fp32_groups": [], "base_optimizer_state": {}, **odd}
        torch.save({"optimizer_state_dict": shard}, source.path)
        with pytest.raises(UnreadableFile, match="contains something unexpected"):
            read_contents(source, weights.metadata)


def test_a_run_is_known_by_its_name(tmp_path: Path, tiny: Any, diff: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        tiny().write(tmp_path / "runs" / name / "checkpoints")
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BSL_RUNS", raising=False)
    answer = diff("one", tmp_path / "runs/two", "--json")
    assert (answer.code, answer.document["a"]) == (0, "runs/one/checkpoints")
    assert diff("--audit", "two").code == 0
    (tmp_path / "two").mkdir()  # an existing path takes precedence
    assert diff("one", "two").code == 4
    assert diff("one", "three").talk.startswith("error: three: ")
