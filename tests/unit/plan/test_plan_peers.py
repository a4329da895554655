"""What other planners are asked about published rows, and what they are not asked. They themselves are not needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from plan_peers import Row, Unsayable, calculon_input, llm_analysis_input, memory_is_sayable, read_published  # noqa: E402

sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.cells["row_id"]: row for row in read_published()}


def changed(row: Row, **cells: str) -> Row:
    return Row({**row.cells, **cells})


def test_calculon_is_asked_as_its_own_validation_asks_it(rows: dict[str, Row]) -> None:
    asked = calculon_input(rows["kor22-004"])
    execution = asked["execution"]
    assert asked["system"] == "a100_80g.json"
    assert {asked["application"][key] for key in ("hidden", "attn_size", "num_blocks")} == {12288, 128, 96}
    assert (execution["tensor_par_net"], execution["pipeline_par_net"]) == (0, 1)
    assert (execution["activation_recompute"], execution["pipeline_interleaving"]) == ("attn_only", 3)
    assert (execution["tensor_par_comm_type"], execution["seq_par_ag_redo"]) == ("rs_ag", True)
    full = calculon_input(rows["kor22-003"])["execution"]
    assert (full["tensor_par_comm_type"], full["seq_par_ag_redo"]) == ("ar", False)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"attention": "fused"}, "attention fused"),
        ({"attention": ""}, "not published: attention"),
        ({"kv_heads": "8"}, "grouped-query attention"),
        ({"virtual_stages": ""}, "not published: virtual_stages"),
        ({"sequence_parallel": ""}, "not published: sequence_parallel"),
        ({"dp": "2", "zero": "3"}, "zero 3"),
        ({"dp": "2", "zero": ""}, "not published: zero"),
        ({"schedule": "zero_bubble"}, "schedule zero_bubble"),
        ({"cp": "2"}, "context parallelism"),
        ({"framework": "torchtitan"}, "than Megatron's"),
        ({"gpu": "B200"}, "gpu B200"),
    ],
)
def test_what_calculon_cannot_say_is_left_out(rows: dict[str, Row], cells: dict[str, str], reason: str) -> None:
    with pytest.raises(Unsayable, match=f"{reason}$"):
        calculon_input(changed(rows["kor22-004"], **cells))


def test_llm_analysis_has_one_width_of_mlp(rows: dict[str, Row]) -> None:
    llama = changed(rows["kor22-004"], activation="swiglu", nhidden="8192", nheads="64", kv_heads="8", ffn="22016")
    asked = llm_analysis_input(llama)
    assert asked["train"]["mlp_gated_linear_units"] and asked["model"]["num_key_value_heads"] == 8
    with pytest.raises(Unsayable, match="an MLP of other FLOPs"):
        llm_analysis_input(changed(llama, ffn="28672"))


def test_memory_is_left_out_where_it_depends_on_what_is_not_said(rows: dict[str, Row]) -> None:
    row = rows["kor22-004"]
    assert memory_is_sayable(row)
    for unknown in ("mbs", "attention", "sequence_parallel"):
        assert not memory_is_sayable(changed(row, **{unknown: ""}))
    assert memory_is_sayable(changed(row, zero="")) and not memory_is_sayable(changed(row, zero="", dp="2"))
    assert not memory_is_sayable(changed(row, tied="0"))
