"""Checks that each weight has the gradient that its inputs and the gradient of its outputs imply.

For y = x W^T, the gradient of W is dy^T x. Multiplied by a few vectors u of signs it is dy^T (x u), which costs next to
nothing: x u has a few numbers per token, and it is known in the forward pass. So a gradient that is scaled, lost or
counted twice between a layer's backward pass and the reduction over ranks is named, on every rank by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from bigsci_launch.train.device.digest import bytes_of
from bigsci_launch.train.guards.copies import TIED, Violation
from bigsci_launch.train.guards.engine.samples import VECTORS, distance, signs
from bigsci_launch.train.guards.engine.state import local_gradient
from bigsci_launch.train.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabularyParallelTable

# What 16 bits lose in the products; a missing or doubled part changes a gradient by half or more.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15, torch.float16: 0.1}
_TINY = 1e-30


class LayerWatch:
    """Hooks into the linear layers and tables of a stage; the hooks do nothing unless `is_armed()`."""

    def __init__(self, engine: PipelineEngine, is_armed: Callable[[], bool]) -> None:
        self._engine, self._is_armed = engine, is_armed
        module = engine.module
        self._weights: dict[str, nn.Parameter] = {}
        self._signs: dict[str, Tensor] = {}
        self.clear()
        for prefix, layer in module.named_modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                self._watch_linear(f"{prefix}.weight", layer)
            elif isinstance(layer, VocabularyParallelTable):
                self._watch_table(f"{prefix}.weight", layer)

    def clear(self) -> None:
        """Forget the last step."""
        self._implied: dict[str, Tensor] = {}
        self._num_seen: Counter[str] = Counter()
        self.tokens = 0

    def _watch_linear(self, name: str, layer: Any) -> None:
        self._know(name, layer.weight)

        def look(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            self._see_product(name, arguments[0], output)

        layer.register_forward_hook(look)

    def _watch_table(self, name: str, table: VocabularyParallelTable) -> None:
        self._know(name, table.weight)
        embed, logits = table.embed, table.logits

        def run_embed(tokens: Tensor) -> Tensor:
            output = embed(tokens)
            self._see_rows(name, table, tokens, output)
            return output

        def run_logits(x: Tensor) -> Tensor:
            output = logits(x)
            self._see_product(name, x, output)
            return output

        table.embed, table.logits = run_embed, run_logits  # type: ignore[method-assign]

    def _know(self, name: str, weight: nn.Parameter) -> None:
        self._weights[name] = weight

    def _signs_of(self, name: str) -> Tensor:
        if name not in self._signs:
            weight = self._weights[name]
            self._signs[name] = signs(weight.shape[1], weight, len(self._signs))
        return self._signs[name]

    def _see_product(self, name: str, x: Tensor, output: Tensor) -> None:
        if not self._is_armed() or not output.requires_grad:
            return
        with torch.no_grad():
            projected = (x @ self._signs_of(name)).reshape(-1, VECTORS)

        def see(gradient: Tensor) -> None:
            self._add(name, (gradient.reshape(len(projected), -1).T @ projected).float())

        output.register_hook(see)  # type: ignore[no-untyped-call]

    def _see_rows(self, name: str, table: VocabularyParallelTable, tokens: Tensor, output: Tensor) -> None:
        if not self._is_armed() or not output.requires_grad:
            return

        self.tokens += xxh3_64_intdigest(bytes_of(tokens))

        def see(gradient: Tensor) -> None:
            projected = (gradient @ self._signs_of(name)).reshape(-1, VECTORS).float()
            rows = tokens.reshape(-1) - table.first_token
            is_here = (rows >= 0) & (rows < len(table.weight))
            total = torch.zeros(len(table.weight), VECTORS, device=projected.device)
            self._add(name, total.index_add_(0, rows[is_here], projected[is_here]))

        output.register_hook(see)  # type: ignore[no-untyped-call]

    def _num_uses(self, name: str) -> int:
        """Return how often a micro batch uses a weight: a tied table begins the first stage and ends the last one."""
        if not name.startswith(TIED):
            return 1
        return int(self._engine.is_first_stage()) + int(self._engine.is_last_stage())

    def _add(self, name: str, part: Tensor) -> None:
        self._num_seen[name] += 1
        self._implied[name] = self._implied[name] + part if name in self._implied else part

    @torch.no_grad()
    def findings(self, rank: int, is_wanted: Callable[[str], bool]) -> Iterator[Violation]:
        """Find wanted weights whose gradient, as accumulated until now, is not what this step's layers imply."""
        for name, weight in self._weights.items():
            if not is_wanted(name):
                continue
            if self._num_seen[name] != (due := self._engine.micro_batches * self._num_uses(name)):
                text = f"its layer made a gradient {self._num_seen[name]} times in this step, not {due} times"
                yield Violation("layer gradients", name, (rank,), text)
                continue
            implied = self._implied[name]
            gradient = local_gradient(weight)
            found = torch.zeros_like(implied) if gradient is None else gradient.float() @ self._signs_of(name).float()
            apart, factor = distance(found, implied)
            if apart > _TOLERANCE[weight.dtype] and float(implied.norm()) > _TINY:
                text = f"its gradient is {factor:.3g} times what its layer implies (off by {apart:.0%})"
                yield Violation("layer gradients", name, (rank,), text)
