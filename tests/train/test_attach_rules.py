"""What the guards of foreign loops find in plain tensors and numbers, without ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402

from bigsci_launch.errors import BslError, GuardError  # noqa: E402
from bigsci_launch.topology import Topology  # noqa: E402
from bigsci_launch.train.attach import Guards  # noqa: E402
from bigsci_launch.train.attach.equal import EqualChecker, as_bits, as_number, find_wrong_data  # noqa: E402
from bigsci_launch.train.attach.findings import in_order  # noqa: E402
from bigsci_launch.train.attach.moments import find_absurd, find_wrong_moments, moment_bound, settings_of  # noqa: E402
from bigsci_launch.train.attach.places import Places, places_of  # noqa: E402
from bigsci_launch.train.attach.seal import StateSeal  # noqa: E402
from bigsci_launch.train.attach.watched import Watched, innermost, name_states, plain_name  # noqa: E402
from bigsci_launch.train.attach.witness import GradientWitness  # noqa: E402
from bigsci_launch.train.device.digest import digests_on_device  # noqa: E402
from bigsci_launch.train.guards.copies import Violation, merge  # noqa: E402

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.98)]


def moments_after(gradients: Any, betas: tuple[float, float]) -> tuple[Any, Any]:
    """AdamW's moments after these gradients, of shape (steps, elements), in float64."""
    first, second = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for gradient in gradients:
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
    return first, second


@pytest.mark.parametrize("betas", BETAS)
def test_no_gradients_pass_the_bound_of_the_moments_and_the_worst_ones_reach_it(betas: tuple[float, float]) -> None:
    draw, bound = np.random.default_rng(1), moment_bound(*betas)
    for scale in (1.0, 5.0):
        first, second = moments_after(draw.standard_normal((400, 200)) ** scale, betas)
        assert (np.abs(first) <= bound * np.sqrt(second)).all()
    # Cauchy and Schwarz are equal for gradients in proportion to (b1 / b2) ** age.
    ages = np.arange(400)[::-1, None]
    first, second = moments_after((betas[0] / betas[1]) ** ages.astype(float), betas)
    assert first[0] / math.sqrt(second[0]) == pytest.approx(bound, rel=1e-3)


def test_betas_without_a_bound_have_none() -> None:
    assert moment_bound(0.99, 0.9) == moment_bound(0.9, 1.0) == moment_bound(0.9, 0.0) == math.inf


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
    return list(find_wrong_moments(optimizer, list(name_states(optimizer, names)), rank=3))


def test_moments_of_a_healthy_optimizer_are_right() -> None:
    assert found_in(*trained()) == []


@pytest.mark.parametrize(
    ("key", "value", "check", "words"),
    [
        ("exp_avg", math.nan, "non-finite", "1 of 24 elements"),
        ("exp_avg", 1e34, "magnitude", "1e+34"),
        ("exp_avg", 5.0, "moments", "7.27 times the root"),
        ("exp_avg_sq", math.inf, "non-finite", "not finite"),
        ("exp_avg_sq", -1e-9, "moments", "not negative"),
        ("exp_avg_sq", 1e37, "magnitude", "1e+37"),
        ("exp_avg_sq", 0.0, "moments", "no gradients can cause"),
    ],
)
def test_a_single_wrong_element_of_a_moment_is_found(key: str, value: float, check: str, words: str) -> None:
    model, optimizer = trained()
    optimizer.state[model.weight][key].view(-1)[7] = value
    violation = found_in(model, optimizer)[0]
    assert (violation.check, violation.ranks) == (check, (3,))
    assert violation.tensor.startswith("weight") and words in violation.text


def test_weights_that_are_not_finite_or_absurd_are_found() -> None:
    tensors = {"a": torch.ones(4), "b": torch.tensor([1.0, math.nan]), "c": torch.tensor([-1e19]), "d": torch.ones(0)}
    assert [(each.check, each.tensor) for each in find_absurd(tensors, 0)] == [("non-finite", "b"), ("magnitude", "c")]


