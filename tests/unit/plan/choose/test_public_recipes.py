"""Three models that users ask about: the layout of the public recipe is found, fits, and takes about as long as was
published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bigsci_launch.config.load import resolve_run
from bigsci_launch.plan.choose.answer import request_plans
from bigsci_launch.plan.choose.search import Plan, search
from bigsci_launch.plan.price.calibration import expected_on
from bigsci_launch.plan.price.hardware import gpu_of_site
from bigsci_launch.plan.shape.tflops import tflops_of

Case = dict[str, dict[str, Any]]

MODEL = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "biases": False, "tied_embeddings": False}
LLAMA = {**MODEL, "num_key_value_heads": 8, "sequence_length": 8192, "vocab_size": 128256}
COMMAND = ["torchrun", "train.py"]

LLAMA_8B: Case = {
    "run": {"name": "llama-8b", "framework": "torchtitan", "command": COMMAND},
    "model": {**LLAMA, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336},
    "parallelism": {"zero_stage": 3},
    "training": {"global_batch_size": 8, "micro_batch_size": 1, "activation_checkpointing": "selective"},
    "slurm": {"nodes": 1},
}
LLAMA_70B: Case = {
    "run": {"name": "llama-70b", "framework": "megatron", "command": COMMAND},
    "model": {**LLAMA, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672},
    "parallelism": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 4,
        "data_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
        "schedule": "interleaved",
        "chunks_per_rank": 5,
        "overlap": ["data", "tensor", "pipeline"],
    },
    "training": {
        "global_batch_size": 128,
        "micro_batch_size": 1,
        "gradients": "bf16",
        "activation_checkpointing": False,
    },
    "slurm": {"nodes": 8},
}
QWEN3_30B: Case = {
    "run": {"name": "qwen3-30b", "framework": "megatron", "command": COMMAND},
    "model": {
        **MODEL,
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_size": 128,
        "ffn_hidden_size": 6144,
        "sequence_length": 4096,
        "vocab_size": 151936,
        "experts": {"count": 128, "per_token": 8, "ffn_hidden_size": 768},
    },
    "parallelism": {"expert_shards": 8},
    "training": {
        "global_batch_size": 512,
        "micro_batch_size": 1,
        "gradients": "bf16",
        "activation_checkpointing": False,
    },
    "slurm": {"nodes": 4},
}


def plans_of(case: Case, folder: Path) -> tuple[Plan, ...]:
    """Return what `bsl plan` proposes on the superpod's H100s, best first."""
    path = folder / "run.yaml"
    case = {**case, "slurm": {**case["slurm"], "site": "superpod-pyxis"}, "training": {"steps": 10, **case["training"]}}
    path.write_text(yaml.safe_dump(case), encoding="utf-8")
    config, site, _ = resolve_run(path)
    gpu = gpu_of_site(site.config)
    assert gpu is not None
    known = expected_on(gpu)
    request = request_plans(config, site, known)
    bases = (request.configured,)
    return search(bases, request.nodes, request.limits, known, phases=request.phases, per_parameter=False).plans


def test_8b_on_8_gpus_by_fsdp_with_one_sequence_each(tmp_path: Path) -> None:
    """torchao's table for torchtitan: 6150 tokens/s on each H100, bf16."""
    best = plans_of(LLAMA_8B, tmp_path)[0]
    assert (best.setup.topology.dp, best.setup.micro_batch_size) == (8, 1)
    assert 8192 / best.price.seconds == pytest.approx(6150, rel=0.3)


def test_70b_on_64_gpus_is_within_three_percent_of_the_first(tmp_path: Path) -> None:
    """NVIDIA/dgxc-benchmarking, bf16 on H100: tp 4, pp 4, cp 2, 14.7 s a step."""
    plans = plans_of(LLAMA_70B, tmp_path)
    recipe = next(
        plan
        for plan in plans
        if (plan.setup.topology.tp, plan.setup.topology.pp, plan.setup.micro_batch_size) == (4, 4, 1)
    )
    assert recipe.price.fit == "fits"
    assert recipe.price.seconds == pytest.approx(14.72, rel=0.05)
    assert recipe.likely_days < 1.03 * plans[0].likely_days


def test_30b_with_experts_on_32_gpus_without_a_pipeline(tmp_path: Path) -> None:
    """NVIDIA's guide for Qwen3 30B on H100: tp 1, pp 1, ep 8, somewhat more than 200 TFLOP/s."""
    best = plans_of(QWEN3_30B, tmp_path)[0]
    assert (best.setup.topology.tp, best.setup.topology.pp) == (1, 1)
    assert 200 < tflops_of(best.setup, best.price.seconds).of_day(None) < 240
