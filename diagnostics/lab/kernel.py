"""Family C: one rank waits in the kernel or for a file system. See step_loop.py.

Some recipes need a disk that can be frozen, or a file system whose server does not answer: `stages.py` prepares them
as root, and BSL_LAB_STAGE is the folder where they are mounted.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from host_stall import HostStall
from step_loop import REST_S, Training, main

FIFREEZE = 0xC0045877
PAGE_BYTES = mmap.PAGESIZE


def stage() -> Path:
    return Path(os.environ["BSL_LAB_STAGE"])


class UninterruptibleRead(HostStall):
    """H60: state D, but the process can still be killed.

    `posix_spawn` waits uninterruptibly until its child has executed another program; the child first opens a pipe that
    nothing writes to.
    """

    def stall(self) -> None:
        assert self.run_dir is not None
        shard = self.run_dir / "lab" / "shard.bin"
        os.mkfifo(shard)
        self.read_shard(str(shard))

    def read_shard(self, path: str) -> None:
        libc = ctypes.CDLL(None)
        actions = ctypes.create_string_buffer(256)  # posix_spawn_file_actions_t, 80 bytes with glibc
        libc.posix_spawn_file_actions_init(actions)
        libc.posix_spawn_file_actions_addopen(actions, 3, path.encode(), os.O_RDONLY, 0)
        arguments = (ctypes.c_char_p * 2)(b"true", None)
        libc.posix_spawn(ctypes.byref(ctypes.c_int()), b"/bin/true", actions, None, arguments, None)


class FrozenDisk(HostStall):
    """Freezes the disk of the stage; `stall()` then waits for it."""

    def freeze(self) -> None:
        folder = os.open(stage(), os.O_RDONLY)
        fcntl.ioctl(folder, FIFREEZE, 0)
        os.close(folder)


class Unkillable(FrozenDisk):
    """H61: state D, and a SIGKILL that has no effect: only the main thread of the process is left."""

    def get_batch(self) -> Any:
        if self.has_come() and self.rank == self.culprit:
            self.stall()
        return Training.get_batch(self)

    def stall(self) -> None:
        self.freeze()
        self.kill_when_stuck()
        self.write_checkpoint()

    def kill_when_stuck(self) -> None:
        code = (
            "import os,sys,time; p=int(sys.argv[1]);\n"
            "while open(f'/proc/{p}/stat', 'rb').read().rpartition(b')')[2].split()[0] != b'D': time.sleep(0.02)\n"
            "os.kill(p, 9); open(sys.argv[2], 'w').close()"
        )
        assert self.run_dir is not None
        note = self.run_dir / "lab" / f"struck-{self.rank:04d}"
        note.parent.mkdir(exist_ok=True)
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code, str(os.getpid()), str(note)])

    def write_checkpoint(self) -> None:
        os.open(stage() / "model_states.pt", os.O_WRONLY | os.O_CREAT)


class PoisonedMemoryMap(FrozenDisk):
    """H62: a waiting thread holds the lock of the process's memory map: ps and py-spy hang on this process."""

    def stall(self) -> None:
        address, mapped = map_file(stage() / "activations.bin")
        self.mapped = mapped
        self.freeze()
        threading.Thread(target=self.fill_page, args=(address,), name="offload", daemon=True).start()
        wait_for_another_thread_in("D")
        self.protect_page(address)

    def fill_page(self, address: int) -> None:
        ctypes.CDLL(None).memset(ctypes.c_void_p(address), 1, PAGE_BYTES)

    def protect_page(self, address: int) -> None:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), PAGE_BYTES, mmap.PROT_READ)


class MappedFault(FrozenDisk):
    """H63: a page fault on a mapped dataset."""

    def stall(self) -> None:
        self.address, self.mapped = map_file(stage() / "text_document.idx")
        self.freeze()
        self[0]

    def __getitem__(self, index: int) -> None:
        ctypes.CDLL(None).memset(ctypes.c_void_p(self.address + index), 1, PAGE_BYTES)


class CoreDumping(FrozenDisk):
    """H66: the process has crashed, and its core is being dumped to a disk that does not answer."""

    def stall(self) -> None:
        os.chdir(stage())
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.freeze()
        os.kill(os.getpid(), signal.SIGSEGV)


class SilentDevice(HostStall):
    """H67: a request to a device or a file system daemon that is never answered."""

    def stall(self) -> None:
        self.open_device()

    def open_device(self) -> None:
        os.open(stage() / "uverbs0", os.O_RDWR)


class LostServer(SilentDevice):
    """H68: the file server is lost, and processes other than ranks wait for it too."""

    def stall(self) -> None:
        # A handled signal makes the wait for FUSE uninterruptible: state D, as with NFS.
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        self.open_device()


class SlowSave(Training):
    """H64: not a hang: one rank writes its checkpoint slowly, and the others wait at the end of the save."""

    def get_batch(self) -> Any:
        if self.has_come():
            self.save_checkpoint()
        return super().get_batch()

    def save_checkpoint(self) -> None:
        import torch.distributed as dist

        self.enter("save")
        if self.is_rank():
            self.write_shard()
        dist.barrier()

    def write_shard(self) -> None:
        assert self.run_dir is not None
        with (self.run_dir / "lab" / "model_states.pt").open("wb", buffering=0) as stream:
            end = time.monotonic() + REST_S
            while time.monotonic() < end:
                stream.write(b"z" * 65536)
                if stream.tell() > 1 << 26:
                    stream.seek(0)
                time.sleep(0.02)


class DiskFull(SlowSave):
    """H65: a full disk raises an error in the save of one rank, which still reaches the barrier at its end."""

    def save_checkpoint(self) -> None:
        import torch.distributed as dist

        if not self.is_rank():
            return
        try:
            self.write_shard()
        except OSError:
            traceback.print_exc()
            raise
        finally:
            dist.barrier()

    def write_shard(self) -> None:
        with Path("/dev/full").open("wb", buffering=0) as stream:
            stream.write(b"z" * 65536)


def map_file(path: Path) -> tuple[int, mmap.mmap]:
    """Return the address of a mapped, synced, clean page of a new file, and the object that keeps it mapped."""
    with path.open("w+b") as stream:
        stream.write(bytes(2 * PAGE_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
        mapped = mmap.mmap(stream.fileno(), 2 * PAGE_BYTES)
    mapped[:1]
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped)), mapped


def wait_for_another_thread_in(state: str) -> None:
    own = str(os.getpid())
    while True:
        for task in Path("/proc/self/task").iterdir():
            if task.name != own and (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == state:
                return
        time.sleep(0.01)


RECIPES: dict[str, type[Training]] = {
    "killable-d": UninterruptibleRead,
    "unkillable-d": Unkillable,
    "poisoned": PoisonedMemoryMap,
    "mapped-fault": MappedFault,
    "core-dump": CoreDumping,
    "silent-device": SilentDevice,
    "lost-server": LostServer,
    "slow-save": SlowSave,
    "disk-full": DiskFull,
}

if __name__ == "__main__":
    main(RECIPES)
