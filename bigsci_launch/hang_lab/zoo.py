"""The entries of the catalogue: every reproduction, and every class without one; both are found by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import (
    NotReproduced,
    Reproduction,
    Stand,
    all_others,
    both_across,
    both_partners,
    no_rank,
    rank_0,
)
from bigsci_launch.spy.taxonomy import HangClass, State

ENDED = Stand.ALL_ENDED
MOVING = Stand.MOVING


def _entries(program: str, *entries: Reproduction) -> tuple[Reproduction, ...]:
    return tuple(replace(one, program=program) for one in entries)


def _entry(
    hang_class: HangClass,
    recipe: str,
    variant: str = "",
    title: str = "",
    *,
    states: tuple[State, ...] = (),
    also: tuple[HangClass | None, ...] = (),
    **fields: object,
) -> Reproduction:
    """Return a reproduction with the defaults of its class. `also` are other classes that are right answers, too."""
    return Reproduction(
        name=f"{hang_class}-{variant}" if variant else str(hang_class),
        hang_class=hang_class,
        title=title or hang_class.title,
        program="",
        recipe=recipe,
        states=states or _right_states(hang_class),
        classes=(hang_class, *also),
        **fields,  # type: ignore[arg-type]
    )


def _right_states(hang_class: HangClass) -> tuple[State, ...]:
    """Return the state of the class. A slow job progresses, so that is a right answer, too."""
    return (State.SLOW, State.PROGRESSING) if hang_class.state is State.SLOW else (hang_class.state,)


DIVERGENCE = _entries(
    "divergence",
    _entry(HangClass.COLLECTIVE_SKIPPED, "skip"),
    _entry(HangClass.COLLECTIVE_SKIPPED, "skip-world", "world", "skipped collective, only data parallelism",
           shape="data", min_ranks=2, also=(HangClass.OPERATION_DIFFERS,)),
    _entry(HangClass.COLLECTIVE_SKIPPED, "skip-wrapped", "wrapped",
           "skipped collective, recorders that cover different times"),
    _entry(HangClass.LEFT_EARLY, "uneven-data"),
    _entry(HangClass.OPERATION_DIFFERS, "type"),
    _entry(HangClass.OPERATION_DIFFERS, "type-wrapped", "wrapped",
           "different operation, recorders that cover different times"),
    _entry(HangClass.OPERATION_DIFFERS, "type-majority", "majority", "different operation on all ranks but one",
           suspects=all_others, must_accuse=False),
    _entry(HangClass.SIZE_DIFFERS, "size", title="different size: gloo aborts", stand=ENDED, must_accuse=False,
           also=(HangClass.RANK_KILLED, HangClass.RANK_CRASHED)),
    _entry(HangClass.TYPE_DIFFERS, "dtype", stand=MOVING, must_accuse=False, also=(HangClass.HEALTHY,)),
    _entry(HangClass.ROOT_DIFFERS, "root", must_accuse=False, also=(HangClass.PHASES_SPLIT,)),
    _entry(HangClass.GROUP_ORDER_DIFFERS, "order", suspects=both_across),
    _entry(HangClass.GROUP_ORDER_DIFFERS, "order-single", "single", "order swapped on one rank: no hang",
           states=(State.PROGRESSING,), stand=MOVING, suspects=no_rank, must_accuse=False, also=(HangClass.HEALTHY,)),
    _entry(HangClass.MESSAGES_NEVER_MEET, "recv-recv", suspects=both_partners, must_accuse=False),
    _entry(HangClass.MESSAGE_TAG_DIFFERS, "tag", suspects=both_partners, must_accuse=False,
           also=(HangClass.MESSAGES_NEVER_MEET,)),
    _entry(HangClass.PHASES_SPLIT, "phase-split", title="some in the loss broadcast, some in the exit flag",
           suspects=no_rank, must_accuse=False, culprits="no matter"),
    _entry(HangClass.STEP_DROPPED, "skip-step", stand=MOVING, must_accuse=False, also=(HangClass.HEALTHY,)),
    _entry(HangClass.OBJECT_COLLECTIVE_SKIPPED, "skip-object", must_accuse=False,
           also=(HangClass.COLLECTIVE_SKIPPED, HangClass.LEFT_EARLY)),
    _entry(HangClass.GROUP_MADE_ALONE, "new-group"),
    _entry(HangClass.FIRST_USE_SKIPPED, "lazy-group", must_accuse=False,
           also=(HangClass.COLLECTIVE_SKIPPED, HangClass.LEFT_EARLY)),
    _entry(HangClass.LOCAL_DECISION, "kill-switch", "file", "kill switch that one rank alone sees",
           also=(HangClass.PHASES_SPLIT, HangClass.LEFT_EARLY)),
    _entry(HangClass.LOCAL_DECISION, "signal", "signal", "SIGUSR1 that reaches one rank alone",
           also=(HangClass.PHASES_SPLIT, HangClass.LEFT_EARLY)),
    _entry(HangClass.SIZE_ORDER_DIFFERS, "hook-order", stand=ENDED, must_accuse=False,
           also=(HangClass.SIZE_DIFFERS, HangClass.RANK_KILLED, HangClass.RANK_CRASHED)),
    _entry(HangClass.COLLECTIVE_IN_OTHER_THREAD, "other-thread", also=(HangClass.BLOCKED_IN_C,)),
    _entry(HangClass.ASYNC_COLLECTIVE_AWAITED, "async-wait", also=(HangClass.BLOCKED_IN_C,)),
    _entry(HangClass.COMMUNICATOR_ORDER_DIFFERS, "two-communicators",
           title="two communicators in different order: gloo continues", stand=MOVING, must_accuse=False,
           also=(HangClass.HEALTHY,)),
    _entry(HangClass.RARE_GROUP_SKIPPED, "embedding", shape="stages", also=(HangClass.COLLECTIVE_SKIPPED,)),
    _entry(HangClass.SPLITS_UNEVEN, "uneven-splits", stand=ENDED, must_accuse=False,
           also=(HangClass.SIZE_DIFFERS, HangClass.RANK_KILLED, HangClass.RANK_CRASHED)),
    _entry(HangClass.PROGRAM_DIFFERS, "other-flag", title="one rank has a different flag", must_accuse=False,
           also=(HangClass.COLLECTIVE_SKIPPED,)),
)  # fmt: skip

HOST_STALL = _entries(
    "host_stall",
    _entry(HangClass.PYTHON_NEVER_ENDS, "spin"),
    _entry(HangClass.BLOCKED_IN_C, "sleep"),
    _entry(HangClass.BLOCKED_WITH_GIL, "gil-held"),
    _entry(HangClass.GIL_DEADLOCK, "gil-deadlock", also=(HangClass.BLOCKED_WITH_GIL,)),
    _entry(HangClass.THREAD_DEADLOCK, "crossed-locks"),
    _entry(HangClass.CHILD_STUCK, "fork-lock", title="fork with a lock held"),
    _entry(HangClass.BATCH_THREAD_STUCK, "feed-stops"),
    _entry(HangClass.BUILD_LOCK_STALE, "lock-file"),
    _entry(HangClass.FILE_LOCK_HELD, "flock"),
    _entry(HangClass.BREAKPOINT_FORGOTTEN, "debugger"),
    _entry(HangClass.NETWORK_CALL_UNANSWERED, "silent-server"),
    _entry(HangClass.STORE_KEY_MISSING, "store-key", must_accuse=False),
    _entry(HangClass.RENDEZVOUS_LATE, "late-start", stand=Stand.JOINING),
    _entry(HangClass.RENDEZVOUS_ELSEWHERE, "unreachable", stand=Stand.JOINING, also=(HangClass.RENDEZVOUS_LATE,)),
    _entry(HangClass.BARRIER_AFTER_EXCEPTION, "finally-barrier", "finally", "exception, and a barrier in finally",
           also=(HangClass.LEFT_EARLY, HangClass.COLLECTIVE_SKIPPED)),
    _entry(HangClass.BARRIER_AFTER_EXCEPTION, "atexit-barrier", "atexit", "exception, and a barrier at exit",
           also=(HangClass.LEFT_EARLY, HangClass.OPERATION_DIFFERS)),
    _entry(HangClass.EXIT_WAITS_FOR_THREAD, "thread-keeps-alive", title="exception, and a thread that does not end"),
    _entry(HangClass.SIGNAL_HANDLER_LOCKED, "handler-lock", also=(HangClass.THREAD_DEADLOCK,)),
    _entry(HangClass.COLLECTIVE_IN_DESTRUCTOR, "del", also=(HangClass.LEFT_EARLY,)),
    _entry(HangClass.PROCESS_STOPPED, "stopped"),
    _entry(HangClass.PROCESS_STOPPED, "traced", "traced", "stopped by a debugger"),
    _entry(HangClass.SIGNAL_STORM, "signal-storm", also=(HangClass.BLOCKED_IN_C, HangClass.PYTHON_NEVER_ENDS)),
    _entry(HangClass.PROCESS_STOPPED, "two-faults", str(HangClass.PYTHON_NEVER_ENDS), "two faults at once",
           suspects=both_across, also=(HangClass.PYTHON_NEVER_ENDS, None)),
)  # fmt: skip

HOST_CHILDREN = _entries(
    "host_children",
    _entry(HangClass.DATA_LOADER_STUCK, "worker-stopped", "stopped", "data loader worker stopped"),
    _entry(HangClass.DATA_LOADER_STUCK, "worker-lock", "lock", "data loader worker inherited a lock"),
    _entry(HangClass.POOL_STUCK, "pool-killed", title="process of a pool killed"),
    _entry(HangClass.OUTPUT_PIPE_FULL, "stdout-pipe"),
    _entry(HangClass.COMPILER_AT_WORK, "compile", must_accuse=False),
    _entry(HangClass.PREPARES_ALONE, "build-index", must_accuse=False),
)  # fmt: skip

KERNEL = _entries(
    "kernel",
    _entry(HangClass.KERNEL_SLEEP, "killable-d"),
    _entry(HangClass.UNKILLABLE, "unkillable-d", needs=("root", "loop device"), stage="frozen-disk"),
    _entry(HangClass.MEMORY_MAP_LOCKED, "poisoned", needs=("root", "loop device"), stage="frozen-disk",
           also=(HangClass.KERNEL_SLEEP, HangClass.UNKILLABLE)),
    _entry(HangClass.PAGE_FAULT_NEVER_ENDS, "mapped-fault", needs=("root", "loop device"), stage="frozen-disk",
           also=(HangClass.KERNEL_SLEEP, HangClass.UNKILLABLE)),
    _entry(HangClass.SAVE_IN_PROGRESS, "slow-save", must_accuse=False, also=(HangClass.CHECKPOINT_SLOW,)),
    _entry(HangClass.DISK_FULL, "disk-full", also=(HangClass.BARRIER_AFTER_EXCEPTION, HangClass.LEFT_EARLY)),
    _entry(HangClass.CORE_BEING_WRITTEN, "core-dump", needs=("root", "loop device", "core files here"),
           stage="frozen-disk", also=(HangClass.KERNEL_SLEEP, HangClass.UNKILLABLE)),
    _entry(HangClass.DEVICE_SILENT, "silent-device", needs=("root", "fuse"), stage="silent-fuse",
           also=(HangClass.KERNEL_SLEEP,)),
    _entry(HangClass.FILE_SERVER_LOST, "lost-server", needs=("root", "fuse"), stage="lost-server",
           also=(HangClass.KERNEL_SLEEP, HangClass.UNKILLABLE)),
)  # fmt: skip

LOSS = _entries(
    "loss",
    _entry(HangClass.RANK_KILLED, "killed", title="one rank killed: gloo ends the others", stand=ENDED),
    _entry(HangClass.RANK_KILLED, "killed-unseen", "unseen", "one rank killed, no other reads from it",
           states=(State.HANG, State.CRASHED), stand=Stand.CULPRIT_ENDED, culprits="not rank 0",
           also=(HangClass.RANK_EXITED,)),
    _entry(HangClass.RANK_CRASHED, "segfault", stand=ENDED, also=(HangClass.RANK_KILLED,)),
    _entry(HangClass.RANK_EXITED, "exited", "exited", states=(State.HANG, State.CRASHED), stand=Stand.CULPRIT_ENDED,
           culprits="not rank 0", also=(HangClass.RANK_KILLED,)),
    _entry(HangClass.RANK_EXITED, "zombie", "zombie", "one rank has exited, its parent does not reap it",
           states=(State.HANG, State.CRASHED), culprits="not rank 0", also=(HangClass.RANK_KILLED,)),
    _entry(HangClass.RANK_UNREADABLE, "not-readable", needs=("no right to trace",), must_accuse=False,
           also=(HangClass.BLOCKED_IN_C,)),
    _entry(HangClass.STORE_LOST, "store-host", suspects=rank_0, culprits="rank 0", also=(HangClass.PROCESS_STOPPED,)),
    _entry(HangClass.SIGNAL_HALF_DELIVERED, "half-delivered",
           also=(HangClass.LOCAL_DECISION, HangClass.PHASES_SPLIT, HangClass.LEFT_EARLY)),
)  # fmt: skip

NETWORK = _entries(
    "network",
    _entry(HangClass.LINK_DOWN, "link-down", needs=("root", "network namespaces"), stage="two-networks",
           suspects=no_rank, must_accuse=False, culprits="no matter"),
    _entry(HangClass.LARGE_PACKETS_LOST, "small-packets", needs=("root", "network namespaces"), stage="two-networks",
           suspects=no_rank, must_accuse=False, culprits="no matter", also=(HangClass.LINK_DOWN,)),
    _entry(HangClass.LINK_SLOW, "slow-link", needs=("root", "network namespaces", "traffic control"),
           stage="two-networks", stand=MOVING, suspects=no_rank, must_accuse=False, culprits="no matter",
           also=(HangClass.HEALTHY,)),
)  # fmt: skip

ACCELERATOR = _entries(
    "accelerator",
    _entry(HangClass.DEVICE_FAULT, "device-fault", title="device never ends its kernel (imitated)", needs=("compiler",),
           also=(HangClass.BLOCKED_IN_C,)),
)  # fmt: skip

NOT_A_HANG = _entries(
    "not_a_hang",
    _entry(HangClass.HEALTHY, "healthy", stand=MOVING, suspects=no_rank, must_accuse=False, culprits="no matter"),
    _entry(HangClass.HEALTHY, "finished", "finished", "training that has ended", states=(State.FINISHED,), stand=ENDED,
           suspects=no_rank, must_accuse=False, culprits="no matter", also=(HangClass.LEAVING,)),
    _entry(HangClass.CPU_STARVED, "starved", stand=MOVING, suspects=no_rank, must_accuse=False, culprits="no matter",
           also=(HangClass.HEALTHY,)),
    _entry(HangClass.STRAGGLER_SLEEPS, "straggler", stand=MOVING, must_accuse=False, also=(HangClass.HEALTHY,)),
    _entry(HangClass.STRAGGLER_COMPUTES, "straggler-busy", stand=MOVING, must_accuse=False,
           also=(HangClass.STRAGGLER_SLEEPS, HangClass.HEALTHY)),
    _entry(HangClass.WARM_UP, "warm-up", stand=Stand.LEAVING, suspects=no_rank, must_accuse=False, culprits="no matter",
           also=(HangClass.HEALTHY,)),
    _entry(HangClass.BARRIER_MEANT, "evaluation", must_accuse=False,
           also=(HangClass.HEALTHY, HangClass.PREPARES_ALONE, HangClass.PYTHON_NEVER_ENDS)),
    _entry(HangClass.LEAVING, "slow-teardown", "teardown", "training has ended, one rank is slow to leave",
           states=(State.FINISHED, State.SLOW), stand=Stand.OTHERS_ENDED, must_accuse=False),
    _entry(HangClass.LEAVING, "leaving", "leaving", "ranks leave during the look",
           states=(State.FINISHED, State.PROGRESSING, State.SLOW), stand=Stand.LEAVING, suspects=no_rank,
           must_accuse=False, culprits="no matter", also=(HangClass.HEALTHY,)),
    _entry(HangClass.LOG_SILENT, "silent-log", stand=MOVING, suspects=no_rank, must_accuse=False, culprits="no matter",
           also=(HangClass.HEALTHY,)),
)  # fmt: skip

NOT_A_HANG += _entries(
    "kernel",
    _entry(HangClass.CHECKPOINT_SLOW, "slow-save", must_accuse=False, also=(HangClass.SAVE_IN_PROGRESS,)),
)

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *DIVERGENCE, *HOST_STALL, *HOST_CHILDREN, *KERNEL, *LOSS, *NETWORK, *ACCELERATOR, *NOT_A_HANG,
)  # fmt: skip

DEVICE = "needs an accelerator"
NOT_REPRODUCED: tuple[NotReproduced, ...] = (
    NotReproduced(HangClass.MEMORY_THROTTLED, "needs a memory cgroup of its own, and would slow the machine"),
    NotReproduced(HangClass.NODE_LOST, "needs a Slurm of several nodes"),
    NotReproduced(HangClass.STEP_CANNOT_START, "needs a Slurm whose prolog can be changed"),
    NotReproduced(HangClass.BOOTSTRAP_DIFFERS, f"needs NCCL; on gloo it looks like {HangClass.RENDEZVOUS_LATE}"),
    NotReproduced(HangClass.RDMA_FAILED, "needs InfiniBand"),
    NotReproduced(HangClass.DEVICE_LOST, DEVICE),
    NotReproduced(HangClass.NVLINK_FAILED, DEVICE),
    NotReproduced(HangClass.KERNEL_NEVER_ENDS, DEVICE),
    NotReproduced(HangClass.NCCL_KERNEL_SPINS, DEVICE),
    NotReproduced(HangClass.MODULE_LOADING_BLOCKED, DEVICE),
    NotReproduced(HangClass.ABORT_STUCK, DEVICE),
    NotReproduced(HangClass.DEVICE_THROTTLED, DEVICE),
    NotReproduced(HangClass.CLOCK_JUMPED, "needs a virtual machine that can be suspended"),
)


def find_reproductions(names: Sequence[str]) -> tuple[Reproduction, ...]:
    """Return the reproductions with these names; a class (`H36`) means all of its reproductions.

    Raises:
        LabError: a name is unknown, or names a class that cannot be reproduced; the message has the reason.
    """
    found: dict[str, Reproduction] = {}
    for name in names:
        matching = [one for one in REPRODUCTIONS if name in (one.name, str(one.hang_class))]
        if not matching:
            raise _no_such(name)
        found.update({one.name: one for one in matching})
    return tuple(found.values())


def find_reproduction(name: str) -> Reproduction:
    """Return the reproduction `name`, or the first one of class `name`.

    Raises:
        LabError: as `find_reproductions`.
    """
    matching = find_reproductions([name])
    return next((one for one in matching if one.name == name), matching[0])


def _no_such(name: str) -> LabError:
    absent = next((one for one in NOT_REPRODUCED if str(one.hang_class) == name), None)
    if absent:
        return LabError(f"{name} ({absent.hang_class.title}) cannot be reproduced here: {absent.reason}")
    return LabError(f"the hang lab has no class {name!r}", hint="`bsl hang-lab list` shows all")
