"""Looks into compiled layers, where no hook runs.

In a checked step, an eighth of them are computed again without the compiler, from the same input, random numbers and
gradient of the output, and hooks see that. Training uses the compiled numbers alone, so a checked step has the losses
of any other. What the parts of a layer imply is thus compared with the gradients that the compiled code has made.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigsci_launch.train.parallel.model import TransformerLayer
from bigsci_launch.train.rank.rng import capture_generators, restore_generators

_TURNS = 8
"""Computing a layer again takes two thirds of its time in a step. So a check takes at least a twelfth of a step."""


class LayersAgain:
    """The compiled layers of a stage. `step` decides which of them are computed again: the same on all tp ranks."""

    def __init__(
        self,
        module: nn.Module,
        look: Callable[[Callable[[], None]], None],
        watched: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.step, self.is_armed = 0, False
        self._look, self._watched = look, watched
        self._prefixes = [name for name, each in module.named_modules() if getattr(each, "compiled", None) is not None]
        self._states: dict[str, dict[str, Any]] = {}
        for prefix in self._prefixes:
            layer: Any = module.get_submodule(prefix)
            if layer.dropout:
                layer.register_forward_pre_hook(partial(self._keep_states, prefix))
            layer.register_forward_hook(partial(self._see, prefix))

    def sees(self, name: str) -> bool:
        """Return whether the present step shows what the layer of the weight `name` computes."""
        prefix = self.layer_of(name)
        return not prefix or self._is_due(prefix)

    def layer_of(self, name: str) -> str:
        """Return the name of the compiled layer that holds the weight `name`, or nothing."""
        return next((prefix for prefix in self._prefixes if name.startswith(f"{prefix}.")), "")

    def _is_due(self, prefix: str) -> bool:
        turns = min(_TURNS, len(self._prefixes))
        return self._prefixes.index(prefix) % turns == zlib.crc32(b"%d" % self.step) % turns

    def _keep_states(self, prefix: str, layer: nn.Module, _: Any) -> None:
        if self.is_armed and self._is_due(prefix):
            self._states[prefix] = capture_generators()

    def _see(self, prefix: str, layer: TransformerLayer, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if self.is_armed and output.requires_grad and self._is_due(prefix):
            x, states = arguments[0].detach(), self._states.pop(prefix, None)
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._look(partial(self._compute, prefix, layer, x, gradient, states))
            )

    def _compute(
        self, prefix: str, layer: TransformerLayer, x: Tensor, gradient: Tensor, states: dict[str, Any] | None
    ) -> None:
        with self._watched(prefix):
            _compute_again(layer, x, gradient, states)


def _compute_again(layer: TransformerLayer, x: Tensor, gradient: Tensor, states: dict[str, Any] | None) -> None:
    """Compute the output of a layer, and the gradient of `x` from that of the output; no gradient of a weight."""
    later = capture_generators() if states else None
    if states:
        restore_generators(states)
    start = x.requires_grad_()
    with torch.enable_grad():
        output = layer.compute(start, layer.attention.tables(start))
    if later:
        restore_generators(later)
    torch.autograd.grad(output, start, gradient)
