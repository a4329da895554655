"""The vocabulary of the house: one word, one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from .conftest import Parsed, imports

TAXONOMY = "spy/taxonomy.py"
CLASS_ID = re.compile(r"\bH\d\d+\b")
RECORDING = re.compile(r"\bH\d+[\w-]*-ranks-culprit-\d+")


def type_names(tree: ast.Module) -> Iterator[str]:
    """Return the classes of a module, at any depth, and its type aliases, which are capitalised names that it
    assigns."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name) and is_type_name(target.id))


def is_type_name(name: str) -> bool:
    """Return whether a name is written like a type: `StoredTensor`, not `NUM_STEPS`, `GIB` or `_PATTERN`."""
    return name[0].isupper() and not name.isupper()


def test_a_class_name_means_one_thing(modules: Parsed) -> None:
    places = defaultdict(list)
    for path, tree in modules.items():
        for name in type_names(tree):
            places[name].append(path)
    shared = [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]
    assert not shared, "\n".join(shared)


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every text that a module uses, with its line. Docstrings, including those of fields, do not count."""
    unused = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unused:
            yield node.lineno, node.value


@pytest.mark.slow
def test_hang_classes_are_named_in_one_file(modules: Parsed) -> None:
    """Elsewhere a class is a member of `HangClass`, whose name says what it is. Recordings have names of their own."""
    wrong = []
    for path, tree in modules.items():
        # H100 is a device in the planner; commands show by example what a person may type.
        if path != TAXONOMY and not path.startswith(("plan/", "cli/")):
            wrong += [
                f"{path}:{line}: {text!r}" for line, text in texts(tree) if CLASS_ID.search(RECORDING.sub("", text))
            ]
    assert not wrong, "\n".join(wrong)


def test_the_taxonomy_knows_nobody_and_is_all_that_the_laboratory_knows_of_spy(modules: Parsed) -> None:
    assert not [name for name in imports(modules[TAXONOMY]) if name.startswith("bigsci_launch")]
    by_laboratory = {name for path in modules if path.startswith("hang_lab/") for name in imports(modules[path])}
    known = {name for name in by_laboratory if name.startswith("bigsci_launch.spy")}
    assert all(name.startswith("bigsci_launch.spy.taxonomy") for name in known), known