def test_settings_of_an_optimizer_are_numbers_by_name() -> None:
    _, optimizer = trained()
    found = settings_of(optimizer)
    assert found["step count of optimizer group 0"] == 5
    assert (found["lr of optimizer group 0"], found["beta2 of optimizer group 0"]) == (0.01, 0.999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_the_digest_sees_every_element_and_its_place(dtype: Any) -> None:
    tensor = torch.arange(300_000).remainder(200).to(dtype)
    changed = tensor.clone()
    changed[270_001] += 1
    swapped = tensor.clone()
    swapped[[5, 6]] = tensor[[6, 5]]
    found = digests_on_device([tensor, tensor.clone(), changed, swapped, tensor[:-1], tensor.roll(1 << 18)])
    assert found[0] == found[1]
    assert len(set(found)) == 5
    assert all(-(2**63) <= value < 2**63 for value in found)


def test_the_digest_tells_zero_from_minus_zero_and_sees_nan() -> None:
    zero, minus, nan = torch.zeros(1), -torch.zeros(1), torch.full((1,), math.nan)
    assert len(set(digests_on_device([zero, minus, nan]))) == 3
    assert digests_on_device([nan]) == digests_on_device([nan.clone()])


def test_a_seal_is_broken_by_one_element_after_a_checked_step() -> None:
    tensors = {"one": torch.ones(5000), "two": torch.ones(3)}
    seal = StateSeal()
    seal.close(tensors, is_whole=True)
    assert list(seal.find_changed(tensors, 1)) == []
    tensors["one"][4321] = 2
    (violation,) = seal.find_changed(tensors, 1)
    assert (violation.check, violation.tensor, violation.ranks) == ("changed between steps", "one", (1,))
    seal.break_open()
    assert list(seal.find_changed(tensors, 1)) == []


def test_samples_of_a_seal_find_a_changed_tensor_within_few_steps() -> None:
    tensors = {f"tensor {number}": torch.randn(1000) for number in range(70)}
    seal, found = StateSeal(), []
    for _ in range(3):
        seal.close(tensors, is_whole=False)
        tensors["tensor 40"] *= 1.5
        found += [violation.tensor for violation in seal.find_changed(tensors, 0)]
    assert set(found) == {"tensor 40"}


def test_a_seal_notices_that_a_tensor_is_gone() -> None:
    seal = StateSeal()
    seal.close({"one": torch.ones(5), "two": torch.ones(5)}, is_whole=False)
    assert [each.tensor for each in seal.find_changed({"one": torch.ones(5)}, 0)] == ["two"]


GROUPS = [{"dp": (0, 1, 2)}] * 3


def checker() -> EqualChecker:
    copies = (("dp", (0, 1, 2)),)
    mine = [Watched("w", "weight", copies), Watched("w", "gradient", copies), Watched("lr", "setting", copies)]
    return EqualChecker([mine] * 3)


def test_of_three_copies_the_one_that_differs_is_named() -> None:
    table = np.array([[7, 8, as_bits(1e-3)]] * 3)
    assert checker().find_unequal(table) == []
    table[0, 0] += 1
    (violation,) = checker().find_unequal(table)
    assert (violation.check, violation.ranks) == ("data-parallel copies", (0,))
    assert violation.text == "differs from the copy on rank 1"


def test_settings_that_differ_are_printed() -> None:
    table = np.array([[7, 8, as_bits(1e-3)]] * 3)
    table[2, 2] = as_bits(3e-3)
    (violation,) = checker().find_unequal(table)
    assert (violation.check, violation.ranks) == ("optimizer settings", (2,))
    assert violation.text == "is 0.003 on rank 2 and 0.001 on rank 0"


def test_of_two_copies_both_are_suspects() -> None:
    copies = (("tp", (0, 1)),)
    equal = EqualChecker([[Watched("w", "weight", copies)]] * 2)
    (violation,) = equal.find_unequal(np.array([[1], [2]]))
    assert (violation.check, violation.ranks) == ("tensor-parallel copies", (0, 1))
    assert (violation.text, violation.accused) == ("differs between these ranks", ())


def test_numbers_survive_the_exchange() -> None:
    for number in (0.0, -1.5, math.inf, 1e-300):
        assert as_number(as_bits(number)) == number
    assert math.isnan(as_number(as_bits(math.nan)))


def test_data_must_differ_over_dp_and_be_equal_over_tp() -> None:
    members = [{"dp": (0, 2), "tp": (0, 1)}, {"dp": (1, 3), "tp": (0, 1)}]
    members += [{"dp": (0, 2), "tp": (2, 3)}, {"dp": (1, 3), "tp": (2, 3)}]
    assert list(find_wrong_data([5, 5, 6, 6], members)) == []
    assert [each.ranks for each in find_wrong_data([5, 5, 5, 5], members)] == [(0, 2), (1, 3)]
    assert [each.ranks for each in find_wrong_data([5, 4, 6, 6], members)] == [(0, 1)]


def test_data_that_nobody_has_told_is_not_judged() -> None:
    members = [{"dp": (0, 1)}, {"dp": (0, 1)}]
    assert list(find_wrong_data([0, 0], members)) == []


def test_ranks_are_named_with_their_place() -> None:
    topology = Topology(tp=2, dp=2)
    members = [{axis: topology.group(axis, rank) for axis in ("tp", "dp")} for rank in range(4)]
    places = places_of(3, members)
    assert places.topology == topology
    assert places.describe([3]) == "rank 3 (dp1 pp0 tp1)"


def test_ranks_that_are_numbered_otherwise_still_have_a_place() -> None:
    members = [{"tp": (0, 2), "dp": (0, 1)}, {"tp": (1, 3), "dp": (0, 1)}]
    members += [{"tp": (0, 2), "dp": (2, 3)}, {"tp": (1, 3), "dp": (2, 3)}]
    places: Places = places_of(0, members)
    assert places.topology is None
    assert places.describe([1]) == "rank 1 (dp1 pp0 tp0)"
    assert places.describe([1, 3]) == "ranks 1,3"


def test_findings_are_merged_and_begin_with_the_cause() -> None:
    copies = Violation("data-parallel copies", "w", (0,), "differs")
    data = [Violation("data", "batch", (rank,), "same") for rank in (1, 0)]
    assert in_order(merge([copies, *data])) == [Violation("data", "batch", (0, 1), "same"), copies]


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
    assert [each.name for each in GradientWitness(model)._layers] == ["up"]


def test_the_library_needs_neither_deepspeed_nor_a_run_file() -> None:
    code = "import sys, bigsci_launch.train.attach; print([name for name in sys.modules if 'deepspeed' in name or "
    code += "name in ('pydantic', 'bigsci_launch.config')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank of a world."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def witnessed_step(scale: float, dtype: Any) -> list[Violation]:
    """What the witness says of a healthy step whose gradients are about so large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    witness = GradientWitness(model)
    witness.is_armed = True
    for _ in range(3):
        (model(torch.randn(500, 48, dtype=dtype)).float().mean() * scale).backward()
    return list(witness.find_wrong(lambda parameter: parameter.grad, None, 0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e-30, 1e6])
def test_the_witness_is_silent_whatever_the_size_of_gradients(scale: float, dtype: Any, alone: None) -> None:
    assert witnessed_step(scale, dtype) == []


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
    assert found["findings"] == ["non-finite: bias on rank 0 (dp0 pp0 tp0): 1 of 4 elements are not finite"]


def test_steps_that_overflow_may_be_skipped_but_not_for_ever(alone: None) -> None:
    model, optimizer = trained()
    guards = Guards(model, optimizer, max_skipped=2)
    for _ in range(2):
        guards.step(1.0, norm=math.inf)
    with pytest.raises(GuardError, match=r"skipped steps: optimizer on rank 0 .*: has skipped 3 steps in a row"):
        guards.step(1.0, norm=math.inf)


def test_an_infinite_norm_that_the_optimizer_has_used_is_found(alone: None) -> None:
    model, optimizer = trained()
    guards = Guards(model, optimizer)
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    with pytest.raises(GuardError, match=r"non-finite: gradient norm .*is inf, and the optimizer has taken the step"):
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
    witness = GradientWitness(model)
    witness.is_armed = True
    model(torch.randn(9, 4)).square().mean().backward()
    found = list(witness.find_wrong(lambda parameter: None, None, 0, 1.0))
    assert [each.tensor for each in found] == ["0.weight", "1.weight"]
    assert "does not follow from" in found[0].text
