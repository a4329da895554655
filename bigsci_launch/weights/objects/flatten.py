"""Takes a description apart: its tensors and plain values, each under its dotted name.

Names are as one would write them: `optimizer.param_groups.0.lr`. If two entries of one tree would have the same
name (`{1: .., "1": ..}`), both get their exact path instead: `[1]` and `['1']`. A dictionary with keys that are no text
has one leaf more, `state.(keys)`, which says what they are: `{0: ..}` is neither `{"0": ..}` nor a list.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigsci_launch.weights.objects.arrays import is_numpy_value, objects_of
from bigsci_launch.weights.objects.encode import MAX_DEPTH, NotPlain, encode
from bigsci_launch.weights.objects.nodes import (
    BadPickle,
    Dictionary,
    DressedTensor,
    Elements,
    Instance,
    Named,
    OddKey,
    Outside,
    StorageNode,
    TensorNode,
    is_attributes,
)
from bigsci_launch.weights.objects.texts import is_call, is_scalar, show

# A series of this many numbers or more is one entry.
LONG_SERIES = 17
# What a tree may cost: 1 for each part, more for long names, deep places and large values. 40,000 tensors cost 100,000.
MAX_WORK = 200_000
# Parts of a key that is shown.
MAX_KEY_WORK = 1000
# Longer keys are shown with a digest.
MAX_SHOWN_BITS, MAX_SHOWN_LENGTH = 128, 40
# Where torch.nn.Module keeps what it consists of.
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A part of an object that is no item of it: an attribute, its class, an argument of the call that made it.

    Names of leaves leave it out if it `is_silent`: a tensor with attributes, the dictionaries inside a module.
    """

    name: str
    is_silent: bool = False

    def __str__(self) -> str:
        return self.name


OF_THE_PROCESS = (Attribute("_hash"), Attribute("_thread_id"))


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree: a `TensorNode`, `StorageNode`, `Outside`, or a value that `encode` takes."""

    name: str
    path: Path
    node: Any


def flatten(tree: Any, name: str = "", max_work: int = MAX_WORK) -> list[Leaf]:
    """Return every leaf of a tree in the order of the file, under `name`. What occurs twice is listed twice.

    Raises:
        BadPickle: the tree is nested too deep, or has more or larger leaves than a checkpoint has.
    """
    entries = list(_leaves(tree, name, max_work))
    counts = Counter(entry.name for entry in entries)
    if len(counts) == len(entries):
        return entries
    return list(_told_apart(name, entries, counts))


def _told_apart(prefix: str, entries: Sequence[Leaf], counts: Counter[str]) -> Iterator[Leaf]:
    taken: Counter[str] = Counter()
    for entry in entries:
        name = entry.name if counts[entry.name] == 1 else f"{prefix}{exact_name(entry.path)}"
        taken[name] += 1
        yield Leaf(name if taken[name] == 1 else f"{name} ({taken[name]})", entry.path, entry.node)


def _leaves(tree: Any, name: str, max_work: int) -> Iterator[Leaf]:
    # An explicit stack, because trees may be deeper than Python recurses. None marks the end of a container.
    stack: list[tuple[str, Path, Any] | None] = [(name, (), tree)]
    above: list[int] = []
    work = 0
    while stack:
        item = stack.pop()
        if item is None:
            above.pop()
            continue
        at, path, node = item
        children = _children(node)
        long = len(path) // 8 + len(at) // 256
        work += long + _work_of_leaf(node, max_work) if children is None else len(children) * (1 + long)
        if work > max_work:
            raise BadPickle("its objects have more or larger parts than a checkpoint's")
        if children is None:
            yield Leaf(at, path, node)
        elif id(node) in above:
            yield Leaf(
                at, path, f"the object {len(above) - above.index(id(node))} levels above, which contains this one"
            )
        else:
            above.append(id(node))
            if len(above) > MAX_DEPTH:
                raise BadPickle(f"its objects are nested more than {MAX_DEPTH} deep")
            stack.append(None)
            stack += [(_joined(at, part), (*path, part), child) for part, child in reversed(children)]


def _work_of_leaf(leaf: Any, most: int) -> int:
    """Return how much work it is to encode a leaf, in which one object may occur many times; stops after `most`."""
    work, waiting = 0, [leaf]
    while waiting and work <= most:
        node = waiting.pop()
        work += 1
        if isinstance(node, (str, bytes)):
            work += len(node) >> 10
        elif isinstance(node, int):
            work += node.bit_length() >> 13
        elif isinstance(node, (list, tuple, Elements)):
            items = node.elements if isinstance(node, Elements) else node
            work += len(items) >> 4
            waiting += [item for item in items if not isinstance(item, (float, bool, type(None)))]
        elif isinstance(node, dict):
            waiting += [*node, *node.values()]
            work += len(node)
        elif isinstance(node, OddKey):
            waiting.append(node.key)
        elif isinstance(node, Instance):
            parts = [node.args, list(node.kwargs.values()), node.states, node.elements, *node.items]
            waiting += parts
            work += len(parts)
    return work


def _joined(name: str, part: Any) -> str:
    if isinstance(part, Attribute) and part.is_silent:
        return name
    text = part if isinstance(part, str) else key_text(part)
    return f"{name}.{text}" if name and text else name or text


def exact_name(path: Path) -> str:
    """Return a path that no other path shares: `['a.b'][0].lr`."""
    return "".join(
        f".{part}" if isinstance(part, Attribute) else f"[{part!r}]" if isinstance(part, str) else f"[{key_text(part)}]"
        for part in path
    )


def key_text(part: Any) -> str:
    """Return a key, index or attribute so that different ones have different texts, except 1 and "1"."""
    if isinstance(part, (str, Attribute)) or part is None or isinstance(part, (bool, float, Named)):
        return str(part)
    if isinstance(part, int) and part.bit_length() <= MAX_SHOWN_BITS:
        return str(part)
    if isinstance(part, (bytes, tuple)) and _is_short(part):
        return repr(part)
    try:
        digest = hashlib.sha256(encode(part, MAX_KEY_WORK)).hexdigest()[:16]
    except NotPlain:
        digest = "not read"
    kind = "set" if isinstance(part, Elements) else show(part)
    return f"{kind} {digest}"


def _is_short(part: bytes | tuple[Any, ...]) -> bool:
    if isinstance(part, bytes):
        return len(part) <= MAX_SHOWN_LENGTH
    return len(part) <= 4 and all(
        item is None
        or isinstance(item, (bool, float))
        or (isinstance(item, int) and item.bit_length() <= MAX_SHOWN_BITS)
        or (isinstance(item, (str, bytes)) and len(item) <= MAX_SHOWN_LENGTH)
        for item in part
    )


def _keyed(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return a dictionary's entries; if keys are no text, with the leaf that says what they are.

    A key that contains a tensor (an optimizer's state has parameters as keys) is an entry itself, and has a number.
    """
    entries: list[tuple[Any, Any]] = []
    for index, (key, value) in enumerate(pairs):
        part = key.key if isinstance(key, OddKey) else key
        if _has_tensor(part):
            entries += [(Attribute(f"key {index}"), part), (Attribute(str(index)), value)]
        else:
            entries.append((part, value))
    kinds = {type(key) for key, _ in entries if not isinstance(key, Attribute)}
    if kinds <= {str}:
        return entries
    others = [key_text(key) for key, _ in entries if not isinstance(key, (str, Attribute))]
    return [*entries, (Attribute("(keys)"), kinds.pop().__name__ if len(kinds) == 1 else Elements(sorted(others)))]


