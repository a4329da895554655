"""The surroundings that some recipes need: a disk, a file system, a network. Made as root, and always removed.

    python -I -S stages.py frozen-disk|silent-fuse|lost-server|two-networks

Prints one JSON object when ready: {"environment": {...}, "namespaces": [PID:KINDS, ...]}. Ranks are started with that
environment, and rank r of n in entry `r * len(namespaces) // n` of the namespaces. Undoes everything when its standard
input ends, so that nothing is left behind however its parent ends. Stand-alone, standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FITHAW = 0xC0045878
CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | 0x40000
MNT_DETACH = 2
UNMOUNT_TIMEOUT_S = 5.0
FUSE_INIT_REPLY = "<IiQ" + "IIII" + "HH" + "II" + "HH" + "I" + "7I"
NUM_OUTSIDERS = 6
libc = ctypes.CDLL(None, use_errno=True)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def demand(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


@contextmanager
def frozen_disk() -> Iterator[dict[str, Any]]:
    """A small ext4 file system on a loop device. A rank freezes it; this program thaws it."""
    with tempfile.TemporaryDirectory(prefix="bsl-lab-disk-") as name:
        image, folder = Path(name) / "image", Path(name) / "disk"
        with image.open("wb") as stream:
            stream.truncate(16 << 20)
        folder.mkdir()
        run("mkfs.ext4", "-q", "-F", str(image))
        run("mount", "-o", "loop", str(image), str(folder))
        try:
            yield {"environment": {"BSL_LAB_STAGE": str(folder)}, "namespaces": []}
        finally:
            thaw(folder)
            unmount(folder)


def thaw(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # it was not frozen
        fcntl.ioctl(descriptor, FITHAW, 0)
    os.close(descriptor)


def unmount(folder: Path) -> None:
    """Wait for processes to leave the folder, or detach it from them."""
    end = time.monotonic() + UNMOUNT_TIMEOUT_S
    while libc.umount2(str(folder).encode(), 0) != 0:
        if time.monotonic() > end:
            libc.umount2(str(folder).encode(), MNT_DETACH)
            return
        time.sleep(0.05)


@contextmanager
def silent_fuse() -> Iterator[dict[str, Any]]:
    """A file system whose daemon never answers. Only the ranks see it: df elsewhere must not hang on it."""
    demand(libc.unshare(CLONE_NEWNS), "unshare")
    demand(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "mount")
    with tempfile.TemporaryDirectory(prefix="bsl-lab-fuse-") as name:
        connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={connection},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        demand(libc.mount(b"bsl-lab", name.encode(), b"fuse", 0, options), "mount")
        answer_init(connection)
        try:
            yield {"environment": {"BSL_LAB_STAGE": name}, "namespaces": [f"{os.getpid()}:mnt"]}
        finally:
            os.close(connection)  # all waiting processes get an error
            libc.umount2(name.encode(), MNT_DETACH)


def answer_init(connection: int) -> None:
    """Complete the handshake: only after it do requests wait for answers."""
    request = os.read(connection, 1 << 17)
    unique, minor = struct.unpack_from("<Q", request, 8)[0], struct.unpack_from("<I", request, 44)[0]
    body = (7, min(minor, 31), 1 << 16, 0, 12, 9, 1 << 16, 1, 16, 0, 0, *[0] * 7)
    size = struct.calcsize(FUSE_INIT_REPLY)
    os.write(connection, struct.pack(FUSE_INIT_REPLY, size, 0, unique, *body))


@contextmanager
def lost_server() -> Iterator[dict[str, Any]]:
    """`silent_fuse`, with processes other than ranks that wait for it uninterruptibly."""
    with silent_fuse() as ready:
        outsiders = [start_outsider(ready["environment"]["BSL_LAB_STAGE"]) for _ in range(NUM_OUTSIDERS)]
        try:
            yield ready
        finally:
            for outsider in outsiders:
                outsider.kill()


def start_outsider(folder: str) -> subprocess.Popen[bytes]:
    # A handled signal makes the wait for FUSE uninterruptible, like that for NFS.
    code = (
        "import os,signal,sys; signal.signal(signal.SIGALRM, lambda *_: None);"
        " signal.setitimer(signal.ITIMER_REAL, 0.1); os.stat(sys.argv[1])"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, f"{folder}/home"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@contextmanager
def two_networks() -> Iterator[dict[str, Any]]:
    """Two network namespaces with a cable between them; each half of the ranks runs in one of them."""
    keepers = [start_keeper(), start_keeper()]
    try:
        first, second = (str(keeper.pid) for keeper in keepers)
        inside = [["nsenter", "--net", f"--target={pid}"] for pid in (first, second)]
        run(*inside[0], "ip", "link", "add", "lab0", "type", "veth", "peer", "name", "lab0", "netns", second)
        for number, prefix in enumerate(inside):
            run(*prefix, "ip", "address", "add", f"10.77.77.{number + 1}/24", "dev", "lab0")
            # One packet at a time: otherwise bundles of packets would pass a link whose MTU is too small.
            run(*prefix, "ip", "link", "set", "dev", "lab0", "gso_max_segs", "1", "up")
            run(*prefix, "ip", "link", "set", "dev", "lo", "up")
        environment = {"GLOO_SOCKET_IFNAME": "lab0", "MASTER_ADDR": "10.77.77.1", "BSL_LAB_LINK": "lab0"}
        yield {"environment": environment, "namespaces": [f"{first}:net", f"{second}:net"]}
    finally:
        for keeper in keepers:
            keeper.kill()


def start_keeper() -> subprocess.Popen[bytes]:
    """A process in its own network namespace, which exists as long as a process is in it."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    argv = ["unshare", "--net", sys.executable, "-I", "-S", "-c", code]
    keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    keeper.stdout.readline()
    return keeper


STAGES = {
    "frozen-disk": frozen_disk,
    "silent-fuse": silent_fuse,
    "lost-server": lost_server,
    "two-networks": two_networks,
}


def main(argv: list[str]) -> None:
    # Ctrl-C is for the parent, which ends this process by closing its input. TERM ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with STAGES[argv[1]]() as ready:
        print(json.dumps(ready), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv)
