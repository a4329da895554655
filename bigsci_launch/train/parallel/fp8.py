"""Matrix products of the transformer layers in fp8, with weights and activations that stay bf16.

Each operand of a product is scaled by one power of two, so that its largest element comes close to the largest that the
format has, and rounded: inputs and weights to e4m3, gradients of outputs to e5m2, which has a wider range, as torchao
does. A power of two is exact in every format, so scaling rounds nothing. Each product finds its scales itself, on the
device: there is no history, and nothing of it in checkpoints. A tensor-parallel rank scales its own shard; the results
that ranks add up have been scaled back by then.

Products of sizes that are not multiples of 16 stay in bf16, which is all that `torch._scaled_mm` offers for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.parallel.tensor import ColumnParallelLinear, Product, RowParallelLinear

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
_ADA = (8, 9)
_LEAST = 1e-30
# The exponent's bits of an fp32 number; with the others cleared, it is rounded down to a power of two.
_EXPONENT = 0x7F800000


def scale_for(x: Tensor, number_format: torch.dtype) -> Tensor:
    """Return the power of two that brings the largest element of `x` close to the largest of `number_format`, fp32."""
    largest = torch.linalg.vector_norm(x, ord=torch.inf).float().clamp(min=_LEAST)
    scale: Tensor = torch.finfo(number_format).max / largest
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32)


def rounded(x: Tensor, scale: Tensor, number_format: torch.dtype) -> Tensor:
    """Return `x` times `scale` in `number_format`."""
    return (x * scale.to(x.dtype)).to(number_format)


def _product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None = None, *, is_fast: bool = False
) -> Tensor:
    """Return left x right + bias in bf16. The kernels want contiguous rows of `left` and columns of `right`."""
    return torch._scaled_mm(
        left.contiguous(),
        right.t().contiguous().t(),
        scales[0].reciprocal(),
        scales[1].reciprocal(),
        out_dtype=torch.bfloat16,
        bias=bias,
        use_fast_accum=is_fast,
    )


class _Fp8Linear(torch.autograd.Function):
    """y = x W^T + b. Keeps x in fp8 for the backward pass; W is there anyway, and is rounded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scale, weight_scale = scale_for(x, INPUT), scale_for(weight, INPUT)
        small = rounded(x, scale, INPUT)
        ctx.save_for_backward(small, scale, weight, weight_scale)
        columns = rounded(weight, weight_scale, INPUT).t()
        # The fast sums keep fewer bits, which torchao, too, accepts in the forward pass alone.
        return _product(small, columns, (scale, weight_scale), bias, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, scale, weight, weight_scale = ctx.saved_tensors
        (gradient,) = gradients
        gradient_scale = scale_for(gradient, GRADIENT)
        small = rounded(gradient, gradient_scale, GRADIENT)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _product(small, rounded(weight, weight_scale, INPUT), (gradient_scale, weight_scale))
        if ctx.needs_input_grad[1]:
            of_weight = _product(small.t(), x, (gradient_scale, scale))
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(dim=0)
        return of_input, of_weight, of_bias


def is_divisible(*sizes: int) -> bool:
    """Return whether a product with matrices of these sizes can be computed in fp8."""
    return not any(size % _MULTIPLE for size in sizes)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `F.linear` returns, from a product in fp8 if the sizes allow it."""
    rows = x.reshape(-1, x.shape[-1])
    if not is_divisible(len(rows), *weight.shape):
        return F.linear(x, weight, bias)
    result: Tensor = _Fp8Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], -1)


def as_multiplied(product: Product, operand: Tensor, weight: Tensor, number_format: torch.dtype) -> Tensor:
    """Return an input or a gradient, (..., size), as `product` reads it: rounded, if it computes in fp8."""
    if product is not fp8_linear or not is_divisible(operand.shape[:-1].numel(), *weight.shape):
        return operand
    scale = scale_for(operand, number_format)
    return rounded(operand, scale, number_format).to(operand.dtype) / scale.to(operand.dtype)


def use_fp8(module: nn.Module) -> None:
    """Let all linear layers in `module` compute in fp8; embeddings and the head are none."""
    for layer in _linear_layers(module).values():
        layer.product = fp8_linear


def describe_fp8(module: nn.Module, num_tokens: int) -> str:
    """Return which products of `module` are computed in fp8 with micro batches of `num_tokens` tokens."""
    layers = _linear_layers(module)
    others = [name for name, layer in layers.items() if not is_divisible(num_tokens, *layer.weight.shape)]
    line = f"fp8: {len(layers) - len(others)} of {len(layers)} linear layers of this stage"
    why = f"the tokens of a micro batch ({num_tokens}) and both sizes of a weight must be multiples of {_MULTIPLE}"
    return f"{line}; bf16: {', '.join(others)}: {why}" if others else line


def _linear_layers(module: nn.Module) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}


def has_fp8() -> bool:
    """Return whether this rank's device has fp8 products: a CPU, which computes them slowly, or an NVIDIA GPU from Ada
    and Hopper on. AMD's formats are others."""
    return not computes_on_gpu() or (torch.version.hip is None and torch.cuda.get_device_capability() >= _ADA)
