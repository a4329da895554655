"""The objects of a loop whose parameters are cut over the ranks, as with FSDP2: copied into host memory in each step.

A tensor is a unit of bytes, and a rank holds the rows that it has: so another number of ranks can take the same state
apart in another way. Where each part is on two ranks, as with HSDP, those restore each other. Elsewhere a buddy keeps
a copy, which is sent during the next step. As in `life.py`, no rank changes its state before the copies of the last
one have arrived everywhere, so two buffers are enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import Restorable, Shard, StateVersion, choose_version, keepers, plan_transfers
from bigsci_launch.train.survive.buddies import Buddies, HostGroup
from bigsci_launch.train.survive.flat import FlatPart, PartedObject
from bigsci_launch.train.survive.objects import KeptObjects, TensorForm, forms_in, is_cut
from bigsci_launch.train.survive.restore import fetch, find_apart
from bigsci_launch.train.survive.snapshot import Copy, HeldPart, Memory, Shape

ObjectForms = Mapping[str, Any]
"""The trees of all objects, by their names."""


class ByteShape(Shape):
    """The parts that one rank holds of all tensors; sizes are bytes, and nothing is padded."""

    @property
    def num_bytes(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(part.shard for part in self.parts)

    def make_copy(self) -> Copy:
        return ByteCopy(self)


class ByteCopy(Copy):
    """The tensors of one rank after one step, one after the other."""

    def pieces(self, wanted: Shard) -> list[Tensor]:
        first = 0
        for part in self.shape.parts:
            if part.shard.unit == wanted.unit:
                begin = first - part.shard.start
                return [self.buffer[begin + wanted.start : begin + wanted.stop]]
            first += part.size
        raise KeyError(wanted.unit)


class ShardedObjects(KeptObjects):
    """Objects whose state is in host memory after each commit, too.

    `nodes` names the node of each rank, by rank.
    """

    def __init__(self, objects: Mapping[str, Any], group: HostGroup, nodes: Sequence[str]) -> None:
        super().__init__(objects)
        self._group, self._nodes = group, nodes
        self._memory = Memory()
        self._forms: dict[StateVersion, ObjectForms] = {}
        self._tensor_forms: list[TensorForm] | None = None
        self._shapes: list[ByteShape] = []
        self._buddies: Buddies | None = None
        self._has_replicas = False

    def adopt(self, before: KeptObjects) -> None:
        """Take over what is in memory."""
        assert isinstance(before, ShardedObjects)
        self._memory, self._forms = before._memory, before._forms

    def rest(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_updating, self._buddies = [], False, None
        # The weights themselves are of no use in the next generation, which makes others.
        self._objects = {}

    def restore(self) -> tuple[Restorable, bool]:
        """Set the objects of this rank to the newest state that is in the memory of all ranks together, and return it,
        and whether another rank has sent a part of it; a collective call. A state whose copies differ is none."""
        manifests = self._group.gather(self._memory.manifest())
        found = choose_version(manifests)
        if found.version is not None and (apart := find_apart(self._digests(found.version), self._group)) is not None:
            found = Restorable(None, f"the copies of {apart.unit} after step {found.version.step} differ between ranks")
        self._memory.keep_only(found.version)
        if found.version is None:
            return found, False
        forms = next(each for each in self._group.gather(self._forms.get(found.version)) if each is not None)
        self._meet(forms)
        target = self._place(self._group.rank, found.version)
        plan = plan_transfers(manifests, found.version, [shape.shards for shape in self._shapes])
        was_sent = fetch(self._memory, found.version, plan, target, self._group)
        target.is_complete = True
        for name, form in forms.items():
            self.write(name, form, self._tensors(name, form, target))
        return found, was_sent

    def _digests(self, version: StateVersion) -> dict[Shard, list[int]]:
        """Return the digests of all that must be equal on ranks that hold it: everything but buffers."""
        apart = set()
        for name, each in self._objects.items():
            if isinstance(each, nn.Module):
                apart |= {f"{name}.{key}" for key, _ in each.named_buffers()}
            elif isinstance(each, PartedObject):
                apart |= {f"{name}.{key}" for key in each.local}
        return {shard: found for shard, found in self._memory.digests(version).items() if shard.unit not in apart}

    def settle(self) -> None:
        """Wait until the copies of the last state have arrived."""
        if self._buddies is not None:
            self._buddies.wait()

    def begin_update(self) -> None:
        super().begin_update()
        assert self._buddies is not None
        self._memory.release_others([self._shapes[rank] for rank in (self._group.rank, *self._buddies.kept)])

    @torch.no_grad()
    def commit(self, version: StateVersion) -> None:
        """Copy the state, and begin to exchange the copies; a collective call where tensors have come or gone."""
        self.is_updating = False
        read = {name: self.read(name) for name in self._objects}
        forms = {name: form for name, (form, _) in read.items()}
        if self._buddies is None or _tensor_forms(forms) != self._tensor_forms:
            self._meet(forms)
        assert self._buddies is not None
        own = self._place(self._group.rank, version)
        if not own.is_complete:
            tensors = [tensor for _, found in read.values() for tensor in found]
            parts = [_bytes(local(tensor)) for tensor in tensors]
            torch.cat(parts, out=own.buffer)
            own.is_complete = True
        self.version = version
        held = {each.version for each in self._memory.manifest()}
        self._forms = {each: form for each, form in self._forms.items() if each in held} | {version: forms}
        self._buddies.begin(own, [(rank, self._place(rank, version)) for rank in self._buddies.kept])

    def _meet(self, forms: ObjectForms) -> None:
        """Learn what each rank holds of a state with these forms; a collective call."""
        self._tensor_forms = _tensor_forms(forms)
        self._shapes = self._group.gather(self._shape(forms))
        self._whole = {unit: each.num_bytes for name, form in forms.items() for unit, each in _units(name, form)}
        copies = Counter(shard for shape in self._shapes for shard in shape.shards)
        ranks = range(len(self._shapes))
        # Another rank has each part anyway: a buddy would keep it a third time.
        self._has_replicas = min(copies.values(), default=2) > 1
        buddies = list(ranks) if self._has_replicas else keepers(self._nodes, [0] * len(ranks))
        self._buddies = Buddies(self._group, buddies)

    @property
    def holders(self) -> str:
        return "replicas" if self._has_replicas else "buddies"

    def _place(self, rank: int, version: StateVersion) -> Copy:
        return self._memory.place(self._shapes[rank], version, self._whole)

    def _shape(self, forms: ObjectForms) -> ByteShape:
        parts = []
        for name, form in forms.items():
            templates = self._templates(name, form)
            shards = (_shard(unit, each, templates) for unit, each in _units(name, form))
            parts += [HeldPart(shard, shard.stop - shard.start) for shard in shards if shard.stop > shard.start]
        return ByteShape(f"rank {self._group.rank} of {len(self._nodes)}", tuple(parts))

    def _templates(self, name: str, form: Any) -> dict[int, Any]:
        """Return what of this rank is cut as the tensors of a form are, by number."""
        each = self._objects[name]
        if isinstance(each, PartedObject):
            places = each.places(form)
            return {leaf.number: place for place, branch in places for leaf in forms_in(branch) if leaf.is_cut}
        if isinstance(each, Optimizer):
            parameters = [parameter for group in each.param_groups for parameter in group["params"]]
            states = form["state"].items()
            return {
                leaf.number: parameters[index] for index, state in states for leaf in forms_in(state) if leaf.is_cut
            }
        own, tensors = self.read(name)
        return {leaf.number: tensors[leaf.number] for leaf in forms_in(own) if leaf.is_cut}

    def _tensors(self, name: str, form: Any, copy: Copy) -> list[Tensor]:
        templates = self._templates(name, form)
        found: list[Tensor] = []
        for unit, each in _units(name, form):
            shard, template = _shard(unit, each, templates), templates.get(each.number)
            held = copy.pieces(shard)[0] if shard.stop > shard.start else copy.buffer[:0]
            data = held.clone().view(each.dtype)
            found.append(data.view(each.shape) if template is None else _like(template, data))
        return found


def local(tensor: Tensor | FlatPart) -> Tensor:
    """Return what this rank has of a tensor."""
    if isinstance(tensor, FlatPart):
        return tensor.data
    if not is_cut(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def _like(template: Any, data: Tensor) -> Any:
    if isinstance(template, FlatPart):
        return FlatPart(data, template.start, template.whole)
    shape = {"shape": template.shape, "stride": template.stride()}
    own = local(template)
    placed = data.view(own.shape).to(own.device)
    made: Tensor = type(template.data).from_local(
        placed, template.device_mesh, template.placements, run_check=False, **shape
    )
    return made


def rows_of(template: Any, form: TensorForm, name: str) -> tuple[int, int]:
    """Return the bytes [start, stop) of a tensor that this rank has, which are some of its rows."""
    if isinstance(template, FlatPart):
        return template.start * form.dtype.itemsize, (template.start + len(template.data)) * form.dtype.itemsize
    if tuple(template.shape) != form.shape:
        raise BslError(f"keep: {name} has state of the shape {form.shape}, and its parameter {tuple(template.shape)}")
    cuts = [axis for axis, placement in enumerate(template.placements) if not placement.is_replicate()]
    if not cuts:
        return 0, form.num_bytes
    if len(cuts) > 1 or type(template.placements[cuts[0]]).__name__ != "Shard" or template.placements[cuts[0]].dim != 0:
        hint = "Survivor keeps parameters that one axis of the mesh cuts, on dim 0, as fully_shard does"
        raise BslError(f"keep: {name} is cut as {template.placements}", hint=hint)
    rows, parts = form.shape[0], template.device_mesh.size(cuts[0])
    size, place = -(-rows // parts), template.device_mesh.get_coordinate()[cuts[0]]
    bytes_of_row = form.num_bytes // max(1, rows)
    return min(rows, place * size) * bytes_of_row, min(rows, (place + 1) * size) * bytes_of_row


def _shard(unit: str, form: TensorForm, templates: Mapping[int, Any]) -> Shard:
    """Return what this rank has of a tensor."""
    template = templates.get(form.number)
    return Shard(unit, *(rows_of(template, form, unit) if template is not None else (0, form.num_bytes)))


def _units(name: str, form: Any) -> Iterator[tuple[str, TensorForm]]:
    """Yield each tensor of a tree with its name, such as `optimizer.state.0.exp_avg`, in the order of numbers."""
    if isinstance(form, TensorForm):
        yield name, form
    elif isinstance(form, (dict, list)):
        for key, value in form.items() if isinstance(form, dict) else enumerate(form):
            yield from _units(f"{name}.{key}", value)


def _tensor_forms(forms: ObjectForms) -> list[TensorForm]:
    return [each for form in forms.values() for each in forms_in(form)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
