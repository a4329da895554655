"""Checks, before a job is queued, that the checkpoint it would resume from is sound and belongs to the run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from bigsci_launch.checkpoints.folder import CheckpointRecord, CheckpointsDir, find_checkpoint, read_record
from bigsci_launch.checkpoints.verify import find_damage, is_verified, mark_verified, verifying
from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError, CheckpointError
from bigsci_launch.progress import Progress, no_progress
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.layout import AttemptDir, RunDir
from bigsci_launch.topology import Topology

_PRIVATE: Any = {"env": True, "monitor": {"notify": True}}
"""What may hold secrets, and no checkpoint needs: it is given to users outside the run's group."""

NextStart = Literal["checkpoint", "beginning", "unknown"]


def describe_run(
    config: RunConfig, topology: Topology, *, step: int = 0, consumed_samples: int = 0, run_id: str | None = None
) -> CheckpointRecord:
    """Return the record of a checkpoint of this run, without its files."""
    model = config.model
    return CheckpointRecord(
        step=step,
        consumed_samples=consumed_samples,
        topology=topology.as_dict(),
        precision=config.training.weight_format,
        model={
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "ffn_hidden_size": config.ffn_hidden_size,
            "sequence_length": model.sequence_length,
            "vocab_size": model.vocab_size,
            "padded_vocab_size": config.padded_vocab_size,
            "tied_embeddings": model.tied_embeddings,
            "embedding_norm": model.embedding_norm,
            "partition_method": config.parallelism.partition_method,
            **_chosen(config),
        },
        files={},
        config=config.model_dump(mode="json", exclude=_PRIVATE),
        run_id=run_id,
    )


def _chosen(config: RunConfig) -> dict[str, Any]:
    """Return the model's choices that are not the defaults; checkpoints from before there was a choice lack them."""
    model = config.model
    choices: dict[str, tuple[Any, Any]] = {
        "positions": (model.positions, "learned"),
        "norm": (model.norm, "layernorm"),
        "activation": (model.activation, "gelu"),
        "num_key_value_heads": (config.num_key_value_heads, model.num_attention_heads),
        "biases": (model.biases, True),
    }
    return {key: value for key, (value, default) in choices.items() if value != default}


def require_same_run(folder: Path, record: CheckpointRecord, run: CheckpointRecord) -> None:
    """Check that the run described by `run` can resume from a checkpoint. Uneven pipelines read every layout.

    Raises:
        CheckpointError: names everything that differs.
    """
    if run.config["parallelism"]["engine"] == "uneven":
        record = _reshaped(record, run)
        record = replace(record, model={**record.model, "partition_method": run.model["partition_method"]})
    differences = record.differences(run)
    if not differences:
        return
    hint = "use the model, parallelism and precision of the run that saved it, or set checkpoint.load: none"
    if not _reshaped(record, run).differences(run):
        sizes = " ".join(f"--{axis} {size}" for axis, size in run.topology.items())
        hint = f"bsl checkpoint convert {shlex.quote(str(folder))} {sizes} -o FOLDER, then set checkpoint.load: FOLDER"
    raise CheckpointError(f"{folder}: saved by another run: {'; '.join(differences)}", hint=hint)


def _reshaped(record: CheckpointRecord, run: CheckpointRecord) -> CheckpointRecord:
    """Return `record` with everything that a conversion can change set as in `run`."""
    model = {**record.model, "padded_vocab_size": run.model["padded_vocab_size"]}
    return replace(record, topology=run.topology, model=model)


def verify_resume(
    config: RunConfig, topology: Topology, checkpoints: CheckpointsDir, report_progress: Progress = no_progress
) -> Path | None:
    """Return the checkpoint from which the next attempt resumes, verified; None if it starts at step 0.

    A checkpoint that was verified before and has not changed since is not read again.

    Raises:
        CheckpointError: it is missing or damaged, or has another model, topology or precision.
    """
    folder = find_checkpoint(config.checkpoint.load, checkpoints)
    if folder is None:
        return None
    require_same_run(folder, read_record(folder), describe_run(config, topology))
    if is_verified(folder):
        return folder
    with verifying(folder):
        problems = find_damage(folder, report_progress)
    if problems:
        raise CheckpointError(
            "; ".join(problems[:5]), hint="`bsl checkpoint list` shows the others; set checkpoint.load to one of them"
        )
    mark_verified(folder)
    return folder


def find_next_start(run: RunDir, attempt: AttemptDir) -> NextStart:
    """Return where an attempt after `attempt` would begin, with the same settings.

    It is unknown for a program of the user's own, and where its checkpoints cannot be read or are refused.
    """
    try:
        config = load_resolved(attempt.config)
        if not config.run.starts_trainer:
            return "unknown"
        if find_checkpoint(config.checkpoint.load, CheckpointsDir(run.checkpoints)) is not None:
            return "checkpoint"
        if config.checkpoint.load == "auto":
            require_not_lost(run)
        return "beginning"
    except (BslError, OSError):
        return "unknown"


def require_not_lost(run: RunDir) -> None:
    """Check that a run without a checkpoint never saved one: starting again at step 0 would silently lose progress.

    Raises:
        CheckpointError: it has.
    """
    for attempt in reversed(run.attempts()):
        saved = [event for event in read_last_events(attempt.event_file(0)) if event.get("kind") == "save"]
        if saved:
            raise CheckpointError(
                f"{run.checkpoints}: contains no checkpoint, although attempt {attempt.name} saved one after step "
                f"{saved[-1].get('step')}",
                hint="restore it, or set checkpoint.load to `none` to start at step 0",
            )
