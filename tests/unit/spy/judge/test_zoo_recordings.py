"""The verdict on a recording of every reproduction of the hang lab: right, and never harmful with less evidence.

The recordings are of real runs on 4 ranks, the culprit first, in the middle or last in turn, and on 8 ranks where that
is judged differently. `python benchmarks/hang_confusion.py` runs all of it, on 4 and 8 ranks, at every place.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.hang_lab.catalogue import Reproduction
from bigsci_launch.hang_lab.judgement import Judgement, Verdict, read_verdict
from bigsci_launch.hang_lab.judgement import judge as judge_verdict
from bigsci_launch.hang_lab.zoo import REPRODUCTIONS, find_reproduction
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.show.report import to_lines
from bigsci_launch.spy.taxonomy import State

from ..thinning import LESS, Change, Document, document_of, without_samples

ZOO = Path(__file__).parents[1] / "recordings" / "zoo"
NAME = re.compile(r"(.+)-(\d+)-ranks-culprit-(\d+)")
RECORDINGS = sorted(path.stem for path in ZOO.glob("*.json"))
MAX_BYTES = 40_000
ALSO_ON_EIGHT = ("H07", "H07-single", "H11", "H19", "H22", "H30", "H80", "H81", "H82", "H103", "H104")
"""Reproductions whose verdict on 8 ranks differs from that on 4, or once did, when some of the evidence is missing; and
H07, which other tests judge with more axes."""
NOT_HERE = {"H75": "a process with every right may read any other"}

ONE_LOOK = "a second look"


def parts_of(name: str) -> tuple[Reproduction, int, int]:
    match = NAME.fullmatch(name)
    assert match
    return find_reproduction(match[1]), int(match[2]), int(match[3])


def verdict_on(name: str, change: Change = lambda document: None, later: bool = True) -> Verdict:
    """Return what a reader sees of the verdict on recording `name`, after `change` to its documents."""
    document = document_of(f"zoo/{name}", later)
    change(document)
    evidence = Bundle(document["collection"], tuple(document["nodes"])).evidence()
    return read_verdict(to_document(evidence, judge(evidence)))


def judged(name: str, change: Change = lambda document: None, later: bool = True) -> Judgement:
    """Judge the verdict on recording `name`, after `change` to its documents."""
    reproduction, num_ranks, culprit = parts_of(name)
    return judge_verdict(verdict_on(name, change, later), reproduction, culprit, reproduction.topology(num_ranks))


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_verdict_is_right(name: str) -> None:
    assert judged(name) is Judgement.RIGHT


@pytest.mark.parametrize("name", RECORDINGS)
def test_where_it_has_just_begun_the_verdict_is_right_as_far_as_it_goes(name: str) -> None:
    assert judged(name, later=False).is_right


def without(*kinds: str) -> Change:
    def change(document: Document) -> None:
        for kind in kinds:
            LESS[kind](document)

    return change


@pytest.mark.parametrize("name", RECORDINGS)
def test_with_less_evidence_it_does_no_harm(name: str) -> None:
    for missing, change in LESS.items():
        assert not judged(name, change).is_harmful, missing


@pytest.mark.parametrize("name", RECORDINGS)
def test_with_two_kinds_less_it_does_no_harm(name: str) -> None:
    """Three pairs for each recording, always the same ones."""
    pairs = random.Random(name).sample(list(combinations(LESS, 2)), 3)
    for pair in pairs:
        assert not judged(name, without(*pair)).is_harmful, pair


@pytest.mark.parametrize("name", RECORDINGS)
def test_one_look_calls_nothing_a_hang_and_accuses_nobody(name: str) -> None:
    """A process that has ended is a fact at one look, and so is what it left in records."""
    for missing in LESS:
        shown = verdict_on(name, without(ONE_LOOK, missing))
        assert shown.state is not State.HANG, missing
        assert shown.state is State.CRASHED or not shown.suspects, missing


def without_stack(rank: int, *keys: str) -> Change:
    """py-spy had no time for one rank."""
    drop = without_samples(*keys)

    def change(document: Document) -> None:
        drop(document)
        for node in document["nodes"]:
            for sample in (sample for each in node["ranks"] if each["rank"] == rank for sample in each["samples"]):
                sample.pop("stack", None)
                sample.pop("same_stack", None)

    return change


@pytest.mark.parametrize("name", RECORDINGS)
def test_where_one_stack_could_not_be_read_it_does_no_harm(name: str) -> None:
    """gloo records no messages: a rank without a stack may wait for one, and is not accused of staying away."""
    for rank in range(4):
        assert not judged(name, without_stack(rank)).is_harmful, rank
        assert not judged(name, without_stack(rank, "recorder")).is_harmful, rank


def without_recorder(ranks: Collection[int]) -> Change:
    """Ranks whose recorder gave no answer."""

    def change(document: Document) -> None:
        for node in document["nodes"]:
            for sample in (sample for each in node["ranks"] if each["rank"] in ranks for sample in each["samples"]):
                sample.pop("recorder", None)

    return change


@pytest.mark.parametrize("name", RECORDINGS)
def test_where_one_recorder_gave_no_answer_it_does_no_harm(name: str) -> None:
    """What a rank without a recorder did is not known: it may have done the same as the one that looks odd."""
    for rank in range(4):
        assert not judged(name, without_recorder([rank])).is_harmful, rank


@pytest.mark.parametrize("name", ["H08-4-ranks-culprit-3", "H09-4-ranks-culprit-0", "H10-4-ranks-culprit-0"])
def test_where_two_recorders_gave_no_answer_it_does_no_harm(name: str) -> None:
    for pair in combinations(range(4), 2):
        assert not judged(name, without_recorder(pair)).is_harmful, pair


def thin_out(value: Any, rng: random.Random, share: float) -> Any:
    """Remove some keys and some ends of lists from `value`; recorders stay whole."""
    if isinstance(value, dict) and "stream" not in value:
        return {key: thin_out(each, rng, share) for key, each in value.items() if key in BASIC or rng.random() > share}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        kept = value[: rng.randrange(len(value))] if rng.random() < share else value
        return [thin_out(each, rng, share) for each in kept]
    return value


BASIC = ("rank", "node", "mono", "state", "tid", "pid", "threads", "name", "frames", "function", "file", "line", "fd",
         "recorder", "last_sequence")  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_missing_there_is_an_answer(seed: int) -> None:
    """Nodes under load report threads without frames, ranks without samples, and empty samples."""
    rng = random.Random(seed)
    for name in rng.sample(RECORDINGS, 20):
        document = json.loads((ZOO / f"{name}.json").read_text())
        for node in document["nodes"]:
            for rank in node["ranks"]:
                samples = rank["samples"][: rng.choice([0, 1, 2, 2, 2])]
                rank["samples"] = thin_out(samples, rng, rng.choice([0.01, 0.05, 0.2]))
        evidence = Bundle(document["collection"], tuple(document["nodes"])).evidence()
        conclusion = judge(evidence)
        assert conclusion.claim
        assert len(to_lines(evidence, conclusion)) <= 40


def test_every_reproduction_is_recorded() -> None:
    recorded = {(reproduction.name, num_ranks) for reproduction, num_ranks, _ in map(parts_of, RECORDINGS)}
    on_four = {(one.name, 4) for one in REPRODUCTIONS if one.name not in NOT_HERE}
    assert recorded == on_four | {(name, 8) for name in ALSO_ON_EIGHT}


def test_the_culprits_place_varies() -> None:
    places = {(num_ranks, culprit) for _, num_ranks, culprit in map(parts_of, RECORDINGS)}
    assert {(4, 0), (4, 1), (4, 3), (8, 0), (8, 7)} <= places


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_is_small_and_names_no_machine(name: str) -> None:
    text = (ZOO / f"{name}.json").read_text()
    assert len(text) < MAX_BYTES
    assert not re.search(r'"/(home|root|tmp|work|usr|opt|etc)/|bsl-lab-|process_api', text)
