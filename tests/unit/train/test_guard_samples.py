"""The vectors of signs with which a gradient is compared: together they see every direction."""

from __future__ import annotations

import pytest
import torch

from bigsci_launch.train.guards.engine.samples import VECTORS, signs
from tests.support.tiers import with_long

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("salt", with_long(range(20), range(2, 20)))
def test_no_direction_is_hidden_from_all_vectors(salt: int) -> None:
    """A gradient can be large in one direction alone. One vector sees less than a tenth of 8 in 100 such directions."""
    vectors = signs(256, torch.zeros((), dtype=torch.bfloat16), salt).float()
    directions = torch.randn(2000, 256, generator=torch.Generator().manual_seed(salt))
    seen = (directions @ vectors).norm(dim=1) / directions.norm(dim=1) / VECTORS**0.5
    assert 0.1 < float(seen.min()) < float(seen.max()) < 3
    one = (directions @ vectors[:, 0]).abs() / directions.norm(dim=1)
    assert float(one.min()) < 0.01
