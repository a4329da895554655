"""What the guards of foreign loops find in plain tensors and numbers, without ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from bigsci_launch.errors import BslError, GuardError  # noqa: E402
from bigsci_launch.train.attach import Guards  # noqa: E402
from bigsci_launch.train.guards.copies import Violation  # noqa: E402
from bigsci_launch.train.guards.gradient_check import GradientCheck  # noqa: E402
from bigsci_launch.train.guards.loop_state import innermost, kept_states, name_states, plain_name, settings_of  # noqa: E402  # noqa: E402
from bigsci_launch.train.guards.loop_word import find_wrong_batches  # noqa: E402
from bigsci_launch.train.guards.moments import find_wrong_state  # noqa: E402
from tests.support.texts import has_parts  # noqa: E402


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def found_in(model: Any, optimizer: Any) -> list[Violation]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return list(find_wrong_state([*kept_states(optimizer, list(name_states(optimizer, names)))], rank=3))


def test_moments_of_a_healthy_optimizer_are_right() -> None:
    assert found_in(*trained()) == []


@pytest.mark.parametrize(("key", "value", "check"), [("exp_avg", 5.0, "moments"), ("exp_avg_sq", 1e37, "magnitude")])
def test_a_single_wrong_element_of_a_moment_is_found(key: str, value: float, check: str) -> None:
    model, optimizer = trained()
    optimizer.state[model.weight][key].view(-1)[7] = value
    (violation,) = found_in(model, optimizer)
    assert (violation.check, violation.tensor, violation.ranks) == (check, f"weight: {key}", (3,))


def test_settings_of_an_optimizer_are_numbers_by_name() -> None:
    _, optimizer = trained()
    found = {name.split()[0]: value for name, value in settings_of(optimizer).items() if name.endswith(" group 0")}
    assert (found["step"], found["lr"], found["beta2"]) == (5, 0.01, 0.999)


def test_data_must_differ_over_dp_and_be_equal_over_tp() -> None:
    members = [{"dp": (0, 2), "tp": (0, 1)}, {"dp": (1, 3), "tp": (0, 1)}]
    members += [{"dp": (0, 2), "tp": (2, 3)}, {"dp": (1, 3), "tp": (2, 3)}]
    assert list(find_wrong_batches([5, 5, 6, 6], members)) == []
    assert [each.ranks for each in find_wrong_batches([5, 5, 5, 5], members)] == [(0, 2), (1, 3)]
    assert [each.ranks for each in find_wrong_batches([5, 4, 6, 6], members)] == [(0, 1)]


def test_data_that_nobody_has_told_is_not_judged() -> None:
    members = [{"dp": (0, 1)}, {"dp": (0, 1)}]
    assert list(find_wrong_batches([0, 0], members)) == []


def test_names_are_those_of_the_model_without_its_wrappers() -> None:
    assert plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.up.weight") == "layers.0.up.weight"
    assert plain_name("module.submodule.weight") == "submodule.weight"


def test_the_innermost_optimizer_has_the_moments() -> None:
    _, optimizer = trained()

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    assert innermost(Wrapper(Wrapper(optimizer))) is optimizer
    assert innermost(optimizer) is optimizer


def test_a_witness_leaves_layers_out_that_others_read_or_nobody_trains() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "up": nn.Linear(4, 4)})
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    model["head"].weight = model["embedding"].weight
    assert [each.name for each in GradientCheck(model)._layers] == ["up"]


def test_the_library_needs_neither_deepspeed_nor_a_run_file() -> None:
    code = "import sys, bigsci_launch.train.attach; print([name for name in sys.modules if 'deepspeed' in name or "
    code += "name in ('pydantic', 'bigsci_launch.config')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank of a world."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def checked_step(scale: float, dtype: Any) -> list[Violation]:
    """What the gradient check reports of a healthy step whose gradients are about so large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    check = GradientCheck(model)
    check.is_armed = True
    for _ in range(3):
        (model(torch.randn(500, 48, dtype=dtype)).float().mean() * scale).backward()
    return list(check.find_wrong(lambda parameter: parameter.grad, None, 0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e-30, 1e6])
def test_the_witness_is_silent_whatever_the_size_of_gradients(scale: float, dtype: Any, alone: None) -> None:
    assert checked_step(scale, dtype) == []


def test_a_loop_of_one_rank_with_vanishing_gradients_is_healthy(alone: None) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(60)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guards = Guards(model, optimizer, interval=2, fresh_data=10)
    for _ in range(8):
        samples = torch.randn(16, 32)
        guards.batch(samples)
        loss = model(samples).square().mean()
        loss.backward()
        guards.gradients()
        optimizer.step()
        optimizer.zero_grad()
        guards.step(loss, lr=1e-3)
    assert guards.steps_done == guards.gradients_checked == 8


def test_a_learning_rate_that_is_not_the_schedules_is_found(alone: None) -> None:
    model = nn.Linear(4, 4)
    guards = Guards(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    with pytest.raises(GuardError, match=r"lr of optimizer group 0 on rank 0 .*: is 0.003; the schedule gives 0.001"):
        guards.step(1.0, lr=1e-3)


def test_a_loss_that_is_not_finite_names_the_tensor(alone: None) -> None:
    model = nn.Linear(4, 4)
    guards = Guards(model, torch.optim.AdamW(model.parameters()), action="warn", interval=100)
    guards.touched()
    with torch.no_grad():
        model.bias[2] = math.nan
    guards.step(math.nan)
    found = guards.before_save()
    assert found["passed"] is False
    assert has_parts(*found["findings"], "non-finite: bias on rank 0 (dp0 pp0 tp0): ", "1 of 4")


def test_steps_that_overflow_may_be_skipped_but_not_for_ever(alone: None) -> None:
    model, optimizer = trained()
    guards = Guards(model, optimizer, max_skipped=2)
    for _ in range(2):
        guards.step(1.0, norm=math.inf)
    with pytest.raises(GuardError, match=r"skipped steps: optimizer on rank 0 .* 3 steps"):
        guards.step(1.0, norm=math.inf)


def test_an_infinite_norm_that_the_optimizer_has_used_is_found(alone: None) -> None:
    model, optimizer = trained()
    guards = Guards(model, optimizer)
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    with pytest.raises(GuardError, match=r"non-finite: gradient norm .* inf,"):
        guards.step(1.0, norm=math.inf)


@pytest.mark.parametrize(
    "wrong", [{"interval": 0}, {"action": "go"}, {"reduction": "max"}, {"tied": [("weight", "head")]}]
)
def test_wrong_arguments_are_refused(wrong: Any, alone: None) -> None:
    model, optimizer = trained()
    with pytest.raises(BslError):
        Guards(model, optimizer, **wrong)


def test_the_witness_notices_gradients_that_are_not_there(alone: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    check = GradientCheck(model)
    check.is_armed = True
    model(torch.randn(9, 4)).square().mean().backward()
    found = list(check.find_wrong(lambda parameter: None, None, 0, 1.0))
    assert [each.tensor for each in found] == ["0.weight", "1.weight"]
