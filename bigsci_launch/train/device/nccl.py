"""What is set for NCCL and torch's watchdog of it, where the user has set nothing."""

from __future__ import annotations

from collections.abc import Mapping

from bigsci_launch.runs.layout import AttemptDir

NUM_RECORDED = 2000


def nccl_settings(attempt: AttemptDir, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a rank's environment before its first process group; those set stay as they are.

    After the group's time-out, torch's watchdog in each rank writes the recorded collectives into the attempt and ends
    the process; with `survive` it only aborts the communicators, and the process leaves the generation. Two of the
    names are those of torch before 2.9.
    """
    dumps = str(attempt.recorder_dumps)
    wanted = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2" if "BSL_SLOT_FD" in environ else "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": str(NUM_RECORDED),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(NUM_RECORDED),
        "TORCH_FR_DUMP_TEMP_FILE": dumps,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dumps,
    }
    return {name: value for name, value in wanted.items() if name not in environ}
