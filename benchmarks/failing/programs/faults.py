"""The ways in which a rank ends. Each is real: the interpreter, the kernel or the libraries say what they say."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

DISK = os.environ.get("SCRATCH_DISK", "/nowhere")
MEMORY_GROUP = os.environ.get("MEMORY_GROUP", "")


def note_truth(rank: int, how: str) -> None:
    """Write down who fails first, where `bsl` does not look."""
    path = Path(os.environ["TRUTH_FILE"])
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    truth = {"rank": rank, "node": socket.gethostname(), "local_rank": local_rank, "how": how}
    try:
        with path.open("x") as stream:
            stream.write(json.dumps(truth))
    except FileExistsError:
        pass


def lookup_tokens(vocabulary: list[int], token: int) -> int:
    return vocabulary[token]


def lookup() -> None:
    lookup_tokens(list(range(8)), 50257)


def key() -> None:
    batch = {"input_ids": [1, 2], "attention_mask": [1, 1]}
    print(batch["labels"])


def assertion() -> None:
    loss = float("nan")
    assert loss == loss, f"loss is {loss} at iteration 3, giving up"


def chained() -> None:
    try:
        json.loads('{"step": 100, "shards": [')
    except ValueError as error:
        raise RuntimeError("cannot resume from /ckpt/step-100: its index is damaged") from error


def context() -> None:
    optimizer: dict[str, int] = {}
    try:
        optimizer["step"] += 1
    except KeyError:
        raise ValueError("optimizer state has no entry for group 3")  # noqa: B904


def exit_code() -> None:
    print("validation metric fell below its threshold, stopping with code 3", flush=True)
    sys.exit(3)


def exit_text() -> None:
    sys.exit("config error: num_layers (30) is not divisible by pipeline stages (4)")


def hard_exit() -> None:
    os._exit(17)


def abort() -> None:
    os.abort()


def segfault() -> None:
    ctypes.string_at(0)


def segfault_traced() -> None:
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def bus_error() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def memory() -> None:
    """Allocate more than `ulimit -v` allows."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    held = []
    while True:
        held.append(bytearray(256 << 20))


def oom() -> None:
    """Use more memory than the group of processes may have: the kernel kills this process."""
    Path(MEMORY_GROUP, "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(b"x" * (8 << 20))


def disk() -> None:
    with Path(DISK, "checkpoint-3.bin").open("wb") as stream:
        for _ in range(64):
            stream.write(os.urandom(1 << 20))


def unreadable() -> None:
    Path("/data/tokens/shard-00017.bin").open("rb").close()


def missing_module() -> None:
    import flash_kernels  # noqa: F401


def child() -> None:
    subprocess.run(["/bin/sh", "-c", "echo 'tokenize: bad magic in shard 4' >&2; exit 9"], check=True)


def unicode() -> None:
    b"loss\xff\xfe".decode()


def asynchronous() -> None:
    """Raise in a thread, and end with it, as loaders with threads do."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lookup).result()


def hang() -> None:
    time.sleep(120)


FAULTS = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name not in ("note_truth", "lookup_tokens")
}
