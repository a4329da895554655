"""Remarks on setups that run, but run badly, each with its source, and with the cost if the model knows it."""

from __future__ import annotations

from bigsci_launch.plan.shape.ramp import filling_batch_size
from bigsci_launch.plan.shape.setup import Setup


def advise(setup: Setup) -> tuple[str, ...]:
    """Return remarks on a legal setup, most costly first."""
    checks = (
        _head_size,
        _without_effect,
        _fused_softmax,
        _uneven_stages,
        _row_width,
        _micro_batch_power,
        _thin_pipeline,
    )
    return tuple(text for text in (check(setup) for check in checks) if text)


def _head_size(setup: Setup) -> str | None:
    """NVIDIA's matrix-multiply guide; a head size of 13824 / 128 = 108 was measured a third slower."""
    if setup.shape.head_dim % 8:
        return f"head size {setup.shape.head_dim:g} is not a multiple of 8: attention is about 25 times slower (priced)"
    return None


def _without_effect(setup: Setup) -> str | None:
    """Megatron-LM turns sequence parallelism off by itself at tp 1 (arguments.py)."""
    is_alone = setup.technique.sequence_parallel and setup.topology.tp == 1
    return "sequence parallelism has no effect with tp 1" if is_alone else None


def _fused_softmax(setup: Setup) -> str | None:
    """Megatron-DeepSpeed's fused softmax: 16 < seq <= 2048, seq % 4 = 0, heads per rank x micro batch % 4 = 0."""
    length = setup.shape.sequence_length
    planes = setup.shape.num_attention_heads // setup.topology.tp * setup.micro_batch_size
    if setup.technique.attention == "fused" or (16 < length <= 2048 and length % 4 == 0 and planes % 4 == 0):
        return None
    return (
        f"the fused softmax needs 16 < length <= 2048, length % 4 = 0 and heads per rank x micro batch ({planes}) % 4"
    )


def _uneven_stages(setup: Setup) -> str | None:
    """Megatron-LM#381, #1303; the slowest stage sets the pace."""
    layers = setup.layers_per_stage
    inner = layers[1:-1] or layers
    idle = max(layers) * len(layers) - sum(layers)
    if max(inner) == min(inner) or not idle:
        return None
    return f"stages are uneven: {idle} layer slots of {max(layers) * len(layers)} idle (priced)"


def _row_width(setup: Setup) -> str | None:
    """128-byte rows on A100: NVIDIA's guide, arXiv 2401.14489."""
    width = setup.shape.hidden_size // setup.topology.tp
    return f"hidden / tp = {width} is not a multiple of 64" if width % 64 else None


def _micro_batch_power(setup: Setup) -> str | None:
    size = setup.micro_batch_size
    return f"micro batch {size} is not a power of two" if size & (size - 1) else None


def _thin_pipeline(setup: Setup) -> str | None:
    filling = filling_batch_size(setup.micro_batch_size, setup.num_replicas, setup.topology.pp)
    if setup.global_batch_size < filling:
        return f"the batch never fills the pipeline, which takes {filling} samples"
    return None
