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
from itertools import count

import ring_hook
import ring_phases
from ring_file import BLOCKING, FACTS, NONE, PLACE

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    from ring_file import Lane, Ring

    Wrapper = Callable[..., Any]

# Position of the arguments that matter: of the tensor and of the group; of the root and its name.
COLLECTIVES = {
    "all_reduce": (0, 2), "broadcast": (0, 2), "reduce": (0, 3), "all_gather": (1, 2), "all_gather_into_tensor": (1, 2),
    "gather": (0, 3), "scatter": (0, 3), "reduce_scatter": (0, 3), "reduce_scatter_tensor": (1, 3),
    "all_to_all": (1, 2), "all_to_all_single": (1, 4), "barrier": (None, 0), "monitored_barrier": (None, 0),
    "all_gather_coalesced": (1, 2), "all_reduce_coalesced": (0, 2),
}  # fmt: skip
RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""What torch 2.13 calls them, and what the old names call there: recorded once, by the name that all versions have."""
INNER = ("c10d_logger.py", "distributed_c10d.py", "/typing_extensions.py", "/warnings.py")
ROOTS = {"broadcast": (1, "src"), "reduce": (1, "dst"), "gather": (2, "dst"), "scatter": (2, "src")}
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
STORE_WAITS = ("get", "wait", "barrier")
STORE_SETS = ("set", "add", "append", "compare_set", "multi_set")
MAX_KEYS = 1000
FURTHER_KEYS = "a further key"
"""Written for keys that are set after so many others: one that sets new ones in each step would fill the names."""
HERE = os.path.abspath(__file__)
MAX_OPEN = 4096
MAX_FACTS = 4096
"""Calls that are known on one group: a program may send tensors of another shape in each step."""
NO_PEER = (NONE, NONE)

_groups: dict[int, Group] = {}
_places: dict[tuple[int, int], tuple[int, Any]] = {}
_works: dict[int, tuple[Any, Any, int, bytes, tuple[int, int]]] = {}
_keys: dict[str, int] = {}
_said: list[str] = []


class Group:
    """A process group as the ring knows it: the number of its name, the next numbers of its collectives, their flags,
    known calls.

    A known call is found by ids, so its code is kept alive: no other code can get the same id.
    """

    __slots__ = ("calls", "flags", "name", "numbers", "reference")

    def __init__(self, name: int, flags: int, reference: Any) -> None:
        self.name, self.flags, self.reference = name, flags, reference
        self.numbers = count(1)
        self.calls: dict[tuple[Any, ...], tuple[bytes, Any]] = {}


class Inner(dict):  # type: ignore[type-arg]  # Python 3.8
    """Whether a file is part of torch.distributed itself, of this module, or marks functions as deprecated: a call site
    is never there."""

    def __missing__(self, path: str) -> bool:
        self[path] = found = path == HERE or path.endswith(INNER)
        return found


_inner = Inner()


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
        ring_phases.watch_steps(module)
        watch_optimizers(module)
    elif name == "torch.autograd":
        ring_phases.watch_backward(module, wrap)
    elif name == "torch.nn.parallel.distributed":
        distributed = module.dist.distributed_c10d
        ring_phases.watch_data_parallel(module, wrap, lambda ring, group: group_of(ring, distributed, group))


def watch_distributed(module: Any) -> None:
    ring_phases.watch_garbage()
    for name, (tensor, group) in COLLECTIVES.items():
        told = rooted(*ROOTS[name]) if name in ROOTS else None
        new = RENAMED.get(name, name)
        wrap(module, new if hasattr(module, new) else name, recorded(module, name, tensor, group, told))
    for name, told in (("send", sent), ("isend", sent), ("recv", received), ("irecv", received)):
        wrap(module, name, recorded(module, name, 0, 2, told, is_message=True))
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


def forget() -> None:
    """Forget numbers that belong to the ring of the parent, in a forked child."""
    for each in (_groups, _places, _works, _keys):
        each.clear()
    ring_phases.forget()


os.register_at_fork(after_in_child=forget)


def call_site(frame: FrameType) -> FrameType:
    """Return the innermost frame that is neither here nor in torch.distributed itself."""
    while _inner[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(ring: Ring, site: FrameType) -> int:
    """Return the number of the name of a call site."""
    key = (id(site.f_code), site.f_lasti)
    found = _places.get(key)
    if found is None:
        code = site.f_code
        found = _places[key] = ring.name(f"{code.co_filename}:{site.f_lineno} {code.co_name}"), code
    return found[0]


def facts_of(ring: Ring, group: Group, frame: FrameType, name: str, value: Any, to: tuple[int, int] | None) -> bytes:
    """Return what a call has in common with others from the same place, as the ring holds it. `to` is (peer, tag)."""
    if value is None:
        kind = shape = None
    else:
        try:
            kind, shape = value.dtype, value.shape
        except AttributeError:
            kind, shape = first_of(value)
    key = (name, id(frame.f_code), frame.f_lasti, kind, shape, to)
    try:
        found = group.calls.get(key)
    except TypeError:  # a shape that is not known while torch compiles
        return facts_of(ring, group, frame, name, None, to)
    if found is None:
        site = call_site(frame)
        if site is not frame:  # torch.distributed calls itself, now for this site
            return facts_of(ring, group, site, name, value, to)
        if len(group.calls) == MAX_FACTS:
            group.calls.clear()
        tensors = tensors_of(ring, kind, shape)
        facts = FACTS.pack(ring.name(name), group.name, place_of(ring, site), tensors, *(to or NO_PEER))
        found = group.calls[key] = facts, site.f_code
    return found[0]


def first_of(values: Any) -> tuple[Any, Any]:
    """Return ((type, count), shape) of a list of tensors, by the first of them; nothing for what is no such list."""
    try:
        return (values[0].dtype, len(values)), values[0].shape
    except (AttributeError, IndexError, KeyError, TypeError):
        return None, None


def tensors_of(ring: Ring, kind: Any, shape: Any) -> int:
    """Return the number of `float32 [4, 8]`, or of `2 x float32 [4, 8]` for a list."""
    if kind is None:
        return 0
    one, times = (kind[0], f"{kind[1]} x ") if isinstance(kind, tuple) else (kind, "")
    return ring.name(f"{times}{str(one).replace('torch.', '')} {list(shape)}")


def group_of(ring: Ring, module: Any, group: Any) -> Group:
    """Return what the ring knows of a process group; None is the world."""
    if group is None:
        group = module.GroupMember.WORLD
    found = _groups.get(id(group))
    if found is None:
        new = Group(ring.name(group_name(module, group)), flags_of(module), forgotten_with(group))
        found = _groups.setdefault(id(group), new)  # another thread may have been faster
    return found


def flags_of(module: Any) -> int:
    """Return the flags of collectives: those of gloo return when they are done. C++ may use any group there is."""
    try:
        backends = {backend for backend, _ in module._world.pg_map.values()}
    except (AttributeError, TypeError, ValueError):
        return 0
    return BLOCKING if backends == {"gloo"} else 0


def forgotten_with(group: Any) -> Any:
    """Return what must be kept with the facts of a group: they are forgotten as the group dies, before its id is free.

    The ring must not keep a group alive.
    """
    number = id(group)
    try:
        return weakref.ref(group, lambda _: _groups.pop(number, None))
    except TypeError:  # torch has a number for a group that this rank is not in
        return group


def group_name(module: Any, group: Any) -> str:
    """Return `0: 0,1,2,3`: torch's name of the group, and its global ranks."""
    try:
        name = getattr(group, "group_name", "?")
        return f"{name}: {','.join(str(rank) for rank in module.get_process_group_ranks(group))}"
    except (AttributeError, RuntimeError, ValueError, KeyError):
        return "?"


