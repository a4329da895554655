"""Checks that each weight has the gradient that its inputs and the gradient of its outputs imply.

For y = x W^T, the gradient of W is dy^T x. Multiplied by a few vectors u of signs it is dy^T (x u), which costs next to
nothing: x u has a few numbers per token, and it is known in the forward pass. So a gradient that is scaled, lost or
counted twice between a layer's backward pass and the reduction over ranks is named, on every rank by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from bigsci_launch.train.device.digest import bytes_of
from bigsci_launch.train.device.gpu import Fetched
from bigsci_launch.train.guards.copies import TIED, Violation
from bigsci_launch.train.guards.engine.again import LayersAgain
from bigsci_launch.train.guards.engine.samples import VECTORS, compare, distance_of, signs
from bigsci_launch.train.parallel.fp8 import GRADIENT, INPUT, as_multiplied
from bigsci_launch.train.parallel.optimizer import local_gradient
from bigsci_launch.train.parallel.tensor import (
    ColumnParallelLinear,
    Product,
    RowParallelLinear,
    VocabularyParallelTable,
)

# What 16 bits lose in the products; a missing or doubled part changes a gradient by half or more.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.15, torch.float16: 0.1}
_TINY = 1e-30
_Layer = ColumnParallelLinear | RowParallelLinear | VocabularyParallelTable


class LayerWatch:
    """Looks at the products of linear layers and at the tables of a stage, while it is armed."""

    def __init__(self, engine: PipelineEngine, look: Callable[[Callable[[], None]], None]) -> None:
        self._engine, self._is_armed = engine, False
        self._products: list[tuple[str, _Layer, Product, Product]] = []
        module = engine.module
        self.again = LayersAgain(module, look, self._watched)
        self._weights: dict[str, nn.Parameter] = {}
        self._signs: dict[str, Tensor] = {}
        self.clear()
        for prefix, layer in module.named_modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                self._watch_product(f"{prefix}.weight", layer)
            elif isinstance(layer, VocabularyParallelTable):
                self._watch_table(f"{prefix}.weight", layer)

    @property
    def is_armed(self) -> bool:
        return self._is_armed

    @is_armed.setter
    def is_armed(self, is_armed: bool) -> None:
        """Arm or disarm it. It leaves no trace in compiled layers, which are computed again to be seen."""
        self._is_armed = self.again.is_armed = is_armed
        self._watch_products("", is_armed=is_armed)

    def _watch_products(self, prefix: str, *, is_armed: bool) -> None:
        for name, layer, plain, watched in self._products:
            if self.again.layer_of(name) == prefix:
                layer.product = watched if is_armed else plain

    @contextmanager
    def _watched(self, prefix: str) -> Iterator[None]:
        """Look at the products of one compiled layer inside the `with` block."""
        self._watch_products(prefix, is_armed=True)
        try:
            yield
        finally:
            self._watch_products(prefix, is_armed=False)

    def clear(self) -> None:
        self._implied: dict[str, Tensor] = {}
        self._num_seen: Counter[str] = Counter()
        self._tokens: list[Fetched] = []

    @property
    def tokens(self) -> int:
        """The digests of the tokens of all micro batches, added up."""
        return sum(xxh3_64_intdigest(bytes_of(each.read())) for each in self._tokens)

    def _watch_product(self, name: str, layer: _Layer) -> None:
        self._know(name, layer.weight)
        product = layer.product

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            output = product(x, weight, bias)
            self._see_product(name, x, output, product)
            return output

        self._products.append((name, layer, product, multiply))

    def _watch_table(self, name: str, table: VocabularyParallelTable) -> None:
        self._watch_product(name, table)
        rows_here = table.rows_here

        def run(tokens: Tensor) -> Tensor:
            output = rows_here(tokens)
            self._see_rows(name, table, tokens, output)
            return output

        table.rows_here = run  # type: ignore[method-assign]

    def _know(self, name: str, weight: nn.Parameter) -> None:
        self._weights[name] = weight

    def _signs_of(self, name: str) -> Tensor:
        if name not in self._signs:
            weight = self._weights[name]
            self._signs[name] = signs(weight.shape[1], weight, len(self._signs))
        return self._signs[name]

    def _see_product(self, name: str, x: Tensor, output: Tensor, product: Product) -> None:
        if not self._is_armed or not output.requires_grad:
            return
        weight = self._weights[name]
        with torch.no_grad():
            projected = (as_multiplied(product, x, weight, INPUT) @ self._signs_of(name)).reshape(-1, VECTORS)

        def see(gradient: Tensor) -> None:
            seen = as_multiplied(product, gradient, weight, GRADIENT)
            self._add(name, (seen.reshape(len(projected), -1).T @ projected).float())

        output.register_hook(see)  # type: ignore[no-untyped-call]

    def _see_rows(self, name: str, table: VocabularyParallelTable, tokens: Tensor, output: Tensor) -> None:
        if not self._is_armed or not output.requires_grad:
            return

        self._tokens.append(Fetched(tokens))

        def see(gradient: Tensor) -> None:
            projected = (gradient @ self._signs_of(name)).reshape(-1, VECTORS).float()
            rows = tokens.reshape(-1) - table.first_token
            is_elsewhere = (rows < 0) | (rows >= len(table.weight))
            total = torch.zeros(len(table.weight), VECTORS, device=projected.device)
            projected = projected.masked_fill(is_elsewhere.unsqueeze(1), 0.0)
            self._add(name, total.index_add_(0, rows.masked_fill(is_elsewhere, 0), projected))

        output.register_hook(see)  # type: ignore[no-untyped-call]

    def _num_uses(self, name: str) -> int:
        """Return how often a micro batch uses a weight: a tied table begins the first stage and ends the last one."""
        if not name.startswith(TIED):
            return 1
        return int(self._engine.is_first_stage()) + int(self._engine.is_last_stage())

    def _add(self, name: str, part: Tensor) -> None:
        self._num_seen[name] += 1
        self._implied[name] = self._implied[name] + part if name in self._implied else part

    def _found(self, name: str) -> Tensor:
        """Return the products of the accumulated gradient of a weight."""
        gradient = local_gradient(self._weights[name])
        if gradient is None:
            return torch.zeros_like(self._implied[name])
        return gradient.float() @ self._signs_of(name).float()

    @torch.no_grad()
    def findings(self, rank: int, is_wanted: Callable[[str], bool]) -> Iterator[Violation]:
        """Find wanted weights whose gradient, as accumulated until now, is not what this step's layers imply."""
        seen: dict[str, Tensor] = {}
        for name in self._weights:
            if not is_wanted(name) or not self.again.sees(name):
                continue
            if self._num_seen[name] != (due := self._engine.micro_batches * self._num_uses(name)):
                text = f"its layer made a gradient {self._num_seen[name]} times in this step, not {due} times"
                yield Violation("layer gradients", name, (rank,), text)
                continue
            seen[name] = compare(self._found(name), self._implied[name])
        # All are read at once: each read waits for the device.
        for name, numbers in zip(seen, torch.stack([*seen.values()]).tolist() if seen else (), strict=True):
            apart, factor = distance_of(*numbers)
            _, size, _, _ = numbers
            if apart > _TOLERANCE[self._weights[name].dtype] and size > _TINY:
                text = f"its gradient is {factor:.3g} times what its layer implies (off by {apart:.0%})"
                yield Violation("layer gradients", name, (rank,), text)
