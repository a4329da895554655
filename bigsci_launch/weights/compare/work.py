"""Compares bytes in threads, ahead of what is asked for, so that opening, parsing and reading overlap.

Two files that may be the same to the last byte are compared as a whole while A's is parsed: if they are the same, B's
is not parsed. Otherwise the tensors outside the ranges that are equal are compared one by one. Everything is cut into
portions, so that the threads share one large file in the same way as many small ones.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bigsci_launch.progress import Progress
from bigsci_launch.weights.compare.comparison import Selection
from bigsci_launch.weights.compare.reading import Extent, ReadPlan, has_numpy
from bigsci_launch.weights.files.boxes import Overlap, inside, overlaps, pieces_of, run_in
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import FilePool, equal_segments
from bigsci_launch.weights.files.sources import Contents, Unreadable
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    PACKED_DTYPES,
    Segment,
    StoredTensor,
    TensorPair,
    cut_segments,
)
from bigsci_launch.weights.match.batches import PairBatch
from bigsci_launch.weights.match.pairing import FilePair

# Bytes that a thread compares at a time, so that many small tensors cost no more than one large tensor.
PORTION_BYTES = 16 << 20
# A batch is cut into about this many portions at most, so that those that wait need little memory.
MAX_PORTIONS = 512
# Batches that are opened and parsed ahead: at least this many, and two for each thread.
MIN_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair whose bytes were compared. `read` is what was read of it: the pair itself, or a sample."""

    pair: TensorPair
    is_equal: bool
    read: TensorPair


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of the pair at `index` of its batch; without segments, the whole pair, which cannot be cut."""

    index: int
    pair: TensorPair
    a: tuple[Segment, ...] = ()
    b: tuple[Segment, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.a) if self.a else either(self.pair).num_bytes


@dataclass(frozen=True, slots=True)
class _Found:
    """What a thread found in one portion: the indices of pairs that differ, and of those whose files are lost."""

    num_bytes: int
    differing: tuple[int, ...] = ()
    lost: tuple[tuple[int, Unreadable], ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differing and not self.lost


@dataclass(frozen=True, slots=True)
class _Begun:
    """A parsed batch whose portions the threads compare; pairs with an index in `differing` are already known."""

    batch: PairBatch
    pairs: list[TensorPair]
    read: list[TensorPair]
    differing: set[int]
    portions: list[Future[_Found]]


@dataclass(frozen=True, slots=True)
class _Twins:
    """Two files of one size whose bytes the threads compare, and the contents of A's."""

    files: FilePair
    paths: tuple[Path, Path]
    num_bytes: int
    left: Contents | Unreadable
    portions: list[Future[_Found]]


