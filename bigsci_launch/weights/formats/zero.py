"""Reads the files of a DeepSpeed checkpoint: ZeRO's flat tensors as the parameters that they consist of.

Stages 1 and 2 write all parameters of a group one after the other and cut that in as many shards as there are ranks;
each shard says what part of each parameter it has. Stage 3 cuts each parameter in as many pieces as there are
ranks, all of one length. A shard consists of the same piece of all parameters; the last pieces end with padding, which
DeepSpeed does not initialize.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from bigsci_launch.safe_files import open_stream
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import CheckpointMetadata, Contents, OptimizerGroup, Source
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    OPTIMIZER_ROLES,
    Place,
    Segment,
    StoredTensor,
    TensorRole,
    cut_segments,
)
from bigsci_launch.weights.formats.torch_file import TorchFile, entry_contents, read_torch_file, stored
from bigsci_launch.weights.objects.flatten import Leaf, flatten
from bigsci_launch.weights.objects.nodes import DressedTensor, Instance, TensorNode

EXPERT_NAME = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
EXPERT_GROUP = re.compile(r"ep_size_(\d+)")
LEFT_EMPTY = "(empty: its elements are in the shards of the optimizer)"
MODULE, FROZEN = "module.", "frozen_param_fragments."


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The part of a parameter that a flat tensor has: its first element there, and the number of its elements."""

    name: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class FlatState:
    """One state of one parameter group on one rank: `nodes` follow each other, and `pieces` are their parameters."""

    role: TensorRole
    group: int
    nodes: tuple[TensorNode, ...]
    pieces: tuple[FlatPiece, ...]


def zero_stage(tree: Any) -> int | None:
    """Return the stage that a shard states, or a universal checkpoint's `optimizer_state.pt`."""
    if not isinstance(tree, Mapping):
        return None
    stage = next((held["zero_stage"] for held in (_state(tree), tree) if "zero_stage" in held), None)
    if isinstance(stage, Instance) and stage.args:
        stage = stage.args[0]
    return stage if isinstance(stage, int) else None


def partition_count(tree: Any) -> int | None:
    """Return the number of shards that a shard states; experts can have fewer than the other parameters."""
    stated = _state(tree).get("partition_count")
    counts = [count for count in (stated if isinstance(stated, list) else [stated]) if isinstance(count, int)]
    return max(counts, default=None)


