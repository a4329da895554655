"""Finds the model's parameters in files that contain more than the parameters: `{"model": .., "optimizer": ..}`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bigsci_launch.weights.files.tensors import TensorRole
from bigsci_launch.weights.objects.flatten import Leaf, exact_name
from bigsci_launch.weights.objects.nodes import DressedTensor, TensorNode

# Usual keys of the parameters' dictionary.
CONTAINERS = ("module", "model", "state_dict", "model_state_dict")
# Dictionaries under such keys contain tensors, but no parameters of the model.
NOT_A_MODEL = re.compile(r"optim|sched|scaler|rng|random|loop|callback|loader|train_state", re.IGNORECASE)
# What an optimizer keeps for a parameter: in torch's optimizers by the parameter's name (torchtitan has only the end of
# it, `state.layers.0.weight.exp_avg`), in Megatron-core's by the state's (`optimizer.state.exp_avg.layers.0.weight`).
BY_PARAMETER = re.compile(r"(?:\w+\.)*?state\.(?P<name>.*[^\d.].*)\.(?P<key>exp_avg|exp_avg_sq)")
BY_STATE = re.compile(r"(?:\w+\.)*?optimizer\.state\.(?P<key>exp_avg|exp_avg_sq|fp32_param)\.(?P<name>.+)")
ROLE_OF_KEY: dict[str, TensorRole] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "fp32"}
MAX_DEPTH = 4
# Dictionaries that are searched for one. A checkpoint's own are near its root.
MAX_VISITS = 10_000
Keys = tuple[Any, ...]


def find_container(tree: Any) -> Keys:
    """Return the keys that lead to the parameters' dictionary; none if the tree itself is one, or has none or several.

    The order of a dictionary does not matter: it may differ between two checkpoints with the same content.
    """
    level: list[tuple[Keys, Any]] = [((), tree)]
    visits = 0
    for _ in range(MAX_DEPTH):
        for key in CONTAINERS:
            found = [
                ((*path, key), node[key])
                for path, node in level
                if isinstance(node, Mapping) and key in node and _has_tensors(node[key])
            ]
            if found:
                return _innermost(*found[0]) if len(found) == 1 else ()
        if any(_holds_tensors(node) for _, node in level):
            return ()
        level = [((*path, key), inside) for path, node in level for key, inside in _dictionaries(node)]
        visits += len(level)
        if visits > MAX_VISITS:
            return ()
    return ()


def _innermost(path: Keys, node: Any) -> Keys:
    """Return the path of a container's only container: `{"model": {"state_dict": ..}}`."""
    while len(path) < MAX_DEPTH and not _holds_tensors(node):
        inside = [(key, held) for key, held in _dictionaries(node) if _has_tensors(held)]
        if len(inside) != 1 or inside[0][0] not in CONTAINERS:
            break
        path, node = (*path, inside[0][0]), inside[0][1]
    return path


def _dictionaries(node: Any) -> list[tuple[str, Any]]:
    held = node.items() if isinstance(node, Mapping) else ()
    return [
        (key, inside)
        for key, inside in held
        if isinstance(key, str) and isinstance(inside, Mapping) and not NOT_A_MODEL.search(key)
    ]


def _holds_tensors(node: Any) -> bool:
    held = node.items() if isinstance(node, Mapping) else ()
    return any(_is_tensor(value) and not NOT_A_MODEL.search(str(key)) for key, value in held)


def _has_tensors(node: Any) -> bool:
    if not isinstance(node, Mapping):
        return False
    stack, visits = [node], 0
    while stack and visits < MAX_VISITS:
        for value in stack.pop().values():
            visits += 1
            if _is_tensor(value):
                return True
            if isinstance(value, Mapping):
                stack.append(value)
    return False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (TensorNode, DressedTensor))


def with_roles(tree: Any, entries: Sequence[Leaf], *, has_all: bool) -> tuple[list[tuple[Leaf, TensorRole]], str]:
    """Return the entries of a tree with their roles, and the key of the dictionary with the parameters.

    Parameters are named as if that dictionary were the whole tree. What an optimizer keeps for a parameter has the
    parameter's name, unless two would then have one role and name, or the tree (`has_all`) may have only a part of it.
    """
    container = find_container(tree)
    inside = [name_inside(entry, container) for entry in entries]
    outside = {entry.name for entry, name in zip(entries, inside, strict=True) if name is None}
    found: list[tuple[TensorRole, str]] = []
    for entry, name in zip(entries, inside, strict=True):
        is_tensor = isinstance(entry.node, TensorNode)
        of_optimizer = optimizer_role(entry.path) if is_tensor and has_all else None
        if of_optimizer is not None:
            found.append(of_optimizer)
        elif name is not None and is_tensor and is_of_model(tree, entry.path):
            found.append(("weight", name))
        else:
            # A tensor's role distinguishes it from one of the same name outside; a value has none.
            found.append(("other", entry.name if name is None or name in outside else name))
    counts = Counter(found)
    return [
        (replace(entry, name=name), role) if counts[role, name] == 1 else (entry, "other")
        for entry, (role, name) in zip(entries, found, strict=True)
    ], dotted(container)


def optimizer_role(path: Sequence[Any]) -> tuple[TensorRole, str] | None:
    """Return the role and the parameter of a tensor that an optimizer keeps; None for any other tensor."""
    name = dotted(path)
    match = BY_STATE.fullmatch(name) or BY_PARAMETER.fullmatch(name)
    return None if match is None else (ROLE_OF_KEY[match["key"]], match["name"])


def is_of_model(tree: Any, path: Keys) -> bool:
    """Whether a tensor of a file may be a parameter: it is neither in an optimizer's state nor in a random state."""
    is_optimizer = isinstance(tree, Mapping) and "param_groups" in tree and "state" in tree
    return not is_optimizer and not (len(path) > 1 and NOT_A_MODEL.search(str(path[0])))


def name_inside(entry: Leaf, container: Keys) -> str | None:
    """Return an entry's name as if its container were the whole file; None if it is not inside."""
    if not container:
        return entry.name
    if entry.path[: len(container)] != container or len(entry.path) == len(container):
        return None
    prefix = dotted(container)
    if entry.name.startswith(prefix):
        return entry.name[len(prefix) :].removeprefix(".")
    return entry.name.removeprefix(exact_name(container))


def dotted(container: Sequence[Any]) -> str:
    return ".".join(map(str, container))