@dataclass(frozen=True, slots=True)
class _Same:
    """The portions of two files that are known to be equal."""

    paths: tuple[Path, Path] | None = None
    step: int = PORTION_BYTES
    portions: tuple[bool, ...] = ()

    def covers(self, a: StoredTensor, b: StoredTensor) -> bool:
        """Whether the bytes of a tensor are at the same place in both files, and are equal."""
        if self.paths is None or len(a.segments) != len(b.segments):
            return False
        return all(map(self._covers_segment, a.segments, b.segments))

    def _covers_segment(self, a: Segment, b: Segment) -> bool:
        if (a.path, b.path) != self.paths or (a.offset, a.num_bytes) != (b.offset, b.num_bytes):
            return False
        if a.inflated is not None or b.inflated is not None:
            return False
        return all(self.portions[a.offset // self.step : -(-(a.offset + a.num_bytes) // self.step)])


NOTHING_KNOWN = _Same()


class Work:
    """The threads of a comparison. `extent` is what they have read so far."""

    def __init__(self, files: FilePool, selection: Selection, plan: ReadPlan, *, report_progress: Progress) -> None:
        self.extent = Extent(is_sample=plan.sample is not None)
        self._files = files
        self._selection = selection
        self._plan = plan
        self._report = report_progress
        self._num_done = 0
        self._pool = ThreadPoolExecutor(plan.jobs)

    def __enter__(self) -> Work:
        # Parsing makes millions of objects and hardly a cycle: looking for cycles often would cost a third of the time.
        self._thresholds = gc.get_threshold()
        gc.set_threshold(50_000, *self._thresholds[1:])
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        gc.set_threshold(*self._thresholds)

    def outcomes(self, found: Iterable[PairBatch | FilePair]) -> Iterator[tuple[PairBatch, list[Compared]]]:
        """Yield batches in order with their outcomes, while the threads work on later ones."""
        waiting: deque[Future[_Begun | _Twins]] = deque()
        for batch in found:
            waiting.append(self._pool.submit(self._begin, batch))
            if len(waiting) >= max(MIN_AHEAD, 2 * self._plan.jobs):
                yield self._finish(waiting.popleft().result())
        while waiting:
            yield self._finish(waiting.popleft().result())

    def _begin(self, found: PairBatch | FilePair) -> _Begun | _Twins:
        if isinstance(found, PairBatch):
            return self._cut(found, NOTHING_KNOWN)
        return self._begin_twins(found) or self._cut(found.read(), NOTHING_KNOWN)

    def _begin_twins(self, found: FilePair) -> _Twins | None:
        """Begin to compare two files as a whole; None if that is pointless, or would read more than was asked for."""
        if found.paths is None:
            return None
        has_digest = self._plan.have_one_digest(*found.paths)
        is_partial = self._plan.sample is not None or self._selection != Selection()
        num_bytes = self._common_size(found.paths)
        if num_bytes is None or (is_partial and not has_digest):
            return None
        step = _portion_bytes(num_bytes)
        starts = () if has_digest else range(0, num_bytes, step)
        pieces = [_range_piece(found.paths, start, min(step, num_bytes - start)) for start in starts]
        portions = self._started([[piece] for piece in pieces], set())
        return _Twins(found, found.paths, num_bytes, found.read_a(), portions)

    def _common_size(self, paths: tuple[Path, Path]) -> int | None:
        try:
            sizes = {len(self._files.get(path)) for path in paths}
        except UnreadableFile:
            return None
        return sizes.pop() if len(sizes) == 1 else None

    def _cut(self, batch: PairBatch, same: _Same) -> _Begun:
        pairs = [pair for pair in batch.pairs if self._selection.takes(either(pair).name, either(pair).role)]
        read = pairs if self._plan.sample is None else [self._sampled(pair) for pair in pairs]
        differing = {index for index, pair in enumerate(read) if known_without_bytes(pair) is False}
        pieces = [piece for index, pair in enumerate(read) for piece in _pieces(index, pair, same)]
        portions = self._started(list(_portions(pieces)), differing)
        return _Begun(batch, pairs, read, differing, portions)

    def _sampled(self, pair: TensorPair) -> TensorPair:
        from bigsci_launch.weights.compare.sample import sampled_pair

        assert self._plan.sample is not None
        return sampled_pair(pair, self._plan.sample)

    def _started(self, portions: Sequence[Sequence[Piece]], differing: set[int]) -> list[Future[_Found]]:
        if len(portions) != 1:
            return [self._pool.submit(self._compare, portion, differing) for portion in portions]
        done: Future[_Found] = Future()
        done.set_result(self._compare(portions[0], differing))
        return [done]

    def _compare(self, portion: Sequence[Piece], differing: set[int]) -> _Found:
        """Compare one portion. Pieces of a pair that is known to differ are skipped."""
        num_bytes = sum(piece.num_bytes for piece in portion)
        lost = []
        for piece in portion:
            if piece.index in differing:
                continue
            try:
                if not self._is_equal(piece):
                    differing.add(piece.index)
            except UnreadableFile as error:
                lost.append((piece.index, Unreadable(error.path, error.why)))
        return _Found(num_bytes, tuple({piece.index for piece in portion} & differing), tuple(lost))

    def _is_equal(self, piece: Piece) -> bool:
        return equal_segments(piece.a, piece.b, self._files) if piece.a else is_equal(piece.pair, self._files)

    def _finish(self, begun: _Begun | _Twins) -> tuple[PairBatch, list[Compared]]:
        """Wait for a batch. Files that turn out not to be the same are parsed, and compared tensor by tensor."""
        if isinstance(begun, _Begun):
            return self._collected(begun)
        found = [self._noted(portion) for portion in begun.portions]
        batch = begun.files.read_twin(begun.left) if all(each.is_equal for each in found) else None
        if batch is None:
            # What is read again is counted then.
            self.extent.num_read -= sum(each.num_bytes for each in found if not each.is_equal)
            same = _Same(begun.paths, _portion_bytes(begun.num_bytes), tuple(each.is_equal for each in found))
            return self._collected(self._cut(begun.files.read(begun.left), same))
        for path in begun.paths:
            self._files.close(path)
        if not begun.portions:
            self.extent.num_by_digest += begun.num_bytes
            self.extent.num_files_by_digest += 1
        pairs = (pair for pair in batch.pairs if self._selection.takes(either(pair).name, either(pair).role))
        return batch, [Compared(pair, is_equal=True, read=pair) for pair in pairs]

    def _collected(self, begun: _Begun) -> tuple[PairBatch, list[Compared]]:
        lost: dict[int, Unreadable] = {}
        differing = begun.differing
        for portion in begun.portions:
            found = self._noted(portion)
            differing.update(found.differing)
            lost.update(found.lost)
        compared = [
            Compared(pair, index not in differing, read)
            for index, (pair, read) in enumerate(zip(begun.pairs, begun.read, strict=True))
            if index not in lost
        ]
        unreadable = {item.path: item for item in lost.values()}.values()
        return replace(begun.batch, unreadable=(*begun.batch.unreadable, *unreadable)), compared

    def _noted(self, portion: Future[_Found]) -> _Found:
        found = portion.result()
        self.extent.num_read += found.num_bytes
        self._num_done += found.num_bytes
        self._report(self._num_done)
        return found


def either(pair: TensorPair) -> StoredTensor:
    """Return A's tensor, or B's if A has none."""
    tensor = pair[0] or pair[1]
    assert tensor is not None
    return tensor


def _portion_bytes(num_bytes: int) -> int:
    return max(PORTION_BYTES, num_bytes // MAX_PORTIONS)


def _range_piece(paths: tuple[Path, Path], start: int, length: int) -> Piece:
    a, b = ((Segment(path, start, length),) for path in paths)
    return Piece(0, (None, None), a, b)


def _pieces(index: int, pair: TensorPair, same: _Same) -> Iterator[Piece]:
    """Cut a pair into pieces of at most one portion; none if it is known already whether it is equal."""
    a, b = pair
    if a is None or b is None or known_without_bytes(pair) is not None or same.covers(a, b):
        return
    if a.chunks or b.chunks or not a.has_bytes or not b.has_bytes:
        yield Piece(index, pair)
        return
    length = sum(segment.num_bytes for segment in a.segments)
    step = _portion_bytes(length)
    if length <= step:
        yield Piece(index, pair, a.segments, b.segments)
        return
    for start in range(0, length, step):
        ranges = (cut_segments(one.segments, start, min(start + step, length)) for one in (a, b))
        yield Piece(index, pair, *ranges)


def _portions(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    portion: list[Piece] = []
    size = 0
    for piece in pieces:
        portion.append(piece)
        size += piece.num_bytes
        if size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def known_without_bytes(pair: TensorPair) -> bool | None:
    """Whether two tensors are bit-identical, as far as that is known without reading them; None if it is not."""
    a, b = pair
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or a.strides != b.strides:
        return False
    if not a.has_shape or not b.has_shape:
        return a.printed == b.printed
    if a.digest is not None or b.digest is not None:
        return a.digest == b.digest if a.digest is not None and b.digest is not None else None
    if a.chunks or b.chunks:
        return None
    sizes = [sum(segment.num_bytes for segment in one.segments) for one in (a, b)]
    return None if sizes[0] == sizes[1] else False


def is_equal(pair: TensorPair, files: FilePool) -> bool:
    """Whether two tensors are known to be bit-identical, without looking at their values."""
    known = known_without_bytes(pair)
    a, b = pair
    if known is not None or a is None or b is None:
        return bool(known)
    if a.digest is not None or b.digest is not None:
        from bigsci_launch.weights.formats.digests import digest_of

        return digest_of(a, files) == digest_of(b, files)
    if a.chunks or b.chunks:
        return is_equal_by_chunks(a, b, files)
    # A strided tensor's span has other tensors' bytes too: equal spans prove equality, unequal spans prove nothing.
    return equal_segments(a.segments, b.segments, files)


def is_equal_by_chunks(a: StoredTensor, b: StoredTensor, files: FilePool) -> bool:
    """Whether two tensors of one dtype and shape are bit-identical, where at least one consists of chunks."""
    return all(_is_equal_box(overlap, files) for overlap in overlaps(a, b))


def _is_equal_box(overlap: Overlap, files: FilePool) -> bool:
    segments = []
    for chunk in (overlap.a, overlap.b):
        span = run_in(chunk.tensor.shape, inside(chunk, overlap.offsets), overlap.shape)
        if span is None or chunk.tensor.strides is not None or chunk.tensor.dtype in PACKED_DTYPES:
            return _is_equal_scattered(overlap, files)
        width = DTYPE_BYTES[chunk.tensor.dtype]
        segments.append(cut_segments(chunk.tensor.segments, span[0] * width, span[1] * width))
    return equal_segments(segments[0], segments[1], files)


def _is_equal_scattered(overlap: Overlap, files: FilePool) -> bool:
    """Whether a box is known to be equal whose elements are in many short runs: numpy compares those faster than
    `memcmp`, and without it, that is not known."""
    if not has_numpy():
        return False
    from bigsci_launch.weights.files.elements import are_same_bits, read_box

    for offsets, shape in pieces_of(overlap.offsets, overlap.shape, SCATTERED_ELEMENTS):
        a, b = (read_box(chunk.tensor, inside(chunk, offsets), shape, files) for chunk in (overlap.a, overlap.b))
        if not are_same_bits(a, b):
            return False
    return True


# Elements of a box that are compared at a time.
SCATTERED_ELEMENTS = 1 << 18
