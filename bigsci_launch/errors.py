"""Every error that a user may see, with its exit code and meaning.

    BslError                     1   the answer is bad, or the work failed
      GuardError                 1   the trainer found a defect in itself: unequal copies, wrong gradients, a bad load
      MemoryShortageError        1   no micro-batch is small enough for the memory of a rank
      ConfigError                2   the run file, site file or an option is wrong (carries positions)
      RunDirError                2   a run directory is missing or unreadable, or is not a run directory
      SlurmError                 3   Slurm is missing or refuses
        SlurmUnavailable         3   no such command, no slurm.conf, or slurmctld does not answer
          SlurmUnanswered        3   the request was sent, and no answer came: Slurm may have granted it
          SubmissionUnknown      3   an attempt may have a job: sbatch got no answer, and squeue shows none yet
        SlurmRefused             3   the command ran, and Slurm refused the request
        JobNotFound              3   neither squeue nor sacct knows the job
      ClusterError               3   the mini cluster could not be started or stopped
      CollectError               4   no rank could be read at all
      CheckpointError            4   a checkpoint, a weight dump or a log stored with them cannot be read
      EvidenceError              2   the file given as evidence of a hang is damaged, or is something else
      LabError                   2   a hang cannot be reproduced with this name, on these ranks or on this machine
      DataError                  2   a corpus or an indexed dataset is missing or broken

`cli.main` holds the only `except BslError`: it prints `error: MESSAGE`, then `hint: HINT`, and exits with
`exit_code`. Code below the command line neither prints nor exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INSTALL_TRAIN = "in a clone of bigsci-launch: pip install '.[train]'"
INSTALL_WEIGHTS = "in a clone of bigsci-launch: pip install '.[weights]'"
INSTALL_TOP = "in a clone of bigsci-launch: pip install '.[top]'"
INSTALL_OTLP = "in a clone of bigsci-launch: pip install '.[otlp]'"
INSTALL_MCP = "in a clone of bigsci-launch: pip install '.[mcp]'"
"""pip would look for `bigsci-launch[train]` in a public index, where the name is not registered."""


class BslError(Exception):
    """An error with a one-sentence message, a hint about what to do next, and an exit code."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration.

    `where` is `file:line:column` (or `--set`, or a command line option), `key` is the full dotted key, and `text` says
    what is wrong and which value was given.
    """

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.where}: {key}{self.text}" if self.where else f"{key}{self.text}"


class ConfigError(BslError):
    """The configuration is wrong; `problems` lists every error found, not only the first."""

    exit_code = 2

    def __init__(self, message: str, *, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class GuardError(BslError):
    """A guard of the trainer found a defect. `suspects` are the ranks that it is about.

    `accused` are those that are wrong according to the evidence: none if it does not show which of the suspects is.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, accused: Sequence[int] = (), suspects: Sequence[int] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.accused, self.suspects = tuple(accused), tuple(suspects)


class MemoryShortageError(BslError):
    """The training does not fit into the memory of a rank, whatever the size of micro-batches."""

    exit_code = 1


class RunDirError(BslError):
    """A run directory is missing or unreadable, or is not a run directory."""

    exit_code = 2


class EvidenceError(BslError):
    """The file given as evidence of a hang is damaged, or is something else."""

    exit_code = 2


class DataError(BslError):
    """A corpus or an indexed dataset is missing or broken."""

    exit_code = 2


class LabError(BslError):
    """A hang of the laboratory cannot be reproduced here, or did not reach its final state."""

    exit_code = 2


class SlurmError(BslError):
    """A Slurm command failed; keeps the command and its output."""

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
    """Slurm's commands are not installed or not configured, or its controller does not answer."""


class SlurmUnanswered(SlurmUnavailable):
    """The request was sent, and no answer came in time. Slurm may have granted it all the same."""


class SubmissionUnknown(SlurmUnavailable):
    """It is not known whether an attempt has a job. Its directory stays, so that the job is found again."""


class SlurmRefused(SlurmError):
    """Slurm answered, and refused the request."""


class JobNotFound(SlurmError):
    """No source that was asked knows the job."""


class AmbiguousJob(SlurmError):
    """An ID names several jobs: it is that of an array."""


class ClusterError(BslError):
    """The mini cluster could not be started, queried or stopped."""

    exit_code = 3


class CollectError(BslError):
    """Evidence could not be collected from any rank."""

    exit_code = 4


class CheckpointError(BslError):
    """A checkpoint, a weight dump or a log stored with them is missing, truncated or inconsistent."""

    exit_code = 4


class SaveError(CheckpointError):
    """The disk refused a rank's part of a checkpoint: `path`, with the errno `number` if it said one.

    `ranks` are those whose parts it refused, `node` is that of the first; empty until all ranks know of it.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, path: str | None = None, number: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.path, self.number = path, number
        self.ranks: tuple[int, ...] = ()
        self.node: str | None = None
