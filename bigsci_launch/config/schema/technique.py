"""How a program computes: values that `bsl plan` prices. `bsl train` follows only some (see `checks.technique`)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from bigsci_launch.config.schema.section import Section

Framework = Literal["bsl", "deepspeed", "megatron", "torchtitan", "fsdp", "other"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Attention = Literal["fused", "flash1", "triton", "flash3", "unfused"]
Kernels = Literal["eager", "fused", "compiled", "graphs"]
LossKernel = Literal["plain", "fused", "chunked"]
ExpertProducts = Literal["grouped", "loop"]
Recomputation = bool | Literal["selective"] | PositiveInt
"""Whether layers recompute their activations: all, none, only attention, or that many layers of each stage."""
ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal["1f1b", "interleaved", "zero_bubble"]
Hidden = Literal["tensor", "data", "pipeline"]


class ExpertsSection(Section):
    """A mixture of experts in place of the MLP, for a program in `run.command`: `bsl train` has none."""

    count: PositiveInt
    """Experts of a layer, without shared ones."""

    per_token: PositiveInt
    """Experts that each token visits (top k)."""

    ffn_hidden_size: PositiveInt
    """Width of one expert."""

    shared_ffn_hidden_size: NonNegativeInt = 0
    """Width of all shared experts together, which every token visits."""

    dense_layers: NonNegativeInt = 0
    """First layers with an MLP of `model.ffn_hidden_size` instead of experts."""

    capacity_factor: PositiveFloat | None = None
    """Tokens that an expert accepts, relative to an even share. Default: no token is dropped, and shares count as
    even."""

    products: ExpertProducts | None = None
    """Whether one kernel does the products of all experts of a rank, or a loop does one expert after the other, as
    Hugging Face's models do. Default: `loop` for `deepspeed` and `fsdp`, else `grouped`."""
