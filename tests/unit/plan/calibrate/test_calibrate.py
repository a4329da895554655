"""Calibration from the public rows: what it finds, and that its left-out errors are those in the manual."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

from bigsci_launch.errors import DataError
from bigsci_launch.plan.calibrate.calibrate import calibrate, find_drift, fit_calibration
from bigsci_launch.plan.calibrate.physics import find_excesses
from bigsci_launch.plan.calibrate.report import constant_cells, fit_lines
from bigsci_launch.plan.calibrate.rows import Measurement
from bigsci_launch.plan.calibrate.score import error_figures, rank_figures
from bigsci_launch.plan.price.calibration import (
    UNCALIBRATED_BAND,
    Calibration,
    ErrorSummary,
    dump_calibration,
    quantile,
    read_calibration,
)
from bigsci_launch.plan.price.constants import CONSTANTS, priors_for
from bigsci_launch.plan.price.hardware import A100, model_named
from bigsci_launch.plan.price.price import price_setup

pytestmark = pytest.mark.slow


def predictions(
    given: Sequence[Measurement], asked: Sequence[Measurement]
) -> list[tuple[Measurement, float, float, bool]]:
    """Return predicted seconds, memory and out-of-memory for `asked` after a fit to `given`."""
    calibration = fit_calibration(given, A100)
    prices = [price_setup(measurement.setup, calibration) for measurement in asked]
    return [
        (measurement, price.seconds, price.memory_gib, price.is_out_of_memory)
        for measurement, price in zip(asked, prices, strict=True)
    ]


@pytest.fixture(scope="module")
def by_section(chronicle: list[Measurement]) -> list[tuple[Measurement, float, float, bool]]:
    """Every row, predicted without its whole section."""
    found = []
    for section in sorted({measurement.section for measurement in chronicle}):
        given = [measurement for measurement in chronicle if measurement.section != section]
        found += predictions(given, [measurement for measurement in chronicle if measurement.section == section])
    return found


@pytest.mark.long
def test_time_of_sections_left_out(by_section: list[tuple[Measurement, float, float, bool]]) -> None:
    figures = error_figures((row.seconds, seconds) for row, seconds, _, _ in by_section if row.seconds)
    assert figures.mean is not None and figures.mean < 2.7
    assert figures.median is not None and figures.median < 1.8
    assert figures.p90 is not None and figures.p90 < 7


@pytest.mark.long
def test_order_inside_sections_left_out(by_section: list[tuple[Measurement, float, float, bool]]) -> None:
    sections: dict[str, list[tuple[float, float]]] = {}
    for row, seconds, _, _ in by_section:
        if row.seconds:
            sections.setdefault(row.section, []).append((row.seconds, seconds))
    figures = rank_figures(sections.values())
    assert figures.tau is not None and figures.tau >= 0.85
    assert figures.num_found == figures.num_sections
    assert figures.regret is not None and figures.regret < 0.2


@pytest.mark.long
def test_memory_of_sections_left_out(by_section: list[tuple[Measurement, float, float, bool]]) -> None:
    figures = error_figures((row.memory_gib, memory) for row, _, memory, _ in by_section if row.memory_gib)
    assert figures.mean is not None and figures.mean < 3.3
    assert figures.p90 is not None and figures.p90 < 7
    said = {row.name for row, _, _, is_out in by_section if is_out}
    assert said == {row.name for row, _, _, _ in by_section if row.ran_out_of_memory} == {"r640", "r730", "r731"}


@pytest.mark.slow
def test_half_of_another_cluster_predicts_its_other_half(vtrain: list[Measurement]) -> None:
    timed = [measurement for measurement in vtrain if measurement.seconds]
    means, taus = [], []
    for seed in range(4):
        order = random.Random(seed).sample(timed, len(timed))
        half = len(order) // 2
        for given, asked in ((order[:half], order[half:]), (order[half:], order[:half])):
            found = predictions(given, asked)
            sections: dict[str, list[tuple[float, float]]] = {}
            for row, seconds, _, _ in found:
                sections.setdefault(row.section, []).append((row.seconds or 0, seconds))
            means.append(error_figures(pair for pairs in sections.values() for pair in pairs).mean or 0)
            taus.append(rank_figures(sections.values()).tau or 0)
    assert sum(means) / len(means) < 5.5
    assert sum(taus) / len(taus) > 0.74


@pytest.mark.slow
def test_the_constants_are_physical(jean_zay: Calibration) -> None:
    constants = jean_zay.constants
    assert find_excesses(constants, jean_zay.gpu) == []
    assert 0.7 < constants.gemm_efficiency < 1
    assert 8 < constants.network_gb_per_s < 16  # of 50 nominal
    assert 15 < constants.misaligned_heads < 35
    assert 0.94 < constants.drift < 0.97
    for constant in CONSTANTS:
        low, high = jean_zay.interval(constant.name)
        assert low < getattr(constants, constant.name) < high


@pytest.mark.slow
def test_the_day_on_which_the_cluster_changed(chronicle: list[Measurement], vtrain: list[Measurement]) -> None:
    timed = [measurement for measurement in chronicle if measurement.seconds]
    assert find_drift(timed, A100) == date(2022, 2, 25)
    assert find_drift([measurement for measurement in vtrain if measurement.seconds], A100) is None


def test_no_drift_is_seen_where_there_is_none(chronicle: list[Measurement]) -> None:
    timed = [measurement for measurement in chronicle if measurement.seconds]
    before = [row for row in timed if row.setup.day and row.setup.day < date(2022, 2, 25)]
    assert find_drift(before, A100) is None


@pytest.mark.slow
def test_a_slower_cluster_is_seen_as_slower(chronicle: list[Measurement], jean_zay: Calibration) -> None:
    slow = [replace(row, seconds=2 * row.seconds if row.seconds else None) for row in chronicle]
    other = fit_calibration(slow, A100)
    for row in chronicle[:5]:
        ratio = price_setup(row.setup, other).seconds / price_setup(row.setup, jean_zay).seconds
        assert ratio == pytest.approx(2, rel=0.05)


def test_a_few_runs_are_better_than_none_and_say_so(chronicle: list[Measurement]) -> None:
    timed = [measurement for measurement in chronicle if measurement.seconds]
    few = calibrate(timed[::22], A100)
    assert few.is_measured
    assert 0.15 < price_setup(timed[1].setup, few).band <= UNCALIBRATED_BAND
    assert any("more would give" in line for line in fit_lines(few))


@pytest.mark.long
@pytest.mark.parametrize("stride", [4, 12])
def test_nine_of_ten_lie_inside_their_band(chronicle: list[Measurement], stride: int) -> None:
    sections = sorted({measurement.section for measurement in chronicle if measurement.seconds})
    inside = []
    for section in sections[::stride]:
        calibration = calibrate([row for row in chronicle if row.section != section], A100)
        for row in chronicle:
            if row.section == section and row.seconds:
                price = price_setup(row.setup, calibration)
                inside.append(abs(row.seconds / price.seconds - 1) <= price.band)
    assert sum(inside) / len(inside) > 0.85


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_nine_of_ten_of_another_cluster_lie_inside_their_band(vtrain: list[Measurement], seed: int) -> None:
    order = random.Random(seed).sample(vtrain, len(vtrain))
    half = len(order) // 2
    inside = []
    for given, asked in ((order[:half], order[half:]), (order[half:], order[:half])):
        calibration = calibrate(given, replace(A100, network_gb_per_s=100.0))
        prices = [(row.seconds or 0.0, price_setup(row.setup, calibration)) for row in asked]
        inside += [abs(seconds / price.seconds - 1) <= price.band for seconds, price in prices]
    assert 0.85 < sum(inside) / len(inside) < 0.97


def test_bands_widen_away_from_what_was_measured() -> None:
    errors = ErrorSummary(tuple((0.9, 0.01) for _ in range(20)) + tuple((0.3, 0.06) for _ in range(20)))
    assert errors.band(0.9) == pytest.approx(0.01)
    assert errors.band(0.3) == pytest.approx(0.06)
    assert errors.band(0.15) == pytest.approx((0.06 + UNCALIBRATED_BAND) / 2)
    assert errors.band(1e-6) == pytest.approx(UNCALIBRATED_BAND, rel=1e-4)
    assert errors.band(0.0) == UNCALIBRATED_BAND
    far = [errors.band(closeness / 100) for closeness in range(31)]
    assert far == sorted(far, reverse=True)
    assert max(one - other for one, other in pairwise(far)) < 0.02
    assert ErrorSummary().band(1.0) == UNCALIBRATED_BAND
    assert ErrorSummary(((1.0, 0.0), (1.0, 0.0))).band(1.0) == pytest.approx(0.75 * UNCALIBRATED_BAND)


def test_quantiles() -> None:
    assert quantile([1, 2, 3, 4, 5], 0.5) == 3
    assert quantile([5, 1], 0.9) == pytest.approx(4.6)


def test_a_calibration_survives_its_file(jean_zay: Calibration, tmp_path: Path, chronicle: list[Measurement]) -> None:
    path = tmp_path / "site.json"
    path.write_text(dump_calibration(jean_zay))
    again = read_calibration(path)
    assert again.drift_from == jean_zay.drift_from
    assert again.gpu == jean_zay.gpu
    assert (again.site, again.framework, again.attention) == ("jean-zay-a100-2022", "deepspeed", "unfused")
    for row in chronicle[::9]:
        one, other = price_setup(row.setup, jean_zay), price_setup(row.setup, again)
        assert other.seconds == pytest.approx(one.seconds, rel=1e-4)
        assert other.memory_gib == pytest.approx(one.memory_gib, rel=1e-4)
        assert other.band == pytest.approx(one.band, rel=1e-4)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "x"}', '{"kind": "bsl plan calibration", "schema_version": 9}']
)
def test_other_files_are_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"other\.json"):
        read_calibration(path)


def test_a_file_of_version_1_says_how_to_make_a_new_one(tmp_path: Path, jean_zay: Calibration) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"kind": "bsl plan calibration", "schema_version": 1, "sources": ["rows.csv"]}))
    with pytest.raises(DataError, match="of version 1") as found:
        read_calibration(path)
    assert f"`bsl plan calibrate rows.csv --site NAME -o {path}`" in (found.value.hint or "")


def test_a_calibration_is_for_one_gpu(jean_zay: Calibration) -> None:
    h100 = model_named("NVIDIA H100 80GB HBM3")
    assert h100
    with pytest.raises(DataError, match=r"A100-SXM4-80GB.* site new .*H100-SXM5-80GB") as found:
        jean_zay.at_site("new", h100)
    assert "--site new" in (found.value.hint or "")


def test_elsewhere_a_calibration_is_a_guess(jean_zay: Calibration, chronicle: list[Measurement]) -> None:
    setup = next(row.setup for row in chronicle if row.seconds)
    own = jean_zay.at_site("jean-zay-a100-2022", jean_zay.gpu)
    assert price_setup(setup, own).band == price_setup(setup, jean_zay).band < 0.1
    assert not list(own.differences(setup))
    others = {
        "measured on jean-zay-a100-2022, not on new": (jean_zay.at_site("new", jean_zay.gpu), setup),
        "the calibration names no site; this run is on new": (
            replace(jean_zay, site=None).at_site("new", jean_zay.gpu),
            setup,
        ),
        "measured with deepspeed, not with megatron": (own, replace(setup, framework="megatron")),
    }
    for said, (calibration, asked) in others.items():
        price = price_setup(asked, calibration)
        assert (price.band, price.closeness) == (UNCALIBRATED_BAND, 0.0), said
        assert list(calibration.differences(asked)) == [said]
    assert price_setup(replace(setup, framework="bsl"), own).band < 0.1
    fused = replace(setup, technique=replace(setup.technique, attention="fused"))
    assert (list(own.differences(fused)), set(own.guessed_terms(fused))) == ([], {"attention", "memory traffic"})
    assert not own.guessed_terms(setup)


def test_the_network_is_that_of_the_present_site(jean_zay: Calibration) -> None:
    same, upgraded = (
        jean_zay.at_site("jean-zay-a100-2022", replace(jean_zay.gpu, network_gb_per_s=rate)) for rate in (50.0, 100.0)
    )
    assert same.constants == jean_zay.constants
    there = priors_for(upgraded.gpu)
    assert jean_zay.constants.network_gb_per_s < 16 < there.network_gb_per_s
    for other in (upgraded, jean_zay.at_site("new", upgraded.gpu)):
        assert other.gpu.network_gb_per_s == 100
        assert other.constants == replace(
            jean_zay.constants, network_gb_per_s=there.network_gb_per_s, message_us=there.message_us
        )
    unsaid = replace(jean_zay.gpu, network_gb_per_s=200.0, assumed=("network_gb_per_s",))
    assert jean_zay.at_site("jean-zay-a100-2022", unsaid).gpu == jean_zay.gpu
    assert jean_zay.at_site("new", unsaid).gpu.assumed == ("network_gb_per_s",)


def test_rows_of_several_frameworks_have_none(chronicle: list[Measurement]) -> None:
    timed = [row for row in chronicle if row.seconds][:6]
    other = replace(timed[0], setup=replace(timed[0].setup, framework="megatron"))
    assert fit_calibration([*timed, other], A100).framework is None
    assert fit_calibration(timed, A100).framework == "deepspeed"


def test_the_shipped_calibration_is_the_one_that_its_command_makes(root: Path, jean_zay: Calibration) -> None:
    shipped = read_calibration(root / "slurm/calibrations/jean-zay-a100.json")
    assert "benchmarks/rows/chronicle.csv" in shipped.command
    for constant in CONSTANTS:
        value = getattr(jean_zay.constants, constant.name)
        assert getattr(shipped.constants, constant.name) == pytest.approx(value, rel=1e-3), constant.name
    assert shipped.drift_from == jean_zay.drift_from


@pytest.mark.slow
def test_the_report_names_every_constant_and_what_is_missing(jean_zay: Calibration, vtrain: list[Measurement]) -> None:
    assert [cells[0] for cells in constant_cells(jean_zay)] == [constant.name for constant in CONSTANTS]
    assert "2022-02-25" in "\n".join(fit_lines(jean_zay))
    other = "\n".join(fit_lines(calibrate(vtrain[::4], A100)))
    assert "drift: none" in other
    assert "base_gib is hardly measured" in other


def test_no_fit_of_memory_goes_beyond_what_is_possible(chronicle: list[Measurement]) -> None:
    """Runs that needed a third less than is counted cannot have kept less than their activations."""
    less = [replace(row, memory_gib=row.memory_gib / 1.5 if row.memory_gib else None) for row in chronicle]
    fitted = fit_calibration(less, A100).constants
    for constant in CONSTANTS:
        assert constant.least <= getattr(fitted, constant.name) <= constant.most
    assert fitted.activation_factor == pytest.approx(1)
