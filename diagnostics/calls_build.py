"""Compiles calls_native.c for this Python and loads it. Standard library, Python 3.8 or newer.

The result is kept in the user's cache, named after the source and the Python, so one job compiles it once; a wheel may
have it next to the source. Where there is no compiler, or no headers of Python, the trace is written by Python code.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from types import ModuleType

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls_native.c")
MODULE = "calls_native"


def load_native(spare_folder: str) -> ModuleType:
    """Return the compiled module. `spare_folder` is used if the cache cannot be written.

    Raises:
        OSError, RuntimeError, ImportError: there is none for this Python, in words.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    if sys.implementation.name != "cpython":
        raise RuntimeError(f"this Python is {sys.implementation.name}")
    packed = os.path.join(os.path.dirname(SOURCE), _file_name())
    if os.path.exists(packed):
        return _load(packed)
    errors = []
    for folder in (_cache(), spare_folder):
        try:
            os.makedirs(folder, exist_ok=True)
            file = os.path.join(folder, _file_name())
            if not os.path.exists(file):
                _compile(file)
            return _load(file)
        except (OSError, RuntimeError, ImportError) as error:
            errors.append(str(error))
    raise RuntimeError("; ".join(dict.fromkeys(errors)))


def _cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "bsl")


def _file_name() -> str:
    import hashlib
    import sysconfig

    with open(SOURCE, "rb") as stream:
        digest = hashlib.sha256(stream.read()).hexdigest()[:12]
    return f"{MODULE}-{digest}.{sysconfig.get_config_var('SOABI')}.so"


def _compile(file: str) -> None:
    """Compile next to `file`, then rename: several ranks may do this at the same time."""
    import shutil
    import sysconfig

    words = os.environ.get("CC") or next((each for each in ("cc", "gcc", "clang") if shutil.which(each)), "")
    if not words:
        raise RuntimeError("there is no C compiler")
    include = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise RuntimeError(f"{include} has no Python.h")
    part = f"{file}.{os.urandom(8).hex()}"
    argv = [*words.split(), "-O2", "-shared", "-fPIC", f"-I{include}", SOURCE, "-o", part]
    try:
        status = _spawn(argv)
        if not os.path.exists(part):
            raise RuntimeError(f"{words} failed with status {status}")
        os.replace(part, file)
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _spawn(argv: list[str]) -> int:
    """Run a program, and return its status. posix_spawn does not copy the process, which may be large and have memory
    registered with a network card."""
    null = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    # The compiler is no part of the program: what the program puts before its libraries is not for it.
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    pid = os.posix_spawnp(argv[0], argv, environment, file_actions=null)
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:  # the program waits for all its children, and was faster
        return 0


def _load(file: str) -> ModuleType:
    from importlib.machinery import ExtensionFileLoader, ModuleSpec
    from importlib.util import module_from_spec

    loader = ExtensionFileLoader(MODULE, file)
    spec = ModuleSpec(MODULE, loader, origin=file)
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module
