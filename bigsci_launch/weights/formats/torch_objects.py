"""What torch puts into a pickle: its storages, and the calls that rebuild tensors of every kind from them.

A tensor that is one storage with a layout becomes a `TensorNode`. Every other kind (sparse, nested, quantized, of a
class of its own, of an unknown dtype) becomes an object whose parts have torch's names, so that each part is compared.
Whether a tensor requires gradients, its hooks and its device are not compared: they are no part of the weights. The
functions are those of `torch/_utils.py` and `torch/_tensor.py` up to torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigsci_launch.weights.files.tensors import DTYPE_BYTES
from bigsci_launch.weights.objects.nodes import (
    DressedTensor,
    Instance,
    Named,
    Outside,
    StorageNode,
    TensorNode,
    is_attributes,
)
from bigsci_launch.weights.objects.texts import show

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "QInt8Storage": "QI8",
    "QUInt8Storage": "QU8",
    "QInt32Storage": "QI32",
    "QUInt4x2Storage": "QU4X2",
    "QUInt2x4Storage": "QU2X4",
    "UntypedStorage": "U8",
}
TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4_X2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
    "qint8": "QI8",
    "quint8": "QU8",
    "qint32": "QI32",
    "bits16": "BITS16",
    # One byte an element, whatever it means.
    **{name: name.upper() for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")},
    **{f"{kind}{bits}": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in range(1, 8)},
}
# Several elements share a byte, in an order that only torch's kernels know.
PACKED_STORAGES = ("QU4X2", "QU2X4")
# Classes of tensors that hold nothing more than a tensor.
PLAIN_CLASSES = (
    Named("torch", "Tensor"),
    Named("torch.nn.parameter", "Parameter"),
    Named("torch.nn.parameter", "Buffer"),
)
# Characters of the key of a storage, which is a number or an address.
MAX_KEY_LENGTH = 256
FROM_TYPE = (Named("torch._tensor", "_rebuild_from_type_v2"), Named("torch._tensor", "_rebuild_from_type"))
REBUILD_JAGGED = Named("torch.nested._internal.nested_tensor", "_rebuild_njt")
JAGGED = Named("torch", "jagged tensor")
GET_LAYOUT = Named("torch.serialization", "_get_layout")
SPARSE_PARTS = {
    "sparse_coo": ("indices", "values", "size", "is_coalesced"),
    "sparse_csr": ("crow_indices", "col_indices", "values", "size"),
    "sparse_bsr": ("crow_indices", "col_indices", "values", "size"),
    "sparse_csc": ("ccol_indices", "row_indices", "values", "size"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values", "size"),
}


class TorchObjects:
    """Makes tensors and storages of what one pickle names; `widths` are the bytes per element of each storage.

    A storage of unknown width has none. `keys` are those of all storages; `prefix` is put before each.
    """

    def __init__(self, prefix: str = "") -> None:
        self.widths: dict[str, int] = {}
        self.keys: set[str] = set()
        self._prefix = prefix

    def refer(self, reference: Any) -> Any:
        # ("storage", storage class, key, device, number of elements[, view]) in both containers.
        if isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage":
            named, key = reference[1], reference[2]
            is_storage = isinstance(named, Named) and named.module.startswith("torch")
            if is_storage and isinstance(key, (str, int)) and len(str(key)) <= MAX_KEY_LENGTH:
                return self._storage(named.name, f"{self._prefix}{key}")
        # ("module", class, source file, source): the older container has the source of each module's class.
        if isinstance(reference, tuple) and len(reference) == 4 and reference[0] == "module":
            return reference[1]
        return Outside(str(reference.made_by) if isinstance(reference, Instance) else show(reference))

    def _storage(self, class_name: str, key: str) -> StorageNode:
        self.keys.add(key)
        dtype = STORAGE_DTYPES.get(class_name)
        if dtype is None:
            return StorageNode(class_name, key)
        self.widths[key] = DTYPE_BYTES[dtype]
        return StorageNode(dtype, key)

    def make(self, named: Named, args: tuple[Any, ...]) -> Any:
        """Return what a call of one of torch's functions makes; None for any other function."""
        if named in FROM_TYPE and len(args) == 4 and isinstance(args[0], Named) and isinstance(args[2], tuple):
            made = self.make(args[0], args[2])
            return _with_class(Instance(args[0], args[2]) if made is None else made, args[1], args[3])
        if named == REBUILD_JAGGED and len(args) == 1 and is_attributes(args[0]):
            return Instance(JAGGED, kwargs={key: part for key, part in args[0].items() if key != "requires_grad"})
        if named == GET_LAYOUT and len(args) == 1 and isinstance(args[0], str):
            return Named("", args[0])
        if named.module == "torch.jit._pickle" and named.name.startswith("build_") and len(args) == 1:
            return args[0]
        if named.module != "torch._utils" or named.name not in REBUILDERS:
            return None
        least, rebuild = REBUILDERS[named.name]
        return rebuild(*args) if len(args) >= least else None


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """`_rebuild_tensor_v2` has requires_grad, hooks and metadata (whether it is conjugated) after the strides."""
    dtype = storage.dtype if isinstance(storage, StorageNode) else None
    is_known = dtype in DTYPE_BYTES
    return _tensor(storage, dtype if is_known else None, offset, shape, strides, rest[2] if len(rest) > 2 else None)


