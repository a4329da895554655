"""What frames of known libraries mean: which only pass calls on, which communicate, and over which ranks.

Sources: torch 2.4 to 2.13 `distributed_c10d.py`; DeepSpeed 0.16 to 0.19 `runtime/pipe/engine.py`, `runtime/utils.py`,
`runtime/bf16_optimizer.py`, `runtime/zero/stage_1_and_2.py`; Megatron-LM and Megatron-DeepSpeed `mpu`, `core`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bigsci_launch.spy.taxonomy import HangClass

WRAPPER_FILES = (
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "torch/_dynamo/",
    "torch/nn/modules/module.py",
    "torch/autograd/",
    "torch/_tensor.py",
    "torch/_compile.py",
    "deepspeed/comm/",
    "deepspeed/utils/nvtx.py",
    "deepspeed/utils/timer.py",
    "/contextlib.py",
    "/typing_extensions.py",
    "<string>",
)

# The innermost frame of a thread that waits for another thread.
IDLE_FUNCTIONS = (
    ("wait", "/threading.py"),
    ("_wait_for_tstate_lock", "/threading.py"),
    ("join", "/threading.py"),
    ("get", "/queue.py"),
    ("_worker", "/concurrent/futures/thread.py"),
)

_OPERATIONS = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce",
        "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
        "_all_gather_base", "_reduce_scatter_base",
    }
)  # fmt: skip
POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_SETUP = {
    "new_group": "new_group",
    "_new_process_group_helper": "new_group",
    "init_process_group": "init_process_group",
    "_store_based_barrier": "init_process_group",
}


@lru_cache(maxsize=1 << 14)  # few frames, many ranks
def operation_of(function: str, file: str) -> str | None:
    """Return the communication that a frame is, or None. Set-up calls count: they wait for all ranks too."""
    if not file.endswith("torch/distributed/distributed_c10d.py"):
        return None
    function = bare_name(function)
    return function if function in _OPERATIONS else _SETUP.get(function)


@lru_cache(maxsize=1 << 14)
def may_communicate(function: str, file: str) -> bool:
    """Whether ranks may communicate below this frame without a frame of Python."""
    return bare_name(function) == "_engine_run_backward" and file.endswith("torch/autograd/graph.py")


def bare_name(function: str) -> str:
    """Return the name without its class: Python 3.11 and newer show `PipelineEngine.train_batch`."""
    return function.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A known function that communicates, and over which ranks: the scope, as in `groups`."""

    function: str
    file: str
    scope: str
    operation: str | None = None


# The first match counts. Frames are looked up one by one from the innermost.
_KNOWN_CALLS = (
    KnownCall("_exec_reduce_tied_grads", "pipe/engine.py", "tied"),
    KnownCall("allreduce_tied_weight_gradients", "pipe/module.py", "tied"),
    KnownCall("_synchronize_tied_weights", "pipe/module.py", "tied"),
    KnownCall("_exec_send_activations", "pipe/engine.py", "next stage"),
    KnownCall("_exec_recv_activations", "pipe/engine.py", "previous stage"),
    KnownCall("_exec_send_grads", "pipe/engine.py", "previous stage"),
    KnownCall("_exec_recv_grads", "pipe/engine.py", "next stage"),
    KnownCall("_aggregate_total_loss", "pipe/engine.py", "dp", "all_reduce"),
    KnownCall("_aggregate_total_loss", "pipe/engine.py", "pp", "broadcast"),
    KnownCall("_bcast_pipe_scalar", "pipe/engine.py", "pp"),
    KnownCall("_reduce_outputs", "pipe/engine.py", "dp"),
    KnownCall("_exec_reduce_grads", "pipe/engine.py", "dp-cp"),
    KnownCall("full", "runtime/utils.py", "tp"),
    KnownCall("get_global_norm_of_tensors", "runtime/utils.py", "model"),
    KnownCall("get_grad_norm_direct", "zero/stage_1_and_2.py", "model"),
    KnownCall("all_gather_dp_groups", "runtime/utils.py", "dp-cp"),
    KnownCall("all_gather_into_tensor_dp_groups", "runtime/utils.py", "dp-cp"),
    KnownCall("allreduce_gradients", "runtime/engine.py", "dp-cp"),
    KnownCall("buffered_allreduce_fallback", "runtime/engine.py", "dp-cp"),
    KnownCall("average_tensor", "zero/stage_1_and_2.py", "dp-cp"),
    KnownCall("reduce_ipg_grads", "zero/stage_1_and_2.py", "dp-cp"),
    KnownCall("", "bigsci_launch/train/parallel/tensor.py", "tp"),
    KnownCall("", "megatron/mpu/mappings.py", "tp"),
    KnownCall("", "megatron/mpu/cross_entropy.py", "tp"),
    KnownCall("", "megatron/mpu/data.py", "tp"),
    KnownCall("", "megatron/core/tensor_parallel/mappings.py", "tp"),
    KnownCall("", "megatron/core/tensor_parallel/data.py", "tp"),
    KnownCall("", "megatron/core/tensor_parallel/layers.py", "tp"),
    KnownCall("", "megatron/core/tensor_parallel/cross_entropy.py", "tp"),
    KnownCall("recv_forward", "p2p_communication.py", "previous stage"),
    KnownCall("recv_backward", "p2p_communication.py", "next stage"),
    KnownCall("send_forward", "p2p_communication.py", "next stage"),
    KnownCall("send_backward", "p2p_communication.py", "previous stage"),
)


