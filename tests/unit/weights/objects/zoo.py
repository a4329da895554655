"""Objects that checkpoints contain: each kind once as it is, and once with one change."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import operator
import random
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

RAMP = torch.arange(24.0).reshape(4, 6)


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    """A dataclass."""

    rate: float = 0.1
    tensor: Any = None
    names: tuple[str, ...] = ("a", "b")


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    rate: float = 0.1


class Color(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = 2


class Stage(enum.IntFlag):
    """An enum of integers."""

    FIRST = 1
    LAST = 2


class Tagged(torch.Tensor):
    """A class of tensors of its own."""


class Other(torch.Tensor):
    """Another class of tensors."""


class Pair(torch.Tensor):
    """A tensor around two others, as quantized weights are."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner, made.scale = inner, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Plain:
    """An object with attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Custom:
    """An object with a state of its own form."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return ["custom", self.value]

    def __setstate__(self, state: Any) -> None:
        self.value = state[1]


class Words(dict[str, int]):
    """A class of dictionaries of its own."""


def change(value: float = 1.0, at: int = 3) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that adds to one element."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[at] += value
        return found

    return changed


CHANGED = change()(RAMP)


def flipped(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of any dtype that differ in one bit."""
    raw = torch.arange(1, 49, dtype=torch.uint8).reshape(3, 16)
    other = raw.clone()
    other[1, 5] ^= 1
    return raw.view(dtype), other.view(dtype)


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "complex128", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
]  # fmt: skip


def quantized(kind: torch.dtype, values: torch.Tensor = RAMP, scale: float = 0.5, zero: int = 3) -> torch.Tensor:
    """Return a tensor quantized as a whole."""
    return torch.quantize_per_tensor(values, scale, zero, kind)


def by_channel(scale: float = 0.5, zero: int = 1, axis: int = 0) -> torch.Tensor:
    """Return a tensor quantized by channel."""
    square = RAMP[:4, :4].contiguous()
    scales, zeros = torch.tensor([0.25, scale, 1.0, 2.0]), torch.tensor([0, zero, 2, 3])
    return torch.quantize_per_channel(square, scales, zeros, axis, torch.quint8)


def with_attributes(tensor: Any, **attributes: Any) -> Any:
    """Set attributes on a tensor, and return it."""
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def module(value: float = 0.0, momentum: float = 0.1) -> torch.nn.Module:
    """Return a whole model of two layers, with buffers."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=momentum))
    with torch.no_grad():
        made[0].weight[1, 1] += value
    return made


def optimizer(steps: int = 2, rate: float = 0.1) -> torch.optim.Optimizer:
    """Return a whole optimizer, whose state has parameters as keys."""
    parameters = [torch.nn.Parameter(RAMP.clone()), torch.nn.Parameter(torch.ones(3))]
    made = torch.optim.AdamW(parameters, lr=rate)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made.step()
        made.zero_grad()
    return made


def scheduler(steps: int = 2) -> Any:
    """Return a whole scheduler with its optimizer."""
    made = torch.optim.lr_scheduler.StepLR(optimizer(), 1)
    for _ in range(steps):
        made.step()
    return made


def generator(seed: int) -> torch.Generator:
    """Return one of torch's generators."""
    return torch.Generator().manual_seed(seed)


def records(value: float = 2.0) -> np.ndarray:
    """Return an array of records."""
    return np.array([(1, 1.0), (2, value)], dtype=[("count", "<i4"), ("share", "<f8")])


def objects(*values: Any) -> np.ndarray:
    """Return an array of Python objects."""
    made = np.empty(len(values), object)
    made[:] = values
    return made


def twice(first: Any, second: Any) -> dict[str, Any]:
    """Return two entries."""
    return {"one": first, "two": second}


def tied() -> dict[str, Any]:
    """Return one tensor under two names, at two depths, and one dictionary twice."""
    inside = {"weight": RAMP.clone()}
    return {"embed": inside, "again": inside, "head": {"weight": inside["weight"], "part": inside["weight"][1:3]}}


def untied(at: int) -> dict[str, Any]:
    """Return the same entries with one of the tensors changed."""
    found = copy.deepcopy(tied())
    found["again"] = copy.deepcopy(found["again"])
    found["head"]["weight"] = found["head"]["weight"].clone()
    (found["again"] if at == 0 else found["head"])["weight"][2, 2] += 1
    return found


def kinds() -> dict[str, tuple[Any, Any]]:
    """Return each kind: the object, and the object with one change."""
    return {
        **{dtype: flipped(getattr(torch, dtype)) for dtype in DTYPES},
        "bool": (RAMP > 3, RAMP > 4),
        "empty": (torch.empty(0, 3), torch.empty(0, 4)),
        "scalar tensor": (torch.tensor(2**53), torch.tensor(2**53 + 1)),
        "parameter": (torch.nn.Parameter(RAMP), torch.nn.Parameter(CHANGED)),
        "buffer": (torch.nn.Buffer(RAMP), torch.nn.Buffer(CHANGED)),
        "persistent buffer": (torch.nn.Buffer(RAMP), torch.nn.Buffer(RAMP, persistent=False)),
        "quantized": (quantized(torch.qint8), quantized(torch.qint8, CHANGED)),
        "quantized unsigned": (quantized(torch.quint8), quantized(torch.quint8, CHANGED)),
        "quantized wide": (quantized(torch.qint32), quantized(torch.qint32, CHANGED)),
        "quantized in halves": (quantized(torch.quint4x2, RAMP % 5), quantized(torch.quint4x2, CHANGED % 5)),
        "scale": (quantized(torch.qint8), quantized(torch.qint8, RAMP * 2, 1.0)),
        "zero point": (quantized(torch.qint8), quantized(torch.qint8, RAMP + 0.5, zero=2)),
        "channel scale": (by_channel(), by_channel(scale=0.75)),
        "channel zero": (by_channel(), by_channel(zero=2)),
        "channel axis": (by_channel(), by_channel(axis=1)),
        "coo values": (RAMP.to_sparse(), CHANGED.to_sparse()),
        "coo size": (
            RAMP.to_sparse(),
            torch.sparse_coo_tensor(RAMP.to_sparse().indices(), RAMP.to_sparse().values(), (4, 7)),
        ),
        "coo coalesced": (RAMP.to_sparse(), RAMP.to_sparse()._coalesced_(False)),
        "csr": (RAMP.to_sparse_csr(), CHANGED.to_sparse_csr()),
        "csr columns": (torch.eye(4).to_sparse_csr(), torch.eye(4)[[1, 0, 2, 3]].to_sparse_csr()),
        "csc": (RAMP.to_sparse_csc(), CHANGED.to_sparse_csc()),
        "bsr": (RAMP.to_sparse_bsr((2, 3)), CHANGED.to_sparse_bsr((2, 3))),
        "bsc": (RAMP.to_sparse_bsc((2, 3)), CHANGED.to_sparse_bsc((2, 3))),
        "nested": (
            torch.nested.nested_tensor([RAMP[:2], RAMP[2:, :3]]),
            torch.nested.nested_tensor([CHANGED[:2], RAMP[2:, :3]]),
        ),
        "jagged": (
            torch.nested.nested_tensor([RAMP[0], RAMP[1]], layout=torch.jagged),
            torch.nested.nested_tensor([CHANGED[0], RAMP[1]], layout=torch.jagged),
        ),
        "meta shape": (torch.empty(2, 3, device="meta"), torch.empty(3, 2, device="meta")),
        "meta dtype": (torch.empty(2, device="meta"), torch.empty(2, device="meta", dtype=torch.int32)),
        "conj": (torch.complex(RAMP, RAMP).conj(), torch.complex(RAMP, RAMP)),
        "conj values": (torch.complex(RAMP, RAMP).conj(), torch.complex(RAMP, CHANGED).conj()),
        "neg": (torch.complex(RAMP, RAMP).conj().imag, torch.complex(RAMP, CHANGED).conj().imag),
        "subclass": (RAMP.as_subclass(Tagged), CHANGED.as_subclass(Tagged)),
        "subclass name": (RAMP.as_subclass(Tagged), RAMP.clone().as_subclass(Other)),
        "subclass parameter": (
            torch.nn.Parameter(RAMP.as_subclass(Tagged)),
            torch.nn.Parameter(CHANGED.as_subclass(Tagged)),
        ),
        "wrapper": (Pair(RAMP, torch.ones(1)), Pair(RAMP, torch.full((1,), 2.0))),
        "wrapper inner": (Pair(RAMP, torch.ones(1)), Pair(CHANGED, torch.ones(1))),
        "attributes": (with_attributes(RAMP.clone(), note="a"), with_attributes(RAMP.clone(), note="b")),
        "tensor attribute": (
            with_attributes(torch.nn.Parameter(RAMP), master=RAMP),
            with_attributes(torch.nn.Parameter(RAMP), master=CHANGED),
        ),
        "no attribute": (with_attributes(RAMP.clone(), note="a"), RAMP.clone()),
        "typed storage": (RAMP.storage(), CHANGED.storage()),
        "untyped storage": (RAMP.clone().untyped_storage(), CHANGED.clone().untyped_storage()),
        "expanded": (torch.ones(1, 3).expand(4, 3), torch.full((1, 3), 2.0).expand(4, 3)),
        "transposed": (RAMP.t(), CHANGED.t()),
        "torch objects": (
            [torch.device("cpu"), torch.float32, torch.Size([2, 3]), torch.strided],
            [torch.device("cpu"), torch.float32, torch.Size([2, 4]), torch.strided],
        ),
        "device": (torch.device("cpu"), torch.device("cuda:1")),
        "torch dtype": (torch.float32, torch.float16),
        **{
            f"array {code}": (np.arange(6).astype(code), (np.arange(6) + (np.arange(6) == 5)).astype(code))
            for code in (
                "f2",
                "f4",
                "f8",
                "i1",
                "i2",
                "i4",
                "i8",
                "u1",
                "u2",
                "u4",
                "u8",
                "c8",
                "c16",
                ">f4",
                "M8[s]",
                "m8[s]",
            )
        },
        "array bool": (np.array([True, False]), np.array([True, True])),
        "array order": (np.arange(600.0).reshape(20, 30).T, np.arange(600.0).reshape(20, 30).T + np.eye(30, 20)),
        "array text": (np.array(["ab", "c"]), np.array(["ab", "d"])),
        "array bytes": (np.array([b"ab", b"c"]), np.array([b"ab", b"d"])),
        "array shape": (np.zeros((2, 3)), np.zeros((3, 2))),
        "array empty": (np.zeros((0, 3)), np.zeros((0, 4))),
        "array dtype": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
        "array scalar": (np.array(1.5), np.array(2.5)),
        "records": (records(), records(3.0)),
        "record array": (records().view(np.recarray), records(3.0).view(np.recarray)),
        "objects": (objects(1, "a", None), objects(1, "b", None)),
        "objects with tensors": (objects(1, RAMP), objects(1, CHANGED)),
        "masked": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
        "numpy scalar": (np.float64(0.001), np.float64(0.002)),
        "numpy int": (np.int64(2**53), np.int64(2**53 + 1)),
        "numpy bool": (np.bool_(True), np.bool_(False)),
        "numpy dtype": (np.dtype("f4"), np.dtype("f8")),
        "datetime64": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
        "dataclass": (Settings(), Settings(rate=0.2)),
        "dataclass with tensor": (Settings(tensor=RAMP), Settings(tensor=CHANGED)),
        "dataclass with slots": (Slotted(), Slotted(0.2)),
        "named tuple": (Point(1, RAMP), Point(2, RAMP)),
        "named tuple with tensor": (Point(1, RAMP), Point(1, CHANGED)),
        "deque": (collections.deque([1, 2, 3]), collections.deque([1, 2, 4])),
        "deque length": (collections.deque([1, 2], 4), collections.deque([1, 2], 5)),
        "set": ({"a", "b", "c", "long name"}, {"a", "b", "d", "long name"}),
        "frozenset": (frozenset(["x", "y", ("z", 1)]), frozenset(["x", "y", ("z", 2)])),
        "set of enums": ({Color.RED, 7}, {Color.BLUE, 7}),
        "namespace": (argparse.Namespace(lr=0.1, seed=7), argparse.Namespace(lr=0.1, seed=8)),
        "enum": (Color.RED, Color.BLUE),
        "flag": (Stage.FIRST, Stage.FIRST | Stage.LAST),
        "defaultdict": (collections.defaultdict(list, {"a": [1]}), collections.defaultdict(list, {"a": [2]})),
        "default": (collections.defaultdict(list, {"a": [1]}), collections.defaultdict(set, {"a": [1]})),
        "counter": (collections.Counter("aab"), collections.Counter("abb")),
        "ordered": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
        "dictionary class": (Words(a=1), Words(a=2)),
        "datetime": (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, 3, 4, 5, 7)),
        "time zone": (
            datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
            datetime.datetime(2026, 1, 2, tzinfo=None),
        ),
        "date": (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
        "timedelta": (datetime.timedelta(1), datetime.timedelta(2)),
        "path": (PurePosixPath("/data/a"), PurePosixPath("/data/b")),
        "slice": (slice(1, 2), slice(1, 3)),
        "range": (range(3), range(4)),
        "partial": (functools.partial(max, 1, key=abs), functools.partial(max, 2, key=abs)),
        "function": (operator.add, operator.sub),
        "class": (Plain, Custom),
        "uuid": (uuid.UUID(int=1), uuid.UUID(int=2)),
        "decimal": (decimal.Decimal("1.5"), decimal.Decimal("1.50")),
        "complex": (1 + 2j, 1 + 3j),
        "bytes": (b"abc", b"abd"),
        "no bytes": (b"", b"\0"),
        "bytearray": (bytearray(b"abc"), bytearray(b"abd")),
        "text": ("plain", "plaim"),
        "long text": ("x" * 5000, "x" * 4999 + "y"),
        "none": (None, False),
        "int": (2**70, 2**70 + 1),
        "int or bool": (1, True),
        "int or float": (1, 1.0),
        "float": (0.1, 0.1 + 2**-56),
        "zero": (0.0, -0.0),
        "series": (list(range(100)), [*range(99), 0]),
        "object": (Plain(a=1, b=[RAMP]), Plain(a=2, b=[RAMP])),
        "state of its own": (Custom(1), Custom(2)),
        "whole module": (module(), module(1.0)),
        "module option": (module(), module(momentum=0.2)),
        "optimizer": (optimizer(), optimizer(3)),
        "optimizer rate": (optimizer(), optimizer(rate=0.2)),
        "scheduler": (scheduler(), scheduler(3)),
        "optimizer state": (optimizer().state_dict(), optimizer(3).state_dict()),
        "scheduler state": (scheduler().state_dict(), scheduler(3).state_dict()),
        "counts": (
            {"global_steps": 5, "last_epoch": 1, "betas": (0.9, 0.95)},
            {"global_steps": 5, "last_epoch": 1, "betas": (0.9, 0.99)},
        ),
        "torch generator": (generator(1), generator(2)),
        "torch random state": (generator(1).get_state(), generator(2).get_state()),
        "numpy random state": (np.random.RandomState(1).get_state(), np.random.RandomState(2).get_state()),
        "numpy legacy generator": (np.random.RandomState(1), np.random.RandomState(2)),
        "numpy generator": (np.random.default_rng(1), np.random.default_rng(2)),
        "numpy generator state": (
            np.random.default_rng(1).bit_generator.state,
            np.random.default_rng(2).bit_generator.state,
        ),
        "python random state": (random.Random(1).getstate(), random.Random(2).getstate()),
        "python generator": (random.Random(1), random.Random(2)),
        "tied inside": (tied(), untied(0)),
        "tied further": (tied(), untied(1)),
        "int key with text key": ({1: RAMP, "1": CHANGED}, {1: CHANGED, "1": RAMP}),
        "dotted key with nested": ({"a.b": RAMP, "a": {"b": CHANGED}}, {"a.b": CHANGED, "a": {"b": RAMP}}),
        "same name in two dicts": (twice({"w": RAMP}, {"w": CHANGED}), twice({"w": CHANGED}, {"w": RAMP})),
    }


def save(tree: Any, path: Path, *, is_zip: bool = True) -> Path:
    """Write a tree as torch does, without torch's advice about beta features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(tree, path, _use_new_zipfile_serialization=is_zip)
    return path


def write_all(folder: Path) -> None:
    """Write all kinds into one file in each container, and all changed kinds likewise."""
    for index, name in enumerate(("same", "changed")):
        tree = {kind: pair[index] for kind, pair in KINDS.items()}
        for container, is_zip in CONTAINERS.items():
            save(tree, folder / f"{name}-{container}.pt", is_zip=is_zip)


CONTAINERS = {"zip": True, "legacy": False}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    KINDS = kinds()
