"""Megatron's arguments as the columns of a measured row. NeMo's model configuration has the same names."""

from __future__ import annotations

import re
from collections.abc import Mapping

Arguments = Mapping[str, str]

# Columns, and the arguments with their values.
_SAME = {
    "nlayers": "num_layers",
    "nhidden": "hidden_size",
    "nheads": "num_attention_heads",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size",
    "seq": "seq_length",
    "vocab": "padded_vocab_size",
    "dp": "data_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "mbs": "micro_batch_size",
    "gpus": "world_size",
}

NEEDED = (*(name for column, name in _SAME.items() if column not in ("head_dim", "ffn", "cp")),)
"""Arguments without which there is no setup."""

# Arguments that change the time or the memory of a step in a way that is not modelled, unless they are off.
_NOT_MODELLED = (
    *("multi_latent_attention", "mtp_num_layers", "window_size", "experimental_attention_variant"),
    *("hybrid_override_pattern", "hybrid_layer_pattern", "hybrid_attention_ratio", "is_hybrid_model"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "linear_attention_freq"),
    *("retro_add_retriever", "encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size"),
    *("fp4", "quick_geglu", "cpu_offloading", "optimizer_cpu_offload", "cpu_optimizer", "checkpoint_in_cpu"),
    "offload_optimizer",
    *("distribute_saved_activations", "distribute_checkpointed_activations", "partition_activations"),
    *("pipeline_model_parallel_layout", "standalone_embedding_stage", "enable_zero_bubble", "zero_bubble_v_schedule"),
    *("ds_sequence_parallel_size", "hierarchical_context_parallel_sizes", "overlap_moe_expert_parallel_comm"),
    *("random_ltd", "curriculum_learning_legacy", "memory_centric_tiled_linear", "moe_extended_tp"),
)
_OFF = ("", "None", "False", "0", "0.0", "[]")
_NO_OFFER = {"ds_sequence_parallel_size": ("1",)}

_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary", "yarn": "rotary"}
_SHARDING = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
_UNFUSED_BACKENDS = ("unfused", "local")


def columns_of(arguments: Arguments, framework: str) -> dict[str, str]:
    """Return the columns of a row that the arguments say.

    Raises:
        ValueError: an argument asks for what is not modelled; the reason names it.
    """
    for name in _NOT_MODELLED:
        if _is_on(arguments, name) and arguments[name] not in _NO_OFFER.get(name, ()):
            raise _refusal(arguments, name)
    cells = {column: _value(arguments, name) for column, name in _SAME.items()}
    return {
        **cells,
        "framework": framework,
        **_model_columns(arguments),
        **_expert_columns(arguments, framework),
        **_technique_columns(arguments, framework),
        **_schedule_columns(arguments),
    }


def _is_on(arguments: Arguments, name: str) -> bool:
    return arguments.get(name, "None") not in _OFF


def _value(arguments: Arguments, name: str) -> str:
    return arguments[name] if _is_on(arguments, name) else ""


def _refusal(arguments: Arguments, name: str) -> ValueError:
    return ValueError(f"{name}: {arguments[name]} is not modelled")


def _model_columns(arguments: Arguments) -> dict[str, str]:
    positions = arguments.get("position_embedding_type", "learned_absolute").removeprefix("PositionEmbeddingType.")
    gated = _value(arguments, "glu_activation") or ("swiglu" if _is_on(arguments, "swiglu") else "")
    shared = _value(arguments, "num_key_value_heads")
    norm = arguments.get("normalization", "LayerNorm").lower()
    return {
        "kv_heads": arguments["num_query_groups"] if _is_on(arguments, "group_query_attention") else shared,
        "activation": gated or ("relu2" if _is_on(arguments, "squared_relu") else "gelu"),
        "norm": "layernorm" if norm == "layernorm1p" else norm,
        "positions": "rotary"
        if _is_on(arguments, "use_rotary_position_embeddings")
        else _POSITIONS.get(positions, positions),
        "biases": "1" if arguments.get("add_bias_linear", "True") == "True" else "0",
        "tied": "0" if _is_on(arguments, "untie_embeddings_and_output_weights") else "1",
        "precision": _precision(arguments),
    }


