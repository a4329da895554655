"""YAML text as a tree of values that know their place, `file:line:column`.

It applies the rules of YAML 1.2 to PyYAML's parser: only `true` and `false` are booleans, `20:00:00` and `010` are
text, `6e-5` is a number, and a key may occur only once. An ambiguous value stays text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from yaml.composer import Composer

from bigsci_launch.errors import ConfigError, Problem
from bigsci_launch.typed_path import open_typed

Scalar: TypeAlias = str | int | float | bool | None
KeyPath: TypeAlias = tuple[str | int, ...]

STDIN = Path("-")
MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+)"
    ),
}


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it was written; `where` of a mapping's entry is the place of its key. `text` is how a scalar of
    a file was written: 1.10 is not 1.1 to everybody."""

    value: Scalar | dict[str, Node] | list[Node]
    where: str
    text: str = field(default="", compare=False)

    def plain(self) -> Any:
        """Return the value without places, as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, step: str | int) -> Node | None:
        """Return the entry or item at `step`, or None."""
        if isinstance(self.value, dict) and isinstance(step, str):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int) and 0 <= step < len(self.value):
            return self.value[step]
        return None

    def at(self, path: KeyPath) -> Node | None:
        node: Node | None = self
        for step in path:
            node = node.child(step) if node else None
        return node

    def nearest(self, path: KeyPath) -> Node:
        """Return the node at `path`, or the deepest existing one above it."""
        node = self
        for step in path:
            below = node.child(step)
            if below is None:
                break
            node = below
        return node


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with YAML 1.2's plain scalars."""


_Events = getattr(yaml, "CSafeLoader", None)


class _FastLoader(Composer, _Events or object):  # type: ignore[misc]
    """The same on libyaml's events, where it is there: faster, with errors that say less. What composes them is
    Python, which ends at a depth at which C would crash."""

    def __init__(self, text: str) -> None:
        super(Composer, self).__init__(text)
        self.anchors: dict[str, yaml.Node] = {}


_LOADERS: tuple[Any, ...] = (_FastLoader, _Loader) if _Events else (_Loader,)
# Replaced rather than inherited, because PyYAML's own table reads 20:00:00 as 72000.
for _loader in _LOADERS:
    _loader.yaml_implicit_resolvers = {}
    for _name, _pattern in _PLAIN.items():
        _loader.add_implicit_resolver(_PREFIX + _name, re.compile(f"(?:{_pattern.pattern})\\Z"), None)


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_LOADERS[0])
    except yaml.YAMLError:
        return yaml.compose(text, Loader=_Loader)


def resolve_plain(text: str) -> str:
    """Return how an unquoted `text` is read: `null`, `bool`, `int`, `float` or `str`."""
    return next((name for name, pattern in _PLAIN.items() if pattern.fullmatch(text)), "str")


