"""AdamW with two groups on every rank, chosen by shape: matrices are decayed, vectors (biases, norms) are not.

An alias can fool a rule on classes or names, but not one on shapes. DeepSpeed drops empty groups and computes one norm
per group, so ranks with different numbers of groups would wait for each other for ever; `plan.choose.preflight`
refuses that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for name, parameter in module.named_parameters():
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


def loss_scale(optimizer: Any) -> float | None:
    """Return the factor by which DeepSpeed's optimizer currently scales the loss, or None if it never does."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.loss_scale) if scaler is not None and getattr(optimizer, "dynamic_loss_scale", False) else None


def set_learning_rate(groups: Sequence[dict[str, Any]], learning_rate: float) -> None:
    """Use `learning_rate` in the next step."""
    for group in groups:
        group["lr"] = learning_rate
