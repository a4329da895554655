"""The values of floats of 8 bits and fewer, which numpy does not know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A float of 8 bits or fewer. `codes` says what its uppermost codes mean, apart from numbers.

    ieee: infinities and NaN; nan: NaN in the last code of each sign; fnuz: no negative zero, whose code is the NaN;
    none: numbers only. Definitions: OCP's specifications of 8-bit and microscaling formats, and ml_dtypes.
    """

    exponent_bits: int
    mantissa_bits: int
    codes: Literal["ieee", "nan", "fnuz", "none"]

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def values(self) -> npt.NDArray[Any]:
        """Return the values of all codes of a byte; bits above the sign are ignored."""
        code = np.arange(256)
        magnitude = code & (self.sign - 1)
        bias = (1 << (self.exponent_bits - 1)) - (self.codes != "fnuz")
        exponent, steps = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        mantissa = steps / (1 << self.mantissa_bits)
        value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
        if self.codes == "ieee":
            top = exponent == (1 << self.exponent_bits) - 1
            value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
        elif self.codes == "nan":
            value[magnitude == self.sign - 1] = np.nan
        value = np.where(code & self.sign, -value, value)
        if self.codes == "fnuz":
            value[(code & (2 * self.sign - 1)) == self.sign] = np.nan
        return value.astype(np.float32)


SMALL_FLOATS = {
    "F8_E4M3": SmallFloat(4, 3, "nan"),
    "F8_E5M2": SmallFloat(5, 2, "ieee"),
    "F8_E4M3FNUZ": SmallFloat(4, 3, "fnuz"),
    "F8_E5M2FNUZ": SmallFloat(5, 2, "fnuz"),
    "F6_E2M3": SmallFloat(2, 3, "none"),
    "F6_E3M2": SmallFloat(3, 2, "none"),
    "F4": SmallFloat(2, 1, "none"),
}
# A scale: a power of two without sign or zero, whose last code is NaN.
SCALE = "F8_E8M0"


@cache
def values_of_codes(dtype: str) -> npt.NDArray[Any]:
    """Return the values of all codes of a small float, as float32."""
    if dtype != SCALE:
        return SMALL_FLOATS[dtype].values()
    scales = 2.0 ** (np.arange(256) - 127)
    scales[255] = np.nan
    return scales.astype(np.float32)


def ordered_codes(codes: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return codes as integers in the order of their values, with both zeros as 0."""
    if dtype == SCALE:
        return codes
    sign = SMALL_FLOATS[dtype].sign
    # An 8-bit magnitude fits a signed byte, and so does its negative.
    magnitude = (codes & (sign - 1)).astype(np.int8)
    return np.where(codes & sign, -magnitude, magnitude)
