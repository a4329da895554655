"""AdamW with two groups on every rank, chosen by shape: matrices are decayed, vectors (biases, norms) are not.

An alias can fool a rule on classes or names, but not one on shapes. DeepSpeed drops empty groups and computes one norm
per group, so ranks with different numbers of groups would wait for each other for ever; `plan.choose.preflight`
refuses that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn

from bigsci_launch.config.schema.run import OptimizerSection
from bigsci_launch.train.device.gpu import computes_on_gpu


def _without_compiler_hooks(name: str) -> Any:
    return inspect.unwrap(getattr(torch.optim.AdamW, name))


class EagerAdamW(torch.optim.AdamW):
    """torch's AdamW without its torch.compile hooks, which import the compiler (0.9 s of CPU on every rank)."""

    step = torch.no_grad()(_without_compiler_hooks("step"))
    zero_grad = _without_compiler_hooks("zero_grad")
    state_dict = _without_compiler_hooks("state_dict")
    load_state_dict = _without_compiler_hooks("load_state_dict")
    add_param_group = _without_compiler_hooks("add_param_group")


GroupRule = Callable[[str, nn.Parameter], str]


def group_by_shape(name: str, parameter: nn.Parameter) -> str:
    """Return the optimizer group of a parameter: only matrices are decayed."""
    return "decay" if parameter.ndim >= 2 else "no_decay"


def make_optimizer(
    module: nn.Module, config: OptimizerSection, rule: GroupRule = group_by_shape
) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of this rank's stage."""
    return optimizer_over(module.named_parameters(), config, rule)


def optimizer_over(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerSection, rule: GroupRule = group_by_shape
) -> torch.optim.Optimizer:
    """Return AdamW over these parameters."""
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for name, parameter in named:
        groups[rule(name, parameter)].append(parameter)
    optimizer = EagerAdamW(
        [{"name": name, "params": parameters} for name, parameters in groups.items()], lr=config.learning_rate
    )
    choose_kernel(optimizer, fused=computes_on_gpu())
    apply_settings(optimizer.param_groups, config)
    return optimizer


def apply_settings(groups: Sequence[dict[str, Any]], config: OptimizerSection) -> None:
    """Set the run file's values; a loaded checkpoint brings the settings of the run that saved it."""
    for group in groups:
        group["betas"] = (config.betas[0], config.betas[1])
        group["eps"] = config.epsilon
        group["weight_decay"] = config.weight_decay if group["name"] == "decay" else 0.0


def choose_kernel(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    """Use one kernel for a whole step of AdamW (`fused`, for GPUs) or one for each operation.

    A loaded checkpoint brings the choice of the device that saved it, and a fused kernel reads the step number on the
    device, where the other one has it on the host.
    """
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = fused, not fused
    for parameter, state in optimizer.state.items():
        if "step" in state:
            step = torch.as_tensor(state["step"], dtype=torch.float32)
            state["step"] = step.to(parameter.device if fused else "cpu")


def read_norm_once() -> None:
    """Have DeepSpeed's optimizers wait for the device once in a step: for the norm of all gradients.

    It decides whether the step is skipped. They would ask the device for it four times: to replace a norm that is not
    finite, to skip, to clip; and each who reads it afterwards would ask again.
    """
    for module in (utils, stage_1_and_2):
        module.mask_nan_or_inf_with_val_inplace = _replace_not_finite
    zero = stage_1_and_2.DeepSpeedZeroOptimizer
    for owner, name in ((bf16_optimizer, "get_global_norm_of_tensors"), (zero, "scaled_global_norm")):
        compute = getattr(owner, name)
        if not hasattr(compute, "__wrapped__"):
            setattr(owner, name, _on_host(compute))


def _replace_not_finite(norm: Tensor, device: object = None, val: float = -1.0) -> None:
    norm.masked_fill_(~torch.isfinite(norm), val)


def _on_host(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)
    def run(*arguments: Any, **named: Any) -> Any:
        norm = compute(*arguments, **named)
        return norm.cpu() if isinstance(norm, Tensor) else norm

    return run


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient that this step's backward passes have accumulated for a parameter, or None."""
    gradient = getattr(parameter, "_hp_grad", None)
    return gradient.view(parameter.shape) if gradient is not None else parameter.grad


def gradient_norm(engine: PipelineEngine) -> float:
    """Return the norm by which the gradients of the last step were clipped; 0 if there was none yet."""
    norm = engine.get_global_grad_norm()
    return 0.0 if norm is None else float(norm)


def loss_scale(optimizer: Any) -> float | None:
    """Return the factor by which DeepSpeed's optimizer currently scales the loss, or None if it never does."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.loss_scale) if scaler is not None and getattr(optimizer, "dynamic_loss_scale", False) else None


def set_learning_rate(groups: Sequence[dict[str, Any]], learning_rate: float) -> None:
    """Use `learning_rate` in the next step."""
    for group in groups:
        group["lr"] = learning_rate