def _precision(arguments: Arguments) -> str:
    if any(_is_on(arguments, name) for name in ("fp8", "fp8_format", "fp8_e4m3", "fp8_hybrid")):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if arguments.get(name) == "True"), "fp32")


def _expert_columns(arguments: Arguments, framework: str) -> dict[str, str]:
    """Return the columns of a mixture of experts. Megatron-DeepSpeed writes one expert as `[1]`."""
    count = _value(arguments, "num_experts").strip("[]")
    if not count or count == "1":
        return {}
    if framework == "deepspeed":
        raise _refusal(arguments, "num_experts")
    tp = arguments["tensor_model_parallel_size"]
    if arguments.get("expert_tensor_parallel_size", tp) not in ("1", "None"):
        raise ValueError(
            f"expert_tensor_parallel_size: {arguments.get('expert_tensor_parallel_size', tp)} is not modelled"
        )
    shards = _value(arguments, "expert_model_parallel_size") or "1"
    if shards != "1" and arguments.get("moe_token_dispatcher_type") == "allgather":
        raise _refusal(arguments, "moe_token_dispatcher_type")
    return {
        "experts": count,
        "experts_per_token": _value(arguments, "moe_router_topk"),
        "expert_ffn": _value(arguments, "moe_ffn_hidden_size") or _value(arguments, "ffn_hidden_size"),
        "shared_expert_ffn": _value(arguments, "moe_shared_expert_intermediate_size"),
        "dense_layers": _dense_layers(arguments),
        "capacity_factor": _value(arguments, "moe_expert_capacity_factor"),
        "ep": shards,
    }


def _dense_layers(arguments: Arguments) -> str:
    """Return the number of first layers without experts: the zeros of a pattern such as `[0, 1, 1]`."""
    pattern = re.sub(r"[\[\], ]", "", arguments.get("moe_layer_freq", "1"))
    dense = len(pattern) - len(pattern.lstrip("0"))
    if set(pattern[dense:]) != {"1"}:
        raise _refusal(arguments, "moe_layer_freq")
    return str(dense)


def _technique_columns(arguments: Arguments, framework: str) -> dict[str, str]:
    overlap = {
        "dp": _is_on(arguments, "overlap_grad_reduce"),
        "tp": _is_on(arguments, "tp_comm_overlap"),
        "pp": _is_on(arguments, "overlap_p2p_comm"),
    }
    if _is_on(arguments, "context_parallel_size") and arguments["context_parallel_size"] != "1":
        kinds = arguments.get("cp_comm_type", "p2p").strip("[]'\"")
        if kinds not in ("p2p", "None"):
            raise _refusal(arguments, "cp_comm_type")
    zero = _zero_stage(arguments, framework)
    return {
        "attention": "fused" if _is_fused(arguments) else "unfused",
        "sequence_parallel": "1" if _is_on(arguments, "sequence_parallel") else "0",
        "zero": zero,
        "shard_group": _shard_group(arguments) if zero != "0" else "",
        "overlap": " ".join(axis for axis, is_on in overlap.items() if is_on) or "none",
    }


def _is_fused(arguments: Arguments) -> bool:
    """Return whether attention is one kernel. Transformer Engine chooses one, unless its backend says otherwise."""
    backend = arguments.get("attention_backend", "auto").removeprefix("AttnBackend.")
    if backend in _UNFUSED_BACKENDS:
        return False
    flags = [name for name in arguments if name.startswith("use_flash_attn")]
    return any(_is_on(arguments, name) for name in flags) or arguments.get("transformer_impl") == "transformer_engine"


