"""Copies of a rank's state in host memory, for files that are written while training changes the state."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsci_launch.train.device.gpu import computes_on_gpu
from bigsci_launch.train.device.host_memory import host_zeros, tensor_in

_ALIGNMENT = 64


class LiveState:
    """What files will hold: its plain values as they are now, and the tensors of the engine, which must not change
    before they have been copied."""

    def __init__(self, states: Sequence[Any]) -> None:
        tensors = list(_tensors_in(states))
        self._states = _with_tensors(states, {id(tensor): tensor for tensor in tensors})
        self._tensors = tensors
        self._device = torch.cuda.current_device() if computes_on_gpu() else None
        self._ready = torch.cuda.current_stream().record_event() if computes_on_gpu() else None

    def copy_to(self, memory: HostMemory) -> list[Any]:
        """Return the states with copies of their tensors, and let go of the tensors. Any thread may call it, once."""
        with self._during_training():
            places = memory.places(self._tensors)
            _copy_all(self._tensors, places)
        copies = {id(tensor): _like(tensor, place) for tensor, place in zip(self._tensors, places, strict=True)}
        found = _with_tensors(self._states, copies)
        self._states, self._tensors = [], []
        return found

    @contextlib.contextmanager
    def _during_training(self) -> Iterator[None]:
        """Let a GPU copy while it computes, and wait for the copies at the end."""
        if self._ready is None:
            yield
            return
        with torch.cuda.device(self._device):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(self._ready)
                yield
            stream.synchronize()


class HostMemory:
    """Host memory for the copies of one save, which the next one uses again."""

    def __init__(self, num_bytes: int) -> None:
        """Get `num_bytes` in a thread: the first save need not wait for them."""
        self._memory: Tensor | None = None
        self._device = torch.cuda.current_device() if computes_on_gpu() else None
        self._preparation = threading.Thread(target=self._get, args=(num_bytes,), name="bsl-save-memory", daemon=True)
        self._preparation.start()

    def _get(self, num_bytes: int) -> None:
        self._memory = None
        with contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device):
            self._memory = host_zeros(num_bytes).zero_()

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return where the copy of each tensor is to be; equal tensors of the same memory have one place."""
        starts: dict[tuple[Any, ...], int] = {}
        end = _ALIGNMENT
        for tensor in tensors:
            if _region(tensor) not in starts:
                starts[_region(tensor)] = end
                end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self._preparation.join()
        if self._memory is None or self._memory.numel() < end:
            self._get(end)
        memory = self._memory
        assert memory is not None
        found = {_region(tensor): tensor for tensor in tensors}
        places = {region: tensor_in(memory, starts[region], tensor) for region, tensor in found.items()}
        return [places[_region(tensor)] for tensor in tensors]


def _region(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


@torch.no_grad()
def _copy_all(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    done = set()
    for tensor, place in zip(tensors, places, strict=True):
        if id(place) not in done:
            place.copy_(tensor, non_blocking=True)
            done.add(id(place))


def _like(tensor: Tensor, place: Tensor) -> Tensor:
    """Return a tensor with the memory of `place` that is saved as `tensor` would be."""
    return place.detach().requires_grad_(tensor.requires_grad)


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)


def _with_tensors(state: Sequence[Any], tensors: Mapping[int, Tensor]) -> list[Any]:
    """Return a copy of everything in `state`, in which `tensors` take the place of those with these identities."""
    return copy.deepcopy([*state], dict(tensors))
