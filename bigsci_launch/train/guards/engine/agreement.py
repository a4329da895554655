"""What ranks must agree on apart from tensors: constants and modes of their layers, random states, the learning rate.

A layer that drops nothing on one replica, or a norm with another epsilon, makes no copy of a weight differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from bigsci_launch.topology import Topology
from bigsci_launch.train.device.digest import digest64, signed
from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.guards.copies import Digests, Violation, Watched
from bigsci_launch.train.guards.places import Places

RANDOM, RATE = "states of the generators", "all groups"
_PLAIN = (bool, int, float, str, type(None))
_OWN = {"first_token"}
"""Attributes that differ between tp ranks because each holds another part."""


def agreed_values(module: nn.Module, places: Places) -> list[Watched]:
    """Return what the ranks agree on, in the order of `agreed_digests`."""
    inside = places.copies("dp", "tp")
    layers = [Watched(f"layer {name}", inside, "settings of layers") for name, _ in _layers(module)]
    random = Watched(RANDOM, places.copies("tp"), "random states")
    return [*layers, random, Watched(RATE, places.copies("dp", "tp", "pp"), "learning rate")]


def agreed_digests(module: nn.Module, groups: Sequence[dict[str, Any]]) -> list[int]:
    """Return the digests of a rank's settings, random states and learning rates."""
    layers = [_digest(_settings(layer)) for _, layer in _layers(module)]
    rates = sorted({float(group["lr"]) for group in groups})
    return [*layers, _random_state(), _digest(rates)]


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_children():
        yield from layer.named_children() if isinstance(layer, nn.ModuleDict) else [(name, layer)]


def _settings(layer: nn.Module) -> list[Any]:
    found: list[Any] = []
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if _is_setting(key, value)}
        buffers = {key: digest64(buffer) for key, buffer in module.named_buffers(recurse=False)}
        found.append((name, type(module).__name__, sorted(plain.items()), sorted(buffers.items())))
    return found


def _is_setting(key: str, value: Any) -> bool:
    return not key.startswith("_") and key not in _OWN and isinstance(value, _PLAIN)


def _random_state() -> int:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if computes_on_gpu() else [])]
    return digest64(torch.cat(states))


def _digest(value: Any) -> int:
    return signed(xxh3_64_intdigest(repr(value).encode()))


def find_shared_randomness(
    columns: Sequence[Sequence[Watched]], digests: Digests, topology: Topology
) -> Iterator[Violation]:
    """Find replicas that would drop the same elements; `digests` has the shape (ranks, columns)."""
    first: dict[tuple[int, int, int], int] = {}
    for rank, mine in enumerate(columns):
        at, names = topology.coordinate(rank), [column.name for column in mine]
        if RANDOM not in names:
            continue  # random numbers of layers, and not of ranks
        number = names.index(RANDOM)
        key = (at.pp_rank, at.tp_rank, int(digests[rank, number]))
        other = first.setdefault(key, rank)
        if other != rank:
            text = "data-parallel ranks have the same random state, so they draw the same dropout masks"
            yield Violation("random states", "dropout", (other, rank), text, is_decided=False)
