"""AdamW's update as the guards recompute it, against torch's own; and what a judge says of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from bigsci_launch.config.schema.run import OptimizerSection  # noqa: E402
from bigsci_launch.train.guards.engine.adam import (  # noqa: E402
    Before,
    expected_update,
    find_wrong_settings,
    tolerances,
)
from bigsci_launch.train.guards.engine.judge import checked_text  # noqa: E402
from bigsci_launch.train.guards.engine.padding import Range, find_used_padding  # noqa: E402
from bigsci_launch.train.guards.flat import Flat  # noqa: E402
from tests.support.texts import CheckText  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)


def one_step(num_before: int, scale: float, **changes: Any) -> float:
    """Return how many times its tolerance torch's AdamW is from the recomputed update, at the worst element."""
    torch.manual_seed(num_before)
    weight = torch.nn.Parameter(torch.randn(4000) * 0.02)
    settings = {"lr": 1e-3, "betas": CONFIG.betas, "eps": CONFIG.epsilon, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([weight], **{**settings, **changes})
    for _ in range(num_before):
        weight.grad = torch.randn(4000) * scale
        optimizer.step()
    weight.grad = torch.randn(4000) * scale
    state = optimizer.state[weight]
    zero = torch.zeros(4000, dtype=torch.float64)
    before = Before(
        at=torch.arange(4000),
        weight=weight.detach().double(),
        first=state["exp_avg"].double() if state else zero,
        second=state["exp_avg_sq"].double() if state else zero,
        gradient=weight.grad.double(),
        count=num_before + 1,
    )
    optimizer.step()
    expected = expected_update(before, CONFIG, 1e-3, 0.1)
    found = (weight.detach(), state["exp_avg"], state["exp_avg_sq"])
    apart = [
        float(((real.double() - due).abs() / limit).max())
        for real, due, limit in zip(found, expected, tolerances(before, expected, CONFIG, 1e-3), strict=True)
    ]
    return max(apart)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("num_before", [0, 1, 30, 200])
def test_torch_does_what_is_expected_of_it(num_before: int, scale: float) -> None:
    assert one_step(num_before, scale) < 1


@pytest.mark.parametrize("changes", [{"lr": 3e-3}, {"lr": 1.01e-3}, {"betas": (0.9, 0.9)}, {"weight_decay": 0.5}])
@pytest.mark.parametrize("num_before", [0, 30])
def test_another_update_is_not_expected(num_before: int, changes: dict[str, Any]) -> None:
    assert one_step(num_before, 1e-3, **changes) > 1


def test_a_gradient_that_cancels_the_moment_of_a_tiny_weight_is_no_finding() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4000) * 1e-12)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=CONFIG.betas, eps=CONFIG.epsilon, weight_decay=0.1)
    weight.grad = torch.randn(4000)
    optimizer.step()
    state = optimizer.state[weight]
    weight.data.mul_(1e-12)
    one = CONFIG.betas[0]
    weight.grad = -state["exp_avg"] * one / (1 - one)
    before = Before(
        at=torch.arange(4000),
        weight=weight.detach().double(),
        first=state["exp_avg"].double(),
        second=state["exp_avg_sq"].double(),
        gradient=weight.grad.double(),
        count=2,
    )
    optimizer.step()
    expected = expected_update(before, CONFIG, 1e-3, 0.1)
    limit = tolerances(before, expected, CONFIG, 1e-3)[0]
    assert float(((weight.detach().double() - expected[0]).abs() / limit).max()) < 1


def test_padding_is_zero() -> None:
    rows = torch.zeros(10)
    where, moment = [Range("embedding", 6, 10)], Flat("first moment of {}", rows, {"embedding": (0, 10)})
    assert list(find_used_padding(where, [moment], 0)) == []
    rows[5] = 1
    assert list(find_used_padding(where, [moment], 0)) == []
    rows[6] = 1e-30
    (found,) = find_used_padding(where, [moment], 3)
    assert (found.check, found.tensor, found.ranks) == ("padding", "first moment of embedding", (3,))


def test_groups_are_updated_with_the_settings_of_the_run_file() -> None:
    good = {"lr": 1e-3, "betas": tuple(CONFIG.betas), "eps": CONFIG.epsilon}
    decay, rest = {"name": "decay", "weight_decay": 0.1, **good}, {"name": "no_decay", "weight_decay": 0.0, **good}

    def found(*groups: Any) -> list[tuple[str, str]]:
        return [(each.check, each.tensor) for each in find_wrong_settings(groups, CONFIG, 1e-3, 0)]

    assert found(decay, rest) == []
    assert found({**decay, "lr": 3e-3}, rest) == [("learning rate", "group decay")]
    assert found(decay, {**rest, "weight_decay": 0.1}) == [("optimizer settings", "group no_decay")]
    assert found({**decay, "betas": (0.9, 0.5)}, {**rest, "eps": 1e-5}) == [
        ("optimizer settings", "group decay"),
        ("optimizer settings", "group no_decay"),
    ]


def test_what_is_known_to_be_sound(check_text: CheckText) -> None:
    cases = ((None, [], 9), (12, [6, 12], 0), (12, [6, 12, 18, 24], 0), (None, [12], 9))
    check_text(*(checked_text(*case) for case in cases))
