"""The laws of the house: which module may do what, and how long a file may get. Imports are in test_rooms.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PACKAGE, imports, nodes, parsed

ROOT = PACKAGE.parent
LONGEST_CALLBACK = 25
COMMAND = re.compile(r"\w+\.(command|group)\b")
SLURM_COMMANDS = {"sbatch", "srun", "squeue", "sacct", "scancel", "scontrol", "sinfo"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def top_level_imports(tree: ast.Module) -> set[str]:
    statements = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {name.split(".")[0] for statement in statements for name in imports(statement)}


def test_only_the_trainer_imports_torch_and_deepspeed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in parsed()
        for name in imports(tree)
        if name.split(".")[0] in ("torch", "deepspeed") and room(path) != "train"
    ]
    assert not wrong, wrong


def test_only_the_command_line_knows_click_and_only_one_place_of_it_knows_rich_or_textual() -> None:
    for path, tree in parsed():
        roots = {name.split(".")[0] for name in imports(tree)}
        assert "click" not in roots or room(path) == "cli", path
        assert "rich" not in roots or path == PACKAGE / "cli" / "console.py", path
        assert "textual" not in roots or path.parent == PACKAGE / "cli" / "screens", path


def test_only_their_own_modules_know_the_packages_of_trackers() -> None:
    for path, tree in parsed():
        roots = {name.split(".")[0] for name in imports(tree)}
        assert not roots & {"tensorboard", "trackio", "wandb", "mlflow"} or path.parent.name == "trackers", path


def test_only_programs_print_and_exit() -> None:
    """Below `cli` functions return or raise; ranks, the converter and the local launcher are programs."""
    programs = ("train/", "scheduler/local.py", "recover/controller.py")
    wrong = []
    for path, tree in parsed():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(("cli/", "__main__", *programs)):
            continue
        calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
        said = {"print", "sys.exit", "os._exit", "exit", "SystemExit", "sys.stdout.write", "sys.stderr.write"}
        wrong += [f"{name}:{call.lineno}: {ast.unparse(call.func)}" for call in calls if ast.unparse(call.func) in said]
    assert not wrong, wrong


def test_command_files_import_features_inside_their_callbacks() -> None:
    heavy = {"torch", "deepspeed", "pydantic", "rich", "yaml", "jinja2", "numpy", "textual"}
    for path in (PACKAGE / "cli").glob("*.py"):
        tree = ast.parse(path.read_text())
        assert not top_level_imports(tree) & heavy, path
        for statement in tree.body:
            for name in imports(statement) if isinstance(statement, (ast.Import, ast.ImportFrom)) else ():
                parts = name.split(".")
                allowed = {"cli", "errors", "printable", "progress", "topology", "units", "__version__"}
                assert parts[0] != "bigsci_launch" or len(parts) == 1 or parts[1] in allowed, f"{path}: {name}"


def test_callbacks_of_commands_are_thin() -> None:
    """What decides is a feature's: a callback checks its options, asks one question, and shows the answer."""
    wrong = []
    for path, tree in parsed():
        for node in nodes(tree) if room(path) == "cli" else ():
            if isinstance(node, ast.FunctionDef) and any(COMMAND.search(ast.unparse(d)) for d in node.decorator_list):
                body = node.body[ast.get_docstring(node) is not None :]
                num_lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                wrong += [f"{path.relative_to(ROOT)}: {node.name}: {num_lines} lines"] * (num_lines > LONGEST_CALLBACK)
    assert not wrong, wrong


def test_one_module_starts_slurm_commands() -> None:
    """A list or tuple that begins with the name of a Slurm command is an argv; only scheduler/ builds those."""
    for path, tree in parsed():
        if room(path) == "scheduler":
            continue
        for node in nodes(tree):
            first = node.elts[0] if isinstance(node, (ast.List, ast.Tuple)) and node.elts else None
            is_argv = isinstance(node, ast.List) and isinstance(first, ast.Constant) and first.value in SLURM_COMMANDS
            assert not is_argv, f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
    in_scheduler = {
        path.name for path, tree in parsed() if room(path) == "scheduler" and "subprocess" in top_level_imports(tree)
    }
    assert in_scheduler <= {"command.py", "local.py"}


