"""Builds `bsl.pyz`: the commands of a login node in one file, for Python 3.9 and newer, without compiled packages.

    python release/build_pyz.py OUTPUT

It holds the modules that `cli/single_file.py` needs, rewritten by `older_python.py`; click, PyYAML and rich as this
Python has them, rewritten too; py-spy for the architecture of this machine; and content. In the place of pydantic is
`pydantic_stand_in.py`: tests have checked the content.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from older_python import rewrite  # noqa: E402

ROOT = HERE.parent
PACKAGE = ROOT / "bigsci_launch"
START = "bigsci_launch.cli.single_file"
STUBS = {
    "bigsci_launch.config.load": (
        '"""Reading a run file needs the schema, which an installed bsl has."""\n'
        "from bigsci_launch.errors import ConfigError\n\n\n"
        "def load_resolved(path):\n"
        '    raise ConfigError(f"{path}: bsl.pyz reads no run files", hint="install bsl")\n'
    )
}
LIBRARIES = {"click": "click", "pyyaml": "yaml", "rich": "rich"}
CONTENT = ("diagnostics", "slurm/hardware")
LEFT_OUT = ("__pycache__", "recording", "lab")
EPOCH = (2020, 1, 1, 0, 0, 0)
"""The time of every file: the same sources give the same bytes."""


def main() -> None:
    output = Path(sys.argv[1])
    files = dict(sorted(all_files()))
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + data for name, data in files.items())).hexdigest()[:16]
    files["__main__.py"] = (HERE / "pyz_main.py").read_bytes().replace(b"@DIGEST@", digest.encode())
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as stream:
        stream.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in files.items():
                archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    output.chmod(0o755)
    print(f"wrote {output}: {len(files)} files, {output.stat().st_size / 1e6:.1f} MB")


def all_files() -> Iterator[tuple[str, bytes]]:
    yield "pydantic/__init__.py", (HERE / "pydantic_stand_in.py").read_bytes()
    for name, source in needed_modules().items():
        path = module_path(name).relative_to(ROOT).as_posix()
        yield path, rewrite(source, path).encode()
    for folder in CONTENT:
        for file in files_below(ROOT / folder):
            yield f"bigsci_launch/assets/{file.relative_to(ROOT).as_posix()}", file.read_bytes()
    for name, package in LIBRARIES.items():
        yield from library_files(name, package)
    yield "bin/py-spy", Path(shutil.which("py-spy", path=sysconfig.get_path("scripts")) or "py-spy").read_bytes()
    yield from licences("py-spy")


def files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part in LEFT_OUT or part.startswith(".") for part in parts):
            yield path


def library_files(name: str, package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the Python files of a library: compiled parts are left out, and none of these needs its own."""
    folder = Path(str(distribution(name).locate_file(package)))
    for path in files_below(folder):
        if path.suffix == ".py":
            shown = f"{package}/{path.relative_to(folder).as_posix()}"
            yield shown, rewrite(path.read_text(encoding="utf-8"), shown).encode()
    yield from licences(name)


def licences(name: str) -> Iterator[tuple[str, bytes]]:
    for file in distribution(name).files or ():
        if any(word in file.name.upper() for word in ("LICENSE", "LICENCE", "COPYING")):
            yield f"licences/{name}/{file.name}", file.read_binary()


def needed_modules() -> dict[str, str]:
    """Return the source of each module that START reaches by its imports, those inside functions included."""
    found: dict[str, str] = {}
    waiting = [START]
    while waiting:
        name = waiting.pop()
        if name in found or not name.startswith("bigsci_launch") or not module_path(name).is_file():
            continue
        found[name] = STUBS.get(name) or module_path(name).read_text(encoding="utf-8")
        waiting += [name.rpartition(".")[0], *imported(found[name])]
    return found


def module_path(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(source: str) -> Iterator[str]:
    """Yield what a module imports, and texts that name a module; what only type checkers import is not needed."""
    for_types: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types.update(map(id, ast.walk(node)))
        elif id(node) in for_types:
            continue
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{each.name}" for each in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if node.value.isascii() and "\0" not in node.value[:80] else ""


if __name__ == "__main__":
    main()
