"""The guards as a library, for training loops that are not `bsl train`.

    from bigsci_launch.train.attach import Guards

    guards = Guards(model, optimizer)
    for tokens in batches:
        guards.batch(tokens)        # once per micro-batch
        loss = ...; loss.backward()
        guards.gradients()          # before clipping and before the optimizer's step
        optimizer.step(); optimizer.zero_grad()
        guards.step(loss)           # raises GuardError if anything is wrong

The room needs torch, but neither DeepSpeed nor a run file. A loop may be plain DDP, FSDP2, accelerate or a DeepSpeed
engine.
"""

from bigsci_launch.errors import GuardError
from bigsci_launch.train.attach.guards import LoopGuards as Guards

__all__ = ["GuardError", "Guards"]
