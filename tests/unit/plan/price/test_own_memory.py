"""Memory of `bsl train`: what is counted, next to what a card has shown, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.schema.run import Positions
from bigsci_launch.config.schema.technique import Precision
from bigsci_launch.plan.calibrate.rows import MeasuredRow, read_rows, setup_of
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.hardware import gpu_named
from bigsci_launch.plan.price.memory import StageMemory, count_memory
from bigsci_launch.plan.price.own_memory import is_own
from bigsci_launch.plan.price.price import price_stage_memory
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology

ROWS = read_rows(Path(__file__).parents[4] / "benchmarks/rows/one-card.csv")[1]
H200 = replace(Calibration(), gpu=gpu_named("H200"))
SHAPE = ModelShape(8, 512, 8, 2048, 256, 4096)
PLAIN = Setup(SHAPE, Topology(tp=1, pp=2, dp=2), 2, 32, 8, "type:transformer|embedding")


def memory_of(setup: Setup, stage: int = 0) -> StageMemory:
    return price_stage_memory(setup, stage, H200)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_count_is_what_a_card_has_shown(row: MeasuredRow) -> None:
    setup = setup_of(row)
    assert isinstance(setup, Setup)
    memory = memory_of(setup)
    allocated, reserved = row.number("allocated_gib"), row.number("reserved_gib")
    assert memory.need_gib - memory.process_gib == pytest.approx(allocated, rel=0.002)
    assert memory.predicted_gib - memory.process_gib == pytest.approx(reserved, rel=0.08)


@pytest.mark.parametrize(
    ("precision", "micro_batch", "allocated"), [("bf16", 8, 51.141), ("bf16", 16, 79.965), ("fp8", 8, 42.142)]
)
def test_the_count_of_compiled_layers_is_what_a_card_has_shown(
    precision: Precision, micro_batch: int, allocated: float
) -> None:
    """The same model as in the rows, with its layers compiled, on the same kind of card (torch 2.11)."""
    eager = setup_of(next(row for row in ROWS if row.name.startswith("card-04")))
    assert isinstance(eager, Setup) and eager.shape.hidden_size == 2048
    setup = replace(eager, precision=precision, micro_batch_size=micro_batch, global_batch_size=32, is_compiled=True)
    memory = memory_of(setup)
    assert memory.need_gib - memory.process_gib == pytest.approx(allocated, rel=0.002)


def test_no_calibration_weighs_what_is_counted(jean_zay: Calibration) -> None:
    plain, measured = memory_of(PLAIN), price_stage_memory(PLAIN, 0, replace(jean_zay, gpu=H200.gpu))
    assert plain == measured
    assert jean_zay.knows_need_of(PLAIN)
    assert Calibration().knows_need_of(PLAIN)


@pytest.mark.parametrize(
    "change",
    [
        {"framework": "deepspeed"},
        {"technique": Technique(attention="unfused")},
        {"technique": Technique(zero_stage=2)},
        {"technique": Technique(schedule="interleaved")},
        {"technique": Technique(recomputation="full", recomputed_layers=2)},
        {"topology": Topology(tp=1, pp=1, dp=1, cp=2)},
    ],
    ids=str,
)
def test_nothing_else_is_counted(change: dict[str, object]) -> None:
    other = replace(PLAIN, **change)  # type: ignore[arg-type]
    assert is_own(PLAIN)
    assert not is_own(other)
    assert count_memory(other, 0).freed_gib is None
    assert not Calibration().knows_need_of(other)


@given(
    precision=st.sampled_from(["bf16", "fp16", "fp32", "fp8"]),
    positions=st.sampled_from(["learned", "rotary", "alibi"]),
    pp=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    recomputation=st.sampled_from(["none", "full"]),
    size=st.sampled_from([1, 2, 4]),
)
def test_more_of_anything_never_needs_less(
    precision: Precision,
    positions: Positions,
    pp: int,
    tied: bool,
    recomputation: str,
    size: int,
) -> None:
    shape = replace(SHAPE, positions=positions, tied_embeddings=tied)
    setup = Setup(
        *(shape, Topology(tp=1, pp=pp, dp=1), size, 16, 8, "type:transformer|embedding", precision),
        has_fp32_gradients=precision in ("bf16", "fp8"),
        technique=Technique(recomputation="full" if recomputation == "full" else "none"),
    )
    need = [count_memory(setup, pp - 1, layers) for layers in range(1, 6)]
    totals = [each.state_gib(H200.constants) + each.kept_gib + each.working_gib for each in need]
    assert totals == sorted(set(totals))
    assert all(each.working_gib > 0 for each in need)
    larger = memory_of(replace(setup, micro_batch_size=2 * size), pp - 1)
    if setup.num_micro_batches >= 2 * pp:
        assert larger.need_gib > memory_of(setup, pp - 1).need_gib


def test_each_choice_costs_what_it_keeps() -> None:
    """Of a token: a rotation keeps queries and keys again and attention's result twice; a gate two more activations."""
    alone = replace(PLAIN, topology=Topology(tp=1, pp=1, dp=1))
    tokens, h, gib = alone.tokens_per_micro_batch * SHAPE.num_layers, SHAPE.hidden_size, 2.0**30
    kept = count_memory(alone, 0).kept_gib

    def more(**changes: object) -> float:
        shape = replace(SHAPE, **changes)  # type: ignore[arg-type]
        return (count_memory(replace(alone, shape=shape), 0).kept_gib - kept) * gib / tokens

    assert more(positions="rotary") == pytest.approx(2 * 3 * h)
    assert more(activation="swiglu") == pytest.approx(2 * 2 * 4 * h)
    assert more(num_key_value_heads=2) == pytest.approx(2 * (-2 * 3 / 4 + 1) * h)
    dropped = count_memory(replace(alone, has_dropout=True), 0).kept_gib
    assert (dropped - kept) * gib / tokens == pytest.approx(2 * h)


def test_a_compiled_layer_keeps_one_activation_less_of_a_gate() -> None:
    alone = replace(PLAIN, topology=Topology(tp=1, pp=1, dp=1), shape=replace(SHAPE, activation="swiglu"))
    eager, compiled = count_memory(alone, 0), count_memory(replace(alone, is_compiled=True), 0)
    tokens = alone.tokens_per_micro_batch * SHAPE.num_layers
    assert (eager.kept_gib - compiled.kept_gib) * 2**30 / tokens == pytest.approx(2 * SHAPE.ffn_hidden_size)
    selective = replace(alone, technique=Technique(recomputation="selective"), shape=SHAPE)
    assert count_memory(selective, 0).kept_gib < 0.7 * count_memory(replace(selective, is_compiled=True), 0).kept_gib


def test_only_the_state_of_the_optimizer_is_shared_out() -> None:
    few, many = PLAIN, replace(PLAIN, topology=Topology(tp=1, pp=2, dp=4), global_batch_size=64)
    one, other = count_memory(few, 1), count_memory(many, 1)
    assert other.optimizer_gib_per_byte == one.optimizer_gib_per_byte / 2
    assert (other.resident_gib, other.kept_gib, other.working_gib) == (
        one.resident_gib,
        one.kept_gib,
        one.working_gib,
    )
