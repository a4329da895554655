"""DeepSpeed's pipeline checkpoints: which file contains which rank's parameters.

    layer_LL-model_TT-model_states.pt             16-bit parameters of one layer on tp rank TT, for all dp ranks
    mp_rank_MM_model_states.pt                    the state of the model; MM = pp * tp_size + tp
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_...    fp32 masters and moments, flat; D is the dp rank, despite its name

If the last stage shares a tied layer, only the first stage's copy has a layer file. The optimizer shards contain the
fp32 masters of every copy.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.sources import (
    CheckpointMetadata,
    Contents,
    OptimizerGroup,
    Source,
    Unreadable,
    Weights,
)
from bigsci_launch.weights.files.tensors import (
    DTYPE_BYTES,
    OPTIMIZER_ROLES,
    Place,
    Segment,
    StoredTensor,
    TensorRole,
    UnreadableFile,
)
from bigsci_launch.weights.formats.torch_file import TorchFile, entry_contents, read_torch_file, stored
from bigsci_launch.weights.objects.flatten import Leaf, flatten
from bigsci_launch.weights.objects.nodes import Instance, TensorNode

LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.(?:pt|safetensors)")
MODEL_STATES = re.compile(r"mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def is_deepspeed_name(name: str) -> bool:
    """Whether a file name is one of DeepSpeed's."""
    return any(pattern.fullmatch(name) for pattern in (LAYER, MODEL_STATES, OPTIMIZER))


def locate_deepspeed(folder: Path, files: Sequence[Path], path: Path) -> Weights:
    """Return the weights in `folder`, which contains `files`; `path` is what the user named."""
    states = {int(match[1]): file for file in files if (match := MODEL_STATES.fullmatch(file.name))}
    trees, broken = _read_states(states)
    topology = _topology(trees, files)
    tp_size = topology.tp if topology else _guess_tp(files)
    metadata = _metadata(trees, tp_size)
    sources = tuple(_source(file, tp_size) for file in sorted(files))
    lost = tuple(_missing(folder, topology, metadata, {file.name for file in files})) if topology else ()
    unreadable = {item.path for item in broken}
    kept = tuple(source for source in sources if source.path not in unreadable)
    return Weights(path, "deepspeed", kept, topology, metadata, (*broken, *lost))


def _read_states(states: Mapping[int, Path]) -> tuple[dict[int, Mapping[str, Any]], tuple[Unreadable, ...]]:
    trees: dict[int, Mapping[str, Any]] = {}
    broken = []
    for index, file in sorted(states.items()):
        try:
            tree = read_torch_file(file).tree
        except UnreadableFile as error:
            broken.append(Unreadable(file, error.why))
            continue
        trees[index] = tree if isinstance(tree, Mapping) else {}
    return trees, tuple(broken)


def _topology(trees: Mapping[int, Mapping[str, Any]], files: Sequence[Path]) -> Topology | None:
    for tree in trees.values():
        sizes = _mapping(tree.get("checkpoint_parallel_dimensions"))
        tp, pp, dp = sizes.get("tp_degree"), sizes.get("pp_degree"), tree.get("dp_world_size")
        if isinstance(tp, int) and isinstance(pp, int) and isinstance(dp, int):
            return Topology(tp=tp, pp=pp, dp=dp)
    shards = [match for file in files if (match := OPTIMIZER.fullmatch(file.name))]
    if not shards:
        return None
    tp = _guess_tp(files)
    num_stages = max(int(match[2]) for match in shards) // tp + 1
    return Topology(tp=tp, pp=num_stages, dp=max(int(match[1]) for match in shards) + 1)


def _guess_tp(files: Sequence[Path]) -> int:
    return 1 + max((int(match[2]) for file in files if (match := LAYER.fullmatch(file.name))), default=0)


