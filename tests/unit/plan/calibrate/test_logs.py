"""Logs of other programs: the run that they describe, what is refused by name, and what they leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.errors import DataError
from bigsci_launch.plan.calibrate.rows import Measurement
from bigsci_launch.plan.calibrate.sources import read_sources
from bigsci_launch.plan.shape.parameters import Experts, ModelShape
from bigsci_launch.plan.shape.setup import Technique
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

Read = Callable[[str], Measurement]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_log(text: str) -> Measurement:
        path = tmp_path / "log.txt"
        path.write_text(text)
        (measured,), left = read_sources([path])
        assert not left
        return measured

    return read_log


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[str], str]:
    def refused(text: str) -> str:
        path = tmp_path / "log.txt"
        path.write_text(text)
        with pytest.raises(DataError) as error:
            read_sources([path])
        return str(error.value)

    return refused


# The arguments that matter of a public run of Megatron-LM (core 0.12) on 8 GPUs in November 2025.
MODERN = {
    **{"add_bias_linear": "False", "attention_backend": "AttnBackend.auto", "bf16": "True", "config_logger_dir": ""},
    **{"context_parallel_size": "1", "cp_comm_type": "['p2p']", "data_parallel_size": "1"},
    **{"decoder_first_pipeline_num_layers": "None", "encoder_tensor_model_parallel_size": "0"},
    **{"expert_model_parallel_size": "1", "expert_tensor_parallel_size": "4", "ffn_hidden_size": "21504"},
    **{"fp16": "False", "fp8": "None", "group_query_attention": "True", "hidden_size": "6144"},
    **{"hybrid_attention_ratio": "0.0", "hybrid_override_pattern": "None", "kv_channels": "64"},
    **{"micro_batch_size": "1", "moe_expert_capacity_factor": "None", "moe_ffn_hidden_size": "21504"},
    **{"moe_layer_freq": "1", "moe_router_topk": "2", "moe_shared_expert_intermediate_size": "None"},
    **{"moe_token_dispatcher_type": "allgather", "multi_latent_attention": "False", "normalization": "RMSNorm"},
    **{"num_attention_heads": "96", "num_experts": "None", "num_layers": "56", "num_query_groups": "24"},
    **{"num_layers_per_virtual_pipeline_stage": "None", "overlap_grad_reduce": "False"},
    **{"overlap_p2p_comm": "False", "pipeline_model_parallel_size": "2", "position_embedding_type": "rope"},
    **{"recompute_granularity": "selective", "recompute_method": "None", "recompute_num_layers": "None"},
    **{"seq_length": "8192", "sequence_parallel": "True", "squared_relu": "False", "swiglu": "True"},
    **{"tensor_model_parallel_size": "4", "tp_comm_overlap": "False", "transformer_impl": "transformer_engine"},
    **{"untie_embeddings_and_output_weights": "True", "use_distributed_optimizer": "True"},
    **{"use_flash_attn": "True", "use_torch_fsdp2": "False", "virtual_pipeline_model_parallel_size": "None"},
    **{"vocab_size": "None", "window_size": "None", "world_size": "8"},
}
STEPS = "".join(
    f" [2025-11-14 10:20:15] iteration {step:8d}/      20 | consumed samples:         1024 | elapsed time per "
    f"iteration (ms): {elapsed} | mem usages: 0.4430 | throughput per GPU (TFLOP/s/GPU): 248.4 | lr: 1.4E-04 | "
    "global batch size:   512 | lm loss: 1.171790E+01 | loss scale: 1.0 | grad norm: 970.893 |\n"
    for step, elapsed in enumerate((520000.0, 423291.1, 421545.3, 420965.6, 421365.2), start=1)
)


def megatron_log(after: str = "", **changes: str) -> str:
    """A log as Megatron-LM prints it, with some arguments changed."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in sorted((MODERN | changes).items())]
    return (
        "------------------------ arguments ------------------------\n"
        f"{''.join(lines)}-------------------- end of arguments ---------------------\n"
        " > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)\n"
        f"{after}{STEPS}"
    )


def test_megatron_of_today_is_read_as_what_it_is(read: Read) -> None:
    measured = read(megatron_log())
    assert measured.seconds == pytest.approx(421.3652)
    assert measured.setup.shape == ModelShape(
        *(56, 6144, 96, 21504, 8192, 50688),
        tied_embeddings=False,
        positions="rotary",
        num_key_value_heads=24,
        activation="swiglu",
        norm="rmsnorm",
        biases=False,
    )
    assert measured.setup.topology == Topology(tp=4, pp=2, dp=1)
    assert (measured.setup.micro_batch_size, measured.setup.global_batch_size) == (1, 512)
    assert measured.setup.technique == Technique(
        "fused", "selective", sequence_parallel=True, zero_stage=1, kernels="compiled"
    )
    assert (measured.setup.precision, measured.setup.framework) == ("bf16", "megatron")


