"""Measured rows, a calibration and BLOOM's setup, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.load import resolve_run
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.plan.calibrate.calibrate import calibrate
from bigsci_launch.plan.calibrate.place import place_named
from bigsci_launch.plan.calibrate.rows import MeasuredRow, Measurement, measurements_of, read_rows
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.shape.parameters import ModelShape
from bigsci_launch.plan.shape.setup import UNFUSED_2021, Setup
from bigsci_launch.topology import Topology

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def chronicle_rows() -> list[MeasuredRow]:
    return read_rows(ROOT / "benchmarks/rows/chronicle.csv")[1]


@pytest.fixture(scope="session")
def chronicle(chronicle_rows: list[MeasuredRow]) -> list[Measurement]:
    return measurements_of(chronicle_rows)[0]


@pytest.fixture(scope="session")
def vtrain() -> list[Measurement]:
    return measurements_of(read_rows(ROOT / "benchmarks/rows/vtrain.csv")[1])[0]


@pytest.fixture(scope="session")
def jean_zay(chronicle: list[Measurement]) -> Calibration:
    place = place_named("jean-zay-a100-2022")
    return calibrate(chronicle, place.gpu, site=place.site)


@pytest.fixture(scope="session")
def bloom() -> Setup:
    return Setup(
        shape=ModelShape(70, 14336, 112, 4 * 14336, 2048, 250680),
        topology=Topology(tp=4, pp=12, dp=8),
        micro_batch_size=2,
        global_batch_size=2048,
        ranks_per_node=8,
        partition_method="type:transformer|embedding",
        technique=UNFUSED_2021,
    )


@pytest.fixture(scope="session")
def bloom_run() -> tuple[RunConfig, Site]:
    config, site, _ = resolve_run(ROOT / "configs/bloom-176b-2022.yaml")
    return config, site


def changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    """Return `config` with values of a section replaced."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
