"""Family B, second half: a rank waits for its own children: data loader workers, pools, pipes, compilers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from host_stall import HostStall
from step_loop import REST_S, Training, main

index_lock = threading.Lock()


class StoppedWorker(HostStall):
    """H36: a data loader worker that was stopped."""

    def stall(self) -> None:
        self.read_epoch(StoppingDataset())

    def read_epoch(self, dataset: Any) -> None:
        from torch.utils.data import DataLoader

        for _ in DataLoader(dataset, batch_size=2, num_workers=1):
            pass


class StoppingDataset:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= 2:
            self.read_sample()
        return index

    def read_sample(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class LockedDataset(StoppingDataset):
    def read_sample(self) -> None:
        with index_lock:
            pass


class LockedWorker(StoppedWorker):
    """H36: a data loader worker that was forked while a lock was held."""

    def stall(self) -> None:
        index_lock.acquire()
        self.read_epoch(LockedDataset())


class KilledPool(HostStall):
    """H38: a process of a pool is killed, for example by the OOM killer, and `map` waits for its answer."""

    def stall(self) -> None:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(tokenise_document, [1])


def tokenise_document(_index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FullPipe(HostStall):
    """H39: the process that reads the standard output has stopped reading."""

    def prepare(self) -> None:
        reader, self.writer = os.pipe()
        # Not a child of the rank, just as srun or tee would not be: the shell that started it has already exited.
        script = "exec 3<&0; cat <&3 >/dev/null & kill -STOP $!"
        subprocess.run(["sh", "-c", script], stdin=reader, check=True)
        os.close(reader)

    def stall(self) -> None:
        os.dup2(self.writer, 1)
        self.write_log()

    def write_log(self) -> None:
        while True:
            print("lm loss: 2.345678E+00 | grad norm: 1.000 |" * 32, flush=True)


class Compile(HostStall):
    """H50: not a hang: a compiler is at work on one rank."""

    def stall(self) -> None:
        self.run_ninja_build()

    def run_ninja_build(self) -> None:
        assert self.run_dir is not None
        compiler = self.run_dir / "lab" / "cc1plus"
        compiler.symlink_to(os.path.realpath(sys.executable))
        code = f"import time\nend = time.time() + {REST_S}\nwhile time.time() < end: pass"
        subprocess.run([str(compiler), "-I", "-S", "-c", code], check=True)


class BuildIndex(HostStall):
    """H51: not a hang: one rank builds the index that all others wait for, and its file grows."""

    def get_batch(self) -> Any:
        import torch.distributed as dist

        batch = super().get_batch()
        if self.has_come():
            dist.barrier()
        return batch

    def stall(self) -> None:
        self.enter("load")
        assert self.run_dir is not None
        with (self.run_dir / "lab" / "index.npy").open("wb") as stream:
            end = time.monotonic() + REST_S
            document = 0
            while time.monotonic() < end:
                document += 1
                stream.write(self.build_mapping(document))
                if stream.tell() > 1 << 26:
                    stream.seek(0)

    def build_mapping(self, document: int) -> bytes:
        return b"".join((index * document % 65521).to_bytes(2, "little") for index in range(4096))


RECIPES: dict[str, type[Training]] = {
    "worker-stopped": StoppedWorker,
    "worker-lock": LockedWorker,
    "pool-killed": KilledPool,
    "stdout-pipe": FullPipe,
    "compile": Compile,
    "build-index": BuildIndex,
}

if __name__ == "__main__":
    main(RECIPES)
