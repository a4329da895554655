"""The lines that trainers print for each step, in the forms of `diagnostics/step_lines` or of `monitor.step_line`.

A form has a text that its lines hold, so that most lines of a log are not searched, and a regular expression with named
groups. Figures that some versions leave out, or print in another order, have a label each: a number follows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from bigsci_launch.entries import read_entries
from bigsci_launch.errors import ConfigError
from bigsci_launch.printable import without_escapes

FOLDER = "step_lines"
LONGEST_LINE = 1 << 14
"""What is behind this in a line is not searched: the lines of reinforcement learning have some thousand characters."""
LONGEST_OWN_LINE = 1 << 11
SURE = 64
"""After so many lines, a log has no other forms than those that were seen."""
BLOCK = 1 << 20
FIGURES = ("loss", "grad_norm", "seconds", "milliseconds", "batch_size", "skipped", "epochs")
GROUPS = ("step", "index", "total", "last", "epoch", "epoch_index", *FIGURES)
"""Groups of a regular expression. `index` and `last` count steps from 0, `epoch_index` epochs; `step` and `total` are
those of an epoch if there is one."""
_KEYS = ("holds", "line", "earlier_holds", "earlier", "fallback", "evaluation", *FIGURES)
_OWN = "bsl: "
"""In lines of the batch script: it repeats the last line of a rank that failed."""
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TOKEN = r"\s*([-+.,\w]+)"
_ROUNDED = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[nN][aA][nN]|[-+]?inf)(?:([kKMBT])|m?s)?")


class StepLine(NamedTuple):
    """The figures in a line. Missing ones are None, as the loss of a skipped step. The loss may be NaN.

    `step` counts from 1; None if neither the line nor one before it has a number. `epochs` is how many are done. A
    tuple, because a log has millions of them.
    """

    step: int | None
    loss: float | None = None
    seconds: float | None = None
    batch_size: int | None = None
    total_steps: int | None = None
    grad_norm: float | None = None
    is_skipped: bool = False
    is_evaluation: bool = False
    epochs: float | None = None


@dataclass(frozen=True)
class StepForm:
    """How a program prints its steps. `fields` are those of an entry: regular expressions as written."""

    file: str
    name: str
    fields: Mapping[str, str] = field(compare=False)
    longest: int = LONGEST_LINE

    @cached_property
    def holds(self) -> str:
        return self.fields.get("holds", "")

    @cached_property
    def earlier_holds(self) -> str:
        return self.fields.get("earlier_holds", "")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Texts without which a line says nothing of a step."""
        return (self.holds, self.earlier_holds) if self.earlier_holds else (self.holds,)

    @cached_property
    def is_fallback(self) -> bool:
        """Whether its lines count only in a log that has those of no other form."""
        return "fallback" in self.fields

    @cached_property
    def line(self) -> re.Pattern[str]:
        return self._compile("line")

    @cached_property
    def earlier(self) -> re.Pattern[str] | None:
        """Finds the number of a step in a line before the one with its figures."""
        return self._compile("earlier") if "earlier" in self.fields else None

    @cached_property
    def figures(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """The figures that are found by a label in front of their number."""
        return tuple((name, self._compile(name, behind=_TOKEN)) for name in FIGURES if name in self.fields)

    def check(self) -> StepForm:
        """Return the form itself.

        Raises:
            ConfigError: it has an unknown key or group, a regular expression that is none, or no number of a step.
        """
        if unknown := set(self.fields) - set(_KEYS):
            raise ConfigError(f"{self._place}: unknown key {min(unknown)}; known: {', '.join(_KEYS)}")
        if missing := {"holds", "line"} - set(self.fields):
            raise ConfigError(f"{self._place}: {min(missing)} is missing")
        found = [each for each in (self.line, self.earlier) if each is not None]
        if unknown := {name for each in found for name in each.groupindex} - set(GROUPS):
            raise ConfigError(f"{self._place}: unknown group {min(unknown)}; known: {', '.join(GROUPS)}")
        if not any({"step", "index"} & set(each.groupindex) for each in found):
            raise ConfigError(f"{self._place}: no group `step` (or `index`, for steps counted from 0)")
        if wrong := [name for name, label in self.figures if label.groups != 1]:
            raise ConfigError(f"{self._place}: {wrong[0]} has a group: it is what is in front of the number")
        return self

    def read(self, found: re.Match[str], before: Mapping[str, float] | None) -> StepLine:
        """Return what a line of this form says. `before` are the groups of the earlier line with the step's number."""
        groups = {**before, **_numbers(found)} if before else _numbers(found)
        line, begin = found.string, found.start()
        for name, label in self.figures:
            token = label.search(line, begin, self.longest)
            if token is not None and (number := _as_number(token[1])) is not None:
                groups[name] = number
        step, total = _number_of(groups)
        seconds = groups.get("seconds")
        if seconds is None and "milliseconds" in groups:
            seconds = groups["milliseconds"] / 1000
        return StepLine(
            step,
            groups.get("loss"),
            seconds,
            _whole(groups["batch_size"]) if "batch_size" in groups else None,
            total,
            groups.get("grad_norm"),
            bool(groups.get("skipped")),
            self.is_evaluation,
            groups.get("epochs"),
        )

    @cached_property
    def is_evaluation(self) -> bool:
        return "evaluation" in self.fields

    @property
    def _place(self) -> str:
        return f"{self.file}: [{self.name}]"

    def _compile(self, key: str, behind: str = "") -> re.Pattern[str]:
        try:
            return re.compile(self.fields[key] + behind)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{self._place}: {key} is no regular expression: {error}") from error


def known_forms() -> tuple[StepForm, ...]:
    """Return the forms of `diagnostics/step_lines` and of `$BSL_PATH`, those that are a fallback last.

    Raises:
        ConfigError: a file of a user is no INI file.
    """
    from bigsci_launch.content import search_path  # a start of the job's program need not pay for it

    return _forms(search_path())


def check_forms() -> None:
    """Check the known forms, before a job depends on those of a user.

    Raises:
        ConfigError: one is not as `StepForm.check` says.
    """
    for form in known_forms():
        form.check()


@lru_cache(maxsize=4)
def _forms(_path: str) -> tuple[StepForm, ...]:
    forms = (StepForm(entry.file, entry.name, entry.fields) for entry in read_entries(FOLDER))
    return tuple(sorted(forms, key=lambda form: form.is_fallback))


def own_form(pattern: str) -> StepForm:
    """Return the form of `monitor.step_line`.

    Raises:
        ValueError: it is no regular expression, lacks a group, or may take for ever.
    """
    if _repeats_within_a_repeat(pattern):
        raise ValueError(
            "a repeated group holds a repetition or a choice, such as `(a+)*`: a line may then take hours; "
            "write it without, such as `[^|]*` or `.*`"
        )
    form = StepForm("monitor.step_line", "own", {"holds": "", "line": pattern}, LONGEST_OWN_LINE)
    try:
        return form.check()
    except ConfigError as error:
        raise ValueError(str(error).rpartition("[own]: ")[2]) from error


class StepReader:
    """Reads the lines of one log, in the order in which they were written.

    It remembers the number of the last step: some programs print it in a line before its figures, or in a progress bar.
    """

    def __init__(self, forms: Sequence[StepForm] | None = None) -> None:
        self._forms = known_forms() if forms is None else tuple(forms)
        self._before: dict[str, dict[str, float]] = {}
        self._has_form = False
        self._num_lines = 0
        self._files: set[str] = set()

    def read(self, line: str) -> StepLine | None:
        """Return the step in a line; None if it has none."""
        return self._read(without_escapes(line))

    def steps_in(self, text: str) -> Iterator[StepLine]:
        """Yield the steps in a part of a log that begins and ends at lines."""
        text = without_escapes(text)
        text = text.replace("\r", "\n") if "\r" in text else text
        begin = 0
        while begin < len(text):
            end = text.find("\n", begin + BLOCK) + 1 or len(text)
            for line in _lines_with({word for form in self._forms for word in form.words}, text[begin:end]):
                if (found := self._read(line)) is not None:
                    yield found
            begin = end

    def _read(self, line: str) -> StepLine | None:
        if _OWN in line:
            return None
        for form in self._forms:
            if form.earlier_holds and form.earlier_holds in line:
                self._see_earlier(form, line)
            if form.holds in line and not (form.is_fallback and self._has_form):
                found = form.line.search(line, 0, form.longest)
                if found is not None:
                    self._count(form)
                    return form.read(found, self._before.get(form.name))
        return None

    def _count(self, form: StepForm) -> None:
        """Count the lines of a form. A log that has many has none of another program: what looks so is chance."""
        self._has_form = self._has_form or not form.is_fallback
        self._num_lines += 1
        self._files.add(form.file)
        if self._num_lines == SURE:
            self._forms = tuple(each for each in self._forms if each.file in self._files)

    def _see_earlier(self, form: StepForm, line: str) -> None:
        """Note the number of a step, but not that of another progress bar, which has a smaller total."""
        if form.earlier is not None and (found := form.earlier.search(line, 0, form.longest)) is not None:
            seen, known = _numbers(found), self._before.get(form.name, {})
            if seen.get("total", math.inf) >= known.get("total", 0.0):
                self._before[form.name] = seen


def parse_steps(text: str, forms: Sequence[StepForm] | None = None) -> Iterator[tuple[int, StepLine]]:
    """Yield the steps of a log that have a number, in the order of their lines; a repeated step comes twice."""
    for found in StepReader(forms).steps_in(text):
        if found.step is not None and not found.is_evaluation:
            yield found.step, found


def _number_of(groups: Mapping[str, float]) -> tuple[int | None, int | None]:
    """Return the step, counted from 1, and how many there are."""
    step = _whole(groups["index"] + 1) if "index" in groups else _whole(groups.get("step"))
    total = _whole(groups["last"] + 1) if "last" in groups else _whole(groups.get("total"))
    if "epoch" not in groups and "epoch_index" not in groups:
        return step, total
    epochs = _whole(groups["epoch_index"] if "epoch_index" in groups else groups["epoch"] - 1)
    return None if step is None or total is None or epochs is None else step + epochs * total, None


def _lines_with(words: Collection[str], text: str) -> Iterator[str]:
    """Yield the lines that have one of the words, without a look at the others: a log has gigabytes of them."""
    places = {word: at for word in words if (at := text.find(word)) >= 0}
    begin = 0
    while places and begin < len(text):
        word = min(places, key=places.__getitem__) if len(places) > 1 else next(iter(places))
        if (at := places[word]) >= begin:
            end = text.find("\n", at) + 1 or len(text)
            yield text[text.rfind("\n", begin, at) + 1 or begin : end]
            begin = end
        if (at := text.find(word, begin)) >= 0:
            places[word] = at
        else:
            del places[word]


def _numbers(found: re.Match[str]) -> dict[str, float]:
    numbers = {}
    for name, text in found.groupdict().items():
        if text and (number := _as_number(text)) is not None:
            numbers[name] = number
    return numbers


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        rounded = _ROUNDED.fullmatch(text.strip().rstrip(",.").replace(",", ""))
        return float(rounded[1]) * _FACTORS[(rounded[2] or "").lower()] if rounded else None


def _whole(number: float | None) -> int | None:
    return None if number is None or not math.isfinite(number) else round(number)


def _repeats_within_a_repeat(pattern: str) -> bool:
    """Whether a repeated group holds something repeated or a choice: some lines would take exponential time."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    open_groups: list[bool] = []
    has_choice = False
    for at, letter in enumerate(plain):
        if letter == "(":
            open_groups.append(has_choice)
            has_choice = False
        elif letter == ")" and open_groups:
            is_repeated = plain[at + 1 : at + 2] in ("*", "+", "{")
            if is_repeated and has_choice:
                return True
            has_choice |= is_repeated | open_groups.pop()
        elif letter in "*+{|":
            has_choice = True
    return False
