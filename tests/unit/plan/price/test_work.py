"""What a step computes, moves and sends: each technique changes what its authors say that it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.config.schema.technique import Framework
from bigsci_launch.plan.price.constants import priors_for
from bigsci_launch.plan.price.count import count_work
from bigsci_launch.plan.price.hardware import A100, GpuModel, model_named
from bigsci_launch.plan.price.memory import count_memory
from bigsci_launch.plan.price.products import product_peak
from bigsci_launch.plan.price.step_time import StepTime, predict_step
from bigsci_launch.plan.price.terms import TERMS
from bigsci_launch.plan.shape.parameters import Experts, ModelShape, count_active_parameters, count_parameters
from bigsci_launch.plan.shape.setup import Setup, Technique
from bigsci_launch.topology import Topology

CONFIG = Path(__file__).parents[4] / "configs" / "demo.yaml"
LLAMA_70B = ModelShape(
    80, 8192, 64, 28672, 8192, 128256, 1, tied_embeddings=False, positions="rotary", num_key_value_heads=8,
    activation="swiglu", norm="rmsnorm", biases=False,
)  # fmt: skip
MIXTRAL = ModelShape(
    32, 4096, 32, 14336, 4096, 32000, 1, tied_embeddings=False, positions="rotary", num_key_value_heads=8,
    activation="swiglu", norm="rmsnorm", biases=False, experts=Experts(8, 2, 14336),
)  # fmt: skip


@pytest.fixture
def h100() -> GpuModel:
    found = model_named("H100-SXM5-80GB")
    assert found is not None
    return found


@pytest.fixture
def llama() -> Setup:
    """Llama-3-70B on 64 H100 as Megatron trains it."""
    return Setup(
        LLAMA_70B, Topology(tp=4, pp=4, dp=4), 1, 128, 8, "type:transformer", framework="megatron",
        technique=Technique(kernels="compiled", sequence_parallel=True),
    )  # fmt: skip


def step(setup: Setup, gpu: GpuModel) -> StepTime:
    return predict_step(count_work(setup, gpu), priors_for(gpu))


def term(setup: Setup, gpu: GpuModel, name: str) -> float:
    return step(setup, gpu).terms[TERMS.index(name)]


def with_technique(setup: Setup, **changes: object) -> Setup:
    return replace(setup, technique=replace(setup.technique, **changes))


def test_sizes_of_public_models() -> None:
    """As their authors count them: 70.6B; 46.7B, of which a token meets 12.9B; 671B, of which 37B."""
    assert count_parameters(LLAMA_70B) == 70553706496
    assert count_parameters(MIXTRAL) == pytest.approx(46.70e9, rel=1e-3)
    assert count_active_parameters(MIXTRAL) == pytest.approx(12.88e9, rel=1e-3)


def test_a_fused_kernel_keeps_no_scores_and_moves_none(llama: Setup, h100: GpuModel) -> None:
    unfused, selective = (
        with_technique(llama, attention="unfused", recomputation=recomputed) for recomputed in ("none", "selective")
    )
    per_layer = (count_memory(unfused, 0).kept_gib - count_memory(selective, 0).kept_gib) / (4 * 20)
    assert per_layer * 2**30 == pytest.approx(5 * 64 / 4 * 8192**2), "Korthikanti et al.: 5 a s^2 b / t"
    assert term(llama, h100, "attention") > 0
    assert term(unfused, h100, "attention") == 0
    assert term(unfused, h100, "memory traffic") > 3 * term(llama, h100, "memory traffic")


def test_scores_move_more_where_each_step_is_a_kernel(llama: Setup, h100: GpuModel) -> None:
    """Scaled and masked by kernels of their own, they are read and written twice more in each direction."""

    def moved(framework: Framework) -> float:
        unfused = with_technique(replace(llama, framework=framework), attention="unfused", kernels="compiled")
        return term(unfused, h100, "memory traffic")

    scores = 8192 * 8192 * 64 / 4 * llama.topology.pp * 20 * llama.num_micro_batches
    assert moved("other") - moved("megatron") > 16 * scores / 1e12 / priors_for(h100).hbm_tb_per_s / 4


def test_a_plain_loss_needs_the_whole_vocabulary_on_every_rank(llama: Setup, h100: GpuModel) -> None:
    plain = with_technique(llama, loss="plain")
    assert term(plain, h100, "memory traffic") > term(llama, h100, "memory traffic")
    assert term(plain, h100, "NVLink") > term(llama, h100, "NVLink")
    assert term(plain, h100, "matrix products") == pytest.approx(term(llama, h100, "matrix products"))
    parallel, fused = replace(plain, framework="torchtitan"), replace(llama, framework="torchtitan")
    assert step(parallel, h100) == step(fused, h100), "which has loss_parallel"


def test_a_shared_loss_moves_more_where_each_step_is_a_kernel(llama: Setup, h100: GpuModel) -> None:
    """58 bytes of each logit instead of 20, on all of a rank's columns, as counted in the source of such a loss."""
    other = with_technique(replace(llama, framework="other"), loss="fused", kernels="fused")
    heads = [count_work(with_technique(other, kernels=kernels), h100).head for kernels in ("fused", "compiled")]
    columns = llama.shape.padded_vocab_size(llama.topology.tp) / llama.topology.tp
    moved, traffic = heads[0][TERMS.index("memory traffic")], heads[1][TERMS.index("memory traffic")]
    assert moved - traffic == pytest.approx(38 * columns * llama.tokens_per_micro_batch / 1e12)


