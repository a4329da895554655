"""The micro-batch size that is expected for `auto`: it fits, and of those that fit it is the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.plan.choose.automatic import expected_memory, expected_size, with_fastest_size
from bigsci_launch.plan.price.calibration import Calibration
from bigsci_launch.plan.price.price import price_setup
from bigsci_launch.plan.shape.setup import Setup

SIZES = (1, 2, 4, 8, 16)


def test_more_samples_need_more_memory_and_the_state_stays(bloom: Setup) -> None:
    found = [expected_memory(bloom, size) for size in SIZES]
    assert [each.total_gib for each in found] == sorted(each.total_gib for each in found)
    assert found[0].kept_gib < found[-1].kept_gib
    assert "of kept activations" in found[0].words


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_size_within_the_memory_is_expected(size: int, bloom: Setup) -> None:
    memory = expected_memory(bloom, size).total_gib
    assert expected_size(bloom, SIZES, memory) == size
    assert expected_size(bloom, SIZES, memory - 0.001) == max(1, size // 2)


def test_without_a_known_memory_the_largest_and_without_room_the_smallest_is_tried(bloom: Setup) -> None:
    assert expected_size(bloom, SIZES, None) == 16
    assert expected_size(bloom, SIZES, 0.1) == 1


def test_bloom_gets_the_size_that_it_was_trained_with(bloom: Setup, jean_zay: Calibration) -> None:
    assert with_fastest_size(bloom, SIZES, jean_zay).micro_batch_size == 2


def test_what_runs_out_of_memory_is_not_taken(bloom: Setup, jean_zay: Calibration) -> None:
    small = replace(jean_zay, gpu=replace(jean_zay.gpu, memory_gib=55.0))
    found = with_fastest_size(bloom, SIZES, small)
    assert not price_setup(found, small).is_out_of_memory
    assert found.micro_batch_size == 1
    tiny = replace(jean_zay, gpu=replace(jean_zay.gpu, memory_gib=10.0))
    assert with_fastest_size(bloom, SIZES, tiny).micro_batch_size == 1
