"""The conversion of a checkpoint to another topology: whether it is possible, what is kept, and its start.

To plan it, only the checkpoint's record is read. Weights, fp32 masters, moments, the optimizer's step, the schedule and
the place in the data do not depend on the topology and are kept. Random states belong to a pipeline stage of a replica.
Ranks that differ only in tp share them, so they survive a change of tp, but not of pp or dp.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from bigsci_launch.checkpoints.folder import (
    CheckpointRecord,
    CheckpointsDir,
    read_record,
    require_complete,
)
from bigsci_launch.checkpoints.resume import describe_run
from bigsci_launch.checkpoints.verify import find_damage
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import load_site
from bigsci_launch.content import module_argv
from bigsci_launch.errors import INSTALL_TRAIN, CheckpointError, ConfigError
from bigsci_launch.file_names import checkpoint_tag
from bigsci_launch.plan.choose.preflight import preflight
from bigsci_launch.plan.price.balance import PRICED_METHODS, settle_method
from bigsci_launch.plan.price.calibration import Calibration, calibration_of
from bigsci_launch.plan.shape.parameters import ModelShape, cut_model
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.progress import Progress
from bigsci_launch.safe_files import parse_json
from bigsci_launch.topology import AXES, Topology
from bigsci_launch.units import format_bytes


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint and what it becomes. `stages[pp]` has the numbers of the layers on a stage."""

    source: Path
    before: CheckpointRecord
    after: CheckpointRecord
    config: RunConfig
    topology: Topology
    stages: tuple[range, ...]

    @property
    def keeps_random_states(self) -> bool:
        """Whether every rank continues with the random states of a rank that saved."""
        return all(self.before.topology[axis] == self.after.topology[axis] for axis in ("pp", "dp"))

    @property
    def changes(self) -> list[str]:
        """What will be different, in words."""
        lines = [f"topology {_shown(self.before)} -> {_shown(self.after)}"]
        rows = [record.model["padded_vocab_size"] for record in (self.before, self.after)]
        if rows[0] != rows[1]:
            lines.append(f"padded vocabulary {rows[0]} -> {rows[1]} rows; padding rows are zero")
        if not self.keeps_random_states:
            dropout = self.config.model.dropout
            effect = (
                f"dropout {dropout:g} draws different numbers than without the conversion"
                if dropout
                else "they are not used while dropout is 0"
            )
            lines.append(f"random states are reset because pp or dp changes: {effect}")
        return lines


def _shown(record: CheckpointRecord) -> str:
    return str(saved_topology(record))


def saved_topology(record: CheckpointRecord) -> Topology:
    return Topology(**record.topology)


def plan_conversion(folder: Path, topology: Topology, partition_method: str | None = None) -> Conversion:
    """Return what the checkpoint in `folder` becomes at `topology`, cut by `partition_method`; default: as on submit.

    Raises:
        CheckpointError: it is incomplete, or the model does not fit that topology.
        DataError: its cut goes by price, and the calibration of its site cannot be read.
    """
    before = read_record(folder)
    require_complete(folder, before)
    saved = RunConfig.model_validate(before.config)
    config = _at(saved, topology, partition_method or _partition_method(saved, topology))
    after = describe_run(
        config, topology, step=before.step, consumed_samples=before.consumed_samples, run_id=before.run_id
    )
    stages = _stages(config, topology)
    conversion = Conversion(folder, before, after, config, topology, stages)
    origin = {"path": str(folder.absolute()), "topology": before.topology, "random_states": "new"}
    if conversion.keeps_random_states:
        origin["random_states"] = "kept"
    after = replace(after, code=before.code, health=before.health, data=before.data, converted_from=origin)
    return replace(conversion, after=after)


def _at(config: RunConfig, topology: Topology, partition_method: str) -> RunConfig:
    sizes = {axis.key: topology[axis.name] for axis in AXES}
    changes: dict[str, Any] = {**sizes, "partition_method": partition_method, "engine": "deepspeed"}
    return config.model_copy(update={"parallelism": config.parallelism.model_copy(update=changes)})


