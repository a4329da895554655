"""Floats among the 64-bit integers that ranks exchange."""

from __future__ import annotations

import struct


def as_bits(number: float) -> int:
    """Return the bits of a float as a signed 64-bit integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def as_number(bits: int) -> float:
    """Return the float that `as_bits` made `bits` of."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
