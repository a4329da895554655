"""Which words say that a GPU is broken, and which a program can cause itself."""

from __future__ import annotations

import pytest

from bigsci_launch.nodes.broken import Broken, find_broken, may_be_broken

BROKEN = {
    "NVRM: Xid (PCI:0000:c6:00): 79, pid=1101234, name=nvc:[driver], GPU has fallen off the bus.": "gpu",
    "NVRM: Xid (0000:01:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU": "ecc",
    "[gpu-health] XID: 95 on gpu 3": "ecc",
    "Xid 119, Timeout after 6s of waiting for RPC response from GPU": "gpu",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "ecc",
    "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution": "gpu",
    "Unable to determine the device handle for GPU 0000:4E:00.0: GPU is lost.  Reboot the system": "gpu",
    "RuntimeError: CUDA error: system not yet initialized": "gpu",
    "NVRM: Xid (PCI:0000:0f:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)": "gpu",
    "amdgpu 0000:75:00.0: amdgpu: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!": "ecc",
}
INNOCENT = (
    "NVRM: Xid (PCI:0000:c6:00): 13, Graphics Exception: ESR 0x504648=0x10",
    "NVRM: Xid (PCI:0000:c6:00): 31, pid=4711, MMU Fault: ENGINE GRAPHICS",
    "NVRM: Xid (PCI:0000:c6:00): 43, pid=4711, Ch 00000010",
    "NVRM: Xid (PCI:0000:c6:00): 45, pid=4711, Ch 00000010",
    "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping",
    "NVRM: Xid (PCI:0000:10:1c): 94, pid=1896, Contained: SM",
    "NVRM: Xid (PCI:0000:10:1c): 145, RLW_REMAP Nonfatal XC0",
    "NVRM: Xid (PCI:0000:0f:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
    "RuntimeError: CUDA error: unspecified launch failure",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 79 GiB",
    "Memory access fault by GPU node-9 (Agent handle: 0x1) on address 0x7f. Reason: Unknown.",
    "HW Exception by GPU node-2 (Agent handle: 0x1) reason :GPU Hang",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=79, OpType=ALLREDUCE)",
    "Read error [10.0.0.1]: Connection reset by peer",
    "ECC mode enabled on 8 GPUs; NVLink: 18 links",
    "loss 79 Xid",
)


@pytest.mark.parametrize(("text", "reason"), BROKEN.items())
def test_broken_hardware(text: str, reason: str) -> None:
    found = find_broken(text)
    assert may_be_broken(text.encode()) and found is not None and found.reason == reason


@pytest.mark.parametrize("text", INNOCENT)
def test_what_a_program_can_cause(text: str) -> None:
    assert find_broken(text) is None


def test_an_xid_without_words_gets_its_meaning() -> None:
    assert find_broken("Xid 62") == Broken("gpu", "internal micro-controller halt")
