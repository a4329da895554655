"""The injections of the held-out cases (`cases_heldout.py`), as patches of DeepSpeed, torch or a built module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from silent.defects import between
from silent.place import Act, Place, patch

Original = Callable[[], Any]


def in_instruction(place: Place, instruction: str, act: Callable[[Any, int, Original], None]) -> None:
    """Replace an instruction that works on a buffer by `act(engine, buffer, original)` while the defect acts."""
    from deepspeed.runtime.pipe import schedule

    kind = getattr(schedule, instruction)
    original = place.engine._INSTRUCTION_MAP[kind]

    def run(engine: Any, buffer_id: int) -> None:
        if place.is_on and engine.module.training:
            act(engine, buffer_id, lambda: original(engine, buffer_id))
        else:
            original(engine, buffer_id)

    place.engine._INSTRUCTION_MAP = {**place.engine._INSTRUCTION_MAP, kind: run}


class _Counter:
    """Counts the micro batches of a step."""

    def __init__(self, place: Place) -> None:
        self._place, self._step, self.number = place, -1, 0

    def next(self) -> int:
        """Return the number of this micro batch, from 1."""
        self.number = 1 if self._step != self._place.step else self.number + 1
        self._step = self._place.step
        return self.number


# --- micro batches


def repeat_micro_batch(place: Place) -> None:
    """Fill the buffers of each micro batch with the first one of the step."""
    counter, first = _Counter(place), {}

    def act(engine: Any, buffer_id: int, original: Original) -> None:
        original()
        is_first = counter.next() == 1
        for key in ("inputs", "labels"):
            if is_first:
                first[key] = engine.pipe_buffers[key][buffer_id]
            else:
                engine.pipe_buffers[key][buffer_id] = first[key].clone()

    in_instruction(place, "LoadMicroBatch", act)


def leave_out_backward(place: Place) -> None:
    """Leave out the backward pass of the last micro batch of a step, and free its buffers."""
    counter = _Counter(place)

    def act(engine: Any, buffer_id: int, original: Original) -> None:
        if counter.next() < engine.micro_batches:
            original()
            return
        for key in ("output_tensors", "outputs"):
            engine.pipe_buffers[key][buffer_id] = None

    in_instruction(place, "BackwardPass", act)


def repeat_activations(place: Place) -> None:
    """Give the second micro batch of a step the activations that were received for the first."""
    counter, first = _Counter(place), []

    def act(engine: Any, buffer_id: int, original: Original) -> None:
        original()
        number = counter.next()
        received = engine.pipe_buffers["inputs"]
        if number == 1:
            first[:] = [received[buffer_id].detach().clone()]
        elif number == 2:
            received[buffer_id] = first[0].clone().requires_grad_()

    in_instruction(place, "RecvActivation", act)


def keep_gradients(place: Place) -> None:
    """Add what a step accumulated to the next one: put it back into the buffers, as if they had not been cleared."""
    optimizer, kept = place.engine.optimizer, []
    original = optimizer.clear_hp_grads

    def clear() -> None:
        # The first of two calls: the engine clears what the optimizer has cleared.
        if place.step == place.at - 1 and not kept:
            kept[:] = [flat.clone() for flat in optimizer.fp32_groups_gradients_flat]
        original()

    def act() -> None:
        for flat, old in zip(optimizer.fp32_groups_gradients_flat, kept, strict=True):
            flat.copy_(old)

    optimizer.clear_hp_grads = clear
    between(place, act)


# --- the model


def mask_labels(place: Place) -> None:
    """Take the mean over the first half of each sequence."""
    module = place.engine.module
    original = module.loss_fn

    def loss(logits: Any, labels: Any) -> Any:
        if not place.is_on:
            return original(logits, labels)
        half = labels.shape[1] // 2
        return original(logits[:, :half], labels[:, :half])

    module.loss_fn = loss


def change_epsilon(place: Place) -> None:
    def act() -> None:
        for module in place.engine.module.modules():
            if hasattr(module, "eps"):
                module.eps = 0.1

    between(place, act)


def hold_in_evaluation(place: Place) -> None:
    """Let one transformer layer stay in evaluation mode, whatever it is told."""

    def act() -> None:
        layer = next(each for each in place.engine.module.modules() if type(each).__name__ == "TransformerLayer")
        layer.eval()
        layer.train = lambda mode=True: layer

    between(place, act)


def lose_tie(place: Place) -> None:
    """Let the head compute with a frozen copy of the embedding."""

    def act() -> None:
        import torch

        functions = place.engine.module.forward_funcs
        head = functions[-1]
        apart = copy.copy(head.args[0])
        for name in [name for name in vars(apart) if hasattr(type(apart), name)]:
            delattr(apart, name)  # a method wrapped in this module alone, which would lead back to the original
        apart._parameters = {"weight": torch.nn.Parameter(apart.weight.detach().clone(), requires_grad=False)}
        functions[-1] = partial(head.func, apart)

    between(place, act)


def change_rotary_base(place: Place) -> None:
    from bigsci_launch.train.parallel import positions

    def act() -> None:
        place.undo.callback(positions.rotary_angles.cache_clear)
        patch(place.undo, positions, "_BASE", 500_000.0)
        positions.rotary_angles.cache_clear()

    between(place, act)


def look_ahead(place: Place) -> None:
    """Let queries see the keys after them."""
    import torch.nn.functional

    original = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **({**kwargs, "is_causal": False} if place.is_on else kwargs))

    patch(place.undo, torch.nn.functional, "scaled_dot_product_attention", attention)


# --- the optimizer


def be_late(place: Place) -> None:
    """Use the learning rate of the step before."""
    from bigsci_launch.train.steps.schedule import LearningRate

    original = LearningRate.at

    def at(self: LearningRate, step: int) -> float:
        return original(self, step - 1 if place.is_here and step >= place.at else step)

    patch(place.undo, LearningRate, "at", at)


def lose_shard(place: Place) -> None:
    """Keep the old copies of the weights that other ranks have updated."""
    from deepspeed import comm
    from deepspeed.runtime import bf16_optimizer

    original = bf16_optimizer.all_gather_dp_groups

    def gather(*args: Any, **kwargs: Any) -> None:
        if not place.is_on:
            original(*args, **kwargs)
            return
        shards = [
            shard
            for shards, group in zip(kwargs["partitioned_param_groups"], kwargs["dp_process_group"], strict=True)
            for rank, shard in enumerate(shards)
            if rank != comm.get_rank(group=group)
        ]
        old = [shard.detach().clone() for shard in shards]
        original(*args, **kwargs)
        for shard, before in zip(shards, old, strict=True):
            shard.data.copy_(before)

    patch(place.undo, bf16_optimizer, "all_gather_dp_groups", gather)


def clip_by_own_norm(place: Place) -> None:
    """Take the norm of this rank's gradients for that of all."""
    from deepspeed.runtime import bf16_optimizer

    original = bf16_optimizer.get_global_norm_of_tensors

    def norm(*args: Any, **kwargs: Any) -> Any:
        import torch

        total = original(*args, **kwargs)
        if not place.is_on:
            return total
        return torch.stack([each.float().norm() for each in kwargs["input_tensors"]]).norm().to(total.dtype)

    patch(place.undo, bf16_optimizer, "get_global_norm_of_tensors", norm)


HELD_OUT: dict[str, Act] = {
    "micro batch twice": repeat_micro_batch,
    "backward pass left out": leave_out_backward,
    "stale activations": repeat_activations,
    "gradients kept": keep_gradients,
    "half of the labels masked": mask_labels,
    "norm epsilon": change_epsilon,
    "layer in evaluation mode": hold_in_evaluation,
    "tie lost": lose_tie,
    "other rotary base": change_rotary_base,
    "not causal": look_ahead,
    "late schedule": be_late,
    "shard not gathered": lose_shard,
    "own norm": clip_by_own_norm,
}
