"""`bsl checkpoint`: what a run has saved, whether it is sound, and what may be deleted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.boundary import Habitual
from bigsci_launch.cli.options import JSON, RUN
from bigsci_launch.errors import CheckpointError
from bigsci_launch.units import format_bytes

if TYPE_CHECKING:
    from bigsci_launch.checkpoints.folder import CheckpointsDir
    from bigsci_launch.checkpoints.verify import CheckpointState
    from bigsci_launch.plan.choose.conversion import Conversion

STEP = click.option("--step", type=click.IntRange(min=0), help="The step of the checkpoint; default: the newest.")


@click.group(cls=Habitual, epilog="Example: bsl checkpoint list demo")
def checkpoint() -> None:
    """List, verify, pin, prune and convert checkpoints."""


@checkpoint.command(
    "list", short_help="List the checkpoints of a run, oldest first.", epilog="Example: bsl checkpoint list demo"
)
@RUN
@JSON
def list_(run: str | None, as_json: bool) -> None:
    """List the checkpoints of RUN (a name or a directory; default: the run submitted last), oldest first."""
    states = _states(run)
    if as_json:
        console.answer_json({"schema_version": 1, "checkpoints": [state.document for state in states]})
        return
    for state in states:
        marks = [name for name in ("latest", "pinned", "verified", "half_verified") if state.document[name]]
        marks += ["failed the guards"] if state.passed is False else []
        size = "unreadable" if state.size_bytes is None else format_bytes(state.size_bytes)
        console.answer(f"{state.folder.name:<20} {size:>14}  {' '.join(marks).replace('_', ' ')}".rstrip())


@checkpoint.command(
    short_help="Check a checkpoint, byte for byte.", epilog="Example: bsl checkpoint verify demo --step 20"
)
@RUN
@STEP
@JSON
@click.pass_context
def verify(ctx: click.Context, run: str | None, step: int | None, as_json: bool) -> None:
    """Check that a checkpoint of RUN is complete, that its bytes are those that were saved, and that all of its files
    are of one step. What cannot be checked is listed.

    Exit code: 0 as it was saved, 1 damaged.
    """
    from bigsci_launch.checkpoints.verify import verify_checkpoint

    folder = _folder(run, step)
    with console.late_progress("verify", 100) as report_progress:
        found = verify_checkpoint(folder, report_progress)
    if as_json:
        document = {"path": str(folder), "sound": not found.problems, **asdict(found)}
        console.answer_json({"schema_version": 1, **document})
    else:
        console.answer("\n".join(found.problems) or f"{folder.name}: unchanged since it was saved")
        for line in found.remarks:
            console.talk(f"{folder.name}: {line}")
    ctx.exit(1 if found.problems else 0)


@checkpoint.command(epilog="Example: bsl checkpoint pin demo --step 20")
@RUN
@STEP
@click.option("--undo", is_flag=True, help="Unpin it.")
def pin(run: str | None, step: int | None, undo: bool) -> None:
    """Keep a checkpoint of RUN from being pruned."""
    from bigsci_launch.checkpoints.verify import pin_path

    folder = _folder(run, step)
    pin_path(folder).unlink(missing_ok=True) if undo else pin_path(folder).touch()
    console.answer(f"{folder.name}: {'no longer pinned' if undo else 'pinned'}")


@checkpoint.command(
    short_help="Delete old checkpoints that are not needed.",
    epilog="Example: bsl checkpoint prune demo --keep 3 --dry-run",
)
@RUN
@click.option("--keep", required=True, type=click.IntRange(min=1), help="How many of the newest to keep.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
def prune(run: str | None, keep: int, dry_run: bool) -> None:
    """Delete old checkpoints of RUN, but never the newest, the last verified, the last that passed the guards' checks,
    a pinned or a half verified one."""
    from bigsci_launch.checkpoints.verify import choose_prunable, delete_checkpoint, finish_deletions

    if not dry_run:
        finish_deletions(_checkpoints(run))
    doomed = choose_prunable(_states(run), keep)
    for state in doomed:
        if not dry_run:
            delete_checkpoint(state.folder)
        console.answer(f"{'would delete' if dry_run else 'deleted'} {state.folder.name}")
    if not doomed:
        console.answer("nothing to delete")


@checkpoint.command(
    short_help="Convert a checkpoint to another topology.",
    epilog="Example: bsl checkpoint convert demo --tp 1 -o runs/demo-1/checkpoints",
)
@RUN
@STEP
@click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel size; default: unchanged.")
@click.option("--pp", type=click.IntRange(min=1), help="Pipeline-parallel size; default: unchanged.")
@click.option("--dp", type=click.IntRange(min=1), help="Data-parallel size; default: unchanged.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write it to.")
@click.option("--dry-run", is_flag=True, help="Print what would change; write nothing.")
def convert(
    run: str | None, step: int | None, tp: int | None, pp: int | None, dp: int | None, output: Path, dry_run: bool
) -> None:
    """Convert a checkpoint of RUN (a run, or a checkpoint's own folder) to another topology.

    Weights, fp32 masters, moments, the optimizer's step, the schedule and the place in the data are kept to the last
    bit. If copies differ, the conversion is refused. If the output is the `checkpoints` folder of a new run, that run
    resumes from it.
    """
    from bigsci_launch.checkpoints.folder import read_record
    from bigsci_launch.plan.choose.conversion import plan_conversion, require_room, require_torch, saved_topology
    from bigsci_launch.topology import Topology

    if not dry_run:
        require_torch()
    folder = _folder(run, step)
    saved = saved_topology(read_record(folder))
    conversion = plan_conversion(folder, Topology(tp=tp or saved.tp, pp=pp or saved.pp, dp=dp or saved.dp))
    for line in conversion.changes:
        console.talk(f"{folder.name}: {line}")
    require_room(conversion, output)
    if dry_run:
        size = format_bytes(sum(conversion.before.files.values()))
        console.answer(f"would write {output / folder.name}, about {size}")
        return
    console.answer(f"wrote {_convert(conversion, output)}")


def _convert(conversion: Conversion, output: Path) -> str:
    from bigsci_launch.plan.choose.conversion import convert_checkpoint, require_undamaged

    with console.late_progress("verify", 100) as report_progress:
        require_undamaged(conversion, report_progress)
    with console.late_progress("convert", 100) as report_progress:
        return convert_checkpoint(conversion, output, report_progress)


def _folder(run: str | None, step: int | None) -> Path:
    """Return the folder of the checkpoint to work on. RUN may be that folder itself."""
    from bigsci_launch.checkpoints.folder import is_checkpoint_name, record_path

    if run is not None and (record_path(Path(run)).is_file() or is_checkpoint_name(Path(run))):
        return Path(run)
    states = _states(run)
    found = [state.folder for state in states if step is None or state.step == step]
    if not found:
        saved = ", ".join(str(state.step) for state in states)
        raise CheckpointError(f"no checkpoint of step {step}", hint=f"saved steps: {saved}")
    return found[-1]


def _states(run: str | None) -> list[CheckpointState]:
    from bigsci_launch.checkpoints.verify import list_checkpoints

    checkpoints = _checkpoints(run)
    states = list_checkpoints(checkpoints)
    if not states:
        raise CheckpointError(f"{checkpoints.path}: contains no checkpoint")
    return states


def _checkpoints(run: str | None) -> CheckpointsDir:
    from bigsci_launch.checkpoints.folder import CheckpointsDir
    from bigsci_launch.runs.find import find_run

    return CheckpointsDir(find_run(run).checkpoints)
