"""The table of words: each entry finds its own example, and a wrong one is named."""

from __future__ import annotations

import pytest

from bigsci_launch.endings.words import FOLDER, SPEAKERS, read_words, table_of
from bigsci_launch.entries import Entry, read_entries
from bigsci_launch.errors import ConfigError
from bigsci_launch.launch.job.frozen import CONTENT

ENTRIES = read_entries(FOLDER)
GOOD = {"holds": "boom", "line": r"boom of rank (?P<rank>\d+)", "speaker": "cause", "kind": "crashed", "says": "boom"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.file.rpartition('/')[2]}: {entry.name}")
def test_an_entry_finds_its_example_before_any_other_does(entry: Entry) -> None:
    found = read_words().find(entry.fields["example"], entry.fields.get("within"))
    assert found is not None
    assert found.word.name == f"{entry.file.rpartition('/')[2].removesuffix('.ini')}: {entry.name}"
    assert found.word.speaker in SPEAKERS


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.file.rpartition('/')[2]}: {entry.name}")
def test_an_entry_is_found_in_a_long_text_too(entry: Entry) -> None:
    text = f"step 1\n{entry.fields['example']}\nstep 2"
    narrowed = read_words().narrowed(text)
    assert len(narrowed.hints) < len(read_words().hints)
    calls = entry.fields.get("within")
    assert narrowed.find(entry.fields["example"], calls) == read_words().find(entry.fields["example"], calls)


def test_the_program_of_a_job_script_has_the_table() -> None:
    assert FOLDER in CONTENT


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": "red"}, "colour"),
        ({"speaker": "bystander"}, "bystander"),
        ({"line": "("}, "regular expression"),
        ({"line": "(?P<shoe>x)"}, "shoe"),
        ({"holds": ""}, "holds"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, str], named: str) -> None:
    table_of([Entry("ours/feeder.ini", "boom", GOOD)])
    with pytest.raises(ConfigError, match=named) as error:
        table_of([Entry("ours/feeder.ini", "boom", {**GOOD, **change})])
    assert "ours/feeder.ini [boom]" in str(error.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="kind"):
        table_of([Entry("a.ini", "b", {name: value for name, value in GOOD.items() if name != "kind"})])
