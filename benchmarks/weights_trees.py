"""Random checkpoints: trees of everything that people save with `torch.save`. Tests and benchmarks share them."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import functools
import math
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

# torch warns of prototypes (sparse CSR, nested, quantized) whenever one is made.
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*|weights_trees")

WORDS = ("weight", "bias", "step", "lr", "module", "model", "state", "exp_avg", "w", "a.b", "a", "b", "0", "1", "é", "")
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 255, 256, 65536, 2**31, 2**53, 2**53 + 1, -(2**63), 2**100, 10**40)
FLOATS = (0.0, -0.0, 1.0, 1e-3, 3e-4, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan)
TEXTS = ("", "a", "adam", "1", "None", "ü", "two\nlines", "x" * 70, "\ud800", "nul\0")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)


class Pair(NamedTuple):
    """A named tuple, as schedulers keep."""

    first: Any
    second: Any


class Couple(NamedTuple):
    """As `Pair`, in another class."""

    first: Any
    second: Any


@dataclass
class Config:
    """A dataclass, as trainers keep."""

    size: Any
    name: Any


@dataclass
class Settings:
    """As `Config`, in another class."""

    size: Any
    name: Any


@dataclass(slots=True)
class Slotted:
    """An object without a dictionary."""

    left: Any
    right: Any


class Reduced:
    """An object that is made by a call with arguments, and then gets a state of its own form."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.extra: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, self.args, [self.extra]

    def __setstate__(self, state: list[Any]) -> None:
        (self.extra,) = state


class Kind(enum.Enum):
    """An enumeration."""

    FIRST = 1
    SECOND = 2


class Text(str):
    """A text of its own class."""


class Table(dict):  # type: ignore[type-arg]
    """A dictionary of its own class."""


class Series(list):  # type: ignore[type-arg]
    """A list of its own class."""


class Dressed(torch.Tensor):
    """A tensor of its own class."""


class Robed(torch.Tensor):
    """As `Dressed`, in another class."""


KEYS: tuple[Any, ...] = (
    *(*WORDS, 0, 1, 2, -1, 2**40, 2**70, True, False, None, 1.5, math.inf, b"k", "None", "True"),
    *((1, 2), ("a", 0), (1, (None, "b")), tuple(range(20)), ("long" * 20, 1), Kind.FIRST, torch.float32, Text("a")),
    frozenset({1, "a"}),
)


