"""Random changes of a checkpoint: one place is changed (a bit, a number, a key, a class); or nothing that counts."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import weights_trees as trees
from weights_sites import NoSuchChange, Path, copied, edited, sequence_like, sites

TWINS = {
    trees.Pair: trees.Couple,
    trees.Couple: trees.Pair,
    trees.Config: trees.Settings,
    trees.Settings: trees.Config,
    trees.Table: Counter,
    trees.Dressed: trees.Robed,
    trees.Robed: trees.Dressed,
}
SAME_WIDTH = {
    torch.float32: torch.int32,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
    torch.float64: torch.int64,
    torch.int64: torch.uint64,
    torch.int32: torch.uint32,
    torch.int16: torch.uint16,
    torch.uint8: torch.int8,
    torch.int8: torch.float8_e4m3fn,
    torch.float8_e4m3fn: torch.float8_e4m3fnuz,
    torch.float8_e5m2: torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu: torch.uint8,
    torch.complex64: torch.float64,
    torch.complex32: torch.int32,
    torch.float4_e2m1fn_x2: torch.uint8,
}


@dataclass(frozen=True)
class Change:
    """One change of a tree: what was changed, and where; `is_local` if it is one value or tensor that changed."""

    kind: str
    path: Path
    tree: Any
    is_local: bool

    @property
    def place(self) -> str:
        return "".join(map(str, self.path)) or "the whole"


# Changes of single values. Each takes the node and the source of chance, and returns the changed node.


def _number(node: Any, source: random.Random) -> Any:
    if type(node) is int:
        return source.choice((node + 1, node - 1, -node if node else 7, node ^ (1 << source.randrange(70))))
    if type(node) is float:
        raw = bytearray(struct.pack("<d", node))
        raw[source.randrange(8)] ^= 1 << source.randrange(8)
        return struct.unpack("<d", raw)[0]
    raise NoSuchChange


def _type(node: Any, source: random.Random) -> Any:
    """Return a value that looks alike or compares as equal, but has another type."""
    if isinstance(node, bool):
        return int(node)
    if type(node) is int:
        choices = [str(node), bool(node)] if node in (0, 1) else [str(node)]
        return source.choice([*choices, float(node)] if abs(node) < 2**53 else choices)
    if type(node) is float:
        return source.choice((str(node), int(node))) if math.isfinite(node) and node == int(node) else str(node)
    if node is None:
        return source.choice(("None", 0, False, "", {}, [], float("nan"), set()))
    if type(node) is str:
        return node.encode("utf-8", "surrogatepass")
    if type(node) is bytes:
        return node.decode("latin-1")
    if (type(node) is dict and not node) or (type(node) is list and not node):
        return source.choice((None, set(), "", [] if isinstance(node, dict) else {}))
    raise NoSuchChange


def _text(node: Any, source: random.Random) -> Any:
    if type(node) is bool:
        return not node
    if type(node) is str:
        at = source.randrange(len(node) + 1)
        return source.choice((node[:at] + "z" + node[at:], node[:at] + "\u0301" + node[at:], f"{node} "))
    if type(node) in (bytes, bytearray) and node:
        made = bytearray(node)
        made[source.randrange(len(made))] ^= 1 << source.randrange(8)
        return type(node)(made)
    raise NoSuchChange


def _element(node: Any, source: random.Random) -> Any:
    if type(node) not in (set, frozenset):
        raise NoSuchChange
    made = list(node)
    if made and source.random() < 0.6:
        made.pop(source.randrange(len(made)))
    if len(made) == len(node) or source.random() < 0.5:
        made.append(source.choice(["another", 77, (3, 4), None if None not in node else "None"]))
    return type(node)(made)


def _class(node: Any, source: random.Random) -> Any:
    twin = TWINS.get(type(node))
    if isinstance(node, type):
        return trees.Settings if node is trees.Config else trees.Config
    if isinstance(node, torch.dtype):
        return torch.float64 if node is not torch.float64 else torch.float32
    if node is torch.nn.functional.relu:
        return torch.nn.functional.gelu
    if isinstance(node, trees.Kind):
        return trees.Kind.FIRST if node is trees.Kind.SECOND else trees.Kind.SECOND
    if isinstance(node, defaultdict):
        return defaultdict(set, node)
    if twin is None:
        raise NoSuchChange
    if issubclass(twin, torch.Tensor):
        made = node.detach().as_subclass(twin)
        made.__dict__.update(vars(node))
        return made
    if isinstance(node, tuple):
        return twin(*node)
    return twin(*vars(node).values()) if dataclasses.is_dataclass(node) else twin(node)


# Changes of tensors and arrays.


def _bit(node: Any, source: random.Random) -> Any:
    """Return a copy with one bit of one element flipped."""
    if isinstance(node, np.ndarray) and node.size and node.dtype != object:
        return _flipped_array(node, source)
    if isinstance(node, np.generic):
        return _flipped_array(np.asarray(node), source)[()]
    if isinstance(node, torch.UntypedStorage) and node.nbytes():
        made_storage = node.clone()
        made_storage[0] = made_storage[0] ^ 1
        return made_storage
    if not isinstance(node, torch.Tensor) or not node.numel() or node.is_meta:
        raise NoSuchChange
    return _dressed_like(node, _flipped(node.detach(), source))


def _flipped_array(array: Any, source: random.Random) -> Any:
    if array.dtype.kind in "SU":
        raise NoSuchChange
    made = np.array(array, order="K")
    raw = bytearray(made.tobytes("A"))
    at = source.randrange(len(raw))
    raw[at] ^= 1 if made.dtype == bool else 1 << source.randrange(8)
    order = "F" if made.flags.f_contiguous and not made.flags.c_contiguous else "C"
    return np.frombuffer(bytes(raw), made.dtype).reshape(made.shape, order=order).copy(order)


def _flipped(tensor: torch.Tensor, source: random.Random) -> torch.Tensor:
    if tensor.is_conj():
        return _flipped(tensor.conj(), source).conj()
    if tensor.is_neg():
        return torch._neg_view(_flipped(torch._neg_view(tensor), source))
    if tensor.is_nested:
        parts = list(tensor.unbind())
        parts[0] = _flipped(parts[0].detach(), source)
        return torch.nested.nested_tensor(parts, layout=tensor.layout)
    if tensor.layout == torch.sparse_coo:
        held = tensor.coalesce()
        return torch.sparse_coo_tensor(held.indices(), _flipped(held.values(), source), held.shape, is_coalesced=True)
    if tensor.layout != torch.strided:
        is_rows = tensor.layout == torch.sparse_csr
        compressed, plain = (
            (tensor.crow_indices(), tensor.col_indices()) if is_rows else (tensor.ccol_indices(), tensor.row_indices())
        )
        values = _flipped(tensor.values(), source)
        return torch.sparse_compressed_tensor(compressed, plain, values, tensor.shape, layout=tensor.layout)
    if tensor.is_quantized:
        raw = tensor.int_repr().reshape(-1).clone()
        raw[source.randrange(raw.numel())] ^= 1 << source.randrange(7)
        return _requantized(tensor, raw.reshape(tensor.shape))
    made = torch.empty_strided(*_dense_strides(tensor), dtype=tensor.dtype)
    made.copy_(tensor) if tensor.dtype != torch.float4_e2m1fn_x2 else made.view(torch.uint8).copy_(
        tensor.view(torch.uint8)
    )
    return _flip_in_place(made, source)


def _dense_strides(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and row-major strides: a copy has no element twice, as an expanded tensor has."""
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    return tuple(tensor.shape), tuple(strides)


