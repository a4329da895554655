"""What one file holds, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping

from bigsci_launch.weights.deepspeed import layer_tensors, model_tensors, optimizer_tensors
from bigsci_launch.weights.safetensors_file import read_safetensors
from bigsci_launch.weights.sources import Contents, Model, Source
from bigsci_launch.weights.tensors import Place, StoredTensor
from bigsci_launch.weights.torch_file import TensorNode, read_torch_file, stored, walk_tensors

# What savers call the dictionary that holds the parameters, when they do not save it alone.
CONTAINERS = ("module", "model", "state_dict", "model_state_dict")


def read_contents(source: Source, model: Model) -> Contents:
    """The tensors of a file, under their names in the whole model.

    Raises:
        UnreadableFile: the file cannot be read.
    """
    if source.kind == "optimizer":
        return optimizer_tensors(source)
    if source.kind == "model_states":
        return model_tensors(source)
    if source.kind == "aside":
        return _read_aside(source)
    tensors = _read_safetensors(source) if source.path.suffix == ".safetensors" else _read_torch(source)
    return layer_tensors(tensors, source, model) if source.kind == "layer" else Contents(tensors)


def _read_safetensors(source: Source) -> tuple[StoredTensor, ...]:
    file = read_safetensors(source.path)
    place = _place(file.metadata) if source.kind == "dump" else source.place
    return tuple(
        StoredTensor(plain_name(name), "weight", place, entry.dtype, entry.shape, (entry.segment,))
        for name, entry in file.entries.items()
    )


def _place(metadata: Mapping[str, str]) -> Place:
    axes = {axis: str(metadata.get(axis, "")) for axis in ("pp", "tp", "dp")}
    return Place(**{axis: int(text) if text.isdigit() else None for axis, text in axes.items()})


def _read_torch(source: Source) -> tuple[StoredTensor, ...]:
    file = read_torch_file(source.path)
    tree = file.tree
    found = [(plain_name(name), node) for name, node in walk_tensors(tree)]
    inside = next((key for key in CONTAINERS if _is_container(tree, key)), None)
    if inside is None:
        return tuple(stored(file, name, "weight", source.place, node) for name, node in found)
    weights = {id(node): plain_name(name) for name, node in walk_tensors(tree[inside])}
    return tuple(
        stored(file, weights.get(id(node), name), "weight" if id(node) in weights else "other", source.place, node)
        for name, node in found
    )


def _read_aside(source: Source) -> Contents:
    """Tensors that a trainer keeps beside the weights, such as random states: `rng_rank_0003.torch`."""
    file = read_torch_file(source.path)
    return Contents(
        tuple(
            stored(file, f"{source.label}.{name}", "other", source.place, node)
            for name, node in walk_tensors(file.tree)
        )
    )


def _is_container(tree: object, key: str) -> bool:
    inside = tree.get(key) if isinstance(tree, Mapping) else None
    return isinstance(inside, Mapping) and any(isinstance(value, TensorNode) for value in inside.values())


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers' prefix (`module.`, once for each wrapper)."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name