@lru_cache(maxsize=1 << 14)
def call_scope(function: str, file: str, operation: str) -> str | None:
    """Return the scope of `operation` when called from this frame, or None if it is not known."""
    function = bare_name(function)
    for call in _KNOWN_CALLS:
        if call.function in ("", function) and file.endswith(call.file) and call.operation in (None, operation):
            return call.scope
    return None


@dataclass(frozen=True, slots=True)
class KnownWait:
    """A known place in which a process waits outside any communication, and what that means.

    `words` completes "rank 3 ...". `wchan` are prefixes of kernel functions, one of which must match.
    """

    hang_class: HangClass
    words: str
    function: str = ""
    file: str = ""
    wchan: tuple[str, ...] = ()


KERNEL_WAITS = (
    KnownWait(HangClass.FILE_LOCK_HELD, "waits for a file lock", wchan=(
        "locks_lock_inode_wait", "flock_lock_inode_wait", "posix_lock")),
    KnownWait(HangClass.OUTPUT_PIPE_FULL, "writes to a pipe that nobody reads", wchan=(
        "anon_pipe_write", "pipe_write", "pipe_wait_writable")),
    KnownWait(HangClass.FILE_SERVER_LOST, "waits for a file server", wchan=(
        "rpc_wait_bit", "nfs_", "cl_sync_io_wait", "ptlrpc_")),
    KnownWait(HangClass.DEVICE_SILENT, "waits for a device or a file system daemon that does not answer", wchan=(
        "request_wait_answer", "fuse_", "nv_", "nvidia", "nvkms", "uvm_", "uverbs", "ib_uverbs", "mlx5_", "__rdma")),
)  # fmt: skip
"""Waits that the kernel function alone identifies."""

KNOWN_WAITS = (
    KnownWait(HangClass.BUILD_LOCK_STALE, "waits for a build lock that nobody releases", function="wait",
              file="file_baton.py"),
    KnownWait(HangClass.BREAKPOINT_FORGOTTEN, "waits at a debugger prompt", function="interaction", file="/pdb.py"),
    KnownWait(HangClass.BREAKPOINT_FORGOTTEN, "waits at a debugger prompt", function="cmdloop", file="/cmd.py"),
    KnownWait(HangClass.BREAKPOINT_FORGOTTEN, "waits for a terminal", wchan=("n_tty_read",)),
    KnownWait(HangClass.POOL_STUCK, "waits for a process pool", file="multiprocessing/pool.py"),
    KnownWait(HangClass.CHILD_STUCK, "waits for a child process", wchan=("do_wait",)),
    KnownWait(HangClass.NETWORK_CALL_UNANSWERED, "waits for the network", wchan=(
        "wait_woken", "sk_wait_data", "inet_csk_acc", "inet_wait_for")),
    KnownWait(HangClass.NETWORK_CALL_UNANSWERED, "waits for the network", file="/socket.py"),
    KnownWait(HangClass.NETWORK_CALL_UNANSWERED, "waits for the network", file="/ssl.py"),
    KnownWait(HangClass.NETWORK_CALL_UNANSWERED, "waits for the network", file="/urllib3/connectionpool.py"),
    KnownWait(HangClass.BLOCKED_IN_C, "sleeps", wchan=("hrtimer_nanosleep",)),
)  # fmt: skip

DATA_LOADER_FILES = ("torch/utils/data/dataloader.py",)
CHILD_FILES = (*DATA_LOADER_FILES, "/subprocess.py", "multiprocessing/", "concurrent/futures/process.py")
"""A thread in one of these may wait for a process below its own."""

MAP_LOCK_WAITS = ("__vma_start_write", "down_write", "down_read", "rwsem_down", "do_mprotect_pkey", "mmap_lock")
"""Kernel functions in which a thread waits for the lock of its process's memory map."""
FAULT_WAITS = ("filemap_", "folio_wait", "wait_on_page", "do_page_fault", "handle_mm_fault", "do_user_addr_fault")
DAEMON_WAITS = ("request_wait_answer", "fuse_")
LOCK_WAITS = ("futex",)