class Draw:
    """Draws one checkpoint: `random` decides everything, `parts_left` bounds its size."""

    def __init__(self, source: random.Random, parts: int = 24) -> None:
        self.random = source
        self.parts_left = parts
        self._tensors: list[torch.Tensor] = []
        self._containers: list[Any] = []

    def checkpoint(self) -> Any:
        """Return a random object: nearly always a dictionary at the top."""
        if self.random.random() < 0.05:
            return self.tree(1)
        found = self._dict(0)
        found.setdefault("w", self.dense())
        return found

    def tree(self, depth: int) -> Any:
        self.parts_left -= 1
        chance = self.random.random()
        if depth < 6 and self.parts_left > 0 and chance < 0.45:
            if self._containers and self.random.random() < 0.06:
                return self.random.choice(self._containers)
            made = self.random.choice(CONTAINERS)(self, depth)
            self._containers.append(made)
            return made
        if chance < 0.72:
            return self.tensor()
        return self.random.choice(LEAVES)(self)

    # Containers.

    def _dict(self, depth: int) -> dict[Any, Any]:
        if self.random.random() < 0.6:
            keys = [self.random.choice(WORDS) for _ in range(self.random.randrange(6))]
        else:
            keys = [self.random.choice(KEYS) for _ in range(self.random.randrange(6))]
        return {key: self.tree(depth + 1) for key in keys}

    def _ordered(self, depth: int) -> Any:
        made = OrderedDict(self._dict(depth))
        if self.random.random() < 0.5:
            made._metadata = OrderedDict(version=self.number())  # type: ignore[attr-defined]
        return made

    def _default(self, depth: int) -> Any:
        return defaultdict(self.random.choice((int, list, dict, None)), self._dict(depth))

    def _items(self, depth: int) -> list[Any]:
        if self.random.random() < 0.15:
            return [self.number() for _ in range(self.random.randrange(14, 40))]
        return [self.tree(depth + 1) for _ in range(self.random.randrange(5))]

    def _object(self, depth: int) -> Any:
        first, second = self.tree(depth + 1), self.tree(depth + 1)
        made = self.random.choice((Pair, Config, Settings, Slotted, Reduced, "namespace"))
        if made == "namespace":
            return argparse.Namespace(lr=first, steps=second)
        found = made(first, second)  # type: ignore[operator]
        if isinstance(found, Reduced):
            found.extra = self.number()
        return found

    def _loop(self, depth: int) -> Any:
        made: list[Any] = self._items(depth)
        made.append(made)
        return made

    # Leaves.

    def number(self) -> Any:
        return self.random.choice((self.random.choice(NUMBERS), self.random.choice(FLOATS), self.random.random()))

    def text(self) -> str:
        return self.random.choice(TEXTS)

    def bytes(self, length: int) -> bytes:
        return self.random.randbytes(length)

    def elements(self) -> Any:
        plain: tuple[Any, ...] = (*NUMBERS[:6], "a", "b", "lr", None, 1.5, b"x", (1, 2), *"cdefgh")
        made = {self.random.choice(plain) for _ in range(self.random.randrange(10))}
        return frozenset(made) if self.random.random() < 0.3 else made

    def rare(self) -> Any:
        """Return an object that a pickle makes by a call."""
        return self.random.choice(
            (
                complex(self.random.random(), 1.0),
                datetime.datetime(2026, 1, 1 + self.random.randrange(28)),
                PurePosixPath("a") / self.text().replace("\0", ""),
                decimal.Decimal(self.random.randrange(99)),
                range(self.random.randrange(5)),
                slice(0, self.random.randrange(5)),
                functools.partial(max, self.random.randrange(9)),
                self.random.choice(list(Kind)),
                Text(self.text()),
                Counter(self.text()),
                torch.nn.functional.relu,
                self.random.choice((torch.float32, torch.int8)),
                torch.Size((self.random.randrange(4), 2)),
                torch.device("cpu"),
                Config,
            )
        )

    def state_of_generator(self) -> Any:
        seed = self.random.randrange(2**31)
        if self.random.random() < 0.3:
            return torch.Generator().manual_seed(seed).get_state()
        return np.random.RandomState(seed).get_state() if seed % 2 else random.Random(seed).getstate()

    def array(self) -> Any:
        dtype = self.random.choice(("f4", "f8", "i8", "u1", "c8", "f2", "b1", ">f4", "S3", "U2", "M8[s]", "O", "i4,f8"))
        shape = tuple(self.random.randrange(4) for _ in range(self.random.randrange(3)))
        count = math.prod(shape)
        if dtype == "O":
            made = np.array([self.number() for _ in range(count)] + [None], dtype=object)[:-1].reshape(shape)
        elif dtype in ("S3", "U2"):
            made = np.array([self.random.choice("abc") for _ in range(count)], dtype=dtype).reshape(shape)
        else:
            width = np.dtype(dtype).itemsize
            made = np.frombuffer(bytes(self._bits(dtype, width * count)), dtype=dtype).reshape(shape).copy()
        if self.random.random() < 0.2:
            return np.asfortranarray(made)
        is_scalar = made.size and dtype not in ("O", "i4,f8") and self.random.random() < 0.3
        return made.flat[0] if is_scalar else made

    def _bits(self, dtype: str, length: int) -> bytes:
        return self.bytes(length) if dtype != "b1" else bytes(self.random.randrange(2) for _ in range(length))

    def module(self) -> Any:
        torch.manual_seed(self.random.randrange(2**31))
        made = self.random.choice(
            (
                lambda: torch.nn.Linear(2, self.random.randrange(1, 3)),
                lambda: torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.Linear(2, 1, bias=False)),
                lambda: torch.nn.BatchNorm1d(2),
            )
        )()
        return made if self.random.random() < 0.5 else made.state_dict()

    def optimizer(self) -> Any:
        parameter = torch.nn.Parameter(self.floats((2,)))
        kind = self.random.choice((torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW))
        optimizer = kind([parameter], lr=self.random.choice((1e-3, 1e-4)))
        parameter.grad = self.floats((2,))
        optimizer.step()
        return optimizer.state_dict()

    # Tensors.

    def floats(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([self.random.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)

    def dense(self, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
        """Return a contiguous tensor of random bits."""
        dtype = self.random.choice(dtypes) if self.random.random() < 0.6 else torch.float32
        shape = [self.random.randrange(1, 4) for _ in range(self.random.randrange(4))]
        if shape and self.random.random() < 0.05:
            shape[0] = 0
        count = math.prod(shape)
        if dtype == torch.bool:
            return torch.tensor([self.random.random() < 0.5 for _ in range(count)]).reshape(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(bytearray(self.bytes(count * dtype.itemsize)), dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    def tensor(self) -> Any:
        """Return a tensor of any kind, often a view of the storage of an earlier one."""
        chance = self.random.random()
        if chance < 0.4 or not self._tensors:
            made = self.dense()
        elif chance < 0.65:
            made = view_of(self.random.choice(self._tensors), self.random)
        elif chance < 0.7:
            return self.random.choice(self._tensors)
        else:
            return self.random.choice(KINDS)(self)
        self._tensors.append(made)
        return made

    def parameter(self) -> Any:
        made = torch.nn.Parameter(self.floats((2, 2)))
        if self.random.random() < 0.5:
            made.is_shared = self.number()  # type: ignore[attr-defined]
        return made

    def dressed(self) -> Any:
        made = self.floats((3,)).as_subclass(self.random.choice((Dressed, Robed)))
        if self.random.random() < 0.5:
            made.note = self.text()  # type: ignore[attr-defined]
        return made

    def attributed(self) -> Any:
        made = self.dense()
        made.note = self.number()  # type: ignore[attr-defined]
        return made

    def quantized(self) -> Any:
        scale, zero = self.random.choice((0.5, 0.25)), self.random.randrange(3)
        if self.random.random() < 0.5:
            return torch.quantize_per_tensor(self.floats((2, 2)), scale, zero, torch.qint8)
        scales, zeros = torch.tensor([scale, 1.0]), torch.tensor([zero, 0])
        return torch.quantize_per_channel(self.floats((2, 2)), scales, zeros, 0, torch.qint8)

    def sparse(self) -> Any:
        dense = self.floats((3, 2)).relu() + torch.eye(3, 2)
        return self.random.choice((torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc))(
            dense
        )

    def nested(self) -> Any:
        layout = self.random.choice((torch.strided, torch.jagged))
        return torch.nested.nested_tensor([self.floats((2, 2)), self.floats((1, 2))], layout=layout)

    def meta(self) -> Any:
        return torch.empty(self.random.randrange(1, 4), 2, device="meta")

    def conjugated(self) -> Any:
        made = torch.complex(self.floats((2,)), self.floats((2,))).conj()
        return made.imag if self.random.random() < 0.5 else made

    def storage(self) -> Any:
        made = self.dense((torch.float32, torch.uint8))
        return (
            made.untyped_storage()
            if self.random.random() < 0.5
            else torch.storage.TypedStorage(wrap_storage=made.untyped_storage(), dtype=made.dtype, _internal=True)
        )


def view_of(base: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Return a view of a tensor: transposed, cut, thinned out, expanded, reshaped."""
    if base.dim() == 0 or base.numel() == 0:
        return base.reshape(-1)
    dim = source.randrange(base.dim())
    length = base.shape[dim]
    first = source.randrange(length)
    views: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: base.transpose(dim, -1),
        lambda: base.narrow(dim, first, 1 + source.randrange(length - first)),
        lambda: base[(slice(None),) * dim + (slice(None, None, 2),)],
        lambda: base.unsqueeze(dim).expand(*base.shape[:dim], 2, *base.shape[dim:]),
        lambda: base.reshape(-1),
        lambda: base.select(dim, first),
        lambda: base.detach(),
    )
    return source.choice(views)()


CONTAINERS: tuple[Callable[[Draw, int], Any], ...] = (
    Draw._dict,
    Draw._dict,
    Draw._ordered,
    Draw._default,
    lambda draw, depth: Table(draw._dict(depth)),
    Draw._items,
    lambda draw, depth: tuple(draw._items(depth)),
    lambda draw, depth: deque(draw._items(depth), draw.random.choice((None, 50))),
    lambda draw, depth: Series(draw._items(depth)),
    Draw._object,
    Draw._object,
    Draw._loop,
)
LEAVES: tuple[Callable[[Draw], Any], ...] = (
    Draw.number,
    Draw.number,
    Draw.number,
    Draw.text,
    lambda draw: draw.random.choice((None, True, False)),
    lambda draw: draw.bytes(draw.random.randrange(80)),
    lambda draw: bytearray(draw.bytes(3)),
    Draw.elements,
    Draw.rare,
    Draw.array,
    Draw.array,
    Draw.module,
    Draw.optimizer,
    Draw.state_of_generator,
)
KINDS: tuple[Callable[[Draw], Any], ...] = (
    Draw.parameter,
    Draw.parameter,
    Draw.dressed,
    Draw.attributed,
    Draw.quantized,
    Draw.sparse,
    Draw.nested,
    Draw.meta,
    Draw.conjugated,
    Draw.storage,
    lambda draw: torch.nn.Buffer(draw.dense()),
)
