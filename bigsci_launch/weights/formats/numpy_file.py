"""Numpy's files: `.npy`, one array, and `.npz`, a zip of them. numpy/lib/_format_impl.py defines the format."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Iterator

from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import NotRead, Place, Segment, StoredTensor, StoredValue, stored_bytes
from bigsci_launch.weights.formats.inflate import inflate_records
from bigsci_launch.weights.formats.values import value_of
from bigsci_launch.weights.formats.zip_file import read_zip
from bigsci_launch.weights.objects.encode import NotPlain
from bigsci_launch.weights.objects.flatten import flatten
from bigsci_launch.weights.objects.machine import PickleMachine
from bigsci_launch.weights.objects.nodes import BadPickle, Outside

MAGIC = b"\x93NUMPY"
# The limit that numpy sets for headers of untrusted files.
MAX_HEADER = 10_000
MAX_OBJECTS = 16 << 20
DTYPES = {
    "|b1": "BOOL",
    "|i1": "I8",
    "|u1": "U8",
    **{f"<{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "I"), ("u", "U")) for size in (2, 4, 8)},
    **{f"<f{size}": f"F{8 * size}" for size in (2, 4, 8)},
    **{f"<c{size}": f"C{8 * size}" for size in (8, 16)},
}
ArrayEntry = StoredTensor | StoredValue | NotRead


def read_numpy(source: Source) -> Contents:
    """Return the arrays of a file, without reading their elements; an array of Python objects as values.

    Raises:
        UnreadableFile: the file is missing or truncated, or numpy did not write it.
    """
    with MappedFile(source.path) as file:
        of_zip = source.path.suffix == ".npz"
        found = list(_of_zip(file, source.place) if of_zip else _array(file, "", 0, len(file), source.place))
    return Contents(
        tuple(entry for entry in found if isinstance(entry, StoredTensor)),
        values=tuple(entry for entry in found if isinstance(entry, StoredValue)),
        not_read=tuple(entry for entry in found if isinstance(entry, NotRead)),
    )


def _of_zip(file: MappedFile, place: Place) -> Iterator[ArrayEntry]:
    records = read_zip(file)
    inflated = inflate_records(file, records.values())
    for record in records.values():
        name = record.name.removesuffix(".npy")
        try:
            if not record.is_deflated:
                yield from _array(file, name, record.offset, record.num_bytes, place)
            elif record.name in inflated.offsets:
                yield from _array(file, name, inflated.offsets[record.name], record.num_bytes, place, inflated.file)
            else:
                yield NotRead(name, "array", file.path, inflated.lost[record.name])
        except UnreadableFile as error:
            yield NotRead(name, "array", file.path, error.why)


def _array(
    file: MappedFile, name: str, start: int, length: int, place: Place, inflated: MappedFile | None = None
) -> Iterator[ArrayEntry]:
    """Yield the array that fills `length` bytes of a file from `start`, or of the temporary file `inflated`."""
    file = inflated or file
    header, begin = _header(file, start, length)
    dtype, shape, is_fortran = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise UnreadableFile(file.path, f"an array has the impossible shape {shape!r:.60}")
    num_bytes = start + length - begin
    if isinstance(dtype, str) and dtype[1:].startswith("O"):
        yield from _objects(file, name, begin, num_bytes, place)
        return
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    width, rest = divmod(num_bytes, max(1, math.prod(shape)))
    if rest or (known is not None and stored_bytes(known, math.prod(shape)) != num_bytes):
        raise UnreadableFile(file.path, f"an array of {dtype} {list(shape)} has {num_bytes:,} bytes")
    strides = [math.prod(shape[:index]) for index in range(len(shape))] if is_fortran and len(shape) > 1 else None
    if known is None:
        # Elements of a dtype that only numpy knows are compared byte by byte.
        shape, strides = (*shape, width), None if strides is None else [*(stride * width for stride in strides), 1]
    segment = Segment(file.path, begin, num_bytes, inflated)
    layout = None if strides is None or not num_bytes else tuple(strides)
    yield StoredTensor(name, "weight", place, known or f"{dtype}", shape, (segment,), layout)


def _header(file: MappedFile, start: int, length: int) -> tuple[dict[str, object], int]:
    head = file.memory[start : start + min(length, MAX_HEADER)]
    is_wide = len(head) > 6 and head[6] > 1
    first = 12 if is_wide else 10
    if not head.startswith(MAGIC) or len(head) < first:
        raise UnreadableFile(file.path, "not an array that numpy wrote")
    (size,) = struct.unpack_from("<L" if is_wide else "<H", head, 8)
    try:
        header = ast.literal_eval(head[first : first + size].decode("utf-8"))
        if first + size > len(head) or header.keys() != {"descr", "fortran_order", "shape"}:
            raise ValueError("it is cut, or has other entries")
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise UnreadableFile(file.path, f"not an array that numpy wrote (its header: {error!s:.60})") from error
    return header, start + first + size


def _objects(file: MappedFile, name: str, begin: int, num_bytes: int, place: Place) -> Iterator[ArrayEntry]:
    """Yield the parts of an array of Python objects, which is a pickle."""
    if num_bytes > MAX_OBJECTS:
        raise UnreadableFile(file.path, f"an array of objects has {num_bytes:,} bytes")
    try:
        tree = PickleMachine(file.memory[begin : begin + num_bytes], lambda reference: Outside(str(reference))).run()
        leaves = flatten(tree, name)
    except BadPickle as error:
        raise UnreadableFile(file.path, f"an array of objects is not read: {error}") from error
    for leaf in leaves:
        try:
            yield value_of(leaf.name, place, file.path, leaf.node)
        except NotPlain as error:
            yield NotRead(leaf.name, "object", file.path, str(error))