def read_document(path: Path) -> Node:
    """Return the mapping in the YAML file at `path`; `-` is stdin.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or not YAML, is empty, or contains no mapping.
    """
    is_stdin = path == STDIN
    name = "stdin" if is_stdin else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else open_typed(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _error(name, f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise _error(name, f"longer than {MAX_BYTES} bytes: not a configuration file")
    root = parse_document(_decode(name, data), name)
    if root.value is None:
        raise _error(name, "the file is empty")
    if not isinstance(root.value, dict):
        raise _error(
            root.where, f"the file must consist of sections, `name:` with keys below it (got {describe(root.value)})"
        )
    return root


def parse_document(text: str, name: str) -> Node:
    """Return the one YAML document in `text`. Every place begins with `name`, then has line and column.

    Raises:
        ConfigError: the text is not YAML, or breaks the rules of this module; lists every such problem.
    """
    try:
        tree = _compose(text)
        builder = _Builder(name)
        root = builder.build(tree) if tree is not None else Node(None, f"{name}:1:1")
    except yaml.reader.ReaderError as error:
        where = _place_in_text(name, text, error.position)
        raise _error(where, f"a character that YAML does not allow (U+{ord(text[error.position]):04X})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(name, mark) if mark else name
        parts = (error.context, error.problem)
        raise _error(where, f"not YAML: {', '.join(part for part in parts if part)}") from error
    except RecursionError as error:
        raise _error(name, "nested too deeply") from error
    if builder.problems:
        raise ConfigError(f"{name}: {builder.problems[0].text}", problems=builder.problems)
    return root


def describe(value: Any, limit: int = 60) -> str:
    """Return a value as an error message shows it: short, and text in quotes."""
    if isinstance(value, (dict, list)) and value:
        return "a mapping" if isinstance(value, dict) else "a list"
    shown = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 4]}...{shown[-1]}"


class _Builder:
    """Turns PyYAML's nodes into ours and collects problems."""

    def __init__(self, name: str) -> None:
        self.problems: list[Problem] = []
        self._name = name
        self._num_nodes = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, where: str | None = None) -> Node:
        where = where or _place(self._name, node.start_mark)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _error(where, f"more than {MAX_NODES} values once its aliases are written out")
        if id(node) in self._open:
            raise _error(where, "an alias that contains itself")
        if len(self._open) == MAX_DEPTH:
            raise _error(where, "nested too deeply")
        self._open.add(id(node))
        text = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        built = Node(self._value(node, where), where, text)
        self._open.discard(id(node))
        return built

    def _value(self, node: yaml.Node, where: str) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            return [self.build(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, where)
        self._refuse(where, "", f"the tag {node.tag!r} is not allowed")
        return None

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = _place(self._name, key_node.start_mark)
            key = self._key(key_node, where)
            if key is None:
                continue
            if key in entries:
                self._refuse(where, key, f"the key occurs twice (first at {entries[key].where})")
                continue
            entries[key] = self.build(value_node, where)
        return entries

    def _key(self, node: yaml.Node, where: str) -> str | None:
        text = node.value if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        if node.tag != _PREFIX + "str":
            self._refuse(where, "", f"a key must be text (got {text or 'nothing'})")
            return None
        if text == "<<":
            self._refuse(where, "<<", "merge keys are not YAML 1.2; write `extends: other.yaml` at the top of the file")
            return None
        return str(text)

    def _scalar(self, node: yaml.ScalarNode, where: str) -> Scalar:
        text, kind = str(node.value), node.tag.removeprefix(_PREFIX)
        if kind == "str":
            if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
                self._refuse(where, "", "text with a NUL character or half a surrogate pair")
            return text
        if kind not in _PLAIN or not _PLAIN[kind].fullmatch(text):
            self._refuse(where, "", f"{text!r} with the tag {node.tag!r} is not allowed")
            return None
        if kind == "null":
            return None
        return text.lower() == "true" if kind == "bool" else self._number(text, kind, where)

    def _number(self, text: str, kind: str, where: str) -> int | float | None:
        # Python refuses integers of more than 4300 digits, and floats silently overflow to infinity.
        number = None if len(text) > 400 else int(text) if kind == "int" else float(text)
        if number is None or number in (float("inf"), float("-inf")):
            self._refuse(where, "", f"{describe(text)} is too large a number")
        return number

    def _refuse(self, where: str, key: str, text: str) -> None:
        self.problems.append(Problem(where, key, text))


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = _place_in_text(name, data[: error.start].decode("utf-8", errors="replace"), error.start)
        raise _error(where, f"not UTF-8 text (byte 0x{data[error.start]:02x})") from error


def _place(name: str, mark: yaml.Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _place_in_text(name: str, text: str, offset: int) -> str:
    before = text[:offset]
    return f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _error(where: str, text: str) -> ConfigError:
    return ConfigError(f"{where}: {text}", problems=[Problem(where, "", text)])


def moved(node: Node, where: str) -> Node:
    """Return a tree with the same values, each at the place `where`."""
    if isinstance(node.value, dict):
        return Node({key: moved(child, where) for key, child in node.value.items()}, where)
    if isinstance(node.value, list):
        return Node([moved(child, where) for child in node.value], where)
    return Node(node.value, where, node.text)


def at_one_place(value: Any, where: str) -> Node:
    """Return plain data as a tree in which every value has the place `where`."""
    if isinstance(value, dict):
        return Node({key: at_one_place(child, where) for key, child in value.items()}, where)
    if isinstance(value, list):
        return Node([at_one_place(child, where) for child in value], where)
    return Node(value, where)


def overlay(lower: Node, upper: Node) -> Node:
    """Return `upper` merged over `lower`: mappings are merged, anything else is replaced as a whole."""
    if not (isinstance(lower.value, dict) and isinstance(upper.value, dict)):
        return upper
    merged = dict(lower.value)
    for key, node in upper.value.items():
        merged[key] = overlay(merged[key], node) if key in merged else node
    return Node(merged, upper.where)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every scalar and every empty container in plain data with its key path, in order."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def dotted(path: KeyPath) -> str:
    """Return a key path as it is written: `faults.0.rank`."""
    return ".".join(str(step) for step in path)


def parse_key(text: str) -> KeyPath:
    """Return the key path that `dotted` writes as `text`; a step of digits is an index."""
    return tuple(int(step) if step.isdecimal() else step for step in text.split("."))
