"""What every rank tells all others once per step, in a single collective.

The ranks decide from these words alike: whether to stop at the end of the step, whether a guard must be heard, and
whether all of them train on the data that they should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from bigsci_launch.train.rank.bits import as_bits, as_number
from bigsci_launch.train.rank.exchange import Exchange


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
    """What is requested of all ranks; rank 0 alone knows it."""

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
    save_ended: bool = False
    """A save in the background has ended (rank 0 knows how), or the disk has refused this rank's part of it."""


def exchange_words(word: StepWord, device: torch.device) -> list[StepWord]:
    """Return the words of all ranks, by rank; a collective call of all ranks."""
    row = encode(word)
    return [decode(found) for found in Exchange(device).rows(row, len(row)).tolist()]


def encode(word: StepWord) -> list[int]:
    """Return a word as signed 64-bit integers; the loss keeps its bits."""
    digests = [getattr(word.data, each.name) for each in fields(DataWord)]
    asked = word.asked
    of_asked = (asked.save, asked.stop, asked.is_exact)
    flags = (word.wants_stop, word.skipped, word.alarm, *of_asked, word.thrashes, word.save_ended)
    return [sum(flag << bit for bit, flag in enumerate(flags)), as_bits(word.loss), *digests]


def decode(row: Sequence[int]) -> StepWord:
    """Return the word that `encode` made."""
    flags, loss, *digests = row
    wants_stop, skipped, alarm, *asked, thrashes, save_ended = (bool(flags >> bit & 1) for bit in range(8))
    data = DataWord(*digests)
    return StepWord(wants_stop, skipped, alarm, as_number(loss), data, AskedWord(*asked), thrashes, save_ended)
