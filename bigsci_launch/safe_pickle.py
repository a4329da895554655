"""Reads pickles without running them. A pickle names functions, and the ordinary reader calls them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container, Mapping
from types import ModuleType
from typing import IO, Any, NoReturn


class ForbiddenPickle(Exception):
    """The pickle asks for something that its reader does not provide; the message names it."""


def refuse_name(module: str, name: str) -> NoReturn:
    """Refuse a function or class that a pickle names.

    Raises:
        ForbiddenPickle: always.
    """
    raise ForbiddenPickle(f"it is a pickle that would run {module}.{name}; only plain data is read")


def refuse_reference(reference: object) -> NoReturn:
    """Refuse an object that is stored outside the pickle.

    Raises:
        ForbiddenPickle: always.
    """
    raise ForbiddenPickle("it is a pickle that refers to objects outside itself; only plain data is read")


class SafeUnpickler(pickle.Unpickler):
    """Builds containers, text and numbers, and otherwise only what `find` and `load` return.

    `find(module, name)` returns the replacement for a function or class that the pickle names. The pickle chooses the
    arguments of its call, and may set attributes on it. `load(reference)` returns an object that is stored elsewhere.
    """

    def __init__(
        self,
        stream: IO[bytes],
        find: Callable[[str, str], Any] = refuse_name,
        load: Callable[[Any], Any] = refuse_reference,
    ) -> None:
        super().__init__(stream, encoding="utf-8")
        self._find, self._load = find, load

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self._load(pid)


def pickle_module(
    allowed: Container[str], look: Callable[[bytes], None], instead: Mapping[str, Callable[..., Any]]
) -> ModuleType:
    """Return what `torch.load` takes as `pickle_module`, with an unpickler that builds only `allowed` names.

    It calls a function of `instead` where the pickle names what it is the value for. It raises ForbiddenPickle for any
    other `MODULE.NAME`, and whatever `look` raises for the pickle: that is called before anything is built, with the
    very bytes that are then read.
    """

    class AllowedUnpickler(pickle.Unpickler):
        def __init__(self, stream: IO[bytes], **options: Any) -> None:
            content = stream.read()
            look(content)
            super().__init__(io.BytesIO(content), **options)

        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full in instead:
                return instead[full]
            return super().find_class(module, name) if full in allowed else refuse_name(module, name)

    found = ModuleType("allowed_pickles")
    found.Unpickler = AllowedUnpickler  # type: ignore[attr-defined]
    return found