def test_tritons_attention_of_2023_knows_no_hopper(llama: Setup, h100: GpuModel) -> None:
    triton = with_technique(llama, attention="triton")
    assert term(triton, h100, "attention") > 1.7 * term(llama, h100, "attention")
    assert term(triton, A100, "attention") == term(llama, A100, "attention")


def test_long_sequences_fit_with_a_fused_kernel(h100: GpuModel) -> None:
    """MPT-7B on 8 H100, 65,536 tokens: it ran on 80 GB (llm-foundry), and unfused scores alone would need 0.5 TiB."""
    shape = ModelShape(32, 4096, 32, 16384, 65536, 50368, 1, positions="learned")
    fsdp = Technique(recomputation="full", zero_stage=3, loss="fused")
    setup = Setup(shape, Topology(dp=8), 1, 16, 8, "type:transformer", framework="fsdp", technique=fsdp)
    terms = count_memory(setup, 0)
    assert terms.resident_gib + 14 * terms.optimizer_gib_per_byte + terms.kept_gib + terms.working_gib < 79
    assert count_memory(with_technique(setup, attention="unfused"), 0).working_gib > 500


def test_context_parallelism_divides_the_sequence(llama: Setup, h100: GpuModel) -> None:
    split = replace(llama, topology=Topology(tp=4, pp=4, cp=2, dp=2))
    assert split.num_micro_batches == 2 * llama.num_micro_batches
    one, half = step(llama, h100), step(split, h100)
    # Tokens and scores of a micro batch halve; what the ranks pass around costs less than it saves.
    assert 0.45 < half.stage_seconds[0] / one.stage_seconds[0] < 0.6
    assert count_memory(split, 0).kept_gib == pytest.approx(count_memory(llama, 0).kept_gib / 2)
    # Twice as many all-reduces of half the tokens.
    assert term(split, h100, "NVLink") < 1.3 * term(llama, h100, "NVLink")


def test_sequence_parallelism_shares_what_every_rank_kept(llama: Setup, h100: GpuModel) -> None:
    """The inputs of two norms and their results, 8 s b h, are no longer on every tensor-parallel rank."""
    without = with_technique(llama, sequence_parallel=False)
    difference = (count_memory(without, 0).kept_gib - count_memory(llama, 0).kept_gib) / (4 * 20) * 2**30
    assert difference == pytest.approx(8 * 8192 * 8192 * (1 - 1 / 4), rel=1e-6)
    assert term(without, h100, "memory traffic") > term(llama, h100, "memory traffic")
    assert term(without, h100, "NVLink") == pytest.approx(term(llama, h100, "NVLink"))