EVERY_LAYER = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "3"}


@pytest.mark.parametrize(
    ("changes", "technique"),
    [
        ({"recompute_granularity": "None"}, Technique(sequence_parallel=True, kernels="compiled")),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"},
            Technique(recomputation="full", sequence_parallel=True, kernels="compiled"),
        ),
        (EVERY_LAYER, Technique(recomputation="full", recomputed_layers=3, sequence_parallel=True, kernels="compiled")),
        (
            {**EVERY_LAYER, "num_layers_per_virtual_pipeline_stage": "14"},
            Technique("fused", "full", 6, True, 1, None, "interleaved", 2, kernels="compiled"),
        ),
        (
            {"overlap_grad_reduce": "True", "tp_comm_overlap": "True", "use_distributed_optimizer": "False"},
            Technique("fused", "selective", None, True, 0, overlap=frozenset(("data", "tensor")), kernels="compiled"),
        ),
        (
            {"use_megatron_fsdp": "True", "data_parallel_sharding_strategy": "optim_grads_params"},
            Technique("fused", "selective", None, True, 3, kernels="compiled"),
        ),
        ({"use_megatron_fsdp": "True"}, Technique("fused", "selective", None, True, 0, kernels="compiled")),
        (
            {"attention_backend": "AttnBackend.unfused"},
            Technique("unfused", "selective", None, True, kernels="compiled"),
        ),
        (
            {"transformer_impl": "local", "use_flash_attn": "False", "sequence_parallel": "False"},
            Technique("unfused", "selective", kernels="compiled"),
        ),
    ],
)
def test_arguments_of_megatron_say_how_it_computes(read: Read, changes: dict[str, str], technique: Technique) -> None:
    assert read(megatron_log(**changes)).setup.technique == technique


def test_experts_of_megatron(read: Read) -> None:
    spread = {"num_experts": "64", "expert_model_parallel_size": "4", "expert_tensor_parallel_size": "1"}
    shared = {"moe_ffn_hidden_size": "1408", "moe_shared_expert_intermediate_size": "2816", "moe_router_topk": "6"}
    layers = {"moe_layer_freq": str([0, 0, *[1] * 54]), "moe_token_dispatcher_type": "alltoall"}
    setup = read(megatron_log(**spread, **shared, **layers, fp8="hybrid")).setup
    assert setup.shape.experts == Experts(64, 6, 1408, 2816, 2)
    assert (setup.expert_shards, setup.precision) == (4, "fp8")


def test_heads_that_nobody_shares_have_groups_that_count_for_nothing(read: Read) -> None:
    shape = read(megatron_log(group_query_attention="False", num_query_groups="1")).setup.shape
    assert shape.num_key_value_heads is None


def test_stages_of_their_own_size(read: Read) -> None:
    assert read(megatron_log(decoder_first_pipeline_num_layers="26")).setup.layers_per_stage == (26, 30)


EXPERTS = {"num_experts": "8", "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"multi_latent_attention": "True"}, "multi_latent_attention: True"),
        ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern: M-M*-"),
        ({"mtp_num_layers": "1"}, "mtp_num_layers: 1"),
        ({"window_size": "(4096, 0)"}, "window_size: (4096, 0)"),
        ({"fp4": "e2m1"}, "fp4: e2m1"),
        (
            {"use_megatron_fsdp": "True", "data_parallel_sharding_strategy": "hybrid"},
            "data_parallel_sharding_strategy: hybrid",
        ),
        ({"optimizer_cpu_offload": "True"}, "optimizer_cpu_offload: True"),
        ({"recompute_modules": "['moe_act']"}, "recompute_modules: ['moe_act']"),
        ({**EVERY_LAYER, "recompute_method": "uniform"}, "recompute_num_layers: 3 with recompute_method uniform"),
        (EXPERTS, "expert_tensor_parallel_size: 4"),
        ({**EXPERTS, "expert_tensor_parallel_size": "1", "moe_layer_freq": "2"}, "moe_layer_freq: 2"),
        ({"position_embedding_type": "mrope"}, "positions 'mrope'"),
        ({"context_parallel_size": "2", "cp_comm_type": "['a2a']"}, "cp_comm_type: ['a2a']"),
        ({"num_attention_heads": "None", "seq_length": "None"}, "no num_attention_heads, seq_length"),
    ],
)
def test_what_megatron_does_and_is_not_modelled_is_refused_by_name(
    refusal: Callable[[str], str], changes: dict[str, str], reason: str
) -> None:
    assert reason in refusal(megatron_log(**changes))


