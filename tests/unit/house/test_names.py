"""The vocabulary of the house: one word, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from .conftest import Parsed

# Names that still have two meanings. This list only gets shorter.
STILL_SHARED = {
    "Axis", "Bundle", "Cell", "Comparison", "Copies", "Finding", "Key", "Kind", "Layout", "Mark", "Model", "Node",
    "Pair", "Partition", "Place", "Progress", "Ranks", "Record", "Role", "Row", "Selection", "Severity",
    "Shape", "Shown", "Side", "Stall", "State", "Work",
}  # fmt: skip


def type_names(tree: ast.Module) -> Iterator[str]:
    """The classes of a module, at any depth, and its type aliases: capitalised names that it assigns."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name) and is_type_name(target.id))


def is_type_name(name: str) -> bool:
    """Whether a name is written as a type is: `StoredTensor`, not `NUM_STEPS`, `GIB` or `_PATTERN`."""
    return name[0].isupper() and not name.isupper()


def test_a_class_name_means_one_thing(modules: Parsed) -> None:
    places = defaultdict(list)
    for path, tree in modules.items():
        for name in type_names(tree):
            places[name].append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    more = [f"{name}: {', '.join(paths)}" for name, paths in sorted(shared.items()) if name not in STILL_SHARED]
    assert not more, "\n".join(more)
