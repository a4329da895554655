"""Constants that no hardware reaches: refused if they are efficiencies, marked if they are rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.errors import DataError
from bigsci_launch.plan.calibrate.physics import find_excesses, require_possible
from bigsci_launch.plan.calibrate.report import constant_cells, fit_lines
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.constants import CONSTANTS, PRIOR
from bigsci_launch.plan.price.hardware import A100

NETWORKED = replace(A100, network_gb_per_s=50.0)


@pytest.mark.parametrize("name", [constant.name for constant in CONSTANTS if constant.unit == "of peak"])
def test_no_efficiency_is_above_one(name: str) -> None:
    require_possible(replace(PRIOR, **{name: 1.0}), A100)
    with pytest.raises(DataError, match=f"{name} is 2.27 of the GPU's peak") as found:
        require_possible(replace(PRIOR, **{name: 2.27}), A100)
    assert "another model" in (found.value.hint or "")


@pytest.mark.parametrize(
    ("name", "nominal"), [("hbm_tb_per_s", 2.039), ("nvlink_gb_per_s", 300), ("network_gb_per_s", 50)]
)
def test_a_rate_above_the_nominal_one_is_marked(name: str, nominal: float) -> None:
    assert not find_excesses(replace(PRIOR, **{name: nominal}), NETWORKED)
    beyond = replace(PRIOR, **{name: 5.7 * nominal})
    require_possible(beyond, NETWORKED)
    calibration = Calibration(gpu=NETWORKED, constants=beyond)
    marked = {cells[0]: cells[1] for cells in constant_cells(calibration) if cells[1].endswith("!")}
    assert list(marked) == [name]
    said = f"! {name} is {5.7 * nominal:.3g}"
    assert [
        line for line in fit_lines(calibration) if line.startswith(said) and f"above the nominal {nominal:g}" in line
    ]


def test_a_figure_that_nobody_gave_is_no_limit() -> None:
    beyond = replace(PRIOR, network_gb_per_s=1e4, hbm_tb_per_s=1e4)
    assert [excess.name for excess in find_excesses(beyond, A100)] == ["hbm_tb_per_s"]
    assert not find_excesses(beyond, replace(NETWORKED, assumed=("hbm_tb_per_s", "network_gb_per_s")))
