"""Logs of torchtitan: how the model, the mesh and the batch were built, then `step: N loss: ... tps: ...`.

Lines say what was built. A configuration, if it is printed (`Running with configs: {...}`), says what they leave out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from bigsci_launch.plan.calibrate.logs.steps import WARM_UP_STEPS, require_sizes, section_of, typical_step

STEP_SIGNS = ("tps: ", "wps: ")

_COLOUR = re.compile(r"\x1b?\[\d+(?:;\d+)*m")
_STEP = re.compile(r"step:\s*(\d+)\s+loss:.*?memory:\s*([\d.]+)GiB.*?[tw]ps:\s*([\d,]+)")
_CONFIG = "Running with configs: "
_MESH = re.compile(r"Building device mesh with parallelism: (.+)")
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[([^\]]*)\], \[([^\]]*)\]")
_BATCH = re.compile(
    r"local batch size (\d+), global batch size (\d+),(?: gradient accumulation steps (\d+),)? sequence length (\d+)"
)
_PIPELINE = re.compile(r"Using pipeline schedule (\S+) with (\d+) microbatches and (\d+) stages")
_MODEL = re.compile(r"Building (\S+) (\S+) with \w*Args\((.*)\)")
_ARGUMENT = re.compile(r"(\w+)=([^,()]+)")
_CHECKPOINTING = re.compile(r"Applied (\w+) activation checkpointing")
_GPU = re.compile(r"CUDA capacity: (.+?) with [\d.]+GiB")
_FLOAT8 = re.compile(r"Float8 training active|Float8Linear|MXFP8")

# Meshes of older versions: those with experts cut the sharded axis in two.
_AXES = {"dp": "dp_shard", "dp_shard_mod_ep": "dp_shard", "dp_shard_in_ep": "dp_shard"}
_SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved"}


def read_torchtitan(text: str) -> dict[str, str]:
    """Return the run of a log as the columns of a measured row.

    Raises:
        ValueError: the log leaves something out, or the run is not modelled.
    """
    plain = _COLOUR.sub("", text)
    speeds = {int(step): float(speed.replace(",", "")) for step, _, speed in _STEP.findall(plain)}
    typical = typical_step(("step", speed) for speed in speeds.values())
    if typical is None:
        raise ValueError(f"no `tps:` after the first {WARM_UP_STEPS} lines of steps")
    config = _config(plain)
    if "Applied CPU Offloading" in plain or section_of(config, "training").get("enable_cpu_offload"):
        raise ValueError("enable_cpu_offload: True is not modelled")
    gpu = _GPU.search(plain)
    cells = {
        "framework": "torchtitan",
        "gpu": gpu[1] if gpu else "",
        **_model_columns(plain),
        **_layout_columns(plain, config),
        "precision": "fp8" if _FLOAT8.search(plain) or _converts(config) else "bf16",
        "attention": "fused",
        "recompute": _recomputation(plain, config),
        "tokens_per_s_per_gpu": str(typical[1]),
        "mem_gb": max((memory for _, memory, _ in _STEP.findall(plain)), key=float),
    }
    require_sizes(cells, "torchtitan")
    return cells


def _config(text: str) -> dict[str, Any]:
    """Return the printed configuration, or an empty one."""
    start = text.find(_CONFIG)
    if start < 0:
        return {}
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start + len(_CONFIG))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _converts(config: dict[str, Any]) -> bool:
    """Return whether a converter of the model makes its matrix products 8-bit."""
    return any(
        "float8" in str(name) or "mx" in str(name) for name in section_of(config, "model").get("converters") or ()
    )


def _model_columns(text: str) -> dict[str, str]:
    """Return the columns of the model, if the log prints its arguments. Only dense ones are read."""
    found = _MODEL.search(text)
    if found is None:
        return {}
    name, arguments = found[1], dict(reversed(_ARGUMENT.findall(found[3])))
    is_known = re.search(r"(?:^|[/._])(?:llama[23]?|qwen3)(?:$|[/._])", name) is not None
    if not is_known or arguments.get("moe_enabled") == "True":
        raise ValueError(f"model {name} {found[2]} is not modelled")
    kv_heads, head_dim = arguments.get("n_kv_heads", "None"), arguments.get("head_dim", "None")
    return {
        "nlayers": arguments.get("n_layers", ""),
        "nhidden": arguments.get("dim", ""),
        "nheads": arguments.get("n_heads", ""),
        "kv_heads": "" if kv_heads == "None" else kv_heads,
        "head_dim": "" if head_dim == "None" else head_dim,
        "ffn": arguments.get("hidden_dim") or _llama_width(arguments),
        "activation": "swiglu",
        "norm": arguments.get("norm_type", "rmsnorm").strip("'"),
        "positions": "rotary",
        "biases": "0",
        "tied": "1" if arguments.get("enable_weight_tying") == "True" else "0",
        "vocab": arguments.get("vocab_size", ""),
    }


def _llama_width(arguments: dict[str, str]) -> str:
    """Return the width of Llama's MLP: 8/3 of the hidden size, times a factor, rounded up to a multiple."""
    if "dim" not in arguments:
        return ""
    width = int(2 * 4 * int(arguments["dim"]) / 3)
    factor, multiple = arguments.get("ffn_dim_multiplier", "None"), int(arguments.get("multiple_of", "1"))
    if factor != "None":
        width = int(float(factor) * width)
    return str(-(-width // multiple) * multiple)


def _layout_columns(text: str, config: dict[str, Any]) -> dict[str, str]:
    mesh = _mesh(text) or _mesh_of_config(config)
    if not mesh:
        return {}
    replicas, shards = mesh.get("dp_replicate", 1), mesh.get("dp_shard", 1)
    tp, pp, cp = mesh.get("tp", 1), mesh.get("pp", 1), mesh.get("cp", 1)
    # Weights stay gathered between forward and backward where there is a pipeline (`fsdp_reshard_after_forward`).
    zero = "0" if shards * cp == 1 else "2" if pp > 1 else "3"
    return {
        **{"dp": str(replicas * shards), "tp": str(tp), "pp": str(pp), "cp": str(cp)},
        "ep": str(mesh.get("ep", 1)),
        "gpus": str(replicas * shards * tp * pp * cp),
        "zero": zero,
        "shard_group": str(shards * cp) if replicas > 1 and zero != "0" else "",
        **_batch_columns(text, config, replicas * shards, pp),
    }


def _mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes of the mesh that was built."""
    found = _MESH.search(text)
    if found:
        return {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", found[1])}
    older = _OLD_MESH.search(text)
    sizes: dict[str, int] = {}
    for name, size in zip(*(re.findall(r"\w+", part) for part in older.groups()), strict=False) if older else ():
        axis = _AXES.get(name, name)
        sizes[axis] = sizes.get(axis, 1) * int(size)
    return sizes


def _mesh_of_config(config: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that the configuration gives, unless it leaves one to the number of ranks."""
    names = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "tp": "tensor_parallel"}
    names.update({"pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"})
    section = section_of(config, "parallelism")
    sizes = {axis: int(section.get(f"{name}_degree") or 1) for axis, name in names.items()}
    return sizes if section and min(sizes.values()) > 0 else {}


def _batch_columns(text: str, config: dict[str, Any], dp: int, pp: int) -> dict[str, str]:
    """Return the batch sizes and the schedule. A pipeline cuts the local batch into its micro batches."""
    found, section = _BATCH.search(text), section_of(config, "training")
    if found:
        local, batch, passes, length = int(found[1]), int(found[2]), int(found[3] or 1), found[4]
    elif section.get("local_batch_size") and section.get("seq_len"):
        local, length = int(section["local_batch_size"]), str(section["seq_len"])
        batch = int(section.get("global_batch_size") or -1)
        batch, passes = (local * dp, 1) if batch < 0 else (batch, batch // (local * dp))
    else:
        return {}
    sizes = {"gbs": str(batch), "seq": length}
    if pp == 1:
        return {**sizes, "mbs": str(local)}
    if passes > 1:
        raise ValueError(f"gradient accumulation steps: {passes} with a pipeline is not modelled")
    return {**sizes, **_pipeline_columns(text, local, pp)}


def _pipeline_columns(text: str, local: int, pp: int) -> dict[str, str]:
    found = _PIPELINE.search(text)
    if found is None:
        return {}
    schedule = _SCHEDULES.get(found[1].lower())
    if schedule is None:
        raise ValueError(f"pipeline_parallel_schedule: {found[1]} is not modelled")
    chunks = int(found[3]) // pp
    return {"schedule": schedule, "virtual_stages": str(chunks), "mbs": str(local // int(found[2]))}


def _recomputation(text: str, config: dict[str, Any]) -> str:
    found = _CHECKPOINTING.search(text)
    return found[1] if found else str(section_of(config, "activation_checkpoint").get("mode", "none"))
