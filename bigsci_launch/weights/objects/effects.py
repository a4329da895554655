"""What the operations of a pickle do to the objects that it describes. Nothing that it names is called."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from bigsci_launch.weights.objects.nodes import (
    BadPickle,
    Dictionary,
    DressedTensor,
    Elements,
    Instance,
    Named,
    OddKey,
    StorageNode,
    TensorNode,
)

POINTER = 8
# Characters of the name of a class, and states that are set on one object.
MAX_NAME = 1000
MAX_STATES = 1000
# Calls with more arguments make nothing that is known.
MAX_ARGUMENTS = 64
MAX_KEY_PARTS = 64
# Larger numbers can be chosen so that all have one hash.
MAX_KEY = 1 << 60
# Tuples, too, can be chosen so that all have one hash: a dictionary has at most so many as keys.
MAX_TUPLE_KEYS = 1000
GETATTR = Named("builtins", "getattr")


def as_named(module: str, name: str) -> Named:
    """Return what a pickle names, by the name that newer versions of Python and numpy give it.

    Protocols 0 to 2, torch's own among them, use the names of Python 2.
    """
    if max(len(module), len(name)) > MAX_NAME:
        raise BadPickle(f"its pickle names a class by more than {MAX_NAME:,} characters")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    head, _, rest = module.partition(".")
    if head == "numpy" and (rest == "core" or rest.startswith("core.")):
        module = f"numpy._core{rest.removeprefix('core')}"
    if module == "pathlib._local":
        module = "pathlib"
    return Named(module, name)


def extend(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, list):
        owner.extend(values)
    elif isinstance(owner, (Instance, Elements)):
        owner.elements.extend(values)
    else:
        raise BadPickle(f"its pickle appends to a {type(owner).__name__}")


def set_items(owner: Any, values: list[Any]) -> None:
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(owner, dict):
        for key, value in pairs:
            is_plain = is_plain_key(key) and (type(key) is not tuple or len(owner) < MAX_TUPLE_KEYS)
            owner[key if is_plain else OddKey(key)] = value
    elif isinstance(owner, Instance):
        owner.items.extend(pairs)
    else:
        raise BadPickle(f"its pickle sets items of a {type(owner).__name__}")


def is_plain_key(key: Any) -> bool:
    """Whether a key is a plain value or a small tuple of them, so that hashing it takes no time."""
    if type(key) is int:
        return abs(key) < MAX_KEY
    if type(key) is not tuple:
        return isinstance(key, (str, bytes, bool, float, Named, Instance, StorageNode, type(None)))
    waiting, parts = [key], 0
    while waiting:
        parts += 1
        part = waiting.pop()
        if parts > MAX_KEY_PARTS:
            return False
        if type(part) is tuple:
            waiting.extend(part[: MAX_KEY_PARTS + 1])
        elif not is_plain_key(part):
            return False
    return True


def with_state(owner: Any, state: Any) -> Any:
    """Return an object after its `__setstate__`.

    Raises:
        BadPickle: it is a function or class itself, which would stay changed in the process that loads the file.
    """
    if isinstance(owner, Named):
        raise BadPickle(f"its pickle sets attributes of {owner} itself")
    if isinstance(owner, Instance):
        owner.states.append(state)
    elif isinstance(owner, Dictionary):
        if len(owner.states) >= MAX_STATES:
            raise BadPickle("its pickle sets the attributes of one object too often")
        owner.states = (*owner.states, state)
    elif isinstance(owner, DressedTensor):
        owner.extras[f"state {len(owner.extras)}"] = state
    elif isinstance(owner, TensorNode):
        return DressedTensor(owner, {"state": state})
    else:
        return Instance(Named("", "an object with attributes"), (owner,), states=[state])
    return owner


def _bytearray(args: tuple[Any, ...]) -> Any:
    """Return the description of a bytearray, which each protocol makes by another call; None for unknown arguments."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        args = (args[0].encode("latin-1"),)
    if len(args) > 1 or not isinstance(args[0] if args else b"", bytes):
        return None
    return Instance(Named("builtins", "bytearray"), args or (b"",))


def copied(value: Any, depth: int) -> int:
    """Return how many bytes a call may copy for one of its arguments, or for all of them."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (dict, Instance)):
        return POINTER * len(value.kwargs if isinstance(value, Instance) else value)
    if not isinstance(value, (list, tuple)):
        return 0
    inside = sum(copied(item, depth + 1) for item in value) if depth < 2 and len(value) <= MAX_ARGUMENTS else 0
    return POINTER * len(value) + inside


def _attribute(owner: Any, rest: tuple[Any, ...]) -> Named | None:
    """Return the attribute of a class by its dotted name; None for unknown arguments.

    Python 3.11.2 pickles the members of an enumeration so.
    """
    is_name = len(rest) == 1 and isinstance(rest[0], str) and len(rest[0]) <= MAX_NAME
    return as_named(owner.module, f"{owner.name}.{rest[0]}") if is_name and isinstance(owner, Named) else None


def make_builtin(named: Named, args: tuple[Any, ...]) -> Any:
    """Return what a call of a built-in container makes; None for any other call."""
    module = named.module
    first = args[0] if args else ()
    if (module, named.name) == ("copyreg", "_reconstructor") and len(args) == 3 and isinstance(first, Named):
        return Instance(first, () if args[2] is None else args[2:])
    if (module, named.name) == ("_codecs", "encode") and len(args) == 2 and args[1] in ("latin1", "latin-1"):
        return first.encode("latin-1") if isinstance(first, str) else None
    if (module, named.name) == ("builtins", "bytes") and not args:
        return b""
    if (module, named.name) == ("builtins", "bytearray"):
        return _bytearray(args)
    if named == GETATTR:
        return _attribute(first, args[1:])
    if len(args) > 1 or not isinstance(first, (list, tuple)):
        return None
    if module == "builtins" and named.name in ("set", "frozenset"):
        return Elements(list(first))
    if module == "builtins" and named.name in ("list", "tuple"):
        return list(first) if named.name == "list" else tuple(first)
    if (module, named.name) == ("torch", "Size"):
        return tuple(first)
    if (module, named.name) in (("collections", "OrderedDict"), ("builtins", "dict")):
        made = Dictionary()
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in first):
            return None
        set_items(made, [part for pair in first for part in pair])
        return made
    return None
