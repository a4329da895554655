"""Builds the program of a job script as one file: the modules of the package that it needs, and nothing else.

It holds the bytecode for the Python that builds it, which is the one that runs it: to compile the modules at each start
would take longer than the work. Another version of Python takes the sources, which are in it too.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import marshal
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from bigsci_launch.content import PLACE
from bigsci_launch.endings.words import read_words
from bigsci_launch.entries import entry_files

NAME = "bsl-job.pyz"
ENTRY = "bigsci_launch.launch.job.program"
CONTENT = ("endings", "step_lines")
"""The folders of entries that it reads, with those of the user who submits."""
_MAIN = f"import sys\n\nfrom {ENTRY} import main\n\nsys.exit(main(sys.argv[1:]))\n"
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_UNCHECKED = (1).to_bytes(4, "little")
"""Marks bytecode that Python takes without a look at its source."""


def job_program() -> bytes:
    """Return the contents of `bsl-job.pyz`.

    Raises:
        ConfigError: a word of the user's own table is wrong, which must not come out when the job ends.
    """
    read_words()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, source in {"__main__.py": _MAIN, **modules_of(ENTRY)}.items():
            archive.writestr(zipfile.ZipInfo(name, _NO_DATE), source, zipfile.ZIP_DEFLATED)
            archive.writestr(zipfile.ZipInfo(f"{name}c", _NO_DATE), _bytecode(name, source))
        for folder in CONTENT:
            for number, (name, text) in enumerate(entry_files(folder)):
                path = "/".join(("bigsci_launch", *PLACE, folder, f"{number:03d}-{Path(name).name}"))
                archive.writestr(zipfile.ZipInfo(path, _NO_DATE), text, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def modules_of(entry: str) -> dict[str, str]:
    """Return a module, all modules of the package that it imports, and the packages that they are in: source by path,
    such as `bigsci_launch/errors.py`."""
    found: dict[str, str] = {}
    names = [entry]
    while names:
        parts = names.pop().split(".")
        for name in (parts[:number] for number in range(1, len(parts) + 1)):
            path = _path_of(name)
            if path is not None and path not in found:
                found[path] = (_ROOT / path).read_text(encoding="utf-8")
                names += _imports(found[path])
    return dict(sorted(found.items()))


_ROOT = Path(str(files("bigsci_launch"))).parent


def _path_of(name: list[str]) -> str | None:
    """Return the file of a module; None for what is no module of the package, as a function in one."""
    found = (_ROOT.joinpath(*name, "__init__.py"), _ROOT.joinpath(*name).with_suffix(".py"))
    is_ours = name[0] == "bigsci_launch"
    return next((path.relative_to(_ROOT).as_posix() for path in found if is_ours and path.is_file()), None)


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _bytecode(name: str, source: str) -> bytes:
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)  # no docstrings: it is read at each start
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source.encode()) + marshal.dumps(code)