def _state(tree: Any) -> Mapping[str, Any]:
    state = tree.get("optimizer_state_dict", tree) if isinstance(tree, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def optimizer_tensors(source: Source, metadata: CheckpointMetadata) -> Contents:
    """Return the fp32 masters and moments of one shard, sliced into parameters where it is known how.

    Elements between and behind parameters have the role `padding`.

    Raises:
        UnreadableFile: the shard cannot be read, belongs to another number of ranks, or its mapping points outside its
            own tensors.
    """
    file = read_torch_file(source.path)
    if not isinstance(file.tree, Mapping) or not isinstance(file.tree.get("optimizer_state_dict", {}), Mapping):
        raise UnreadableFile(source.path, "contains no optimizer state")
    state, num_ranks = _state(file.tree), partition_count(file.tree)
    if None not in (num_ranks, metadata.zero.num_ranks) and num_ranks != metadata.zero.num_ranks:
        why = f"a shard of {num_ranks} ranks, but the checkpoint was written by {metadata.zero.num_ranks}"
        raise UnreadableFile(source.path, why)
    if "fp32_flat_groups" in state:
        flats, owners = list(_stage_3(source.place, state, metadata, num_ranks)), _owners(source.place, metadata)
    else:
        flats, owners = list(_stages_1_and_2(state)), [tuple(group) for group in _mappings(state)]
    # A tensor that the shard also has under a name of no parameter is an entry of that name.
    sliced: Counter[int] = Counter()
    tensors: list[StoredTensor] = []
    for flat in flats:
        if (found := _sliced(file, source.place, flat)) is not None:
            tensors += found
            sliced.update(map(id, flat.nodes))
    rest: list[tuple[Leaf, TensorRole]] = []
    for entry in flatten(file.tree):
        if sliced[id(entry.node)]:
            sliced[id(entry.node)] -= 1
        else:
            rest.append((entry, "other"))
    others = entry_contents(file, rest, source.place)
    renaming = _experts(source.place, state, metadata)
    named = (replace(tensor, name=renaming.get(tensor.name, tensor.name)) for tensor in tensors)
    groups = tuple(_groups(file, state, owners, renaming))
    return replace(others, tensors=(*named, *others.tensors), groups=groups)


def _stages_1_and_2(state: Mapping[str, Any]) -> Iterator[FlatState]:
    masters = list(state.get("single_partition_of_fp32_groups") or ())
    for group, addresses in enumerate(_mappings(state)):
        pieces = tuple(_piece(str(name), address) for name, address in addresses.items())
        for role, nodes in _roles(state, masters[group : group + 1], range(group, group + 1)):
            yield FlatState(role, group, nodes, pieces)


def _mappings(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return state.get("param_slice_mappings") or ()


def _piece(name: str, address: Any) -> FlatPiece:
    fields = address.attributes if isinstance(address, Instance) else {}
    return FlatPiece(name, int(fields.get("start", 0)), int(fields.get("numel", 0)))


def _owners(place: Place, metadata: CheckpointMetadata) -> Sequence[tuple[str, ...]]:
    return metadata.zero.groups.get(place.pp or 0, ())


def _stage_3(
    place: Place, state: Mapping[str, Any], metadata: CheckpointMetadata, num_ranks: int | None
) -> Iterator[FlatState]:
    """Yield the flat tensors of stage 3. They are one series, which may be cut anywhere, also inside a parameter."""
    masters = list(state.get("fp32_flat_groups") or ())
    names = [name for group in _owners(place, metadata) for name in group]
    shapes, rank = metadata.shapes.get(place.pp or 0, {}), place.dp or 0
    nodes = [bare(node) for node in masters]
    if not num_ranks or None in nodes:
        return
    sizes = [math.prod(shapes[name]) for name in names]
    widths = [-(-size // num_ranks) for size in sizes]
    if sum(widths) != sum(math.prod(node.shape) for node in nodes if node):
        return
    lengths = [max(0, min(width, size - rank * width)) for size, width in zip(sizes, widths, strict=True)]
    starts = accumulate(widths, initial=0)
    pieces = tuple(FlatPiece(name, start, length) for name, start, length in zip(names, starts, lengths, strict=False))
    for role, found in _roles(state, masters, range(len(masters))):
        yield FlatState(role, 0, found, pieces)


def _roles(
    state: Mapping[str, Any], masters: Sequence[Any], groups: range
) -> Iterator[tuple[TensorRole, tuple[TensorNode, ...]]]:
    held = _group_states(state)
    for role in OPTIMIZER_ROLES:
        found = masters if role == "fp32" else [held.get(group, {}).get(role) for group in groups]
        nodes = tuple(node for one in found if (node := bare(one)))
        if nodes and len(nodes) == len(found):
            yield role, nodes


def bare(node: Any) -> TensorNode | None:
    """Return a tensor without its attributes, which are entries of their own; None for a tensor of another kind."""
    if isinstance(node, DressedTensor) and node.extras.keys() <= {"attributes"}:
        return node.tensor
    return node if isinstance(node, TensorNode) else None


def _base(state: Mapping[str, Any]) -> Any:
    """Return the state of torch's optimizer: stage 3 writes it under a name of its own."""
    return state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}


def _group_states(state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    base = _base(state)
    states = base.get("state", {}) if isinstance(base, Mapping) else dict(enumerate(base))
    return {int(group): held for group, held in states.items() if isinstance(held, Mapping)}


def _sliced(file: TorchFile, place: Place, flat: FlatState) -> list[StoredTensor] | None:
    """Return the parameters in a flat tensor, and its padding; None if it is not flat, or known to have none."""
    wholes = [stored(file, "", flat.role, place, node) for node in flat.nodes]
    are_flat = all(len(whole.shape) == 1 and whole.strides is None for whole in wholes)
    if not flat.pieces or not are_flat or len({whole.dtype for whole in wholes}) != 1:
        return None
    dtype = wholes[0].dtype
    segments = tuple(segment for whole in wholes for segment in whole.segments)
    num_elements = sum(whole.num_elements for whole in wholes)

    def cut(name: str, role: TensorRole, start: int, length: int) -> StoredTensor:
        width = DTYPE_BYTES[dtype]
        found = cut_segments(segments, start * width, (start + length) * width) or (Segment(file.path, 0, 0),)
        return StoredTensor(name, role, place, dtype, (length,), found)

    tensors: list[StoredTensor] = []
    end, before = 0, "the first parameter"
    for piece in sorted(flat.pieces, key=lambda piece: piece.start):
        if piece.start < end or piece.length < 0 or piece.start + piece.length > num_elements:
            where = "outside" if piece.start >= end else "over another parameter in"
            raise UnreadableFile(
                file.path, f"its mapping places {piece.name} {where} the {flat.role} tensor of its group"
            )
        if end < piece.start:
            tensors.append(cut(f"{before} {flat.role}", "padding", end, piece.start - end))
        if piece.length:
            tensors.append(cut(piece.name, flat.role, piece.start, piece.length))
        end, before = piece.start + piece.length, piece.name
    if end < num_elements:
        tensors.append(cut(f"{before} {flat.role}", "padding", end, num_elements - end))
    return tensors


def global_expert(name: str, index: int) -> str | None:
    """Return the name of the expert `index` of a layer, given another expert's name; None if it is no expert."""
    match = EXPERT_NAME.fullmatch(name)
    return f"{match[1]}{index}{match[3]}" if match else None


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of experts of each layer among some names, by the beginning of these."""
    found: dict[str, int] = {}
    for match in filter(None, map(EXPERT_NAME.fullmatch, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _experts(place: Place, state: Mapping[str, Any], metadata: CheckpointMetadata) -> dict[str, str]:
    """Return the names that a rank's experts have in the whole model: each rank numbers its own from zero."""
    base = _base(state)
    options = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    held = local_experts([name for group in _owners(place, metadata) for name in group])
    renaming: dict[str, str] = {}
    for group, addresses in enumerate(_mappings(state)):
        stated = options[group].get("name") if group < len(options) else None
        size = EXPERT_GROUP.fullmatch(stated) if isinstance(stated, str) else None
        for name in addresses if size else ():
            match = EXPERT_NAME.fullmatch(str(name))
            if match and size and int(size[1]) > 0 and match[1] in held:
                first = (place.dp or 0) % int(size[1]) * held[match[1]]
                renaming[str(name)] = f"{match[1]}{first + int(match[2])}{match[3]}"
    return renaming


def _groups(
    file: TorchFile, state: Mapping[str, Any], owners: Sequence[tuple[str, ...]], renaming: Mapping[str, str]
) -> Iterator[OptimizerGroup]:
    base = _base(state)
    options = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    states = _group_states(state)
    for group, names in enumerate(owners):
        given = options[group] if group < len(options) else {}
        # Stage 3 may cut a group into several; the options number the states that belong to a group.
        numbers = given.get("params")
        first = numbers[0] if isinstance(numbers, list) and numbers and isinstance(numbers[0], int) else group
        step = states.get(first, {}).get("step", given.get("step"))
        named = tuple(renaming.get(name, name) for name in names)
        decay, rate = _number(given.get("weight_decay")), _number(given.get("lr"))
        yield OptimizerGroup(_scalar(file, step), decay, rate, named, _betas(given.get("betas")))


def _betas(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    first, second = map(_number, value)
    return None if first is None or second is None else (first, second)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _scalar(file: TorchFile, value: Any) -> float | None:
    """Return a number, or the only element of a tensor if Python can read its dtype; otherwise None."""
    if not isinstance(value, TensorNode) or math.prod(value.shape) != 1:
        return _number(value)
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(value.dtype)
    record = file.records.get(value.storage)
    if code is None or record is None or record.lost:
        return None
    at = record.offset + value.offset * DTYPE_BYTES[value.dtype]
    if record.inflated is not None:
        return float(struct.unpack_from(code, record.inflated.memory, at)[0])
    with open_stream(file.path, follow=True) as stream:
        stream.seek(at)
        return float(struct.unpack(code, stream.read(DTYPE_BYTES[value.dtype]))[0])


def model_tensors(source: Source, metadata: CheckpointMetadata) -> Contents:
    """Return every entry of a model-states file.

    Tensors under `module` are weights. Those of frozen parameters are masters too, as no shard of the optimizer has
    them; in stage 3 each rank has a piece of each. What is left of other parameters in stage 3 is empty, and `other`.
    """
    file = read_torch_file(source.path)
    found: list[tuple[Leaf, TensorRole]] = []
    pieces: list[StoredTensor] = []
    for entry in flatten(file.tree):
        is_tensor = isinstance(entry.node, TensorNode)
        shape = metadata.shapes.get(source.place.pp or 0, {}).get(entry.name.partition(".")[2])
        if is_tensor and entry.name.startswith(FROZEN):
            pieces += _frozen(file, source.place, entry, shape, metadata.zero.num_ranks)
        elif is_tensor and entry.name.startswith(MODULE) and not _is_left_empty(entry.node, shape):
            found.append((replace(entry, name=entry.name.removeprefix(MODULE)), "weight"))
        else:
            is_left = is_tensor and entry.name.startswith(MODULE)
            name = f"{entry.name.removeprefix(MODULE)} {LEFT_EMPTY}" if is_left else entry.name
            found.append((replace(entry, name=name), "other"))
    contents = entry_contents(file, found, source.place)
    step = file.tree.get("global_steps") if isinstance(file.tree, Mapping) else None
    return replace(contents, tensors=(*contents.tensors, *pieces), step=step if isinstance(step, int) else None)


def _is_left_empty(node: TensorNode, shape: tuple[int, ...] | None) -> bool:
    return math.prod(node.shape) == 0 and shape is not None and math.prod(shape) > 0


def _frozen(
    file: TorchFile, place: Place, entry: Leaf, shape: tuple[int, ...] | None, num_ranks: int | None
) -> list[StoredTensor]:
    """Return a frozen parameter; in stage 3 this rank's piece of it, and the padding behind that."""
    name = entry.name.removeprefix(FROZEN)
    if place.dp is None or shape is None or not num_ranks:
        return [stored(file, name, "fp32", place, entry.node)]
    size, width = math.prod(shape), math.prod(entry.node.shape)
    length = max(0, min(width, size - place.dp * width))
    sliced = _sliced(file, place, FlatState("fp32", 0, (entry.node,), (FlatPiece(name, 0, length),)))
    return [stored(file, name, "fp32", place, entry.node)] if sliced is None else sliced
