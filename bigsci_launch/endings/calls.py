"""Whose collective differs from that of the others, by what ranks printed when they failed or timed out. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from bigsci_launch.endings.statements import Statement

MAJORITY = 3
"""Of fewer ranks, none is the odd one."""
SIZES = re.compile(r", NumelIn=(\d+), NumelOut=(\d+)$")
UNEVEN = ("ALLTOALL", "ALLGATHER", "REDUCE_SCATTER", "GATHER", "SCATTER", "SEND", "RECV", "COALESCED", "UNKNOWN")
"""Operations in which ranks may give other sizes, or which are of two ranks. A base form, such as _ALLGATHER_BASE, is
another one."""


def odd_one(said: Iterable[Statement]) -> int | None:
    """Return the rank whose collective differs from that of all others, who agree; None if they do not, or are few."""
    calls = calls_of(said)
    held = Counter(calls.values())
    if len(calls) < MAJORITY or len(held) != 2 or min(held.values()) != 1:
        return None
    return next(rank for rank, call in calls.items() if held[call] == 1)


def alone_against(said: Iterable[Statement], known: int) -> int | None:
    """Return the rank that alone differs from the one with which all of `known` processes compare, or that one if all
    others differ from it; None if it is neither."""
    pairs = {(each.by, int(each.named["other"])) for each in said if each.by is not None and _has_no_other_call(each)}
    others = {other for _, other in pairs}
    if known < MAJORITY or len(others) != 1:
        return None
    differing = {by for by, _ in pairs if by is not None}
    return differing.pop() if len(differing) == 1 else others.pop() if len(differing) == known - 1 else None


def _has_no_other_call(each: Statement) -> bool:
    return each.named.get("other", "").isdigit() and "others" not in each.named and len(each.named["other"]) < 7


def calls_of(said: Iterable[Statement]) -> dict[int, str]:
    """Return the collectives of ranks: their own, and those that another one names."""
    calls: dict[int, str] = {}
    for each in said:
        if each.by is not None and "own" in each.named:
            calls[each.by] = each.named["own"]
        if "others" in each.named and each.named.get("other", "").isdigit():
            calls[int(each.named["other"])] = each.named["others"]
    return calls


def clash_of(said: Sequence[Statement], told: Iterable[Statement], ranks: Collection[int]) -> str:
    """Return how the collectives differ in which all ranks wait for each other; nothing if they do not.

    The same number is another collective in another group: so all ranks must wait, and for one number of one group.
    """
    waits = [each for each in said if "own" in each.named and "key" in each.named]
    groups = {each.named["key"] for each in told if each.word.speaker == "register" and "key" in each.named}
    if len(groups) > 1 or len({each.named["key"] for each in waits}) != 1:
        return ""
    calls = calls_of(waits)
    if len(calls) < max(2, len(ranks)) or not calls.keys() >= {*ranks} or set(calls) != set(range(len(calls))):
        return ""
    forms = {_form_of(call, calls.values()) for call in calls.values()}
    return " against ".join(sorted(forms)) if len(forms) > 1 else ""


def _form_of(call: str, all_calls: Collection[str]) -> str:
    """Return a collective with its sizes, as far as all ranks must agree on them."""
    operation = SIZES.sub("", call)
    is_even = operation == "ALLTOALL_BASE" and all(_is_even(each) for each in all_calls)
    is_uneven = operation in UNEVEN or operation == "ALLTOALL_BASE"
    return call if is_even or not is_uneven else operation


def _is_even(call: str) -> bool:
    """Whether a rank sends as much as it receives: in an exchange of other sizes, hardly each rank does."""
    sizes = SIZES.search(call)
    return sizes is not None and sizes[1] == sizes[2]
