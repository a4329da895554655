"""What frames of known libraries mean: which only pass calls on, which communicate, which wait and what for.

The knowledge is content: one file per library in `diagnostics/known`, and in folders `known` on `$BSL_PATH`. It is read
once, when this module is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bigsci_launch.content import content_folders, packaged
from bigsci_launch.errors import ConfigError
from bigsci_launch.spy.evidence.trusted import read_trusted
from bigsci_launch.spy.taxonomy import HangClass

if TYPE_CHECKING:
    from bigsci_launch.spy.evidence.code_schema import KernelKind, KnownCodeFile, PhaseEntry, ScopeEntry

ANY = "*"
"""Stands for every function of a file, and for every file."""
CACHED = 1 << 14
"""Answers that each question keeps: few frames, many ranks."""


@dataclass(frozen=True, slots=True)
class KnownWait:
    """A known place in which a process waits outside any communication, and what that means.

    `words` completes "rank 3 ...". `wchan` are prefixes of kernel functions, one of which must match.
    """

    hang_class: HangClass
    words: str
    function: str = ""
    file: str = ""
    wchan: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownCode:
    """The files in use, ordered by name; `problems` has a line for each file that cannot be used."""

    files: tuple[KnownCodeFile, ...]
    problems: tuple[str, ...] = ()

    def calls(self, key: str) -> CallTable:
        """Return the functions that all files list under `key`."""
        return CallTable.of(getattr(file, key) for file in self.files)

    def names(self, key: str) -> tuple[str, ...]:
        """Return the files and patterns that all files list under `key`."""
        return tuple(chain.from_iterable(getattr(file, key) for file in self.files))

    def kernel_functions(self, kind: KernelKind) -> tuple[str, ...]:
        """Return the beginnings of the kernel functions of this kind."""
        return tuple(chain.from_iterable(file.kernel_functions.get(kind, ()) for file in self.files))


@dataclass(frozen=True, slots=True)
class CallTable:
    """Functions of known files: for each name, the files that it is known in."""

    files: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, listed: Iterable[Mapping[str, tuple[str, ...]]]) -> CallTable:
        """Return the table of functions that are listed by file."""
        found: dict[str, list[str]] = {}
        for calls in listed:
            for file, functions in calls.items():
                for function in functions:
                    found.setdefault(function, []).append(file)
        return cls({function: tuple(files) for function, files in found.items()})

    def has(self, function: str, file: str) -> bool:
        """Whether the frame is one of these; `function` may be named with its class.

        A module that is being imported (`<module>`) is in none of its functions.
        """
        name = bare_name(function)
        anywhere = () if name == "<module>" else self.files.get(ANY, ())
        return any(is_file(file, known) for known in (*self.files.get(name, ()), *anywhere))


def read_known_code(own: Path | None = None) -> KnownCode:
    """Read every file on the search path; one on `$BSL_PATH` replaces a packaged one of the same name.

    An invalid file becomes a problem and is left out: it must not hide a verdict.
    """
    found: dict[str, KnownCodeFile | None] = {}
    own = own or packaged("diagnostics", "known")
    problems = [] if any(own.glob("*.yaml")) else [f"{own}: no file, so no frame of a library is known"]
    for folder in content_folders("known", own):
        for path in sorted(folder.glob("*.yaml")):
            if path.stem in found:
                continue
            try:
                found[path.stem] = _read_file(path, is_trusted=folder == packaged("diagnostics", "known"))
            except ConfigError as error:
                found[path.stem] = None
                problems.append("; ".join(str(problem) for problem in error.problems) or error.message)
    return KnownCode(tuple(file for _, file in sorted(found.items()) if file), tuple(problems))


def _read_file(path: Path, *, is_trusted: bool) -> KnownCodeFile:
    if is_trusted:
        return cast("KnownCodeFile", read_trusted(path))
    from bigsci_launch.config.problems import read_valid
    from bigsci_launch.spy.evidence.code_schema import KnownCodeFile

    return read_valid(KnownCodeFile, path)


def bare_name(function: str) -> str:
    """Return the name without its class: Python 3.11 and newer show `PipelineEngine.train_batch`."""
    return function.rpartition(".")[2]


def is_file(file: str, known: str) -> bool:
    """Whether `file` is the one that a file of known code names: a folder, a beginning, or the end of its path."""
    return _pattern(known).search(file) is not None


@lru_cache(maxsize=CACHED)
def _pattern(known: str) -> re.Pattern[str]:
    if known == ANY:
        return re.compile("")
    if known.startswith("<"):
        return re.compile("^" + re.escape(known))
    parts = "[^/]*".join(map(re.escape, known.split("*")))
    return re.compile(f"(?:^|/){parts}" + ("" if known.endswith("/") else "$"))


_CODE = read_known_code()
PROBLEMS = _CODE.problems
"""Lines on files of known code that cannot be used, and were left out."""

# ------------------------------------------------------------------------------------------- communication

_COMMUNICATIONS = {
    function: tuple(
        (entry.file, entry.operation or function)
        for file in _CODE.files
        for entry in file.communications
        if function in entry.functions
    )
    for function in {name for file in _CODE.files for entry in file.communications for name in entry.functions}
}


def _operations(kind: str) -> frozenset[str]:
    entries = [entry for file in _CODE.files for entry in file.communications if entry.kind == kind]
    return frozenset(entry.operation or function for entry in entries for function in entry.functions)


POINT_TO_POINT = _operations("point-to-point")
_SCOPES: tuple[ScopeEntry, ...] = tuple(entry for file in _CODE.files for entry in file.scopes)


@lru_cache(maxsize=CACHED)
def operation_of(function: str, file: str) -> str | None:
    """Return the communication that a frame is, or None. Set-up calls count: they wait for all ranks too."""
    known = _COMMUNICATIONS.get(bare_name(function), ())
    return next((operation for place, operation in known if is_file(file, place)), None)


_OF_GROUPS = tuple(file for file in _CODE.files if file.process_groups)
_MAY_USE_GROUPS = CallTable.of(file.may_communicate for file in _OF_GROUPS)
_USES_GROUPS = CallTable.of({entry.file: entry.functions} for file in _OF_GROUPS for entry in file.communications)


@lru_cache(maxsize=CACHED)
def uses_process_groups(function: str, file: str) -> bool:
    """Whether the frame communicates, or may communicate, and only over torch's process groups."""
    return _USES_GROUPS.has(function, file) or _MAY_USE_GROUPS.has(function, file)


