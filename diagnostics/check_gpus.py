"""The tests of check_node.py that need torch: each GPU computes, keeps a pattern, and copies it to its neighbour.

The devices are given as names, so that the same code runs on `cpu` where there is no GPU.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SIZE = 4096
"""Rows and columns of the product: 0.14 Tflop, less than 1 ms on a GPU of today."""
CPU_SIZE = 256
REPEATS = 20
MEMORY_SHARE = 0.8
"""How much of a GPU's free memory gets the pattern."""
CHUNK_BYTES = 2**30
CPU_CHUNK_BYTES = 2**22


def has_gpu() -> bool:
    """Whether the node shows the device of an NVIDIA or AMD GPU."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")  # noqa: PTH110


def try_gpus(torch: Any, devices: list[str], broken: type[Exception]) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Yield name, unit and function of each test. A function returns its rate, or raises `broken`."""
    for index, device in enumerate(devices):
        yield f"gpu {index} matmul", "Tflop/s", partial(multiply, torch, device, broken)
        yield f"gpu {index} memory", "GiB/s", partial(check_memory, torch, device, broken)
    for index, device in enumerate(devices if len(devices) > 1 else []):
        to = (index + 1) % len(devices)
        yield f"gpu {index} to {to}", "GiB/s", partial(copy, torch, device, devices[to], broken)


def multiply(torch: Any, device: str, broken: type[Exception]) -> float:
    """Multiply matrices of small whole numbers, whose product is exact, and return Tflop/s."""
    size = SIZE if device.startswith("cuda") else CPU_SIZE
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    numbers = torch.arange(size, device=device) % 2
    left = numbers.to(dtype).repeat(size, 1)
    # Each row has size / 2 ones; bfloat16 keeps this power of two exactly.
    expected = float(size // 2)
    product = left @ left.t()
    synchronize(torch, device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        product = left @ left.t()
    synchronize(torch, device)
    seconds = time.perf_counter() - began
    wrong = int((product.float() != expected).sum())
    if wrong:
        raise broken(f"{wrong} of {size * size} elements of a product are wrong")
    return 2e-12 * size**3 * REPEATS / seconds


def check_memory(torch: Any, device: str, broken: type[Exception]) -> float:
    """Write a pattern to most of the free memory, read it back, and return GiB/s."""
    is_gpu = device.startswith("cuda")
    chunk = CHUNK_BYTES if is_gpu else CPU_CHUNK_BYTES
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else 4 * chunk
    count = max(1, int(free * MEMORY_SHARE) // chunk)
    pattern = torch.arange(chunk // 8, device=device, dtype=torch.int64)
    held = []
    synchronize(torch, device)
    began = time.perf_counter()
    for index in range(count - 1):
        held.append(pattern ^ index)
    wrong = sum(int((kept != pattern ^ index).sum()) for index, kept in enumerate(held))
    wrong += int((pattern != torch.arange(chunk // 8, device=device, dtype=torch.int64)).sum())
    synchronize(torch, device)
    seconds = time.perf_counter() - began
    if wrong:
        raise broken(f"{wrong} words of {count * chunk >> 20} MiB of memory differ from what was written")
    return 2 * count * chunk / 2**30 / seconds


def copy(torch: Any, device: str, to: str, broken: type[Exception]) -> float:
    """Copy a pattern from one GPU to another, over NVLink where there is one, and return GiB/s."""
    chunk = (CHUNK_BYTES if device.startswith("cuda") else CPU_CHUNK_BYTES) // 4
    pattern = torch.arange(chunk // 8, device=device, dtype=torch.int64)
    target = torch.empty_like(pattern, device=to)
    target.copy_(pattern)
    synchronize(torch, to)
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(pattern)
    synchronize(torch, device)
    synchronize(torch, to)
    seconds = time.perf_counter() - began
    if not bool((target.cpu() == pattern.cpu()).all()):
        raise broken(f"data copied to {to} differs from the data sent")
    return 4 * chunk / 2**30 / seconds


def synchronize(torch: Any, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
