"""Every error that a user may see, with its exit code and what to do next.

    BslError                     1   the answer is bad, or the work failed
      GuardError                 1   the trainer found itself wrong: copies apart, gradients not whole, a bad load
      ConfigError                2   the run file, site file or an option is wrong (carries positions)
      RunDirError                2   a run directory is missing, unreadable or not one
      SlurmError                 3   Slurm is missing or refuses
        SlurmUnavailable         3   no such command, no slurm.conf, or slurmctld does not answer
        SlurmRefused             3   the command ran and said no
        JobNotFound              3   neither squeue nor sacct knows the job
      ClusterError               3   the mini cluster could not be started or stopped
      CollectError               4   no rank could be read at all
      CheckpointError            4   a checkpoint, a weight dump or a log beside them cannot be read
      EvidenceError              2   what was given as evidence of a hang is none, or is damaged
      LabError                   2   a hang cannot be reproduced: the name, the ranks or this machine
      DataError                  2   a corpus or an indexed dataset is missing or broken

`cli.main` holds the only `except BslError`: it prints `error: MESSAGE`, then `hint: HINT`, and exits with
`exit_code`. Below the command line nothing prints and nothing exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class BslError(Exception):
    """An error with a message of one sentence, a hint that names what to do next, and an exit code."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a configuration.

    `where` is `file:line:column` (or `--set`, or a command line option), `key` the full dotted key, `text` what is
    wrong including the value that was given.
    """

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.where}: {key}{self.text}" if self.where else f"{key}{self.text}"


class ConfigError(BslError):
    """The configuration is wrong; `problems` holds all that was found, not only the first."""

    exit_code = 2

    def __init__(self, message: str, *, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class GuardError(BslError):
    """A guard of the trainer fired: what must be equal is not."""


class RunDirError(BslError):
    """A run directory is missing, unreadable, or holds something else."""

    exit_code = 2


class EvidenceError(BslError):
    """What was given as evidence of a hang is none, or is damaged."""

    exit_code = 2


class DataError(BslError):
    """A corpus or an indexed dataset is missing or broken."""

    exit_code = 2


class LabError(BslError):
    """A hang of the laboratory cannot be reproduced here, or did not come to stand."""

    exit_code = 2


class SlurmError(BslError):
    """A Slurm command failed; keeps what was run and what it said."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        argv: Sequence[str] = (),
        returncode: int | None = None,
        stderr: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr


class SlurmUnavailable(SlurmError):
    """Slurm's commands are not installed, not configured, or its controller does not answer."""


class SlurmRefused(SlurmError):
    """Slurm answered, and the answer is no."""


class JobNotFound(SlurmError):
    """No source that was asked knows the job."""


class ClusterError(BslError):
    """The mini cluster could not be started, asked or stopped."""

    exit_code = 3


class CollectError(BslError):
    """Evidence could not be collected from any rank."""

    exit_code = 4


class CheckpointError(BslError):
    """A checkpoint, a weight dump or a log beside them is missing, truncated or inconsistent."""

    exit_code = 4
