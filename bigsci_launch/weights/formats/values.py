"""Makes values of the leaves of a tree."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.tensors import Place, StoredValue
from bigsci_launch.weights.objects.encode import encode
from bigsci_launch.weights.objects.texts import show

# Longer contents are replaced by their digest.
MAX_CONTENT = 64

# Arguments of Megatron-LM's command line that say where a run read and wrote, and over which ranks it was spread.
_ARGUMENTS = (
    r"args\.(?:save|load|iteration|ckpt_step|pretrained_checkpoint|data_cache_path|tensorboard_dir|wandb_\w+"
    r"|rank|local_rank|world_size|data_parallel_size|context_parallel_size|expert_tensor_parallel_size"
    r"|(?:(?:transformer_|virtual_)?pipeline|tensor|expert)_model_parallel_size)"
)
# Values that say which run or program wrote a file, or when, and nothing about the state in it.
ABOUT_RUN: dict[str, re.Pattern[str]] = {
    "dump": re.compile(r"__metadata__\.(?:step|when)"),
    "model_states": re.compile(r"ds_version"),
    "optimizer": re.compile(r"(?:optimizer_state_dict\.)?ds_version"),
    "plain": re.compile(_ARGUMENTS),
    "aside": re.compile(rf"(?:.*/)?common\.{_ARGUMENTS}"),
}
# What Megatron-LM writes next to the arguments of its command line, in a file of its own or in `common.pt`.
MEGATRON = re.compile(r"(?:(?:.*/)?common\.)?checkpoint_version")


def mark_about_run(values: Sequence[StoredValue], file_format: str) -> tuple[StoredValue, ...]:
    """Return the values of a file. Those about the run are marked; arguments only if Megatron-LM wrote them."""
    pattern = ABOUT_RUN.get(file_format)
    if pattern is None:
        return tuple(values)
    if file_format in ("plain", "aside") and not any(MEGATRON.fullmatch(value.name) for value in values):
        return tuple(values)
    return tuple(replace(value, is_about_run=bool(pattern.fullmatch(value.name))) for value in values)


def value_of(name: str, place: Place, path: Path, node: Any) -> StoredValue:
    """Return a leaf as a value.

    Raises:
        NotPlain: the leaf contains something that is no plain value.
    """
    content = encode(node)
    if len(content) > MAX_CONTENT:
        content = b"#" + hashlib.sha256(content).digest()
    return StoredValue(name, place, path, content, show(node))
