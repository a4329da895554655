"""Reads the contents of one file, whatever its format, as its part in a checkpoint demands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bigsci_launch.weights.files.json_text import shown
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import CheckpointMetadata, Contents, ShardIndex, Source
from bigsci_launch.weights.files.tensors import (
    OPTIMIZER_ROLES,
    NotRead,
    Place,
    StoredTensor,
    StoredValue,
    TensorRole,
)
from bigsci_launch.weights.formats.containers import with_roles
from bigsci_launch.weights.formats.deepspeed import layer_contents
from bigsci_launch.weights.formats.safetensors_file import read_safetensors, stated_place
from bigsci_launch.weights.formats.table import TORCH, format_of
from bigsci_launch.weights.formats.torch_archives import with_constants_apart
from bigsci_launch.weights.formats.torch_file import entry_contents, read_torch_file
from bigsci_launch.weights.formats.values import mark_about_run
from bigsci_launch.weights.formats.zero import model_tensors, optimizer_tensors
from bigsci_launch.weights.objects.flatten import Leaf, flatten
from bigsci_launch.weights.objects.nodes import BadPickle, TensorNode

# Characters of a name. The longest that a model gives are some hundred.
MAX_NAME = 4096

AnyEntry = StoredTensor | StoredValue | NotRead


def read_contents(source: Source, metadata: CheckpointMetadata) -> Contents:
    """Read the tensors of a file, under their names in the whole model.

    Raises:
        UnreadableFile: the file cannot be read, or its layout is that of no known version.
    """
    try:
        contents = _checked(_read(source, metadata), source.path)
        return replace(contents, values=mark_about_run(contents.values, source.format))
    except BadPickle as error:
        raise UnreadableFile(source.path, str(error)) from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A pickle may have any object under the expected names; the other files must still be compared.
        raise UnreadableFile(source.path, f"contains something unexpected ({type(error).__name__}: {error})") from error


def _read(source: Source, metadata: CheckpointMetadata) -> Contents:
    if source.format == "optimizer":
        return optimizer_tensors(source, metadata)
    if source.format == "model_states":
        return model_tensors(source, metadata)
    if source.format == "universal":
        return _read_universal(source, metadata)
    if source.format == "layer":
        return layer_contents(_read_file(source), source, metadata)
    return _read_aside(source) if source.format == "aside" else _read_file(source)


def _checked(contents: Contents, path: Path) -> Contents:
    """Return contents whose names are different, and can be shown in a terminal.

    Raises:
        UnreadableFile: two entries have one name, so that one of them would not be compared; or a name is too long.
    """
    entries: list[AnyEntry] = [*contents.tensors, *contents.values, *contents.not_read]
    if any(len(entry.name) > MAX_NAME for entry in entries):
        raise UnreadableFile(path, f"the name of an entry has more than {MAX_NAME:,} characters")
    keys = [(tensor.role, tensor.name, tensor.place) for tensor in contents.tensors]
    for names in (keys, [value.name for value in contents.values]):
        if len(set(names)) < len(names):
            ((twice, _),) = Counter(names).most_common(1)
            raise UnreadableFile(path, f"it has two entries called {shown(twice[1] if names is keys else twice)}")
    if all(map(_is_showable, entries)):
        return contents
    return replace(
        contents,
        tensors=tuple(replace(tensor, name=_showable(tensor.name)) for tensor in contents.tensors),
        values=tuple(replace(value, name=_showable(value.name)) for value in contents.values),
        not_read=tuple(replace(entry, name=_showable(entry.name)) for entry in contents.not_read),
    )


def _is_showable(entry: AnyEntry) -> bool:
    return entry.name.isprintable() and "\\" not in entry.name


def _showable(name: str) -> str:
    """Return a name without characters that would change what a terminal shows; two names never become one."""
    is_showable = name.isprintable() and "\\" not in name
    return name if is_showable else name.encode("unicode_escape", "surrogatepass").decode()


def dump_place(source: Source) -> Place:
    """Return the place of the rank that wrote a dump or digests: from the file's metadata, otherwise from its name.

    Raises:
        UnreadableFile: the file cannot be read.
    """
    if source.format == "digests":
        from bigsci_launch.weights.formats.digests import read_digests

        return read_digests(source.path).place
    if source.path.suffix == ".safetensors":
        return stated_place(read_safetensors(source.path).metadata, source)
    return source.place


def _read_file(source: Source) -> Contents:
    contents = format_of(source).read(source)
    if source.index is None:
        return contents
    return replace(contents, not_read=(*contents.not_read, *_unlike_index(contents, source, source.index)))


def _unlike_index(contents: Contents, source: Source, index: ShardIndex) -> Iterator[NotRead]:
    """Yield what the index of a shard says about it that is not so."""
    held = {tensor.name for tensor in contents.tensors} | {entry.name for entry in contents.not_read}
    listed = index.shards[source.path.name]
    for name in sorted(listed - held):
        yield NotRead(name, "entry", index.path, f"it is not in {source.path.name}, where this index puts it")
    for name in sorted(tensor.name for tensor in contents.tensors if tensor.name not in listed):
        puts = f"puts it in {index.files[name]}" if name in index.files else "does not list it"
        yield NotRead(name, "tensor", source.path, f"{index.path.name} {puts}")


def read_torch(source: Source) -> Contents:
    """Read a torch file. The parameters are named as if their container were the whole file."""
    file = read_torch_file(source.path)
    # An optimizer of one of several ranks may have parts of its parameters only.
    entries, container = with_roles(file.tree, flatten(file.tree), has_all=not source.place.is_known)
    if file.is_program:
        entries = with_constants_apart(entries)
    return replace(entry_contents(file, entries, source.place), container=container, is_program=file.is_program)


def _read_universal(source: Source, metadata: CheckpointMetadata) -> Contents:
    """Read a universal checkpoint's file: `param` of fp32.pt, exp_avg.pt or exp_avg_sq.pt; the rest is `other`.

    A checkpoint made of stage 3 has flat tensors; they get the shapes of their parameters.
    """
    file = read_torch_file(source.path)
    name = source.path.parent.name
    role: TensorRole | None = next((role for role in OPTIMIZER_ROLES if role == source.path.stem), None)
    found: list[tuple[Leaf, TensorRole]] = []
    for entry in flatten(file.tree):
        if role is not None and entry.name in ("", "param") and isinstance(entry.node, TensorNode):
            found.append((replace(entry, name=name), role))
        else:
            found.append((replace(entry, name=f"{source.label}.{entry.name}".rstrip(".")), "other"))
    contents = entry_contents(file, found, source.place)
    return replace(contents, tensors=tuple(_in_shape(tensor, metadata) for tensor in contents.tensors))


def _in_shape(tensor: StoredTensor, metadata: CheckpointMetadata) -> StoredTensor:
    shape = metadata.shapes.get(0, {}).get(tensor.name, tensor.shape)
    is_flat = tensor.role in OPTIMIZER_ROLES and len(tensor.shape) == 1 and tensor.strides is None
    return replace(tensor, shape=shape) if is_flat and math.prod(shape) == tensor.num_elements else tensor


def _read_aside(source: Source) -> Contents:
    """Read what a trainer stores with the weights, such as random states: `rng_rank_0003.torch`."""
    if (known := format_of(source)) is not TORCH:
        contents = known.read(source)
        named = (replace(tensor, name=f"{source.label}.{tensor.name}", role="other") for tensor in contents.tensors)
        return replace(contents, tensors=tuple(named))
    file = read_torch_file(source.path)
    return entry_contents(file, ((entry, "other") for entry in flatten(file.tree, source.label)), source.place)
