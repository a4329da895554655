"""Writes into the ring what a rank does between its collectives: forward, backward, optimizer step, garbage collection.

Of DDP, whose reduction of gradients is in C++, it writes when the rank has its own gradients and waits for those of the
others: a collective like others, with a number. The other records are apart from calls of torch.distributed:
`node_ring.py` leaves them out of what it compares.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from functools import wraps
from itertools import count

import ring_hook
from ring_file import FACTS, NONE, PHASES, REDUCTION

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ring_file import Lane, Ring

    Wrapper = Callable[..., Any]
    Began = tuple[Lane, int]

FORWARD, BACKWARD, STEP, GARBAGE = PHASES[:4]
OLDEST = 2
"""The generation of a garbage collection that takes long: it looks at all objects."""

_steps: dict[int, Began] = {}
_reductions: defaultdict[int, count[int]] = defaultdict(lambda: count(1))
"""The numbers of the reductions to come, by the name of the group in the ring."""
_reducing: list[Began] = []
_collecting: list[Began] = []


def begin(name: str) -> Began | None:
    """Write that something begins in this thread, if the process communicates."""
    opened = ring_hook.opened()
    lane = ring_hook.lane() if opened is not None else None
    if opened is None or lane is None:
        return None
    return lane, lane.enter(FACTS.pack(opened.name(name), 0, 0, 0, NONE, NONE))


def end(began: Began | None) -> None:
    if began is not None:
        began[0].leave(began[1])


def during(name: str, after: Callable[[], None] = lambda: None) -> Callable[[Wrapper], Wrapper]:
    """Return what wraps a function whose begin and end are written; `after` is called at its end."""

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            began = begin(name)
            try:
                return original(*arguments, **named)
            finally:
                after()
                end(began)

        return call

    return make


def watch_backward(module: Any, wrap: Wrapper) -> None:
    wrap(module, "backward", during(BACKWARD, _reduced))


def _reduced() -> None:
    while _reducing:
        end(_reducing.pop())


def watch_data_parallel(module: Any, wrap: Wrapper, group_of: Callable[[Ring, Any], Any]) -> None:
    """Write when forward passes of DDP run, and when a rank has its own gradients. `group_of` is what a ring knows of a
    process group."""
    kind = module.DistributedDataParallel

    def make(original: Wrapper) -> Wrapper:
        @wraps(original)
        def call(model: Any, *arguments: Any, **named: Any) -> None:
            original(model, *arguments, **named)
            watch_gradients(model, group_of)

        return call

    wrap(kind, "__init__", make)
    wrap(kind, "forward", forward)


def forward(original: Wrapper) -> Wrapper:
    import torch

    is_compiling = torch.compiler.is_compiling if hasattr(torch, "compiler") else bool
    recorded = during(FORWARD)(original)

    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return (original if is_compiling() else recorded)(*arguments, **named)

    return call


def watch_gradients(model: Any, group_of: Callable[[Ring, Any], Any]) -> None:
    """Have the last gradient of a backward pass written: that of the parameter that the forward pass needs first.

    Where parameters may be unused, ranks differ in whether they have it: these reductions have no numbers to compare.
    """
    first = next((each for each in model.parameters() if each.requires_grad), None)
    if not hasattr(first, "register_post_accumulate_grad_hook"):  # torch before 2.1
        return
    of = weakref.ref(model)

    def ready(_parameter: Any) -> None:
        here, opened = of(), ring_hook.opened()
        lane = ring_hook.lane() if opened is not None else None
        if here is None or opened is None or lane is None or not here.require_backward_grad_sync:
            return
        group = group_of(opened, here.process_group)
        facts = FACTS.pack(opened.name(REDUCTION), group.name, 0, 0, NONE, NONE)
        number = 0 if here.find_unused_parameters else next(_reductions[group.name])
        _reducing.append((lane, lane.enter(facts, number, group.flags)))

    assert first is not None
    first.register_post_accumulate_grad_hook(ready)


def watch_steps(module: Any) -> None:
    """Write the steps of optimizers. One that raises an error has no end."""

    def before(optimizer: Any, _arguments: Any, _named: Any) -> None:
        began = begin(STEP)
        if began is not None:
            _steps[id(optimizer)] = began

    def after(optimizer: Any, _arguments: Any, _named: Any) -> None:
        end(_steps.pop(id(optimizer), None))

    if hasattr(module, "register_optimizer_step_pre_hook"):  # torch 2.1 or newer
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)


def watch_garbage() -> None:
    """Write the garbage collections that look at all objects, in threads that communicate."""

    def collected(stage: str, info: dict[str, int]) -> None:
        if info["generation"] != OLDEST or not ring_hook.has_lane():
            return
        if stage == "start":
            began = begin(GARBAGE)
            if began is not None:
                _collecting.append(began)
        elif _collecting:
            end(_collecting.pop())

    gc.callbacks.append(collected)


def forget() -> None:
    """Forget numbers that belong to the ring of the parent, in a forked child."""
    for each in (_reducing, _collecting):
        each.clear()
    _steps.clear()
    _reductions.clear()