def test_chunks_and_zero_bubble_divide_the_bubble(llama: Setup, h100: GpuModel) -> None:
    few = llama.with_batch_size(16)
    idle = step(few, h100).bubble
    chunks = step(with_technique(few, schedule="interleaved", chunks_per_rank=5), h100).bubble
    zero = step(with_technique(few, schedule="zero_bubble"), h100).bubble
    assert idle > 0.3
    assert chunks < 0.4 * idle
    assert zero < 0.6 * idle


def test_interleaved_chunks_keep_more_micro_batches(llama: Setup) -> None:
    """Narayanan et al. 2021: (1 + (p - 1) / (p m)) times as many activations."""
    chunks = with_technique(llama, schedule="interleaved", chunks_per_rank=5)
    assert count_memory(chunks, 0).kept_gib == pytest.approx(count_memory(llama, 0).kept_gib * (1 + 3 / (4 * 5)))


def test_partial_recomputation_is_between_none_and_all(llama: Setup, h100: GpuModel) -> None:
    some, every = (with_technique(llama, recomputation="full", recomputed_layers=layers) for layers in (10, None))
    seconds = [step(setup, h100).seconds for setup in (llama, some, every)]
    kept = [count_memory(setup, 0).kept_gib for setup in (llama, some, every)]
    assert seconds == sorted(seconds)
    assert kept == sorted(kept, reverse=True)
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)


def test_zero_shards_state_and_stage_3_pays_for_every_micro_batch(h100: GpuModel) -> None:
    shape = replace(LLAMA_70B, num_layers=8)
    one = Setup(shape, Topology(dp=64), 1, 64, 8, "type:transformer", framework="fsdp")
    setups = [
        with_technique(one.with_batch_size(64 * num_micro_batches), zero_stage=stage)
        for num_micro_batches in (1, 4)
        for stage in (0, 1, 2, 3)
    ]
    state = [count_memory(setup, 0) for setup in setups[:4]]
    held = [terms.resident_gib + 14 * terms.optimizer_gib_per_byte for terms in state]
    assert held == sorted(held, reverse=True)
    assert held[0] > 8 * held[3]
    sent = [term(setup, h100, "network") for setup in setups]
    assert sent[7] == pytest.approx(4 * sent[3], rel=0.2), "gathered for every micro batch"
    assert sent[5] == pytest.approx(sent[1], rel=0.01), "reduced once per step"


def test_hidden_reductions_cost_less(llama: Setup, h100: GpuModel) -> None:
    hidden = with_technique(llama, overlap=frozenset(("data",)))
    assert step(hidden, h100).seconds < step(llama, h100).seconds
    assert term(hidden, h100, "network") < term(llama, h100, "network")


def test_weights_that_zero_3_gathers_are_waited_for_unless_they_are_hidden(llama: Setup, h100: GpuModel) -> None:
    open_setup = with_technique(llama, zero_stage=3)
    hidden = with_technique(llama, zero_stage=3, overlap=frozenset(("data",)))
    assert step(hidden, h100).seconds < step(open_setup, h100).seconds
    assert term(hidden, h100, "network") < 0.75 * term(open_setup, h100, "network")


@pytest.mark.parametrize(
    ("framework", "zero_stage", "hidden"),
    [("deepspeed", 2, ()), ("deepspeed", 3, ("data",)), ("megatron", 1, ()), ("fsdp", 2, ("data",))],
)
def test_what_a_run_file_says_is_hidden_holds_and_else_what_programs_hide(
    framework: str, zero_stage: int, hidden: tuple[str, ...]
) -> None:
    sizes = ("tensor_parallel_size=1", "pipeline_parallel_size=1", f"zero_stage={zero_stage}")
    keys = [f"run.framework={framework}", 'run.command=["python", "train.py"]']
    keys += [f"parallelism.{size}" for size in sizes]

    def overlap(*more: str) -> frozenset[str]:
        loaded = load_run(CONFIG, [*keys, *more])
        return Technique.of_config(loaded.config).overlap

    assert overlap() == frozenset(hidden)
    assert overlap("parallelism.overlap=[]") == frozenset()
    assert overlap('parallelism.overlap=["pipeline"]') == {"pipeline"}


