"""Like `several`, but counts how often the host would wait for its device if the tensors of a run were on a GPU.

What torch makes on the host without being given a device is on the host, and so is what is copied there; all else
says that it is on `cuda:0`, and is computed on the CPU. A wait is a copy between the two that is not asynchronous, a
number that is read, or a shape that depends on numbers. Each step of a rank leaves a line in `waits-RANK.jsonl` of the
attempt: {"step": 3, "checked": false, "waits": {"bigsci_launch/train/rank/exchange.py:32": 1}}.

Waits inside of gloo's collectives are not counted, because NCCL has none there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import several
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CARD, HOST = torch.device("cuda:0"), torch.device("cpu")
DEVICE_OF, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
READS = {"tolist", "numpy", "cpu"}
COPIES = {"to", "cuda", "tensor", "as_tensor"}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}
OWN = ("bigsci_launch", "deepspeed")
WAITS: Counter[str] = Counter()


def tensors_in(*values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def is_on_card(tensor: Tensor) -> bool:
    return not getattr(tensor, "_is_on_host", False)


def put(result: Any, *, on_host: bool) -> Any:
    for each in tensors_in(result):
        each._is_on_host = on_host  # type: ignore[attr-defined]
    return result


def wait() -> None:
    """Count a wait in the innermost line that is called now and belongs to `bsl` or DeepSpeed."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        parts = Path(frame.f_code.co_filename).parts
        for own in OWN:
            if own in parts:
                WAITS[f"{'/'.join(parts[parts.index(own) :])}:{line}"] += 1
                return
    WAITS["elsewhere"] += 1


class CardCalls(TorchFunctionMode):
    """Moves nothing, and knows of each tensor that Python makes where it would be."""

    def __torch_function__(
        self, call: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        given, seen = dict(named or {}), tensors_in(arguments, named or {})
        on_card = any(map(is_on_card, seen))
        if call in (DEVICE_OF, IS_CUDA) and on_card:
            return CARD if call == DEVICE_OF else True
        if call is Tensor.pin_memory:
            return put(arguments[0].clone(), on_host=True)
        if given.pop("pin_memory", False):
            given["device"] = HOST
        name, goal = getattr(call, "__name__", ""), device_in(*arguments, *given.values())
        goes_to_card = goal.type == "cuda" if goal else on_card and name not in READS
        if not given.get("non_blocking") and self._waits(name, seen, goes_to_card=goes_to_card):
            wait()
        result = call(*map(on_cpu, arguments), **{key: on_cpu(each) for key, each in given.items()})
        if seen and result is seen[0]:
            if on_card == goes_to_card:
                return result
            # A copy from the CPU to the CPU is none.
            result = result.clone()
        return put(result, on_host=not goes_to_card)

    def _waits(self, name: str, seen: list[Tensor], *, goes_to_card: bool) -> bool:
        on_card = any(map(is_on_card, seen))
        if name == "copy_":
            return on_card and not all(map(is_on_card, seen))
        return (name in READS and on_card) or (name in COPIES and on_card != goes_to_card)


def device_in(*values: Any) -> torch.device | None:
    """Return the device that a call names."""
    for each in values:
        if isinstance(each, torch.device):
            return each
        if isinstance(each, str) and each.split(":")[0] in ("cpu", "cuda"):
            return torch.device(each)
    return None


def on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
    return HOST if is_device else value


class CardKernels(TorchDispatchMode):
    """Sees the operations that torch starts by itself."""

    def __torch_dispatch__(
        self, kernel: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = kernel.overloadpacket.__name__
        if any(map(is_on_card, tensors_in(arguments, named or {}))) and (name in WAITING or reads(name, arguments)):
            wait()
        return kernel(*arguments, **(named or {}))


def reads(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an operation is indexed by booleans, or fills in a number that it has to read first."""
    if name in ("index", "index_put", "index_put_"):
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(arguments[1]))
    return name in ("masked_fill", "masked_fill_") and isinstance(arguments[2], Tensor) and is_on_card(arguments[2])


class PassedEvent:
    """An event of a stream, which has always been reached."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def pretend() -> None:
    """Let all that a run does once its engine stands count as on a card."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from bigsci_launch.train import loop
    from bigsci_launch.train.parallel import optimizer
    from bigsci_launch.train.state import checkpoint

    optimizer.computes_on_gpu = lambda: True
    for owner, name in ((torch, "get_rng_state"), (torch, "from_numpy")):
        put_on_host(owner, name)
    torch.cuda.Event = PassedEvent  # type: ignore[misc, assignment]
    see_in_backward()
    build, loop._step = checkpoint.build_engine, counted(loop._step)

    def build_engine(*arguments: Any) -> Any:
        engine = build(*arguments)
        engine.device = CARD
        CPU_Accelerator.device_name = CPU_Accelerator.current_device_name = lambda self, *_: "cuda:0"
        for each in (CardKernels(), CardCalls()):
            each.__enter__()
        return engine

    checkpoint.build_engine = build_engine


def put_on_host(owner: Any, name: str) -> None:
    call = getattr(owner, name)
    setattr(owner, name, lambda *arguments: put(call(*arguments), on_host=True))


def see_in_backward() -> None:
    """See what hooks call: a backward pass is a single call, within which torch asks no mode."""
    backward = torch.autograd._engine_run_backward

    def run(*arguments: Any, **named: Any) -> Any:
        with CardCalls():
            return backward(*arguments, **named)

    torch.autograd._engine_run_backward = run


def counted(step: Any) -> Any:
    def run(training: Any, progress: Any) -> Any:
        WAITS.clear()
        done = step(training, progress)
        guards = training.companions[0].guards
        line = {"step": done.progress.step, "checked": guards.is_armed, "waits": dict(WAITS)}
        with (training.setup.identity.attempt.path / f"waits-{os.environ['RANK']}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        return done

    return run


if __name__ == "__main__":
    several.main(pretend)
