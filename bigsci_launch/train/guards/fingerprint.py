"""Fingerprints of the state between two steps: what one step left is what the next one must find.

A shard of ZeRO or FSDP has no copy that it could be compared with. So a rank remembers weights, masters and moments at
the end of a step, and compares them bit by bit before the next one. A fingerprint that is `whole` is a digest of every
parameter's piece. Otherwise it holds up to `SAMPLED` elements of each piece, others after some steps, of `TENSORS`
tensors, others after each step. Where there are not more tensors, one that is zeroed, scaled or exchanged is therefore
seen always, and a single bit if it is among those elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.train.device.digest import digests64
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flat import Flat

SAMPLED, TENSORS = 256, 32
SAME_FOR = 8
"""Steps for which the same elements are looked at, because choosing them costs more than looking."""

_STRIDE = 7919
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateFingerprint:
    """The fingerprint of one rank. Nothing is known before it is taken."""

    def __init__(self, check: str, rank: int) -> None:
        self._check, self._rank = check, rank
        self._step, self._turn = 0, 0
        self._places: dict[tuple[torch.device, tuple[tuple[int, int], ...]], Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the state: something is about to change the state rightly, such as a load."""
        self._bits: dict[str, Tensor] = {}
        self._digests: dict[str, dict[str, int]] = {}
        self._kinds: dict[str, tuple[int, torch.dtype]] = {}
        self._counts: dict[str, float | None] = {}

    @property
    def is_taken(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self._bits or self._digests)

    @torch.no_grad()
    def take(
        self, flats: Mapping[str, Flat], step: int, *, is_whole: bool, counts: Mapping[str, float | None] | None = None
    ) -> None:
        """Remember the state after `step`: tensors, of which `is_whole` says how much, and counts of steps."""
        if step // SAME_FOR != self._step // SAME_FOR:
            self._places = {}
        self._step, self._counts = step, dict(counts or {})
        self._kinds = {key: (len(flat.tensor), flat.tensor.dtype) for key, flat in flats.items()}
        keys = list(flats)
        self._turn = (self._turn + TENSORS) % max(1, len(keys))
        chosen = [*keys[self._turn :], *keys[: self._turn]][:TENSORS]
        self._digests = _digests(flats) if is_whole else {}
        self._bits = {} if is_whole else {key: self._sample(flats[key]) for key in chosen}

    def _sample(self, flat: Flat) -> Tensor:
        return _bits(flat.tensor).index_select(0, self._at(flat))

    def _at(self, flat: Flat) -> Tensor:
        key = flat.tensor.device, tuple(flat.slices.values())
        if key not in self._places:
            self._places[key] = sample_of(key[1], self._step, device=key[0])
        return self._places[key]

    @torch.no_grad()
    def find_changed(
        self, flats: Mapping[str, Flat], counts: Mapping[str, float | None] | None = None
    ) -> Iterator[Violation]:
        """Find what differs from the state of the fingerprint: one violation for each tensor and count."""
        flats = {
            key: each for key, each in flats.items() if self._kinds.get(key) == (len(each.tensor), each.tensor.dtype)
        }
        for key in self._changed(flats):
            if key not in flats:
                yield self._violation(key, "is gone, or of another size or type")
            elif names := self._names(key, flats[key]):
                more = f" (and of {len(names) - 1} more tensors)" if len(names) > 1 else ""
                what = self._what(key, flats[key], names[0])
                yield self._violation(flats[key].title.format(names[0]), f"{what}{more}")
        for name, before in self._counts.items():
            if (now := (counts or {}).get(name)) != before:
                text = f"was {_shown(before)} after step {self._step}, and is {now} before the next"
                yield Violation(self._check, name, (self._rank,), text)

    def _violation(self, name: str, what: str) -> Violation:
        text = f"changed after the end of step {self._step}, when nothing may change it: {what}"
        return Violation(self._check, name, (self._rank,), text)

    def _changed(self, flats: Mapping[str, Flat]) -> list[str]:
        """Return the keys of the tensors that differ or are gone; waits for a device once."""
        recorded = self._digests or self._bits
        present = [key for key in recorded if key in flats]
        if self._digests:
            now = _digests({key: flats[key] for key in present})
            return [key for key in recorded if now.get(key) != recorded[key]]
        differs = [(self._sample(flats[key]) != self._bits[key]).any() for key in present]
        is_changed = dict(zip(present, torch.stack(differs).tolist() if differs else [], strict=True))
        return [key for key in recorded if is_changed.get(key, True)]

    def _names(self, key: str, flat: Flat) -> list[str]:
        """Return the parameters whose elements differ."""
        if key in self._digests:
            now = _digests({key: flat})[key]
            return [name for name, digest in self._digests[key].items() if now.get(name) != digest]
        places = self._at(flat)[self._sample(flat) != self._bits[key]]
        return [name for name, bounds in flat.slices.items() if bool(_is_inside(places, bounds).any())]

    def _what(self, key: str, flat: Flat, name: str) -> str:
        """Return what became of the elements of a parameter."""
        if not bool(flat.pieces()[name].any()):
            return "it is zero"
        if key not in self._bits:
            return "its digest differs"
        at = self._at(flat)
        is_here = _is_inside(at, flat.slices[name])
        old = self._bits[key][is_here].view(flat.tensor.dtype).double()
        new = flat.tensor[at[is_here]].double()
        count = int((old != new).sum())
        moved = (new / old)[(old != 0) & (old != new)]
        factor = f", each {float(moved[0]):.4g} times what it was" if _is_one_factor(moved) else ""
        return f"{count} of {len(old)} checked elements differ{factor}"


def sample_of(slices: Sequence[tuple[int, int]], step: int, count: int = SAMPLED, device: Any = None) -> Tensor:
    """Return the positions of up to `count` elements of each (start, length), others after another step."""
    bounds = torch.tensor([*slices], dtype=torch.int64, device=device).reshape(-1, 2)
    starts, sizes = bounds[:, :1], bounds[:, 1:]
    places = torch.arange(count, device=device) * sizes.clamp(min=count) // count
    kept = places < sizes
    return (starts + (places + step * _STRIDE) % sizes.clamp(min=1))[kept]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_WORDS[tensor.element_size()])


def _digests(flats: Mapping[str, Flat]) -> dict[str, dict[str, int]]:
    pieces = [(key, name, piece) for key, flat in flats.items() for name, piece in flat.pieces().items()]
    found: dict[str, dict[str, int]] = {key: {} for key in flats}
    for (key, name, _), digest in zip(pieces, digests64([piece for _, _, piece in pieces]), strict=True):
        found[key][name] = digest
    return found


def _is_inside(places: Tensor, bounds: tuple[int, int]) -> Tensor:
    start, size = bounds
    return (places >= start) & (places < start + size)


def _is_one_factor(moved: Tensor) -> bool:
    return len(moved) > 1 and bool(torch.allclose(moved, moved[0], rtol=1e-4)) and float(moved[0]) != 1


def _shown(count: float | None) -> str:
    return "not there" if count is None else f"{count:g}"