def test_megatron_that_does_not_say_what_it_recomputes(refusal: Callable[[str], str]) -> None:
    assert "recompute" in refusal(megatron_log().replace("recompute_granularity", "something_else"))


def test_megatron_deepspeed_of_2023(read: Read, refusal: Callable[[str], str]) -> None:
    """DeepSpeed's own configuration decides on ZeRO, whatever the argument says."""
    arguments = {
        **{"deepspeed": "True", "num_experts": "[1]", "num_key_value_heads": "16", "num_query_groups": "None"},
        **{"group_query_attention": "False", "num_attention_heads": "96", "normalization": "rmsnorm"},
        **{"use_rotary_position_embeddings": "True", "position_embedding_type": "None", "zero_stage": "0"},
        **{"transformer_impl": "local", "use_flash_attn": "False", "checkpoint_activations": "False"},
        **{"recompute_granularity": "None", "sequence_parallel": "False", "bf16": "False", "fp16": "True"},
    }
    config = (
        "[2023-08-15 06:31:34,817] [INFO] [module.py:358:_partition_layers] Partitioning pipeline stages with method "
        "type:transformer\n"
        "[2023-08-15 06:31:35,634] [INFO] [config.py:964:print]   world_size ................... 2\n"
        "[2023-08-15 06:31:35,634] [INFO] [config.py:964:print]   zero_config .................. stage=1 "
        "overlap_comm=False offload_param=None offload_optimizer=None sub_group_size=1,000,000,000\n"
        "[2023-08-15 06:31:35,634] [INFO] [config.py:964:print]   zero_optimization_stage ...... 1\n"
    )
    setup = read(megatron_log(config, **arguments)).setup
    assert (setup.framework, setup.precision, setup.partition_method) == ("deepspeed", "fp16", "type:transformer")
    assert setup.technique == Technique("unfused", "none", zero_stage=1)
    assert (setup.shape.num_key_value_heads, setup.shape.positions) == (16, "rotary")
    offloaded = config.replace("offload_optimizer=None", "offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(")
    assert "offload_optimizer" in refusal(megatron_log(offloaded, **arguments))


# From a public run of torchtitan on 8 H200 in February 2025; the newer lines are those of torchtitan 0.2.
TITAN = """
[rank0]:2025-02-13 11:33:12,138 - root - INFO - CUDA capacity: NVIDIA H200 with 139.83GiB memory
[rank0]:2025-02-13 11:33:12,140 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]
[rank0]:2025-02-13 11:33:28,973 - root - INFO - Building llama3 8B with ModelArgs(dim=4096, n_layers=32, n_heads=32, \
n_kv_heads=8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3, norm_eps=1e-05, rope_theta=500000, \
max_seq_len=8192, depth_init=True, norm_type='rmsnorm')
[rank0]:2025-02-13 11:33:29,157 - root - INFO - Applied selective activation checkpointing to the model
[rank0]:2025-02-13 11:33:29,239 - root - INFO - Applied FSDP to the model
[rank0]:2025-02-13 11:33:29,482 - root - INFO - Training starts at step 1, with local batch size 1, global batch size \
8, sequence length 8192, total steps 100 (warmup 200)
"""
TITAN_STEPS = "".join(
    f"[rank0]:2025-02-13 11:33:35,026 - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32mloss: 12.2417  \x1b[33mmemory: "
    f"{memory}GiB(30.10%)  \x1b[34mtps: {speed}  \x1b[36mtflops: 407.35  \x1b[35mmfu: 8.65%\x1b[39m\n"
    for step, memory, speed in ((1, 42.08, "1,478"), (10, 49.59, "7,026"), (20, 49.59, "7,080"), (30, 49.5, "7,082"))
)


def test_torchtitan_describes_itself(read: Read) -> None:
    measured = read(TITAN + TITAN_STEPS)
    assert measured.seconds == pytest.approx(8 * 8192 / (7081 * 8))
    assert (measured.memory_gib, measured.gpu) == (49.59, "NVIDIA H200")
    assert measured.setup.shape == ModelShape(
        *(32, 4096, 32, 14336, 8192, 128256),
        vocab_size_multiple=1,
        tied_embeddings=False,
        positions="rotary",
        num_key_value_heads=8,
        activation="swiglu",
        norm="rmsnorm",
        biases=False,
    )
    assert measured.setup.topology == Topology(dp=8)
    assert measured.setup.framework == "torchtitan"
    assert measured.setup.technique == Technique(
        recomputation="selective",
        zero_stage=3,
        overlap=frozenset(("data",)),
        sequence_parallel=False,
        kernels="compiled",
    )


