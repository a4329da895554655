"""Which of torch's kernels computes attention."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.parallel.model import TransformerLayer
from bigsci_launch.train.parallel.positions import has_blocks

_HOPPER = (9, 0)
_OTHERWISE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


def prefer_fastest_attention() -> None:
    """Let torch try cuDNN's kernel before FlashAttention-2 on Hopper and newer GPUs, where it is faster.

    Newer versions of torch do so by themselves, and have a variable that says otherwise. It is set once, so that no
    call of attention costs more. torch leaves cuDNN out where it cannot compute a case, and under
    `training.deterministic`.
    """
    is_hopper = computes_on_gpu() and torch.version.hip is None and torch.cuda.get_device_capability() >= _HOPPER
    if is_hopper and _OTHERWISE not in os.environ and hasattr(torch._C, "_set_sdp_priority_order"):
        order = torch._C._get_sdp_priority_order()
        first = SDPBackend.CUDNN_ATTENTION.value
        torch._C._set_sdp_priority_order([first, *(each for each in order if each != first)])


def describe_attention(module: nn.Module, batch: int, length: int) -> list[str]:
    """Return a line with the kernel that torch takes for the attention of `module`; none without any layer."""
    layer = next((each for each in module.modules() if isinstance(each, TransformerLayer)), None)
    return [] if layer is None else [f"attention: {kernel_of(layer, batch, length)}"]


def kernel_of(layer: TransformerLayer, batch: int, length: int) -> str:
    """Return the name of the kernel that torch takes, for activations of this size that need gradients."""
    attention, weight = layer.attention, layer.attention.qkv.weight
    if attention.positions == "alibi" and layer.compiled and has_blocks(length, attention.head_dim, weight.device):
        return "flex_attention"
    x = torch.empty((batch, length, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    qkv = torch.empty((batch, length, len(weight)), dtype=weight.dtype, device=weight.device, requires_grad=True)
    query, key, value = attention.heads(qkv)
    biases = attention.tables(x)[0] if attention.positions == "alibi" else None
    choice = torch._fused_sdp_choice(
        *(query, key, value, biases), is_causal=biases is None, enable_gqa=attention.queries_per_group > 1
    )
    return SDPBackend(choice).name.lower()
