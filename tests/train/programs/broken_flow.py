"""Runs `several` with data or gradients broken from step `STEP` on; run.name says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import several

STEP = 4


def replay(training: Any) -> None:
    """Read the first samples of the run again, on all ranks."""
    step = training.setup.batches.step
    training.setup.batches.step = lambda consumed, count: step(0, count)


def share_samples(training: Any) -> None:
    """Let the second replica read the samples of the first."""
    training.setup.batches._share = replace(training.setup.batches._share, dp_rank=0)


def shift_labels(training: Any) -> None:
    """Move the labels by one token, on the last stage of the first replica."""
    step = training.setup.batches.step

    def shifted(consumed: int, count: int) -> Iterator[Any]:
        for tokens, labels in step(consumed, count):
            yield tokens, labels.roll(1, dims=1)

    if training.setup.coordinate.pp_rank == 1 and training.setup.coordinate.dp_rank == 0:
        training.setup.batches.step = shifted


def scale_loss(training: Any) -> None:
    """Make every gradient eight times as large, on all ranks."""
    scale = training.engine.optimizer.scale_if_loss
    training.engine.optimizer.scale_if_loss = lambda loss: 8 * scale(loss)


def scale_weight(training: Any) -> None:
    """Make the gradient of one matrix eight times as large, on rank 1."""
    if training.setup.identity.rank == 1:
        weights = dict(training.engine.module.named_parameters())
        next(each for name, each in weights.items() if name.endswith("mlp.up.weight")).register_hook(lambda g: 8 * g)


def skip_reduction(training: Any) -> None:
    """Do not average gradients over the replicas."""
    training.engine.buffered_allreduce_fallback = lambda *args, **kwargs: None


def skip_clipping(training: Any) -> None:
    """Do not clip."""
    training.engine.optimizer.clip_grad = 0.0


def change_epsilon(training: Any) -> None:
    """Let the norms of rank 1 use another epsilon."""
    for module in training.engine.module.modules():
        if training.setup.identity.rank == 1 and hasattr(module, "eps"):
            module.eps = 0.1


def replace_loss(training: Any) -> None:
    """Compute the loss of rank 1 by a function that no guard knows."""
    if training.setup.identity.rank == 1:
        from bigsci_launch.train.parallel.loss import VocabularyParallelLoss
        from bigsci_launch.train.parallel.tensor import ColumnParallelLinear

        module = training.engine.module
        ranks = next(each.ranks for each in module.modules() if isinstance(each, ColumnParallelLinear))
        module.loss_fn = VocabularyParallelLoss(training.setup.config.model.vocab_size, ranks)


def share_masks(training: Any) -> None:
    """Let all ranks draw the same dropout masks."""
    import torch

    torch.manual_seed(7)


BREAKS: dict[str, Callable[[Any], None]] = {
    "replayed": replay,
    "same samples": share_samples,
    "shifted labels": shift_labels,
    "scaled loss": scale_loss,
    "scaled weight": scale_weight,
    "unreduced": skip_reduction,
    "unclipped": skip_clipping,
    "other epsilon": change_epsilon,
    "shared masks": share_masks,
    "unknown loss": replace_loss,
}


def stand_in() -> None:
    """Break step `STEP`."""
    from bigsci_launch.train import loop

    step = loop._step

    def run(training: Any, progress: Any) -> Any:
        name = training.setup.config.run.name.replace("-", " ")
        if progress.step + 1 == STEP and name in BREAKS:
            BREAKS[name](training)
        return step(training, progress)

    loop._step = run


if __name__ == "__main__":
    several.main(stand_in)
