"""Each rule refuses what it should, with the sizes in its text, and lets the final configuration of BLOOM pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.rules.layout import Limits
from bigsci_launch.config.rules.table import LAYOUT_RULES, find_refusal
from bigsci_launch.plan.shape.advice import advise
from bigsci_launch.plan.shape.parameters import Experts, ModelShape
from bigsci_launch.plan.shape.partition import PartitionRule
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

NO_LIMITS = Limits()
SIZES = (70, 14336, 112, 57344, 2048, 250680)


def refused(setup: Setup, limits: Limits = NO_LIMITS) -> Finding:
    refusal = find_refusal(setup, limits)
    assert refusal is not None
    return refusal


def test_bloom_is_legal_and_needs_no_advice(bloom: Setup) -> None:
    assert find_refusal(bloom, Limits(48, range(192, 2048, 16))) is None
    assert advise(bloom) == ()


INTERLEAVED = {"technique": Technique(schedule="interleaved", chunks_per_rank=2)}
MEGATRON = {"framework": "megatron", "partition_method": "type:transformer"}
TITAN = {"framework": "torchtitan"}
GQA = ModelShape(*SIZES, num_key_value_heads=8)
MOE = replace(GQA, experts=Experts(64, 8, 2048))


@pytest.mark.parametrize(
    ("rule", "change", "text"),
    [
        ("world size", {"topology": Topology(tp=4, pp=3, dp=1)}, "12 ranks"),
        ("tp in a node", {"topology": Topology(tp=16, pp=6, dp=4)}, "tp 16"),
        ("heads", {"shape": ModelShape(70, 14336, 108, 57344, 2048, 250680)}, "108 heads"),
        ("tp divides", {"shape": ModelShape(70, 14336, 14, 57344, 2048, 250680)}, "14 heads"),
        ("tp divides", {"shape": ModelShape(70, 14336, 112, 57346, 2048, 250680)}, "57346 MLP columns"),
        ("tp divides", {"shape": ModelShape(*SIZES, num_key_value_heads=2)}, "2 key/value heads"),
        ("heads", {"shape": ModelShape(*SIZES, num_key_value_heads=24)}, "multiple of 24 key/value heads"),
        ("heads", {"shape": replace(ModelShape(*SIZES, positions="rotary"), head_size=127)}, "even head width"),
        ("batch", {"micro_batch_size": 3}, "2048"),
        ("empty stage", {"topology": Topology(tp=4, pp=96, dp=1)}, "stage"),
        ("empty stage", {"partition_method": "type:mamba"}, "matches no layer"),
        ("batch", {"topology": Topology(tp=4, pp=12, dp=8, ep=3)}, "dp x ep 24"),
        ("context parallel", {**MEGATRON, "topology": Topology(tp=4, pp=10, dp=8, cp=2048)}, "4096 chunks"),
        ("context parallel", {**TITAN, "topology": Topology(tp=4, pp=10, dp=8, cp=2048)}, "4096 chunks"),
        (
            "context parallel",
            {"framework": "deepspeed", "topology": Topology(tp=4, pp=12, dp=8, cp=4096)},
            "4096 chunks",
        ),
        (
            "sequence parallel",
            {"technique": Technique(sequence_parallel=True), "shape": replace(GQA, sequence_length=2050)},
            "2050 tokens",
        ),
        ("experts", {"expert_shards": 8}, "8 ranks"),
        ("experts", {"expert_shards": 24, "shape": MOE}, "64 experts"),
        ("experts", {"expert_shards": 64, "shape": MOE}, "32 ranks"),
        ("experts", {"shape": replace(GQA, experts=Experts(4, 8, 2048))}, "8 experts per token"),
        ("experts", {"shape": replace(GQA, experts=Experts(8, 2, 2048, dense_layers=70))}, "experts"),
        ("zero stage", {"technique": Technique(zero_stage=2)}, "ZeRO stage 2"),
        ("zero stage", {"framework": "deepspeed", "technique": Technique(zero_stage=3)}, "ZeRO stage 3"),
        ("shard group", {**TITAN, "technique": Technique(zero_stage=3, shard_group_size=3)}, "dp 8"),
        ("pipeline", {"framework": "fsdp"}, "FSDP"),
        (
            "pipeline",
            {**MEGATRON, "topology": Topology(tp=8, pp=1, dp=48), "technique": Technique(schedule="zero_bubble")},
            "zero_bubble",
        ),
        ("pipeline", {**MEGATRON, "technique": Technique(chunks_per_rank=2)}, "2 with 1f1b"),
        ("layers", {**MEGATRON, "topology": Topology(tp=4, pp=16, dp=8)}, "70 layers nor 72"),
        ("layers", {**MEGATRON, **INTERLEAVED, "topology": Topology(tp=4, pp=10, dp=8)}, "pp 10 x 2 chunks"),
        ("layers", {**TITAN, "topology": Topology(tp=4, pp=96, dp=1)}, "fewer than pp 96"),
        ("interleaving", {**MEGATRON, **INTERLEAVED, "topology": Topology(tp=4, pp=6, dp=8)}, "128 micro batches"),
        ("interleaving", {**TITAN, **INTERLEAVED, "topology": Topology(tp=4, pp=6, dp=8)}, " 21"),
    ],
)
def test_hard_rules(bloom: Setup, rule: str, change: dict[str, object], text: str) -> None:
    refusal = refused(replace(bloom, **change))  # type: ignore[arg-type]
    assert (refusal.rule, text in refusal.text) == (rule, True), refusal.text


@pytest.mark.parametrize(
    "change",
    [
        {**MEGATRON, "topology": Topology(tp=4, pp=10, dp=8, cp=2)},
        # 72 with embedding and head; a layout that was given.
        {**MEGATRON, "topology": Topology(tp=4, pp=12, dp=8), "partition_method": "type:transformer|embedding"},
        {**MEGATRON, "topology": Topology(tp=4, pp=4, dp=8), "partition_method": "time:18,18,18,16"},
        {**MEGATRON, **INTERLEAVED, "topology": Topology(tp=8, pp=5, dp=8), "global_batch_size": 2000},
        {**TITAN, **INTERLEAVED, "topology": Topology(tp=4, pp=4, dp=8)},
        {"framework": "fsdp", "topology": Topology(tp=1, pp=1, dp=64), "technique": Technique(zero_stage=3)},
        {**TITAN, "topology": Topology(tp=4, pp=8, dp=8), "technique": Technique(zero_stage=2, shard_group_size=4)},
        {"expert_shards": 32, "shape": MOE, "technique": Technique(sequence_parallel=True)},
        # Megatron copies key/value heads to more ranks than there are; heads of their own width need not fill hidden.
        {**MEGATRON, "topology": Topology(tp=8, pp=10, dp=8), "shape": ModelShape(*SIZES, num_key_value_heads=2)},
        {"shape": replace(GQA, num_attention_heads=120, head_size=128)},
    ],
)
def test_what_another_program_can_do_is_legal(bloom: Setup, change: dict[str, object]) -> None:
    refusal = find_refusal(replace(bloom, **change), NO_LIMITS)  # type: ignore[arg-type]
    assert refusal is None, refusal


def test_copied_key_value_heads_are_megatrons(bloom: Setup) -> None:
    wide = replace(bloom, topology=Topology(tp=8, pp=6, dp=8), shape=ModelShape(*SIZES, num_key_value_heads=4))
    for framework in ("bsl", "deepspeed", "torchtitan"):
        assert "4 key/value heads" in refused(replace(wide, framework=framework)).text


def test_interleaving_holds_on_the_ramp_too(bloom: Setup) -> None:
    setup = replace(
        bloom,
        **{**MEGATRON, **INTERLEAVED, "topology": Topology(tp=8, pp=5, dp=8), "global_batch_size": 2000},  # type: ignore[arg-type]
    )
    assert has_parts(refused(setup, Limits(None, (96,))).text, "6 micro batches", "96")


def test_the_row_that_was_removed_upstream(bloom: Setup) -> None:
    # 181B, 72 layers, TP1 PP48: "fail". The partitioner of that time leaves 12 stages empty, today's does not.
    failed = replace(
        bloom,
        shape=replace(bloom.shape, num_layers=72),
        topology=Topology(tp=1, pp=48, dp=8),
        partition_method="type:transformer",
        partition_rule=PartitionRule.FILL,
    )
    assert refused(failed).rule == "empty stage"
    assert find_refusal(replace(failed, partition_rule=PartitionRule.BALANCE), NO_LIMITS) is None


def test_every_batch_of_the_ramp_counts(bloom: Setup) -> None:
    refusal = refused(bloom, Limits(None, (192, 200)))
    assert refusal.rule == "ramp-up" and "200" in refusal.text


def test_the_reserve_of_the_site(bloom: Setup) -> None:
    assert "48 nodes" in refused(bloom, Limits(47)).text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": ModelShape(70, 13824, 128, 4 * 13824, 2048, 250680)}, "head size 108"),
        ({"shape": ModelShape(75, 14336, 112, 57344, 2048, 250680)}, "uneven"),
        ({"shape": ModelShape(70, 14400, 100, 57600, 2048, 250680)}, "3600"),
        ({"micro_batch_size": 6, "global_batch_size": 2016, "topology": Topology(tp=4, pp=12, dp=8)}, "power of two"),
        ({"global_batch_size": 128}, "192"),
        (
            {"topology": Topology(tp=1, pp=8, dp=8), "technique": Technique(sequence_parallel=True)},
            "tp 1",
        ),
        ({"framework": "megatron", "shape": ModelShape(70, 14336, 112, 57344, 4096, 250680)}, "softmax"),
        ({"framework": "megatron", "micro_batch_size": 1, "shape": ModelShape(70, 13824, 72, 4 * 13824, 2048, 250680)},
         "(18)"),
    ],
)  # fmt: skip
def test_advice(bloom: Setup, change: dict[str, object], text: str) -> None:
    setup = replace(bloom, **change)  # type: ignore[arg-type]
    assert find_refusal(setup, NO_LIMITS) is None
    assert any(text in remark for remark in advise(setup)), advise(setup)


def test_the_documents_rule_for_heads_is_too_strict(bloom: Setup) -> None:
    # "for MBS=4, TP=8 HEADS % 16 = 0": heads per rank x micro batch % 4 = 0 requires only HEADS % 8 = 0.
    heads_24 = replace(
        bloom,
        framework="megatron",
        topology=Topology(tp=8, pp=6, dp=8),
        micro_batch_size=4,
        shape=replace(bloom.shape, hidden_size=13824, ffn_hidden_size=4 * 13824, num_attention_heads=24),
    )
    assert not any("softmax" in remark for remark in advise(heads_24))
    heads_108 = replace(heads_24, shape=replace(heads_24.shape, num_attention_heads=108))
    assert refused(heads_108).rule == "tp divides"


def test_a_replica_across_nodes_can_run_but_is_not_proposed(bloom: Setup) -> None:
    across = replace(bloom, topology=Topology(tp=4, pp=3, dp=32))
    assert find_refusal(across, NO_LIMITS) is None
    findings = [found for rule in LAYOUT_RULES if (found := rule.finding(across, NO_LIMITS))]
    assert [(found.rule, found.severity) for found in findings] == [("replica on nodes", "warning")]


@pytest.mark.parametrize(("tp", "nodes", "fits"), [(16, 2, True), (16, 1, False), (24, 2, False), (12, 2, False)])
def test_tensor_parallel_ranks_of_one_nvlink_domain(bloom: Setup, tp: int, nodes: int, fits: bool) -> None:
    refusal = find_refusal(replace(bloom, topology=Topology(tp=tp, pp=12, dp=2), nodes_per_domain=nodes), NO_LIMITS)
    assert (refusal is None or refusal.rule != "tp in a node") is fits
