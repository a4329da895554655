"""Writes the calls of torch.distributed, of saving, loading and data into the ring. Imports no torch by itself.

The functions of modules that the program has loaded are replaced by wrappers that write a call before, and its end
after it. A call that the program makes through another name that it took before, or in C++ (DDP's reduction of
gradients, functional collectives), is not seen.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import wraps

import ring_hook
from ring_file import BLOCKING, NONE

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Wrapper = Callable[..., Any]

# Position of the arguments that matter: of the tensor and of the group; of the root; the name of the peer.
COLLECTIVES = {
    "all_reduce": (0, 2), "broadcast": (0, 2), "reduce": (0, 3), "all_gather": (1, 2), "all_gather_into_tensor": (1, 2),
    "gather": (0, 3), "scatter": (0, 3), "reduce_scatter": (0, 3), "reduce_scatter_tensor": (1, 3),
    "all_to_all": (1, 2), "all_to_all_single": (1, 4), "barrier": (None, 0), "monitored_barrier": (None, 0),
    "all_gather_coalesced": (1, 2), "all_reduce_coalesced": (0, 2),
}  # fmt: skip
ROOTS = {"broadcast": (1, "src"), "reduce": (1, "dst"), "gather": (2, "dst"), "scatter": (2, "src")}
MESSAGES = {"send": "dst", "recv": "src", "isend": "dst", "irecv": "src"}
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
STORE_WAITS = ("get", "wait", "barrier")
STORE_SETS = ("set", "add", "append", "compare_set", "multi_set")
MAX_KEYS = 1000
FURTHER_KEYS = "a further key"
"""Written for keys that are set after so many others: one that sets new ones in each step would fill the names."""
HERE = os.path.abspath(__file__)
MAX_OPEN = 4096

_groups: dict[int, list[Any]] = {}
_places: dict[tuple[Any, int], int] = {}
_tensors: dict[Any, int] = {}
_works: dict[int, tuple[Any, Any, int, tuple[int, ...]]] = {}
_keys: dict[str, int] = {}
_rings: list[Any] = [None]
_said: list[str] = []


def watch(module: Any) -> None:
    """Wrap what matters in a module that was just loaded."""
    name = module.__name__
    if name == "torch.distributed.distributed_c10d":
        watch_distributed(module)
    elif name == "torch.serialization":
        for each in ("save", "load"):
            wrap(module, each, plain(f"torch.{each}"))
    elif name == "torch.utils.data.dataloader":
        wrap(module._BaseDataLoaderIter, "__next__", plain("next batch"))
    elif name == "torch.optim.optimizer":
        watch_optimizers(module)


def watch_distributed(module: Any) -> None:
    for name, (tensor, group) in COLLECTIVES.items():
        wrap(module, name, collective(module, name, tensor, group))
    for name, peer in MESSAGES.items():
        wrap(module, name, message(module, name, peer))
    for name in OBJECTS:
        wrap(module, name, plain(name, opens=True))
    wrap(module, "new_group", plain("new_group", group_ranks, opens=True))
    wrap(module, "init_process_group", initialize(module))
    wrap(module.Work, "wait", wait)
    for store in ("Store", "TCPStore", "FileStore", "PrefixStore", "HashStore"):
        kind = getattr(module, store, None)
        for name in STORE_WAITS:
            if kind is not None and name in vars(kind):
                wrap(kind, name, plain(f"store.{name}", wanted_keys, opens=True))
        for name in STORE_SETS:
            if kind is not None and name in vars(kind):
                wrap(kind, name, plain(f"store.{name}", set_keys, opens=True))


def wrap(owner: Any, name: str, make: Callable[[Wrapper], Wrapper]) -> None:
    """Replace `owner.name`, also where the package torch.distributed has taken it over already."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_bsl_original", None) is not None:
        return
    wrapper = make(original)
    wrapper._bsl_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    for package in ("torch.distributed", "torch"):
        loaded = sys.modules.get(package)
        if loaded is not None and vars(loaded).get(name) is original:
            setattr(loaded, name, wrapper)


def numbers(opened: Any) -> None:
    """Forget the numbers of names that belong to another ring: that of the parent, in a forked child."""
    if _rings[0] is not opened:
        _rings[0] = opened
        for each in (_groups, _places, _tensors, _works, _keys):
            each.clear()


