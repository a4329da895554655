"""Brings the kept objects of all ranks to the newest state that any of them has whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.recover.holding import Restorable, StateVersion, Transfer, choose_version, plan_transfers
from bigsci_launch.train.device.digest import digest64
from bigsci_launch.train.survive.buddies import HostGroup
from bigsci_launch.train.survive.objects import KeptObjects, forms_in, shards_of
from bigsci_launch.train.survive.restore import find_apart, require_equal


def restore_from_replicas(kept: KeptObjects, group: HostGroup) -> tuple[Restorable, bool]:
    """Set the objects of this rank to the newest state that a rank has whole, and return it, and whether it came from
    another rank; a collective call. A state whose copies differ is none."""
    manifests = group.gather(kept.holding())
    found = choose_version(manifests)
    if found.version is None:
        return found, False
    if (apart := find_apart(kept.digests() if kept.version == found.version else {}, group)) is not None:
        why = f"the copies of {apart} after step {found.version.step} differ between ranks"
        return Restorable(None, why), False
    whole = next(each.whole for manifest in manifests for each in manifest if each.version == found.version)
    wanted = [[] if _has(manifest, found.version) else list(shards_of(whole)) for manifest in manifests]
    plan = plan_transfers(manifests, found.version, wanted)
    _carry_out(kept, plan, group)
    return found, any(each.destination == group.rank for each in plan)


def _has(manifest: Sequence[Any], version: StateVersion) -> bool:
    return any(each.version == version for each in manifest)


@torch.no_grad()
def _carry_out(kept: KeptObjects, plan: Sequence[Transfer], group: HostGroup) -> None:
    """Send and receive what this rank has to; tensors travel as bytes, from host memory to host memory."""
    rank = group.rank
    own = {each.shard.unit: kept.read(each.shard.unit) for each in plan if each.source == rank}
    forms = group.gather({unit: form for unit, (form, _) in own.items()})
    sent: dict[int, list[Tensor]] = {}
    got: dict[int, list[Tensor]] = {}
    works: list[Any] = []
    for tag, each in enumerate(plan):
        if each.source == rank:
            sent[tag] = [tensor.cpu().contiguous() for tensor in own[each.shard.unit][1]]
            works += [group.send(part, each.destination, tag) for part in _filled(sent[tag])]
        elif each.destination == rank:
            got[tag] = [form.empty() for form in forms_in(forms[each.source][each.shard.unit])]
            works += [group.receive(part, each.source, tag) for part in _filled(got[tag])]
    group.wait(works)
    require_equal(plan, _digests(sent), _digests(got), group)
    for tag, tensors in got.items():
        each = plan[tag]
        kept.write(each.shard.unit, forms[each.source][each.shard.unit], tensors)


def _filled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def _digests(tensors: dict[int, list[Tensor]]) -> dict[int, list[int]]:
    return {tag: [digest64(each) for each in found] for tag, found in tensors.items()}
