"""The objects of a loop that are its state: read as plain values and tensors, and written from them.

Each rank has all of it, so the state itself is what others restore from: no copy is made of weights and moments. They
change only between `begin_update` and `commit`. Buffers, such as the statistics of BatchNorm, change in each forward
pass, and differ between ranks; they are small, and are copied with each commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import Holding, Shard, StateVersion
from bigsci_launch.train.device.digest import digests64
from bigsci_launch.train.survive.flat import FlatPart, PartedObject

NOT_IN_PLACE = (
    "A lost rank of it cannot be replaced in place; with survive: true, all ranks begin again at a checkpoint"
)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The place of a tensor in a tree of values. `is_cut`: ranks have parts of it, and `shape` is that of the whole."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


class KeptObjects:
    """Objects by name, and the version that they have together; None while they change, or after that has failed."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, each in objects.items():
            _require_keepable(name, each)
        self._objects = dict(objects)
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._left_with: dict[str, list[int]] = {}
        self.version: StateVersion | None = None
        self.is_updating = False
        parted = [each.optimizer for each in objects.values() if isinstance(each, PartedObject)]
        self._hooks = [each.register_step_pre_hook(self._require_update) for each in (*self._optimizers(), *parted)]

    def _optimizers(self) -> list[Optimizer]:
        return [each for each in self._objects.values() if isinstance(each, Optimizer)]

    @property
    def engine(self) -> Any:
        """The engine of DeepSpeed among the objects, or None."""
        return next((each.engine for each in self._objects.values() if isinstance(each, PartedObject)), None)

    def _require_update(self, *_arguments: Any) -> None:
        if not self.is_updating:
            raise BslError("the optimizer's step is outside `with step.update():`", hint="docs/how-to/survivor.md")

    @property
    def holders(self) -> str:
        """Who sends what a rank does not have."""
        return "replicas"

    def settle(self) -> None:
        """Wait until what `commit` has begun is done."""

    def begin_update(self) -> None:
        """Note that the state is about to change."""
        self.is_updating, self.version = True, None

    def commit(self, version: StateVersion) -> None:
        """Note that the state has changed completely."""
        self.is_updating, self.version = False, version
        self._buffers = {
            name: {key: tensor.detach().clone() for key, tensor in each.named_buffers()}
            for name, each in self._objects.items()
            if isinstance(each, nn.Module)
        }

    @torch.no_grad()
    def rest(self) -> None:
        """Return to the last commit, after a step that is not finished, and note what the state is then."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_updating = [], False
        if self.version is None:
            return
        for name, kept in self._buffers.items():
            for key, tensor in self._objects[name].named_buffers():
                tensor.copy_(kept[key])
        self._left_with = self.digests()

    @torch.no_grad()
    def adopt(self, before: KeptObjects) -> None:
        """Take over the state of the objects of an earlier generation, which may be the same ones.

        Raises:
            BslError: an object was changed since its generation has ended.
        """
        self.version = before.version
        if before.version is None:
            return
        for name, digests in before.digests().items():
            if digests != before._left_with[name]:
                raise BslError(
                    f"{name} was changed after its generation had ended, and before `survivor.keep`",
                    hint="call keep before DistributedDataParallel, which copies the weights of rank 0, and do not "
                    "initialize weights again",
                )
        for name, each in self._objects.items():
            if each is not before._objects[name]:
                self.write(name, *before.read(name))

    def clear_gradients(self) -> None:
        """Forget the gradients of a step that is done again."""
        for each in self._optimizers():
            each.zero_grad(set_to_none=True)

    def read(self, name: str) -> tuple[Any, list[Tensor]]:
        """Return the state of an object: a tree with `TensorForm`s in it, and the tensors."""
        each, tensors = self._objects[name], list[Tensor]()
        state = each.get_state() if isinstance(each, torch.Generator) else each.state_dict()
        return _split(state, tensors), tensors

    def write(self, name: str, form: Any, tensors: list[Tensor]) -> None:
        """Set the state of an object."""
        each, state = self._objects[name], _join(form, tensors)
        if isinstance(each, torch.Generator):
            each.set_state(state)
        else:
            each.load_state_dict(state)

    def holding(self) -> list[Holding]:
        """Return what is held, as ranks say it to each other."""
        if self.version is None:
            return []
        whole = {name: max(1, _num_bytes(self.read(name)[1])) for name in self._objects}
        return [Holding(self.version, tuple(shards_of(whole)), whole)]

    def digests(self) -> dict[str, list[int]]:
        """Return digests of all that must be equal on all ranks, by name: everything but buffers."""
        found = {}
        for name, each in self._objects.items():
            form, tensors = self.read(name)
            apart = {key for key, _ in each.named_buffers()} if isinstance(each, nn.Module) else set()
            if apart:
                tensors = [tensors[part.number] for key, part in form.items() if key not in apart]
            plain = torch.frombuffer(bytearray(repr(list(_plain_in(form))).encode()), dtype=torch.uint8)
            found[name] = [*digests64(tensors), *digests64([plain])]
        return found


def shards_of(whole: Mapping[str, int]) -> Iterator[Shard]:
    """Yield what holds a state completely."""
    return (Shard(name, 0, length) for name, length in whole.items())


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _require_keepable(name: str, each: Any) -> None:
    where = f"keep: {name}"
    if isinstance(each, torch.Generator):
        return
    if isinstance(each, DistributedDataParallel):
        hint = "DistributedDataParallel copies the weights of rank 0, which may be a new one"
        raise BslError(f"{where}: give the module itself, before DistributedDataParallel has it", hint=hint)
    if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
        raise BslError(f"{where}: {type(each).__name__} has no state_dict and load_state_dict")
    if type(each).__module__.startswith(("deepspeed.", "torch.distributed.optim.")) or any(
        hasattr(tensor, "ds_id") for tensor in _tensors_of(each)
    ):
        why = f"it is sharded in a way that Survivor does not know. {NOT_IN_PLACE}"
        raise BslError(f"{where}: {why}", hint="of DeepSpeed, give the engine")
    if type(each).__name__ == "FullyShardedDataParallel":
        raise BslError(f"{where}: FSDP1 flattens its parameters. {NOT_IN_PLACE}", hint="use fully_shard (FSDP2)")


def is_cut(tensor: Tensor | FlatPart) -> bool:
    """Whether a tensor is torch's DTensor, or another part of one on this rank."""
    return isinstance(tensor, FlatPart) or type(tensor.data).__name__ == "DTensor"