def test_torchtitan_with_a_pipeline_and_several_copies(read: Read, refusal: Callable[[str], str]) -> None:
    mesh = "Building device mesh with parallelism: pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=1, etp=1"
    batch = "local batch size 8, global batch size 64, gradient accumulation steps 1, sequence length 8192"
    text = TITAN.replace("Building 1-D device mesh with ['dp_shard'], [8]", mesh).replace("selective", "full")
    text = text.replace("local batch size 1, global batch size 8, sequence length 8192", batch)
    text += "root - INFO - Using pipeline schedule Interleaved1F1B with 8 microbatches and 4 stages.\n"
    setup = read(text + "Float8 training active\n" + TITAN_STEPS).setup
    assert setup.topology == Topology(tp=2, pp=2, dp=8, cp=2)
    assert (setup.micro_batch_size, setup.global_batch_size, setup.precision) == (1, 64, "fp8")
    assert setup.technique == Technique(
        "fused",
        "full",
        None,
        True,
        2,
        8,
        "interleaved",
        2,
        overlap=frozenset(("data",)),
        kernels="compiled",
    )
    assert setup.layers_per_stage == (8 + 8, 9 + 7)
    zero_bubble = text.replace("Interleaved1F1B", "ZBVZeroBubble") + TITAN_STEPS
    assert "pipeline_parallel_schedule: ZBVZeroBubble" in refusal(zero_bubble)
    offloaded = text + "Applied CPU Offloading to the model\n" + TITAN_STEPS
    assert "enable_cpu_offload" in refusal(offloaded)


def test_the_configuration_of_torchtitan_fills_what_its_lines_leave_out(read: Read) -> None:
    """The form of the configuration is that of pytorch/torchtitan#1904."""
    config = {
        "model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]},
        "training": {"local_batch_size": 2, "global_batch_size": -1, "seq_len": 4096},
        "parallelism": {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 4},
        "activation_checkpoint": {"mode": "full"},
    }
    model = next(line for line in TITAN.splitlines() if "ModelArgs" in line)
    text = f"[titan] - root - INFO - Running with configs: {json.dumps(config, indent=2)}\n{model}\n"
    setup = read(text + TITAN_STEPS).setup
    assert setup.topology == Topology(dp=4)
    assert (setup.micro_batch_size, setup.global_batch_size, setup.shape.sequence_length) == (2, 8, 4096)
    assert (setup.precision, setup.technique.recomputation) == ("fp8", "full")


def test_torchtitan_without_sizes_or_with_another_model_says_so(refusal: Callable[[str], str]) -> None:
    other = TITAN.replace("Building llama3 8B", "Building deepseek_v3 16B") + TITAN_STEPS
    assert "model deepseek_v3 16B" in refusal(other)
    silent = "\n".join(line for line in TITAN.splitlines() if "ModelArgs" not in line) + "\n" + TITAN_STEPS
    assert has_parts(refusal(silent), *("nlayers", "nhidden", "nheads", "vocab"), "torchtitan")


# The form of NeMo 1's log is that of NVIDIA/NeMo#5819, with the number of the rank before each line.
NEMO_CONFIG = """
0: [NeMo I 2023-01-18 07:39:41 megatron_gpt_pretraining:36]
0:
0:     ************** Experiment configuration ***********
0: [NeMo I 2023-01-18 07:39:41 megatron_gpt_pretraining:37]
0:     trainer:
0:       devices: 8
0:       num_nodes: 2
0:       precision: bf16-mixed
0:     model:
0:       mcore_gpt: true
0:       micro_batch_size: 1
0:       global_batch_size: 128
0:       tensor_model_parallel_size: 4
0:       pipeline_model_parallel_size: 2
0:       virtual_pipeline_model_parallel_size: 5
0:       encoder_seq_length: 4096
0:       num_layers: 40
0:       hidden_size: 5120
0:       ffn_hidden_size: 13824
0:       num_attention_heads: 40
0:       num_query_groups: null
0:       kv_channels: null
0:       normalization: rmsnorm
0:       bias: false
0:       activation: fast-swiglu
0:       position_embedding_type: rope
0:       share_embeddings_and_output_weights: false
0:       activations_checkpoint_granularity: null
0:       activations_checkpoint_num_layers: null
0:       sequence_parallel: true
0:       ub_tp_comm_overlap: true
0:       optim:
0:         name: distributed_fused_adam
0:         overlap_grad_sync: true
0:       data:
0:         seq_length: 2048
0: [NeMo I 2023-01-18 07:40:14 megatron_base_model:264] Padded vocab_size: 32256, original vocab_size: 32000, dummy \
tokens: 256.
"""
NEMO_STEPS = "".join(
    f"Training epoch 0, iteration {step}/99 | lr: 3.9e-06 | global_batch_size: 128 | global_step: {step} | "
    f"reduced_train_loss: 2.008 | train_step_timing in s: {seconds} | consumed_samples: 128\n"
    for step, seconds in enumerate((7.126, 2.505, 1.505, 1.507))
)