def test_one_module_knows_the_paths_of_a_run() -> None:
    names = {"run.json", "job.json", "exit.json", "attempts", "pids", "exits", "latest"}
    for path, tree in parsed():
        if path == PACKAGE / "runs" / "layout.py":
            continue
        for node in nodes(tree):
            joins = (
                isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant)
            )
            assert not (joins and node.right.value in names), f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def test_one_module_knows_the_names_that_one_room_writes_and_another_finds() -> None:
    """Names and patterns of checkpoints, dumps, digests and files that exist once per rank."""
    shared = re.compile(r"global_step(?!s)|step-|rank-|.*digests\\?\.json")
    for path, tree in parsed():
        if path != PACKAGE / "file_names.py":
            found = [text for text in texts(tree) if shared.match(text)]
            assert not found, f"{path.relative_to(ROOT)}: {found}"


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in a module's code, including f-strings but not docstrings."""
    spoken = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken:
            yield node.value


def test_one_module_knows_where_content_is() -> None:
    for path, tree in parsed():
        constants = {node.value for node in nodes(tree) if isinstance(node, ast.Constant)}
        assert path == PACKAGE / "content.py" or not constants & {"assets", "BSL_PATH"}, path


def test_only_what_is_installed_is_run() -> None:
    """`python -m` takes a module of that name from the current directory, unless it is told not to."""
    for path, tree in parsed():
        for node in nodes(tree):
            words = [each.value for each in getattr(node, "elts", ()) if isinstance(each, ast.Constant)]
            assert "-m" not in words, f"{path.relative_to(ROOT)}:{node.lineno}: see content.module_argv"
    for template in (ROOT / "slurm" / "templates").glob("*.j2"):
        assert not re.search(r"-m bigsci_launch", template.read_text()), template


def test_axes_are_data() -> None:
    """Only rooms that support just three axes may list them, because a loop over literal axes misses a new one."""
    names, allowed = {"tp", "cp", "ep", "dp", "pp"}, ("topology", "train", "config/check.py")
    for path, tree in parsed():
        here = path.relative_to(PACKAGE).as_posix()
        for node in nodes(tree):
            listed = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else ()
            values = {each.value for each in listed if isinstance(each, ast.Constant)}
            is_list_of_axes = len(values) > 2 and len(values) == len(listed) and values <= names
            assert not is_list_of_axes or here.startswith(allowed), f"{here}: {sorted(map(str, values))}"


def test_content_folders_are_never_imported() -> None:
    for path, tree in parsed():
        roots = {name.split(".")[0] for name in imports(tree)}
        assert not roots & {"slurm", "diagnostics", "configs"}, path


def test_no_file_is_too_long_and_none_is_a_drawer_of_odds() -> None:
    for folder in ("bigsci_launch", "diagnostics", "slurm", "tests", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
            assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py"), path


def test_every_function_of_the_package_is_annotated() -> None:
    for path, tree in parsed():
        for node in nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.returns is not None, f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"


UNSAFE_FILES = {
    (
        "weights/files/json_text.py",
        "json.loads",
    ): "its reader has narrower bounds, and refuses a key that is there twice",
}
"""Calls outside of safe_files.py that are right all the same, and why."""
GUESSED = re.compile(r"[.~]\{os\.getpid\(\)|getpid\(\)\}\.(part|tmp)")


@pytest.mark.slow
def test_one_module_writes_files_that_others_may_touch_and_reads_their_json() -> None:
    """No other follows a link that a colleague left, sets a mode by path, guesses a name, or trips over deep JSON."""
    found = {
        (name, what): f"{name}:{line}: {what}"
        for name, tree in files_of_runs()
        for line, what in unsafe_calls(tree)
        if name != "safe_files.py"
    }
    wrong = sorted(text for key, text in found.items() if key not in UNSAFE_FILES)
    assert not wrong, "use safe_files.write_file, write_in, read_json, parse_json:\n" + "\n".join(wrong)
    assert not UNSAFE_FILES.keys() - found.keys(), "strike those that are gone"


def files_of_runs() -> Iterator[tuple[str, ast.Module]]:
    """Yield the package and the programs that run next to the ranks, without reproductions of hangs."""
    for path, tree in parsed():
        yield path.relative_to(PACKAGE).as_posix(), tree
    for path in sorted((ROOT / "diagnostics").rglob("*.py")):
        name = path.relative_to(ROOT / "diagnostics").as_posix()
        if not name.startswith(("lab/", "known/")):
            yield name, ast.parse(path.read_text())


def unsafe_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("write_text", "chmod"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            yield node.lineno, "from json import"
        elif isinstance(node, ast.JoinedStr) and GUESSED.search(ast.unparse(node)):
            yield node.lineno, "a temporary name that can be guessed"


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text(text)", "path.chmod(0o644)", "os.chmod(path, 0o644)", "json.loads(line)", "json.load(stream)",
        "from json import loads", "part = f'.{name}.{os.getpid()}'", "part = f'{name}.{os.getpid()}.part'",
    ],
)  # fmt: skip
def test_unsafe_calls_are_found(line: str) -> None:
    assert len(list(unsafe_calls(ast.parse(line)))) == 1


