"""An independent check of the reduction of gradients, for every `nn.Linear` of any model.

The gradient of a linear layer's weight is the sum over all samples of g x^T, with its input x and the gradient g of its
output. For two fixed vectors of signs u and v, u^T G v is therefore the sum of (g.u)(x.v), two numbers per sample that
each rank computes while its own backward pass runs. Their mean over the data-parallel ranks must be u^T G v of the
reduced gradient G. A reduction that is left out, a wrong factor or a rank whose gradient was changed breaks this, with
shards (FSDP, ZeRO) as with copies (DDP). Hooks do nothing unless the check is armed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.loop_state import local, plain_name
from bigsci_launch.train.guards.ratios import ratio, root

Gradient = Callable[[Any], Tensor | None]
"""Returns the reduced gradient of a parameter, or None."""

_TIMES_EPSILON, _LEAST = 16.0, 2e-3
_ROWS = 8192
# Numbers this small have few digits left in 32 bits.
_SMALLEST = 1e-36


@dataclass(slots=True)
class CheckedLayer:
    """A linear layer, the signs u and v, and what this rank has seen of it in the step under way."""

    name: str
    layer: nn.Linear
    left: Tensor
    right: Tensor
    total: Tensor | None = None
    noise: Tensor | None = None
    epsilon: float = 0.0
    is_unseen: bool = False

    def clear(self) -> None:
        self.total = self.noise = None
        self.epsilon, self.is_unseen = 0.0, False


class GradientCheck:
    """The linear layers of a model, as far as one alone reads each weight."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [_checked_layer(name, layer) for name, layer in _linear_layers(model)]
        self.is_armed = False
        for checked in self._layers:
            checked.layer.register_forward_hook(self._hook(checked))

    def clear(self) -> None:
        for checked in self._layers:
            checked.clear()

    def _hook(self, checked: CheckedLayer) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def see(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if not self.is_armed or not torch.is_grad_enabled() or not output.requires_grad:
                return
            if not inputs or isinstance(output, DTensor) or isinstance(inputs[0], DTensor):
                checked.is_unseen = True
                return
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            projected, sizes = _project(x, checked.right)
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _add(checked, gradient, projected, sizes, x.dtype)
            )

        return see

    @torch.no_grad()
    def find_wrong(
        self, gradient: Gradient, group: dist.ProcessGroup | None, rank: int, factor: float
    ) -> Iterator[Violation]:
        """Find layers whose reduced gradient is not `factor` times the sum over the ranks of `group`; collective."""
        if not self._layers:
            return
        seen = torch.stack([_seen(checked) for checked in self._layers])
        yield from _not_finite(self._layers, seen, rank)
        epsilon = max(checked.epsilon for checked in self._layers)
        dist.all_reduce(seen, group=group)
        wrong = []
        found = zip(self._layers, seen.tolist(), _projections(self._layers, gradient), strict=True)
        for checked, (total, noise, unseen), (projection, size) in found:
            expected, scale = factor * total, factor * root(max(0.0, noise)) + size
            tolerance = max(_TIMES_EPSILON * epsilon, _LEAST) * scale + _SMALLEST
            is_known = not unseen and math.isfinite(expected) and math.isfinite(projection)
            if is_known and abs(projection - expected) > tolerance:
                wrong.append((f"{checked.name}.weight", ratio(projection, expected)))
        relation = _relation([ratio for _, ratio in wrong])
        text = f"its gradient {relation} what the backward passes of all data-parallel ranks add up to"
        yield from (Violation("gradient reduction", name, (rank,), text) for name, _ in wrong)


