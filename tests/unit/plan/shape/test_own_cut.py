"""Cuts of frameworks without DeepSpeed's partitioner, against their own rules."""

from __future__ import annotations

from bigsci_launch.config.rules.own_cut import own_method
from bigsci_launch.config.schema.technique import Framework
from bigsci_launch.plan.shape.parameters import ModelShape, cut_model


def cut(
    framework: Framework, num_layers: int, pp: int, configured: str = "type:transformer|embedding"
) -> tuple[int, ...]:
    shape = ModelShape(num_layers, 64, 4, 256, 64, 512, positions="rotary", tied_embeddings=False)
    method = own_method(framework, num_layers, pp, 1, configured)
    return cut_model(shape, method, pp, framework=framework).transformer_layers_per_stage


def torchtitan(num_layers: int, pp: int) -> tuple[int, ...]:
    """Stages as torchtitan's pipeline_parallel.py cuts them: embedding and head weigh a layer each, and the first
    stages get what is left over."""
    share, rest = divmod(num_layers + 2, pp)
    counts = [share + (stage < rest) for stage in range(pp)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def test_torchtitan() -> None:
    for num_layers in (3, 8, 32, 61, 80, 126):
        for pp in range(2, min(num_layers, 24) + 1):
            assert cut("torchtitan", num_layers, pp) == torchtitan(num_layers, pp)


def test_megatron() -> None:
    assert cut("megatron", 32, 4) == (8, 8, 8, 8)
    # Llama 3 405B has two layers fewer than 128, so that embedding and head get room.
    assert cut("megatron", 126, 16) == (7, *(8,) * 14, 7)


def test_layers_that_were_given_stay() -> None:
    assert cut("megatron", 32, 4, "time:7,9,9,7") == (7, 9, 9, 7)
    assert cut("megatron", 32, 2, "time:7,9,9,7") == (16, 16)
    assert own_method("deepspeed", 32, 4, 1, "parameters") == "parameters"
