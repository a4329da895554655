"""DeepSpeed's checkpoints: which file contains which rank's parameters.

    layer_LL-model_TT-model_states.pt             16-bit parameters of one layer on tp rank TT, for all dp ranks
    layer_L_expert_E_mp_rank_MM_model_states.pt   16-bit parameters of one expert of the L-th MoE layer
    mp_rank_MM_model_states.pt                    the state of the model; MM = pp * tp_size + tp
    zero_pp_rank_D_mp_rank_MM_model_states.pt     the same in stage 3 of ZeRO, one for each dp rank
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_...    fp32 masters and moments, flat; D is the dp rank, despite its name

Pipelines write layers. If the last stage shares a tied layer, only the first stage's copy has a layer file. The
optimizer shards contain the fp32 masters of every copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from bigsci_launch.topology import Topology
from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.sources import CheckpointMetadata, Contents, Source, Unreadable, Weights, ZeroCut
from bigsci_launch.weights.files.tensors import Place
from bigsci_launch.weights.formats.torch_file import read_torch_file
from bigsci_launch.weights.formats.zero import global_expert, local_experts, partition_count, zero_stage

LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.(?:pt|safetensors)")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# A checkpoint that states more ranks is damaged: each rank has a file.
MAX_RANKS = 1 << 20
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
UNIVERSAL_STATE = "optimizer_state.pt"
# A layer with more experts than any model has.
MAX_EXPERTS = 4096
PATTERNS = (LAYER, EXPERT, MODEL_STATES, OPTIMIZER, EXPERT_OPTIMIZER)


def is_deepspeed_name(name: str) -> bool:
    """Whether a file name is one of DeepSpeed's."""
    return any(pattern.fullmatch(name) for pattern in PATTERNS)


def locate_deepspeed(folder: Path, files: Sequence[Path], path: Path) -> Weights:
    """Return the weights in `folder`, which contains `files`; `path` is what the user named."""
    trees, broken = _read_states(files)
    zero = _zero_cut(files, trees)
    topology = _topology(trees, files, zero)
    tp_size = topology.tp if topology else _guess_tp(files)
    metadata = _metadata(trees, tp_size, replace(zero, num_ranks=topology.dp if topology and zero.num_ranks else None))
    lost = tuple(_missing(folder, topology, metadata, {file.name for file in files})) if topology else ()
    stale = tuple(_stale(files, topology)) if topology else ()
    unreadable = {item.path for item in (*broken, *stale)}
    sources = tuple(deepspeed_source(file, tp_size) for file in sorted(files) if file not in unreadable)
    return Weights(path, "deepspeed", sources, topology, metadata, (*broken, *stale, *lost))


def universal_states(files: Sequence[Path]) -> tuple[tuple[Source, ...], CheckpointMetadata]:
    """Return the model-states files that a universal checkpoint keeps from its original, and what they say."""
    states = [file for file in files if MODEL_STATES.fullmatch(file.name)]
    trees, _ = _read_states(states)
    sizes = [_mapping(tree.get("checkpoint_parallel_dimensions")).get("tp_degree") for tree in trees.values()]
    tp_size = next((size for size in sizes if isinstance(size, int) and size > 0), _guess_tp(files))
    stage = None
    dps = [int(match[1]) for file in states if (match := MODEL_STATES.fullmatch(file.name)) and match[1]]
    state = next((file for file in files if file.name == UNIVERSAL_STATE), None)
    with suppress(UnreadableFile):
        stage = zero_stage(read_torch_file(state).tree) if state else None
    zero = ZeroCut(stage, max(dps) + 1 if dps else None)
    return tuple(deepspeed_source(file, tp_size) for file in states), _metadata(trees, tp_size, zero)


