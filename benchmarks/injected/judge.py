"""Compares what `bsl` said with what is true. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from injected.case import COLUMNS, Column, Fault, Grade, Look, Truth

RANKS: dict[Grade, int] = {"-": 0, "right": 1, "unknown": 2, "wrong": 3}


def judge(truths: Sequence[Truth], looks: Sequence[Look]) -> tuple[dict[Column, Grade], tuple[Fault, ...]]:
    """Return the worst grade of each column over all looks, and everything that is not right."""
    found = [fault for truth, look in zip(truths, looks, strict=True) for fault in judge_look(truth, look)]
    grades: dict[Column, Grade] = dict.fromkeys(COLUMNS, "-")
    for fault in found:
        grades[fault.column] = max(grades[fault.column], fault.grade, key=RANKS.__getitem__)
    return grades, tuple(fault for fault in found if fault.grade in ("wrong", "unknown"))


def judge_look(truth: Truth, look: Look) -> Iterator[Fault]:
    """Yield the grade of each column that this look shows."""
    at = f"{look.moment}: " if look.moment else ""
    for check in look.checks:
        yield Fault(check.column, check.grade, at + check.what)
    if look.document is None:
        return
    ended = look.document.get("exit") or {}
    answers = [
        *judge_code(truth, look, ended),
        *judge_cause(truth, look, ended),
        *judge_blame(truth, look, ended),
        *judge_advice(truth, look),
    ]
    for fault in answers:
        yield Fault(fault.column, fault.grade, at + fault.what)


def judge_code(truth: Truth, look: Look, ended: dict[str, Any]) -> Iterator[Fault]:
    if truth.code is None:
        return
    for who, code in (("exit.json", ended.get("exit_code")), ("Slurm", look.slurm_code)):
        grade: Grade = "unknown" if code is None else "right" if is_code(truth.code, code) else "wrong"
        yield Fault("exit status", grade, f"{who} has {code}, true is {truth.code}")


def is_code(true: int | str, code: int) -> bool:
    return re.fullmatch(true, str(code)) is not None if isinstance(true, str) else true == code


def judge_cause(truth: Truth, look: Look, ended: dict[str, Any]) -> Iterator[Fault]:
    state = look.document["job"]["state"] if look.document else None
    if truth.states:
        yield Fault("cause", "right" if state in truth.states else "wrong", f"state {state}")
    if truth.reasons:
        reason = ended.get("reason")
        is_open = reason in (None, "unknown")
        grade: Grade = "right" if reason in truth.reasons else "unknown" if is_open else "wrong"
        yield Fault("cause", grade, f"reason {reason}, true is {' or '.join(truth.reasons)}")
    for word in truth.words:
        yield Fault("cause", "right" if search(word, look.text) else "unknown", f"`{word}` is not said")
    facts = "\n".join(line for line in look.text.splitlines() if not line.startswith("next:"))
    for word in truth.never:
        if found := search(word, facts):
            yield Fault("cause", "wrong", f"says `{found[0]}`")


def judge_blame(truth: Truth, look: Look, ended: dict[str, Any]) -> Iterator[Fault]:
    """Judge who is blamed: by the first failure of an attempt that ended, by lost nodes while it runs."""
    lost = [node["name"] for node in (look.document or {}).get("lost_nodes", ())]
    first = ended.get("first_failure") or {}
    true_node = look.nodes[truth.node_index] if truth.node_index is not None else None
    if truth.rank is not None:
        true_node = look.nodes[truth.rank // look.ranks_per_node]
    named = first.get("node") or next(iter(lost), None)
    if truth.reasons:
        per_node = look.ranks_per_node
        first_of_node = (truth.node_index or 0) * per_node
        of_node = set(range(first_of_node, first_of_node + per_node)) if truth.node_index is not None else set()
        culprits = {truth.rank} if truth.rank is not None else of_node
        yield blamed("rank", first.get("rank"), culprits)
    if truth.reasons or lost or true_node:
        yield blamed("node", named, {true_node} if true_node else set())


def blamed(column: Column, named: Any, culprits: set[Any]) -> Fault:
    """Nobody named is right where nobody is to blame, and not said otherwise. An innocent is always wrong."""
    true = " or ".join(map(str, sorted(culprits, key=str))) or "nobody"
    if named is None:
        return Fault(column, "unknown" if culprits else "right", f"{column} not named, true is {true}")
    return Fault(column, "right" if named in culprits else "wrong", f"{column} {named} blamed, true is {true}")


def judge_advice(truth: Truth, look: Look) -> Iterator[Fault]:
    advice = "\n".join(line for line in look.text.splitlines() if line.startswith("next:"))
    for word in truth.never:
        if found := search(word, advice):
            yield Fault("next step", "wrong", f"advises `{found[0]}`")
    if truth.advice:
        is_told = any(search(word, advice) for word in truth.advice)
        grade: Grade = "right" if is_told else "wrong" if advice else "unknown"
        yield Fault("next step", grade, f"`{advice or 'nothing'}`, not {' or '.join(truth.advice)}")
    if truth.said and look.logs is not None:
        grade = "right" if search(truth.said, look.logs) else "wrong"
        yield Fault("next step", grade, f"the advised `bsl logs` does not show `{truth.said}`")


def search(word: str, text: str) -> re.Match[str] | None:
    return re.search(word, text, re.IGNORECASE | re.MULTILINE)
