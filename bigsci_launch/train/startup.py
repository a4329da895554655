"""Sets up a rank before training: device, threads, log noise and the process group.

Import it before DeepSpeed, which reads the environment variable that chooses the accelerator only once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import torch

log = logging.getLogger(__name__)


def start_torch() -> None:
    """Choose this rank's device (one thread per rank on a CPU) and keep known noise out of the log."""
    if torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cuda")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # DeepSpeed broadcasts the initial weights outside autograd, and calls all_gather by a name that torch replaced.
    warnings.filterwarnings("ignore", message=r".*c10d::.*autograd kernel.*")
    warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.*", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def start_deepspeed() -> None:
    """Import DeepSpeed without the parts that cost seconds on every rank and are not used here."""
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.runtime.zero import utils as zero_utils

    from bigsci_launch.train.optimizer import EagerAdamW

    # On a CPU the first process group would compile a C++ operator: that takes 27 s and needs a compiler on every node.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Both ZeRO optimizers import Muon, which calls torch.compile on import: 1 s of CPU for nothing.
    if hasattr(compiler, "dummy_decorator"):
        compiler.compile = lambda: compiler.dummy_decorator
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(EagerAdamW)
    # BF16_Optimizer reports memory nine times, each with a full garbage collection; frozen objects are not scanned.
    gc.collect()
    gc.freeze()


def join_ranks() -> None:
    """Join the process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; blocks until all ranks have joined."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    backend = get_accelerator().communication_backend_name()
    with talk_as_debug():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


@contextlib.contextmanager
def talk_as_debug() -> Iterator[None]:
    """Inside the `with` block, send what libraries print to the log at level DEBUG, line by line."""
    with contextlib.redirect_stdout(_DebugStream()):
        yield
    sys.stdout.flush()


class _DebugStream:
    """A text stream that logs each line."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                log.debug("%s", line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
