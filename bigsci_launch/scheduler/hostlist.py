"""Slurm's hostlists, such as `n[01-04,7],gpu-a001`.

Names keep Slurm's order, which is the order of SLURM_NODEID and so of ranks: nothing here sorts. `expand_hostlist`
gives the same names as `scontrol show hostnames`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_DIGITS = "0123456789"
MAX_NODES = 65536
SHOWN = 80
"""Characters of an expression that an error quotes."""


def expand_hostlist(expression: str) -> list[str]:
    """Return every node name in `expression`, in its order and with repeats.

    Raises:
        ValueError: unbalanced brackets, an invalid range, or more than `MAX_NODES` names.
    """
    names: list[str] = []
    for part in _split_outside_brackets(expression):
        names.extend(_expand_part(part))
        if len(names) > MAX_NODES:
            raise ValueError(f"{_quoted(expression)} names more than {MAX_NODES} nodes")
    return names


def compress_hostlist(names: Iterable[str]) -> str:
    """Return `names` as one expression in the same order; neighbours with the same prefix share a bracket."""
    pieces: list[str] = []
    for (prefix, is_numbered), group in itertools.groupby(names, key=_prefix):
        members = list(group)
        if not is_numbered:
            pieces.extend(members)
        elif len(members) == 1:
            pieces.append(members[0])
        else:
            pieces.append(f"{prefix}[{_compress_numbers([name[len(prefix) :] for name in members])}]")
    return ",".join(pieces)


def _split_outside_brackets(expression: str) -> list[str]:
    if expression.count("[") != expression.count("]") or re.search(r"\[[^\]]*\[|^[^\[]*\]", expression):
        raise ValueError(f"{_quoted(expression)}: unbalanced brackets")
    return _PART.findall(expression.strip())


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _expand_part(part: str) -> list[str]:
    if re.search(r"\s", part):
        raise ValueError(f"{_quoted(part)} is not a node name")
    pieces: list[list[str]] = []
    num_names = 1
    for index, text in enumerate(_BRACKETS.split(part)):
        pieces.append(_expand_ranges(text, part) if index % 2 else [text])
        num_names *= len(pieces[-1])
        if num_names > MAX_NODES:
            raise ValueError(f"{_quoted(part)} names more than {MAX_NODES} nodes")
    return ["".join(combination) for combination in itertools.product(*pieces)]


def _expand_ranges(text: str, part: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{_quoted(part)}: {_quoted(item)} is neither a number nor a range of numbers")
        first, last, width = int(match["first"]), int(match["last"] or match["first"]), len(match["first"])
        if not 0 <= last - first < MAX_NODES:
            raise ValueError(f"{_quoted(part)}: {_quoted(item)} is not a range")
        numbers.extend(f"{number:0{width}d}" for number in range(first, last + 1))
    return numbers


def _prefix(name: str) -> tuple[str, bool]:
    prefix = name.rstrip(_DIGITS)
    return prefix, prefix != name


def _compress_numbers(numbers: Sequence[str]) -> str:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and _follows(runs[-1], number):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _follows(run: list[str], number: str) -> bool:
    """Whether `number` is the next number after `run`, printed with the width of its first number."""
    return number == f"{int(run[1]) + 1:0{len(run[0])}d}"
