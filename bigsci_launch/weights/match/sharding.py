"""Decides which parameters every tp rank has whole: by the checkpoint's metadata, otherwise by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bigsci_launch.weights.files.sources import CheckpointMetadata

NORM = re.compile(r"norm|(?:^|[._])ln(?:[._\d]|$)", re.IGNORECASE)
# Second linear layers of attention and MLP in the frameworks' names: split over their inputs, so the bias is whole.
ROW_PARALLEL = re.compile(r"(?:dense|4h_to_h|o_proj|out_proj|c_proj|down_proj|down|output|proj|wo|w2|fc2)$")
COLUMN_PARALLEL = re.compile(r"(?:h_to_4h|in_proj|up_proj|gate_proj|q_proj|k_proj|v_proj|fc1)$")
POSITIONS = re.compile(r"position|(?:^|[._])w?pos(?:[._]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ShardingHints:
    """How a checkpoint's parameters are split: name patterns from DeepSpeed's universal checkpoint info."""

    replicated: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()
    in_halves: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    vocab_size: int | None = None

    @classmethod
    def of_metadata(cls, metadata: CheckpointMetadata) -> ShardingHints:
        def patterns(key: str) -> tuple[str, ...]:
            found = metadata.universal_info.get(key)
            return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()

        return cls(
            replicated=patterns("tp_replicated_parameter_patterns"),
            by_row=patterns("parameter_with_row_parallelism_patterns"),
            in_halves=patterns("parameter_with_2_sub_params_cat_dim_0"),
            vocabulary=patterns("vocabulary_parameter_patterns"),
            vocab_size=size if isinstance(size := metadata.universal_info.get("original_vocab_size"), int) else None,
        )


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether any pattern matches the beginning of a name; an invalid pattern matches nothing."""
    for pattern in patterns:
        try:
            if re.match(pattern, name):
                return True
        except re.error:
            continue
    return False


def is_replicated(name: str, shapes: Sequence[tuple[int, ...]], hints: ShardingHints) -> bool:
    """Whether every tp rank has all of a parameter: by the checkpoint's patterns, otherwise by its name."""
    if len(set(shapes)) != 1:
        return False
    if hints.replicated:
        return matches(hints.replicated, name)
    module, _, last = name.rpartition(".")
    if NORM.search(module.rpartition(".")[2]) or POSITIONS.search(name):
        return True
    is_bias = last == "bias" and len(shapes[0]) == 1
    return is_bias and bool(ROW_PARALLEL.search(module)) and not COLUMN_PARALLEL.search(module)
