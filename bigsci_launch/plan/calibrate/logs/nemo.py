"""Logs of NeMo: `train_step_timing in s`, after a configuration in YAML if NeMo 1 wrote them.

NeMo's model is Megatron's, so its configuration is turned into Megatron's arguments.
"""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from typing import Any

import yaml

from bigsci_launch.plan.calibrate.logs.arguments import columns_of
from bigsci_launch.plan.calibrate.logs.steps import WARM_UP_STEPS, require_sizes, section_of, typical_step

STEP_SIGNS = ("train_step_timing in s",)

_STEP = re.compile(r"[|,] global_step[:=]\s*([\d.e+]+)[^\r\n]*?train_step_timing in s[:=]\s*([\d.]+)")
_BATCH = re.compile(r"global_batch_size: (\d+) \|")
_VOCABULARY = re.compile(r"Padded vocab_size: (\d+)")
_RANK = re.compile(r"^\d+: ?")
_TITLE, _INDENT = "* Experiment configuration *", "    "

# Arguments, and the keys of NeMo's model that have other names.
_NAMES = {
    "seq_length": "encoder_seq_length",
    "num_experts": "num_moe_experts",
    "add_bias_linear": "bias",
    "use_flash_attn": "use_flash_attention",
    "tp_comm_overlap": "ub_tp_comm_overlap",
    "recompute_granularity": "activations_checkpoint_granularity",
    "recompute_method": "activations_checkpoint_method",
    "recompute_num_layers": "activations_checkpoint_num_layers",
}
_NOT_MODELLED = ("activations_checkpoint_layers_per_pipeline", "num_micro_batches_with_partial_activation_checkpoints")
_ACTIVATIONS = {"fast-swiglu": "swiglu", "squared-relu": "relu2"}
_SHARDED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
_FORMATS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}


def read_nemo(text: str) -> dict[str, str]:
    """Return the run of a log as the columns of a measured row.

    Raises:
        ValueError: the log leaves something out, or the run is not modelled.
    """
    seconds = {float(step): float(took) for step, took in _STEP.findall(text)}
    typical = typical_step(("step", took) for took in seconds.values())
    if typical is None:
        raise ValueError(f"no `train_step_timing in s` after the first {WARM_UP_STEPS} steps")
    batch, config = _BATCH.search(text), _config(text)
    model, trainer = section_of(config, "model"), section_of(config, "trainer")
    cells = {"framework": "megatron", "sec_per_it": f"{typical[1]:.6g}"}
    cells["gbs"] = batch[1] if batch else str(model.get("global_batch_size", ""))
    if model and trainer:
        arguments = _arguments(model, trainer, text)
        activation = str(model.get("activation", "gelu"))
        cells |= columns_of(arguments, "megatron")
        cells |= {"nodes": str(trainer.get("num_nodes", 1)), "activation": _ACTIVATIONS.get(activation, activation)}
    require_sizes(cells, "NeMo")
    return cells


def _config(text: str) -> dict[str, Any]:
    """Return the configuration: the indented lines after its title, perhaps each behind the number of its rank."""
    lines = [_RANK.sub("", line) for line in text.splitlines()]
    after = dropwhile(lambda line: _TITLE not in line, lines)
    body = dropwhile(lambda line: _TITLE in line or not line.startswith(_INDENT), after)
    block = "\n".join(takewhile(lambda line: line.startswith(_INDENT), body))
    try:
        found = yaml.safe_load(block)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _arguments(model: dict[str, Any], trainer: dict[str, Any], text: str) -> dict[str, str]:
    """Return the configuration as Megatron's arguments."""
    for name in _NOT_MODELLED:
        if model.get(name) is not None:
            raise ValueError(f"{name}: {model[name]} is not modelled")
    arguments = {name: str(value) for name, value in model.items() if not isinstance(value, dict)}
    arguments |= {name: arguments[key] for name, key in _NAMES.items() if key in arguments}
    optimizer, vocabulary = section_of(model, "optim"), _VOCABULARY.search(text)
    world = int(trainer.get("devices", 1)) * int(trainer.get("num_nodes", 1))
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tp, pp, cp = (int(model.get(axis) or 1) for axis in axes)
    number_format = _FORMATS.get(str(trainer.get("precision")), "fp32")
    is_engine = model.get("transformer_engine") or model.get("mcore_gpt")
    return {
        **arguments,
        **dict(zip(axes, map(str, (tp, pp, cp)), strict=True)),
        "world_size": str(world),
        "data_parallel_size": str(world // (tp * pp * cp)),
        "padded_vocab_size": vocabulary[1] if vocabulary else "None",
        number_format: "True",
        "group_query_attention": str(model.get("num_query_groups") is not None),
        "untie_embeddings_and_output_weights": str(model.get("share_embeddings_and_output_weights") is False),
        "transformer_impl": "transformer_engine" if is_engine else "local",
        "use_distributed_optimizer": str(optimizer.get("name") in _SHARDED_OPTIMIZERS),
        "overlap_grad_reduce": str(bool(optimizer.get("overlap_grad_sync"))),
    }
