"""Reads the directory of a zip file, or of a zip inside a file, strictly: two readers may never see two contents.

A zip names each record twice: in its directory at the end, and in a local header before the bytes. Readers differ in
which of the two they believe, so a file in which they disagree is refused. So are records that share bytes or a name.
The format is PKWARE's APPNOTE.TXT 6.3.10, with its zip64 extension.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bigsci_launch.weights.files.mapped import MappedFile, UnreadableFile

# Records of one file. A checkpoint has one for each tensor.
MAX_RECORDS = 200_000
STORED, DEFLATED = 0, 8
# Flags of a record: encrypted, by one scheme or another.
ENCRYPTED = 0x0001 | 0x0040 | 0x2000
WRITTEN_IN_A_STREAM = 0x0008
FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF
MAX_COMMENT = 0xFFFF

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record: its bytes are at `offset` in the file, `stored_bytes` long, and `num_bytes` once inflated."""

    name: str
    offset: int
    num_bytes: int
    stored_bytes: int
    crc: int
    is_deflated: bool


@dataclass(frozen=True, slots=True)
class _Listed:
    """A record as the directory lists it; `header` is where its local header begins, from the start of the zip."""

    name: bytes
    method: int
    crc: int
    stored_bytes: int
    num_bytes: int
    header: int


def read_zip(file: MappedFile, start: int = 0, length: int | None = None) -> dict[str, ZipRecord]:
    """Return the records of the zip that fills `length` bytes of a file from `start`, by name, in their order there.

    Raises:
        UnreadableFile: it is no zip, is truncated, or can be read in more than one way.
    """
    last = len(file) if length is None else start + length
    if not 0 <= start <= last <= len(file):
        raise UnreadableFile(file.path, f"truncated after {len(file):,} bytes: it should have {last:,}")
    return _Reader(file, start, last).records()


