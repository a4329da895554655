"""The floor plan: which room may import which, which rooms are pure, and how many modules a room may hold."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import PurePosixPath

from .conftest import PACKAGE, Parsed, imports, nodes

GROUND = {
    "content",
    "awake_clock",
    "door",
    "errors",
    "file_names",
    "gpus",
    "iteration_line",
    "loss_jump",
    "lost_peer",
    "own_place",
    "printable",
    "procfs",
    "progress",
    "safe_files",
    "safe_pickle",
    "topology",
    "typed_path",
    "units",
}
"""Rooms that every other room may import, and that import only each other."""

MAY_USE: dict[str, set[str]] = {
    "pages": set(),
    "charts": set(),
    "scheduler": set(),
    "config": set(),
    "data": set(),
    "weights": {"pages"},
    "runs": {"config", "scheduler"},
    "minicluster": {"scheduler"},
    "plan": {"charts", "config", "pages", "runs", "scheduler"},
    "spy": {"config", "pages", "runs", "scheduler"},
    "trace": {"runs", "spy"},
    "watch": {"charts", "config", "nodes", "pages", "runs", "scheduler", "spy", "weights"},
    "nodes": {"config", "runs", "scheduler"},
    "launch": {"config", "nodes", "plan", "runs", "scheduler"},
    "rehearse": {"config", "launch", "plan", "runs", "scheduler"},
    "recover": {"config", "nodes", "runs", "scheduler"},
    "train": {"config", "data", "launch", "plan", "recover", "runs", "weights"},
    "hang_lab": {"config", "launch", "runs", "scheduler", "spy"},
    "demo": {"runs"},
    "cli": {
        *("config", "data", "demo", "hang_lab", "launch", "minicluster", "nodes", "pages", "plan", "recover"),
        *("rehearse", "runs", "scheduler", "spy", "trace", "watch", "weights"),
    },
}
"""What each may import apart from the ground floor and itself. Nobody may use `cli` or `train`."""

ROOMS_INSIDE: dict[str, dict[str, set[str]]] = {
    "spy": {
        "evidence": set(),
        "look": {"evidence"},
        "inputs": {"evidence"},
        "judge": {"evidence"},
        "known": {"evidence", "judge"},
        "show": {"evidence", "judge"},
    },
    "weights": {
        "files": set(),
        "objects": set(),
        "formats": {"files", "objects"},
        "locate": {"files", "formats"},
        "match": {"files", "formats", "locate"},
        "compare": {"files", "formats", "match"},
        "explain": {"files", "formats", "match", "compare"},
        "show": {"files", "compare"},
    },
    "runs": {
        "output": set(),
        "ending": set(),
        "chain": set(),
        "control": {"watching"},
        "generations": set(),
        "rehearsals": set(),
        "restart": set(),
        "saves": {"watching"},
        "sizes": set(),
        "watching": set(),
        "show": {"chain", "control", "ending", "generations", "restart", "saves", "sizes", "watching"},
    },
    "watch": {
        "read": set(),
        "judge": set(),
        "ranks": {"judge"},
        "act": set(),
        "tell": set(),
        "show": {"read"},
    },
    "plan": {
        "shape": set(),
        "price": {"shape"},
        "calibrate": {"shape", "price"},
        "choose": {"shape", "price"},
        "survive": {"shape", "price", "choose"},
        "generations": {"shape", "price", "choose", "survive"},
        "show": {"shape", "price", "choose", "survive"},
    },
}
"""The judge never touches a machine; calibrating and choosing never see each other."""

PURE = (
    *("spy/judge/", "watch/judge/", "plan/shape/", "launch/job/request.py", "config/check.py", "config/rules/"),
    *("recover/members.py", "recover/course.py", "recover/holding.py"),
    *("rehearse/reduce.py", "rehearse/judge.py", "rehearse/phases.py", "rehearse/limits.py"),
)
IMPURE_MODULES = {"os", "subprocess", "socket", "time", "threading", "shutil", "tempfile", "random", "signal"}
IMPURE_CALLS = {"open", "print", "input", "read_text", "write_text", "read_bytes", "write_bytes", "is_file", "is_dir"}

MOST_MODULES = 12
CROWDED = {"hang_lab": 14, "train": 19}
"""Rooms that contain more modules, and how many. A number may fall but never rise, and no room may be added."""


def test_rooms_import_only_rooms_that_they_may_use(modules: Parsed) -> None:
    wrong = set()
    for path, tree in modules.items():
        here = _room(path)
        if here in ("__init__", "__main__"):
            continue
        assert here in MAY_USE or here in GROUND, f"{path}: say in MAY_USE what the room {here!r} may use"
        allowed = {here} | GROUND | MAY_USE.get(here, set())
        for name in imports(tree):
            there = name.split(".")[1:2]
            if name.startswith("bigsci_launch.") and there != ["__version__"] and there[0] not in allowed:
                wrong.add(f"{path}: {here} may not use {there[0]}")
    assert not wrong, "\n".join(sorted(wrong))


def test_rooms_inside_a_package_import_only_rooms_that_they_may_use(modules: Parsed) -> None:
    wrong = set()
    for path, tree in modules.items():
        package, *inside = path.split("/")
        rooms = ROOMS_INSIDE.get(package)
        if rooms is None or len(inside) == 1:
            continue
        assert inside[0] in rooms, f"{path}: say in ROOMS_INSIDE what {inside[0]!r} may use"
        for name in imports(tree):
            parts = name.split(".")
            is_inside = parts[:2] == ["bigsci_launch", package] and len(parts) > 2 and parts[2] in rooms
            if is_inside and parts[2] not in {inside[0]} | rooms[inside[0]]:
                wrong.add(f"{path}: {package}/{inside[0]} may not use {package}/{parts[2]}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_permissions_hold_no_circle() -> None:
    for edges in (MAY_USE, *ROOMS_INSIDE.values()):
        for room in edges:
            assert room not in _reachable(edges, room), f"{room} may reach itself"


def test_pure_rooms_touch_nothing(modules: Parsed) -> None:
    found = {path for path in modules if path.startswith(PURE)}
    assert all(any(path.startswith(pure) for path in found) for pure in PURE), "a pure room has moved"
    wrong = []
    for path in sorted(found):
        wrong += [f"{path}: imports {name}" for name in imports(modules[path]) if name.split(".")[0] in IMPURE_MODULES]
        for node in nodes(modules[path]):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                wrong += [f"{path}:{node.lineno}: calls {called}"] if called in IMPURE_CALLS else []
    assert not wrong, "\n".join(wrong)


def test_a_room_holds_at_most_twelve_modules(modules: Parsed) -> None:
    rooms = Counter(str(PurePosixPath(path).parent) for path in modules if not path.endswith("__init__.py"))
    for room, number in rooms.items():
        if room != ".":
            assert number <= CROWDED.get(room, MOST_MODULES), f"{room} holds {number} modules: open a room inside it"
    shrunk = {room: rooms[room] for room in CROWDED if rooms[room] < CROWDED[room]}
    assert not shrunk, f"lower the numbers in CROWDED: {shrunk}"


def test_contributing_names_every_room(modules: Parsed) -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = {word for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for word in re.findall(r"`([^`]+)`", row)}
    folders = {str(PurePosixPath(path).parent) for path in modules} - {"."}
    rooms = folders | {path.removesuffix(".py") for path in modules if "/" not in path and not path.startswith("__")}
    assert not rooms - named, f"CONTRIBUTING.md does not say what is in {sorted(rooms - named)}"
    gone = {name for name in named if name.partition("/")[0] in rooms} - rooms
    assert not gone, f"CONTRIBUTING.md names rooms that are gone: {sorted(gone)}"


def _room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(edges[start])
    while todo:
        room = todo.pop()
        if room not in seen:
            seen.add(room)
            todo += edges.get(room, set())
    return seen
