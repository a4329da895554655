"""What a rank of a loop that is not ours says about its step, and what the words of all ranks say of the data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigsci_launch.train.guards.copies import Violation, find_split
from bigsci_launch.train.guards.places import Members
from bigsci_launch.train.rank.bits import as_bits, as_number

SLOTS = 8
"""Digests of micro-batches in a word. Where a step has more, several share one."""
WORD_LENGTH = 3 + SLOTS


@dataclass(frozen=True, slots=True)
class LoopWord:
    """What a rank says about its step.

    Attributes:
        loss: this rank's loss; NaN too if it is not known, which `has_loss` says.
        data: digests of the tokens of the step's micro-batches, `SLOTS` of them; 0 where there is none.
        num_findings: how many findings this rank has.
    """

    loss: float
    has_loss: bool
    data: tuple[int, ...]
    num_findings: int

    def row(self) -> list[int]:
        """The word as `WORD_LENGTH` signed 64-bit integers."""
        return [as_bits(self.loss), int(self.has_loss), self.num_findings, *self.data]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> LoopWord:
        """The word that `row` made."""
        loss, has_loss, num_findings, *data = row
        return cls(as_number(loss), bool(has_loss), tuple(data), num_findings)


def find_wrong_batches(data: Sequence[int], members: Sequence[Members]) -> Iterator[Violation]:
    """Find ranks that read the wrong samples; `data` are digests of a step's tokens by rank, 0 if not known.

    Data-parallel ranks read different samples, and the ranks of a tensor-parallel group the same.
    """
    for ranks in dict.fromkeys(groups["dp"] for groups in members if "dp" in groups):
        by_digest: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_digest[data[rank]].append(rank)
        for digest, same in by_digest.items():
            if digest and len(same) > 1:
                text = "these data-parallel ranks have read the same samples"
                yield Violation("data", "batch", tuple(same), text, is_decided=False)
    for ranks in dict.fromkeys(groups["tp"] for groups in members if "tp" in groups):
        split = find_split(known) if (known := {rank: data[rank] for rank in ranks if data[rank]}) else None
        if split is not None:
            text = "the ranks of a tensor-parallel group have read different samples"
            yield Violation("data", "batch", split.ranks, text, split.is_decided)