def _read_states(files: Sequence[Path]) -> tuple[dict[int, Mapping[str, Any]], tuple[Unreadable, ...]]:
    """Return the state of each model-parallel rank, from the lowest dp rank whose file can be read."""
    trees: dict[int, Mapping[str, Any]] = {}
    broken = []
    found = (
        (int(match[2]), int(match[1] or 0), file) for file in files if (match := MODEL_STATES.fullmatch(file.name))
    )
    for index, _, file in sorted(found):
        if index in trees:
            continue
        try:
            tree = read_torch_file(file).tree
        except UnreadableFile as error:
            broken.append(Unreadable(file, error.why))
            continue
        trees[index] = tree if isinstance(tree, Mapping) else {}
    return trees, tuple(broken)


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _zero_cut(files: Sequence[Path], trees: Mapping[int, Mapping[str, Any]]) -> ZeroCut:
    """Return how ZeRO cut the state, by its first shard that can be read."""
    for file in sorted(file for file in files if OPTIMIZER.fullmatch(file.name)):
        try:
            tree = read_torch_file(file).tree
        except UnreadableFile:
            continue
        return ZeroCut(zero_stage(tree), partition_count(tree))
    return ZeroCut()


def _topology(trees: Mapping[int, Mapping[str, Any]], files: Sequence[Path], zero: ZeroCut) -> Topology | None:
    shards = [match for file in files if (match := OPTIMIZER.fullmatch(file.name))]
    num_shards = 1 + max((int(match[1]) for match in shards), default=-1)
    for tree in trees.values():
        sizes = _mapping(tree.get("checkpoint_parallel_dimensions"))
        tp, pp, dp = sizes.get("tp_degree"), sizes.get("pp_degree"), tree.get("dp_world_size")
        if _is_size(tp) and _is_size(pp) and _is_size(dp) and tp * pp * dp <= MAX_RANKS:
            # MiCS cuts the state among some of the dp ranks; the others hold the same.
            return Topology(tp=tp, pp=pp, dp=num_shards if num_shards == zero.num_ranks else dp)
    if not shards:
        return None
    tp = _guess_tp(files)
    return Topology(tp=tp, pp=max(int(match[2]) for match in shards) // tp + 1, dp=num_shards)


def _guess_tp(files: Sequence[Path]) -> int:
    """Return the number of tp ranks: pipelines write layers; without layers, all model-parallel ranks are tp ranks."""
    layers = [int(match[2]) for file in files if (match := LAYER.fullmatch(file.name))]
    ranks = [int(match[2]) for file in files if (match := MODEL_STATES.fullmatch(file.name))]
    return 1 + max(layers or ranks, default=0)


def _metadata(trees: Mapping[int, Mapping[str, Any]], tp_size: int, zero: ZeroCut) -> CheckpointMetadata:
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    groups: dict[int, tuple[tuple[str, ...], ...]] = {}
    shared: dict[str, str] = {}
    for index, tree in trees.items():
        shared |= {str(name): str(source) for name, source in _mapping(tree.get("shared_params")).items()}
        if index % tp_size == 0:
            owned = [_shapes(group) for group in _groups(tree.get("param_shapes"))]
            groups[index // tp_size] = tuple(map(tuple, owned))
            frozen = _shapes(tree.get("frozen_param_shapes"))
            held = {name: shape for group in (*owned, frozen) for name, shape in group.items()}
            held |= {name: held[source] for name, source in shared.items() if source in held}
            shapes[index // tp_size] = held | _expert_shapes(held, tree.get("num_experts"))
    first = next(iter(trees.values()), {})
    steps, skipped = first.get("global_steps"), first.get("skipped_steps")
    info = first.get("universal_checkpoint_info")
    return CheckpointMetadata(
        shapes=shapes,
        shared=shared,
        zero=replace(zero, groups=groups),
        global_steps=steps if isinstance(steps, int) else None,
        skipped_steps=skipped if isinstance(skipped, int) else 0,
        universal_info=info if isinstance(info, dict) else {},
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _groups(stated: Any) -> Sequence[Any]:
    """Return one dictionary per parameter group; older versions write one dictionary for all."""
    return stated if isinstance(stated, (list, tuple)) else [stated]


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    return {str(name): shape for name, shape in _mapping(group).items() if isinstance(shape, tuple)}


def _expert_shapes(shapes: Mapping[str, tuple[int, ...]], num_experts: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all experts of the layers, given those of the first rank's experts, which are the same."""
    stated = [number for number in _groups(num_experts) if isinstance(number, int)]
    total = min(max(stated, default=0), MAX_EXPERTS)
    owned = [(name, shape) for name, shape in shapes.items() if global_expert(name, 0) == name]
    return {str(global_expert(name, index)): shape for name, shape in owned for index in range(total)}


def deepspeed_source(file: Path, tp_size: int) -> Source:
    """Return one of DeepSpeed's files with the place that its name says; a file of another name is `aside`."""
    label = file.stem
    if match := LAYER.fullmatch(file.name):
        return Source(file, label, "layer", Place(tp=int(match[2])))
    if match := EXPERT.fullmatch(file.name):
        return Source(file, label, "plain", Place(tp=int(match[3]) % tp_size))
    if match := MODEL_STATES.fullmatch(file.name):
        pp, tp = divmod(int(match[2]), tp_size)
        return Source(file, label, "model_states", Place(pp, tp, int(match[1]) if match[1] else None))
    if match := OPTIMIZER.fullmatch(file.name):
        pp, tp = divmod(int(match[2]), tp_size)
        return Source(file, label[label.index("zero_pp_rank") :], "optimizer", Place(pp, tp, int(match[1])))
    return Source(file, label, "aside")


def _missing(folder: Path, topology: Topology, metadata: CheckpointMetadata, present: set[str]) -> Iterator[Unreadable]:
    """Yield files that the topology and the metadata require but that do not exist."""
    model_parallel_ranks = range(topology.pp * topology.tp)
    prefix = _shard_prefix(present)
    each = [(dp, mp) for mp in model_parallel_ranks for dp in range(topology.dp)]
    if metadata.zero.stage == 3:
        names = [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp, mp in each]
    else:
        names = [f"mp_rank_{mp:02d}_model_states.pt" for mp in model_parallel_ranks]
    if prefix is not None:
        names += [f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp, mp in each]
    layers = sorted(_layers_on_disk(present) | (_layers_in_metadata(metadata) if _layers_on_disk(present) else set()))
    names += [f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer in layers for tp in range(topology.tp)]
    names += _expert_files(metadata, present)
    for name in names:
        if name not in present:
            yield Unreadable(folder / name, f"missing: the topology {topology} requires it")


def _expert_files(metadata: CheckpointMetadata, present: set[str]) -> list[str]:
    """Return the files that the layers with experts have: one for each expert, on each model-parallel rank."""
    found = [match for name in present if (match := EXPERT.fullmatch(name))]
    numbers = [number for shapes in metadata.shapes.values() for number in local_experts(shapes).values()]
    layers = sorted({(int(match[1]), match[3]) for match in found})
    num_experts = max([*numbers, *(int(match[2]) + 1 for match in found)], default=0) if found else 0
    return [
        f"layer_{layer}_expert_{index}_mp_rank_{mp}_model_states.pt"
        for layer, mp in layers
        for index in range(num_experts)
    ]


def _stale(files: Sequence[Path], topology: Topology) -> Iterator[Unreadable]:
    """Yield shards of ranks that the checkpoint does not have: another run wrote them into its folder."""
    for file in sorted(files):
        match = OPTIMIZER.fullmatch(file.name) or MODEL_STATES.fullmatch(file.name)
        dp, mp = (int(match[1] or 0), int(match[2])) if match else (0, 0)
        if dp >= topology.dp or mp >= topology.pp * topology.tp:
            yield Unreadable(file, f"left over from a larger topology: this checkpoint has {topology}")


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
