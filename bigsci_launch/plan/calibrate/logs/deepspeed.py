"""Logs of DeepSpeed alone: its configuration, and `iter time (s)` or `CurrSamplesPerSec`.

DeepSpeed knows neither the model nor its tensor parallelism, so such a log never makes a setup by itself. What it says
is reported as the beginning of a row.
"""

from __future__ import annotations

import re

from bigsci_launch.plan.calibrate.logs.steps import WARM_UP_STEPS, require_sizes, typical_step

STEP_SIGNS = ("iter time (s): ", "CurrSamplesPerSec=")

_SECONDS = re.compile(r"steps: (\d+) loss: [^\r\n]*?iter time \(s\): ([\d.]+)")
_RATE = re.compile(r"(\d+), RunningAvgSamplesPerSec=[^\r\n]*?CurrSamplesPerSec=([\d.]+)")
_FORMATS = {"bfloat16_enabled": "bf16", "fp16_enabled": "fp16"}
_SETTING = re.compile(r"\[config\.py:\d+:print\] +(\w+)(?: \.+| ) (\S+)")


def read_deepspeed(text: str) -> dict[str, str]:
    """Return the run of a log as the columns of a measured row.

    Raises:
        ValueError: the log leaves something out.
    """
    settings = dict(_SETTING.findall(text))
    batch = settings.get("train_batch_size", "")
    seconds = {step: float(took) for step, took in _SECONDS.findall(text)}
    if not seconds and batch:
        seconds = {step: int(batch) / float(rate) for step, rate in _RATE.findall(text)}
    typical = typical_step(("step", took) for took in seconds.values())
    if typical is None:
        raise ValueError(f"no steps of DeepSpeed after the first {WARM_UP_STEPS}, or no train_batch_size")
    cells = {
        "framework": "deepspeed",
        "dp": settings.get("world_size", ""),
        "mbs": settings.get("train_micro_batch_size_per_gpu", ""),
        "gbs": batch,
        "zero": settings.get("zero_optimization_stage", ""),
        "precision": next((word for key, word in _FORMATS.items() if settings.get(key) == "True"), ""),
        "sec_per_it": f"{typical[1]:.6g}",
    }
    require_sizes(cells, "DeepSpeed")
    return cells
