"""The floor plan: which room may import which, which rooms are pure, which have a way in, and what is drawn of it."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

from .conftest import PACKAGE, Parsed, imports, nodes

GROUND = {
    "adam_limits",
    "content",
    "awake_clock",
    "door",
    "endings",
    "entries",
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
    "step_lines",
    "styled_lines",
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
    "checkpoints": {"config", "runs", "weights"},
    "status": {"checkpoints", "runs", "scheduler"},
    "why": {"runs", "scheduler"},
    "minicluster": {"scheduler"},
    "plan": {"charts", "checkpoints", "config", "pages", "runs", "scheduler"},
    "spy": {"config", "pages", "runs", "scheduler"},
    "trace": {"runs", "spy"},
    "slow": {"runs", "spy", "trace"},
    "watch": {"charts", "checkpoints", "config", "nodes", "pages", "runs", "scheduler", "slow", "spy", "status"},
    "nodes": {"runs", "scheduler"},
    "launch": {"checkpoints", "config", "data", "nodes", "plan", "runs", "scheduler", "status"},
    "rehearse": {"checkpoints", "config", "launch", "runs", "scheduler"},
    "recover": {"config", "nodes", "runs", "scheduler"},
    "train": {"checkpoints", "config", "data", "launch", "plan", "recover", "runs", "weights"},
    "hang_lab": {"config", "launch", "runs", "scheduler", "spy"},
    "demo": {"runs"},
    "export": {"checkpoints", "config", "runs", "scheduler", "status", "watch"},
    "top": {"runs", "scheduler", "watch"},
    "agents": {"launch", "runs", "status"},
    "cli": {
        *("agents", "checkpoints", "config", "data", "demo", "export", "hang_lab", "launch", "minicluster", "nodes"),
        *("pages", "plan", "rehearse", "runs", "scheduler", "slow", "spy", "status", "top", "trace"),
        *("watch", "weights", "why"),
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
        "ending": {"generations", "watching"},
        "chain": {"watching"},
        "control": {"watching"},
        "generations": set(),
        "watching": set(),
    },
    "watch": {
        "judge": set(),
        "read": {"judge"},
        "act": set(),
        "facts": {"judge"},
        "notify": set(),
        "rounds": {"act", "facts", "judge", "notify", "read"},
        "show": {"facts", "judge", "read", "rounds"},
    },
    "plan": {
        "shape": set(),
        "price": {"shape"},
        "calibrate": {"shape", "price"},
        "choose": {"shape", "price"},
        "survive": {"shape", "price", "choose"},
        "show": {"shape", "price", "choose", "survive"},
    },
    "launch": {"job": set()},
    "export": {"trackers": set()},
    "train": {
        "device": set(),
        "samples": set(),
        "rank": {"device"},
        "parallel": {"device", "rank"},
        "steps": {"device", "parallel", "rank", "samples"},
        "guards": {"device", "parallel", "rank", "samples", "steps"},
        "attach": {"device", "guards", "rank"},
        "survivor": {"device", "rank", "survive"},
        "state": {"device", "guards", "parallel", "rank", "samples", "steps"},
        "microbatch": {"device", "guards", "parallel", "rank", "steps"},
        "survive": {"device", "guards", "parallel", "rank", "state", "steps"},
        "uneven": {"device", "guards", "parallel", "rank", "state", "steps", "survive"},
        "fault_injection": {"parallel", "rank", "steps"},
        "companions": {"guards", "microbatch", "fault_injection", "state", "steps", "uneven"},
        "startup": {"device", "rank"},
        "loop": {"companions", "device", "parallel", "rank", "samples", "startup", "state", "steps", "uneven"},
        "lives": {"loop", "rank", "startup", "survive", "uneven"},
    },
}
"""The judge never touches a machine; calibrating and choosing never see each other."""

WAYS_IN: dict[str, set[str]] = {
    "recover": {"holding"},
    "rehearse": {"arrange", "report", "run"},
    "slow": {"answer", "picture", "straggler", "words"},
    "spy": {"answer", "taxonomy"},
    "spy/inputs": {"gather"},
    "spy/known": {"library"},
    "train/fault_injection": {"faults"},
    "train/microbatch": {"automatic"},
    "train/samples": {"batches"},
    "train/state": {"checkpoint", "durable", "reshard", "saves"},
    "watch": {"watched"},
    "watch/read": {"sources"},
    "watch/rounds": {"loop", "until_over"},
    "weights": {"answer"},
    "weights/explain": {"audit", "explain", "seam"},
    "weights/locate": {"choice", "locate", "parts"},
}
"""The modules of a room that others may import. A room of values, such as `runs`, is open and is not named here."""

PURE = (
    *("spy/judge/", "watch/judge/", "plan/shape/", "launch/job/request.py", "config/check.py", "config/rules/"),
    *("recover/members.py", "recover/state_machine.py", "recover/holding.py"),
    *("rehearse/reduce.py", "rehearse/judge.py", "rehearse/phases.py", "rehearse/limits.py"),
)
IMPURE_MODULES = {"os", "subprocess", "socket", "time", "threading", "shutil", "tempfile", "random", "signal"}
IMPURE_CALLS = {"open", "print", "input", "read_text", "write_text", "read_bytes", "write_bytes", "is_file", "is_dir"}


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
        here = inside[0].removesuffix(".py") if inside else ""
        if rooms is None or (len(inside) == 1 and here not in rooms):
            continue
        assert here in rooms, f"{path}: say in ROOMS_INSIDE what {here!r} may use"
        for name in imports(tree):
            parts = name.split(".")
            is_inside = parts[:2] == ["bigsci_launch", package] and len(parts) > 2 and parts[2] in rooms
            if is_inside and parts[2] not in {here} | rooms[here]:
                wrong.add(f"{path}: {package}/{here} may not use {package}/{parts[2]}")
    assert not wrong, "\n".join(sorted(wrong))


def test_faults_on_purpose_have_one_door(modules: Parsed) -> None:
    """The trainer imports them only if the run file asks for them, in one function."""
    room = "bigsci_launch.train.fault_injection"
    doors = {path for path, tree in modules.items() if any(name.startswith(room) for name in imports(tree))}
    assert {path for path in doors if not path.startswith("train/fault_injection/")} == {"train/companions.py"}
    at_the_top = ast.Module([each for each in modules["train/companions.py"].body if hasattr(each, "names")], [])
    assert not [name for name in imports(at_the_top) if name.startswith(room)]


def test_the_permissions_hold_no_circle() -> None:
    for edges in (MAY_USE, *ROOMS_INSIDE.values()):
        for room in edges:
            assert room not in _reachable(edges, room), f"{room} may reach itself"


def test_modules_import_each_other_in_no_circle(modules: Parsed) -> None:
    """Imports inside functions and for types count too: where two modules need each other, a third is missing."""
    names = {path: ".".join(("bigsci_launch", *PurePosixPath(path).with_suffix("").parts)) for path in modules}
    known = set(names.values())
    edges = {names[path]: known.intersection(imports(tree)) - {names[path]} for path, tree in modules.items()}
    circles = [f"{name} reaches itself" for name in sorted(edges) if name in _reachable(edges, name)]
    assert not circles, "\n".join(circles)


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


def test_a_room_has_one_sentence(modules: Parsed) -> None:
    """What it holds, in one line of its `__init__`: a room that needs more is two rooms."""
    for path, tree in modules.items():
        if path.endswith("/__init__.py"):
            text = ast.get_docstring(tree) or ""
            assert text.endswith(".") and "\n" not in text, f"{path}: say in one line what the room holds"


def test_a_room_is_entered_by_its_ways_in(modules: Parsed) -> None:
    """What is behind them may change without a look at the rest of the package."""
    entered: dict[str, set[str]] = {room: set() for room in WAYS_IN}
    for path, tree in modules.items():
        for name in imports(tree):
            inner = PurePosixPath(name.removeprefix("bigsci_launch.").replace(".", "/"))
            room = str(inner.parent)
            if room in WAYS_IN and f"{inner}.py" in modules and not path.startswith(f"{room}/"):
                entered[room].add(inner.name)
    assert entered == WAYS_IN


def test_contributing_draws_every_room_above_those_that_it_uses(modules: Parsed) -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    picture = text.partition("### The rooms of the package")[2].split("```")[1]
    floors = [set(re.findall(r"[a-z_]+", line)) for line in picture.splitlines() if line.strip()]
    rooms = [room for floor in floors for room in floor]
    assert sorted(rooms) == sorted(MAY_USE.keys() | GROUND), "the picture draws each room once"
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    for room, used in MAY_USE.items():
        below = {each for each in used if floor_of[each] > floor_of[room]}
        assert used == below, f"{room} uses {sorted(used - below)}: draw it higher"


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
