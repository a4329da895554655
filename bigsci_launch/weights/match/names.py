"""Names of one parameter on two sides: wrappers add words to them, and a model inside another one adds a prefix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

# What torch.compile, FSDP, activation checkpointing and Lightning Fabric put into names; and what DDP does.
WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
DDP = re.compile(r"(?:^|(?<=\.))module\.")
# Names of the shorter side that are looked up to find its prefix, and prefixes that are tried.
SAMPLES, MAX_PREFIXES = 8, 32


def unwrapped(name: str) -> str:
    """Return a name without what wrappers add; `module.` is removed at the beginning only."""
    if "module." not in name and "_orig_mod." not in name:
        return name
    short = WRAPPER.sub("", name)
    while short.startswith("module."):
        short = short[len("module.") :]
    return short or name


def unwrapped_everywhere(name: str) -> str:
    """Return a name without what wrappers add, and without `module.` anywhere: DDP can wrap a part of a model."""
    return DDP.sub("", WRAPPER.sub("", name)) or name


def _wrappers_in(name: str) -> Counter[str]:
    return Counter([*WRAPPER.findall(name), *DDP.findall(name)])


def shortened(names: Iterable[str], shorten: Callable[[str], str]) -> dict[str, str]:
    """Return the names that become shorter, unless two different names would become one."""
    short = {name: shorten(name) for name in dict.fromkeys(names)}
    counts = Counter(short.values())
    return {name: text for name, text in short.items() if text != name and counts[text] == 1}


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names for some names of each side, and the words that only that side's names have."""

    a: Mapping[str, str] = field(default_factory=dict)
    b: Mapping[str, str] = field(default_factory=dict)
    words_a: frozenset[str] = frozenset()
    words_b: frozenset[str] = frozenset()


def through_wrappers(names_a: Set[str], names_b: Set[str]) -> Renaming:
    """Return new names for those that the other side has with other wrappers."""
    found: dict[str, tuple[str, str]] = {}
    for shorten in (unwrapped, unwrapped_everywhere):
        short_a, short_b = shortened(names_a, shorten), shortened(names_b, shorten)
        taken = {other for other, _ in found.values()}
        by_short = {short_b.get(name, name): name for name in names_b - names_a - taken}
        for name in names_a - names_b - found.keys():
            short = short_a.get(name, name)
            if short in by_short:
                found[name] = (by_short[short], short)
    words_a: Counter[str] = Counter()
    words_b: Counter[str] = Counter()
    for name, (other, _) in found.items():
        words_a += _wrappers_in(name) - _wrappers_in(other)
        words_b += _wrappers_in(other) - _wrappers_in(name)
    new_a = {name: short for name, (_, short) in found.items()}
    return Renaming(new_a, {other: short for other, short in found.values()}, frozenset(words_a), frozenset(words_b))


def through_prefix(parameters_a: Set[str], parameters_b: Set[str], names_a: Set[str], names_b: Set[str]) -> Renaming:
    """Return new names if a prefix leads from the parameters of one side to those of the other, wrappers apart.

    `names_a` and `names_b` contain the parameters' names and those of everything else.
    """
    plain_a, plain_b = _plain(names_a), _plain(names_b)
    held_a, held_b = {plain_a[name] for name in parameters_a}, {plain_b[name] for name in parameters_b}
    new_a, new_b = plain_a, plain_b
    words_a, words_b = (set(_wrappers_in(".".join(names))) for names in (parameters_a, parameters_b))
    if prefix := _common_prefix(held_a, held_b):
        new_a = _without_prefix(plain_a, set(plain_b.values()), prefix)
        words_a.add(prefix)
    elif prefix := _common_prefix(held_b, held_a):
        new_b = _without_prefix(plain_b, set(plain_a.values()), prefix)
        words_b.add(prefix)
    else:
        return Renaming()
    return Renaming(new_a, new_b, frozenset(words_a - words_b), frozenset(words_b - words_a))


def _plain(names: Set[str]) -> dict[str, str]:
    short = shortened(names, unwrapped)
    return {name: short.get(name, name) for name in names}


def _common_prefix(longer: Set[str], shorter: Set[str]) -> str | None:
    """Return the prefix that names of one side have and the other side lacks: `model.`.

    All names of the longer side begin with it, or it leads to every name of the shorter side. None if the sides share a
    name, or if two prefixes would do as well.
    """
    if longer & shorter:
        return None
    found: Counter[str] = Counter()
    for name in sorted(shorter, key=len)[-SAMPLES:]:
        found.update(text[: -len(name)] for text in longer if text.endswith(f".{name}"))
    tried = [prefix for prefix, _ in found.most_common(MAX_PREFIXES)]
    scores = {prefix: sum(f"{prefix}{name}" in longer for name in shorter) for prefix in tried}
    best = max(scores.values(), default=0)
    prefixes = [prefix for prefix, score in scores.items() if score == best]
    if len(prefixes) != 1:
        return None
    is_shared = best == len(shorter) or all(name.startswith(prefixes[0]) for name in longer)
    return prefixes[0] if is_shared else None


def _without_prefix(plain: Mapping[str, str], others: Set[str], prefix: str) -> dict[str, str]:
    """Remove a prefix at the beginning of names; inside a name only if the other side then has it."""

    def shorten(name: str) -> str:
        if name.startswith(prefix):
            return name[len(prefix) :]
        short = name.replace(f".{prefix}", ".", 1)
        return short if short in others else name

    short = shortened(plain.values(), shorten)
    return {name: short.get(text, text) for name, text in plain.items()}


def renaming_notes(words_a: Iterable[str], words_b: Iterable[str]) -> Iterator[str]:
    """Yield a note for each side whose names have words that the other side's lack."""
    for side, words in (("A", words_a), ("B", words_b)):
        if quoted := [f"`{word}`" for word in sorted(words)]:
            yield f"{side}'s names are compared without {' and '.join(quoted)}"
