"""The defects, as patches of a running `bsl train`; each acts on chosen ranks from a chosen step on.

Places that belong to DeepSpeed or torch are patched where they exist, so that a check of the trainer cannot know them:

- between two steps: the engine is told the batch size before anything else of a step;
- inside AdamW: its `step`;
- on the way of the gradients: hooks of parameters, and the instructions of the engine's schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from silent.defects_data import DATA, inject_data
from silent.place import Act, Place, patch


def inject(spec: Mapping[str, Any], rank: int, undo: ExitStack) -> None:
    """Prepare the defect of `spec` for the training that this process starts next."""
    if not spec:
        return
    from bigsci_launch.train.state import checkpoint
    from silent.defects_heldout import HELD_OUT

    ranks = spec["ranks"]
    is_here = not ranks or rank in ranks
    options = spec.get("options", {})
    if spec["defect"] in DATA:
        inject_data(spec, is_here, undo)
        return
    original = checkpoint.build_engine
    act = {**DEFECTS, **HELD_OUT}[spec["defect"]]

    def build(*args: Any, **kwargs: Any) -> Any:
        engine = original(*args, **kwargs)
        act(Place(engine, is_here, spec["at"], options, undo))
        return engine

    patch(undo, checkpoint, "build_engine", build)


# --- state, between steps


def between(place: Place, act: Callable[[], None], *, is_once: bool = True) -> None:
    """Call `act` between the step before `place.at` and that step; in every later gap as well unless `is_once`."""
    original = place.engine.set_train_batch_size

    def run(*args: Any, **kwargs: Any) -> Any:
        if place.is_here and (place.step == place.at if is_once else place.step >= place.at):
            import torch

            with torch.no_grad():
                act()
        return original(*args, **kwargs)

    place.engine.set_train_batch_size = run


def states(place: Place) -> list[tuple[Any, dict[str, Any]]]:
    """The fp32 masters of this rank with AdamW's state of each."""
    return list(place.adam.state.items())


def change_moment(place: Place) -> None:
    """Change exp_avg or exp_avg_sq (`key`): multiplied by `factor`, or one element set, or one bit flipped."""
    options = place.options

    def act() -> None:
        for _, state in states(place):
            moment = state[options["key"]]
            if "factor" in options:
                moment.mul_(options["factor"])
            else:
                change_element(moment, options)
                return

    between(place, act)


def change_master(place: Place) -> None:
    """Change fp32 masters so little that the rounded weights stay the same: one bit, or the low bits of all."""

    def act() -> None:
        import torch

        for master, _ in states(place):
            bits = master.data.view(torch.int32).view(-1)
            if place.options.get("all"):
                bits.bitwise_xor_(1 << 6)
            else:
                bits[7] ^= 1 << 6
                return

    between(place, act)


def change_element(tensor: Any, options: Mapping[str, Any]) -> None:
    """Set the largest element of a tensor to `value`, or flip bit `bit` of it."""
    import torch

    flat = tensor.view(-1)
    index = int(flat.abs().argmax())
    if "value" in options:
        flat[index] = options["value"]
    else:
        flat.view(torch.int32)[index] ^= 1 << options["bit"]


def reset_adam_step(place: Place) -> None:
    """Let AdamW's bias correction start over."""

    def act() -> None:
        for _, state in states(place):
            state["step"] = state["step"] * 0

    between(place, act)


def change_groups(place: Place) -> None:
    """Change a setting of AdamW's groups, as a wrong restore would: `key` to `value`, or times `factor`."""
    options = place.options

    def act() -> None:
        for group in place.engine.optimizer.param_groups:
            group[options["key"]] = (
                options["value"] if "value" in options else group[options["key"]] * options["factor"]
            )

    between(place, act)


def change_weight(place: Place) -> None:
    """Change a parameter and its master alike (`name` ends its name): what rounding or a wrong reduction would do."""
    from bigsci_launch.train.guards.engine.state import partitions

    options = place.options

    def act() -> None:
        found = [name for name, _ in place.engine.module.named_parameters() if name.endswith(options["name"])]
        for part in partitions(place.engine.optimizer):
            for name in set(found) & part.slices.keys():
                start, size = part.slices[name]
                mine = slice(start + int(options.get("first", 0)), start + size)
                for flat in (part.master.data, part.weights.data):
                    flat[mine] = flat[mine] * options.get("factor", 0.0) + options.get("plus", 0.0)

    between(place, act)


