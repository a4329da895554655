"""The order of samples: a pure function of the seed and the number of samples consumed, at every topology.

A sample is a window of `sequence_length + 1` tokens of the stream; neighbouring samples share one token. Each epoch is
a permutation that is computed, not stored (a Feistel network over the sample numbers), so it costs no memory and can
start at any position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MASK64 = (1 << 64) - 1
_ROUNDS = 6


def mix(value: int) -> int:
    """Return a 64-bit hash of a 64-bit integer (splitmix64's finaliser)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order in which the `num_samples` samples of a dataset are drawn, epoch after epoch."""

    num_samples: int
    seed: int

    def sample(self, position: int) -> int:
        """Return the sample at `position`, counted from the beginning of the run."""
        epoch, index = divmod(position, self.num_samples)
        key = mix(mix(self.seed) ^ epoch)
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        # The network permutes a power of four; numbers outside the dataset are permuted again until one is inside.
        while (index := _permute(index, half_bits, key)) >= self.num_samples:
            pass
        return index


def _permute(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (mix(key ^ mix(right * _ROUNDS + round_number)) & mask)
    return left << half_bits | right


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every global batch that one data-parallel rank trains on, from micro batch number `first` on."""

    micro_batch_size: int
    dp_rank: int
    dp: int
    first: int = 0

    def positions(self, consumed_samples: int, num_micro_batches: int) -> Iterator[range]:
        """Yield the positions of each micro batch of the step that begins after `consumed_samples`.

        Positions are ordered by micro batch, then by rank. So all topologies with the same global batch size draw the
        same samples in the same step.
        """
        for micro_batch in range(num_micro_batches):
            yield self.micro_batch(consumed_samples, micro_batch)

    def micro_batch(self, consumed_samples: int, number: int) -> range:
        """Return the positions of one micro batch, counted from 0, of that step."""
        start = consumed_samples + (self.first + number * self.dp + self.dp_rank) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Return how many samples a stream of tokens holds; the last token is only ever a label."""
    return max(0, (num_tokens - 1) // sequence_length)


@dataclass(frozen=True, slots=True)
class Split:
    """The samples of a dataset: those trained on, and those at its end that are held out."""

    trained: range
    held_out: range


def split_samples(num_tokens: int, sequence_length: int, share: float) -> Split:
    """Hold out a `share` of the samples, rounded down; none of their tokens is trained on, not even as a label."""
    count = num_samples(num_tokens, sequence_length)
    held_out = int(count * share)
    # The last label of a sample is the first token of the next, so one sample between the two parts is unused.
    trained = count - held_out - (1 if held_out else 0)
    return Split(range(trained), range(count - held_out, count))