def _rebuild_with_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Any:
    known = TORCH_DTYPES.get(dtype.name) if isinstance(dtype, Named) and dtype.module == "torch" else None
    made = _tensor(storage, known, offset, shape, strides, rest[0] if rest else None)
    return Instance(made.made_by, kwargs={**made.kwargs, "dtype": dtype}) if isinstance(made, Instance) else made


def _tensor(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any, metadata: Any) -> Any:
    if not isinstance(storage, StorageNode) or dtype is None or not _are_lengths((offset,), shape, strides):
        return _parts("tensor", storage=storage, offset=offset, shape=_size(shape), strides=strides, metadata=metadata)
    node = TensorNode(storage.key, dtype, offset, tuple(shape), tuple(strides))
    return DressedTensor(node, {"metadata": metadata}) if metadata else node


def _are_lengths(*series: Any) -> bool:
    return all(isinstance(lengths, (list, tuple)) and all(type(n) is int for n in lengths) for lengths in series)


def _parts(kind: str, **parts: Any) -> Instance:
    return Instance(Named("torch", kind), kwargs=parts)


def _size(shape: Any) -> Any:
    return Instance(Named("torch", "Size"), (tuple(shape),)) if _are_lengths(shape) else shape


def _first(tensor: Any, *rest: Any) -> Any:
    return tensor


