"""Checks that every rank trains on the samples that it should.

All ranks at one place of dp read the same tokens: tp ranks for their embeddings, the last stage for its labels. Ranks
at different places read different samples. In every step each rank therefore says what it has read, and reads, in its
own copy of the dataset, one sample that the next data-parallel rank should have trained on. So another file, another
offset, a replayed batch and the same data on two replicas are seen in their step, whatever the loss does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from bigsci_launch.data.fingerprint import DataFingerprint
from bigsci_launch.topology import Topology
from bigsci_launch.train.device.digest import signed
from bigsci_launch.train.guards.copies import Violation, find_split
from bigsci_launch.train.samples.batches import Batches
from bigsci_launch.train.steps.word import DataWord

CHECK = "data"


@dataclass(slots=True)
class TakenData:
    """Sums of the digests of the micro batches of a step, whatever their order."""

    tokens: int = 0
    labels: int = 0


class DataWatch:
    """Looks at the micro batches that the engine of one rank takes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._clear()

    def _clear(self) -> None:
        self._read, self._num_read, self._probed = xxh3_64(), 0, 0
        self.taken = TakenData()

    def watch(
        self, taken: Iterator[tuple[Tensor, Tensor]], consumed_samples: int, num_micro_batches: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass on the micro batches of a step that begins after `consumed_samples`, and remember what they were."""
        self._clear()
        self._place = (consumed_samples, num_micro_batches)
        probed = probed_micro_batch(consumed_samples, num_micro_batches)
        for tokens, labels in taken:
            digests = [xxh3_64_intdigest(each.numpy().tobytes()) for each in (tokens, labels)]
            self._read.update(repr(digests).encode())
            self.taken.tokens += digests[0]
            self.taken.labels += digests[1]
            if self._num_read == probed:
                self._probed = _digest_sample(tokens[0], labels[0])
            self._num_read += 1
            yield tokens, labels

    def word(self) -> DataWord:
        """Return what this rank says of the data of the step that it has just done."""
        if not self._num_read:
            return DataWord()
        neighbour = self._due(1) if self._batches.dp > 1 else 0
        return DataWord(self.digest(), self._probed, self._due(0), neighbour)

    def digest(self) -> int:
        """Return the digest of all that was read in the step."""
        return signed(self._read.intdigest())

    def _due(self, further: int) -> int:
        """Return the digest of the probed sample that is due `further` data-parallel ranks from this one."""
        consumed, num_micro_batches = self._place
        number = probed_micro_batch(consumed, num_micro_batches)
        tokens, labels = self._batches.first_of(consumed, number, further)
        return _digest_sample(tokens, labels)


def probed_micro_batch(consumed_samples: int, num_micro_batches: int) -> int:
    """Return which micro batch's first sample is compared in the step that begins after `consumed_samples`."""
    return xxh3_64_intdigest(str(consumed_samples).encode()) % num_micro_batches


def _digest_sample(tokens: Tensor, labels: Tensor) -> int:
    return signed(xxh3_64_intdigest(tokens.numpy().tobytes() + labels.numpy().tobytes()))


def find_wrong_data(words: Sequence[DataWord], topology: Topology) -> list[Violation]:
    """Find ranks that trained on other samples than they should; `words` are those of one step, by rank."""
    text = "it did not train on the samples due in this step"
    strayed = [rank for rank, word in enumerate(words) if word.probe != word.own]
    found = [Violation(CHECK, "samples", (rank,), text) for rank in strayed]
    # A rank that is known to be wrong explains what ranks at its place and its neighbours see.
    for others in (find_other_tokens(words, topology), _find_strangers(words, topology)):
        known = {rank for violation in found for rank in violation.ranks}
        found += [each for each in others if not known & set(each.ranks)]
    return found


def find_other_tokens(words: Sequence[DataWord], topology: Topology) -> Iterator[Violation]:
    """Find ranks whose tokens or labels are not those of the ranks at the same place of dp."""
    readers: dict[int, list[int]] = defaultdict(list)
    for rank, word in enumerate(words):
        if word.read:
            readers[topology.coordinate(rank).dp_rank].append(rank)
    for ranks in readers.values():
        split = find_split({rank: words[rank].read for rank in ranks})
        if split is not None:
            text = (
                f"differ from those that rank {split.reference} read in this step"
                if split.is_decided
                else "they must read the same tokens and labels, but did not; unknown which is wrong"
            )
            yield Violation(CHECK, "tokens and labels", split.ranks, text, split.is_decided)


def _find_strangers(words: Sequence[DataWord], topology: Topology) -> Iterator[Violation]:
    """Find ranks whose probed sample is not the one that the rank before them holds at its place."""
    pairs = []
    for rank, word in enumerate(words):
        if word.read and topology.dp > 1:
            at = topology.coordinate(rank).as_dict()
            after = topology.rank_at(**{**at, "dp": (at["dp"] + 1) % topology.dp})
            if word.neighbour != words[after].probe:
                pairs.append((rank, after))
    doubted = Counter(rank for pair in pairs for rank in pair)
    for rank, after in pairs:
        if words[rank].read == words[after].read:
            yield Violation(CHECK, "samples", (rank, after), "they trained on the same samples", is_decided=False)
        elif topology.dp > 2 and doubted[rank] != doubted[after]:
            wrong = max(rank, after, key=lambda each: doubted[each])
            yield Violation(CHECK, "samples", (wrong,), "its dataset or its place in it differs from its neighbours'")
        else:
            text = "their datasets, or their places in them, differ; unknown which is wrong"
            yield Violation(CHECK, "samples", (rank, after), text, is_decided=False)


def compare_fingerprints(everywhere: Sequence[DataFingerprint]) -> list[Violation]:
    """Find ranks that opened another dataset than most; `everywhere` holds the fingerprints, by rank."""
    split = find_split({rank: each.contents for rank, each in enumerate(everywhere)})
    if split is None:
        return []
    right = everywhere[split.reference]
    wrong = next(each for rank in split.ranks if (each := everywhere[rank]).contents != right.contents)
    if split.is_decided:
        text = f"opened {_shown(wrong)}; the other ranks opened {_shown(right)}"
    else:
        text = f"ranks opened different datasets: {_shown(right)}, {_shown(wrong)}; unknown which is right"
    return [Violation(CHECK, "dataset", split.ranks, text, split.is_decided)]


def _shown(data: DataFingerprint) -> str:
    return f"{data.prefix} with {data.num_tokens} tokens, digest {data.tokens_digest[:8]}"


def saved_data(batches: Batches, consumed_samples: int) -> dict[str, Any]:
    """Return what a checkpoint keeps of the data: its fingerprint, and the last sample that was drawn."""
    return {
        **batches.fingerprint.document,
        "cursor": {"consumed_samples": consumed_samples, **_cursor(batches, consumed_samples)},
    }


def _cursor(batches: Batches, consumed_samples: int) -> dict[str, Any]:
    if consumed_samples < 1:
        return {"digest": None}
    tokens, labels = batches.at(consumed_samples - 1)
    return {"digest": f"{_digest_sample(tokens, labels) & (1 << 64) - 1:016x}"}


def is_order_kept(saved: Mapping[str, Any] | None, batches: Batches) -> bool | None:
    """Return whether this run draws, at the place of a checkpoint, the sample that the run before it drew there.

    None: the checkpoint does not say.
    """
    cursor = (saved or {}).get("cursor") or {}
    consumed, digest = cursor.get("consumed_samples"), cursor.get("digest")
    if not isinstance(consumed, int) or not isinstance(digest, str):
        return None
    return bool(_cursor(batches, consumed)["digest"] == digest)