def _relation(ratios: Sequence[float]) -> str:
    """A factor, if several layers have the same; a projection says nothing about the whole otherwise."""
    middle = sorted(ratios)[len(ratios) // 2] if ratios else math.inf
    has_factor = sum(abs(ratio(each, middle) - 1) < 0.05 for each in ratios) > len(ratios) / 2
    return f"is {middle:.3g} times" if has_factor and len(ratios) > 1 else "does not follow from"


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers whose weight is trained and that no other module reads."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and uses[id(module.weight)] == 1:
            yield plain_name(name), module


def _checked_layer(name: str, layer: nn.Linear) -> CheckedLayer:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    device = local(layer.weight).device
    left, right = (
        (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float().to(device)
        for size in (layer.out_features, layer.in_features)
    )
    return CheckedLayer(name, layer, left, right)


@torch.no_grad()
def _project(rows: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's product with `signs`, and its squared length in 64 bits: squares may be too small for 32."""
    pieces = [piece.float() for piece in torch.split(rows, _ROWS)]
    lengths = [torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64) for piece in pieces]
    return torch.cat([piece @ signs for piece in pieces]), torch.cat(lengths).square()


@torch.no_grad()
def _add(checked: CheckedLayer, gradient: Tensor, projected: Tensor, sizes: Tensor, dtype: torch.dtype) -> None:
    mine, mine_sizes = _project(gradient.reshape(-1, gradient.shape[-1]), checked.left)
    total, noise = (mine.double() * projected).sum(), (mine_sizes * sizes).sum()
    checked.total = total if checked.total is None else checked.total + total
    checked.noise = noise if checked.noise is None else checked.noise + noise
    checked.epsilon = max(checked.epsilon, torch.finfo(gradient.dtype).eps, torch.finfo(dtype).eps)


def _seen(checked: CheckedLayer) -> Tensor:
    """Return the sum, its squared noise and whether it is unknown, as three float64."""
    zero = checked.left.new_zeros((), dtype=torch.float64)
    unknown = zero + float(checked.is_unseen)
    total, noise = checked.total, checked.noise
    return torch.stack([zero if total is None else total, zero if noise is None else noise, unknown])


def _not_finite(layers: Sequence[CheckedLayer], seen: Tensor, rank: int) -> Iterator[Violation]:
    """Find layers whose own backward pass on this rank, before any reduction, gave what is not finite."""
    for checked, is_finite in zip(layers, torch.isfinite(seen).all(dim=1).tolist(), strict=True):
        if not is_finite:
            text = "its backward pass on this rank gave non-finite values, before any reduction"
            yield Violation("non-finite", f"{checked.name}.weight", (rank,), text)


def _projections(layers: Sequence[CheckedLayer], gradient: Gradient) -> list[tuple[float, float]]:
    """Return u^T G v and the size of G for each layer; collective where G is sharded."""
    found = []
    for checked in layers:
        reduced = gradient(checked.layer.weight)
        if reduced is None:
            found.append(checked.left.new_zeros(2, dtype=torch.float64))
            continue
        found.append(_projection(reduced, checked))
    return [(projection, root(max(0.0, square))) for projection, square in torch.stack(found).tolist()]


def _projection(reduced: Tensor, checked: CheckedLayer) -> Tensor:
    if not isinstance(reduced, DTensor):
        matrix = reduced.detach().float()
        size = torch.linalg.vector_norm(matrix, dtype=torch.float64)
        return torch.stack([(checked.left @ matrix @ checked.right).double(), size.square()])
    mesh, everywhere = reduced.device_mesh, [Replicate()] * reduced.device_mesh.ndim
    left, right = (
        DTensor.from_local(signs, mesh, everywhere, run_check=False)
        for signs in (checked.left[None, :], checked.right[:, None])
    )
    shards: Any = reduced.detach().float()
    whole = [(left @ shards @ right).full_tensor().sum(), shards.double().square().sum().full_tensor()]
    return torch.stack([each.double() for each in whole])


def group_of(groups: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of the data-parallel ranks, or None for the world."""
    group: Any = groups.get("dp")
    found: dist.ProcessGroup | None = group.get_group() if hasattr(group, "get_group") else group
    return found