PLAIN_READS = {
    "a file of the package": (
        *("gpus.py", "launch/freeze.py", "minicluster/settings.py", "spy/look/collect.py", "spy/show/page.py"),
        *("weights/show/page.py", "calls_build.py", "launch/job/frozen.py", "entries.py"),
        "agents/skill.py",
    ),
    "a file of the kernel": (
        *("hang_lab/needs.py", "hang_lab/processes.py", "minicluster/daemons.py", "procfs.py", "scheduler/local.py"),
        *("free_port.py", "launch/job/free_port.py"),
        *("node_environment.py", "node_injection.py", "node_kernel.py", "node_processes.py"),
        *("rank_again.py", "rank_process.py", "rank_program.py", "rank_rings.py", "rank_stacks.py", "ring_hook.py"),
        "ring_phases.py",
        "ring_site/sitecustomize.py",
    ),
    "/etc/hosts": ("minicluster/startup.py",),
    "/dev/null, when the output is closed": ("cli/console.py",),
    "a pipe that the shell has opened for this command": ("typed_path.py",),
    "its own file, a moment after it was written": ("train/fault_injection/defects.py",),
    "an address": ("watch/notify/ways.py",),
}
"""Why a module may open something to read it without `safe_files`, which never waits for the writer of a pipe."""


def test_whoever_reads_a_file_of_a_run_never_waits_for_a_pipe() -> None:
    found = {name: f"{name}:{line}" for name, tree in files_of_runs() for line in plain_reads(tree)}
    allowed = {name for names in PLAIN_READS.values() for name in names}
    wrong = sorted(place for name, place in found.items() if name not in allowed and name != "safe_files.py")
    assert not wrong, "use safe_files.open_stream, read_file, read_json, or typed_path.open_typed: " + ", ".join(wrong)
    assert not allowed - found.keys(), "strike those that are gone"


def plain_reads(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that open a file to be read, as Python does, which waits for the writer of a pipe."""
    for node in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        method = function.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        is_open = function == "open" or (method == "open" and function not in ("os.open", "self.open"))
        if method in ("read_text", "read_bytes") or (is_open and not writes(node, 1 if function == "open" else 0)):
            yield node.lineno


def writes(call: ast.Call, place: int) -> bool:
    """Whether a call of `open` with its mode at this place of its arguments only writes."""
    modes = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set("wax") & set(str(mode.value)) for mode in modes)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("path.open()", 1), ("path.open('rb')", 1), ("open(path)", 1), ("open(path, 'r+b')", 1),
        ("path.read_text()", 1), ("path.read_bytes()", 1), ("path.open(mode)", 1), ("io.open(path)", 1),
        ("path.open('ab')", 0), ("open(path, 'w')", 0), ("path.open(mode='x')", 0), ("read_text(path)", 0),
        ("os.open(path, flags)", 0), ("open_stream(path)", 0),
    ],
)  # fmt: skip
def test_plain_reads_are_found(line: str, number: int) -> None:
    assert len(list(plain_reads(ast.parse(line)))) == number
