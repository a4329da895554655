"""Reads the contents of one file in any supported format. Readers of rare formats are imported only when needed."""

from __future__ import annotations

from collections.abc import Mapping

from bigsci_launch.weights.files.deepspeed import layer_tensors, model_tensors, optimizer_tensors
from bigsci_launch.weights.files.safetensors_file import read_safetensors
from bigsci_launch.weights.files.sources import CheckpointMetadata, Contents, Source
from bigsci_launch.weights.files.tensors import (
    OPTIMIZER_ROLES,
    PLACE_AXES,
    Place,
    StoredTensor,
    TensorRole,
    UnreadableFile,
)
from bigsci_launch.weights.files.torch_file import TensorNode, read_torch_file, stored, walk_tensors

# Usual keys of the parameters' dictionary in files that contain more than the parameters.
CONTAINERS = ("module", "model", "state_dict", "model_state_dict")


def read_contents(source: Source, metadata: CheckpointMetadata) -> Contents:
    """Read the tensors of a file, under their names in the whole model.

    Raises:
        UnreadableFile: the file cannot be read, or its layout is that of no known version.
    """
    try:
        return _read(source, metadata)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A pickle may have any object under the expected names; the other files must still be compared.
        raise UnreadableFile(source.path, f"contains something unexpected ({type(error).__name__}: {error})") from error


def _read(source: Source, metadata: CheckpointMetadata) -> Contents:
    if source.format == "optimizer":
        return optimizer_tensors(source)
    if source.format == "model_states":
        return model_tensors(source)
    if source.format == "layer":
        return layer_tensors(_read_tensors(source), source, metadata)
    return Contents(_READERS.get(source.format, _read_tensors)(source))


def dump_place(source: Source) -> Place:
    """Return the place of the rank that wrote a dump or digests: from the file's metadata, otherwise from its name.

    Raises:
        UnreadableFile: the file cannot be read.
    """
    if source.format == "digests":
        from bigsci_launch.weights.files.digests import read_digests

        return read_digests(source.path).place
    if source.path.suffix == ".safetensors":
        return _stated_place(read_safetensors(source.path).metadata, source)
    return source.place


def _stated_place(metadata: Mapping[str, str], source: Source) -> Place:
    axes = {axis: str(metadata.get(axis, "")) for axis in PLACE_AXES}
    stated = Place(**{axis: int(text) if text.isdigit() else None for axis, text in axes.items()})
    return stated if stated.is_known else source.place


def _read_tensors(source: Source) -> tuple[StoredTensor, ...]:
    return _read_safetensors(source) if source.path.suffix == ".safetensors" else _read_torch(source)


def _read_safetensors(source: Source) -> tuple[StoredTensor, ...]:
    file = read_safetensors(source.path)
    place = _stated_place(file.metadata, source)
    return tuple(
        StoredTensor(plain_name(name), "weight", place, entry.dtype, entry.shape, (entry.segment,))
        for name, entry in file.entries.items()
    )


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


def _is_container(tree: object, key: str) -> bool:
    inside = tree.get(key) if isinstance(tree, Mapping) else None
    return isinstance(inside, Mapping) and any(isinstance(value, TensorNode) for _, value in walk_tensors(inside))


def _read_universal(source: Source) -> tuple[StoredTensor, ...]:
    """Read a universal checkpoint's file: `param` of fp32.pt, exp_avg.pt or exp_avg_sq.pt; the rest is `other`."""
    file = read_torch_file(source.path)
    name = source.path.parent.name
    tree = file.tree
    node = tree.get("param") if isinstance(tree, Mapping) else tree
    role: TensorRole | None = next((role for role in OPTIMIZER_ROLES if role == source.path.stem), None)
    if role is None or not isinstance(node, TensorNode):
        found = walk_tensors(tree)
        return tuple(stored(file, f"{source.label}.{at}".rstrip("."), "other", source.place, n) for at, n in found)
    return (stored(file, name, role, source.place, node),)


def _read_text(source: Source) -> tuple[StoredTensor, ...]:
    from bigsci_launch.weights.files.text_dump import read_text_dump

    return read_text_dump(source.path, source.place)


def _read_digests(source: Source) -> tuple[StoredTensor, ...]:
    from bigsci_launch.weights.files.digests import digest_tensor, read_digests

    file = read_digests(source.path)
    return tuple(digest_tensor(file, name) for name in file.entries)


def _read_aside(source: Source) -> tuple[StoredTensor, ...]:
    """Read tensors that a trainer stores with the weights, such as random states: `rng_rank_0003.torch`."""
    if source.path.suffix == ".safetensors":
        raise UnreadableFile(source.path, "not part of a DeepSpeed checkpoint")
    file = read_torch_file(source.path)
    return tuple(
        stored(file, f"{source.label}.{name}", "other", source.place, node) for name, node in walk_tensors(file.tree)
    )


_READERS = {"universal": _read_universal, "text": _read_text, "digests": _read_digests, "aside": _read_aside}


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers' prefixes (one `module.` per wrapper)."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name