def _has_tensor(key: Any) -> bool:
    """Whether a key is a tensor, or an object with one inside; nothing that is plain is looked into."""
    if isinstance(key, (TensorNode, DressedTensor, StorageNode, Outside)):
        return True
    if not isinstance(key, (tuple, Instance, Elements)):
        return False
    try:
        encode(key, MAX_KEY_WORK)
    except NotPlain:
        return True
    return False


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, (TensorNode, StorageNode, Outside, Elements)) or is_scalar(node):
        return None
    if isinstance(node, (list, tuple)):
        is_series = len(node) >= LONG_SERIES and all(map(is_scalar, node))
        return None if is_series or not node else list(enumerate(node))
    if isinstance(node, dict):
        states = node.states if isinstance(node, Dictionary) else ()
        return [*_keyed(node.items()), *_states(states)] or None
    if isinstance(node, DressedTensor):
        return [
            (Attribute("tensor", is_silent=True), node.tensor),
            *((Attribute(name), extra) for name, extra in node.extras.items()),
        ]
    if isinstance(node, Instance):
        return None if is_numpy_value(node) or is_call(node) else _parts_of(node)
    return None


def _parts_of(node: Instance) -> list[tuple[Any, Any]]:
    node = objects_of(node) or node
    parts: list[tuple[Any, Any]] = [(Attribute("__class__"), node.made_by)]
    parts += [(Attribute(f"argument {index}"), value) for index, value in enumerate(node.args)]
    parts += [(Attribute(name), value) for name, value in node.kwargs.items()]
    states = _states(tuple(node.states))
    parts += states if not node.made_by.module.startswith("torch.") else _without_process(states)
    parts += _keyed(node.items)
    return parts + list(enumerate(node.elements))


def _states(states: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield attributes that states set, each under its own name; other states as they are."""
    for state in states:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or is_attributes(part) for part in parts):
            yield from ((_attribute(name, value), value) for part in parts for name, value in (part or {}).items())
        else:
            yield Attribute("state"), state


def _without_process(states: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Leave out what a mesh of torch keeps of its process: its hash (text is hashed by a seed) and its thread."""
    return ((part, value) for part, value in states if part not in OF_THE_PROCESS)


def _attribute(name: str, value: Any) -> Attribute:
    # The names of a module's tensors are then those of its state dict.
    return Attribute(name, is_silent=name in MODULE_PARTS and isinstance(value, dict) and bool(value))
