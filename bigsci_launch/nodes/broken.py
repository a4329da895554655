"""What the words of a rank say about the hardware below it. Pure.

A program that is wrong prints errors of the GPU too, so only words that no program can cause count. Source for Xids:
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (Ampere and later), read in November 2026. An Xid
is in `BROKEN` if the immediate action there is at least a reset of the GPU. Left out on purpose:

    13, 31, 32, 43, 45      the program, or a consequence of another Xid
    63, 92, 94              corrected, or contained in one program, which may be started again
    137                     an illegal access by the program, although NVLink is in its name
    144 to 150              NVLink 5: must be decoded before they mean anything
    155, 156, 157           defined by software, or memory that was retired

The same holds for CUDA's "unspecified launch failure", "illegal memory access" and "device-side assert", and for
"Memory access fault by GPU" and "HW Exception by GPU ... GPU Hang" of ROCm.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ECC, GPU = "ecc", "gpu"
BROKEN = {
    46: (GPU, "GPU stopped processing"),
    48: (ECC, "double bit ECC error"),
    54: (GPU, "auxiliary power is not connected"),
    62: (GPU, "internal micro-controller halt"),
    64: (ECC, "GPU memory remapping failure"),
    74: (GPU, "NVLink error"),
    79: (GPU, "GPU has fallen off the bus"),
    95: (ECC, "uncontained memory error"),
    109: (GPU, "context switch timeout"),
    110: (GPU, "security fault"),
    119: (GPU, "GSP RPC timeout"),
    120: (GPU, "GSP error"),
    136: (GPU, "link training failed"),
    140: (ECC, "unrecovered ECC error"),
    143: (GPU, "GPU initialization error"),
    158: (GPU, "GPU fatal timeout"),
}
"""Reason and meaning by Xid."""
# `NVRM: Xid (PCI:0000:c6:00): 79, pid=1234, ...`, `Xid 79`, `XID: 79`.
XID = re.compile(r"\bXid\b(?:\s*\((?:PCI:)?[0-9a-f]+:[0-9a-f:.]+\))?\s*[:=#]?\s*(\d{1,3})\b", re.IGNORECASE)
WORDS = (
    # CUDA 214, and HIP's error of the same meaning.
    (ECC, re.compile(r"uncorrectable ECC error encountered|ECCUncorrectable|ECC_UNCORRECTABLE|ECCNotCorrectable")),
    # CUDA 220.
    (GPU, re.compile(r"uncorrectable NVLink error|NvlinkUncorrectable|NVLINK_UNCORRECTABLE")),
    (GPU, re.compile(r"GPU has fallen off the bus|\bGPU is lost\b|GPU_IS_LOST")),
    # CUDA 802: a daemon of the driver, such as the fabric manager, does not run on the node.
    (GPU, re.compile(r"CUDA error: system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY")),
    # Xid 154 names the action that the driver needs; without a reset, none.
    (GPU, re.compile(r"GPU recovery action changed from .* to .*(Reboot Required|Reset Required|Drain and Reset)")),
    # The kernel's amdgpu driver, on MI200 and MI300.
    (ECC, re.compile(r"uncorrectable hardware error\s*\(ERREVENT_ATHUB_INTERRUPT\)")),
)
# One of these is in each line that counts. Logs are long, and looking for them is fast.
HINTS = (b"xid", b"ecc", b"nvlink", b"fallen off", b"gpu is lost", b"gpu_is_lost", b"not yet init", b"notready",
         b"not_ready", b"recovery action", b"errevent")  # fmt: skip


class Broken(NamedTuple):
    """What a line shows: the reason (`ecc` or `gpu`), and the meaning of its Xid; empty if the line has it itself."""

    reason: str
    meaning: str


def may_be_broken(line: bytes) -> bool:
    """Whether it is worth asking `find_broken`."""
    lower = line.lower()
    return any(hint in lower for hint in HINTS)


def find_broken(text: str) -> Broken | None:
    """Return what a line shows about a broken GPU; None if nothing, or if a program can cause it."""
    match = XID.search(text)
    if match and int(match[1]) in BROKEN:
        reason, meaning = BROKEN[int(match[1])]
        return Broken(reason, "" if meaning.lower() in text.lower() else meaning)
    return next((Broken(reason, "") for reason, pattern in WORDS if pattern.search(text)), None)
