"""Recomputes the cheap parts of a transformer layer in the backward pass (`activation_checkpointing: selective`).

The results of matrix products and of attention are kept; norms, activation functions, dropout and residual sums are
computed again from them. The last product of a layer is not kept: nothing that is computed again needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_KEPT_PRODUCTS = 3
"""Of queries, keys and values, of attention's output, and of the first matrix of the MLP."""


class _Policy:
    """What one pass of a layer keeps. The pass that computes again meets the same operations in the same order."""

    def __init__(self) -> None:
        self._num_products: Counter[bool] = Counter()

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            self._num_products[context.is_recompute] += 1
            is_kept = self._num_products[context.is_recompute] <= _KEPT_PRODUCTS
        else:
            is_kept = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """Return the contexts of both passes of one layer."""
    return create_selective_checkpoint_contexts(_Policy())  # type: ignore[no-untyped-call]


def compute_selectively(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return what `function`, one transformer layer, computes of `inputs`."""
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, context_fn=selective_contexts)
    return result
