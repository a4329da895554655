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

UNSAID = ("operation", "names", "classes", "stack", "without", "state", "wchan", "call", "child", "writing", "error")
LISTS = """
    wrappers communications scopes local_libraries python_libraries waits kernel_waits phases signal_handler_names
    child_files data_loader_files data_fetching_files plumbing kernel ranks
"""
TABLES = """
    idle may_communicate backward_engines shared_locks kernel_functions meant_barriers no_phase signal_handlers
    no_signal_handlers norms store joining shutdown servers starts_of_children calls
"""
LEFT_OUT: Mapping[str, Any] = {
    **dict.fromkeys((*UNSAID, "exit")),
    **dict.fromkeys(LISTS.split(), ()),
    **dict.fromkeys(TABLES.split(), MappingProxyType({})),
    **{"process_groups": False, "kind": "collective", "who": "suspects", "states": (State.HANG,)},
}
"""What the keys mean that a file may leave out."""


class TrustedSection:
    """The keys of a section as attributes, as in the model of its schema."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = {key: _value(key, value) for key, value in keys.items()}
        self.model_fields_set = set(keys)

    def __getattr__(self, key: str) -> Any:
        keys = self.__dict__.get("_keys", {})
        if key not in keys and key not in LEFT_OUT:
            raise AttributeError(f"no content of the package has a key {key!r}")
        return keys[key] if key in keys else LEFT_OUT[key]


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
