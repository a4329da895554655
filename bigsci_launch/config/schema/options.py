"""Types of further options of sbatch and srun. Those that `bsl` writes itself are refused."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

# Options that the header of the job script already has, or that would change what sbatch answers; `account`, `qos` and
# others have their own keys.
WRITTEN_FOR_SBATCH = re.compile(
    r"--(account|array|chdir|comment|constraint|cpus-per-task|dependency|error|exclude|gres|help|job-name|nodelist|nodes"
    r"|no-requeue|ntasks|ntasks-per-node|open-mode|output|parsable|partition|qos|requeue|reservation|signal"
    r"|tasks-per-node|test-only|time|usage|version|wait|wrap)"
)
# Options of the step that runs the ranks, and those that would start other ranks than the run's.
WRITTEN_FOR_SRUN = re.compile(
    r"--(chdir|container-env|container-image|container-mount-home|container-mounts|container-workdir|cpu-bind"
    r"|cpus-per-task|distribution|error|export|help|input|jobid|kill-on-bad-exit|label|mpi|multi-prog"
    r"|no-container-mount-home|nodelist|nodes|ntasks|ntasks-per-node|output|propagate|pty|tasks-per-node|usage"
    r"|version|wait)"
)


# Keys of a run file that such options come from, for those that have one.
KEYS = {
    "--job-name": "run.name",
    "--signal": "run.stop_signal and monitor.exit_margin_s",
    "--time": "slurm.time_limit",
    "--no-requeue": "slurm.requeue",
    **{
        f"--{name}": f"slurm.{name}"
        for name in (
            *("account", "constraint", "dependency", "exclude", "nodelist", "nodes", "partition", "qos", "requeue"),
            "reservation",
        )
    },
}


def name_of(option: str) -> str:
    """Return `--name` of `--name=value`, `--name value` or `--name`."""
    return re.split(r"[=\s]", option)[0]


def _free_of(written: re.Pattern[str], options: list[str]) -> list[str]:
    names = [name_of(option) for option in options]
    taken = [name for name in names if written.fullmatch(name)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if taken:
        raise ValueError(f"`bsl` sets {', '.join(map(_with_key, taken))} itself")
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return options


def _with_key(name: str) -> str:
    return f"{name} ({KEYS[name]})" if name in KEYS else name


def _free_for_sbatch(options: list[str]) -> list[str]:
    return _free_of(WRITTEN_FOR_SBATCH, options)


def _free_for_srun(options: list[str]) -> list[str]:
    return _free_of(WRITTEN_FOR_SRUN, options)


SbatchOption = Annotated[str, Field(pattern=r"^--[a-z][^\r\n]*$")]
# One word of a command line: a value follows `=`, since what follows a blank would be another word.
LongOption = Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[^\r\n]*)?$")]
SbatchOptions = Annotated[list[SbatchOption], AfterValidator(_free_for_sbatch)]
SrunOptions = Annotated[list[LongOption], AfterValidator(_free_for_srun)]