def recorded(
    module: Any,
    name: str,
    tensor_at: int | None,
    group_at: int,
    told: Callable[..., Any] | None = None,
    *,
    is_message: bool = False,
) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a collective or a message. `told(arguments)` are its peer or root, the same by its rank in the
    group, and its tag."""
    tensor_name = {None: None, 0: "tensor", 1: "input"}[tensor_at]
    lane_of = ring_hook.lane

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            lane = lane_of()
            if lane is None:
                return original(*arguments, **named)
            try:
                given = arguments[group_at] if len(arguments) > group_at else named.get("group")
                group = group_of(lane.ring, module, given)
                if tensor_at is None:
                    value = None
                elif len(arguments) > tensor_at:
                    value = arguments[tensor_at]
                else:
                    value = first_named(named, tensor_name)
                to = peer_of(module, given, *told(*arguments, **named)) if told is not None else None
                place = (0, 0) if is_message else (next(group.numbers), group.flags)
                facts = facts_of(lane.ring, group, sys._getframe(1), name, value, to)
                begun = lane.enter(facts, *place)
            except Exception as error:
                give_up(error)
                return original(*arguments, **named)
            try:
                result = original(*arguments, **named)
            except BaseException:
                lane.leave(begun)
                raise
            if result is not None and hasattr(result, "is_completed"):
                detach(lane, begun, facts, place, result)
            else:
                lane.leave(begun)
            return result

        return call

    return make


def sent(
    _tensor: Any = None, dst: Any = None, _group: Any = None, tag: Any = 0, group_dst: Any = None, **_: Any
) -> Any:
    return dst, group_dst, tag


def received(
    _tensor: Any = None, src: Any = None, _group: Any = None, tag: Any = 0, group_src: Any = None, **_: Any
) -> Any:
    return src, group_src, tag


def rooted(at: int, name: str) -> Callable[..., Any]:
    def told(*arguments: Any, **named: Any) -> Any:
        root = arguments[at] if len(arguments) > at else named.get(name)
        return root, named.get(f"group_{name}"), NONE

    return told


def peer_of(module: Any, group: Any, peer: Any, in_group: Any, tag: Any) -> tuple[int, int]:
    """Return a peer or a root, as a global rank even if the caller gave one of a group, and the tag."""
    if peer is None and in_group is not None:
        peer = module.get_global_rank(module.GroupMember.WORLD if group is None else group, in_group)
    return NONE if peer is None else int(peer), int(tag or 0)


def first_named(named: dict[str, Any], name: str | None) -> Any:
    for each in (name, "tensor", "input", "input_tensor", "object_list", "tensor_list"):
        if each in named:
            return named[each]
    return None


def detach(lane: Lane, begun: int, facts: bytes, place: tuple[int, int], work: Any) -> None:
    """Write that a call has returned before its work is done: it is left when the work is waited for."""
    lane.detach(begun)
    if len(_works) > MAX_OPEN:
        _works.clear()
    _works[id(work)] = (reference(work), lane, begun, facts, place)


def reference(value: Any) -> Callable[[], Any]:
    """Return what gives `value` as long as it lives: a ring must keep no tensor alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def give_up(error: Exception) -> None:
    """Say once that calls are missing: the program must not notice that they are recorded."""
    if not _said:
        _said.append(repr(error))
        ring_hook.say(f"some calls are not recorded: {error!r}")


