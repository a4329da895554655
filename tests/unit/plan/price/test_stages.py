"""The contents of each stage, computed without a job."""

from __future__ import annotations

from dataclasses import replace

from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.stages import lay_out_stages, layout_lines
from bigsci_launch.plan.shape.parameters import count_parameters, count_stage_parameters
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts


def test_parameters_are_those_of_the_other_count(bloom: Setup) -> None:
    """`count_stage_parameters` adds up stages from layer counts, the layout from the layer list."""
    for tied in (True, False):
        for topology in (Topology(tp=4, pp=12, dp=8), Topology(tp=2, pp=1, dp=8)):
            shape = replace(bloom.shape, tied_embeddings=tied, embedding_norm=True)
            setup = replace(bloom, shape=shape, topology=topology)
            counts = [stage.num_parameters for stage in lay_out_stages(setup)]
            expected = count_stage_parameters(setup.shape, topology.tp, setup.layers_per_stage)
            assert counts == list(expected)
    assert lay_out_stages(replace(bloom, topology=Topology(tp=1, pp=1, dp=1)))[0].num_parameters == count_parameters(
        bloom.shape
    )


def test_stages_that_hold_the_same_share_a_line(bloom: Setup) -> None:
    first, middle, last = layout_lines(lay_out_stages(bloom))
    assert has_parts(first, "stage 0: VocabularyEmbedding, LearnedPositions, 5 x TransformerLayer", "4011883008")
    assert has_parts(middle, "stages 1-10: 6 x TransformerLayer", "3700042752")
    assert has_parts(last, "stage 11: 5 x TransformerLayer, FinalNorm, VocabularyEmbedding", "3982551552")


def test_prices_show_where_there_are_any(bloom: Setup) -> None:
    first, middle, last = layout_lines(lay_out_stages(bloom, Calibration()))
    assert "micro batch" in first
    assert " GiB to " not in first
    # 1F1B keeps fewer micro batches the later the stage.
    assert " to " in middle
    assert last.endswith(" GiB")
