"""Fingerprints of the state between two steps: what one step left is what the next one must find.

A shard of ZeRO or FSDP has no copy that it could be compared with. So a rank remembers weights, masters and moments at
the end of a step, and compares them bit by bit before the next one. A fingerprint that is `whole` is a digest of every
parameter's piece. Otherwise it holds up to `SAMPLED` elements of each piece, others after some steps, of `TENSORS`
tensors, others after each step. Where there are not more tensors, one that is zeroed, scaled or exchanged is therefore
seen always, and a single bit if it is among those elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigsci_launch.train.device.digest import digests64
from bigsci_launch.train.device.gpu import Fetched, send
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.flat import Flat

SAMPLED, TENSORS = 256, 32
SAME_FOR = 8
"""Steps for which the same elements are looked at, because choosing them costs more than looking."""

_STRIDE = 7919
_GONE = "is gone, or of another size or type"
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

    def _see(self, flat: Flat, before: Tensor) -> _SeenElements:
        return _SeenElements(flat, self._at(flat), before, self._sample(flat))

    def _at(self, flat: Flat) -> Tensor:
        key = flat.tensor.device, tuple(flat.slices.values())
        if key not in self._places:
            self._places[key] = sample_of(key[1], self._step, device=key[0])
        return self._places[key]

    def find_changed(
        self, flats: Mapping[str, Flat], counts: Mapping[str, float | None] | None = None
    ) -> Iterator[Violation]:
        """Find what differs from the state of the fingerprint: one violation for each tensor and count."""
        return self.compare(flats, counts)()

    @torch.no_grad()
    def compare(
        self, flats: Mapping[str, Flat], counts: Mapping[str, float | None] | None = None
    ) -> Callable[[], Iterator[Violation]]:
        """Compare the state with the fingerprint, and return what finds the violations.

        That can be called later, when the state is another one. It waits for nothing that a device was given since.
        """
        flats = {
            key: each for key, each in flats.items() if self._kinds.get(key) == (len(each.tensor), each.tensor.dtype)
        }
        counted = [*self._find_other_counts(counts or {})]
        if self._digests:
            found = [*self._find_other_digests(flats), *counted]
            return lambda: iter(found)
        seen = {key: self._see(flats[key], bits) for key, bits in self._bits.items() if key in flats}
        recorded = [*self._bits]
        differs = Fetched(torch.stack([each.differs() for each in seen.values()])) if seen else None

        def find() -> Iterator[Violation]:
            flags = dict(zip(seen, differs.read().tolist() if differs else (), strict=True))
            for key in (key for key in recorded if flags.get(key, True)):
                yield self._violation(key, _GONE) if key not in seen else self._name(flats[key], *seen[key].found())
            yield from counted

        return find

    def _find_other_digests(self, flats: Mapping[str, Flat]) -> Iterator[Violation]:
        now = _digests({key: flats[key] for key in self._digests if key in flats})
        for key, before in self._digests.items():
            if key not in now:
                yield self._violation(key, _GONE)
            elif names := [name for name, digest in before.items() if now[key].get(name) != digest]:
                is_zero = not bool(flats[key].pieces()[names[0]].any())
                yield self._name(flats[key], names, "it is zero" if is_zero else "its digest differs")

    def _find_other_counts(self, counts: Mapping[str, float | None]) -> Iterator[Violation]:
        for name, before in self._counts.items():
            if (now := counts.get(name)) != before:
                text = f"was {_shown(before)} after step {self._step}, and is {now} before the next"
                yield Violation(self._check, name, (self._rank,), text)

    def _name(self, flat: Flat, names: Sequence[str], what: str) -> Violation:
        more = f" (and of {len(names) - 1} more tensors)" if len(names) > 1 else ""
        return self._violation(flat.title.format(names[0]), f"{what}{more}")

    def _violation(self, name: str, what: str) -> Violation:
        text = f"changed after the end of step {self._step}, when nothing may change it: {what}"
        return Violation(self._check, name, (self._rank,), text)


@dataclass(frozen=True, slots=True)
class _SeenElements:
    """The sampled elements of a tensor: their positions, and their bits when they were remembered and now."""

    flat: Flat
    at: Tensor
    before: Tensor
    now: Tensor

    def differs(self) -> Tensor:
        return (self.before != self.now).any()

    def found(self) -> tuple[list[str], str]:
        """Return the parameters whose elements differ, and what became of the first one."""
        places = self.at[self.before != self.now]
        names = [name for name, bounds in self.flat.slices.items() if bool(_is_inside(places, bounds).any())]
        is_here = _is_inside(self.at, self.flat.slices[names[0]])
        dtype = self.flat.tensor.dtype
        old, new = (bits[is_here].view(dtype).double() for bits in (self.before, self.now))
        if not bool(new.any()):
            return names, f"it is zero in all {len(new)} checked elements"
        moved = (new / old)[(old != 0) & (old != new)]
        factor = f", each {float(moved[0]):.4g} times what it was" if _is_one_factor(moved) else ""
        return names, f"{int((old != new).sum())} of {len(old)} checked elements differ{factor}"


def sample_of(
    slices: Sequence[tuple[int, int]], step: int, count: int = SAMPLED, device: torch.device | None = None
) -> Tensor:
    """Return the positions of up to `count` elements of each (start, length), others after another step."""
    bounds = torch.tensor([*slices], dtype=torch.int64).reshape(-1, 2)
    starts, sizes = bounds[:, :1], bounds[:, 1:]
    places = torch.arange(count) * sizes.clamp(min=count) // count
    kept = places < sizes
    chosen = (starts + (places + step * _STRIDE) % sizes.clamp(min=1))[kept]
    return chosen if device is None else send(chosen, device)


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
