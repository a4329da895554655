"""What the planner knows about an accelerator and about the network of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.gpus import KnownGpu, gpu_named

NETWORK = "network_gb_per_s"

_KEYS = {
    "peak_tflops": "gpu.peak_tflops",
    "memory_gib": "gpu.memory_gib",
    "hbm_tb_per_s": "gpu.hbm_tb_per_s",
    "num_multiprocessors": "gpu.multiprocessors",
    "nvlink_gb_per_s": "gpu.nvlink_gb_per_s",
    NETWORK: NETWORK,
}
"""The figures of a `GpuModel` that every price needs, and the key of the site file that gives each."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """An accelerator as one rank sees it. Rates are nominal.

    `peak_tflops` is that of dense bf16, `fp8_tflops` that of dense fp8 (None: it has none, or it is not known).
    `nvlink_gb_per_s` is what one GPU can send to the others of its node, `network_gb_per_s` what all adapters of a node
    can send together (None: not known). `assumed` names the figures that were not given.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    fp8_tflops: float | None = None
    hbm_tb_per_s: float = 2.039
    num_multiprocessors: int = 108
    nvlink_gb_per_s: float = 300.0
    network_gb_per_s: float | None = None
    assumed: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Return the beginning of the name, such as `H100` of `H100-SXM5-80GB`."""
        words = self.name.upper().split("-")[0].split()
        return words[-1] if words else ""


A100 = GpuModel("A100-SXM4-80GB", 79.15, 312.0)


def model_named(name: str, ranks_per_node: int = 8, written: Mapping[str, float] | None = None) -> GpuModel | None:
    """Return the accelerator with that name in nodes of so many, with the `written` figures in place of known ones.

    None if `slurm/hardware/gpus.yaml` lacks it, and `written` lacks figures of it.
    """
    known, figures = gpu_named(name), written or {}
    if known is None and any(key not in figures for key in _KEYS if key != NETWORK):
        return None
    return _model(name, known, figures, ranks_per_node)


def gpu_of_site(config: SiteConfig) -> GpuModel | None:
    """Return the accelerator and the network of a site; None if it has no accelerator.

    What the site file says counts, then the table. Where neither says what the network can do, `assumed` names it.

    Raises:
        ConfigError: the accelerator is in no table, and the site file lacks figures of it.
    """
    if config.gpu is None:
        return None
    known, figures = gpu_named(config.gpu.name), _site_figures(config)
    missing = [key for name, key in _KEYS.items() if name not in figures and name != NETWORK]
    if known is None and missing:
        raise ConfigError(
            f"gpu.name: {config.gpu.name} is not in slurm/hardware/gpus.yaml, and the site lacks {', '.join(missing)}",
            hint="write these figures into the site file, or the name of a known GPU; without them nothing is priced",
        )
    model = _model(config.gpu.name, known, figures, config.ranks_per_node)
    network = model.network_gb_per_s
    return replace(model, network_gb_per_s=network / config.network_taper) if network else model


def is_same_gpu(one: str, other: str) -> bool:
    """Return whether two names mean the same accelerator."""
    known = gpu_named(one)
    return known == gpu_named(other) if known else one.strip().lower() == other.strip().lower()


def assumed_line(gpu: GpuModel) -> str | None:
    """Return a line with the figures that were not given and the keys that give them, or None if there are none."""
    if not gpu.assumed:
        return None
    figures = (f"{_KEYS[name]} {getattr(gpu, name):g}" for name in gpu.assumed if getattr(gpu, name) is not None)
    unsaid = (_KEYS[name] for name in gpu.assumed if getattr(gpu, name) is None)
    return f"assumed, not in the site file: {', '.join((*figures, *unsaid))}"


_ATTRIBUTES = {
    "peak_tflops": "peak_tflops",
    "memory_gib": "memory_gib",
    "fp8_tflops": "fp8_tflops",
    "hbm_tb_per_s": "hbm_tb_per_s",
    "num_multiprocessors": "multiprocessors",
}
"""Figures of a `GpuModel`, and their names in the table of GPUs and in a site file."""


def _given(source: object, **others: float | None) -> dict[str, Any]:
    """Return the figures that `source` has, and those of `others` that are known."""
    figures = {**{name: getattr(source, attribute) for name, attribute in _ATTRIBUTES.items()}, **others}
    return {name: value for name, value in figures.items() if value is not None}


def _site_figures(config: SiteConfig) -> dict[str, Any]:
    gpu = config.gpu
    if gpu is None:
        return {}
    return _given(gpu, nvlink_gb_per_s=gpu.nvlink_gb_per_s, network_gb_per_s=config.network_gb_per_s)


def _model(name: str, known: KnownGpu | None, written: Mapping[str, Any], ranks_per_node: int) -> GpuModel:
    """Return the accelerator with the written figures, else the known ones.

    Its network, if not given, is that of the vendor's system, if there is one.
    """
    listed = _given(known, nvlink_gb_per_s=known.node_gb_per_s(ranks_per_node)) if known else {}
    figures = {**listed, **written}
    assumed = tuple(key for key in _KEYS if key not in figures)
    if NETWORK in assumed and known and known.adapter_gb_per_s:
        figures[NETWORK] = known.adapter_gb_per_s * ranks_per_node
    return replace(A100, name=known.name if known else name, assumed=assumed, **figures)
