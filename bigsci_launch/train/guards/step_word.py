"""What every rank tells all others once per step, in a single collective.

The ranks decide from these words alike: whether to stop at the end of the step, whether a guard must be heard, and
whether all of them train on the data that they should.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class DataWord:
    """The data of a rank's step, as signed 64-bit digests; 0 where the rank read none."""

    read: int = 0
    """All tokens and labels that the engine took in this step."""
    probe: int = 0
    """One sample that the engine took, at a place that the step decides."""
    own: int = 0
    """The sample that this rank should have taken there."""
    neighbour: int = 0
    """The sample that the next data-parallel rank should have taken there, as this rank reads it."""


@dataclass(frozen=True, slots=True)
class AskedWord:
    """What people ask of all ranks; rank 0 alone knows it."""

    save: bool = False
    """To save at the end of this step."""
    stop: bool = False
    """To save and stop."""
    is_exact: bool = False
    """To stop after this very step, and not after one more that is checked."""


@dataclass(frozen=True, slots=True)
class StepWord:
    """The word of one rank about the step that it has just done."""

    wants_stop: bool
    """A signal has asked this rank to stop."""
    skipped: bool
    """The optimizer skipped the step because gradients were not finite."""
    alarm: bool
    """A guard of this rank has found something, which must be exchanged now."""
    loss: float
    """The loss that the engine reports on this rank."""
    data: DataWord = DataWord()
    asked: AskedWord = AskedWord()
    thrashes: bool = False
    """The device's memory was so short that torch had to empty its cache."""


def exchange_words(word: StepWord, device: torch.device) -> list[StepWord]:
    """Return the words of all ranks, by rank; a collective call of all ranks."""
    mine = torch.tensor(encode(word), dtype=torch.int64, device=device)
    everywhere = torch.empty(dist.get_world_size(), len(mine), dtype=torch.int64, device=device)
    dist.all_gather(list(everywhere.unbind()), mine)
    return [decode(row) for row in everywhere.tolist()]


def encode(word: StepWord) -> list[int]:
    """Return a word as signed 64-bit integers; the loss keeps its bits."""
    (loss,) = struct.unpack("<q", struct.pack("<d", word.loss))
    digests = [getattr(word.data, each.name) for each in fields(DataWord)]
    asked = word.asked
    flags = (word.wants_stop, word.skipped, word.alarm, asked.save, asked.stop, asked.is_exact, word.thrashes)
    return [sum(flag << bit for bit, flag in enumerate(flags)), loss, *digests]


def decode(row: Sequence[int]) -> StepWord:
    """Return the word that `encode` made."""
    flags, loss, *digests = row
    (value,) = struct.unpack("<d", struct.pack("<q", loss))
    wants_stop, skipped, alarm, *asked, thrashes = (bool(flags >> bit & 1) for bit in range(7))
    return StepWord(wants_stop, skipped, alarm, value, DataWord(*digests), AskedWord(*asked), thrashes)