@lru_cache(maxsize=CACHED)
def call_scope(function: str, file: str, operation: str) -> str | None:
    """Return the scope of `operation` when called from this frame, or None if it is not known."""
    names = {bare_name(function), ANY}
    for entry in _SCOPES:
        fits = entry.operation in (None, operation) and not names.isdisjoint(entry.functions)
        if fits and is_file(file, entry.file):
            return entry.scope
    return None


# ------------------------------------------------------------------------------------------- what a frame shows


def _table(key: str) -> Callable[[str, str], bool]:
    """Return the question whether a frame is listed under `key`."""
    return lru_cache(maxsize=CACHED)(_CODE.calls(key).has)


_is_idle, _may_communicate = _table("idle"), _table("may_communicate")
_is_shared_lock, _is_backward_engine = _table("shared_locks"), _table("backward_engines")
_is_server = _table("servers")
_is_norm, _is_at_store, _is_joining = _table("norms"), _table("store"), _table("joining")
_is_shutdown, _is_start_of_child = _table("shutdown"), _table("starts_of_children")
_is_meant_barrier = _table("meant_barriers")
_is_known_handler, _is_no_handler, _is_no_phase = (
    _table("signal_handlers"),
    _table("no_signal_handlers"),
    _table("no_phase"),
)
_HANDLER_NAMES = tuple(re.compile(pattern, re.IGNORECASE) for pattern in _CODE.names("signal_handler_names"))


def is_idle_call(function: str, file: str) -> bool:
    """Whether a thread whose innermost frame this is waits for another thread of its process, or for a task."""
    return _is_idle(function, file)


def is_shared_lock(function: str, file: str) -> bool:
    """Whether the call waits for a lock, a semaphore or an event that other processes share, other ranks among them."""
    return _is_shared_lock(function, file)


def may_communicate(function: str, file: str) -> bool:
    """Whether native or compiled code that this function calls may communicate without a Python frame of its own.

    Ask it of the innermost frame of a thread that is no wrapper; `ThreadStack.native_call` does.
    """
    return _may_communicate(function, file)


def is_backward_engine(function: str, file: str) -> bool:
    """Whether the function waits for a backward pass, which runs in threads of native code."""
    return _is_backward_engine(function, file)


def is_server(function: str, file: str) -> bool:
    """Whether the function waits for requests or tasks: nothing is wrong with a thread that stays in it."""
    return _is_server(function, file)


def is_norm(function: str, file: str) -> bool:
    """Whether the function communicates once for each parameter group of the optimizer."""
    return _is_norm(function, file)


def is_meant_barrier(function: str, file: str) -> bool:
    """Whether the barrier in this function is there so that one rank may work while all others wait."""
    return _is_meant_barrier(function, file)


def is_at_store(function: str, file: str) -> bool:
    """Whether a rank in this function is still connecting to the store; rank 0 waits there as its server."""
    return _is_at_store(function, file)


def is_joining_call(function: str, file: str) -> bool:
    """Whether ranks look for each other in this function, at the start."""
    return _is_joining(function, file)


def is_shutdown(function: str, file: str) -> bool:
    """Whether the interpreter waits in this function for its threads, before it exits."""
    return _is_shutdown(function, file)