def test_nemo_prints_a_model_of_megatron(read: Read, refusal: Callable[[str], str]) -> None:
    setup = (measured := read(NEMO_CONFIG + NEMO_STEPS)).setup
    assert measured.seconds == pytest.approx(1.506)
    assert setup.shape == ModelShape(
        *(40, 5120, 40, 13824, 4096, 32256),
        tied_embeddings=False,
        positions="rotary",
        activation="swiglu",
        norm="rmsnorm",
        biases=False,
    )
    assert (setup.topology, setup.global_batch_size) == (Topology(tp=4, pp=2, dp=2), 128)
    assert (setup.framework, setup.precision, setup.ranks_per_node) == ("megatron", "bf16", 8)
    assert setup.technique == Technique(
        "fused",
        "none",
        None,
        True,
        1,
        None,
        "interleaved",
        5,
        overlap=frozenset(("data", "tensor")),
        kernels="compiled",
    )
    partly = NEMO_CONFIG.replace("sequence_parallel: true", "activations_checkpoint_layers_per_pipeline: 2")
    assert "activations_checkpoint_layers_per_pipeline: 2 is not modelled" in refusal(partly + NEMO_STEPS)


def test_progress_bars_of_nemo_count_too(read: Read) -> None:
    bars = "\r".join(
        f"Epoch 0: :  47%|####6     | 7/15 [06:19<07:13, reduced_train_loss=11.50, global_step={step}, "
        f"consumed_samples=12288.0, train_step_timing in s={seconds}]"
        for step, seconds in (("5.000", 60.0), ("6.000", 50.0), ("7.000", 49.5), ("2e+3", 49.7))
    )
    measured = read(NEMO_CONFIG + bars)
    assert (measured.seconds, measured.setup.global_batch_size) == (pytest.approx(49.6), 128)


def test_nemo_without_a_configuration_says_what_is_missing(refusal: Callable[[str], str]) -> None:
    reason = refusal(NEMO_STEPS)
    unsaid, said = ("nlayers", "nhidden", "nheads", "seq", "vocab", "dp", "tp", "pp", "mbs"), ("1.506", "gbs 128")
    assert has_parts(reason, "NeMo", ", ".join(unsaid), "framework megatron", *said)


# The lines are those of DeepSpeed 0.9.5.
DEEPSPEED = "".join(
    f"[2023-08-15 06:31:35,634] [INFO] [config.py:964:print]   {setting}\n"
    for setting in (
        "bfloat16_enabled ............. True",
        "train_batch_size ............. 32",
        "train_micro_batch_size_per_gpu  4",
        "world_size ................... 2",
        "zero_optimization_stage ...... 3",
    )
)


@pytest.mark.parametrize(
    "steps",
    [
        [f"steps: {step} loss: 10.6521 iter time (s): 1.25 samples/sec: 25.6\n" for step in range(1, 5)],
        [
            f"[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step={step}/global_step={step}, "
            "RunningAvgSamplesPerSec=7.8, CurrSamplesPerSec=25.6, MemAllocated=59.65GB, MaxMemAllocated=63.31GB\n"
            for step in range(1, 5)
        ],
    ],
)
def test_deepspeed_says_what_it_knows(refusal: Callable[[str], str], steps: list[str]) -> None:
    reason = refusal(DEEPSPEED + "".join(steps))
    unsaid = ("nlayers", "nhidden", "nheads", "seq", "vocab", "tp", "pp")
    assert has_parts(reason, "DeepSpeed", ", ".join(unsaid), "dp 2", "mbs 4", "gbs 32", "zero 3", "bf16", "1.25")
