"""The same checkpoint saved again: other orders, layouts, protocols and storages, but the same content."""

from __future__ import annotations

import copy
import enum
import math
import random
from collections import OrderedDict, deque
from typing import Any

import torch
import weights_trees as trees
from weights_sites import attributes, copy_bits, sequence_like


def resaved(tree: Any, source: random.Random, *, is_flat: bool = False) -> Any:
    """Return a tree of the same content whose pickle differs as much as possible; if flat, with the same tensors."""
    return _Resaver(source, is_flat).again(tree)


class _Resaver:
    def __init__(self, source: random.Random, is_flat: bool) -> None:
        self._random = source
        self._is_flat = is_flat
        self._made: dict[int, Any] = {}
        self._above: set[int] = set()

    def again(self, node: Any) -> Any:
        is_known = id(node) in self._made
        # What is shared may be stored once or several times; what contains itself must stay so.
        if is_known and (id(node) in self._above or self._random.random() < 0.5):
            return self._made[id(node)]
        self._above.add(id(node))
        made = self._again(node)
        self._above.discard(id(node))
        self._made[id(node)] = made
        return made

    def _again(self, node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return self._tensor(node)
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, (list, deque)):
            items = list(node)
            made = self._made[id(node)] = copy.copy(node)
            made.clear()
            made.extend(self.again(item) for item in items)
            return made
        if type(node) is torch.Size:
            return node
        if isinstance(node, tuple):
            return sequence_like(node, [self.again(item) for item in node])
        if type(node) in (set, frozenset):
            return type(node)(self._shuffled(list(node)))
        return self._object(node)

    def _object(self, node: Any) -> Any:
        held = attributes(node)
        if not held or isinstance(node, enum.Enum):
            return node
        made = self._made[id(node)] = copy.copy(node)
        if isinstance(node, trees.Slotted):
            made.left, made.right = self.again(node.left), self.again(node.right)
            return made
        vars(made).clear()
        vars(made).update({name: self.again(held[name]) for name in self._shuffled(list(held))})
        return made

    def _dict(self, node: dict[Any, Any]) -> Any:
        keys = self._shuffled(list(node))
        made = self._made[id(node)] = copy.copy(node)
        if type(node) is dict and self._random.random() < 0.1:
            made = self._made[id(node)] = OrderedDict()
        made.clear()
        for key in keys:
            made[key] = self.again(node[key])
        if isinstance(node, OrderedDict) and vars(node):
            vars(made).update({name: self.again(value) for name, value in vars(node).items()})
        return made

    def _shuffled(self, items: list[Any]) -> list[Any]:
        return self._random.sample(items, len(items))

    def _tensor(self, node: torch.Tensor) -> Any:
        if node.layout != torch.strided or node.is_quantized or node.is_meta or node.is_nested:
            return node
        if node.is_conj() or node.is_neg() or node.dtype == torch.float4_e2m1fn_x2:
            return node
        made = self._laid_out(node.detach())
        if type(node) is torch.nn.Parameter:
            made = torch.nn.Parameter(made, requires_grad=node.requires_grad and self._random.random() < 0.5)
        elif type(node) not in (torch.Tensor, torch.nn.Buffer):
            made = made.as_subclass(type(node))
        for name, value in vars(node).items():
            setattr(made, name, self.again(value))
        return made

    def _laid_out(self, node: torch.Tensor) -> torch.Tensor:
        """Return the same elements in a storage of another size, at another place in it, in another order."""
        chance = self._random.random()
        if self._is_flat or chance < 0.3:
            return node
        order = self._shuffled(list(range(node.dim()))) if chance < 0.6 else list(range(node.dim()))
        strides = [0] * node.dim()
        step = 1 if chance < 0.8 else 2
        for dim in order:
            strides[dim] = step
            step *= max(1, node.shape[dim])
        first = self._random.randrange(3)
        storage = torch.zeros(first + max(1, step) + math.prod(node.shape), dtype=node.dtype)
        made = torch.empty(0, dtype=node.dtype).set_(
            storage.untyped_storage(), first, tuple(node.shape), tuple(strides)
        )
        copy_bits(made, node)
        return made
