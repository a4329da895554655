"""No guard raises anything but its finding, whatever numbers it meets, and equal copies raise none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from bigsci_launch.config.schema.run import OptimizerSection  # noqa: E402
from bigsci_launch.train.device.digest import digest64, digests_on_device  # noqa: E402
from bigsci_launch.train.device.gpu import Fetched  # noqa: E402
from bigsci_launch.train.guards import moments  # noqa: E402
from bigsci_launch.train.guards.copies import CopyChecker, Violation, Watched  # noqa: E402
from bigsci_launch.train.guards.engine import adam, gradients, state  # noqa: E402
from bigsci_launch.train.guards.engine.clipping import ClipWatch, clip_factor  # noqa: E402
from bigsci_launch.train.guards.engine.samples import distance, spread  # noqa: E402
from bigsci_launch.train.guards.fingerprint import StateFingerprint  # noqa: E402
from bigsci_launch.train.guards.flat import Flat  # noqa: E402
from bigsci_launch.train.guards.gradient_check import _relation  # noqa: E402
from bigsci_launch.train.guards.loop_state import kept_states  # noqa: E402

SMALL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, 6e-8, 1e-30, 1e30, 3.4e38, math.inf, -math.inf, math.nan]
NUMBERS = st.one_of(st.sampled_from([*SPECIAL, 1e-320, 1e-170, 1e200, 1.7e308]), st.floats())
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


SIZES, NOT_EMPTY = st.sampled_from([0, 1, 2, 7, 64]), st.sampled_from([1, 2, 7])


@st.composite
def tensors(draw: Any, dtypes: Any = DTYPES, sizes: Any = SIZES, count: int = 1) -> Any:
    """Return tensors of one size: constant ones, or with a special number at a place."""
    dtype, size = draw(dtypes), draw(sizes)
    found = []
    for _ in range(count):
        tensor = torch.full((size,), draw(st.sampled_from(SPECIAL)), dtype=torch.float32)
        if size and draw(st.booleans()):
            tensor[draw(st.integers(0, size - 1))] = draw(st.sampled_from(SPECIAL))
        found.append(tensor.to(dtype))
    return found


def check(found: Iterable[Any]) -> list[Violation]:
    """Run a check to its end; it must give findings in words, and nothing else."""
    violations = list(found)
    assert all(isinstance(each, Violation) and each.text and each.ranks for each in violations)
    return violations


def partition(weights: Any, master: Any) -> Any:
    size = len(master)
    slices = {"one": (0, size // 2), "two": (size // 2, size - size // 2)}
    return state.OptimizerPartition("decay", weights, master, slices if size else {})


@SMALL
@given(tensors())
def test_equal_copies_have_equal_digests_and_raise_no_finding(drawn: Any) -> None:
    (tensor,) = drawn
    copies = [tensor, tensor.clone(), tensor.clone()]
    assert len({digest64(each) for each in copies}) == len({*digests_on_device(copies)}) == 1
    checker = CopyChecker([[Watched("w", (("dp", (0, 1, 2)),))]] * 3)
    assert checker.find_unequal(np.array([[digest64(each)] for each in copies])) == []
    masters = tensor.float()
    assert check(state.find_masters_apart([partition(masters.to(tensor.dtype), masters)], 0)) == []


@SMALL
@given(tensors(count=2), st.booleans())
def test_seals_of_any_state_hold_until_it_changes(drawn: Any, is_whole: bool) -> None:
    weights, moment = drawn
    kept, counts, fingerprint = {"exp_avg": moment.float()}, {"step": 3.0}, StateFingerprint("memory", 0)
    part = partition(weights, weights.float())
    fingerprint.take(state.flats_of(part, kept), 3, is_whole=is_whole, counts=counts)
    assert check(fingerprint.find_changed(state.flats_of(part, kept), counts)) == []
    before = kept.pop("exp_avg")
    assert [each.check for each in check(fingerprint.find_changed(state.flats_of(part, kept), counts))] == ["memory"]
    kept["exp_avg"] = before * -2 + 1
    assert check(fingerprint.find_changed(state.flats_of(part, kept), {"step": math.nan}))


@SMALL
@given(tensors(st.just(torch.float32), count=4), NUMBERS, NUMBERS, NUMBERS)
def test_moments_of_any_kind_give_findings_only(drawn: Any, factor: float, size: float, count: float) -> None:
    master, first, second, gradient = drawn
    part, limits = partition(master.bfloat16(), master), moments.MomentLimits(abs(factor), abs(size))
    for kept in ({}, {"exp_avg": first}, {"exp_avg_sq": second}, {"exp_avg": first, "exp_avg_sq": second}):
        check(moments.find_wrong_state([(state.flats_of(part, kept), limits)], 0))
    assert moments.largest_factor(first, second) >= 0
    assert adam.steps_since(0.0, count) >= 0
    adam._size(first, second)
    before = adam.Before(
        torch.arange(len(master)), master.double(), first.double(), second.double(), gradient.double(), count
    )
    for betas in ([0.9, 0.95], [0.0, 0.0], [0.99, 0.9]):
        config = OptimizerSection(betas=betas)
        adam.tolerances(before, adam.expected_update(before, config, 1e-3, 0.1), config, 1e-3)


@SMALL
@given(tensors(count=3))
def test_the_moments_of_a_loop_give_findings_only(drawn: Any) -> None:
    weight, first, second = drawn
    parameter = nn.Parameter(weight)
    for betas in ((0.9, 0.999), (0.9, 0.0), (0.9, 0.9, 0.9)):
        optimizer = SimpleNamespace(
            param_groups=[{"params": [parameter], "betas": betas}],
            state={parameter: {"exp_avg": first, "exp_avg_sq": second}},
        )
        kept = kept_states(optimizer, [("w", parameter)])  # type: ignore[arg-type]
        check(moments.find_wrong_state([*kept, ({"": Flat.whole("w", weight)}, moments.MomentLimits())], 0))


@SMALL
@given(tensors(count=2))
def test_the_distance_of_any_gradients_is_a_pair_of_numbers(drawn: Any) -> None:
    found, expected = (each.float() for each in drawn)
    apart, _ = distance(found, expected)
    assert math.isnan(apart) or apart >= 0
    same, _ = distance(found, found.clone())
    assert math.isnan(same) or same == 0


class Layer(nn.Module):
    """What the check of norms reads of a transformer layer."""

    def __init__(self, drawn: Any, has_bias: bool) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.mlp = nn.Module()
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(4, bias=has_bias) for _ in range(2))
        self.attention.qkv, self.mlp.up = nn.Linear(4, 6), nn.Linear(4, 6)
        self.to(drawn[0].dtype)
        for number, parameter in enumerate(self.parameters()):
            values, slopes = drawn[number % len(drawn)], drawn[(number + 1) % len(drawn)]
            parameter.data = values[:1].expand(parameter.shape).clone()
            parameter.grad = slopes[:1].expand(parameter.shape).clone()
            parameter.grad.view(-1)[: len(slopes)] = slopes[: parameter.numel()]


@SMALL
@given(tensors(sizes=NOT_EMPTY, count=3), st.booleans())
def test_the_gradients_of_norms_give_findings_only(drawn: Any, has_bias: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "TransformerLayer", Layer)
        check(gradients.find_wrong_norm_gradients(nn.ModuleDict({"2": Layer(drawn, has_bias)}), None, 0))


def test_a_weight_that_became_zero_is_a_finding_of_the_gradients() -> None:
    """What the layer implies is then zero: the division by it once hid the finding."""
    layer = Layer([torch.ones(7)], has_bias=True)
    for reader in (layer.attention.qkv, layer.mlp.up):
        nn.init.zeros_(reader.weight)  # type: ignore[arg-type, union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "TransformerLayer", Layer)
        found = check(gradients.find_wrong_norm_gradients(nn.ModuleDict({"2": layer}), None, 3))
    assert {(each.check, each.accused) for each in found} == {("replicated gradients", (3,))}


@SMALL
@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_norms_and_factors_of_any_size_give_findings_only(one: float, two: float, clip: float, lost: float) -> None:
    check(gradients.find_wrong_norm(one, two, 0, lost))
    if math.isfinite(one):
        assert check(gradients.find_wrong_norm(abs(one), abs(one), 0)) == []
    assert clip_factor(abs(one), abs(clip)) <= 1 or math.isnan(one)
    watch = gradients.GradientWatch.__new__(gradients.GradientWatch)
    watch._rank, watch._reduced, watch._used = 0, {"w": abs(two)}, {"w": abs(lost)}
    check(watch.find_wrong_clipping(one, abs(clip)))
    assert _relation([one, two, clip])


@SMALL
@given(tensors(count=2), NUMBERS, NUMBERS)
def test_clipping_of_any_gradients_gives_findings_only(drawn: Any, norm: float, clip: float) -> None:
    before, used = drawn
    watch = ClipWatch(None, [partition(before, before.float())])
    watch._scale = 1.0
    watch._before = {0: SimpleNamespace(places=torch.arange(len(before)), values=Fetched(before))}  # type: ignore[dict-item]
    watch._used = {0: Fetched(used)}
    check(watch.findings(abs(norm), abs(clip), 0))
    if before.isfinite().all() and not used.isfinite().all():
        assert check(watch.findings(0.5, 1.0, 0))


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_places_to_compare_lie_in_the_tensor(size: int, count: int) -> None:
    places = spread(size, count)
    assert all(0 <= place < size for place in places)
    assert bool(places) == bool(size)
