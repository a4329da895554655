"""Files that torch would load are read as descriptions first, and may only name what checkpoints consist of."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import CheckpointError
from bigsci_launch.safe_pickle import ForbiddenPickle

pytestmark = pytest.mark.torch


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def state(**more: Any) -> Any:
    import torch

    weights = OrderedDict({"x": torch.ones(3, dtype=torch.bfloat16), "y": torch.ones(2, dtype=torch.int64)})
    return {"module": weights, "param_shapes": [{"x": torch.Size([3])}], "step": 7, "flags": (True, None, 0.5), **more}


def test_what_a_checkpoint_consists_of_is_loaded(tmp_path: Path) -> None:
    import torch

    from bigsci_launch.train.state.reshard import load_mapped

    torch.save(state(), tmp_path / "mp_rank_00_model_states.pt")
    assert torch.equal(load_mapped(tmp_path / "mp_rank_00_model_states.pt")["module"]["x"], state()["module"]["x"])


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_program_is_refused_by_name_and_not_run(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    import torch

    from bigsci_launch.train.state.foreign import require_plain_checkpoint
    from bigsci_launch.train.state.reshard import load_mapped

    path = tmp_path / "mp_rank_00_model_states.pt"
    hostile = state(zz=Runs(f"touch {tmp_path}/PWNED"))
    torch.save(hostile, path, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    for load in (load_mapped, lambda path: require_plain_checkpoint(path.parent)):
        with pytest.raises(CheckpointError) as refused:
            load(path)
        expected = "would run posix.system when it is loaded" if is_zip else "not the archive that torch.save writes"
        assert str(path) in refused.value.message and expected in refused.value.message
    assert not (tmp_path / "PWNED").exists()
    torch.load(path, weights_only=False)  # it is one
    assert (tmp_path / "PWNED").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    import torch

    from bigsci_launch.train.state.foreign import require_plain

    path = tmp_path / "x.pt"
    for content in (b"", b"PK\x03\x04", pickle.dumps(Runs("true"))):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            require_plain(path)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(path))
    with pytest.raises(CheckpointError, match="a program of TorchScript"):
        require_plain(path)


def test_a_checkpoint_is_foreign_if_others_may_have_written_it(tmp_path: Path) -> None:
    from bigsci_launch.train.state.foreign import is_foreign

    own, folder = tmp_path / "checkpoints", tmp_path / "checkpoints" / "global_step1"
    folder.mkdir(parents=True)
    (folder / "x.pt").touch(mode=0o644)
    assert not is_foreign(folder, own)
    assert is_foreign(folder, tmp_path / "other" / "checkpoints")
    for path in (folder, folder / "x.pt"):
        before = path.stat().st_mode
        path.chmod(before | 0o020)
        assert is_foreign(folder, own)
        path.chmod(before)
    archived = folder.rename(tmp_path / "archived")
    folder.symlink_to(archived)
    assert is_foreign(folder, own)
    folder.unlink()
    archived.rename(folder)
    if os.geteuid() == 0:
        os.chown(folder / "x.pt", 65534, -1)
        assert is_foreign(folder, own)


def test_a_file_that_is_exchanged_after_the_look_builds_nothing_else(tmp_path: Path) -> None:
    import torch

    from bigsci_launch.train.state.foreign import plain_loads

    torch.save(state(), tmp_path / "plain.pt")
    torch.save(state(evil=Runs(f"touch {tmp_path}/PWNED")), tmp_path / "evil.pt")
    with plain_loads():
        assert torch.load(tmp_path / "plain.pt", weights_only=False)["step"] == 7
        with pytest.raises(ForbiddenPickle, match=r"posix\.system"):
            torch.load(tmp_path / "evil.pt", map_location="cpu", weights_only=False)
    assert not (tmp_path / "PWNED").exists()
    assert torch.load.__module__ == "torch.serialization"
