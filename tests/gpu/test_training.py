"""Trains on a GPU: number formats, resume to the last bit, guards, every axis of parallelism, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from .conftest import DEVICE, ON_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

STEPS = 6


def losses(attempt: Any) -> list[float]:
    steps = attempt.steps()
    assert sorted(steps) == list(range(min(steps), max(steps) + 1))
    return [steps[step]["loss"] for step in sorted(steps)]


def bits(attempt: Any) -> dict[int, str]:
    return {step: record["loss_hex"] for step, record in attempt.steps().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_trains_over_nccl_with_guards_at_every_step(train_on_gpu: Any, tmp_path: Path, precision: str) -> None:
    training = {"steps": 20, "precision": precision, "share_devices": False}
    attempt = train_on_gpu(tmp_path, training=training, guards={"interval": 1})
    found = losses(attempt)
    assert all(math.isfinite(loss) for loss in found)
    assert found[-1] < found[0]
    if DEVICE == "cpu":
        return
    last = attempt.steps()[20]
    assert 0 < last["memory_allocated"] <= last["memory_reserved"]
    assert "GiB reserved" in attempt.log(0)


def test_in_fp8_it_trains_as_in_bf16(train_on_gpu: Any, tmp_path: Path) -> None:
    training = {"steps": 20, "global_batch_size": 8}
    model = {"hidden_size": 256, "num_layers": 2}
    plain = train_on_gpu(tmp_path / "bf16", training={**training, "precision": "bf16"}, model=model)
    attempt = train_on_gpu(
        tmp_path / "fp8", training={**training, "precision": "fp8"}, model=model, guards={"interval": 1}
    )
    assert losses(attempt) == pytest.approx(losses(plain), rel=5e-3)
    assert losses(attempt) != losses(plain)
    assert "fp8: 8 of 8 linear layers" in attempt.log(0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_deterministic_run_resumes_to_the_last_bit(train_on_gpu: Any, tmp_path: Path, precision: str) -> None:
    training = {"steps": STEPS, "precision": precision, "deterministic": True}
    model = {"dropout": 0.1}
    whole = train_on_gpu(tmp_path / "whole", training=training, model=model)
    folder = tmp_path / "parts"
    first = train_on_gpu(folder, training={**training, "stop_after_steps": 3}, model=model, guards={"interval": 1})
    second = train_on_gpu(folder, training=training, model=model, guards={"interval": 1})
    assert bits(first) | bits(second) == bits(whole)


def test_compiled_layers_train_as_eager_ones_and_resume_to_the_last_bit(train_on_gpu: Any, tmp_path: Path) -> None:
    """Alibi has another kernel there, and guards compare the gradients with those of eager layers."""
    model = {"dropout": 0.1, "positions": "alibi", "sequence_length": 128, "hidden_size": 64}
    eager = {"steps": 4, "global_batch_size": 4, "precision": "bf16", "deterministic": True}
    compiled = {**eager, "compile": True}
    plain = train_on_gpu(tmp_path / "eager", training=eager, model=model)
    whole = train_on_gpu(tmp_path / "whole", training=compiled, model=model)
    assert losses(whole) == pytest.approx(losses(plain), rel=2e-3)
    folder = tmp_path / "parts"
    first = train_on_gpu(folder, training={**compiled, "stop_after_steps": 2}, model=model, guards={"interval": 1})
    second = train_on_gpu(folder, training=compiled, model=model, guards={"interval": 1})
    assert bits(first) | bits(second) == bits(whole)


@pytest.mark.parametrize("topology", ["tp=2", "pp=2", "dp=2", "tp=2,pp=2"])
def test_ranks_that_share_the_gpu_train_as_one(train_on_gpu: Any, tmp_path: Path, topology: str) -> None:
    alone = train_on_gpu(tmp_path / "alone", training={"steps": STEPS})
    shared = train_on_gpu(tmp_path / "shared", topology, training={"steps": STEPS}, guards={"interval": 1})
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-5)


def test_ranks_with_parts_of_sequences_train_as_one(train_on_gpu: Any, tmp_path: Path) -> None:
    alone = train_on_gpu(tmp_path / "alone", training={"steps": STEPS})
    sections: dict[str, Any] = {"parallelism": {"sequence_parallel": True}, "guards": {"interval": 1}}
    shared = train_on_gpu(tmp_path / "shared", "tp=2", training={"steps": STEPS}, **sections)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-5)


def test_a_gpu_computes_what_a_cpu_computes(train_on_gpu: Any, finish: Any, tmp_path: Path) -> None:
    on_gpu = train_on_gpu(tmp_path / "gpu", training={"steps": STEPS})
    on_cpu = finish(tmp_path / "cpu", training={"steps": STEPS})
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-5)


def test_a_checkpoint_of_a_gpu_is_continued_on_a_cpu_and_back(train_on_gpu: Any, finish: Any, tmp_path: Path) -> None:
    whole = train_on_gpu(tmp_path / "whole", training={"steps": STEPS})
    folder = tmp_path / "parts"
    parts = [
        train_on_gpu(folder, training={"steps": STEPS, "stop_after_steps": 2}, guards={"interval": 1}),
        finish(folder, training={"steps": STEPS, "stop_after_steps": 2}, guards={"interval": 1}),
        train_on_gpu(folder, training={"steps": STEPS}, guards={"interval": 1}),
    ]
    assert [loss for part in parts for loss in losses(part)] == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.usefixtures("train_on_gpu")
def test_a_guard_stops_a_wrong_step(start: Any, tmp_path: Path) -> None:
    attempt = start(
        tmp_path,
        "tp=2",
        training={**ON_GPU, "steps": 5, "precision": "bf16"},
        guards={"interval": 1},
        faults=[{"kind": "unreduced_tp_gradients", "step": 3}],
    )
    assert attempt.wait() == [1, 1]
    for rank in range(2):
        error = attempt.error(rank)
        assert error["type"] == "GuardError"
        assert error["message"].startswith("step 3: ")


def test_two_ranks_on_one_gpu_are_refused_unless_they_may_share(start: Any, tmp_path: Path) -> None:
    attempt = start(tmp_path, "dp=2", training={"device": "cuda"})
    assert attempt.wait() == [1, 1]
    message = attempt.error(0)["message"]
    assert message == attempt.error(1)["message"]
    assert "have the same GPU" in message or "more ranks than GPUs" in message


def test_out_of_memory_is_the_ranks_own_error(start: Any, tmp_path: Path) -> None:
    """All but 1.5 GiB of the GPU is taken; AdamW's state of this model needs more, whatever the micro-batch."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - (3 << 29)), dtype=torch.uint8, device="cuda")
    try:
        model = {"num_layers": 2, "hidden_size": 2560, "num_attention_heads": 20}
        attempt = start(tmp_path, model=model, training={"device": "cuda", "steps": 2})
        assert attempt.wait() == [1]
    finally:
        del held
        torch.cuda.empty_cache()
    error = attempt.error(0)
    assert error["type"] == "MemoryShortageError"
    assert error["lost_peer"] is False