def _flip_in_place(made: torch.Tensor, source: random.Random) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    at = source.randrange(raw.numel())
    raw[at] ^= 1 if made.dtype == torch.bool else 1 << source.randrange(8)
    return made


def _requantized(tensor: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    if tensor.qscheme() == torch.per_tensor_affine:
        return torch._make_per_tensor_quantized_tensor(raw, tensor.q_scale(), tensor.q_zero_point())
    return torch._make_per_channel_quantized_tensor(
        raw, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    )


def _dressed_like(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if model.is_nested:
        return tensor
    if isinstance(model, torch.nn.Parameter):
        made: torch.Tensor = torch.nn.Parameter(tensor, requires_grad=model.requires_grad)
    elif isinstance(model, torch.nn.Buffer) or type(model) is torch.Tensor:
        made = tensor
    else:
        made = tensor.as_subclass(type(model))
    made.__dict__.update(vars(model))
    return made


def _quantizer(node: Any, source: random.Random) -> Any:
    if not isinstance(node, torch.Tensor) or not node.is_quantized or node.qscheme() != torch.per_tensor_affine:
        raise NoSuchChange
    return torch._make_per_tensor_quantized_tensor(node.int_repr(), node.q_scale() * 2, node.q_zero_point())


def _is_bare(node: Any) -> bool:
    """Whether a node is a tensor with nothing but its elements."""
    if type(node) is not torch.Tensor or vars(node) or node.layout != torch.strided:
        return False
    return not (node.is_quantized or node.is_meta or node.is_nested or node.is_conj() or node.is_neg())


def _dtype(node: Any, source: random.Random) -> Any:
    """Return the same bits with another dtype."""
    if isinstance(node, np.ndarray) and node.dtype in (np.float32, np.int64, np.float64, np.uint8):
        other = {"f4": "i4", "i8": "f8", "f8": "u8", "u1": "i1"}[node.dtype.str[1:]]
        return node.view(other)
    if isinstance(node, torch.Tensor) and node.is_meta:
        return node.to(torch.int32)
    if not _is_bare(node) or node.dtype not in SAME_WIDTH:
        raise NoSuchChange
    if node.dtype == torch.complex64 and node.is_contiguous():
        return torch.empty(0, dtype=torch.float64).set_(
            node.untyped_storage(), node.storage_offset(), node.shape, node.stride()
        )
    return node.detach().view(SAME_WIDTH[node.dtype])


def _shape(node: Any, source: random.Random) -> Any:
    """Return the same elements in another shape."""
    if isinstance(node, np.ndarray):
        return node.reshape(1, *node.shape)
    if isinstance(node, torch.Size):
        return torch.Size((*node, 1))
    if not _is_bare(node):
        raise NoSuchChange
    return source.choice((node.unsqueeze(0), node.unsqueeze(-1)))


# Changes of containers.


def _renamed(node: Any, source: random.Random) -> Any:
    if not isinstance(node, dict) or not node:
        raise NoSuchChange
    old = source.choice(list(node))
    others: list[Any] = [f"{old}x", f"x{old}", "other", 99]
    if not isinstance(old, str):
        others += [str(old)] * 3
    if type(old) is bytes:
        others += [bytes(reversed(old + b"x"))[: len(old)]] * 3
    if isinstance(old, trees.Kind):
        others += [trees.Kind.FIRST if old is trees.Kind.SECOND else trees.Kind.SECOND] * 3
    if isinstance(old, tuple):
        others += [tuple(f"{item}" for item in old)] * 3
    new = source.choice(others)
    if new in node:
        raise NoSuchChange
    made = _emptied(node)
    for key, value in node.items():
        made[new if key is old else key] = value
    return made


def _emptied(node: Any) -> Any:
    made = copy.copy(node)
    made.clear()
    return made


def _removed(node: Any, source: random.Random) -> Any:
    if isinstance(node, dict) and node:
        made = copy.copy(node)
        del made[source.choice(list(node))]
        return made
    if type(node) in (list, tuple, deque, trees.Series) and node:
        at = source.randrange(len(node))
        return sequence_like(node, [item for index, item in enumerate(node) if index != at])
    raise NoSuchChange


def _added(node: Any, source: random.Random) -> Any:
    new = source.choice((None, 0, "more", [], {}, torch.zeros(2), set(), torch.empty(0), b""))
    if isinstance(node, dict) and "more" not in node:
        made = copy.copy(node)
        made[source.choice(("more", ("more", 1)))] = new
        return made
    if type(node) in (list, tuple, deque, trees.Series):
        return sequence_like(node, [*node, new])
    if isinstance(node, trees.Config) or (type(node) is torch.Tensor and node.layout == torch.strided):
        made = copied(node)
        vars(made)["more"] = new
        return made
    raise NoSuchChange


def _duplicated(node: Any, source: random.Random) -> Any:
    if isinstance(node, dict) and node and "twin" not in node:
        made = copy.copy(node)
        made["twin"] = source.choice(list(node.values()))
        return made
    if type(node) in (list, tuple, deque, trees.Series) and node:
        at = source.randrange(len(node))
        return sequence_like(node, [*list(node)[:at], node[at], *list(node)[at:]])
    raise NoSuchChange


def _swapped(node: Any, source: random.Random) -> Any:
    """Return a sequence with two numbers or texts that differ in each other's place."""
    if type(node) not in (list, tuple, deque, trees.Series):
        raise NoSuchChange
    plain = [index for index, item in enumerate(node) if type(item) in (int, float, str, bool, type(None))]
    pairs = [(i, j) for i in plain for j in plain if i < j and repr(node[i]) != repr(node[j])]
    if not pairs:
        raise NoSuchChange
    i, j = source.choice(pairs)
    items = list(node)
    items[i], items[j] = items[j], items[i]
    return sequence_like(node, items)


LOCAL: dict[str, Callable[[Any, random.Random], Any]] = {
    "number": _number,
    "type of a value": _type,
    "character": _text,
    "element of a set": _element,
    "class": _class,
    "bit": _bit,
    "quantizer": _quantizer,
    "dtype, same bits": _dtype,
    "shape, same elements": _shape,
}
OTHERS: dict[str, Callable[[Any, random.Random], Any]] = {
    "key renamed": _renamed,
    "entry removed": _removed,
    "entry added": _added,
    "entry duplicated": _duplicated,
    "order of a sequence": _swapped,
}


KINDS = {**LOCAL, **OTHERS}


def draw_change(tree: Any, source: random.Random, kinds: Sequence[str] = tuple(KINDS)) -> Change:
    """Return a tree with one random change; every kind of change is equally likely where a tree allows it.

    Raises:
        NoSuchChange: the tree has nothing that can be changed in one of these ways.
    """
    places = sites(tree)
    for kind in source.sample(kinds, len(kinds)):
        for path, _ in source.sample(places, len(places)):
            try:
                made = edited(tree, path, lambda found, kind=kind: KINDS[kind](found, source))
            except NoSuchChange:
                continue
            return Change(kind, path, made, kind in LOCAL)
    raise NoSuchChange
