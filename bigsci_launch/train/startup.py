"""Sets up a rank before training: device, threads, log noise and the process group.

Import it before DeepSpeed, which reads the environment variable that chooses the accelerator only once.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from bigsci_launch.config.schema.run import TrainingSection
from bigsci_launch.train.device.choice import Device, choose_device
from bigsci_launch.train.device.meeting import DeviceFacts, meet
from bigsci_launch.train.device.nccl import nccl_settings
from bigsci_launch.train.rank.identity import RankIdentity
from bigsci_launch.train.rank.quiet import talk_as_debug

log = logging.getLogger(__name__)


def start_torch(training: TrainingSection) -> None:
    """Choose this rank's device (one thread per rank on a CPU) and keep known noise out of the log.

    A rank without a device is only refused in `join_ranks`, where all ranks are notified.
    """
    device = _this_device(training)
    os.environ["DS_ACCELERATOR"] = device.kind
    if device.index is not None:
        # DeepSpeed takes the GPU of LOCAL_RANK in several places.
        os.environ["LOCAL_RANK"] = str(device.index)
        torch.cuda.set_device(device.index)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if training.deterministic:
        _compute_deterministically()
    quieten_libraries()


def quieten_libraries() -> None:
    """Keep known noise of torch and DeepSpeed out of the log."""
    # DeepSpeed broadcasts the initial weights outside autograd, and calls all_gather by a name that torch replaced.
    warnings.filterwarnings("ignore", message=r".*c10d::.*autograd kernel.*")
    warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.*", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def _this_device(training: TrainingSection) -> Device:
    """Return this rank's device; the same before and after `start_torch` has set LOCAL_RANK."""
    return choose_device(
        training.device,
        shares=training.share_devices,
        num_visible=torch.cuda.device_count(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        environ=os.environ,
    )


def _compute_deterministically() -> None:
    """Make torch use kernels whose sums have a fixed order, and refuse operations that have none."""
    # cuBLAS reads it when a GPU is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def start_deepspeed() -> None:
    """Import DeepSpeed without the parts that cost seconds on every rank and are not used here."""
    import deepspeed.ops
    from deepspeed.runtime import compiler

    # On a CPU the first process group would compile a C++ operator: that takes 27 s and needs a compiler on every node.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Both ZeRO optimizers import Muon, which calls torch.compile on import: 1 s of CPU for nothing.
    if hasattr(compiler, "dummy_decorator"):
        compiler.compile = lambda: compiler.dummy_decorator
    # BF16_Optimizer reports memory nine times, each with a full garbage collection; frozen objects are not scanned.
    gc.collect()
    gc.freeze()


def join_ranks(training: TrainingSection, identity: RankIdentity) -> None:
    """Join the process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; blocks until all ranks have joined.

    Raises:
        BslError: the ranks' devices cannot train together; every rank raises it.
    """
    import deepspeed

    device = _this_device(training)
    if not dist.is_initialized():
        _form_group(device, identity, shares=training.share_devices)
    with talk_as_debug():
        deepspeed.init_distributed(dist_backend=device.backend, auto_mpi_discovery=False, verbose=False)
    if device.kind == "cuda" and device.backend == "gloo":
        from bigsci_launch.train.device.staging import send_through_host

        send_through_host()


def _form_group(device: Device, identity: RankIdentity, *, shares: bool) -> None:
    from deepspeed.constants import default_pg_timeout

    store, rank, world_size = next(rendezvous("env://", timeout=default_pg_timeout))
    store.set_timeout(default_pg_timeout)
    verdict = meet(PrefixStore("devices", store), _facts(device, identity), world_size, shares=shares)
    if rank == 0:
        for remark in verdict.remarks:
            log.warning("%s", remark)
    if device.backend == "nccl":
        os.environ.update(nccl_settings(identity.attempt, os.environ))
    # With a device, NCCL forms its communicator here instead of in the first collective call, where a failure is
    # hard to tell from a hang.
    binds = device.backend == "nccl" and world_size > 1 and device.index is not None
    dist.init_process_group(
        device.backend,
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=default_pg_timeout,
        device_id=torch.device("cuda", device.index or 0) if binds else None,
    )


def _facts(device: Device, identity: RankIdentity) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device.index) if device.index is not None else None
    uuid = getattr(properties, "uuid", None)
    return DeviceFacts(
        rank=identity.rank,
        node=identity.node,
        kind=device.kind,
        backend=device.backend,
        name="CPU" if properties is None else properties.name,
        identity=None if uuid is None else str(uuid),
        torch=torch.__version__,
        why=device.why,
        refusal=device.refusal,
    )
