"""Reads the content that comes with the package without its schema.

Tests hold it to the schema, whose library would take 0.2 s of CPU: two fifths of what loads before a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bigsci_launch.config.document import read_document
from bigsci_launch.spy.taxonomy import HangClass, State

NOTHING: Mapping[str, Any] = MappingProxyType({})
UNSAID = ("operation", "names", "classes", "stack", "without", "state", "wchan", "call", "child", "writing", "error")
LEFT_OUT: Mapping[str, Any] = {
    **dict.fromkeys((*UNSAID, "exit")),
    **{"process_groups": False, "kind": "collective", "who": "suspects", "states": (State.HANG,)},
}
"""What keys mean that a file leaves out, where that is not an empty list."""


class TrustedSection:
    """The keys of a section as attributes, as in the model of its schema."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = {key: _value(key, value) for key, value in keys.items()}
        self.model_fields_set = set(keys)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self._keys.get(key, LEFT_OUT.get(key, NOTHING))


def read_trusted(path: Path) -> TrustedSection:
    """Return the content of a valid file.

    Raises:
        ConfigError: the file cannot be read.
    """
    return TrustedSection(read_document(path).plain())


def _value(key: str, value: Any) -> Any:
    if key == "hang_class":
        return HangClass.parse(value)
    if key in ("classes", "states"):
        return tuple(HangClass.parse(each) if key == "classes" else State(each) for each in value)
    if key == "when":
        return TrustedSection(value)
    if isinstance(value, list):
        return tuple(TrustedSection(each) if isinstance(each, dict) else each for each in value)
    return {name: tuple(each) for name, each in value.items()} if isinstance(value, dict) else value
