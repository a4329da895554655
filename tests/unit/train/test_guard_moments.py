"""The limits that AdamW's own recurrences put on its moments, and the fingerprint between two steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bigsci_launch.adam_limits import moment_bound  # noqa: E402
from bigsci_launch.train.guards.copies import Violation  # noqa: E402
from bigsci_launch.train.guards.fingerprint import TENSORS, StateFingerprint, sample_of  # noqa: E402
from bigsci_launch.train.guards.flat import Flat  # noqa: E402
from bigsci_launch.train.guards.moments import (  # noqa: E402
    FIRST,
    SECOND,
    MomentLimits,
    find_wrong_state,
    largest_factor,
    largest_size,
)
from tests.support.texts import CheckText  # noqa: E402

pytestmark = pytest.mark.torch

SLICES = {"a": (0, 300), "b": (300, 700)}
LIMITS = MomentLimits(moment_bound((0.9, 0.95), 10), 0.2)


def flat_of(tensor: Any, title: str = "{}") -> Flat:
    return Flat(title, tensor, SLICES)


def trained() -> dict[str, Flat]:
    """Return what is kept of two parameters, trained for ten steps of clipped gradients."""
    torch.manual_seed(5)
    master = flat_of(torch.randn(1000), "fp32 master of {}")
    first, second = torch.zeros(1000), torch.zeros(1000)
    for gradient in torch.randn(10, 1000) / 100:
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
    return {
        "master": master,
        FIRST: flat_of(first, "first moment of {}"),
        SECOND: flat_of(second, "second moment of {}"),
    }


def findings(kept: dict[str, Flat], limits: MomentLimits = LIMITS) -> list[Violation]:
    return list(find_wrong_state([(kept, limits)], 3))


def test_healthy_moments_pass() -> None:
    kept = trained()
    assert findings(kept) == findings({"master": kept["master"]}) == findings({}) == []
    assert 0 < largest_factor(kept[FIRST].tensor, kept[SECOND].tensor) < LIMITS.factor


@pytest.mark.parametrize(
    ("key", "value", "check", "part"),
    [
        (FIRST, math.nan, "non-finite", "1 of 700 "),
        (FIRST, 1e34, "magnitude", " 1e+34, "),
        (FIRST, 0.15, "moments", " 1.04"),
        (SECOND, 0.0, "moments", " 1.04"),
        (SECOND, -1e-9, "moments", " -1e-09, "),
        (SECOND, 0.5, "magnitude", " 0.5, "),
        (SECOND, math.inf, "non-finite", "1 of 700 "),
        ("master", 1e13, "magnitude", " 1e+13"),
        ("master", math.nan, "non-finite", "1 of 700 "),
    ],
)
def test_impossible_numbers_are_named(key: str, value: float, check: str, part: str) -> None:
    kept = trained()
    kept[key].tensor[400] = value
    found = {each.check: each for each in findings(kept)}[check]
    assert part in found.text
    assert found.tensor.endswith("moment of b" if key != "master" else "fp32 master of b") and found.ranks == (3,)
    assert not any(each.tensor.endswith(" of a") for each in findings(kept))


def test_gradients_too_small_to_square_in_32_bits_are_no_finding() -> None:
    kept = trained()
    kept[FIRST].tensor.fill_(1e-19)
    kept[SECOND].tensor.zero_()
    assert findings(kept) == []
    kept[FIRST].tensor.mul_(1e6)
    assert findings(kept) != []


def test_a_loaded_moment_may_be_rounded_above_its_own_size() -> None:
    assert largest_size(clip=1.0, before=3.0) > 3.0 * (1 + 2**-23)
    assert 1.0 < largest_size(clip=1.0, before=0.0) < 1.2
    assert largest_size(clip=0.0, before=3.0) == MomentLimits().size


def changed(fingerprint: StateFingerprint, kept: dict[str, Flat]) -> list[str]:
    return [each.tensor for each in fingerprint.find_changed(kept)]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_seal_is_whole_until_something_changes(is_whole: bool, check_text: CheckText) -> None:
    kept, fingerprint = trained(), StateFingerprint("memory", 2)
    assert list(fingerprint.find_changed(kept, {"step count": 10.0})) == []
    fingerprint.take(kept, 7, is_whole=is_whole, counts={"step count": 10.0})
    assert list(fingerprint.find_changed(kept, {"step count": 10.0})) == []
    kept[FIRST].tensor[300:] = 0
    kept[SECOND].tensor.mul_(100)
    found = {each.tensor: each for each in fingerprint.find_changed(kept, {"step count": 9.0})}
    assert found.keys() == {"first moment of b", "second moment of a", "step count"}
    assert {(each.check, each.ranks) for each in found.values()} == {("memory", (2,))}
    check_text(*sorted(f"{name}: {each.text}" for name, each in found.items()))
    for other in ({}, {"master": Flat.whole("a", torch.ones(700))}, {"master": flat_of(torch.ones(1000).bfloat16())}):
        assert "master" in changed(fingerprint, {FIRST: kept[FIRST], **other})
    fingerprint.forget()
    assert list(fingerprint.find_changed(kept)) == []
    fingerprint.take(kept, 8, is_whole=is_whole)
    assert changed(fingerprint, kept) == []


def test_samples_find_a_changed_tensor_among_many_within_few_steps() -> None:
    kept = {f"tensor {number}": Flat.whole(f"tensor {number}", torch.randn(1000)) for number in range(2 * TENSORS + 6)}
    fingerprint, found = StateFingerprint("memory", 0), []
    for step in range(3):
        fingerprint.take(kept, step, is_whole=False)
        kept["tensor 40"].tensor.mul_(1.5)
        found += changed(fingerprint, kept)
    assert set(found) == {"tensor 40"}


def test_a_whole_seal_sees_any_bit_and_a_sampled_one_sees_it_in_time() -> None:
    kept, fingerprint = trained(), StateFingerprint("memory", 0)
    bits = kept[SECOND].tensor.view(torch.int32)
    for at in range(300, 1000, 70):
        fingerprint.take(kept, 1, is_whole=True)
        bits[at] ^= 1
        assert changed(fingerprint, kept) == ["second moment of b"]
    seen = 0
    for step in range(100):
        fingerprint.take(kept, step, is_whole=False)
        bits[777] ^= 1
        seen += bool(changed(fingerprint, kept))
    assert 20 < seen < 60


def test_samples_stay_in_their_parameters_and_take_small_ones_whole() -> None:
    for step in range(50):
        at = sample_of([*SLICES.values()], step)
        assert len(at) == len(set(at.tolist())) == 512
        assert int(at.min()) >= 0
        assert int(at.max()) < 1000
    assert sorted(sample_of([(5, 10), (20, 0), (30, 256)], 3).tolist()) == [*range(5, 15), *range(30, 286)]
    assert len(sample_of([], 3)) == 0
