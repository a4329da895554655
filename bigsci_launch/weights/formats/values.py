"""Makes values of the leaves of a tree: of a pickle, or of the state of Hugging Face's Trainer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigsci_launch.weights.files.mapped import read_small_file
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import Place, StoredValue, UnreadableFile
from bigsci_launch.weights.objects.encode import encode
from bigsci_launch.weights.objects.flatten import flatten
from bigsci_launch.weights.objects.texts import show

# Longer contents are replaced by their digest.
MAX_CONTENT = 64

# Values that say which run or program wrote a file, or when, and nothing about the state in it.
ABOUT_RUN: dict[str, re.Pattern[str]] = {
    "dump": re.compile(r"__metadata__\.(?:step|when)"),
    "model_states": re.compile(r"ds_version"),
    "optimizer": re.compile(r"(?:optimizer_state_dict\.)?ds_version"),
    "plain": re.compile(
        r"args\.(?:save|load|iteration|ckpt_step|pretrained_checkpoint|data_cache_path|tensorboard_dir|wandb_\w+)"
    ),
}
# What Megatron-LM writes next to the arguments of its command line.
MEGATRON = "checkpoint_version"

# The state of Hugging Face's Trainer, `trainer_state.json`, has the step, the epoch and what was logged.
MAX_STATE_BYTES = 64 << 20
# What was logged: one entry for each logged step, so all of it is one value.
HISTORY = "log_history"


def mark_about_run(values: Sequence[StoredValue], file_format: str) -> tuple[StoredValue, ...]:
    """Return the values of a file. Those about the run are marked: in a plain file, if Megatron-LM wrote it."""
    pattern = ABOUT_RUN.get(file_format)
    if pattern is None or (file_format == "plain" and not any(value.name == MEGATRON for value in values)):
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


def read_json_state(source: Source) -> Contents:
    """Return every entry of a JSON file, the state of Hugging Face's Trainer, as a value.

    Raises:
        UnreadableFile: the file cannot be read, or is not a JSON object.
    """
    data = read_small_file(source.path, MAX_STATE_BYTES)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(source.path, "not JSON, or nested too deep") from error
    if not isinstance(document, dict):
        raise UnreadableFile(source.path, "not a trainer's state (it is not an object)")
    history = document.pop(HISTORY, None)
    values = [value_of(entry.name, source.place, source.path, entry.node) for entry in flatten(document, source.label)]
    if history is not None:
        values.append(_whole(history, source))
    return Contents((), values=tuple(values))


def _whole(history: Any, source: Source) -> StoredValue:
    content = hashlib.sha256(json.dumps(history, sort_keys=True).encode()).digest()
    text = f"{len(history):,} entries" if isinstance(history, list) else type(history).__name__
    return StoredValue(f"{source.label}.{HISTORY}", source.place, source.path, b"#" + content, text)
