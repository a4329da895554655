"""The state of Hugging Face's Trainer as JSON: `trainer_state.json` has the step, the epoch and what was logged."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from bigsci_launch.safe_files import parse_json
from bigsci_launch.weights.files.mapped import UnreadableFile, read_small_file
from bigsci_launch.weights.files.sources import Contents, Source
from bigsci_launch.weights.files.tensors import StoredValue
from bigsci_launch.weights.formats.values import value_of
from bigsci_launch.weights.objects.flatten import flatten

MAX_BYTES = 64 << 20
# What was logged: one entry for each logged step, so all of it is one value.
HISTORY = "log_history"


def read_json_state(source: Source) -> Contents:
    """Return every entry of the file as a value.

    Raises:
        UnreadableFile: the file cannot be read, or is not a JSON object.
    """
    data = read_small_file(source.path, MAX_BYTES)
    try:
        document = parse_json(data, MAX_BYTES, allow_nan=True)
    except ValueError as error:
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
