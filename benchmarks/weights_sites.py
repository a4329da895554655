"""Where things are in the trees of random checkpoints, and how to make a tree in which one of them is another."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import weights_trees as trees

# Integers as wide as the elements of other dtypes.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Step:
    """One step down a tree: into an item, by its key or index, or into an attribute."""

    kind: str
    key: Any

    def __str__(self) -> str:
        return f".{self.key}" if self.kind == "attribute" else f"[{self.key!r}]"


Path = tuple[Step, ...]


class NoSuchChange(Exception):
    """This node cannot be changed in this way."""


def sites(tree: Any) -> list[tuple[Path, Any]]:
    """Return every node of a tree with the path that leads to it; what contains itself is entered once."""
    return list(_sites(tree, (), ()))


def _sites(node: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    if id(node) in above:
        return
    yield path, node
    for step, child in _children(node):
        yield from _sites(child, (*path, step), (*above, id(node)))


def _children(node: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(node, dict):
        yield from ((Step("item", key), value) for key, value in node.items())
    elif isinstance(node, (list, tuple, deque)) and type(node) is not torch.Size:
        yield from ((Step("index", index), value) for index, value in enumerate(node))
    yield from ((Step("attribute", name), value) for name, value in attributes(node).items())


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes that a pickle of an object contains."""
    if isinstance(node, (type, enum.Enum)) or (callable(node) and not isinstance(node, torch.nn.Module)):
        return {}
    if isinstance(node, trees.Slotted):
        return {"left": node.left, "right": node.right}
    if isinstance(node, (torch.nn.Module, torch.Tensor, OrderedDict)) or type(node).__module__ in (
        "weights_trees",
        "argparse",
    ):
        return dict(vars(node)) if hasattr(node, "__dict__") else {}
    return {}


def node_at(tree: Any, path: Path) -> Any:
    """Return the node that a path leads to."""
    for step in path:
        tree = attributes(tree)[step.key] if step.kind == "attribute" else tree[step.key]
    return tree


def edited(tree: Any, path: Path, edit: Callable[[Any], Any]) -> Any:
    """Return a tree with one node replaced by `edit(node)`. Nothing of `tree` itself is changed."""
    if not path:
        return edit(tree)
    step, rest = path[0], path[1:]
    if step.kind == "attribute":
        value = edited(attributes(tree)[step.key], rest, edit)
        made = copied(tree)
        if isinstance(made, (trees.Slotted, torch.Tensor)):
            setattr(made, step.key, value)
        else:
            vars(made)[step.key] = value
        return made
    value = edited(tree[step.key], rest, edit)
    if isinstance(tree, tuple):
        return sequence_like(tree, [value if index == step.key else item for index, item in enumerate(tree)])
    if isinstance(tree, list):
        return sequence_like(tree, [value if index == step.key else item for index, item in enumerate(tree)])
    made = copied(tree)
    made[step.key] = value
    return made


def copied(node: Any) -> Any:
    if isinstance(node, torch.Tensor) and node.is_nested:
        raise NoSuchChange
    if isinstance(node, torch.Tensor):
        made = node.detach().as_subclass(type(node)) if type(node) is not torch.nn.Parameter else _parameter(node)
        made.__dict__.update(vars(node))
        return made
    return copy.copy(node)


def _parameter(node: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(node.detach(), node.requires_grad)


def sequence_like(model: Any, items: list[Any]) -> Any:
    """Return a sequence of a model's class with other items."""
    if isinstance(model, tuple):
        return type(model)(*items) if hasattr(model, "_fields") else tuple(items)
    if isinstance(model, deque):
        return deque(items, model.maxlen)
    made = copy.copy(model)
    # What contains itself continues to do so.
    made[:] = [made if item is model else item for item in items]
    return made


def copy_bits(target: torch.Tensor, found: torch.Tensor) -> None:
    """Copy elements without rounding: a float's NaN keeps its payload."""
    same = BITS.get(found.dtype.itemsize)
    if same is None:
        target.copy_(found)
    else:
        target.view(same).copy_(found.view(same))
