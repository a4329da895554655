"""What a log says about the end of its job: the lines that hold a word of the table, each with who said it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigsci_launch.endings.lines import UNKNOWN, PlainLine, Speaker, moment_of, plain_line
from bigsci_launch.endings.words import LONGEST, EndWord, EndWords, FoundWord
from bigsci_launch.printable import without_escapes
from bigsci_launch.topology.ranks import expand_ranks

TRACEBACK = "Traceback (most recent call last)"
RAISED_FOR = re.compile(r"\(RANK (\d{1,6})\)")
"""In the first line of a traceback which torch's distributed checkpoints print for another rank."""
IGNORED = "Exception ignored in"
"""Above the traceback of what went wrong while an object was deleted: it ends nothing."""
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
CLAIM = re.compile(r"^\[?rank[ :=]{0,2}(\d{1,6})\b", re.IGNORECASE)
"""How lines of a process begin that says itself which rank it is."""
RAISED_IN_RAY = re.compile(
    r"\bray::\S{1,200} \(pid=(?P<pid>\d{1,9})(?:, ip=(?P<node>[\w.:-]{1,60}))?"
    r"(?:.*?\b[Rr]ank[=: ]?(?P<rank>\d{1,6}))?"
)
"""Ray's driver prints the traceback of an actor below this."""
HEADING = re.compile(
    r"^\[Rank (\d{1,6}) Error Snippet\]"
    r"|(?:\berror|\bcritical|\bfatal|exception|uncaught).{0,200}?\brank[ :=]{0,2}(\d{1,6})\b"
    r"|\brank[ :=]{0,2}(\d{1,6})\b.{0,200}?(?:\berror|\bcritical|\bfatal|exception|uncaught|fail)",
    re.IGNORECASE,
)
"""A line above a traceback that says whose it is."""
REMARK = re.compile(r"^.{0,120}?(?:^|(?<!NCCL)[\s\[(|])(?:DEBUG|INFO|WARN|WARNING)(?:[\s\])|:]|$)")
"""A line that Python's logging calls no error: what it holds was handled, or is a setting."""
RETRIED = re.compile(
    r"\bretrying\b|\bwill (?:be )?retr(?:y|ied)\b|\bretries left\b|\bretry \d+/\d|\battempt (\d+)(?:/| of )(?!\1\b)\d"
    r"|\bthrown while requesting\b|\btrying (?:again|(?:batch size )?\d)|\breducing (?:batch|micro|to\b)"
    r"|\bskipp(?:ed|ing)\b|\bignoring this choice\b|\bfalling back\b",
    re.IGNORECASE,
)
"""In a line about what is tried again, or done without: that ends nothing."""
LAUNCHERS = ("torchrun:", "elastic:")
INDENT = "  "
"""In front of each line of torchrun's table."""
LONGEST_TRACEBACK = 200
LONGEST_BLOCK = 60
MOST_FOREIGN = 30
MOST_FORMS = 10_000
NUMBERS = re.compile(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")
SAID_LENGTH = 300
LONGEST_NUMBER = 6
LONGEST_PID = 9
MEMBERS = re.compile(r"'([\w.:-]{1,80})': \[([\d, ]{1,4000})\]")
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
    continued_for: int = 0
    """How many of them looked like lines that it had printed before: steps, for example."""
    is_reported: bool = False
    """Whether another process prints it as why that one ended: then it was not survived."""
    is_counted: bool = True
    """Whether its line is one of the file; of a very long file, it is one of the part that was read."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line and self.is_counted else self.file

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
    members: frozenset[Speaker] = frozenset()
    """Processes whose rank, place or PID is known."""


def read_statements(text: str, file: str, speaker: Speaker, words: EndWords) -> Told:
    """Return what the text of one file says, line by line."""
    reader = _StatementReader(file, speaker, words.narrowed(text))
    found = list(reader.read(text.split("\n")))
    ranks = frozenset(each.rank for each in reader.speakers if each.rank is not None)
    if any(each.word.name.startswith(LAUNCHERS) for each in found):  # then a label is the task of a launcher
        nodes = _nodes_of_tasks(found)
        is_rank = [_is_own_label(each) or each.speaker in reader.members for each in found]
        found = [each if own else _without_task(each, nodes) for each, own in zip(found, is_rank, strict=True)]
        ranks = frozenset(each.speaker.rank for each in found if each.speaker.rank is not None)
    listed = {each.rank for each in reader.members if each.rank is not None}
    return Told(with_ranks(found, reader.members), ranks | listed, frozenset(reader.members))


def _is_own_label(statement: Statement) -> bool:
    """Whether the line itself names its rank. Else it is the task of a launcher, which is no rank."""
    return f"rank{statement.speaker.rank}]" in statement.said.lower().replace(" ", "")


def _nodes_of_tasks(found: Iterable[Statement]) -> dict[int | None, str]:
    """Return the nodes of launchers by their tasks: from their own tables, and from what srun says of their ends."""
    nodes: dict[int | None, str] = {}
    for each in found:
        if (node := each.named.get("node")) is not None:
            own = [each.speaker.rank] if each.named_ranks and each.word.name.startswith(LAUNCHERS) else []
            nodes.update(dict.fromkeys([*own, *each.tasks], node))
    return nodes


def _without_task(statement: Statement, nodes: Mapping[int | None, str]) -> Statement:
    who = statement.speaker
    node = who.node or nodes.get(who.rank) if who.rank is not None else who.node
    return replace(statement, speaker=replace(who, rank=None, node=node), continued_for=0)


class _Said(NamedTuple):
    """A word that a line holds, and who says it: the one that raised an exception, even if another one prints it."""

    found: FoundWord
    whose: Speaker
    moment: float | None = None
    """When the traceback began that it ends."""
    is_reported: bool = False


@dataclass
class _Traceback:
    """A traceback that has not ended. Those of processes whose lines have the same label, or none, may be mixed."""

    calls: list[str]
    whose: Speaker | None = None
    """Who raised it, where its lines do not say it themselves."""
    moment: float | None = None
    is_reported: bool = False
    due: int = 1
    """How many exceptions are still to come."""
    foreign: int = 0
    """How many lines of others are in it."""


@dataclass
class _Block:
    """A word of several lines whose last line has not come."""

    word: EndWord
    first: PlainLine
    number: int
    lines: list[tuple[PlainLine, int]] = field(default_factory=list)


@dataclass
class _Output:
    """What one speaker has printed, without the lines that hold a word."""

    lines: int = 0
    again: int = 0
    """How many of them differ from earlier ones in their numbers only."""
    forms: set[int] = field(default_factory=set)

    def count(self, text: str) -> None:
        form = hash(NUMBERS.sub("0", text[:SAID_LENGTH]))
        self.lines += 1
        self.again += form in self.forms
        if len(self.forms) < MOST_FORMS:
            self.forms.add(form)


NOTHING = _Output()


class _StatementReader:
    """Goes through a file once. Tracebacks and blocks are of one speaker: those of ranks may be mixed in one file."""

    def __init__(self, file: str, speaker: Speaker, words: EndWords) -> None:
        self._file, self._speaker, self._words = file, speaker, words
        self.speakers: set[Speaker] = {speaker}
        self.members: set[Speaker] = set()
        """Processes whose rank a launcher, or the label of an actor, gives."""
        self._traceback: dict[Speaker, _Traceback] = {}
        self._open: dict[Speaker, _Block] = {}
        self._printed: dict[Speaker, _Output] = {}
        self._all_printed = 0
        """Lines of all speakers: whose label is missing may be any of them."""
        self._listed: set[Speaker] = set()
        """Those in a launcher's table."""
        self._above: PlainLine | None = None
        """The line before, which may be the heading of a traceback."""

    def read(self, lines: Iterable[str]) -> Iterator[Statement]:
        found: list[Statement] = []
        for number, raw in enumerate(lines, 1):
            line = plain_line(raw, self._speaker)
            block = self._open.get(line.speaker)
            if block is not None and not _is_last(block, line):
                block.lines.append((line, number))
                self._above = line
                continue
            if block is not None:
                found += self._of_block(self._open.pop(line.speaker))
            if (opening := self._words.opening(line.text)) is not None:
                self._open[line.speaker] = _Block(opening, line, number)
                self._traceback.pop(line.speaker, None)
            elif (said := self._word_of(line)) is not None:
                found.append(self._statement(said, line, number, raw))
            self._above = line
        for block in self._open.values():
            found += self._of_block(block)
        for each in sorted(found, key=lambda each: each.line):
            printed = self._printed.get(each.speaker, NOTHING)
            total = self._all_printed if each.speaker == UNKNOWN else printed.lines
            after, again = total - each.printed_after, printed.again - each.continued_for
            yield replace(each, printed_after=after, continued_for=again)

    def _word_of(self, line: PlainLine) -> _Said | None:
        """Return the word of a line, and count the line for its speaker."""
        who, text = line.speaker, line.text
        self.speakers.add(who)
        if who.pid is not None:
            own = CLAIM.match(text) if who.rank is None else None
            self.members.add(replace(who, rank=int(own[1])) if own else who)
        open_one = self._traceback.get(who)
        if self._begins_traceback(line):
            return None
        if open_one is not None and text[:1].isspace() and len(open_one.calls) < LONGEST_TRACEBACK:
            open_one.calls.append(text[:SAID_LENGTH])  # a line of source may hold any word
            return None
        may_end = open_one is not None and bool(text) and not text.startswith(CHAINED)
        found = self._words.find(text, "\n".join(open_one.calls) if open_one and may_end else None)
        if found is not None and _ends_nothing(found, text):
            found = None
        if open_one is not None and may_end:
            self._end_traceback(who, open_one, is_foreign=found is None)
        elif found is None and text:
            self._printed.setdefault(who, _Output()).count(text)
            self._all_printed += 1
        if found is not None and found.word.speaker == "register":
            self.members.update(listed_by(found.named, who.node))
        if found is None or open_one is None or not may_end:
            return found and _Said(found, who)
        is_reported = open_one.is_reported or who in self._listed
        return _Said(found, open_one.whose or who, open_one.moment, is_reported)

    def _begins_traceback(self, line: PlainLine) -> bool:
        who, text = line.speaker, line.text
        open_one = self._traceback.get(who)
        due = open_one.due + 1 if open_one else 1
        if "ray::" in text and (found := RAISED_IN_RAY.search(text[:LONGEST])):
            actor = Speaker(_int(found["rank"]), found["node"] or who.node, pid=int(found["pid"]))
            self.members.add(actor)
            self._traceback[who] = _Traceback([text], actor, line.moment, is_reported=True)
        elif TRACEBACK in text and self._above is not None and self._above.text.startswith(IGNORED):
            return False
        elif TRACEBACK in text:
            above = self._above
            other = RAISED_FOR.search(text[:SAID_LENGTH])
            whose = replace(who, rank=int(other[1])) if other else _heading_of(above, who) if above else None
            self.members.update({whose} if whose else ())
            is_logged = above is not None and (whose is not None or (who != UNKNOWN and above.speaker == who))
            moment = above.moment if above and is_logged else None
            is_reported = other is not None or (above is not None and "Error Snippet]" in above.text)
            self._traceback[who] = _Traceback([text], whose, moment, is_reported, due)
        else:
            return False
        return True

    def _end_traceback(self, who: Speaker, traceback: _Traceback, is_foreign: bool) -> None:
        """Count the line that ends a traceback, or is of another process with the same label."""
        traceback.due -= not is_foreign
        traceback.foreign += is_foreign
        if traceback.due == 0 or traceback.foreign > MOST_FOREIGN:
            del self._traceback[who]

    def _statement(self, said: _Said, line: PlainLine, number: int, raw: str) -> Statement:
        text = " ".join(plain_said(raw).split())[:SAID_LENGTH]
        named = said.found.named
        moment = moment_of(named["time"]) if "time" in named else said.moment or line.moment
        before = self._printed.get(said.whose, NOTHING)
        word, whose = said.found.word, said.whose
        lines = self._all_printed if whose == UNKNOWN else before.lines
        return Statement(word, text, named, whose, self._file, number, moment, lines, before.again, said.is_reported)

    def _of_block(self, block: _Block) -> Iterator[Statement]:
        """Yield the statement of a block read as one line, and then what the lines in it say, said by the rank
        that it names. Lines that only look like the begin of a block are read as any others."""
        text = " ".join(" ".join(each.text for each in [block.first, *(line for line, _ in block.lines)]).split())
        whole = block.word.found_in(text)
        if whole is None:
            for line, at in [(block.first, block.number), *block.lines]:
                if (said := self._word_of(line)) is not None:
                    yield self._statement(said, line, at, line.text)
            return
        yield self._statement(_Said(whole, block.first.speaker), replace(block.first, text=text), block.number, text)
        rank, local_rank = (_int(whole.named.get(name)) for name in ("rank", "local_rank"))
        who = Speaker(rank, whole.named.get("node"), local_rank, _pid(whole.named.get("pid")))
        self.members.add(who)
        self._listed.add(who)
        for line, at in block.lines:
            inner = replace(line, text=line.text.removeprefix(INDENT).removeprefix("traceback : "), speaker=who)
            if (said := self._word_of(inner)) is not None and said.found.word.ends is None:
                yield self._statement(said, inner, at, inner.text)


def _ends_nothing(found: FoundWord, text: str) -> bool:
    """Whether the program has handled what the line reports."""
    speaker = found.word.speaker
    if (speaker == "cause" or (speaker == "victim" and found.word.kind == "network")) and REMARK.search(text):
        return True
    return speaker in ("cause", "victim") and RETRIED.search(text[:LONGEST]) is not None


def _heading_of(above: PlainLine, who: Speaker) -> Speaker | None:
    """Return who raised it, as the line above a traceback says, where its own lines do not."""
    found = HEADING.search(above.text[:SAID_LENGTH]) if who.rank is None else None
    return replace(who, rank=int(next(filter(None, found.groups()))), pid=None) if found else None


def _is_last(block: _Block, line: PlainLine) -> bool:
    ends = block.word.ends
    return bool(ends and ends.search(line.text)) or len(block.lines) == LONGEST_BLOCK


def listed_by(named: Mapping[str, str], node: str | None = None) -> Iterator[Speaker]:
    """Yield the processes that a launcher lists: `{'n0': [0, 1], 'n1': [2, 3]}`, or one of them.

    `node` is where it printed this. Its rank is missing where it lists a PID by its local rank.
    """
    for node, ranks in MEMBERS.findall(named.get("members", "")):
        for local_rank, rank in enumerate(ranks.split(",")):
            yield Speaker(_int(rank.strip()), node, local_rank)
    if "rank" in named or {"pid", "local_rank"} <= named.keys():
        place = named.get("node", node)
        yield Speaker(_int(named.get("rank")), place, _int(named.get("local_rank")), _pid(named.get("pid")))


def with_ranks(statements: Sequence[Statement], members: Collection[Speaker]) -> tuple[Statement, ...]:
    """Return the statements with the ranks that other lines give to the processes which they name, or which say them:
    by node and local rank, or by PID. Where only the local rank is known, it is that."""
    known: dict[object, set[Speaker]] = {}
    places = {(each.pid, each.node) for each in members if each.pid is not None and each.node}
    shared = {pid for pid, count in Counter(pid for pid, _ in places).items() if count > 1}
    for each in _with_places(members):
        has_number = each.rank is not None or (each.pid is not None and each.local_rank is not None)
        for key in _keys_of(each.node, each.local_rank, each.pid) if has_number else ():
            known.setdefault(key, set()).add(each)
    alone = {
        key: min(found, key=_vagueness) for key, found in known.items() if len({_number(each) for each in found}) == 1
    }
    for pid in shared:
        alone.pop(("pid", None, pid), None)
    return tuple(_with_rank(each, alone) for each in statements) if alone else tuple(statements)


def _number(who: Speaker) -> tuple[int | None, int | None]:
    return who.rank, who.local_rank if who.rank is None else None


def _vagueness(who: Speaker) -> tuple[bool, bool]:
    return who.node is None, who.local_rank is None


def _with_places(members: Collection[Speaker]) -> list[Speaker]:
    """Return the processes with the rank of their local rank on their node; if no node is named, on the only one."""
    ranks: dict[tuple[str | None, int | None], int] = {
        (each.node, each.local_rank): each.rank for each in members if each.rank is not None and each.node
    }
    nodes = {node for node, _ in ranks}
    only = nodes.pop() if len(nodes) == 1 else None
    whole = []
    for each in members:
        if each.rank is None and each.local_rank is not None:
            node = each.node or only
            each = replace(each, node=node, rank=ranks.get((node, each.local_rank)))
        whole.append(each)
    return whole


def _keys_of(node: str | None, local_rank: int | None, pid: int | None) -> list[tuple[str, object, object]]:
    """Return by what a process is known, the best first. A PID alone may be that of processes of several nodes."""
    keys: list[tuple[str, object, object]] = []
    if pid is not None:
        keys += [("pid", node, pid), ("pid", None, pid)] if node else [("pid", None, pid)]
    if node and local_rank is not None:
        keys.append(("place", node, local_rank))
    return keys


def _with_rank(each: Statement, ranks: Mapping[object, Speaker]) -> Statement:
    who, named = each.speaker, each.named
    if who.rank is None and (own := _first_known(ranks, who.node, who.local_rank, who.pid)):
        local_rank = own.local_rank if own.rank is None else who.local_rank
        each = replace(each, speaker=replace(who, rank=own.rank, node=who.node or own.node, local_rank=local_rank))
    node, local_rank, pid = named.get("node"), _int(named.get("local_rank")), _pid(named.get("pid"))
    if not (each.named_ranks or each.tasks) and (meant := _first_known(ranks, node, local_rank, pid)):
        places = {"rank": meant.rank, "local_rank": None if meant.rank is not None else meant.local_rank}
        more = {name: str(number) for name, number in places.items() if number is not None}
        each = replace(each, named={**named, **more, **({"node": meant.node} if meant.node else {})})
    return each


def _first_known(
    ranks: Mapping[object, Speaker], node: str | None, local_rank: int | None, pid: int | None
) -> Speaker | None:
    return next((ranks[key] for key in _keys_of(node, local_rank, pid) if key in ranks), None)


def plain_said(raw: str) -> str:
    """Return a line as it is quoted: with its label, without colours."""
    return "".join(each if each.isprintable() else " " for each in without_escapes(raw))


def _numbers(text: str) -> tuple[int, ...]:
    listed = ",".join(RANGE.findall(text))  # `1, 3`, `0-2,5`, `rank 1 and rank 0`
    if any(len(each) > LONGEST_NUMBER for each in re.split(r"\D+", listed)):
        return ()
    try:
        return tuple(sorted(set(expand_ranks(listed))))
    except ValueError:  # more than any job has
        return ()


def _int(text: str | None) -> int | None:
    return int(text) if text and len(text) <= LONGEST_NUMBER else None


def _pid(text: str | None) -> int | None:
    return int(text) if text and len(text) <= LONGEST_PID else None
