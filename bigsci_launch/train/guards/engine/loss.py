"""Checks that the backward pass starts with the right gradient: a wrong scale would change every gradient alike.

AdamW hides a factor on all gradients almost completely, and no copy differs. The gradient of the mean cross-entropy by
the logits of a token is (softmax - one-hot) / tokens, so it is computed again for a few tokens of the first micro batch
and compared. The factors of gradient accumulation and of fp16's loss scale are part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from xxhash import xxh3_64_intdigest

from bigsci_launch.train.device.digest import bytes_of
from bigsci_launch.train.device.gpu import Fetched, send
from bigsci_launch.train.guards.copies import Violation
from bigsci_launch.train.guards.engine.samples import distance, spread
from bigsci_launch.train.guards.ratios import ratio
from bigsci_launch.train.parallel.loss import VocabularyParallelLoss
from bigsci_launch.train.parallel.optimizer import loss_scale

_TOLERANCE = 0.05
_TOKENS = 8


@dataclass(frozen=True, slots=True)
class _SeenTokens:
    """Logits (tokens, vocabulary / tp) in fp32 and labels (tokens) of some tokens, and the factor of their gradient."""

    loss: VocabularyParallelLoss
    scores: Tensor
    labels: Tensor
    factor: float


class LossWatch:
    """Stands between the engine and its loss function on the last stage; elsewhere it does nothing."""

    def __init__(
        self, engine: PipelineEngine, tp_group: dist.ProcessGroup | None, is_armed: Callable[[], bool]
    ) -> None:
        self._engine, self._tp_group, self._is_armed = engine, tp_group, is_armed
        self.clear()
        loss = engine.module.loss_fn
        self.is_watching = engine.is_last_stage()
        if self.is_watching and isinstance(loss, VocabularyParallelLoss):
            engine.module.loss_fn = self._standing_before(loss)

    def clear(self) -> None:
        self._seen: _SeenTokens | None = None
        self._found: Tensor | None = None
        self._labels: list[Fetched] = []

    @property
    def labels(self) -> int:
        """The digests of the labels of all micro batches, added up; 0 if none were seen."""
        return sum(xxh3_64_intdigest(bytes_of(each.read())) for each in self._labels)

    def _standing_before(self, loss: VocabularyParallelLoss) -> Callable[[Tensor, Tensor], Tensor]:
        def run(logits: Tensor, labels: Tensor) -> Tensor:
            if self._is_armed() and logits.requires_grad:
                self._labels.append(Fetched(labels))
                if self._seen is None:
                    self._look(loss, logits, labels)
            return loss(logits, labels)

        return run

    @torch.no_grad()
    def _look(self, loss: VocabularyParallelLoss, logits: Tensor, labels: Tensor) -> None:
        """Keep some tokens, from which their gradient follows."""
        rows = send(torch.tensor(spread(labels.numel(), _TOKENS)), logits.device)
        factor = ratio(loss_scale(self._engine.optimizer) or 1.0, self._engine.micro_batches * labels.numel())
        self._seen = _SeenTokens(loss, _rows(logits, rows), labels.flatten()[rows], factor)

        def see(gradient: Tensor) -> None:
            self._found = _rows(gradient, rows)

        logits.register_hook(see)  # type: ignore[no-untyped-call]

    def _exchange_log_sums(self, seen: _SeenTokens | None) -> Tensor:
        """Return the log-sum-exp of each token over the whole vocabulary, shape (8,): 0 where there are fewer tokens,
        NaN if a tp rank has seen none; a collective call of the tp ranks."""
        mine = torch.full((_TOKENS,), torch.nan if seen is None else 0.0, device=self._engine.device)
        if seen is not None:
            mine[: len(seen.labels)] = _log_sums(seen)
        if self._tp_group is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group=self._tp_group))]
        dist.all_gather(parts, mine, group=self._tp_group)
        return torch.stack(parts).logsumexp(dim=0)

    def findings(self, rank: int) -> Iterator[Violation]:
        """Yield a violation if the gradient at the logits is not what the loss implies; a collective call of the tp
        ranks, after the step: one within a checked step would hide from `bsl spy` which rank left the schedule.
        """
        if not self.is_watching:
            return
        seen = self._seen
        # Every tp rank takes part, whatever it has seen: a defect of one of them must not become a hang.
        totals = self._exchange_log_sums(seen)
        if seen is None or self._found is None or bool(totals.isnan().any()):
            text = "the loss of this step, or its gradient, did not pass through the trainer's own loss function"
            yield Violation("loss gradient", "logits", (rank,), text)
            return
        expected = seen.factor * gradient_by_logits(seen, totals[: len(seen.labels)])
        apart, factor = distance(self._found, expected)
        if apart > _TOLERANCE:
            text = f"the backward pass starts with {factor:.3g} times the gradient of the mean cross-entropy"
            yield Violation("loss gradient", "logits", (rank,), f"{text} (off by {apart:.0%})")


def _log_sums(seen: _SeenTokens) -> Tensor:
    """Return the logarithm of the sum of exponentials over this rank's part of the vocabulary, shape (tokens,)."""
    return seen.scores.masked_fill(_columns(seen) >= seen.loss.vocab_size, -torch.inf).logsumexp(dim=-1)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])[rows].float()


def gradient_by_logits(seen: _SeenTokens, log_sums: Tensor) -> Tensor:
    """Return softmax - one-hot, shape (tokens, vocabulary / tp); `log_sums` are over the whole vocabulary."""
    columns = _columns(seen)
    scores = seen.scores.masked_fill(columns >= seen.loss.vocab_size, -torch.inf)
    return (scores - log_sums.unsqueeze(-1)).exp() - (columns == seen.labels.unsqueeze(-1)).float()


def _columns(seen: _SeenTokens) -> Tensor:
    width = seen.scores.shape[-1]
    first = seen.loss.ranks.rank * width
    return torch.arange(first, first + width, device=seen.scores.device)
