"""Accelerators: the table, what a site says, and unknown ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from bigsci_launch.config.schema.site import Gpu, SiteConfig
from bigsci_launch.config.site import load_site, site_layer
from bigsci_launch.errors import ConfigError
from bigsci_launch.gpus import gpu_named, known_gpus
from bigsci_launch.plan.price.hardware import assumed_line, gpu_of_site, model_named
from tests.support.texts import has_parts


def site(ranks_per_node: int = 8, network: float | None = None, **gpu: str | float) -> SiteConfig:
    return SiteConfig(
        description="a site",
        scheduler="slurm",
        ranks_per_node=ranks_per_node,
        network_gb_per_s=network,
        gpu=Gpu.model_validate(gpu),
    )


def test_every_entry_is_whole_and_has_a_dated_source(root: Path) -> None:
    table = yaml.safe_load((root / "slurm/hardware/gpus.yaml").read_text())
    names = [name for title, figures in table.items() for name in (title, *figures["aliases"])]
    assert len(known_gpus()) == len(names), "a name stands for two accelerators"
    for title, figures in table.items():
        known = gpu_named(title)
        assert known and known.name == title
        assert re.search(r"\b20[12]\d\b", known.source), title
        assert 0.85 < known.memory_gib / figures["memory_gb"] <= 1.0, title
        # Datasheets print twice the dense rates, and both directions of a link.
        assert known.fp8_tflops is None or known.fp8_tflops / known.peak_tflops == pytest.approx(2, rel=0.02), title
        assert known.nvlink_gb_per_s is None or 150 <= known.nvlink_gb_per_s <= 900, title
        assert known.nvlink_gb_per_s or known.pcie_gb_per_s, title
        # The H20 has few multiprocessors to its memory.
        assert (30 if title.startswith("H20-") else 100) < known.peak_tflops / known.hbm_tb_per_s < 450, title


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("nvidia a100 80gb pcie", "A100-PCIE-80GB"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_of_cuda_and_hip_are_understood(name: str, meant: str) -> None:
    known = gpu_named(name)
    assert known and known.name == meant


@pytest.mark.parametrize("name", ["A100", "H100", "A100-SXM4-64GB", "H100-64GB", ""])
def test_a_name_that_could_mean_several_means_none(name: str) -> None:
    assert gpu_named(name) is None
    assert model_named(name) is None


def test_a_site_needs_only_a_name_that_is_known() -> None:
    found = gpu_of_site(site(network=400.0, name="H100-SXM5-80GB"))
    assert found
    assert (found.peak_tflops, found.num_multiprocessors, found.hbm_tb_per_s) == (989.4, 132, 3.35)
    assert (found.nvlink_gb_per_s, found.network_gb_per_s, found.assumed) == (450, 400, ())
    assert assumed_line(found) is None


def test_what_the_site_says_wins() -> None:
    found = gpu_of_site(site(name="H100-SXM5-80GB", peak_tflops=800.0, memory_gib=70.0, nvlink_gb_per_s=200.0))
    assert found and (found.peak_tflops, found.memory_gib, found.nvlink_gb_per_s) == (800, 70, 200)


def test_nvlink_between_two_cards_does_not_connect_a_node() -> None:
    pair, node = gpu_of_site(site(2, name="A100-PCIE-80GB")), gpu_of_site(site(8, name="A100-PCIE-80GB"))
    assert pair and node and (pair.nvlink_gb_per_s, node.nvlink_gb_per_s) == (300, 32)


def test_an_unknown_accelerator_is_refused_unless_the_site_has_its_figures() -> None:
    figures = {"memory_gib": 64.0, "hbm_tb_per_s": 3.0, "multiprocessors": 100, "nvlink_gb_per_s": 200.0}
    with pytest.raises(ConfigError) as caught:
        gpu_of_site(site(name="Z9000", peak_tflops=500.0, memory_gib=64.0))
    assert has_parts(str(caught.value), "Z9000", "gpu.hbm_tb_per_s", "gpu.multiprocessors", "gpu.nvlink_gb_per_s")
    assert "gpu.memory_gib" not in str(caught.value)
    found = gpu_of_site(site(name="Z9000", peak_tflops=500.0, **figures))
    assert found and (found.peak_tflops, found.memory_gib, found.assumed) == (500, 64, ("network_gb_per_s",))
    assert "network_gb_per_s" in (assumed_line(found) or "")


def test_utilisation_is_measured_against_the_known_peak() -> None:
    for name, peak in (("jean-zay-a100-2022", 312), ("superpod-pyxis", 989)):
        loaded = load_site(name)
        monitor = site_layer(loaded).plain()["monitor"]
        assert monitor["peak_tflops_per_rank"] == peak
    without = load_site("superpod-pyxis")
    gpu = without.config.model_copy(update={"gpu": Gpu(name="H100-SXM5-80GB")})
    layer = site_layer(type(without)(without.name, without.path, gpu)).plain()
    assert layer["monitor"]["peak_tflops_per_rank"] == 989.4
