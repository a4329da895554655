"""Chooses the device of a rank. Pure: what torch and the environment say goes in, a device or a refusal comes out.

A launcher binds GPUs in one of two ways. Either every rank of a node sees all GPUs and takes that of its local rank, or
every rank sees its own GPU alone, which is then number 0 (`--gpus-per-task`, `--gpu-bind=single:1`). A rank that sees
one GPU cannot tell whether its neighbours see the same one: `meeting` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Wanted = Literal["auto", "cuda", "cpu"]

_PROMISES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Variables of a Slurm step that has GPUs: lists of their numbers. A mere count proves no device, because Slurm can
also count GPUs without one."""

_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on, and how it talks to others.

    `index` is the GPU's number among those that the rank sees, or None on a CPU. `why` says why it is a CPU, and
    `refusal` why the rank cannot train on it; both are None if there is nothing to say.
    """

    kind: Literal["cuda", "cpu"]
    index: int | None
    backend: Literal["nccl", "gloo"]
    why: str | None = None
    refusal: str | None = None


def choose_device(
    wanted: Wanted, *, shares: bool, num_visible: int, local_rank: int, environ: Mapping[str, str]
) -> Device:
    """Return the device of the rank with this local rank, which sees `num_visible` GPUs.

    Args:
        wanted: `training.device`.
        shares: `training.share_devices`; ranks on one GPU talk over gloo, because NCCL refuses them.
        environ: the rank's environment.
    """
    if wanted == "cpu":
        return Device("cpu", None, "gloo", why="training.device is cpu")
    if num_visible == 0:
        return _without_gpu(wanted, environ)
    backend: Literal["nccl", "gloo"] = "gloo" if shares else "nccl"
    if num_visible == 1:
        return Device("cuda", 0, backend)
    if local_rank < num_visible:
        return Device("cuda", local_rank, backend)
    if shares:
        return Device("cuda", local_rank % num_visible, backend)
    text = f"it is local rank {local_rank}, and sees {num_visible} GPUs: there are more ranks than GPUs"
    return Device("cuda", None, backend, refusal=text)


def _without_gpu(wanted: Wanted, environ: Mapping[str, str]) -> Device:
    why = _why_none(environ)
    if wanted == "cuda":
        return Device("cpu", None, "gloo", why=why, refusal=f"training.device is cuda, but {why}")
    promised = next((name for name in _PROMISES if environ.get(name)), None)
    if promised is None:
        return Device("cpu", None, "gloo", why=why)
    return Device("cpu", None, "gloo", why=why, refusal=f"Slurm gave {promised}={environ[promised]}, but {why}")


def _why_none(environ: Mapping[str, str]) -> str:
    """Return why no GPU is visible, as far as the environment says."""
    hidden = next((name for name in _MASKS if environ.get(name, "0") in ("", "-1", "NoDevFiles")), None)
    said = f" ({hidden} is {environ[hidden]!r})" if hidden is not None else ""
    return f"torch sees no GPU{said}"
