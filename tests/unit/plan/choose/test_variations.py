"""What another technique would gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bigsci_launch.config.load import resolve_run
from bigsci_launch.plan.choose.answer import find_plans, request_plans
from bigsci_launch.plan.choose.variations import WORTHWHILE, best_variation
from bigsci_launch.plan.price.calibration import calibration_of


def test_the_keys_of_a_faster_technique_are_named_and_their_plan_fits(root: Path) -> None:
    run, site, _ = resolve_run(root / "configs/bloom-176b.yaml", ())
    request = request_plans(run, site, calibration_of(site))
    answer = find_plans(request, free=None)
    assert answer.result is not None
    found, best = answer.variation, answer.result.plans[0]
    assert found is not None
    assert found.keys == ("training.activation_checkpointing=false",)
    assert found.plan.price.is_safe
    assert found.plan.likely_days < best.likely_days * (1 - WORTHWHILE)


def test_nothing_is_named_that_gains_nothing_or_does_not_fit(root: Path) -> None:
    run, site, _ = resolve_run(root / "configs/bloom-176b.yaml", ())
    request = request_plans(run, site, calibration_of(site))
    best = find_plans(request, free="heads").result
    assert best is not None
    slower = replace(best.plans[0], run_seconds=2 * best.plans[0].run_seconds)
    assert best_variation(request.configured, best.plans[0], lambda _: slower) is None
    assert best_variation(request.configured, best.plans[0], lambda _: None) is None
