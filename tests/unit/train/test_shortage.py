"""Which errors say that a device's memory is short, and how long a trial of a size takes on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

from deepspeed.runtime.pipe import schedule

from bigsci_launch.train.microbatch import probe
from bigsci_launch.train.microbatch.agreement import Agreement, says_shortage
from bigsci_launch.train.microbatch.probe import Prober
from bigsci_launch.train.microbatch.traffic import Instruction, Traffic, end_traffic

pytestmark = pytest.mark.torch

SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
OTHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    dist.DistBackendError("NCCL error: unhandled cuda error, Cuda failure 2 'CUDA error: out of memory'"),
]
FORWARD = Instruction("ForwardPass", True, False)


@pytest.fixture
def traffic() -> Any:
    found = Traffic()
    with found.inside(FORWARD):
        pass
    yield found
    end_traffic()


def engine_that_fails(error: RuntimeError) -> Any:
    def fail(engine: Any) -> None:
        raise error

    return SimpleNamespace(
        device="cpu",
        module=SimpleNamespace(training=True),
        pipe_buffers={},
        _INSTRUCTION_MAP={schedule.ForwardPass: fail},
        _exec_schedule=None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", SHORT, ids=str)
def test_a_shortage_is_known_whoever_asked_for_the_memory(error: RuntimeError, traffic: Traffic) -> None:
    assert says_shortage(error)
    engine = engine_that_fails(error)
    agreement = Agreement(engine, 0, traffic, lambda: False)
    engine._INSTRUCTION_MAP[schedule.ForwardPass](engine)
    assert agreement._shortage is not None
    assert agreement._shortage.place == "ForwardPass"


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_another_error_ends_the_step(error: RuntimeError, traffic: Traffic) -> None:
    assert not says_shortage(error)
    engine = engine_that_fails(error)
    Agreement(engine, 0, traffic, lambda: False)
    with pytest.raises(type(error)):
        engine._INSTRUCTION_MAP[schedule.ForwardPass](engine)


@pytest.mark.parametrize("error", [*SHORT, *OTHER], ids=str)
def test_a_size_that_meets_a_shortage_does_not_fit(
    error: RuntimeError, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(size: int) -> float:
        raise error

    monkeypatch.setattr(probe, "discard", lambda engine: None)
    monkeypatch.setattr(Prober, "prepare", lambda prober, size: None)
    prober = Prober(engine_that_fails(error), None, traffic, None, 1, None)  # type: ignore[arg-type]
    if says_shortage(error):
        assert not prober._try(4, work).fits
    else:
        with pytest.raises(type(error)):
            prober._try(4, work)


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_trial_waits_for_the_device_before_it_reads_the_clock(is_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[bool]()
    monkeypatch.setattr(probe, "computes_on_gpu", lambda: is_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    assert probe._now() <= probe.time.monotonic()
    assert bool(waited) is is_gpu
