"""The machine code that reads a flight recorder matches its assembly, and never enters an unsuitable process."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCE = resources.files("bigsci_launch") / "assets" / "diagnostics" / "node_injection.s"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="`as` of this machine is not for x86_64")
@pytest.mark.skipif(not (shutil.which("as") and shutil.which("objcopy")), reason="needs as and objcopy (binutils)")
def test_the_machine_code_is_its_assembly(agent: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "stub.s").write_text(SOURCE.read_text(encoding="utf-8"))
    subprocess.run(["as", "-o", "stub.o", "stub.s"], cwd=tmp_path, check=True, timeout=60)
    subprocess.run(
        ["objcopy", "-O", "binary", "-j", ".text", "stub.o", "stub.bin"], cwd=tmp_path, check=True, timeout=60
    )
    assert (tmp_path / "stub.bin").read_bytes().hex(" ") == agent.node_injection.STUB.hex(" ")


@pytest.fixture
def untouchable(agent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, patched so that searching a process for the function fails the test."""

    def touch(*_: Any) -> None:
        pytest.fail("the process was touched")

    monkeypatch.setattr(agent.node_injection, "inject", touch)
    monkeypatch.setattr(agent.node_injection, "mappings", touch)
    return agent.node_injection


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64", "i686"])
def test_another_architecture_is_refused_by_name(
    untouchable: ModuleType, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert dict(untouchable.read_rank_pulled({"pid": os.getpid()}, {}, {})) == {
        "recorder_why": f"it could not be pulled: --flight-recorder=fork is written for x86_64; this node is {machine}"
    }


def elf_header(bits: int, machine: int) -> bytes:
    identity = b"\x7fELF" + bytes([bits // 32, 1, 1])
    return (identity.ljust(16, b"\0") + struct.pack("<HH", 3, machine)).ljust(64, b"\0")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (elf_header(32, 3), "written for 64-bit processes; this one is 32-bit"),
        (elf_header(32, 62), "written for 64-bit processes; this one is 32-bit"),
        (elf_header(64, 183), r"written for x86_64; the torch of this process is not \(ELF machine 183\)"),
        (b"<html>", "its torch is not an ELF library"),
    ],
    ids=["i386", "x32", "emulated aarch64", "no library"],
)
def test_a_process_of_another_kind_is_refused(
    agent: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, header: bytes, words: str
) -> None:
    """The library is checked first, before a thread of the process is chosen."""
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(header)
    module = agent.node_injection
    monkeypatch.setattr(module, "mappings", lambda pid: iter([(0, 4096, "r-xp", 0, str(library))]))
    monkeypatch.setattr(module, "quiet_thread", lambda pid: pytest.fail("the process was touched"))
    with pytest.raises(OSError, match=words):
        module.pull(os.getpid(), {})
    with pytest.raises(OSError, match=words):
        module.offset_of(io.BytesIO(header), module.FUNCTION)
