"""The accelerators that we know, from `slurm/hardware/gpus.yaml`: what vendors say about each, with the source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from bigsci_launch.content import packaged

_VENDORS = ("nvidia-", "amd-instinct-", "amd-")
_GB, _GIB = 1e9, 1 << 30


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """One entry of the table; the file explains the figures. None is not known, or there is none."""

    name: str
    source: str
    peak_tflops: float
    memory_gib: float
    hbm_tb_per_s: float
    multiprocessors: int
    fp8_tflops: float | None
    nvlink_gb_per_s: float | None
    nvlink_domain: int | None
    pcie_gb_per_s: float | None
    adapter_gb_per_s: float | None

    def node_gb_per_s(self, ranks_per_node: int) -> float | None:
        """Return what one GPU can send to the others of a node: over PCIe where NVLink does not connect them all."""
        if self.pcie_gb_per_s and (self.nvlink_domain or 1) < ranks_per_node:
            return self.pcie_gb_per_s
        return self.nvlink_gb_per_s or self.pcie_gb_per_s


def gpu_named(name: str) -> KnownGpu | None:
    """Return the accelerator with that name or alias, also as CUDA or HIP spell it; None if it is not in the table."""
    return known_gpus().get(_plain(name))


@cache
def known_gpus() -> dict[str, KnownGpu]:
    """Return all accelerators by each of their names, in lower case with hyphens."""
    # libyaml is ten times as fast, where PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = yaml.load(packaged("slurm", "hardware", "gpus.yaml").read_text(encoding="utf-8"), Loader=loader)
    found: dict[str, KnownGpu] = {}
    for name, figures in table.items():
        gpu = _entry(name, figures)
        found |= {_plain(each): gpu for each in (name, *figures.get("aliases", ()))}
    return found


def _plain(name: str) -> str:
    text = re.sub(r"[\s_]+", "-", name.strip().lower())
    for vendor in _VENDORS:
        text = text.removeprefix(vendor)
    return text


def _entry(name: str, figures: dict[str, Any]) -> KnownGpu:
    return KnownGpu(
        name=name,
        source=figures["source"],
        peak_tflops=float(figures["peak_tflops"]),
        memory_gib=figures.get("memory_gib") or round(figures["memory_gb"] * _GB / _GIB, 1),
        hbm_tb_per_s=float(figures["hbm_tb_per_s"]),
        multiprocessors=figures["multiprocessors"],
        fp8_tflops=figures.get("fp8_tflops"),
        nvlink_gb_per_s=figures.get("nvlink_gb_per_s"),
        nvlink_domain=figures.get("nvlink_domain"),
        pcie_gb_per_s=figures.get("pcie_gb_per_s"),
        adapter_gb_per_s=figures.get("adapter_gb_per_s"),
    )