def wait(original: Wrapper) -> Wrapper:
    """Wrap Work.wait: the call that began the work is what is waited for. That of a recorded call is a part of it."""
    lane_of = ring_hook.lane

    @wraps(original)
    def call(work: Any, *arguments: Any, **named: Any) -> Any:
        known = _works.pop(id(work), None)
        if known is not None and known[0]() is not work:
            known = None
        caller = sys._getframe(1)
        lane = None if known is None and _inner[caller.f_code.co_filename] else lane_of()
        if lane is None:
            return original(work, *arguments, **named)
        try:
            place = place_of(lane.ring, call_site(caller))
            if known is None:  # not begun by a recorded call
                waited = lane.enter(FACTS.pack(lane.ring.name("wait"), 0, place, 0, NONE, NONE))
            else:
                waited = lane.enter(known[3][:4] + PLACE.pack(place) + known[3][6:], *known[4])
        except Exception as error:
            give_up(error)
            return original(work, *arguments, **named)
        try:
            return original(work, *arguments, **named)
        finally:
            lane.leave(waited)
            if known is not None:
                known[1].leave(known[2])

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
            try:
                words = opened.name(detail(*arguments, **named)) if detail is not None else 0
                place = place_of(opened, call_site(sys._getframe(1)))
                begun = lane.enter(FACTS.pack(opened.name(name), 0, place, words, NONE, NONE))
            except Exception as error:
                give_up(error)
                return original(*arguments, **named)
            try:
                return original(*arguments, **named)
            finally:
                lane.leave(begun)

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
