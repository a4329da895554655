"""Where rows were measured: the site and the GPU of a new calibration, and whether a row is from the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.config.site import load_site
from bigsci_launch.errors import ConfigError, DataError
from bigsci_launch.gpus import gpu_named
from bigsci_launch.plan.calibrate.cells import Cells
from bigsci_launch.plan.calibrate.rows import Measurement
from bigsci_launch.plan.price.calibration import Calibration, calibration_of, expected_on, read_calibration
from bigsci_launch.plan.price.hardware import A100, NETWORK, GpuModel, gpu_of_site, is_same_gpu, model_named


@dataclass(frozen=True, slots=True)
class MeasuredPlace:
    """The site and the GPU of measured rows. `site` is None if it was not given. `remarks` are what was assumed."""

    site: str | None
    gpu: GpuModel
    remarks: tuple[str, ...] = ()


def place_named(name: str) -> MeasuredPlace:
    """Return the site with that name, or in that file.

    Raises:
        ConfigError: there is no such site, or it has no GPU.
    """
    site = load_site(name)
    gpu = gpu_of_site(site.config)
    if gpu is None:
        raise ConfigError(f"site {name} has no GPU to calibrate", hint="name the site on which the runs were measured")
    return MeasuredPlace(site.name, gpu)


def calibration_named(path: Path | None, site: str | None) -> Calibration | None:
    """Return the calibration in the file at `path`, as it holds at `site`, else the site's own; None without both.

    Raises:
        ConfigError: there is no such site, or it has no GPU.
        DataError: the file is not a calibration, or it is for another GPU.
    """
    if site is None:
        return read_calibration(path) if path else None
    place_named(site)
    return calibration_of(load_site(site), path)


def place_of(measurements: Sequence[Measurement], site: str | None) -> MeasuredPlace:
    """Return where the rows were measured: on `site` if it is given, else where they say.

    Raises:
        ConfigError: there is no such site, or it has no GPU.
        DataError: the rows are of several places, or of another GPU than the site's, or of one that is not known.
    """
    gpus = (gpu_named(measurement.gpu) or measurement.gpu for measurement in measurements if measurement.gpu)
    name = _only("GPUs", {gpu if isinstance(gpu, str) else gpu.name for gpu in gpus})
    said = _only("sites", {measurement.site for measurement in measurements if measurement.site})
    if site is not None:
        place = place_named(site)
        if name and not is_same_gpu(name, place.gpu.name):
            raise DataError(
                f"the rows are of {name}, but site {place.site} has {place.gpu.name}", hint="name the site of the rows"
            )
        if said and said != place.site:
            raise DataError(f"the rows are from site {said}, not from {place.site}", hint=f"--site {said}")
        return place
    ranks = max((measurement.setup.ranks_per_node for measurement in measurements), default=8)
    gpu = model_named(name, ranks) if name else A100
    if gpu is None:
        raise DataError(f"unknown GPU {name}", hint="--site NAME, of a site file that has its figures")
    remark = f"GPU of the measured runs unknown: {A100.name} is assumed; set it with --site NAME"
    return MeasuredPlace(said or None, _with_network(gpu, measurements), () if name else (remark,))


def _only(what: str, names: set[str]) -> str:
    if len(names) > 1:
        raise DataError(
            f"the rows are of several {what}: {', '.join(sorted(names))}", hint="calibrate each of them alone"
        )
    return next(iter(names), "")


def _with_network(gpu: GpuModel, measurements: Sequence[Measurement]) -> GpuModel:
    """Return the GPU with the network that the rows name, if they agree."""
    rates = {measurement.network_gb_per_s for measurement in measurements if measurement.network_gb_per_s}
    if len(rates) != 1:
        return gpu
    return replace(gpu, network_gb_per_s=rates.pop(), assumed=tuple(name for name in gpu.assumed if name != NETWORK))


_FIGURES = {
    "peak_tflops": "peak_tflops",
    "fp8_tflops": "fp8_tflops",
    "gpu_memory_gib": "memory_gib",
    "hbm_tb_per_s": "hbm_tb_per_s",
    "multiprocessors": "num_multiprocessors",
    "nvlink_gb_per_s": "nvlink_gb_per_s",
    NETWORK: NETWORK,
}
"""Columns with figures of a row's GPU, and their names in a `GpuModel`."""


def expected_at(row: Cells, ranks_per_node: int) -> Calibration | str:
    """Return what is expected where a row was measured, or why nothing is."""
    name = row.text("gpu")
    if not name:
        return "gpu is empty: without a calibration, the row has to name it"
    numbers = {figure: row.number(column) for column, figure in _FIGURES.items()}
    written = {figure: number for figure, number in numbers.items() if number is not None and number > 0}
    if "num_multiprocessors" in written:
        written["num_multiprocessors"] = round(written["num_multiprocessors"])
    gpu = model_named(name, ranks_per_node, written)
    if gpu is None:
        needed = ", ".join(column for column in _FIGURES if column not in ("fp8_tflops", NETWORK))
        return f"gpu {name} is in no table; give its figures in the columns {needed}"
    return expected_on(gpu)


def calibration_at(calibration: Calibration, row: Cells) -> Calibration | str:
    """Return the calibration as it holds for a row of a table, or why it does not."""
    gpu, site = row.text("gpu"), row.text("site")
    if gpu and not is_same_gpu(gpu, calibration.gpu.name):
        return f"measured on {gpu}, but the calibration is for {calibration.gpu.name}"
    return replace(calibration, asked_site=site) if site else calibration
