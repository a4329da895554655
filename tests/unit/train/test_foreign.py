"""Files that torch would load are read as descriptions first, and may only name what checkpoints consist of."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
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
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    from bigsci_launch.train.state.reshard import load_mapped

    more = {"scaler": LossScaler(1.0), "stage": ZeroStageEnum.weights, "where": fragment_address(numel=3, start=0)}
    torch.save(state(**more), tmp_path / "mp_rank_00_model_states.pt")
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
        expected = "posix.system" if is_zip else "torch.save"
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
        with pytest.raises(CheckpointError, match=str(path)):
            require_plain(path)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(path))
    with pytest.raises(CheckpointError, match="TorchScript"):
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


@pytest.mark.parametrize("above", ["project", "project/run", "project/run/checkpoints"])
def test_a_checkpoint_is_foreign_if_others_may_rename_a_folder_above_it(above: str) -> None:
    """In the place of a run of ours, or of its checkpoints, they could put theirs. Nobody may enter `tmp_path`."""
    from bigsci_launch.train.state.foreign import is_foreign

    with TemporaryDirectory(dir="/tmp") as place:
        own = Path(place, "project/run/checkpoints")
        (own / "global_step1").mkdir(parents=True)
        for folder in (Path(place), Path(place, "project"), own.parent, own):
            folder.chmod(0o755)
        assert not is_foreign(own / "global_step1", own)
        Path(place, above).chmod(0o777)
        assert is_foreign(own / "global_step1", own)


class Renames:
    """Stands for DeepSpeed, and for a colleague who may write above the checkpoint and is quicker."""

    def __init__(self, theirs: Path) -> None:
        self.theirs = theirs

    def load_checkpoint(self, folder: str, tag: str) -> None:
        import torch

        Path(folder).rename(f"{folder}.before")
        self.theirs.rename(folder)
        for path in Path(folder, tag).glob("*.pt"):
            torch.load(str(path), map_location="cpu", weights_only=False)


def test_a_folder_that_is_exchanged_after_the_look_runs_nothing(tmp_path: Path) -> None:
    import torch

    from bigsci_launch.checkpoints.changes import Acceptance
    from bigsci_launch.train.state.checkpoint import ChosenCheckpoint, load_checkpoint
    from bigsci_launch.train.state.foreign import is_foreign

    named, theirs = tmp_path / "named" / "global_step4", tmp_path / "theirs" / "global_step4"
    for folder, saved in ((named, state()), (theirs, state(zz=Runs(f"touch {tmp_path}/PWNED")))):
        folder.mkdir(parents=True)
        torch.save(saved, folder / "mp_rank_00_model_states.pt")
    verdict = is_foreign(named, tmp_path / "run" / "checkpoints")
    chosen: Any = ChosenCheckpoint(named, None, verdict, (), Acceptance())  # type: ignore[arg-type]
    nothing: Any = None
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        load_checkpoint(Renames(theirs.parent), chosen, nothing, nothing)
    assert not (tmp_path / "PWNED").exists() and (tmp_path / "named.before").exists()


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


def save_script(path: Path, made: Path) -> bytes:
    """Write an archive of TorchScript that makes a file when it is loaded, and return its content."""
    import torch
    from torch import Tensor

    class Script(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.zeros(2)
            self.made = str(made)

        @torch.jit.export
        def __getstate__(self) -> tuple[Tensor, str, bool]:
            return self.x, self.made, True

        @torch.jit.export
        def __setstate__(self, state: tuple[Tensor, str, bool]) -> None:
            self.x, self.made, self.training = state[0], state[1], state[2]
            torch.save(state[0], state[1])

        def forward(self) -> Tensor:
            return self.x

    torch.jit.script(Script()).save(str(path))
    return path.read_bytes()


class Changing(io.BytesIO):
    """A file that is written anew, in place, while it is read: at its operation `left`."""

    def __init__(self, before: bytes, after: bytes, left: int) -> None:
        super().__init__(before)
        self.after, self.left = after, left

    def _change(self) -> None:
        self.left -= 1
        if self.left == 0:
            at = self.tell()
            super().seek(0)
            super().truncate(0)
            super().write(self.after)
            super().seek(at)

    def seek(self, *args: Any) -> int:
        self._change()
        return super().seek(*args)

    def read(self, *args: Any) -> bytes:
        self._change()
        return super().read(*args)

    def readinto(self, buffer: Any) -> int:
        self._change()
        return super().readinto(buffer)


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torchscript_never_runs(tmp_path: Path) -> None:
    """torch reads such an archive without the reader of pickles that it was given."""
    import torch

    from bigsci_launch.train.state.foreign import PLAIN, load_mapped, load_plain, plain_loads
    from bigsci_launch.weights.objects.nodes import BadPickle

    script = save_script(tmp_path / "x.pt", tmp_path / "PWNED")
    with plain_loads():
        for load in (torch.load, load_plain, load_mapped):
            with pytest.raises((BadPickle, CheckpointError), match="TorchScript"):
                load(tmp_path / "x.pt")
        with pytest.raises(BadPickle, match="TorchScript"):
            torch.load(str(tmp_path / "x.pt"), "cpu", weights_only=False, mmap=True)
    torch.save(state(), tmp_path / "plain.pt")
    plain = (tmp_path / "plain.pt").read_bytes()
    with plain_loads():
        for operation in range(1, 60):
            with contextlib.suppress(BadPickle, ForbiddenPickle, RuntimeError, ValueError):
                torch.load(Changing(plain, script, operation), weights_only=False)
    assert not (tmp_path / "PWNED").exists()
    torch.load(tmp_path / "x.pt", pickle_module=PLAIN, weights_only=False)
    assert (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("mode", [0o644, 0o664])
def test_only_files_that_nobody_else_may_write_are_mapped(tmp_path: Path, mode: int) -> None:
    """Reading a mapped file that somebody has cut kills the process."""
    import torch

    from bigsci_launch.train.state.foreign import load_mapped

    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(100_000)}, path)
    path.chmod(mode)
    found = load_mapped(path)["x"]
    assert (str(path) in Path("/proc/self/maps").read_text()) == (mode == 0o644)
    path.write_bytes(b"") if mode != 0o644 else path.unlink()
    assert torch.equal(found, torch.arange(100_000))


def torch_file(path: Path, program: bytes) -> Path:
    """A file of `torch.save` whose pickle is exchanged for another one."""
    import torch

    torch.save([], path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, program if name.endswith("/data.pkl") else content)
    return path


STAGE, REBUILD = "deepspeed.runtime.zero.config\nZeroStageEnum", "torch._utils\n_rebuild_tensor_v2"
SET_ATTRIBUTE = "N}V_marked\nI7\ns\x86b"
"""Sets the attribute of what is on the stack, whatever it is: a state for `__slots__` is given to `setattr`."""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"c{REBUILD}\n{SET_ATTRIBUTE}.", "torch._utils._rebuild_tensor_v2"),
        (f"c{STAGE}\n{SET_ATTRIBUTE}.", STAGE.replace("\n", ".")),
        (f"c{STAGE}\nI1\n\x85R{SET_ATTRIBUTE}.", STAGE.replace("\n", ".")),
    ],
)
def test_nothing_that_stays_in_the_process_is_changed(tmp_path: Path, program: str, words: str) -> None:
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from bigsci_launch.train.state.foreign import plain_loads, require_plain
    from bigsci_launch.weights.objects.nodes import BadPickle

    path = torch_file(tmp_path / "x.pt", b"\x80\x02" + program.encode("latin-1"))
    places = (torch._utils._rebuild_tensor_v2, ZeroStageEnum, ZeroStageEnum(1))
    with pytest.raises(CheckpointError, match=words):
        require_plain(path)
    with plain_loads(), pytest.raises((BadPickle, ForbiddenPickle), match=words):
        torch.load(path, weights_only=False)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert not any(hasattr(place, "_marked") for place in places)
    torch.load(path, weights_only=False)  # it would be
    (changed,) = [place for place in places if "_marked" in vars(place)]
    delattr(changed, "_marked")


def by_getattr(member: Any, protocol: int) -> Any:
    """How Python 3.11.2 reduces the member of an enumeration."""
    return getattr, (type(member), member.name)


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_an_enumeration_by_getattr_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """So Python 3.11.2 pickles the stage of ZeRO, which is in every file of an optimizer."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from bigsci_launch.train.state.foreign import load_mapped, plain_loads, require_plain

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_getattr)
    path = tmp_path / "x.pt"
    torch.save(state(stage=ZeroStageEnum.weights, again=ZeroStageEnum.disabled), path, pickle_protocol=protocol)
    with zipfile.ZipFile(path) as archive:
        assert b"getattr" in archive.read("x/data.pkl")
    require_plain(path)
    with plain_loads():
        found = [load_mapped(path), torch.load(path, weights_only=False)]
    assert [(each["stage"], each["again"]) for each in found] == [(ZeroStageEnum.weights, ZeroStageEnum.disabled)] * 2