def has_cut_tensors(objects: Mapping[str, Any]) -> bool:
    """Whether state of an object is cut over the ranks, as with FSDP2 and ZeRO."""
    return any(isinstance(each, PartedObject) or any(map(is_cut, _tensors_of(each))) for each in objects.values())


def _tensors_of(each: Any) -> list[Tensor]:
    if isinstance(each, Optimizer):
        return [tensor for group in each.param_groups for tensor in group["params"]]
    return list(each.parameters()) if isinstance(each, nn.Module) else []


def _split(tree: Any, tensors: list[Any]) -> Any:
    if isinstance(tree, FlatPart):
        tensors.append(tree)
        return TensorForm(len(tensors) - 1, (tree.whole,), tree.data.dtype, is_cut=True)
    if isinstance(tree, Tensor):
        tensors.append(tree.detach())
        return TensorForm(len(tensors) - 1, tuple(tree.shape), tree.dtype, is_cut(tree))
    if isinstance(tree, Mapping):
        return {key: _split(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_split(value, tensors) for value in tree]
    return tree


def _join(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, TensorForm):
        return tensors[form.number]
    if isinstance(form, dict):
        return {key: _join(value, tensors) for key, value in form.items()}
    return [_join(value, tensors) for value in form] if isinstance(form, list) else form


def forms_in(form: Any) -> list[TensorForm]:
    """Return the forms of all tensors in a tree, by their numbers."""
    return [leaf for leaf in _leaves(form) if isinstance(leaf, TensorForm)]


def _plain_in(form: Any) -> Iterator[Any]:
    return (leaf for leaf in _leaves(form) if isinstance(leaf, (*_PLAIN, TensorForm)))


def _leaves(form: Any) -> Iterator[Any]:
    if isinstance(form, dict):
        for key, value in form.items():
            yield str(key)
            yield from _leaves(value)
    elif isinstance(form, list):
        for value in form:
            yield from _leaves(value)
    else:
        yield form
