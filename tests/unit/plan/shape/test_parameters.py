"""Parameter counts and bytes, against the figures printed in BLOOM's prequel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.plan.shape.parameters import (
    ModelShape,
    checkpoint_bytes,
    count_layer_parameters,
    count_parameters,
    count_stage_parameters,
    cut_model,
    state_bytes,
)


def shape(hidden: int, layers: int, vocab: int, multiple: int = 1) -> ModelShape:
    return ModelShape(layers, hidden, 64, 4 * hidden, 2048, vocab, multiple)


BLOOM = ModelShape(70, 14336, 112, 4 * 14336, 2048, 250680)


@pytest.mark.parametrize(
    ("hidden", "layers", "vocab", "parameters", "ratio"),
    [
        (12288, 112, 150257, 204826644480, 109),
        (13312, 96, 150257, 206189288448, 138),  # an earlier line of the document says 139
        (12288, 80, 50257, 145610674176, 153),
        (16384, 96, 50257, 310115090432, 170),
        (20480, 105, 50257, 529581506560, 195),  # the document prints 310B, 170: a copy of the line above
        (14336, 80, 150257, 199498442752, 179),
        (11600, 64, 50257, 103958492400, 181),  # the table prints 180
    ],
)
def test_size_formula(hidden: int, layers: int, vocab: int, parameters: int, ratio: int) -> None:
    assert count_parameters(shape(hidden, layers, vocab)) == parameters
    assert hidden // layers == ratio


@pytest.mark.parametrize(
    ("hidden", "vocab", "tp", "embedding", "layer"),
    [
        (11600, 50257, 4, 145745300, 403717700),
        (13312, 150257, 4, 500055296, 531671296),  # 150257 is used although the document writes 150_000
    ],
)
def test_parts_per_gpu_as_the_document_divides_them(
    hidden: int, vocab: int, tp: int, embedding: int, layer: int
) -> None:
    assert vocab * hidden // tp == embedding
    assert count_layer_parameters(shape(hidden, 1, 1)) // tp == layer


def test_104b_on_tp4_pp32() -> None:
    layers = 2 * count_layer_parameters(shape(11600, 1, 1)) // 4
    with_embedding = layers + 50257 * 11600 // 4
    assert (layers, with_embedding) == (807435400, 953180700)
    assert state_bytes(with_embedding, 1).total == 17157252600
    assert state_bytes(layers, 1).total == 14533837200


def test_206b_on_tp4_pp24() -> None:
    assert (94 + 2) // 24 == 4
    assert state_bytes(4 * 531671296, 1).total == 38280333312
    assert count_layer_parameters(shape(13312, 1, 1)) // 2 == 1063342592
    assert state_bytes(1063342592, 1).total == 19140166656


@pytest.mark.parametrize(
    ("hidden", "vocab", "embedding_m", "embedding_mb", "layer_m", "layer_mb"),
    [
        # The document prints these as GB; 18 bytes x millions of parameters are MB.
        (12288, 50257, 77.19, 1389.51, 226.51, 4077.22),
        (16384, 50257, 102.93, 1852.67, 402.68, 7248.24),
        (20480, 50257, 128.66, 2315.84, 629.18, 11325.22),
        (14336, 150257, 269.26, 4846.69, 308.30, 5549.48),
        (13312, 150257, 250.03, 4500.50, 265.84, 4785.04),
    ],
)
def test_parts_at_tp8(
    hidden: int, vocab: int, embedding_m: float, embedding_mb: float, layer_m: float, layer_mb: float
) -> None:
    table, layer = vocab * hidden / 8, count_layer_parameters(shape(hidden, 1, 1)) / 8
    assert round(table / 1e6, 2) == embedding_m
    assert round(table * 18 / 1e6, 2) == embedding_mb
    assert round(layer / 1e6, 2) == layer_m
    assert round(layer * 18 / 1e6, 2) == layer_mb


@pytest.mark.parametrize(
    ("hidden", "layers", "vocab", "with_embedding", "gigabytes"),
    [
        (12288, 10, 0, False, 40.8),  # the document rounds 4.08 down first: 10 * 4 = 40
        (16384, 6, 0, False, 43.5),
        (20480, 3, 0, False, 33.98),  # the document writes 6*7.3 = ~33.9; it is 3 * 11.3
        (14336, 8, 0, False, 44.4),
        (14336, 8, 150257, True, 49.2),
        (13312, 8, 0, False, 38.3),
    ],
)
def test_stage_sums_at_tp8(hidden: int, layers: int, vocab: int, with_embedding: bool, gigabytes: float) -> None:
    parameters = layers * count_layer_parameters(shape(hidden, 1, 1)) / 8 + (
        vocab * hidden / 8 if with_embedding else 0
    )
    assert parameters * 18 / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_the_parts_of_bloom() -> None:
    assert BLOOM.padded_vocab_size(4) == BLOOM.padded_vocab_size(8) == 250880
    assert BLOOM.padded_vocab_size(4) * BLOOM.hidden_size == 3596615680
    assert count_layer_parameters(BLOOM) == 2466437120
    assert 2.2 < checkpoint_bytes(BLOOM, 4) / 2**40 < 2.3  # the chronicle says 2.3 TB


def test_padding_of_the_vocabulary() -> None:
    assert shape(64, 2, 50257, 128).padded_vocab_size(4) == 50688
    assert shape(64, 2, 50257, 128).padded_vocab_size(8) == 51200


def test_stages_add_up_to_the_model() -> None:
    for tied, norm in ((True, False), (False, True)):
        model = ModelShape(12, 64, 4, 200, 32, 1000, 128, tied, norm)
        stages = count_stage_parameters(
            model, 1, cut_model(model, "type:transformer|embedding", 4).transformer_layers_per_stage
        )
        copy = model.padded_vocab_size(1) * 64 if tied else 0
        assert sum(stages) == count_parameters(model) + copy


def test_one_stage_holds_the_tied_table_once() -> None:
    model = ModelShape(4, 64, 4, 256, 32, 1000)
    (only,) = count_stage_parameters(model, 1, (4,))
    assert only == count_parameters(model)


def test_tensor_parallel_ranks_hold_biases_and_norms_whole() -> None:
    model = ModelShape(4, 64, 4, 256, 32, 1024)
    (half,) = count_stage_parameters(model, 2, (4,))
    replicated = 4 * 6 * 64 + 32 * 64 + 2 * 64
    assert 2 * half - replicated == count_parameters(model, 2)


def test_llamas_layers_give_the_published_sizes() -> None:
    """Llama 3 8B (arXiv 2407.21783) has 8,030,261,248 parameters, Llama 2 7B 6,738,415,616; both have untied tables."""
    llama = ModelShape(
        *(32, 4096, 32, 14336, 8192, 128256),
        tied_embeddings=False,
        positions="rotary",
        num_key_value_heads=8,
        activation="swiglu",
        norm="rmsnorm",
        biases=False,
    )
    older = replace(llama, ffn_hidden_size=11008, vocab_size=32000, num_key_value_heads=None)
    assert count_parameters(llama) == 8030261248
    assert count_parameters(older) == 6738415616
    assert sum(count_stage_parameters(llama, 1, (16, 16))) == 8030261248
