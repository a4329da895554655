"""Family B: one rank never reaches the collective, and all other ranks wait for it in the end. See step_loop.py.

Stalls in a data loader, a pool or a pipe are in host_children.py.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import pdb
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from step_loop import REST_S, Training, main, sleep_for_ever

log = logging.getLogger("trainer")


class HostStall(Training):
    """The culprit calls `stall()` where the others read their batch; `prepare()` does what takes time before."""

    def get_batch(self) -> Any:
        if self.has_come() and self.rank == self.culprit:
            self.prepare()
        if self.strikes():
            self.stall()
        return super().get_batch()

    def prepare(self) -> None:
        pass

    def stall(self) -> None:
        raise NotImplementedError


class Spin(HostStall):
    """H30: Python that never ends."""

    def stall(self) -> None:
        self.tokenise()

    def tokenise(self) -> None:
        num_tokens = 0
        while True:
            num_tokens += 1


class SleepInC(HostStall):
    """H31: a library call that blocks, with the GIL free."""

    def stall(self) -> None:
        ctypes.CDLL(None).sleep(int(REST_S))


class SleepWithGil(HostStall):
    """H32: a library call that blocks and keeps the GIL: no thread of the process runs Python again."""

    def stall(self) -> None:
        ctypes.PyDLL(None).sleep(int(REST_S))


class GilDeadlock(HostStall):
    """H33: C waits, with the GIL, for a thread that needs the GIL."""

    def stall(self) -> None:
        free, holding = ctypes.CDLL(None), ctypes.PyDLL(None)
        semaphore = ctypes.create_string_buffer(64)
        free.sem_init(semaphore, 0, 0)
        start = threading.Event()

        def post() -> None:
            start.wait()
            free.sem_post(semaphore)

        threading.Thread(target=post, name="needs-gil", daemon=True).start()
        sys.setswitchinterval(100)  # otherwise the new thread might post before the main thread waits
        start.set()
        holding.sem_wait(semaphore)


class CrossedLocks(HostStall):
    """H34: the main thread and the checkpoint thread each hold the lock that the other one wants."""

    def stall(self) -> None:
        self.weights_lock, self.file_lock = threading.Lock(), threading.Lock()
        both_hold = threading.Barrier(2)
        threading.Thread(target=self.save_async, args=(both_hold,), name="async-ckpt", daemon=True).start()
        with self.file_lock:
            both_hold.wait()
            with self.weights_lock:
                pass

    def save_async(self, both_hold: threading.Barrier) -> None:
        with self.weights_lock:
            both_hold.wait()
            with self.file_lock:
                pass


class ForkWithLock(HostStall):
    """H35: a child is forked while a thread holds a lock, and inherits it locked forever."""

    cache_lock = threading.Lock()

    def stall(self) -> None:
        self.cache_lock.acquire()
        child = os.fork()
        if child == 0:
            self.fill_cache()
            os._exit(0)
        os.waitpid(child, 0)

    def fill_cache(self) -> None:
        with self.cache_lock:
            pass


class StaleLockFile(HostStall):
    """H40: the lock file of a build whose owner is gone."""

    def stall(self) -> None:
        from torch.utils.file_baton import FileBaton

        assert self.run_dir is not None
        lock = self.run_dir / "lab" / "fused_kernels.lock"
        lock.touch()
        os.utime(lock, (time.time() - 86400, time.time() - 86400))
        FileBaton(str(lock)).wait()


class FileLock(HostStall):
    """H41: another process on the node holds the lock of a file."""

    def prepare(self) -> None:
        assert self.run_dir is not None
        self.path = self.run_dir / "lab" / "index_cache.lock"
        self.path.touch()
        code = "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f,2); print(flush=True); time.sleep(3600)"
        argv = [sys.executable, "-I", "-S", "-c", code, str(self.path)]
        self.holder = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self.holder.stdout is not None
        self.holder.stdout.readline()

    def stall(self) -> None:
        import fcntl

        with self.path.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)


class Debugger(HostStall):
    """H42: a forgotten breakpoint, with a standard input on which nothing arrives."""

    def stall(self) -> None:
        reader, self.writer = os.pipe()
        os.dup2(reader, 0)
        sys.stdin = os.fdopen(0)
        pdb.Pdb(stdin=sys.stdin, nosigint=True).set_trace()
        self.writer += 0


class SilentServer(HostStall):
    """H43: a server that accepts a connection and never answers, and a client without a timeout."""

    def stall(self) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            self.upload_metrics(server.getsockname())

    def upload_metrics(self, address: tuple[str, int]) -> None:
        with socket.create_connection(address) as connection:
            connection.sendall(b"POST /metrics HTTP/1.1\r\n\r\n")
            connection.recv(1024)


class MissingKey(HostStall):
    """H44: a key of the store that no rank sets."""

    def stall(self) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        dist.distributed_c10d._get_default_store().wait(["checkpoint/tag"], timedelta(seconds=REST_S))


class LateStart(Training):
    """H45: one rank is missing from the rendezvous of the others."""

    def before_init(self) -> None:
        if self.is_rank():
            self.download_tokenizer()

    def download_tokenizer(self) -> None:
        sleep_for_ever()


class Unreachable(Training):
    """H46: one rank looks for the others at an address that no machine has."""

    def before_init(self) -> None:
        if self.is_rank():
            # On rank 0 this changes nothing: it is the server. On other ranks it is where the server should be.
            os.environ["MASTER_ADDR"] = "192.0.2.1"


class BarrierInFinally(Training):
    """H47: an exception, and a barrier in `finally` on its way out."""

    def train_step(self) -> None:
        try:
            self.read_shard()
            super().train_step()
        except RuntimeError:
            log.exception("training failed")
            raise
        finally:
            if self.has_come():
                self.synchronize()

    def read_shard(self) -> None:
        if self.strikes():
            raise RuntimeError("DefaultCPUAllocator: not enough memory (simulated)")

    def synchronize(self) -> None:
        import torch.distributed as dist

        dist.barrier()


class BarrierAtExit(HostStall):
    """H47: an exception, and a barrier that was registered with atexit."""

    def stall(self) -> None:
        atexit.register(self.synchronize)
        raise RuntimeError("DefaultCPUAllocator: not enough memory (simulated)")

    def synchronize(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.groups["tp"] or self.groups["dp"])


class ThreadKeepsAlive(HostStall):
    """H48: an exception, and a thread that is not a daemon, for which the interpreter waits."""

    def stall(self) -> None:
        threading.Thread(target=self.upload_checkpoint, name="uploader").start()
        raise RuntimeError("DefaultCPUAllocator: not enough memory (simulated)")

    def upload_checkpoint(self) -> None:
        sleep_for_ever()


class LockInHandler(HostStall):
    """H49: a signal handler wants the lock that the interrupted code holds."""

    buffer_lock = threading.Lock()

    def stall(self) -> None:
        signal.signal(signal.SIGUSR1, self.save_on_signal)
        with self.buffer_lock:
            os.kill(os.getpid(), signal.SIGUSR1)

    def save_on_signal(self, _number: int, _frame: Any) -> None:
        with self.buffer_lock:
            pass


class CollectiveInDel(HostStall):
    """H52: garbage collection frees an object earlier on one rank, and its `__del__` waits for the others."""

    def stall(self) -> None:
        import gc

        resource = DistributedResource()
        resource.itself = resource
        del resource
        gc.collect()


class DistributedResource:
    itself: DistributedResource | None = None

    def __del__(self) -> None:
        import torch.distributed as dist

        dist.barrier()


class Stopped(HostStall):
    """H55: a rank that was stopped (job control, a freezer, `scontrol suspend`)."""

    def stall(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Traced(HostStall):
    """H55: a rank that a debugger has stopped."""

    def stall(self) -> None:
        code = (
            "import ctypes,os,sys,time; l=ctypes.CDLL(None); p=int(sys.argv[1]); l.ptrace.restype=ctypes.c_long;"
            " r=l.ptrace(16,p,None,None); os.waitpid(p,0); print(r,flush=True); time.sleep(3600)"
        )
        # PR_SET_PTRACER, any: a debugger that is not an ancestor may attach where Yama would forbid it.
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
        argv = [sys.executable, "-I", "-S", "-c", code, str(os.getpid())]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as debugger:
            assert debugger.stdout is not None
            debugger.stdout.readline()


class SignalStorm(HostStall):
    """H56: a timer interrupts a wait a thousand times per second, and the wait starts over."""

    def stall(self) -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        self.wait_for_license()

    def wait_for_license(self) -> None:
        time.sleep(REST_S)


class FeedStops(HostStall):
    """H37: the thread that fills the queue of batches has stopped; the worker processes are fine."""

    def stall(self) -> None:
        self.batches: queue.Queue[Any] = queue.Queue(2)
        threading.Thread(target=self.pin_memory_loop, name="pin_memory", daemon=True).start()
        self.get_batch_from_queue()

    def pin_memory_loop(self) -> None:
        sleep_for_ever()

    def get_batch_from_queue(self) -> Any:
        return self.batches.get()


class TwoFaults(Training):
    """H30 and H55: two ranks stall at once, each for its own reason."""

    def get_batch(self) -> Any:
        if self.strikes():
            os.kill(os.getpid(), signal.SIGSTOP)
        across = self.place.neighbour(self.place.neighbour(self.culprit, "tp"), "dp")
        if self.strikes(across):
            Spin.tokenise(self)  # type: ignore[arg-type]
        return super().get_batch()


RECIPES: dict[str, type[Training]] = {
    "spin": Spin,
    "sleep": SleepInC,
    "gil-held": SleepWithGil,
    "gil-deadlock": GilDeadlock,
    "crossed-locks": CrossedLocks,
    "fork-lock": ForkWithLock,
    "feed-stops": FeedStops,
    "lock-file": StaleLockFile,
    "flock": FileLock,
    "debugger": Debugger,
    "silent-server": SilentServer,
    "store-key": MissingKey,
    "late-start": LateStart,
    "unreachable": Unreachable,
    "finally-barrier": BarrierInFinally,
    "atexit-barrier": BarrierAtExit,
    "thread-keeps-alive": ThreadKeepsAlive,
    "handler-lock": LockInHandler,
    "del": CollectiveInDel,
    "stopped": Stopped,
    "traced": Traced,
    "signal-storm": SignalStorm,
    "two-faults": TwoFaults,
}

if __name__ == "__main__":
    main(RECIPES)