def is_start_of_child(function: str, file: str) -> bool:
    """Whether this is the outermost own frame of a forked process: what is outside it belongs to the parent."""
    return _is_start_of_child(function, file)


@lru_cache(maxsize=CACHED)
def is_signal_handler(function: str, file: str = "") -> bool:
    """Whether the function is a known signal handler, or has a typical name of one."""
    name = bare_name(function)
    is_named_so = any(pattern.search(name) for pattern in _HANDLER_NAMES) and not _is_no_handler(function, file)
    return is_named_so or _is_known_handler(function, file)


# ------------------------------------------------------------------------------------------- phases

_PHASES: tuple[PhaseEntry, ...] = tuple(entry for file in _CODE.files for entry in file.phases)
_PHASES_BY_CALL = tuple((CallTable.of([entry.calls]), entry.hang_class) for entry in _PHASES if entry.calls)
_PHASES_BY_NAME = tuple((re.compile(entry.names, re.I), entry.hang_class) for entry in _PHASES if entry.names)


@lru_cache(maxsize=CACHED)
def phase_of(function: str, file: str) -> HangClass | None:
    """Return the class of the work that the function does, if others may be meant to wait for it, or None.

    Known functions come first, then typical names in users' own programs, in the order of the file.
    """
    if _is_no_phase(function, file):
        return None
    known = (hang_class for calls, hang_class in _PHASES_BY_CALL if calls.has(function, file))
    named = (hang_class for pattern, hang_class in _PHASES_BY_NAME if pattern.search(function))
    return next(chain(known, named), None)


# ------------------------------------------------------------------------------------------- files

_WRAPPERS = _CODE.names("wrappers")
_PLUMBING = _CODE.names("plumbing")


@lru_cache(maxsize=CACHED)
def is_wrapper_file(file: str) -> bool:
    """Whether the functions of the file only pass calls on."""
    return any(is_file(file, known) for known in _WRAPPERS)


@lru_cache(maxsize=CACHED)
def is_plumbing_file(file: str) -> bool:
    """Whether the file waits on behalf of its callers: queues, locks, connections."""
    return any(is_file(file, known) for known in _PLUMBING)


_PACKAGES = ("/site-packages/", "/dist-packages/", "/torch/")


def is_installed(file: str) -> bool:
    """Whether the file is a part of an installed package, or is no file: code that was compiled at run time."""
    return file.startswith("<") or any(part in file for part in _PACKAGES)


def _part(known: str) -> str:
    """Return `known` as a text that its paths end with or contain: a lone name must not be the end of another."""
    return known if "/" in known else f"/{known}"


_PYTHON_LIBRARIES = _CODE.names("python_libraries")
_LOCAL_LIBRARIES = (*_PYTHON_LIBRARIES, *_CODE.names("local_libraries"))


@lru_cache(maxsize=CACHED)
def is_python_library(file: str) -> bool:
    """Whether a native frame is in a compiled part of Python."""
    return any(is_file(file, known) for known in _PYTHON_LIBRARIES)


@lru_cache(maxsize=CACHED)
def is_local_library(file: str) -> bool:
    """Whether a native frame is in a library in which nothing waits for other ranks, Python itself included."""
    return any(is_file(file, known) for known in _LOCAL_LIBRARIES)


DATA_FETCHING_FILES = tuple(map(_part, _CODE.names("data_fetching_files")))
DATA_LOADER_FILES = tuple(map(_part, _CODE.names("data_loader_files")))
CHILD_FILES = (*DATA_LOADER_FILES, *map(_part, _CODE.names("child_files")))
"""A thread in one of these may wait for a process below its own."""

# ------------------------------------------------------------------------------------------- waits

KERNEL_WAITS = tuple(
    KnownWait(entry.hang_class, entry.words, wchan=entry.kernel) for file in _CODE.files for entry in file.kernel_waits
)
"""Waits that the kernel function alone identifies."""


def _known_waits() -> Iterable[KnownWait]:
    for entry in sorted((entry for file in _CODE.files for entry in file.waits), key=lambda entry: entry.order):
        if entry.kernel:
            yield KnownWait(entry.hang_class, entry.words, wchan=entry.kernel)
        for file, functions in entry.calls.items():
            for function in functions:
                yield KnownWait(entry.hang_class, entry.words, "" if function == ANY else function, _part(file))


KNOWN_WAITS = tuple(_known_waits())

MAP_LOCK_WAITS = _CODE.kernel_functions("map_lock")
"""Kernel functions in which a thread waits for the lock of its process's memory map."""
FAULT_WAITS = _CODE.kernel_functions("page_fault")
DAEMON_WAITS = _CODE.kernel_functions("daemon")
LOCK_WAITS = _CODE.kernel_functions("lock")
POLL_WAITS = _CODE.kernel_functions("poll")
SLEEP_WAITS = _CODE.kernel_functions("sleep")
