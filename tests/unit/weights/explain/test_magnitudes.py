"""`bsl diff-weights --audit`: numbers that are finite, but that no training leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.texts import has_parts

NAME = "2.up.weight"
BETAS = (0.9, 0.95)


def trained(tiny: Any, betas: tuple[float, float] = BETAS, seed: int = 0, **options: Any) -> Any:
    """A checkpoint whose moments are those of AdamW after 20 steps with gradients of very different sizes."""
    checkpoint = tiny(betas=betas, **options)
    for params in checkpoint.state.values():
        for name, roles in params.items():
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            roles["exp_avg"].zero_()
            roles["exp_avg_sq"].zero_()
            for _ in range(20):
                size = 10 ** (8 * torch.rand(1, generator=generator) - 6)
                gradient = size * torch.randn(roles["exp_avg"].shape, generator=generator)
                roles["exp_avg"].lerp_(gradient, 1 - betas[0])
                roles["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return checkpoint


def audit(diff: Any, folder: Path) -> dict[str, str]:
    document = diff("--audit", folder, "--json").document
    return {finding["pattern"]: finding["claim"] for finding in document["findings"]}


@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.999), (0.95, 0.95), (0.0, 0.9)])
def test_moments_of_adamw_are_within_its_bound(
    tmp_path: Path, tiny: Any, diff: Any, betas: tuple[float, float]
) -> None:
    trained(tiny, betas, tp=1).write(tmp_path)
    assert audit(diff, tmp_path) == {}


def set_one(checkpoint: Any, role: str, value: float, name: str = NAME) -> None:
    holder = next(params[name] for params in checkpoint.state.values() if name in params)
    holder[role].view(-1)[13] = value


@pytest.mark.parametrize(
    ("role", "value", "pattern"),
    [
        ("exp_avg", 1e34, "absurd magnitude"),
        ("exp_avg_sq", 1e34, "absurd magnitude"),
        ("fp32", 2.3e35, "absurd magnitude"),
        ("exp_avg_sq", -1e-8, "negative second moment"),
        ("exp_avg", 1e6, "impossible moments"),
        ("exp_avg_sq", 0.0, "impossible moments"),
    ],
)
def test_one_element_that_cannot_be(
    tmp_path: Path, tiny: Any, diff: Any, check_text: Any, role: str, value: float, pattern: str
) -> None:
    checkpoint = trained(tiny, tp=1)
    set_one(checkpoint, role, value)
    checkpoint.write(tmp_path)
    check_text(audit(diff, tmp_path)[pattern])


def test_moments_of_a_whole_shard_that_were_scaled(tmp_path: Path, tiny: Any, diff: Any) -> None:
    checkpoint = trained(tiny, tp=1)
    for roles in checkpoint.state[1, 0].values():
        roles["exp_avg"] *= 100
    checkpoint.write(tmp_path)
    assert "(pp1)" in audit(diff, tmp_path)["impossible moments"]


def test_zeroed_second_moments_and_betas_that_are_not_known(tmp_path: Path, tiny: Any, diff: Any) -> None:
    for name, betas in (("known", BETAS), ("unknown", None)):
        checkpoint = trained(tiny, tp=1)
        checkpoint.betas = betas
        for params in checkpoint.state.values():
            for roles in params.values():
                roles["exp_avg_sq"].zero_()
        checkpoint.write(tmp_path / name)
        assert ("impossible moments" in audit(diff, tmp_path / name)) == (betas is not None)


def test_masks_and_counters_are_no_absurd_magnitudes(tmp_path: Path, diff: Any, save_arrays: Any) -> None:
    lowest = np.finfo(np.float32).min
    healthy = {"mask": np.array([0, lowest], np.float32), "ids": np.array([1 << 62]), "w": np.ones(3, np.float32)}
    assert audit(diff, save_arrays(tmp_path / "a.safetensors", healthy)) == {}
    bf16 = torch.tensor([0.0, torch.finfo(torch.bfloat16).min], dtype=torch.bfloat16)
    assert audit(diff, save_arrays(tmp_path / "b.safetensors", {"mask": bf16})) == {}
    absurd = save_arrays(tmp_path / "c.safetensors", {"w": np.array([1, -1e30], np.float32)})
    assert has_parts(audit(diff, absurd)["absurd magnitude"], "w ", " 1 ", "1e+30", "[1]")