def change_copy(place: Place) -> None:
    """Change the weights of this rank alone, not their masters: one bit."""

    def act() -> None:
        import torch

        weight = next(place.engine.module.parameters()).data
        weight.view(torch.int16 if weight.element_size() == 2 else torch.int32).view(-1)[5] ^= 1

    between(place, act)


def poison_weight(place: Place) -> None:
    """Set one weight to `value` in the copies of all ranks and in the masters."""

    def act() -> None:
        weight = next(place.engine.module.parameters()).data
        weight.view(-1)[5] = place.options["value"]
        if place.options.get("master"):
            states(place)[0][0].data[5] = place.options["value"]

    between(place, act)


def reseed(place: Place) -> None:
    """Seed torch's generator again, after the check of what was loaded."""

    def act() -> None:
        import torch

        torch.manual_seed(99)

    between(place, act)


# --- inside of AdamW


def in_adam(place: Place, step: Callable[[Callable[[], Any]], Any]) -> None:
    """Replace AdamW's step by `step(original)` while the defect acts."""
    original = place.adam.step

    def run(*args: Any, **kwargs: Any) -> Any:
        return step(lambda: original(*args, **kwargs)) if place.is_on else original(*args, **kwargs)

    place.adam.step = run


def scale_rate(place: Place) -> None:
    """Update with another learning rate than the groups show before and after."""

    def step(original: Callable[[], Any]) -> Any:
        rates = [group["lr"] for group in place.adam.param_groups]
        for group in place.adam.param_groups:
            group["lr"] = group["lr"] * place.options["factor"]
        try:
            return original()
        finally:
            for group, rate in zip(place.adam.param_groups, rates, strict=True):
                group["lr"] = rate

    in_adam(place, step)


def decay_twice(place: Place) -> None:
    """Decay the weights again after the update."""

    def step(original: Callable[[], Any]) -> Any:
        result = original()
        for group in place.adam.param_groups:
            for master in group["params"]:
                master.data.mul_(1 - 10 * group["lr"] * group["weight_decay"])
        return result

    in_adam(place, step)


def leave_out_update(place: Place) -> None:
    """Do not update."""
    in_adam(place, lambda original: None)


def swap_moments_sign(place: Place) -> None:
    """Update in the wrong direction: the gradients reach AdamW with the other sign."""

    def step(original: Callable[[], Any]) -> Any:
        for group in place.adam.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    master.grad.neg_()
        return original()

    in_adam(place, step)


# --- gradients


def hook_gradients(place: Place, change: Callable[[Any], Any]) -> None:
    """Change the gradient of parameters (those whose name ends with `name`; all without it) in the backward pass."""
    wanted = place.options.get("name", "")
    for name, parameter in place.engine.module.named_parameters():
        if name.endswith(wanted):
            parameter.register_hook(lambda gradient: change(gradient) if place.is_on else None)


def scale_gradients(place: Place) -> None:
    hook_gradients(place, lambda gradient: gradient * place.options["factor"])


def scale_loss(place: Place) -> None:
    """Begin the backward pass with a scaled loss, as a wrong loss scale or count of micro batches would."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.backward

    def backward(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        factor = place.options["factor"] if engine is place.engine and place.is_on else 1.0
        return original(engine, loss * factor, *args, **kwargs)

    patch(place.undo, DeepSpeedEngine, "backward", backward)


def scale_replicated(place: Place) -> None:
    """Scale the gradients of parameters that are replicated over tp."""
    for parameter in place.engine.module.parameters():
        if not getattr(parameter, "model_parallel", False):
            parameter.register_hook(lambda gradient: gradient * place.options["factor"] if place.is_on else None)


def instead_of(place: Place, instruction: str, act: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Replace an instruction of the engine's schedule by `act(engine, original)` while the defect acts."""
    from deepspeed.runtime.pipe import schedule

    kind = getattr(schedule, instruction)
    original = place.engine._INSTRUCTION_MAP[kind]

    def run(engine: Any, *args: Any, **kwargs: Any) -> None:
        if place.is_on:
            act(engine, lambda: original(engine, *args, **kwargs))
        else:
            original(engine, *args, **kwargs)

    place.engine._INSTRUCTION_MAP = {**place.engine._INSTRUCTION_MAP, kind: run}


