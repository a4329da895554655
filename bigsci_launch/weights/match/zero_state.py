"""Pairs what two of DeepSpeed's checkpoints hold next to the parameters, though they are cut otherwise.

Every rank writes the same learning rate, step and loss scale into its shard, under names that depend on the stage of
ZeRO. Such copies are one entry here, under one name. What describes how a checkpoint is cut is not compared: it differs
by intention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bigsci_launch.weights.files.mapped import UnreadableFile
from bigsci_launch.weights.files.pool import MANY_FILES, FilePool, equal_segments
from bigsci_launch.weights.files.tensors import NOWHERE, StoredTensor, StoredValue
from bigsci_launch.weights.formats.zero import LEFT_EMPTY
from bigsci_launch.weights.locate.parts import component_of
from bigsci_launch.weights.match.batches import ComparedSide, EntryPair, StoredEntry

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt|optimizer_state\.pt")
STEP = re.compile(r"optimizer\.(?:state\.)?\d+\.step")
FLAT = re.compile(r"zero\.(?:fp32_flat_groups|single_partition_of_fp32_groups)\..*")
ABOUT_CUT = re.compile(
    r"(?:zero\.)?(?:module|buffer_names|(?:frozen_)?param_shapes|frozen_param_fragments|shared_params|[dm]p_world_size|"
    r"checkpoint_parallel_dimensions|num_experts|(?:ds_)?autoep_layers|universal_checkpoint_info|ds_config|ds_version|"
    r"zero_stage|group_paddings|param_alignment_paddings|partition_count|param_slice_mappings|ds_zero_partition_groups)"
    r"(?:\..*)?|optimizer|optimizer\.param_groups\.\d+\.(?:name|params(?:\..*)?)"
)
# Files of one parameter in a universal checkpoint: what they contain next to the tensor says how to cut it.
PARAMETER_FILES = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
# What DeepSpeed itself writes is the same on all ranks.
OF_ALL_RANKS = re.compile(r"(?:optimizer|zero|lr_scheduler)\..*|global_steps|global_samples|skipped_steps")
# What one stage of ZeRO writes and another does not.
OF_STAGE = re.compile(r"zero\..*|optimizer\.(?!param_groups\.|step$).*")
# Larger tensors of single ranks are not copies of one state.
MAX_COPY_BYTES = 16 << 20

OF_THE_CUT = "which describe how the checkpoint is cut"
IN_PIECES = "in flat tensors of unknown parameters"
OF_ITS_STAGE = "which only this stage of ZeRO stores"
OF_RANKS = "which differ between the ranks of one side"


@dataclass
class PairedState:
    """Pairs of entries under common names, and entries that are not compared: the side, why, and the entry."""

    pairs: list[EntryPair] = field(default_factory=list)
    left_out: list[tuple[ComparedSide, str, StoredEntry]] = field(default_factory=list)


def pair_state(
    a: Iterable[StoredEntry], b: Iterable[StoredEntry], *, is_same_stage: bool, why_rank: str | None
) -> PairedState:
    """Pair the entries of two sides that are no parameters.

    `why_rank` says why files of single ranks, such as random states, have no counterpart; None: they have one.
    """
    found = PairedState()
    held_a, held_b = _gathered("A", a, why_rank, found), _gathered("B", b, why_rank, found)
    files = FilePool(MANY_FILES)
    for key in dict.fromkeys([*held_a, *held_b]):
        xs, ys = held_a.get(key, []), held_b.get(key, [])
        if xs and ys:
            _pair_copies(key, xs, ys, files, found)
        elif not is_same_stage and OF_STAGE.fullmatch(key):
            found.left_out += [("A", OF_ITS_STAGE, x) for x in xs] + [("B", OF_ITS_STAGE, y) for y in ys]
        else:
            one_x, one_y = (_one_of(entries, files) for entries in (xs, ys))
            found.pairs += [(x, None) for x in ([one_x] if one_x else xs)]
            found.pairs += [(None, y) for y in ([one_y] if one_y else ys)]
    files.close_all()
    return found


def _gathered(
    side: ComparedSide, entries: Iterable[StoredEntry], why_rank: str | None, found: PairedState
) -> dict[str, list[StoredEntry]]:
    held: dict[str, list[StoredEntry]] = {}
    for entry in entries:
        key = key_of(entry)
        if isinstance(entry, StoredTensor) and FLAT.fullmatch(key):
            found.left_out.append((side, IN_PIECES, entry))
        elif _is_about_cut(entry, key):
            found.left_out.append((side, OF_THE_CUT, entry))
        elif why_rank is not None and component_of(entry.path) == "random states":
            found.left_out.append((side, why_rank, entry))
        else:
            held.setdefault(key, []).append(entry)
    return held


def _is_about_cut(entry: StoredEntry, key: str) -> bool:
    if entry.path.name in PARAMETER_FILES or key.endswith(LEFT_EMPTY):
        return True
    return bool(ABOUT_CUT.fullmatch(key) or FLAT.fullmatch(key))


def key_of(entry: StoredEntry) -> str:
    """Return the name of an entry in all stages of ZeRO and in universal checkpoints."""
    name, file = entry.name, entry.path.name
    if OPTIMIZER_FILE.fullmatch(file):
        name = name.removeprefix("zero/optimizer_state.")
        if file != "optimizer_state.pt":
            name = name.removeprefix("optimizer_state_dict.")
        for prefix in ("base_optimizer_state.", "optimizer_state_dict."):
            if name.startswith(prefix):
                return _of_optimizer(name.removeprefix(prefix))
        return _of_optimizer(name) if name.startswith("param_groups.") else f"zero.{name}"
    if name.startswith("optimizer.optimizer_state_dict."):
        return _of_optimizer(name.removeprefix("optimizer.optimizer_state_dict."))
    if file == "step.pt":
        return "optimizer.step"
    return _of_optimizer(name.removeprefix("optimizer.")) if name.startswith("optimizer.") else name


def _of_optimizer(name: str) -> str:
    full = f"optimizer.{name}"
    return "optimizer.step" if STEP.fullmatch(full) else full


def _pair_copies(
    key: str, xs: Sequence[StoredEntry], ys: Sequence[StoredEntry], files: FilePool, found: PairedState
) -> None:
    one_x, one_y = _one_of(xs, files), _one_of(ys, files)
    if one_x and one_y:
        found.pairs.append((replace(one_x, name=key), replace(one_y, name=key)))
        return
    is_by_rank = [x.place for x in xs] == [y.place for y in ys]
    pairs = list(zip(xs, ys, strict=is_by_rank))
    if not is_by_rank and OF_ALL_RANKS.fullmatch(key):
        pairs += [(x, ys[0]) for x in xs[len(ys) :]] + [(xs[0], y) for y in ys[len(xs) :]]
    elif not is_by_rank:
        # What the user's program adds may belong to each rank. Two topologies have the first rank in common.
        pairs = pairs[:1]
        found.left_out += [("A", OF_RANKS, x) for x in xs[1:]] + [("B", OF_RANKS, y) for y in ys[1:]]
    found.pairs += [(replace(x, name=key), replace(y, name=key)) for x, y in pairs]


def _one_of(entries: Sequence[StoredEntry], files: FilePool) -> StoredEntry | None:
    if not entries:
        return None
    first = entries[0]
    if not all(_are_alike(first, entry, files) for entry in entries[1:]):
        return None
    return first if len(entries) == 1 else replace(first, place=NOWHERE)


def _are_alike(x: StoredEntry, y: StoredEntry, files: FilePool) -> bool:
    if isinstance(x, StoredValue) or isinstance(y, StoredValue):
        return isinstance(x, StoredValue) and isinstance(y, StoredValue) and x.content == y.content
    if (x.dtype, x.shape, x.strides) != (y.dtype, y.shape, y.strides) or x.chunks or y.chunks:
        return False
    if x.num_bytes > MAX_COPY_BYTES:
        return False
    try:
        return equal_segments(x.segments, y.segments, files)
    except UnreadableFile:
        return False
