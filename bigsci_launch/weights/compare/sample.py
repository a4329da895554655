"""A sample of two tensors: blocks of elements, evenly spread, the same ones at every call."""

from __future__ import annotations

from bigsci_launch.weights.files.tensors import DTYPE_BYTES, StoredTensor, TensorPair, cut_segments

# Blocks are as long as is cheap to read at once, and multiples of the shortest, so that they begin at whole pages.
SHORTEST, LONGEST = 1 << 10, 1 << 15
# As many blocks as this if they are not too short.
WANTED_BLOCKS = 8


def sampled_pair(pair: TensorPair, share: float) -> TensorPair:
    """Return about `share` of the elements of both tensors, as flat tensors of their own.

    A pair whose elements are not one after the other, or not all known, is returned whole; so is a short one.
    """
    a, b = pair
    if a is None or b is None or a.shape != b.shape or not (_can_be_cut(a) and _can_be_cut(b)):
        return pair
    blocks = sample_blocks(a.num_elements, share)
    return _cut(a, blocks), _cut(b, blocks)


def _can_be_cut(tensor: StoredTensor) -> bool:
    is_flat = tensor.strides is None and not tensor.chunks
    return is_flat and tensor.has_bytes and tensor.has_shape and tensor.num_elements > 0


def sample_blocks(num_elements: int, share: float) -> list[tuple[int, int]]:
    """Return the first and last position (exclusive) of each block of a sample of `num_elements`, in order."""
    wanted = num_elements * share
    length = max(SHORTEST, min(LONGEST, int(wanted / WANTED_BLOCKS) // SHORTEST * SHORTEST))
    number = max(1, round(wanted / length))
    if number * length * 2 > num_elements:
        return [(0, num_elements)]
    room = (num_elements - length) // SHORTEST
    starts = (room * index // max(1, number - 1) * SHORTEST for index in range(number))
    return [(start, start + length) for start in starts]


def position_in_whole(position: int | None, num_elements: int, share: float) -> int | None:
    """Return where an element of a sample is in the whole tensor of `num_elements`; None for None."""
    if position is None:
        return None
    for start, stop in sample_blocks(num_elements, share):
        if position < stop - start:
            return start + position
        position -= stop - start
    return None


def _cut(tensor: StoredTensor, blocks: list[tuple[int, int]]) -> StoredTensor:
    width = DTYPE_BYTES[tensor.dtype]
    segments = tuple(
        segment for start, stop in blocks for segment in cut_segments(tensor.segments, start * width, stop * width)
    )
    shape = (sum(stop - start for start, stop in blocks),)
    return StoredTensor(tensor.name, tensor.role, tensor.place, tensor.dtype, shape, segments)
