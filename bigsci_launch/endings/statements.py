"""What a log says about the end of its job: the lines that hold a word of the table, each with who said it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigsci_launch.endings.lines import UNKNOWN, PlainLine, Speaker, moment_of, plain_line
from bigsci_launch.endings.words import EndWord, EndWords, FoundWord
from bigsci_launch.printable import without_escapes
from bigsci_launch.topology.ranks import expand_ranks

TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
LAUNCHERS = ("torchrun:", "elastic:")
LONGEST_TRACEBACK = 200
LONGEST_BLOCK = 60
SAID_LENGTH = 300
LONGEST_NUMBER = 6
RANGE = re.compile(r"\d+(?:-\d+)?")


@dataclass(frozen=True, slots=True)
class Statement:
    """A line that holds a word of the table."""

    word: EndWord
    said: str
    named: Mapping[str, str] = field(default_factory=dict)
    speaker: Speaker = UNKNOWN
    file: str = ""
    line: int = 0
    moment: float | None = None
    printed_after: int = 0
    """How many lines without any word its speaker printed after it: a process that prints on has survived it."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def kind(self) -> str:
        return self.word.kind

    @property
    def by(self) -> int | None:
        """The rank that says it."""
        return _int(self.named.get("by")) if "by" in self.named else self.speaker.rank

    @property
    def named_ranks(self) -> tuple[int, ...]:
        """The ranks that it names; tasks of Slurm are not ranks by themselves."""
        return _numbers(self.named.get("rank") or self.named.get("ranks") or "")

    @property
    def tasks(self) -> tuple[int, ...]:
        return _numbers(self.named.get("tasks", ""))

    @property
    def node(self) -> str | None:
        """The node that it names, else the one on which it was said."""
        return self.named.get("node") or self.speaker.node

    @property
    def code(self) -> int | None:
        code = self.named.get("code", "")
        return int(code) if code and len(code) <= LONGEST_NUMBER else None


class Told(NamedTuple):
    """What one file says, in its order, and the ranks that print in it, whatever they say."""

    statements: tuple[Statement, ...]
    ranks: frozenset[int]


def read_statements(text: str, file: str, speaker: Speaker, words: EndWords) -> Told:
    """Return what the text of one file says, line by line."""
    reader = _StatementReader(file, speaker, words.narrowed(text))
    found = tuple(reader.read(text.split("\n")))
    ranks = frozenset(each.rank for each in reader.speakers if each.rank is not None)
    if any(each.word.name.startswith(LAUNCHERS) for each in found):  # then a label is the task of a launcher
        own = tuple(each if _is_own_label(each) else _without_task(each) for each in found)
        return Told(own, frozenset(each.speaker.rank for each in own if each.speaker.rank is not None))
    return Told(found, ranks)


def _is_own_label(statement: Statement) -> bool:
    """Whether the line itself names its rank. Else it is the task of a launcher, which is no rank."""
    return f"rank{statement.speaker.rank}]" in statement.said.lower().replace(" ", "")


def _without_task(statement: Statement) -> Statement:
    return replace(statement, speaker=replace(statement.speaker, rank=None))


class _StatementReader:
    """Goes through a file once. Tracebacks and blocks are of one speaker: those of ranks may be mixed in one file."""

    def __init__(self, file: str, speaker: Speaker, words: EndWords) -> None:
        self._file, self._speaker, self._words = file, speaker, words
        self.speakers: set[Speaker] = {speaker}
        self._traceback: dict[Speaker, list[str]] = {}
        self._silent: dict[Speaker, int] = {}

    def read(self, lines: Iterable[str]) -> Iterator[Statement]:
        found: list[tuple[Statement, int]] = []
        numbered = iter(enumerate(lines, 1))
        for number, raw in numbered:
            line = plain_line(raw, self._speaker)
            if (opening := self._words.opening(line.text)) is not None:
                found += self._of_block(line, _block(numbered, opening, self._speaker), number)
            elif (said := self._word_of(line)) is not None:
                found.append(self._statement(said, line, number, raw))
        for statement, silent_then in found:
            yield replace(statement, printed_after=self._silent.get(statement.speaker, 0) - silent_then)

    def _word_of(self, line: PlainLine) -> FoundWord | None:
        """Return the word of a line, and count the line for its speaker."""
        who, text = line.speaker, line.text
        self.speakers.add(who)
        if TRACEBACK in text:
            self._traceback[who] = [text]
            return None
        calls = self._traceback.get(who)
        if calls is not None and text[:1].isspace() and len(calls) < LONGEST_TRACEBACK:
            calls.append(text[:SAID_LENGTH])  # a line of source may hold any word
            return None
        is_end = calls is not None and bool(text) and not text.startswith(CHAINED)
        found = self._words.find(text, "\n".join(calls) if is_end and calls else None)
        if is_end:
            del self._traceback[who]
        elif found is None and text:
            self._silent[who] = self._silent.get(who, 0) + 1
        return found

    def _statement(self, found: FoundWord, line: PlainLine, number: int, raw: str) -> tuple[Statement, int]:
        said = " ".join(plain_said(raw).split())[:SAID_LENGTH]
        moment = moment_of(found.named["time"]) if "time" in found.named else line.moment
        statement = Statement(found.word, said, found.named, line.speaker, self._file, number, moment)
        return statement, self._silent.get(line.speaker, 0)

    def _of_block(self, first: PlainLine, block: list[PlainLine], number: int) -> Iterator[tuple[Statement, int]]:
        """Yield the statement of a block read as one line, and then what the lines in it say, said by the rank
        that it names."""
        text = " ".join(" ".join(each.text for each in [first, *block]).split())
        whole = self._words.find(text)
        if whole is None or whole.word.ends is None:
            return
        yield self._statement(whole, replace(first, text=text), number, text)
        rank, local_rank = whole.named.get("rank"), whole.named.get("local_rank")
        who = Speaker(_int(rank), whole.named.get("node"), _int(local_rank))
        for at, line in enumerate(block, number + 1):
            inner = replace(line, text=line.text.strip().removeprefix("traceback : ").strip(), speaker=who)
            if (found := self._word_of(inner)) is not None and found.word.ends is None:
                yield self._statement(found, inner, at, inner.text)


def plain_said(raw: str) -> str:
    """Return a line as it is quoted: with its label, without colours."""
    return "".join(each if each.isprintable() else " " for each in without_escapes(raw))


def _block(numbered: Iterator[tuple[int, str]], word: EndWord, speaker: Speaker) -> list[PlainLine]:
    block: list[PlainLine] = []
    for _, raw in numbered:
        line = plain_line(raw, speaker)
        if (word.ends and word.ends.search(line.text)) or len(block) == LONGEST_BLOCK:
            break
        block.append(line)
    return block


def _numbers(text: str) -> tuple[int, ...]:
    listed = ",".join(RANGE.findall(text))  # `1, 3`, `0-2,5`, `rank 1 and rank 0`
    if any(len(each) > LONGEST_NUMBER for each in re.split(r"\D+", listed)):
        return ()
    return tuple(sorted(set(expand_ranks(listed))))


def _int(text: str | None) -> int | None:
    return int(text) if text and len(text) <= LONGEST_NUMBER else None
