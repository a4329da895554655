"""The table of words, `diagnostics/endings/*.ini`: lines about the end of a job, who speaks, and who is named.

A word that is not in the table says nothing. Of the words that a line holds, the first of the table counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bigsci_launch.entries import Entry, read_entries
from bigsci_launch.errors import ConfigError

FOLDER = "endings"
SPEAKERS = ("cause", "victim", "witness", "echo", "register")
"""Who prints a word: the process that failed; one that another one took with it; one that saw it and names it; one
that only repeats that it ends; or a launcher that lists which rank is where, or which process it ended."""
GROUPS = frozenset(
    {"by", "rank", "ranks", "local_rank", "tasks", "node", "server", "address", "device", "key", "pid", "code", "what"}
    | {"signal", "came", "size", "time", "members", "own", "other", "others"}
)
"""What a pattern may name. A digit at the end tells alternatives apart: `what2` is `what`."""
FIELDS = ("holds", "line", "speaker", "kind", "says", "next", "sure", "ends", "within", "example")
ANY_TRACEBACK = "traceback"
LONGEST = 4000
"""More of a line is not looked at."""


@dataclass(frozen=True, slots=True)
class EndWord:
    """One entry of the table."""

    name: str
    """`gloo: timed out`: the program, and what it says."""
    pattern: re.Pattern[str]
    holds: tuple[str, ...]
    """One of these, in lower case, is in each line that the pattern finds: looking for them is fast."""
    speaker: str
    kind: str
    says: str
    next: str = ""
    is_sure: bool = True
    ends: re.Pattern[str] | None = None
    """Where a word of several lines ends; they are read as one."""
    within: str = ""
    """What the traceback above it must hold; `traceback` stands for any."""

    @property
    def is_generic(self) -> bool:
        """Whether it finds the end of any traceback: then every other word says more."""
        return self.within == ANY_TRACEBACK

    def found_in(self, text: str) -> FoundWord | None:
        """Return what it names in a text; None if the text does not hold it."""
        match = self.pattern.search(text[:LONGEST])
        return FoundWord(self, _named(match)) if match else None


class FoundWord(NamedTuple):
    """A word that a text holds, and what it names."""

    word: EndWord
    named: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EndWords:
    """The whole table."""

    all: tuple[EndWord, ...]
    hints: tuple[tuple[str, tuple[EndWord, ...]], ...]
    """Words by what their lines hold."""

    def narrowed(self, text: str) -> EndWords:
        """Return those that a long text may hold: to look for them in each of its lines is fast then."""
        lower = text.lower()
        hints = tuple((hint, words) for hint, words in self.hints if hint in lower)
        kept = {id(word) for _, words in hints for word in words}
        return EndWords(tuple(word for word in self.all if id(word) in kept or word.is_generic), hints)

    def candidates(self, text: str) -> list[EndWord]:
        """Return the words that a text may hold, in the order of the table, without the generic ones."""
        lower = text.lower()
        found = {id(word) for hint, words in self.hints if hint in lower for word in words}
        return [word for word in self.all if id(word) in found] if found else []

    def find(self, text: str, calls: str | None = None) -> FoundWord | None:
        """Return the first word of the table that a text holds; None if it holds none. `calls` is the traceback that it
        ends, if it ends one."""
        text = text[:LONGEST]
        late = [word for word in self.all if word.is_generic] if calls is not None else []
        for word in [*self.candidates(text), *late]:
            is_there = word.is_generic or not word.within or word.within in (calls or "")
            if is_there and (found := word.found_in(text)):
                return found
        return None

    def opening(self, text: str) -> EndWord | None:
        """Return the word of several lines that begins with a line; None if none does."""
        return next((word for word in self.candidates(text[:LONGEST]) if word.ends is not None), None)


@cache
def read_words() -> EndWords:
    """Return the table that comes with the package, with the files on `$BSL_PATH` before it.

    Raises:
        ConfigError: an entry is wrong; it names the file.
    """
    return table_of(read_entries(FOLDER))


def table_of(entries: Iterable[Entry]) -> EndWords:
    """Return the words of these entries."""
    words = tuple(_word(entry) for entry in entries)
    hints: dict[str, list[EndWord]] = {}
    for word in words:
        for hint in word.holds:
            hints.setdefault(hint, []).append(word)
    return EndWords(words, tuple((hint, tuple(found)) for hint, found in hints.items()))


def _word(entry: Entry) -> EndWord:
    fields = entry.fields
    where = f"{entry.file} [{entry.name}]"
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}", hint=f"fields are {', '.join(FIELDS)}")
    if missing := sorted({"line", "speaker", "kind", "says"} - fields.keys()):
        raise ConfigError(f"{where} has no {missing[0]!r}")
    if fields["speaker"] not in SPEAKERS:
        raise ConfigError(f"{where}: speaker {fields['speaker']!r} is none of {', '.join(SPEAKERS)}")
    within = fields.get("within", "")
    holds = tuple(each.strip().lower() for each in fields.get("holds", "").split(" | ") if each.strip())
    if not holds and within != ANY_TRACEBACK:
        raise ConfigError(f"{where} has no 'holds': a text that is in each of its lines")
    return EndWord(
        name=f"{entry.file.rpartition('/')[2].removesuffix('.ini').lstrip('0123456789-')}: {entry.name}",
        pattern=_pattern(fields["line"], where),
        holds=holds,
        speaker=fields["speaker"],
        kind=fields["kind"],
        says=fields["says"],
        next=fields.get("next", ""),
        is_sure=fields.get("sure") != "no",
        ends=_pattern(fields["ends"], where) if "ends" in fields else None,
        within=within,
    )


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        found = re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"{where}: {text!r} is no regular expression: {error}") from error
    if unknown := sorted({_plain(group) for group in found.groupindex} - GROUPS):
        raise ConfigError(
            f"{where}: nothing reads the group {unknown[0]!r}", hint=f"groups: {', '.join(sorted(GROUPS))}"
        )
    return found


def _named(match: re.Match[str]) -> dict[str, str]:
    return {_plain(name): value for name, value in match.groupdict().items() if value}


def _plain(group: str) -> str:
    return group.rstrip("0123456789")