def test_replicas_inside_a_node_need_no_network(h100: GpuModel) -> None:
    setup = Setup(replace(LLAMA_70B, num_layers=4), Topology(tp=2, dp=4), 1, 8, 8, "type:transformer")
    assert term(setup, h100, "network") == 0
    assert term(setup, h100, "NVLink") > 0
    assert term(replace(setup, ranks_per_node=4), h100, "network") > 0


def test_an_nvlink_domain_spares_the_network(h100: GpuModel) -> None:
    setup = Setup(LLAMA_70B, Topology(tp=8, pp=4, dp=2), 1, 128, 4, "type:transformer", framework="megatron")
    domain = replace(setup, nodes_per_domain=18)
    gpu = replace(h100, network_gb_per_s=100.0)
    assert term(domain, gpu, "network") == 0
    assert step(domain, gpu).seconds < 0.8 * step(setup, gpu).seconds


def test_experts_cost_what_tokens_visit_and_hold_what_a_rank_has(h100: GpuModel) -> None:
    dense = replace(MIXTRAL, experts=None)
    setups = [
        Setup(shape, Topology(dp=16), 1, 64, 8, "type:transformer", framework="megatron", expert_shards=shards)
        for shape, shards in ((dense, 1), (MIXTRAL, 1), (MIXTRAL, 8))
    ]
    products = [term(setup, h100, "matrix products") for setup in setups]
    # A token visits two experts of the MLP's width, which is most of the weights, and their products are slower.
    assert 1.5 < products[1] / products[0] < 3
    resident = [count_memory(setup, 0).resident_gib for setup in setups]
    assert resident[1] > 5 * resident[0]
    assert resident[2] < 1.2 * resident[0]
    assert term(setups[2], h100, "NVLink") > 0, "tokens travel to experts of other ranks"


def test_experts_beyond_the_domain_use_the_network(h100: GpuModel) -> None:
    near = Setup(
        replace(MIXTRAL, experts=Experts(64, 8, 1792)), Topology(dp=64), 1, 64, 8, "type:transformer",
        framework="megatron", expert_shards=8,
    )  # fmt: skip
    assert term(replace(near, expert_shards=64), h100, "network") > 2 * term(near, h100, "network")


def test_fp8_doubles_the_rate_of_products_only(llama: Setup, h100: GpuModel) -> None:
    fp8 = replace(llama, precision="fp8")
    assert term(llama, h100, "matrix products") > 1.5 * term(fp8, h100, "matrix products")
    assert term(llama, h100, "attention") == term(fp8, h100, "attention")


def test_fp8_gains_more_the_wider_the_layers_are(llama: Setup, h100: GpuModel) -> None:
    def gain(hidden: int) -> float:
        wide = replace(llama, shape=replace(LLAMA_70B, hidden_size=hidden))
        return product_peak(replace(wide, precision="fp8"), h100) / product_peak(wide, h100)

    assert 1.7 < gain(4096) < gain(8192) < gain(16384) < 2.1


def test_hopper_reaches_more_of_its_nvlink(h100: GpuModel) -> None:
    share, share_of_a100 = (priors_for(gpu).nvlink_gb_per_s / gpu.nvlink_gb_per_s for gpu in (h100, A100))
    assert share > 1.2 * share_of_a100


def test_fp8_gains_less_in_the_products_of_experts_except_where_one_kernel_does_them_all(h100: GpuModel) -> None:
    b200 = model_named("B200")
    assert b200 is not None

    def gain(shape: ModelShape, gpu: GpuModel) -> float:
        bf16 = Setup(shape, Topology(dp=16), 1, 64, 8, "type:transformer", framework="megatron")
        fp8 = replace(bf16, precision="fp8")
        return term(bf16, gpu, "matrix products") / term(fp8, gpu, "matrix products")

    dense = replace(MIXTRAL, experts=None)
    assert gain(MIXTRAL, h100) < 0.9 * gain(dense, h100)
    assert gain(MIXTRAL, b200) > 0.97 * gain(dense, b200)


def test_many_narrow_experts_are_slower_than_few_wide_ones_with_as_many_weights(h100: GpuModel) -> None:
    wide, narrow = (
        Setup(replace(MIXTRAL, experts=experts), Topology(dp=8), 4, 64, 8, "type:transformer", framework="megatron")
        for experts in (Experts(8, 2, 14336), Experts(64, 16, 1792))
    )
    assert term(narrow, h100, "matrix products") > 1.3 * term(wide, h100, "matrix products")


