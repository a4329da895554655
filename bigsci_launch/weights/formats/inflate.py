"""Inflates records of a zip, small ones in memory and tensors into a temporary file, and checks their checksums."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from bigsci_launch.units import format_bytes
from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile, os_reason
from bigsci_launch.weights.formats.zip_file import ZipRecord

# Tensors that are mostly zeros shrink more than this. So do the records of a zip that was made to fill a disk.
MAX_RATIO = 16
# Bytes of the records of one file that shrink more.
MAX_ABOVE_RATIO = 256 << 20
# Bytes that are inflated at a time.
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Inflated:
    """Records of one zip in a temporary file: where each begins there, or why it is not there. No bytes, no file."""

    file: MappedFile | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


def inflate(file: MappedFile, record: ZipRecord, limit: int) -> bytes:
    """Return the bytes of a record of at most `limit` bytes.

    Raises:
        UnreadableFile: the record is larger, or is not the data that the directory promises.
    """
    if record.num_bytes > limit:
        raise UnreadableFile(
            file.path, f"record {record.name} has {format_bytes(record.num_bytes)}, more than {format_bytes(limit)}"
        )
    stored = file.memory[record.offset : record.offset + record.stored_bytes]
    if not record.is_deflated:
        # torch can be told not to compute checksums; they are then 0.
        if record.crc and zlib.crc32(stored) != record.crc:
            raise _damaged(file, record)
        return stored
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = inflater.decompress(stored, record.num_bytes + 1)
    except zlib.error as error:
        raise _damaged(file, record, error) from error
    if not inflater.eof or inflater.unused_data or len(found) != record.num_bytes or zlib.crc32(found) != record.crc:
        raise _damaged(file, record)
    return found


def inflate_records(file: MappedFile, records: Iterable[ZipRecord]) -> Inflated:
    """Inflate the deflated ones among the records of a zip, one after the other, into a file that has no name.

    Raises:
        UnreadableFile: there is no room for them.
    """
    deflated = [record for record in records if record.is_deflated]
    lost = _above_ratio(deflated)
    todo = [record for record in deflated if record.name not in lost]
    if not todo:
        return Inflated(lost=lost)
    try:
        with tempfile.TemporaryFile() as stream:
            offsets, damaged = _inflate_all(file, todo, stream)
            stream.flush()
            made = MappedFile(file.path, stream=stream) if stream.tell() else None
    except OSError as error:
        room = format_bytes(sum(record.num_bytes for record in todo))
        why = f"its compressed records need {room} in {tempfile.gettempdir()} ({os_reason(error)}); set TMPDIR"
        raise UnreadableFile(file.path, why) from error
    return Inflated(made, offsets, {**lost, **damaged})


def _above_ratio(deflated: Sequence[ZipRecord]) -> dict[str, str]:
    """Return the records that shrank most, and why they are not inflated, if they are too large together."""
    above = [record for record in deflated if record.num_bytes > MAX_RATIO * record.stored_bytes]
    if sum(record.num_bytes for record in above) <= MAX_ABOVE_RATIO:
        return {}
    return {
        record.name: f"compressed from {format_bytes(record.num_bytes)} to {format_bytes(record.stored_bytes)}; above "
        f"{MAX_RATIO} to 1, at most {format_bytes(MAX_ABOVE_RATIO)} of a file are read"
        for record in above
    }


def _inflate_all(
    file: MappedFile, records: Sequence[ZipRecord], stream: BinaryIO
) -> tuple[dict[str, int], dict[str, str]]:
    """Return where each record begins in a stream, and why those that are damaged do not."""
    offsets, damaged = {}, {}
    for record in records:
        begin = stream.tell()
        try:
            _inflate_into(file, record, stream)
            offsets[record.name] = begin
        except UnreadableFile as error:
            damaged[record.name] = error.why
    return offsets, damaged


def _inflate_into(file: MappedFile, record: ZipRecord, stream: BinaryIO) -> None:
    end = record.offset + record.stored_bytes
    file.require(end)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    at, num_bytes, crc = record.offset, 0, 0
    while not inflater.eof and num_bytes <= record.num_bytes:
        data = inflater.unconsumed_tail
        if not data:
            data = file.memory[at : min(at + CHUNK, end)]
            at += len(data)
        try:
            found = inflater.decompress(data, CHUNK) if data else inflater.flush()
        except zlib.error as error:
            raise _damaged(file, record, error) from error
        stream.write(found)
        num_bytes += len(found)
        crc = zlib.crc32(found, crc)
        if not data:
            break
    is_whole = inflater.eof and not inflater.unused_data and at == end
    if not is_whole or num_bytes != record.num_bytes or crc != record.crc:
        raise _damaged(file, record)


def _damaged(file: MappedFile, record: ZipRecord, error: zlib.error | None = None) -> UnreadableFile:
    why = f"({error})" if error else "it does not match its checksum"
    return UnreadableFile(file.path, f"record {record.name} is damaged{' ' if error else ': '}{why}")