def _metadata(trees: Mapping[int, Mapping[str, Any]], tp_size: int) -> CheckpointMetadata:
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for index, tree in trees.items():
        if index % tp_size == 0:
            shapes[index // tp_size] = _shapes(tree.get("param_shapes"))
    first = next(iter(trees.values()), {})
    steps, skipped = first.get("global_steps"), first.get("skipped_steps")
    info = first.get("universal_checkpoint_info")
    return CheckpointMetadata(
        shapes=shapes,
        global_steps=steps if isinstance(steps, int) else None,
        skipped_steps=skipped if isinstance(skipped, int) else 0,
        universal_info=info if isinstance(info, dict) else {},
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shapes(stated: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, from one dictionary or (newer versions) from one dictionary per parameter group."""
    groups = stated if isinstance(stated, (list, tuple)) else [stated]
    return {str(name): shape for group in groups for name, shape in _mapping(group).items() if isinstance(shape, tuple)}


def _source(file: Path, tp_size: int) -> Source:
    label = file.stem
    if match := LAYER.fullmatch(file.name):
        return Source(file, label, "layer", Place(tp=int(match[2])))
    if match := MODEL_STATES.fullmatch(file.name):
        return Source(file, label, "model_states", Place(pp=int(match[1]) // tp_size, tp=int(match[1]) % tp_size))
    if match := OPTIMIZER.fullmatch(file.name):
        pp, tp = divmod(int(match[2]), tp_size)
        return Source(file, label[label.index("zero_pp_rank") :], "optimizer", Place(pp, tp, int(match[1])))
    return Source(file, label, "aside")


def _missing(folder: Path, topology: Topology, metadata: CheckpointMetadata, present: set[str]) -> Iterator[Unreadable]:
    """Yield files that the topology and the metadata require but that do not exist."""
    model_parallel_ranks = range(topology.pp * topology.tp)
    names = [f"mp_rank_{mp:02d}_model_states.pt" for mp in model_parallel_ranks]
    if (prefix := _shard_prefix(present)) is not None:
        shards = ((dp, mp) for mp in model_parallel_ranks for dp in range(topology.dp))
        names += [f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp, mp in shards]
    layers = sorted(_layers_on_disk(present) | (_layers_in_metadata(metadata) if _layers_on_disk(present) else set()))
    names += [f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer in layers for tp in range(topology.tp)]
    for name in names:
        if name not in present:
            yield Unreadable(folder / name, f"missing: the topology {topology} requires it")


def _layers_on_disk(present: set[str]) -> set[int]:
    return {int(match[1]) for name in present if (match := LAYER.fullmatch(name)) and name.endswith(".pt")}


def _layers_in_metadata(metadata: CheckpointMetadata) -> set[int]:
    heads = (name.partition(".")[0] for shapes in metadata.shapes.values() for name in shapes)
    return {int(head) for head in heads if head.isdigit()}


def _shard_prefix(present: set[str]) -> str | None:
    name = next((name for name in present if OPTIMIZER.fullmatch(name)), None)
    return None if name is None else name.partition("zero_pp_rank")[0]


def named_by_layer(keys: Sequence[str], layer: int, metadata: CheckpointMetadata) -> tuple[str, ...]:
    """Return the parameters' names in the whole model, given their keys in one layer's file.

    If no stage has a parameter `LAYER.key`, the layer is the first copy of a tied module.
    """
    plain = tuple(f"{layer}.{key}" for key in keys)
    if not metadata.shapes or any(metadata.stage_of(name) is not None for name in plain):
        return plain
    for tied in metadata.tied_keys():
        names = tuple(f"tied_modules.{tied}.{key}" for key in keys)
        if any(metadata.stage_of(name) is not None for name in names):
            return names
    return plain


def layer_contents(contents: Contents, source: Source, metadata: CheckpointMetadata) -> Contents:
    """Return the contents of a layer's file with its tensors under their names in the whole model, on their stage."""
    match = LAYER.fullmatch(source.path.name)
    assert match is not None
    tensors = contents.tensors
    names = named_by_layer([tensor.name for tensor in tensors], int(match[1]), metadata)
    stage = next((pp for name in names if (pp := metadata.stage_of(name)) is not None), None)
    place = Place(pp=stage, tp=source.place.tp)
    named = (
        replace(tensor, name=name, role="weight", place=place) for name, tensor in zip(names, tensors, strict=True)
    )
    return replace(contents, tensors=tuple(named))


def optimizer_tensors(source: Source) -> Contents:
    """Return the fp32 masters and moments of one shard, sliced into parameters where the shard maps them.

    Bytes between parameters are padding.

    Raises:
        UnreadableFile: the shard cannot be read, or its mapping points outside its own tensors.
    """
    file = read_torch_file(source.path)
    state = file.tree.get("optimizer_state_dict", file.tree) if isinstance(file.tree, Mapping) else {}
    if not isinstance(state, Mapping):
        raise UnreadableFile(source.path, "contains no optimizer state")
    mappings, flats = _mappings(state), _flat_tensors(state)
    sliced = set()
    tensors: list[StoredTensor] = []
    for (role, group), node in flats.items():
        if group < len(mappings) and mappings[group]:
            sliced.add(id(node))
            tensors += _slices(file, source.place, role, node, mappings[group])
    rest: list[tuple[Leaf, TensorRole]] = [
        (entry, "other") for entry in flatten(file.tree) if id(entry.node) not in sliced
    ]
    others = entry_contents(file, rest, source.place)
    groups = tuple(_groups(file, state, mappings))
    return replace(others, tensors=(*tensors, *others.tensors), groups=groups)


def _mappings(state: Mapping[str, Any]) -> list[dict[str, tuple[int, int]]]:
    """Return, for each group, each parameter's first element and number of elements in the flat tensors."""
    groups = state.get("param_slice_mappings") or ()
    return [{name: _fragment(address) for name, address in group.items()} for group in groups]


def _fragment(address: Any) -> tuple[int, int]:
    fields = address.attributes if isinstance(address, Instance) else {}
    return int(fields.get("start", 0)), int(fields.get("numel", 0))


def _flat_tensors(state: Mapping[str, Any]) -> dict[tuple[TensorRole, int], TensorNode]:
    moments = _group_states(state)
    flats: dict[tuple[TensorRole, int], TensorNode] = {}
    for group, master in enumerate(state.get("single_partition_of_fp32_groups") or ()):
        held = moments.get(group, {})
        found = {"fp32": master, "exp_avg": held.get("exp_avg"), "exp_avg_sq": held.get("exp_avg_sq")}
        for role in OPTIMIZER_ROLES:
            if isinstance(node := found[role], TensorNode):
                flats[role, group] = node
    return flats


def _group_states(state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    base = state.get("base_optimizer_state") or {}
    states = base.get("state", {}) if isinstance(base, Mapping) else dict(enumerate(base))
    return {int(group): held for group, held in states.items() if isinstance(held, Mapping)}


def _slices(
    file: TorchFile, place: Place, role: TensorRole, node: TensorNode, mapping: Mapping[str, tuple[int, int]]
) -> Iterator[StoredTensor]:
    whole = stored(file, "", role, place, node)
    width = DTYPE_BYTES[node.dtype]
    segment = whole.segments[0]
    for name, (start, length) in mapping.items():
        if start < 0 or (start + length) * width > segment.num_bytes:
            raise UnreadableFile(file.path, f"its mapping places {name} outside the {role} tensor of its group")
        piece = Segment(segment.path, segment.offset + start * width, length * width)
        yield StoredTensor(name, role, place, node.dtype, (length,), (piece,))


def _groups(
    file: TorchFile, state: Mapping[str, Any], mappings: Sequence[Mapping[str, Any]]
) -> Iterator[OptimizerGroup]:
    base = state.get("base_optimizer_state")
    options = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    states = _group_states(state)
    for group, mapping in enumerate(mappings):
        given = options[group] if group < len(options) else {}
        step = states.get(group, {}).get("step", given.get("step"))
        yield OptimizerGroup(
            _scalar(file, step), _number(given.get("weight_decay")), _number(given.get("lr")), tuple(mapping)
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _scalar(file: TorchFile, value: Any) -> float | None:
    """Return a number, or the only element of a tensor if Python can read its dtype; otherwise None."""
    if not isinstance(value, TensorNode) or math.prod(value.shape) != 1:
        return _number(value)
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(value.dtype)
    record = file.records.get(value.storage)
    if code is None or record is None:
        return None
    with file.path.open("rb") as stream:
        stream.seek(record.offset + value.offset * DTYPE_BYTES[value.dtype])
        return float(struct.unpack(code, stream.read(DTYPE_BYTES[value.dtype]))[0])


def model_tensors(source: Source) -> Contents:
    """Return every entry of a model-states file: tensors under `module` are weights, the rest `other`."""
    file = read_torch_file(source.path)
    return entry_contents(file, (_of_model(entry) for entry in flatten(file.tree)), source.place)


def _of_model(entry: Leaf) -> tuple[Leaf, TensorRole]:
    is_weight = entry.name.startswith("module.") and isinstance(entry.node, TensorNode)
    return (replace(entry, name=entry.name.removeprefix("module.")), "weight") if is_weight else (entry, "other")
