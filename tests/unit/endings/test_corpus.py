"""Ends of jobs in the forms in which they are published, each with its kind and who failed first."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from bigsci_launch.endings.conclude import conclude
from bigsci_launch.endings.ending import JobEnding
from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.why.sources import speaker_in

HERE = Path(__file__).parent


class Labelled(NamedTuple):
    name: str
    kind: str
    first: str
    files: dict[str, str]


def corpus(name: str) -> list[Labelled]:
    """Return the ends in a file: `=== NAME | KIND | FIRST`, then the lines, in files if `--- FILE` says so."""
    ends = []
    for part in (HERE / name).read_text().split("\n=== "):
        head, _, body = part.removeprefix("=== ").partition("\n")
        what, kind, first = head.split(" | ")
        files = {"job.out": body}
        if body.startswith("--- "):
            found = (each.partition("\n") for each in body.removeprefix("--- ").split("\n--- "))
            files = {file: text for file, _, text in found}
        ends.append(Labelled(what, kind, first, files))
    return ends


def conclude_files(files: dict[str, str]) -> JobEnding:
    said: list[Statement] = []
    ranks: set[int] = set()
    for name, text in files.items():
        speaker = speaker_in(Path(name), text) if name != "job.out" else Speaker()
        told = read_statements(text, name, speaker, read_words())
        said += told.statements
        ranks |= told.ranks
    return conclude(said, ranks)


@pytest.mark.parametrize("end", [*corpus("corpus_seen.txt"), *corpus("corpus_clusters.txt")], ids=lambda end: end.name)
def test_a_published_end_has_its_kind_and_its_first_failure(end: Labelled) -> None:
    found = conclude_files(end.files)
    assert (found.kind, str(found.culprit) if found.culprit else "-") == (end.kind, end.first), found


@pytest.mark.parametrize("end", corpus("corpus_held_out.txt"), ids=lambda end: end.name)
def test_an_end_that_was_labelled_after_the_table_was_written(end: Labelled) -> None:
    found = conclude_files(end.files)
    assert (found.kind, str(found.culprit) if found.culprit else "-") == (end.kind, end.first), found
