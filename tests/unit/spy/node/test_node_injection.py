"""The machine code that reads a flight recorder matches its assembly, and never enters an unsuitable process."""

from __future__ import annotations

import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.texts import has_parts

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
    [(key, why)] = untouchable.read_rank_pulled({"pid": os.getpid()}, {}, {})
    assert key == "recorder_why" and has_parts(why, "--flight-recorder=fork", "x86_64", machine)


def elf_header(bits: int, machine: int) -> bytes:
    identity = b"\x7fELF" + bytes([bits // 32, 1, 1])
    return (identity.ljust(16, b"\0") + struct.pack("<HH", 3, machine)).ljust(64, b"\0")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (elf_header(32, 3), "64-bit .*32-bit"),
        (elf_header(32, 62), "64-bit .*32-bit"),
        (elf_header(64, 183), r"x86_64.*\(ELF machine 183\)"),
        (b"<html>", "ELF library"),
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_only_the_process_that_was_asked_may_answer(agent: ModuleType) -> None:
    """Others can see the name of the socket in /proc/net/unix, and may connect first."""
    module = agent.node_injection
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0bsl-test-" + os.urandom(8).hex())
        server.listen(128)
        connect = (
            "import os, socket, time; os.setuid({}); link = socket.socket(socket.AF_UNIX);"
            f"link.connect({server.getsockname()!r}); link.send(b'{{}}'); time.sleep(9)"
        )
        stranger = subprocess.Popen([sys.executable, "-c", connect.format(65000, "forged")])
        time.sleep(0.5)
        asked = subprocess.Popen([sys.executable, "-c", connect.format(0, "asked")])
        try:
            with module.accept_from(server, module.owner_of(asked.pid)) as connection:
                assert connection.recv(99) == b"asked"
        finally:
            for each in (stranger, asked):
                each.kill()
                each.wait()