def _partition_method(config: RunConfig, topology: Topology) -> str:
    """Return the run's partition method. A cut by price is computed again if the number of stages changes."""
    written = config.parallelism.partition_method
    method = written.split(":")[0]
    if method not in PRICED_METHODS or topology.pp == config.parallelism.pipeline_parallel_size:
        return written
    try:
        site = load_site(config.slurm.site)
        ranks_per_node, calibration = site.config.ranks_per_node, calibration_of(site)
    except ConfigError:
        ranks_per_node, calibration = topology.world_size, None
    setup = replace(Setup.of_config(config, topology, ranks_per_node), partition_method=method)
    return settle_method(setup, calibration or Calibration()).partition_method


def _stages(config: RunConfig, topology: Topology) -> tuple[range, ...]:
    sizes = {
        "attention heads": config.model.num_attention_heads,
        "key/value heads": config.num_key_value_heads,
        "MLP": config.ffn_hidden_size,
    }
    for name, size in sizes.items():
        if size % topology.tp:
            raise CheckpointError(f"tp {topology.tp} does not divide the model's {name} ({size})")
    try:
        refusals = preflight(config)
        cut = cut_model(ModelShape.of_config(config), config.parallelism.partition_method, topology.pp, tp=topology.tp)
    except ValueError as error:
        raise CheckpointError(f"{topology}: {error}") from error
    if refusals:
        raise CheckpointError(f"{topology}: {refusals[0].text}; {refusals[0].price}", hint="use fewer stages")
    return tuple(range(first, last) for first, last in pairwise(cut.bounds))


def require_room(conversion: Conversion, output: Path) -> None:
    """Check, before anything is written, that `output` has room for the result.

    Raises:
        CheckpointError: a checkpoint of that step exists there, or the disk is too full.
    """
    target = CheckpointsDir(output).folder(checkpoint_tag(conversion.after.step))
    if target.exists():
        raise CheckpointError(f"{target}: already exists", hint="choose another folder with -o")
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    # What is stored once and what every rank stores differ a little between topologies.
    needed = sum(conversion.before.files.values()) * 5 // 4
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CheckpointError(
            f"{there}: {format_bytes(free)} are free, but the result may take {format_bytes(needed)}",
            hint="choose a folder on another disk with -o",
        )


def require_torch() -> None:
    """Check that what a conversion needs is installed.

    Raises:
        CheckpointError: it is not.
    """
    if missing := [name for name in ("torch", "deepspeed") if find_spec(name) is None]:
        raise CheckpointError(f"a conversion needs {missing[0]}, which is not installed", hint=INSTALL_TRAIN)


def require_undamaged(conversion: Conversion, report_progress: Progress) -> None:
    """Check that the checkpoint is as it was saved.

    Raises:
        CheckpointError: it is not.
    """
    if problems := find_damage(conversion.source, report_progress):
        raise CheckpointError("; ".join(problems[:5]))


def convert_checkpoint(conversion: Conversion, output: Path, report_progress: Progress) -> str:
    """Convert in a separate process, which may import torch. Return the folder that it wrote.

    Raises:
        CheckpointError: the conversion failed.
    """
    command = [*module_argv(sys.executable, "bigsci_launch.train.state.convert"), str(conversion.source)]
    command += [str(conversion.topology), conversion.config.parallelism.partition_method, str(output)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        last = _follow(process, report_progress)
        talk = process.stderr.read() if process.stderr else ""
    if "error" in last:
        raise CheckpointError(last["error"], hint=last["hint"])
    if "folder" not in last:
        raise CheckpointError(f"the conversion ended with status {process.returncode}: {talk.strip()[-500:]}")
    return str(last["folder"])


def _follow(process: subprocess.Popen[str], report_progress: Progress) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for line in process.stdout or ():
        if line.startswith("{"):
            last = parse_json(line)
            if "done" in last:
                report_progress(100 * last["done"] // last["total"], last["text"])
    return last
