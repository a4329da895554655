"""`survive` as a library, for training loops that are not `bsl train`.

    from bigsci_launch.train.survivor import Survivor

    def train(survivor):                                # called again in each generation
        dist.init_process_group()
        survivor.keep({"model": model, "optimizer": optimizer}, load=load_checkpoint)
        ddp = DistributedDataParallel(model)
        for step in survivor.steps(1000):
            for micro_batch in step:
                loss = loss_of(ddp, data[micro_batch.samples]) * micro_batch.weight
                loss.backward()
            with step.update(loss):
                optimizer.step()

    Survivor(global_batch=64, micro_batch=4).run(train)

When a rank is lost, the others leave `train`, and it is called again: in the same processes, with the state of the last
complete step, and with the same samples. It needs torch, but neither DeepSpeed nor a run file of ours.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bigsci_launch.errors import BslError
from bigsci_launch.recover.holding import Restorable, StateVersion
from bigsci_launch.train.device.gpu import computes_on_gpu, finish_queued_work
from bigsci_launch.train.rank.events import RankReport
from bigsci_launch.train.rank.rng import derive_seed
from bigsci_launch.train.survive.blocked import end_blocked_communication
from bigsci_launch.train.survive.buddies import HostGroup
from bigsci_launch.train.survive.channel import VARIABLE, Begin, Channel, wait_for_store
from bigsci_launch.train.survive.libraries import forget_everything, known_object, prepare_libraries
from bigsci_launch.train.survive.objects import KeptObjects, has_cut_tensors
from bigsci_launch.train.survive.outlive import outlive_generations
from bigsci_launch.train.survive.reducer import Reductions
from bigsci_launch.train.survive.replicas import restore_from_replicas
from bigsci_launch.train.survive.sharded import ShardedObjects
from bigsci_launch.train.survive.waits import Waits
from bigsci_launch.train.survive.words import LifeWords

__all__ = ["Survivor"]


@dataclass(frozen=True, slots=True)
class SurvivorMicroBatch:
    """Some samples of a step for this rank.

    `samples` says which: their numbers count from 0 over the whole run. The loss is the mean over them times `weight`:
    then the mean of the gradients over the ranks is that of the global batch, whatever the number of ranks. `is_last`:
    it is the last of this rank in its step, after which gradients are reduced.
    """

    samples: slice
    weight: float
    is_last: bool


class SurvivorStep:
    """A step; as an iterable, its micro-batches for this rank. `number` counts from 1."""

    def __init__(self, survivor: Survivor, number: int) -> None:
        self._survivor = survivor
        self.number = number
        self.loss: float | None = None
        """The mean of what all ranks have given to `update`."""
        self.is_done = False

    def __iter__(self) -> Iterator[SurvivorMicroBatch]:
        return self._survivor._micro_batches(self.number)

    @contextmanager
    def update(self, loss: Tensor | float = float("nan")) -> Iterator[None]:
        """Change the state in this block, and nowhere else: optimizers, schedulers, averages; a collective call.

        The block begins when all ranks have come to it, so that a step is done by all, or by none. No rank may
        communicate in it. `loss` is the sum of this rank's losses, each with its weight.
        """
        self.loss = self._survivor._begin_update(float(loss))
        yield
        self.is_done = True
        self._survivor._commit(self)


class Survivor:
    """This process among the ranks of a loop that survives.

    Args:
        global_batch: samples of a step, on all ranks together. It stays the same when ranks are lost.
        micro_batch: samples of a micro-batch. A step has `global_batch / micro_batch` of them, whatever the number of
            ranks, which may not be larger.
        seed: of the generators of Python, NumPy and torch, which are set again for each micro-batch. What dropout draws
            does not depend on the rank that draws it.

    Raises:
        BslError: the micro-batches do not fill the global batch.
    """

    def __init__(self, *, global_batch: int, micro_batch: int, seed: int = 0) -> None:
        if micro_batch < 1 or global_batch < micro_batch or global_batch % micro_batch:
            raise BslError(f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch}")
        self._size, self._micro_batch, self._seed = global_batch, micro_batch, seed
        self._train: Callable[[Survivor], None] | None = None
        self._words: LifeWords | None = None
        self._waits: Waits | None = None
        self._reductions: Reductions | None = None
        self._kept: KeptObjects | None = None
        self._nodes: Sequence[str] | None = None
        self._step = 0

    @property
    def done(self) -> int:
        """The last step that is done, or that was restored."""
        return self._step

    def run(self, train: Callable[[Survivor], None]) -> None:
        """Call `train` in each generation until it returns. Without `bsl submit` and `survive`, call it once.

        Raises:
            BslError: `bsl submit` has started this program without `survive.in_place`, so that nothing would survive.
        """
        self._train = train
        prepare_libraries()
        descriptor = os.environ.get(VARIABLE)
        if descriptor is None:
            if os.environ.get("BSL_GENERATION"):
                hint = "set survive: {in_place: true} in the run file"
                raise BslError("this program uses Survivor, but its ranks would be ended with each lost one", hint=hint)
            self._words, self._waits = LifeWords(None, None, 0), Waits(lambda: False)
            train(self)
            return
        # The first optimizer and the first backward pass would import them, in a rank that others wait for.
        import torch._dynamo
        import torch.fx.experimental.symbolic_shapes  # noqa: F401

        # A collection after each generation then looks at little: what is imported stays.
        gc.collect()
        gc.freeze()
        channel = Channel(int(descriptor), self._release)
        self._channel, self._waits = channel, Waits(channel.is_over)
        self._waits.install()
        self._reductions = Reductions(self._waits)
        outlive_generations(channel, self)
        channel.leave()

    def _release(self) -> None:
        end_blocked_communication()
        if self._reductions is not None:
            self._reductions.give_up()

    def take_part(self, begin: Begin, report: RankReport) -> str:
        """Call the loop in one generation."""
        assert self._train is not None
        self._words, self._nodes = LifeWords(self._channel, report, begin.generation), begin.nodes
        wait_for_store(begin, self._channel)
        self._train(self)
        return "finished"

    def let_go(self) -> None:
        """Leave the process groups of a generation that is over; the objects stay, as the last step has left them."""
        assert self._waits is not None
        self._waits.keep_groups()
        gc.collect()
        forget_everything(self._kept.engine if self._kept is not None else None)
        gc.collect()
        if computes_on_gpu():
            torch.cuda.empty_cache()
        if self._kept is not None:
            self._kept.rest()

    def keep(self, objects: Mapping[str, Any], load: Callable[[], int] | None = None) -> int:
        """Say what the state consists of, bring it to the newest step that any rank has, and return that step; a
        collective call, after `init_process_group` and before DistributedDataParallel.

        Args:
            objects: modules, optimizers, schedulers and others with `state_dict` and `load_state_dict`, and
                generators. Each rank has the same state of them.
            load: loads the newest checkpoint on every rank, and returns its step, or 0 if there is none. It is called
                in the first generation, and where no rank is left that has the whole state.

        Raises:
            BslError: an object cannot be kept, or there are more ranks than micro-batches.
        """
        words, waits = self._now()
        if not dist.is_initialized():
            raise BslError("torch.distributed is not initialized", hint="call survivor.keep after init_process_group")
        objects = {name: known_object(name, each) for name, each in objects.items()}
        is_cut, ranks = has_cut_tensors(objects), dist.get_world_size()
        if ranks > self._num_micro_batches or (is_cut and self._num_micro_batches % ranks):
            rule = "parameters that are cut need the same number of them on each rank; " if is_cut else ""
            raise BslError(
                f"{ranks} ranks, but a step has {self._num_micro_batches} micro-batches",
                hint=f"{rule}give a smaller micro_batch, or fewer ranks",
            )
        if self._reductions is not None:
            self._reductions.install()
        self._group = HostGroup(dist.new_group(backend="gloo"), dist.get_rank(), waits)
        words.joined()
        nodes = self._nodes or ["node"] * ranks
        kept = ShardedObjects(objects, self._group, nodes) if is_cut else KeptObjects(objects)
        if self._kept is not None:
            kept.adopt(self._kept)
        self._kept = kept
        found, was_sent = (
            kept.restore() if isinstance(kept, ShardedObjects) else restore_from_replicas(kept, self._group)
        )
        self._begin(found, was_sent, load)
        return self._step

    def _begin(self, found: Restorable, was_sent: bool, load: Callable[[], int] | None) -> None:
        words, _ = self._now()
        assert self._kept is not None
        if found.version is not None:
            self._step, source = found.version.step, self._kept.holders if was_sent else "memory"
        else:
            self._step = load() if load is not None else 0
            source = "checkpoint" if self._step else "start"
        self._kept.clear_gradients()
        self._kept.commit(found.version or StateVersion(self._step, words.generation))
        why = found.why if words.generation and found.version is None else None
        words.restored(self._step, source, why=why)
        if why is not None and dist.get_rank() == 0:
            print(f"survivor: generation {words.generation} begins after step {self._step}: {why}", flush=True)

    def steps(self, last: int) -> Iterator[SurvivorStep]:
        """Yield the steps from the one after `keep` to number `last`; a collective call of all ranks."""
        if self._kept is None:
            raise BslError("survivor.keep was not called before survivor.steps")
        while self._step < last:
            self._now()[0].begin_step(self._step + 1)
            step = SurvivorStep(self, self._step + 1)
            yield step
            if not step.is_done:
                raise BslError(f"step {step.number} was left without `with step.update():`")
        # No rank says that it has finished while another one could still be lost in the last step.
        self._meet(0.0)

    @property
    def _num_micro_batches(self) -> int:
        return self._size // self._micro_batch

    def _micro_batches(self, number: int) -> Iterator[SurvivorMicroBatch]:
        rank, ranks, all_of_step = dist.get_rank(), dist.get_world_size(), self._num_micro_batches
        first, last = (all_of_step * each // ranks for each in (rank, rank + 1))
        for index in range(first, last):
            start = (number - 1) * self._size + index * self._micro_batch
            self._seed_generators(number, index)
            samples = slice(start, start + self._micro_batch)
            yield SurvivorMicroBatch(samples, ranks / all_of_step, index == last - 1)

    def _seed_generators(self, number: int, index: int) -> None:
        derived = derive_seed(self._seed, f"step{number}/micro-batch{index}")
        random.seed(derived)
        np.random.seed(derived % 2**32)
        torch.manual_seed(derived)

    def _begin_update(self, loss: float) -> float | None:
        """Return the mean loss once every rank has its gradients."""
        words, _ = self._now()
        assert self._kept is not None
        # What an aborted communicator leaves is worth nothing: the step counts if its generation still runs after it.
        finish_queued_work()
        words.require_present()
        self._kept.settle()
        mean = self._meet(loss) / dist.get_world_size()
        self._kept.begin_update()
        return None if mean != mean else mean

    def _meet(self, number: float) -> float:
        """Return the sum of a number over all ranks; a collective call, which no rank leaves before all have come."""
        total = torch.tensor([number], dtype=torch.float64)
        self._group.wait([dist.all_reduce(total, group=self._group.group, async_op=True)])
        return float(total)

    def _commit(self, step: SurvivorStep) -> None:
        words, _ = self._now()
        assert self._kept is not None
        self._kept.commit(StateVersion(step.number, words.generation))
        self._step = step.number
        words.stepped(step.number)
        if dist.get_rank() == 0:
            words.record_step(step.loss, step.number * self._size, self._size)

    def _now(self) -> tuple[LifeWords, Waits]:
        if self._words is None or self._waits is None:
            raise BslError("this Survivor does not run", hint="call survivor.run(train), and the rest in `train`")
        return self._words, self._waits
