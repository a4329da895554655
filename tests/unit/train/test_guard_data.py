"""What the words of a step say about the data: who is wrong is named only where it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigsci_launch.data.fingerprint import DataFingerprint
from bigsci_launch.topology import Topology
from bigsci_launch.train.guards.engine.data import compare_fingerprints, find_wrong_data, probed_micro_batch
from bigsci_launch.train.steps.word import DataWord, decode, encode
from bigsci_launch.train.steps.word import StepWord as Word


def words(topology: Topology) -> list[DataWord]:
    """A healthy step: dp rank d reads 100 + d, its probed sample is 200 + d; middle stages read nothing."""
    found = []
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        if at.pp_rank not in (0, topology.pp - 1):
            found.append(DataWord())
            continue
        neighbour = 200 + (at.dp_rank + 1) % topology.dp if topology.dp > 1 else 0
        found.append(DataWord(100 + at.dp_rank, 200 + at.dp_rank, 200 + at.dp_rank, neighbour))
    return found


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 2, 2), (2, 3, 3)])
def test_a_healthy_step_is_silent(sizes: tuple[int, int, int]) -> None:
    topology = Topology(tp=sizes[0], pp=sizes[1], dp=sizes[2])
    assert find_wrong_data(words(topology), topology) == []


OTHER_FILE = {"read": 8, "probe": 7, "own": 7, "neighbour": 9}


@pytest.mark.parametrize(
    ("sizes", "rank", "wrong", "blamed", "part"),
    [
        ((2, 2, 1), 2, {"read": 7}, (2,), "rank 0 read"),
        ((2, 1, 1), 1, {"read": 7}, (0, 1), "unknown"),
        ((1, 1, 2), 1, {"read": 8, "probe": 7}, (1,), "due"),
        ((1, 1, 3), 1, OTHER_FILE, (1,), ""),
        ((1, 1, 2), 1, OTHER_FILE, (0, 1), "unknown"),
    ],
    ids=["most agree", "two that differ", "not what was due", "other file", "other file on one of two"],
)
def test_who_reads_other_data_is_named_where_it_is_known(
    sizes: tuple[int, int, int], rank: int, wrong: dict[str, int], blamed: tuple[int, ...], part: str
) -> None:
    topology = Topology(tp=sizes[0], pp=sizes[1], dp=sizes[2])
    said = words(topology)
    said[rank] = replace(said[rank], **wrong)
    found = find_wrong_data(said, topology)
    assert {tuple(sorted(each.ranks)) for each in found} == {blamed} and all(part in each.text for each in found)
    assert len(found) == 1 or wrong is OTHER_FILE


def test_two_replicas_on_the_same_samples_are_named() -> None:
    topology = Topology(tp=1, pp=1, dp=2)
    said = words(topology)
    said[1] = replace(said[0])
    assert all("same samples" in each.text for each in find_wrong_data(said, topology))


def test_equal_tokens_at_different_places_are_not_a_defect() -> None:
    topology = Topology(tp=1, pp=1, dp=2)
    assert find_wrong_data([DataWord(5, 6, 6, 6), DataWord(5, 6, 6, 6)], topology) == []


def fingerprint(digest: str, prefix: str = "/data/x") -> DataFingerprint:
    return DataFingerprint(prefix, 100, "index", digest, None)


def test_the_dataset_of_the_minority_is_named_and_a_tie_is_not_decided() -> None:
    assert compare_fingerprints([fingerprint("a"), fingerprint("a", "/local/x"), fingerprint("a")]) == []
    (found,) = compare_fingerprints([fingerprint("a"), fingerprint("b"), fingerprint("a")])
    assert found.ranks == (1,)
    (found,) = compare_fingerprints([fingerprint("a"), fingerprint("b")])
    assert found.ranks == (0, 1) and "unknown" in found.text


def test_a_word_survives_its_way() -> None:
    word = Word(True, False, True, -0.1, DataWord(-(1 << 63), 1, 2, (1 << 63) - 1))
    assert decode(encode(word)) == word
    assert str(decode(encode(replace(word, loss=float("nan")))).loss) == "nan"


def test_the_probed_micro_batch_moves() -> None:
    assert {probed_micro_batch(64 * step, 4) for step in range(50)} == {0, 1, 2, 3}