@pytest.mark.parametrize(
    ("slow", "fast", "least"), [("A100-SXM4-80GB", "H100-SXM5-80GB", 2), ("H100-SXM5-80GB", "B200", 1.6)]
)
def test_generations_differ_by_more_than_their_names(llama: Setup, slow: str, fast: str, least: float) -> None:
    one, other = model_named(slow), model_named(fast)
    assert one is not None
    assert other is not None
    assert step(llama, one).seconds > least * step(llama, other).seconds


def test_a_loop_over_experts_is_mostly_launches(h100: GpuModel) -> None:
    """Qwen3-30B by DeepSpeed's ZeRO-3 took 91 s where grouped products take 8 (modelscope/ms-swift, Qwen3)."""
    grouped = Experts(128, 8, 768, products="grouped")
    shape = ModelShape(
        48, 2048, 32, 6144, 4096, 151936, num_key_value_heads=4, head_size=128, activation="swiglu", experts=grouped
    )
    looped = replace(shape, experts=replace(grouped, products=None))

    def setup(shape: ModelShape, framework: Framework) -> Setup:
        return Setup(shape, Topology(dp=8), 1, 64, 8, "type:transformer", technique=Technique(), framework=framework)

    slow, fast = setup(looped, "deepspeed"), setup(shape, "deepspeed")
    assert step(slow, h100).seconds > 3 * step(fast, h100).seconds
    assert term(slow, h100, "launch overhead") > 0.6 * step(slow, h100).seconds
    assert step(setup(looped, "megatron"), h100) == step(setup(shape, "megatron"), h100)


def eager(tp: int, pp: int, overlap: str = "tensor") -> Setup:
    """Llama-3-70B with short sequences, in a program that launches kernels one by one."""
    technique = Technique(kernels="fused", sequence_parallel=True, zero_stage=0, overlap=frozenset((overlap,)))
    topology, shape = Topology(tp=tp, pp=pp, dp=1), replace(LLAMA_70B, sequence_length=2048)
    return Setup(shape, topology, 1, 32, 8, "type:transformer", framework="other", technique=technique)


def layer_seconds(setup: Setup, gpu: GpuModel) -> float:
    found = step(setup, gpu)
    return found.stage_seconds[0] / setup.layers_per_stage[0]


def test_hosts_of_an_eager_pipeline_wait_for_each_other(h100: GpuModel) -> None:
    """Its layers take as long as their launches, which grow with tp: with tp 8 it was 20 to 25 ms, for 8B and for 80B.
    Without a pipeline the hosts launch ahead, and compiled kernels leave them little to do."""
    assert 0.019 < layer_seconds(eager(8, 2), h100) < 0.025
    assert layer_seconds(eager(8, 2), h100) > 1.5 * layer_seconds(eager(4, 2), h100)
    compiled = with_technique(eager(8, 2), kernels="compiled")
    for quick in (eager(8, 1), eager(8, 2, overlap="data"), compiled):
        assert layer_seconds(quick, h100) < 0.5 * layer_seconds(eager(8, 2), h100)


def test_eager_collectives_between_nodes_wait_for_hosts(h100: GpuModel) -> None:
    """With tp 16, a layer of 8B took 9 to 14 ms more than its work of 1 ms, and one of a compiled program does not."""
    across, inside = eager(16, 1), eager(8, 1)
    waiting = term(across, h100, "messages") - term(with_technique(across, kernels="compiled"), h100, "messages")
    assert waiting / (LLAMA_70B.num_layers * across.num_micro_batches) > 0.004
    assert term(inside, h100, "messages") < 0.1 * term(across, h100, "messages")


def test_an_eager_program_waits_for_all_of_its_tensor_parallel_traffic(h100: GpuModel) -> None:
    hidden = with_technique(eager(8, 1), kernels="compiled")
    apart = with_technique(hidden, overlap=frozenset())
    assert term(hidden, h100, "NVLink") < term(apart, h100, "NVLink")
    assert term(eager(8, 1), h100, "NVLink") == term(apart, h100, "NVLink")
