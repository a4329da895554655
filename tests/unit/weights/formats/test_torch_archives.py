"""Archives of TorchScript and of torch.export: every record of them is compared."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

VALUES = torch.arange(6.0).reshape(2, 3)


class Net(torch.nn.Module):
    """A layer, a buffer, an option and a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 3)
        self.register_buffer("mean", torch.ones(2))
        self.factor = 5
        self.sizes = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.layer(x - self.mean) * self.factor, self.sizes[0])


@pytest.fixture(scope="module")
def script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Net())


def saved(module: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(module, str(path))
    return path


def changed_records(path: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Write a zip again with its records changed."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as made:
        for info in source.infolist():
            made.writestr(info, change(info.filename.partition("/")[2], source.read(info)))
    return target


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_script_is_recognised_whatever_its_name_is(tmp_path: Path, script: Any, diff: Any, is_frozen: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = torch.jit.load(str(saved(script, tmp_path / "own.pt"))).eval()
        module = torch.jit.freeze(own) if is_frozen else own
    a, b = saved(module, tmp_path / "a.jit"), saved(module, tmp_path / "b.pt")
    assert diff(a, b).code == diff(a, a).code == 0
    (tmp_path / "folder").mkdir()
    a.rename(tmp_path / "folder" / "voice")
    assert diff(tmp_path / "folder", tmp_path / "folder", "--json").document["unreadable"] == []


def test_a_script_is_equal_to_itself_and_its_tensors_have_their_names(tmp_path: Path, script: Any, diff: Any) -> None:
    a = saved(script, tmp_path / "a.pt")
    assert diff(a, saved(script, tmp_path / "b.pt")).code == 0
    changes: list[tuple[Any, str]] = [
        (lambda net: net.layer.weight.data.add_(1), "layer.weight"),
        (lambda net: net.mean.add_(1), "mean"),
        (lambda net: setattr(net, "factor", 6), "factor"),
        (lambda net: net.eval(), "training"),
    ]
    for change, name in changes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = torch.jit.load(str(a))
        change(other)
        document = diff(a, saved(other, tmp_path / "b.pt"), "--json").document
        names = [entry["tensor"] for entry in document["different"]] + [entry["value"] for entry in document["values"]]
        assert name in names, (name, names)
        assert not document["not_read"]


def test_code_and_constants_are_compared(tmp_path: Path, script: Any, diff: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(script.eval())
    a = saved(frozen, tmp_path / "a.pt")
    with zipfile.ZipFile(a) as archive:
        kinds = {name.partition("/")[2] for name in archive.namelist()}
    assert any(name.startswith("constants/") for name in kinds), "the file has no constants: the test shows nothing"

    def of_constant(name: str, data: bytes) -> bytes:
        return bytes([data[0] ^ 1, *data[1:]]) if name == "constants/0" else data

    def of_code(name: str, data: bytes) -> bytes:
        return data.replace(b"forward", b"backward") if name.endswith(".py") else data

    for change, name in ((of_constant, "constants.pkl.0"), (of_code, "record code/__torch__/")):
        answer = diff(a, changed_records(a, tmp_path / "b.pt", change), "--json")
        assert answer.code == 1, name
        document = answer.document
        names = [entry["tensor"] for entry in document["different"]] + [entry["value"] for entry in document["values"]]
        assert any(name in found for found in names), names
    assert diff(a, changed_records(a, tmp_path / "b.pt", lambda name, data: data)).code == 0


def as_state_dict(path: Path, module: Any) -> Path:
    torch.save(module.state_dict(), path)
    return path


def test_a_script_has_the_weights_of_its_state_dict(tmp_path: Path, script: Any, diff: Any) -> None:
    a, b = saved(script, tmp_path / "a.pt"), as_state_dict(tmp_path / "b.pt", script)
    torch.save({"model": script.state_dict()}, tmp_path / "inside.pt")
    save_file(script.state_dict(), tmp_path / "b.safetensors")
    (tmp_path / "folder").mkdir()
    save_file(script.state_dict(), tmp_path / "folder" / "model.safetensors")
    for state in (b, tmp_path / "inside.pt", tmp_path / "b.safetensors", tmp_path / "folder"):
        for first, second in ((a, state), (state, a)):
            answer = diff(first, second, "--json")
            assert (answer.code, answer.document["compared"]) == (0, 3)
            assert any("values of " in note and note.endswith(": not compared") for note in answer.document["notes"])
    code = "the code, options and constants of a program: not compared"
    assert any(code in note for note in diff(a, b, "--json").document["notes"])

    changed = Net()
    changed.mean[1] += 1
    (entry,) = diff(a, as_state_dict(tmp_path / "c.pt", changed), "--json").document["different"]
    assert (entry["tensor"], entry["first_at"]) == ("mean", [1])


def test_a_checkpoint_with_more_than_weights_differs_from_a_script(tmp_path: Path, script: Any, diff: Any) -> None:
    a = saved(script, tmp_path / "a.pt")
    torch.save({"model": script.state_dict(), "step": 5}, tmp_path / "b.pt")
    assert diff(a, tmp_path / "b.pt").code == 1
    assert diff(tmp_path / "b.pt", a).code == 1


def test_tensors_of_the_code_are_no_weights(tmp_path: Path, diff: Any) -> None:
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x * 5)  # traced, the number is a tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Adds(), torch.ones(1, 2))
        frozen = torch.jit.freeze(traced.eval())
    a, b = saved(traced, tmp_path / "a.pt"), as_state_dict(tmp_path / "b.pt", traced)
    answer = diff(a, b, "--json")
    assert (answer.code, answer.document["compared"]) == (0, 2)
    assert any(note.startswith("1 tensor and ") for note in answer.document["notes"])
    # The weights of a frozen module are such constants, and no longer have names.
    answer = diff(saved(frozen, tmp_path / "frozen.pt"), b)
    assert (answer.code, "constants.pkl.0" in answer.talk) == (4, True)


def exported(path: Path, values: torch.Tensor = VALUES, graph: str = "{}", version: str = "0") -> Path:
    """Write what `torch.export.save` of torch 2.13 writes for a program with one parameter."""
    meta = {
        "dtype": 7,
        "sizes": [{"as_int": length} for length in values.shape],
        "requires_grad": True,
        "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": stride} for stride in values.stride()],
        "storage_offset": {"as_int": 0},
        "layout": 7,
    }
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in {
        "data/weights/weight_0": bytes(values.untyped_storage()),
        "data/weights/model_weights_config.json": json.dumps({"config": {"layer.weight": entry}}).encode(),
        "models/model.json": graph.encode(),
        "archive_format": b"pt2",
        "archive_version": version.encode(),
    }.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def test_an_exported_program_is_read_by_the_names_of_its_parameters(tmp_path: Path, diff: Any) -> None:
    a = exported(tmp_path / "a.pt")
    assert diff(a, exported(tmp_path / "b.pt", version="1")).code == 0
    (entry,) = diff(a, exported(tmp_path / "b.pt", VALUES + (VALUES == 4)), "--json").document["different"]
    assert (entry["tensor"], entry["a"]["shape"], entry["max_abs"]) == ("layer.weight", [2, 3], 1.0)
    (value,) = diff(a, exported(tmp_path / "b.pt", graph="{ }"), "--json").document["values"]
    assert value["value"] == "record models/model.json"
    torch.save({"layer.weight": VALUES}, tmp_path / "state.pt")
    assert diff(a, tmp_path / "state.pt", "--include", "^layer").code == 0


def test_a_record_that_nothing_refers_to_is_compared(tmp_path: Path, diff: Any) -> None:
    torch.save({"w": VALUES}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        folder = archive.namelist()[0].partition("/")[0]
    for name, data in (("b", b"one"), ("c", b"two")):
        target = changed_records(tmp_path / "a.pt", tmp_path / f"{name}.pt", lambda _name, data: data)
        with zipfile.ZipFile(target, "a") as archive:
            archive.writestr(f"{folder}/data/77", data)
    assert diff(tmp_path / "b.pt", tmp_path / "b.pt").code == 0
    (value,) = diff(tmp_path / "b.pt", tmp_path / "c.pt", "--json").document["values"]
    assert value["value"] == "record data/77"
