"""A pickle is a program that none of our readers runs, neither those of the package nor the node agent's."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bigsci_launch.safe_pickle import ForbiddenPickle, SafeUnpickler
from bigsci_launch.spy.inputs.flight_recorder import read_recorder_pickle
from bigsci_launch.spy.inputs.reading import Damaged
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.formats.torch_file import LEGACY_START, read_torch_file
from bigsci_launch.weights.objects.nodes import Instance, Named, Outside

from .conftest import Parsed, Program, imports

EXTENSION = 0xF1


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def attribute(thing: bytes, name: str) -> bytes:
    return call(named("builtins", "getattr"), thing, text(name))


OS = call(named("builtins", "__import__"), text("os"))
MKDIR = named("posix", "mkdir")
# Each pushes one object, and makes a folder when an ordinary unpickler builds it.
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "os.system": lambda path: call(named("posix", "system"), text(f"mkdir '{path}'")),
    "builtins.eval": lambda path: call(named("builtins", "eval"), text(f"__import__('os').mkdir({path!r})")),
    "builtins.exec": lambda path: call(named("builtins", "exec"), text(f"import os; os.mkdir({path!r})")),
    "chain of getattr": lambda path: call(attribute(attribute(attribute(OS, "path"), "os"), "mkdir"), text(path)),
    "nested reduce": lambda path: call(
        named("builtins", "list"), call(named("builtins", "map"), MKDIR, b"(" + text(path) + b"l")
    ),
    "name on the stack": lambda path: call(text("posix") + text("mkdir") + b"\x93", text(path)),
    "dotted name": lambda path: call(text("os") + text("path.os.mkdir") + b"\x93", text(path)),
    "old instance": lambda path: b"(" + text(path) + b"iposix\nmkdir\n",
    "old object": lambda path: b"(" + MKDIR + text(path) + b"o",
    "partial": lambda path: call(call(named("functools", "partial"), MKDIR, text(path))),
    "method caller": lambda path: call(call(named("operator", "methodcaller"), text("mkdir"), text(path)), OS),
    "extension": lambda path: call(b"\x82" + bytes([EXTENSION]), text(path)),
}
REFERENCES = {"reference": text("elsewhere") + b"Q", "reference in text": b"Pelsewhere\n"}


def recorder(fragment: bytes) -> bytes:
    """Return a dump of torch's recorder that contains a fragment."""
    entries, groups = text("entries") + b"]s", text("pg_config") + b"}s"
    return b"\x80\x04}" + entries + groups + text("version") + fragment + b"s."


@pytest.fixture(params=HOSTILE)
def fragment(request: pytest.FixtureRequest, victim: Path) -> Iterator[bytes]:
    copyreg.add_extension("posix", "mkdir", EXTENSION)
    yield HOSTILE[request.param](str(victim))
    copyreg.remove_extension("posix", "mkdir", EXTENSION)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    return tmp_path / "victim"


def test_the_pickles_are_hostile(fragment: bytes, victim: Path) -> None:
    try:
        pickle.loads(recorder(fragment))
    finally:
        copyreg.clear_extension_cache()
    assert victim.exists()


def test_the_package_refuses_them(fragment: bytes, victim: Path) -> None:
    with pytest.raises(ForbiddenPickle, match=r"would run \w+\."):
        SafeUnpickler(io.BytesIO(recorder(fragment))).load()
    with pytest.raises(Damaged, match=r"would run \w+\."):
        read_recorder_pickle(Path("nccl_trace_rank_0"), recorder(fragment))
    assert not victim.exists()


def test_the_node_agent_refuses_them(program: Program, tmp_path: Path, fragment: bytes, victim: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(recorder(fragment))
    with pytest.raises(ValueError, match=r"would run \w+\."):
        program("node_recorder").read_dump(str(tmp_path / "nccl_trace_rank_0"), os.getuid())
    assert not victim.exists()


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_file_of_weights_makes_nothing_of_them(tmp_path: Path, fragment: bytes, victim: Path, is_zip: bool) -> None:
    write_torch_file(tmp_path / "w.pt", b"\x80\x04" + fragment + b".", is_zip)
    try:
        found = read_torch_file(tmp_path / "w.pt").tree
    except UnreadableFile:
        pass
    else:
        assert isinstance(found, (Instance, Named, Outside))
    assert not victim.exists()


def write_torch_file(path: Path, data: bytes, is_zip: bool) -> None:
    if is_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
    else:
        path.write_bytes(LEGACY_START + pickle.dumps(1001) + pickle.dumps({"little_endian": True}) + data + b"]." * 2)


@pytest.mark.parametrize("name", REFERENCES)
def test_objects_that_are_kept_elsewhere_are_refused(program: Program, tmp_path: Path, name: str) -> None:
    data = recorder(REFERENCES[name])
    with pytest.raises(ForbiddenPickle, match="outside itself"):
        SafeUnpickler(io.BytesIO(data)).load()
    with pytest.raises(Damaged, match="outside itself"):
        read_recorder_pickle(Path("nccl_trace_rank_0"), data)
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    with pytest.raises(pickle.UnpicklingError):
        program("node_recorder").read_dump(str(tmp_path / "nccl_trace_rank_0"), os.getuid())


@pytest.mark.parametrize("name", ["_rebuild_tensor_v2", "_rebuild_parameter"])
def test_a_file_of_weights_cannot_change_how_the_next_is_read(tmp_path: Path, name: str) -> None:
    """It might set attributes of what it has named: here the defaults of a function that rebuilds tensors."""
    attributes = b"N}" + text("__defaults__") + b"(" + b"K\x01" * 4 + b"ts\x86b"
    write_torch_file(tmp_path / "w.pt", b"\x80\x04" + named("torch._utils", name) + attributes + b".", is_zip=True)
    with pytest.raises(UnreadableFile, match=rf"sets attributes of torch\._utils\.{name} itself"):
        read_torch_file(tmp_path / "w.pt")
    write_torch_file(tmp_path / "w.pt", b"\x80\x04" + call(named("torch._utils", name)) + b".", is_zip=True)
    assert read_torch_file(tmp_path / "w.pt").tree.args == ()


def test_what_is_handed_out_is_used(tmp_path: Path) -> None:
    """A reader may replace functions that a pickle names, and objects that it refers to."""
    data = b"\x80\x04" + call(named("some", "function"), text("a") + b"Q") + b"."
    found = SafeUnpickler(io.BytesIO(data), lambda *name: lambda *given: (name, given), str.upper).load()
    assert found == (("some", "function"), ("A",))


def test_one_module_of_the_package_reads_pickles(modules: Parsed) -> None:
    """`train` reads its own checkpoints with torch and DeepSpeed."""
    users = [path for path, tree in modules.items() if {"pickle", "_pickle", "shelve"} & set(imports(tree))]
    assert users == ["safe_pickle.py"]
