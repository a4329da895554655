"""Twelve failures under torchrun."""

from __future__ import annotations

from failing import scripts
from failing.acts import cancel, cut_power
from failing.case import CRASHED, HANG, MEMORY, LaunchFailure
from failing.scripts import DETAIL, launched

TORCHRUN = (
    LaunchFailure(
        "torchrun",
        "exception",
        "a KeyError; peers lose the connection",
        CRASHED,
        launched(scripts.TORCHRUN, "--how key --rank 3 --together gloo"),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "log-dir",
        "a chained exception, and torchrun's folder of logs",
        CRASHED,
        launched(scripts.TORCHRUN, "--how context --rank 1 --together gloo", more="--log-dir $LOGS --redirects 3"),
        nodes=(2, 2),
        tasks=1,
        has_logs=True,
    ),
    LaunchFailure(
        "torchrun",
        "segfault",
        "a segmentation fault under gloo",
        CRASHED,
        launched(scripts.TORCHRUN_STATIC, "--how segfault --rank 2 --together gloo"),
        nodes=(4, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "oom",
        "the kernel kills a rank that uses more than its cgroup may",
        (*MEMORY, *CRASHED),
        launched(scripts.TORCHRUN, "--how oom --rank 2 --together tcp"),
        nodes=(6, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "missing-module",
        "a module that one node does not have",
        CRASHED,
        launched(
            scripts.TORCHRUN_STATIC, "--before missing_module --on n09 --together gloo --timeout 20", srun="--label"
        ),
        nodes=(8, 3),
        tasks=1,
        whose="ranks of a node",
    ),
    LaunchFailure(
        "torchrun",
        "collective-timeout",
        "a rank sleeps; a collective of gloo times out",
        HANG,
        launched(scripts.TORCHRUN, "--how hang --rank 1 --together gloo --timeout 10"),
        nodes=(1, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "shape",
        "a tensor of another shape, with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ("mismatch",),
        launched(scripts.TORCHRUN, "--how shape --rank 3 --together gloo --timeout 20", before=DETAIL),
        nodes=(3, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "loader-killed",
        "a worker of the DataLoader is killed",
        (*MEMORY, *CRASHED),
        launched(scripts.TORCHRUN_STATIC, "--loader killed --rank 2 --together gloo"),
        nodes=(5, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "exit-text",
        "sys.exit(text) of one rank before the ranks meet",
        CRASHED,
        launched(scripts.TORCHRUN, "--before exit_text --rank 3 --together gloo --timeout 20"),
        nodes=(7, 2),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "peer-first",
        "os.abort; a peer on another node reports a lost connection first",
        CRASHED,
        launched(scripts.TORCHRUN, "--how abort --rank 5 --together gloo", srun="--label"),
        nodes=(0, 3),
        tasks=1,
    ),
    LaunchFailure(
        "torchrun",
        "cancelled",
        "scancel, while all is well",
        ("cancelled",),
        launched(scripts.TORCHRUN, "--together tcp --steps 400"),
        nodes=(2, 2),
        tasks=1,
        act=cancel,
        whose="none",
    ),
    LaunchFailure(
        "torchrun",
        "node-failure",
        "a node loses power",
        ("node_failure",),
        launched(scripts.TORCHRUN, "--together tcp --steps 400"),
        nodes=(12, 3),
        tasks=1,
        act=cut_power,
        whose="node",
    ),
)
