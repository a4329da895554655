"""Transformer layers as compiled code (`training.compile`).

All layers of a stage share one compiled function, whose inputs are the activation and the layer's weights, so torch
compiles one layer and not each. Only what a layer computes is compiled: parameters, names, hooks on the layer and
checkpoints are those of eager layers.

- One graph for a layer, whole, also with its sums over tensor-parallel ranks: anything that torch cannot trace is an
  error, and no part of a layer is eager unnoticed.
- Dropout draws the random numbers that eager layers draw.
- Everything compiled before is forgotten first: it would hold the groups of an earlier generation of `survive`.
"""

from __future__ import annotations

from torch import Tensor, nn

from bigsci_launch.errors import BslError
from bigsci_launch.train.device import compiler
from bigsci_launch.train.parallel.model import SelfAttention, TransformerLayer
from bigsci_launch.train.parallel.positions import Tables, alibi_blocks, has_blocks

# Each size of micro-batches that `micro_batch_size: auto` tries is compiled, for training and for evaluation.
_MOST_VARIANTS = 64
_OLDEST = "2.10"


class CompiledLayer:
    """Computes any transformer layer of this process. What is compiled depends on the shape of the activation."""

    def __init__(self) -> None:
        self._compute = compiler.CompiledFunction(TransformerLayer.compute, "a transformer layer")

    def __call__(self, layer: TransformerLayer, x: Tensor) -> Tensor:
        """Return what the layer computes. Raises BslError where it cannot be compiled."""
        return self._compute(layer, x, _tables(layer.attention, x))


def _tables(attention: SelfAttention, x: Tensor) -> Tables:
    if attention.positions == "alibi" and has_blocks(attention.length(x), attention.head_dim, x.device):
        return alibi_blocks(attention.slopes, attention.length(x), x.device)
    return attention.tables(x)


def describe_compilation() -> str:
    """Return a line that says what is compiled, and where the code is kept."""
    return f"compiled: transformer layers, all with the same code, which is kept in {compiler.keep_compiled_code()}"


def compile_layers(module: nn.Module, *, by_rule: bool) -> None:
    """Let the transformer layers in `module` be computed by compiled code, which their first call compiles.

    `by_rule`: the compiler chooses kernels by rules alone, so all ranks and all starts have the same. Otherwise it
    measures some. Tensor-parallel ranks need it: the gradients of norms must have the same bits on all of them.

    Raises:
        BslError: this version of torch is too old.
    """
    compiler.keep_compiled_code()
    import torch._dynamo.config
    import torch._inductor.config

    settings = torch._inductor.config
    if not hasattr(settings, "deterministic"):
        raise BslError(
            f"training.compile: torch {torch.__version__} is too old for it", hint=f"it takes torch {_OLDEST} or newer"
        )
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    settings.fallback_random = True
    # Workers that compile would look like further processes of the rank, and stay as long as it.
    settings.compile_threads = 1
    settings.deterministic = by_rule
    compiled = CompiledLayer()
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.compiled = compiled
