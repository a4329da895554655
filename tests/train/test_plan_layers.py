"""The planner describes exactly the model that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.plan.shape.parameters import ModelShape, count_parameters, pipeline_layers

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("is_tied", ["true", "false"])
@pytest.mark.parametrize("has_norm", ["true", "false"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_the_layer_list_is_that_of_the_trainer(is_tied: str, has_norm: str, positions: str) -> None:
    from bigsci_launch.train.parallel.model import GptSizes
    from bigsci_launch.train.parallel.pipeline import layer_specs
    from bigsci_launch.train.parallel.tensor import TensorParallel

    overrides = [f"model.tied_embeddings={is_tied}", f"model.embedding_norm={has_norm}"]
    overrides.append(f"model.positions={positions}")
    overrides += [f"parallelism.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "data")]
    config = load_run(Path(__file__).parents[2] / "configs/demo.yaml", overrides).config
    specs = layer_specs(config, GptSizes.of_config(config), TensorParallel(rank=0, size=1, group=None))
    shape = ModelShape.of_config(config)
    layers = pipeline_layers(shape)
    assert [layer.name for layer in layers] == [spec.typename.__name__ for spec in specs]
    counts = [sum(parameter.numel() for parameter in spec.build().parameters()) for spec in specs]
    assert [layer.num_parameters for layer in layers] == counts
    shared = counts[0] if shape.tied_embeddings else 0
    assert count_parameters(shape) == sum(counts) - shared
