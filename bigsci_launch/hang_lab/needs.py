"""Checks what a reproduction needs from the machine, and reports what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bigsci_launch.hang_lab.catalogue import Need, Reproduction

CAP_SYS_PTRACE = 19
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"


def missing_need(reproduction: Reproduction) -> str | None:
    """Return why `reproduction` cannot run here, or None."""
    return next((reason for need in reproduction.needs if (reason := CHECKS[need]())), None)


def search_path() -> str:
    """Return PATH with the system's sbin folders, which an ordinary user's PATH lacks."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def _root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def _no_right_to_trace() -> str | None:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    return "needs a user who may not read every process (root may)" if effective >> CAP_SYS_PTRACE & 1 else None


def _loop_device() -> str | None:
    return _programs("mkfs.ext4", "mount") or _device("/dev/loop-control")


def _fuse() -> str | None:
    return _device("/dev/fuse")


def _network_namespaces() -> str | None:
    return _programs("ip", "nsenter", "unshare")


def _traffic_control() -> str | None:
    return _programs("tc")


def _compiler() -> str | None:
    return _programs("cc")


def _core_files_here() -> str | None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text(encoding="utf-8").strip()
    is_here = "/" not in pattern and "|" not in pattern
    return None if is_here else f"needs core files in the working directory (core_pattern is {pattern!r})"


def _programs(*names: str) -> str | None:
    missing = [name for name in names if shutil.which(name, path=search_path()) is None]
    return f"needs {', '.join(missing)}" if missing else None


def _device(path: str) -> str | None:
    return None if os.access(path, os.R_OK | os.W_OK) else f"needs {path}"


CHECKS: dict[Need, Callable[[], str | None]] = {
    "root": _root,
    "no right to trace": _no_right_to_trace,
    "loop device": _loop_device,
    "fuse": _fuse,
    "network namespaces": _network_namespaces,
    "traffic control": _traffic_control,
    "compiler": _compiler,
    "core files here": _core_files_here,
}
