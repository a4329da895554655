"""Sends activations and gradients between pipeline stages through host memory, because gloo cannot send from a GPU."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe import p2p
from torch import Tensor


def send_through_host() -> None:
    """Make DeepSpeed's pipeline copy what it sends to the host, and what it receives to the device."""
    if not hasattr(p2p.send, "through_host"):
        p2p.send, p2p.recv = _staged_send(p2p.send), _staged_recv(p2p.recv)


def _staged_send(send: Any) -> Any:
    def staged(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
        return send(tensor.detach().to("cpu", copy=True), dest_stage, async_op)

    staged.through_host = True  # type: ignore[attr-defined]
    return staged


def _staged_recv(recv: Any) -> Any:
    def staged(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
        received = torch.empty_like(tensor, device="cpu", requires_grad=False)
        result = recv(received, src_stage, async_op)
        with torch.no_grad():
            tensor.copy_(received)
        return result

    return staged