def place_of(opened: Any, frame: FrameType | None) -> int:
    """Return the number of the call site: the innermost frame that is neither here nor in torch.distributed itself."""
    while frame is not None and (
        frame.f_code.co_filename == HERE or frame.f_code.co_filename.endswith(("c10d_logger.py", "distributed_c10d.py"))
    ):
        frame = frame.f_back
    if frame is None:
        return 0
    key = (frame.f_code, frame.f_lineno)
    found = _places.get(key)
    if found is None:
        code = frame.f_code
        found = _places[key] = opened.name(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
    return found


def tensors_of(opened: Any, value: Any) -> int:
    """Return the number of `float32 [4, 8]`, or of the first tensor and the count of a list."""
    if value is None:
        return 0
    try:
        if isinstance(value, (list, tuple)):
            key: Any = (len(value), value[0].dtype, value[0].shape) if value else 0
        else:
            key = (value.dtype, value.shape)
        found = _tensors.get(key)
        if found is None:
            first = value[0] if isinstance(value, (list, tuple)) else value
            times = f"{len(value)} x " if isinstance(value, (list, tuple)) else ""
            words = f"{times}{str(first.dtype).replace('torch.', '')} {list(first.shape)}"
            found = _tensors[key] = opened.name(words)
        return found
    except (AttributeError, IndexError, TypeError):
        return 0


def group_of(opened: Any, module: Any, group: Any) -> list[Any]:
    """Return [number of the name, number of the newest collective, reference, flags of its collectives] of a process
    group; None is the world."""
    if group is None:
        group = module.GroupMember.WORLD
    found = _groups.get(id(group))
    if found is None or found[2]() is not group:
        found = _groups[id(group)] = [
            opened.name(group_name(module, group)), 0, reference(group), flags_of(module),
        ]  # fmt: skip
    return found


def flags_of(module: Any) -> int:
    """Return the flags of collectives: those of gloo return when they are done. C++ may use any group there is."""
    try:
        backends = {backend for backend, _ in module._world.pg_map.values()}
    except (AttributeError, TypeError, ValueError):
        return 0
    return BLOCKING if backends == {"gloo"} else 0


def reference(value: Any) -> Callable[[], Any]:
    """Return what gives `value` as long as it lives: a ring must keep no tensor and no process group alive."""
    try:
        return weakref.ref(value)
    except TypeError:  # torch has a number for a group that this rank is not in
        return lambda: value


def group_name(module: Any, group: Any) -> str:
    """Return `0: 0,1,2,3`: torch's name of the group, and its global ranks."""
    try:
        name = getattr(group, "group_name", "?")
        return f"{name}: {','.join(str(rank) for rank in module.get_process_group_ranks(group))}"
    except (AttributeError, RuntimeError, ValueError, KeyError):
        return "?"


def recorded(facts_of: Callable[..., tuple[int, ...]]) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a call whose facts are `facts_of(ring, arguments, named, frame of the caller)`."""

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            lane, opened = ring_hook.lane(), ring_hook.ring()
            if lane is None or opened is None:
                return original(*arguments, **named)
            try:
                numbers(opened)
                facts = facts_of(opened, arguments, named, sys._getframe(1))
            except Exception as error:
                give_up(error)
                return original(*arguments, **named)
            return perform(lane, facts, original, arguments, named)

        return call

    return make


def collective(module: Any, name: str, tensor_at: int | None, group_at: int) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a collective."""
    tensor_name = {None: None, 0: "tensor", 1: "input"}[tensor_at]

    def facts_of(opened: Any, arguments: Any, named: Any, frame: FrameType) -> tuple[int, ...]:
        group = arguments[group_at] if len(arguments) > group_at else named.get("group")
        known = group_of(opened, module, group)
        known[1] += 1
        if tensor_at is None:
            value = None
        elif len(arguments) > tensor_at:
            value = arguments[tensor_at]
        else:
            value = first_named(named, tensor_name)
        return (
            opened.name(name), known[0], place_of(opened, frame), tensors_of(opened, value),
            root_of(module, name, arguments, named, group), NONE, known[1], opened.step, known[3],
        )  # fmt: skip

    return recorded(facts_of)


def root_of(module: Any, name: str, arguments: Any, named: dict[str, Any], group: Any) -> int:
    """Return the global rank that a collective names as its root, or NONE."""
    if name not in ROOTS:
        return NONE
    at, word = ROOTS[name]
    root = arguments[at] if len(arguments) > at else named.get(word)
    if root is None and named.get(f"group_{word}") is not None:
        root = module.get_global_rank(module.GroupMember.WORLD if group is None else group, named[f"group_{word}"])
    return NONE if root is None else int(root)


def first_named(named: dict[str, Any], name: str | None) -> Any:
    for each in (name, "tensor", "input", "input_tensor", "object_list", "tensor_list"):
        if each in named:
            return named[each]
    return None


def perform(lane: Any, facts: tuple[int, ...], original: Wrapper, arguments: Any, named: Any) -> Any:
    """Write a call, make it, and write its end; work that is not done is left when it is waited for."""
    count = lane.enter(*facts)
    is_detached = False
    try:
        result = original(*arguments, **named)
        is_detached = result is not None and hasattr(result, "is_completed")
    finally:
        if not is_detached:
            lane.leave(count)
    if is_detached:
        lane.detach(count)
        if len(_works) > MAX_OPEN:
            _works.clear()
        _works[id(result)] = (reference(result), lane, count, facts)
    return result


def message(module: Any, name: str, peer_name: str) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a point-to-point call. Its peer is a global rank, even if the caller gave one of a group."""
    in_group = f"group_{peer_name}"

    def facts_of(opened: Any, arguments: Any, named: Any, frame: FrameType) -> tuple[int, ...]:
        given = dict(zip(("tensor", peer_name, "group", "tag", in_group), arguments), **named)
        group = given.get("group")
        peer = given.get(peer_name)
        if peer is None and given.get(in_group) is not None:
            peer = module.get_global_rank(module.GroupMember.WORLD if group is None else group, given[in_group])
        return (
            opened.name(name), group_of(opened, module, group)[0], place_of(opened, frame),
            tensors_of(opened, given.get("tensor")), NONE if peer is None else int(peer), int(given.get("tag") or 0), 0,
            opened.step,
        )  # fmt: skip

    return recorded(facts_of)


def give_up(error: Exception) -> None:
    """Say once that calls are missing: the program must not notice that they are recorded."""
    if not _said:
        _said.append(repr(error))
        ring_hook.say(f"some calls are not recorded: {error!r}")


def wait(original: Wrapper) -> Wrapper:
    """Wrap Work.wait: the call that began the work is what is waited for. That of a recorded call is a part of it."""

    @wraps(original)
    def call(work: Any, *arguments: Any, **named: Any) -> Any:
        lane, opened = ring_hook.lane(), ring_hook.ring()
        if opened is not None:
            numbers(opened)
        begun = _works.pop(id(work), None)
        if begun is not None and begun[0]() is not work:
            begun = None
        caller = sys._getframe(1)
        is_inside = begun is None and caller.f_code.co_filename.endswith("distributed_c10d.py")
        if lane is None or opened is None or is_inside:
            return original(work, *arguments, **named)
        if begun is None:  # not begun by a recorded call
            count = lane.enter(opened.name("wait"), 0, place_of(opened, caller), 0, NONE, NONE, 0, opened.step)
        else:
            count = lane.enter(*begun[3][:2], place_of(opened, caller), *begun[3][3:])
        try:
            return original(work, *arguments, **named)
        finally:
            lane.leave(count)
            if begun is not None:
                begun[1].leave(begun[2])

    return call


def plain(name: str, detail: Callable[..., str] | None = None, *, opens: bool = False) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a call whose name alone matters, and perhaps a word of its arguments.

    Only a process that communicates gets a ring: a worker that loads data does not.
    """

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            opened = ring_hook.ring() if opens else ring_hook.opened()
            lane = ring_hook.lane() if opened is not None else None
            if lane is None or opened is None:
                return original(*arguments, **named)
            numbers(opened)
            try:
                words = opened.name(detail(*arguments, **named)) if detail is not None else 0
                place = place_of(opened, sys._getframe(1))
                count = lane.enter(opened.name(name), 0, place, words, NONE, NONE, 0, opened.step)
            except Exception as error:
                give_up(error)
                return original(*arguments, **named)
            try:
                return original(*arguments, **named)
            finally:
                lane.leave(count)

        return call

    return make


def wanted_keys(_store: Any, key: Any = "", *_rest: Any, **_named: Any) -> str:
    """Return the keys that a call of a store waits for, in words."""
    return f"key {', '.join(key) if isinstance(key, (list, tuple)) else key}"[:200]


def set_keys(store: Any, key: Any = "", *_rest: Any, **_named: Any) -> str:
    """Return the keys that a call of a store sets, in words."""
    words = wanted_keys(store, key)
    if words not in _keys and len(_keys) >= MAX_KEYS:
        return FURTHER_KEYS
    _keys[words] = 1
    return words


def group_ranks(ranks: Any = None, *_rest: Any, **_named: Any) -> str:
    """Return the ranks of a new group, in words."""
    return "all ranks" if ranks is None else f"ranks {','.join(str(rank) for rank in ranks)}"[:400]


def initialize(module: Any) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps init_process_group: from then on the ring knows its rank."""

    def make(original: Wrapper) -> Wrapper:
        recorded = plain("init_process_group", opens=True)(original)

        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            result = recorded(*arguments, **named)
            opened = ring_hook.ring()
            if opened is not None:
                try:
                    opened.set_rank(module.get_rank(), module.get_world_size())
                except (RuntimeError, ValueError):
                    pass
            return result

        return call

    return make


def watch_optimizers(module: Any) -> None:
    """Count the steps of the first optimizer that steps, for a program that does not mark them itself."""
    first: list[Any] = []

    def begin(each: Any, _arguments: Any, _named: Any) -> None:
        opened = ring_hook.opened()
        if opened is None:
            return
        if not first or first[0]() is None:
            first[:] = [weakref.ref(each)]
        if first[0]() is each and not ring_hook.is_marked():
            opened.mark(opened.step + 1, "")
            ring_hook.reach(opened.step)

    if hasattr(module, "register_optimizer_step_post_hook"):  # torch 2.1 or newer
        module.register_optimizer_step_post_hook(begin)
