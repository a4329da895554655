"""Archives that torch writes, apart from those of `torch.save`: TorchScript (`torch.jit.save`) and `torch.export.save`.

A TorchScript archive has its module in data.pkl, tensors of the code in constants.pkl and constants/, and its code as
text. An exported program has its graph in models/model.json, and its tensors as raw records that JSON files describe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigsci_launch.weights.files.json_text import BadJson, parse_json
from bigsci_launch.weights.files.tensors import TensorRole
from bigsci_launch.weights.objects.flatten import Leaf
from bigsci_launch.weights.objects.nodes import BadPickle, Dictionary, Instance, TensorNode

SCRIPT_CONSTANTS = "constants.pkl"
EXPORT_FORMAT = "archive_format"
# What these records describe is under these names.
EXPORT_CONFIGS = {"data/weights/": "_weights_config.json", "data/constants/": "_constants_config.json"}
# `torch._export.serde.schema.ScalarType`.
EXPORT_DTYPES = {
    1: "U8",
    2: "I8",
    3: "I16",
    4: "I32",
    5: "I64",
    6: "F16",
    7: "F32",
    8: "F64",
    9: "C32",
    10: "C64",
    11: "C128",
    12: "BOOL",
    13: "BF16",
    28: "U16",
    29: "F8_E4M3",
    30: "F8_E5M2",
    31: "F8_E4M3FNUZ",
    32: "F8_E5M2FNUZ",
    33: "F8_E8M0",
    34: "U32",
    35: "U64",
}


def with_constants(tree: Any, constants: Any) -> Any:
    """Return a TorchScript module with the tensors that its code contains."""
    if isinstance(tree, Instance):
        tree.states.append({SCRIPT_CONSTANTS: constants})
        return tree
    return Dictionary({"module": tree, SCRIPT_CONSTANTS: constants})


def with_constants_apart(entries: Sequence[tuple[Leaf, TensorRole]]) -> list[tuple[Leaf, TensorRole]]:
    """Return entries with the constants of the code as no weights, unless there are no others: the module is frozen."""
    apart: list[tuple[Leaf, TensorRole]] = [
        (entry, "other" if entry.path and str(entry.path[0]) == SCRIPT_CONSTANTS else role) for entry, role in entries
    ]
    return apart if any(role == "weight" for _, role in apart) else list(entries)


def exported_tensors(configs: Mapping[str, bytes]) -> Dictionary:
    """Return the tensors of an exported program under the names of its state dict; `configs` are by record name.

    A record that no description explains is no tensor here.

    Raises:
        BadPickle: a description is not what torch writes.
    """
    found = Dictionary()
    for folder, suffix in EXPORT_CONFIGS.items():
        for name, text in configs.items():
            if name.startswith(folder) and name.endswith(suffix):
                try:
                    entries = parse_json(text)["config"]
                    for key, entry in entries.items():
                        node = _tensor(folder.removeprefix("data/"), entry)
                        if node is not None:
                            found[key if key not in found else f"{name}: {key}"] = node
                except (AttributeError, BadJson, KeyError, TypeError, ValueError) as error:
                    raise BadPickle(f"{name} is not what torch writes ({type(error).__name__}: {error})") from error
    return found


def _tensor(folder: str, entry: Mapping[str, Any]) -> TensorNode | None:
    meta = entry["tensor_meta"]
    dtype = EXPORT_DTYPES.get(meta["dtype"]) if meta is not None else None
    if entry["use_pickle"] or dtype is None:
        return None
    shape, strides = (tuple(map(_length, meta[name])) for name in ("sizes", "strides"))
    return TensorNode(f"{folder}{entry['path_name']}", dtype, _length(meta["storage_offset"]), shape, strides)


def _length(size: Mapping[str, Any]) -> int:
    length = size["as_int"]
    if type(length) is not int:
        raise TypeError(f"{length!r} is not a length")
    return length