GETATTR = "c__builtin__\ngetattr\n"


@pytest.mark.parametrize(
    "program",
    [
        f"{GETATTR}(c{STAGE}\nV__init__\ntR.",
        f"{GETATTR}(c{STAGE}\nVweights\nNtR.",
        f"{GETATTR}(c{STAGE}\n)tR.",
        f"{GETATTR}(c{STAGE}\nC\x07weightstR.",
        f"{GETATTR}({GETATTR}(c{STAGE}\nVweights\ntRV__class__\ntR.",
        f"{GETATTR}(c{REBUILD}\nV__globals__\ntR.",
        f"{GETATTR}(ctorch\nSize\nV__init__\ntR.",
        f"{GETATTR}(I1\nVreal\ntR.",
        f"{GETATTR})R.",
        f"({GETATTR}c{STAGE}\nV__init__\no.",
        f"(c{STAGE}\nV__init__\ni__builtin__\ngetattr\n.",
        f"{GETATTR}(c{STAGE}\nVweights\ntR{SET_ATTRIBUTE}.",
        f"{GETATTR}{SET_ATTRIBUTE}.",
    ],
)
def test_getattr_gets_nothing_else(tmp_path: Path, program: str) -> None:
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from bigsci_launch.train.state.foreign import plain_loads, require_plain
    from bigsci_launch.weights.objects.nodes import BadPickle

    path = torch_file(tmp_path / "x.pt", b"\x80\x02" + program.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"getattr|sets attributes|__\w+__"):
        require_plain(path)
    with plain_loads(), pytest.raises((BadPickle, ForbiddenPickle)):
        torch.load(path, weights_only=False)
    assert not hasattr(ZeroStageEnum.weights, "_marked")


def test_what_is_called_for_getattr_gets_nothing_else() -> None:
    """It is what runs, whatever the look at a pickle has overlooked."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from bigsci_launch.train.state.foreign import PLAIN

    names = [text.encode() + b"\ngetattr\n" for text in ("__builtin__", "builtins")]
    for name in names:
        (get,) = unlooked(PLAIN, b"c" + name + b"\x85.")
        assert get(ZeroStageEnum, "weights") is ZeroStageEnum.weights
        for owner, attribute in ((ZeroStageEnum, "__init__"), (os, "system"), (ZeroStageEnum.weights, "name")):
            with pytest.raises(ForbiddenPickle, match=r"builtins\.getattr"):
                get(owner, attribute)


def unlooked(module: Any, content: bytes) -> Any:
    """Build what a pickle asks for with the unpickler of a module, past the look."""
    found = module.Unpickler(io.BytesIO(b"N."))
    pickle.Unpickler.__init__(found, io.BytesIO(content))
    return found.load()