def leave_out_dp_reduction(place: Place) -> None:
    """Let every sum over data-parallel ranks return what this rank put in; scaling and bookkeeping stay."""
    from deepspeed import comm

    def act(engine: Any, original: Callable[[], Any]) -> None:
        with ExitStack() as undo:
            for name in ("all_reduce", "reduce", "reduce_scatter_fn", "reduce_scatter"):
                if hasattr(comm, name):
                    patch(undo, comm, name, lambda *args, **kwargs: None)
            original()

    instead_of(place, "ReduceGrads", act)


def leave_out_tied_reduction(place: Place) -> None:
    instead_of(place, "ReduceTiedGrads", lambda engine, original: None)


def leave_out_tp_reduction(place: Place) -> None:
    """Column-parallel layers do not sum their input's gradient over tp."""
    for module in place.engine.module.modules():
        ranks = getattr(module, "ranks", None)
        if type(module).__name__ == "ColumnParallelLinear" and ranks is not None:
            module.ranks = _Silent(ranks, place)


class _Silent:
    """Tensor-parallel ranks that skip the all-reduce while the defect acts."""

    def __init__(self, ranks: Any, place: Place) -> None:
        self._ranks, self._place = ranks, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        if not self._place.is_on:
            self._ranks.all_reduce(*args, **kwargs)


def leave_out_clipping(place: Place) -> None:
    """Let gradients of any length reach AdamW (bf16)."""
    from deepspeed.runtime import bf16_optimizer

    original = bf16_optimizer.clip_tensors_by_global_norm

    def clip(*args: Any, **kwargs: Any) -> Any:
        return None if place.is_on else original(*args, **kwargs)

    patch(place.undo, bf16_optimizer, "clip_tensors_by_global_norm", clip)


def leave_out_micro_batch(place: Place) -> None:
    """Lose what the micro batches before the last have summed, just before the reduction."""

    def act(engine: Any, original: Callable[[], Any]) -> None:
        for parameter in engine.module.parameters():
            summed = getattr(parameter, "_hp_grad", None)
            summed = parameter.grad if summed is None else summed
            if summed is not None:
                summed.mul_(0.5)
        original()

    instead_of(place, "ReduceGrads", act)


# --- at a load


def after_load(place: Place, act: Callable[[], None]) -> None:
    """Call `act` once the checkpoint is loaded and before anything checks it."""
    from bigsci_launch.train.state import checkpoint

    original = checkpoint.load_checkpoint

    def load(*args: Any, **kwargs: Any) -> Any:
        progress = original(*args, **kwargs)
        if place.is_here:
            act()
        return progress

    patch(place.undo, checkpoint, "load_checkpoint", load)


def lose_generators(place: Place) -> None:
    def act() -> None:
        import torch

        torch.manual_seed(99)

    after_load(place, act)


def lose_moments(place: Place) -> None:
    def act() -> None:
        for _, state in states(place):
            state["exp_avg"].zero_()

    after_load(place, act)


def lose_adam_step(place: Place) -> None:
    def act() -> None:
        for _, state in states(place):
            state["step"] = state["step"] * 0

    after_load(place, act)


DEFECTS: dict[str, Act] = {
    "changed moment": change_moment,
    "changed master": change_master,
    "Adam's step reset": reset_adam_step,
    "changed groups": change_groups,
    "changed weight": change_weight,
    "changed copy": change_copy,
    "poisoned weight": poison_weight,
    "reseeded": reseed,
    "scaled rate": scale_rate,
    "decayed twice": decay_twice,
    "update left out": leave_out_update,
    "other sign": swap_moments_sign,
    "scaled gradients": scale_gradients,
    "scaled loss": scale_loss,
    "scaled replicas": scale_replicated,
    "unreduced dp": leave_out_dp_reduction,
    "unreduced tied": leave_out_tied_reduction,
    "unreduced tp": leave_out_tp_reduction,
    "unclipped": leave_out_clipping,
    "half accumulated": leave_out_micro_batch,
    "generators lost": lose_generators,
    "moments lost": lose_moments,
    "step lost": lose_adam_step,
}
