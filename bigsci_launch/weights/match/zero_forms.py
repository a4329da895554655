"""Decides in which form two checkpoints compare a parameter: by its weight, or by its fp32 master.

ZeRO writes 16-bit weights and fp32 masters in stages 1 and 2, only masters in stage 3; a state dict in fp32 has the
masters' values under the weights' names. Forms of one dtype are compared; a form that the other side does not have is
left out only if the other form was compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigsci_launch.weights.files.tensors import StoredTensor, TensorRole
from bigsci_launch.weights.match.batches import ComparedSide

MOMENTS: tuple[TensorRole, TensorRole] = ("exp_avg", "exp_avg_sq")
Form = TensorRole
FORMS: dict[Form, str] = {"fp32": "fp32 masters", "weight": "weights"}
IN_ANOTHER_FORM = "{} of parameters that the other side has in another form only"
ONLY_HERE = "{} of parameters, which the other side does not have"
SIDES: tuple[ComparedSide, ComparedSide] = ("A", "B")
ByForm = dict[str, dict[TensorRole, list[StoredTensor]]]


@dataclass
class Forms:
    """What is compared with what: lists of tensors to be paired by name and role.

    `left_out` has no counterpart: the side, why, and the tensor.
    """

    rounds: list[tuple[list[StoredTensor], list[StoredTensor]]] = field(default_factory=list)
    left_out: list[tuple[ComparedSide, str, StoredTensor]] = field(default_factory=list)


def choose_forms(
    a: Sequence[StoredTensor], b: Sequence[StoredTensor], shared_a: Mapping[str, str], shared_b: Mapping[str, str]
) -> Forms:
    """Choose the forms. `shared_a[name]` is the parameter of A whose master `name` uses too."""
    left, right = _by_name(a), _by_name(b)
    _lend(left, right, shared_a, shared_b)
    forms = Forms()
    rounds: dict[tuple[Form, Form], tuple[list[StoredTensor], list[StoredTensor]]] = {}
    for name in dict.fromkeys([*left, *right]):
        held_a, held_b = left.get(name, {}), right.get(name, {})
        chosen = _chosen(held_a, held_b)
        for role_a, role_b in chosen:
            xs, ys = rounds.setdefault((role_a, role_b), ([], []))
            xs += _as(held_a[role_a], role_a if role_a == role_b else "weight")
            ys += _as(held_b[role_b], role_a if role_a == role_b else "weight")
        for form, words in FORMS.items():
            for side, held, used in zip(SIDES, (held_a, held_b), (0, 1), strict=True):
                if form in held and form not in {pair[used] for pair in chosen}:
                    if chosen:
                        forms.left_out += [(side, IN_ANOTHER_FORM.format(words), tensor) for tensor in held[form]]
                    else:
                        rounds.setdefault((form, form), ([], []))[used].extend(held[form])
    for role in MOMENTS:
        xs, ys = ([tensor for held in side.values() for tensor in held.get(role, ())] for side in (left, right))
        if xs and ys:
            rounds[role, role] = (xs, ys)
        else:
            forms.left_out += [("A", ONLY_HERE.format(role), x) for x in xs]
            forms.left_out += [("B", ONLY_HERE.format(role), y) for y in ys]
    forms.rounds = list(rounds.values())
    return forms


def _by_name(tensors: Sequence[StoredTensor]) -> ByForm:
    found: ByForm = {}
    for tensor in tensors:
        found.setdefault(tensor.name, {}).setdefault(tensor.role, []).append(tensor)
    return found


def _lend(a: ByForm, b: ByForm, shared_a: Mapping[str, str], shared_b: Mapping[str, str]) -> None:
    """Give parameters the masters of those whose tensors they share, if the other side has or can be given some too."""
    owned_a, owned_b = _lendable(a, shared_a), _lendable(b, shared_b)
    names = (owned_a.keys() & (b.keys() | owned_b.keys())) | (owned_b.keys() & a.keys())
    used = names & (a.keys() | b.keys())
    for held, owned in ((a, owned_a), (b, owned_b)):
        for name in used & owned.keys():
            held.setdefault(name, {})["fp32"] = [replace(master, name=name) for master in owned[name]]


def _lendable(held: ByForm, shared: Mapping[str, str]) -> dict[str, list[StoredTensor]]:
    masters = {name: held.get(source, {}).get("fp32", []) for name, source in shared.items()}
    return {name: found for name, found in masters.items() if found and "fp32" not in held.get(name, {})}


def _as(tensors: Sequence[StoredTensor], role: TensorRole) -> list[StoredTensor]:
    return [tensor if tensor.role == role else replace(tensor, role=role) for tensor in tensors]


def _chosen(
    a: Mapping[TensorRole, list[StoredTensor]], b: Mapping[TensorRole, list[StoredTensor]]
) -> list[tuple[Form, Form]]:
    """Return the forms to compare. If one side lacks a form, the other's is compared with a form of its dtype."""
    held_a, held_b = ([form for form in FORMS if form in held] for held in (a, b))
    if held_a == held_b:
        return [(form, form) for form in held_a]
    pairs = sorted(((x, y) for x in held_a for y in held_b), key=lambda pair: pair[0] != pair[1])
    chosen: list[tuple[Form, Form]] = []
    for x, y in pairs:
        is_new = all(x != used for used, _ in chosen) or all(y != used for _, used in chosen)
        if is_new and a[x][0].dtype == b[y][0].dtype:
            chosen.append((x, y))
    return chosen or pairs[:1]
