"""Data order: a permutation per epoch, and the same global batches at every topology."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.train.samples.sampler import SampleOrder, Share, num_samples, split_samples


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 3))
def test_each_epoch_draws_each_sample_once(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    drawn = [order.sample(epoch * size + index) for index in range(size)]
    assert sorted(drawn) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    order = [SampleOrder(1000, 1).sample(index) for index in range(1000)]
    assert order != [SampleOrder(1000, 1).sample(1000 + index) for index in range(1000)]
    assert order != [SampleOrder(1000, 2).sample(index) for index in range(1000)]
    assert order != sorted(order)


def test_order_is_pinned() -> None:
    """A resumed run must draw the same samples as the run that saved, in every later version, too."""
    assert [SampleOrder(10, 1).sample(index) for index in range(12)] == [6, 5, 1, 0, 8, 9, 3, 7, 4, 2, 8, 7]


def test_neighbours_are_spread() -> None:
    order = SampleOrder(10_000, 7)
    distances = [abs(order.sample(index) - order.sample(index + 1)) for index in range(2000)]
    assert 2500 < sum(distances) / len(distances) < 4200  # a random permutation has a third of the range


@given(
    consumed=st.integers(0, 1000),
    micro=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 3]),
    num_micro_batches=st.integers(1, 4),
)
def test_the_ranks_share_out_the_global_batch(consumed: int, micro: int, dp: int, num_micro_batches: int) -> None:
    batch = [
        position
        for rank in range(dp)
        for positions in Share(micro, rank, dp).positions(consumed, num_micro_batches)
        for position in positions
    ]
    assert sorted(batch) == list(range(consumed, consumed + micro * dp * num_micro_batches))


def test_samples_share_one_token() -> None:
    assert num_samples(0, 4) == 0
    assert num_samples(4, 4) == 0
    assert num_samples(5, 4) == 1
    assert num_samples(8, 4) == 1
    assert num_samples(9, 4) == 2


def test_held_out_samples_share_no_token_with_the_others() -> None:
    """A sample's last label is the first token of the next: the one between the two parts belongs to neither."""
    split = split_samples(1001, 10, 0.25)
    assert (split.trained, split.held_out) == (range(74), range(75, 100))
    last_trained_token = split.trained[-1] * 10 + 10
    assert last_trained_token < split.held_out[0] * 10


def test_nothing_held_out_changes_nothing() -> None:
    assert split_samples(1001, 10, 0.0).trained == range(num_samples(1001, 10))
    assert not split_samples(1001, 10, 0.0).held_out