def _with_attributes(tensor: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
    return _with_class(tensor, PLAIN_CLASSES[0], state)


def _with_class(tensor: Any, class_: Any, state: Any) -> Any:
    extras = {} if class_ in PLAIN_CLASSES else {"class": class_}
    extras |= {"attributes": _attributes(state)} if state else {}
    if isinstance(tensor, TensorNode):
        return DressedTensor(tensor, extras) if extras else tensor
    if isinstance(tensor, DressedTensor):
        return DressedTensor(tensor.tensor, {**tensor.extras, **extras})
    if isinstance(tensor, Instance) and tensor.made_by == JAGGED and is_attributes(extras.get("attributes")):
        extras["attributes"] = _without_parts(extras["attributes"], tensor.kwargs)
    if isinstance(tensor, Instance) and not tensor.args:
        return Instance(tensor.made_by, kwargs={**tensor.kwargs, **extras})
    return _parts("tensor", content=tensor, **extras) if extras else tensor


def _without_parts(attributes: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a jagged tensor without those that are its parts, which its constructor sets."""
    return {
        name: value
        for name, value in attributes.items()
        if not any(key in parts and _is_one(value, parts[key]) for key in (name, name.removeprefix("_")))
    }


def _is_one(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) is int and a == b)


def _attributes(state: Any) -> Any:
    """Return the attributes of a state of two parts, the second for `__slots__`, as one dictionary."""
    if isinstance(state, tuple) and all(part is None or is_attributes(part) for part in state):
        return {name: value for part in state for name, value in (part or {}).items()}
    return state


def _rebuild_quantized(storage: Any, offset: Any, shape: Any, strides: Any, quantizer: Any, *rest: Any) -> Any:
    """The quantizer is (scheme, scale, zero point), or (scheme, scales, zero points, axis) for each channel."""
    dtype = storage.dtype if isinstance(storage, StorageNode) and storage.dtype not in PACKED_STORAGES else None
    made = _tensor(storage, dtype if dtype in DTYPE_BYTES else None, offset, shape, strides, None)
    names = {3: ("scheme", "scale", "zero_point"), 4: ("scheme", "scales", "zero_points", "axis")}
    length = len(quantizer) if isinstance(quantizer, tuple) else 0
    extras = dict(zip(names[length], quantizer, strict=True)) if length in names else {"quantizer": quantizer}
    if isinstance(made, TensorNode):
        return DressedTensor(made, extras)
    return Instance(made.made_by, kwargs={**made.kwargs, **extras})


def _rebuild_sparse(layout: Any, data: Any) -> Any:
    name = str(layout).removeprefix("torch.") if isinstance(layout, Named) else ""
    parts = SPARSE_PARTS.get(name)
    if parts is None or not isinstance(data, tuple) or not 3 <= len(data) <= len(parts):
        return None
    named = dict(zip(parts, data, strict=False))
    return _parts("sparse tensor", layout=layout, **{**named, "size": _size(named["size"])})


def _rebuild_nested(buffer: Any, sizes: Any, strides: Any, offsets: Any, *rest: Any) -> Any:
    return _parts("nested tensor", values=buffer, sizes=sizes, strides=strides, offsets=offsets)


def _rebuild_meta(dtype: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """A tensor on the meta device has no elements."""
    return Instance(Named("torch", "meta tensor"), (dtype, tuple(shape), strides)) if _are_lengths(shape) else None


def _rebuild_wrapper(
    class_: Any, dtype: Any, shape: Any, strides: Any, offset: Any, layout: Any, device: Any, *rest: Any
) -> Any:
    """A class of tensors around others, such as DTensor: these are among its attributes."""
    parts = {"dtype": dtype, "shape": _size(shape), "strides": _size(strides), "offset": offset, "layout": layout}
    return _parts("tensor", **parts)


def _rebuild_on_device(data: Any, dtype: Any, device: Any, requires_grad: Any, *rest: Any) -> Any:
    return _parts("tensor", data=data, dtype=dtype)


# The least number of arguments of each function, and what makes of them what it would have made.
REBUILDERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "_rebuild_tensor": (4, _rebuild),
    "_rebuild_tensor_v2": (4, _rebuild),
    "_rebuild_tensor_v3": (7, _rebuild_with_dtype),
    "_rebuild_parameter": (1, _first),
    "_rebuild_parameter_with_state": (4, _with_attributes),
    "_rebuild_qtensor": (5, _rebuild_quantized),
    "_rebuild_sparse_tensor": (2, _rebuild_sparse),
    "_rebuild_sparse_csr_tensor": (2, _rebuild_sparse),
    "_rebuild_nested_tensor": (4, _rebuild_nested),
    "_rebuild_meta_tensor_no_storage": (3, _rebuild_meta),
    "_rebuild_wrapper_subclass": (7, _rebuild_wrapper),
    "_rebuild_device_tensor_from_cpu_tensor": (4, _rebuild_on_device),
    "_rebuild_device_tensor_from_numpy": (4, _rebuild_on_device),
}