def _zero_stage(arguments: Arguments, framework: str) -> str:
    if framework == "deepspeed":
        return arguments.get("zero_stage", "1")
    if _is_on(arguments, "use_torch_fsdp2"):
        return "3"
    if _is_on(arguments, "use_megatron_fsdp") or _is_on(arguments, "use_custom_fsdp"):
        if (strategy := arguments.get("data_parallel_sharding_strategy", "no_shard")) not in _SHARDING:
            raise _refusal(arguments, "data_parallel_sharding_strategy")
        return _SHARDING[strategy]
    return "1" if _is_on(arguments, "use_distributed_optimizer") else "0"


def _shard_group(arguments: Arguments) -> str:
    copies = int(_value(arguments, "num_distributed_optimizer_instances") or 1)
    if copies == 1:
        return ""
    ranks = int(arguments["data_parallel_size"]) * int(_value(arguments, "context_parallel_size") or 1)
    return str(ranks // copies)


def _schedule_columns(arguments: Arguments) -> dict[str, str]:
    stages, layers = int(arguments["pipeline_model_parallel_size"]), int(arguments["num_layers"])
    chunks = int(
        _value(arguments, "virtual_pipeline_model_parallel_size")
        or _value(arguments, "num_virtual_stages_per_pipeline_rank")
        or 1
    )
    per_chunk = _value(arguments, "num_layers_per_virtual_pipeline_stage")
    if per_chunk and chunks == 1:
        chunks = layers // stages // int(per_chunk)
    return {
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "virtual_stages": str(chunks),
        "partition_method": _partition_method(arguments, layers, stages),
        "recompute": _recomputation(arguments, chunks),
    }


def _partition_method(arguments: Arguments, layers: int, stages: int) -> str:
    """Return DeepSpeed's method, or the layers of every stage where the first or the last one has its own number."""
    first, last = (_value(arguments, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if not first and not last:
        return _value(arguments, "pp_partition_method").strip("'\"")
    rest, inner = layers - int(first or 0) - int(last or 0), stages - bool(first) - bool(last)
    if inner < 1 or rest % inner:
        name = f"decoder_{'first' if first else 'last'}_pipeline_num_layers"
        raise ValueError(f"{name}: {first or last} leaves {rest} layers, which do not fill {inner} stages evenly")
    counts = [*([first] if first else []), *[str(rest // inner)] * inner, *([last] if last else [])]
    return "time:" + ",".join(counts)


def _recomputation(arguments: Arguments, chunks: int) -> str:
    """Return what is recomputed, in the words of a row.

    Raises:
        ValueError: it is not modelled, or the arguments do not say it.
    """
    if _is_on(arguments, "checkpoint_activations"):
        return "full"
    granularity = arguments.get("recompute_granularity") or arguments.get("activations_checkpoint_granularity")
    if granularity is None:
        if "checkpoint_activations" in arguments:
            return "none"
        names = "recompute_granularity, checkpoint_activations"
        raise ValueError(f"the arguments do not show what is recomputed (no {names})")
    if granularity in _OFF:
        return "none"
    if granularity == "selective":
        modules = _value(arguments, "recompute_modules").strip("[]").replace("'", "")
        if modules not in ("", "core_attn"):
            raise _refusal(arguments, "recompute_modules")
        return "selective"
    if granularity != "full":
        raise ValueError(f"recompute_granularity: {granularity} is not modelled")
    return _full_recomputation(arguments, chunks)


def _full_recomputation(arguments: Arguments, chunks: int) -> str:
    """Megatron's `block` recomputes the first layers of every chunk, `uniform` all in groups, of which the inputs are
    kept; groups of several layers are not modelled."""
    layers = _value(arguments, "recompute_num_layers") or "1"
    if arguments.get("recompute_method") == "block":
        return str(int(layers) * chunks)
    if layers != "1":
        raise ValueError(f"recompute_num_layers: {layers} with recompute_method uniform is not modelled")
    return "full"