class _Reader:
    """Reads one zip. All offsets count from its first byte, which is at `start` of the file."""

    def __init__(self, file: MappedFile, start: int, last: int) -> None:
        self._file = file
        self._start = start
        self._length = last - start

    def records(self) -> dict[str, ZipRecord]:
        first, size, count = self._directory()
        listed = list(self._listed(first, size, count))
        ordered = sorted(listed, key=lambda entry: entry.header)
        places = {entry.name: place for entry, place in zip(ordered, self._places(ordered, first), strict=True)}
        if len(places) < len(listed):
            self._refuse("two records have one name")
        return {
            name: ZipRecord(
                name,
                self._start + places[entry.name],
                entry.num_bytes,
                entry.stored_bytes,
                entry.crc,
                entry.method == DEFLATED,
            )
            for entry in listed
            for name in (entry.name.decode("utf-8", "surrogateescape"),)
        }

    def _refuse(self, why: str) -> NoReturn:
        raise UnreadableFile(self._file.path, why)

    def _unpack(self, form: struct.Struct, at: int) -> tuple[int, ...]:
        if at < 0 or at + form.size > self._length:
            self._refuse(f"truncated or damaged: a zip header would be at byte {at:,} of {self._length:,}")
        return form.unpack_from(self._file.memory, self._start + at)[1:]

    def _bytes(self, at: int, length: int) -> bytes:
        return self._file.memory[self._start + at : self._start + at + length]

    def _directory(self) -> tuple[int, int, int]:
        """Return where the directory begins, its size, and the number of records."""
        tail = self._bytes(max(0, self._length - _END.size - MAX_COMMENT), _END.size + MAX_COMMENT)
        tail = tail[: self._length]
        found = tail.rfind(b"PK\x05\x06", 0, len(tail) - _END.size + 4)
        at = self._length - len(tail) + found
        if found < 0:
            self._refuse(f"truncated after {self._length:,} bytes: the zip directory is missing")
        disk, first_disk, here, count, size, first, comment = self._unpack(_END, at)
        if at + _END.size + comment != self._length:
            self._refuse("damaged: bytes follow the end of its zip directory")
        after = at
        if at >= _LOCATOR.size and self._bytes(at - _LOCATOR.size, 4) == b"PK\x06\x07":
            after, numbers = self._directory_64(at - _LOCATOR.size)
            narrow = ((disk, FULL_16), (first_disk, FULL_16), (here, FULL_16), (count, FULL_16))
            for (value, full), wide in zip((*narrow, (size, FULL_32), (first, FULL_32)), numbers, strict=True):
                if value not in (full, wide):
                    self._refuse("damaged: the two ends of its zip directory disagree")
            disk, first_disk, here, count, size, first = numbers
        if disk or first_disk or here != count:
            self._refuse("a part of a zip that is split over several files")
        if first + size != after:
            self._refuse("damaged: its zip directory is not where its end points, or bytes were put before the zip")
        if count > MAX_RECORDS:
            self._refuse(f"has {count:,} records; at most {MAX_RECORDS:,} are read")
        return first, size, count

    def _directory_64(self, locator: int) -> tuple[int, tuple[int, ...]]:
        """Return where the zip64 end begins, and its numbers in the order of the plain end."""
        disk, at, num_disks = self._unpack(_LOCATOR, locator)
        if self._bytes(at, 4) != b"PK\x06\x06" or disk or num_disks != 1:
            self._refuse("damaged: the end of its zip64 directory is missing")
        size, _made_by, _needed, *numbers = self._unpack(_END_64, at)
        if at + 12 + size != locator:
            self._refuse("damaged: the end of its zip64 directory has the wrong length")
        return at, tuple(numbers)

    def _listed(self, first: int, size: int, count: int) -> Iterator[_Listed]:
        if count * _ENTRY.size > size:
            self._refuse("damaged: its zip directory is too short for its number of records")
        directory = self._bytes(first, size)
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > size or directory[at : at + 4] != b"PK\x01\x02":
                self._refuse(f"damaged: an entry of its zip directory has no signature, at byte {first + at:,}")
            entry = _ENTRY.unpack_from(directory, at)
            flags, method, crc, stored_bytes, num_bytes = entry[3], entry[4], *entry[7:10]
            name_length, extra_length, comment_length, header = *entry[10:13], entry[16]
            at += _ENTRY.size
            name = directory[at : at + name_length]
            if FULL_32 in (stored_bytes, num_bytes, header):
                extra = directory[at + name_length : at + name_length + extra_length]
                num_bytes, stored_bytes, header = self._wide(name, extra, (num_bytes, stored_bytes, header))
            at += name_length + extra_length + comment_length
            if entry[13]:
                self._refuse(f"damaged: record {_text(name)} is in another part of the zip")
            if flags & ENCRYPTED or method not in (STORED, DEFLATED):
                how = "encrypted" if flags & ENCRYPTED else f"compressed by method {method}"
                self._refuse(f"record {_text(name)} is {how}, which is not read")
            if method == STORED and stored_bytes != num_bytes:
                self._refuse(f"damaged: record {_text(name)} has two lengths")
            yield _Listed(name, method, crc, stored_bytes, num_bytes, header)
        if at != size:
            self._refuse("damaged: its zip directory has another length than its records")

    def _wide(self, name: bytes, extra: bytes, numbers: Sequence[int]) -> list[int]:
        """Return numbers with those that did not fit 32 bits replaced by the ones in the zip64 extra field."""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            field = extra[at + 4 : at + 4 + length]
            if kind == 1:
                missing = sum(number == FULL_32 for number in numbers)
                if len(field) < 8 * missing:
                    break
                wide = iter(struct.unpack_from(f"<{missing}Q", field))
                return [next(wide) if number == FULL_32 else number for number in numbers]
            at += 4 + length
        self._refuse(f"damaged: the length of record {_text(name)} is missing")

    def _places(self, ordered: Sequence[_Listed], directory: int) -> Iterator[int]:
        """Yield where the bytes of each record begin, given the records in the order of their headers."""
        free = 0
        for entry in ordered:
            if entry.header < free:
                self._refuse(f"damaged: record {_text(entry.name)} overlaps another one")
            if self._bytes(entry.header, 4) != b"PK\x03\x04":
                self._refuse(f"damaged: record {_text(entry.name)} has no header at byte {entry.header:,}")
            local = self._unpack(_LOCAL, entry.header)
            _needed, flags, method, _time, _date, crc, stored_bytes, num_bytes, name_length, extra_length = local
            begin = entry.header + _LOCAL.size
            name = self._bytes(begin, name_length)
            if stored_bytes == FULL_32 or num_bytes == FULL_32:
                extra = self._bytes(begin + name_length, extra_length)
                num_bytes, stored_bytes = self._wide(name, extra, (num_bytes, stored_bytes))
            is_known = not flags & WRITTEN_IN_A_STREAM or any((crc, stored_bytes, num_bytes))
            told = (crc, stored_bytes, num_bytes) if is_known else (entry.crc, entry.stored_bytes, entry.num_bytes)
            expected = (entry.name, entry.method, entry.crc, entry.stored_bytes, entry.num_bytes)
            if (name, method, *told) != expected or flags & ENCRYPTED:
                self._refuse(f"damaged: the header of record {_text(entry.name)} does not agree with the directory")
            begin += name_length + extra_length
            free = begin + entry.stored_bytes
            if free > directory:
                self._refuse(f"truncated: record {_text(entry.name)} extends past the end of the records")
            yield begin


def _text(name: bytes) -> str:
    text = name[:60].decode("ascii", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
