"""The catalogue's entries: every reproduction, and every class that has none."""

from __future__ import annotations

from dataclasses import replace

from bigsci_launch.hang_lab.catalogue import (
    NotReproduced,
    Reproduction,
    Stand,
    all_others,
    both_across,
    both_partners,
    nobody,
    rank_0,
)

ENDED = Stand.ALL_ENDED
MOVING = Stand.MOVING


def _entries(program: str, *entries: Reproduction) -> tuple[Reproduction, ...]:
    return tuple(replace(one, program=program, classes=one.classes or (one.hang_class,)) for one in entries)


def _entry(name: str, title: str, recipe: str, **fields: object) -> Reproduction:
    return Reproduction(name, name.partition("-")[0], title, "", recipe, **fields)  # type: ignore[arg-type]


DIVERGENCE = _entries(
    "divergence",
    _entry("H01", "skipped collective", "skip"),
    _entry("H01-world", "skipped collective, nothing but data parallelism", "skip-world", shape="data", min_ranks=2,
           classes=("H01", "H03")),
    _entry("H01-wrapped", "skipped collective, recorders that cover other times", "skip-wrapped"),
    _entry("H02", "one rank leaves the epoch early", "uneven-data"),
    _entry("H03", "other operation in the same place", "type"),
    _entry("H03-wrapped", "other operation, recorders that cover other times", "type-wrapped"),
    _entry("H03-majority", "other operation on all ranks but one", "type-majority", suspects=all_others,
           must_accuse=False),
    _entry("H04", "other size: gloo aborts", "size", stand=ENDED, states=("crashed",), classes=("H04", "H70", "H71"),
           must_accuse=False),
    _entry("H05", "other data type: garbage, no hang", "dtype", stand=MOVING, states=("progressing",),
           classes=("H05", "H00"), must_accuse=False),
    _entry("H06", "two roots of one broadcast", "root", classes=("H06", "H10"), must_accuse=False),
    _entry("H07", "order of two groups swapped on two ranks", "order", suspects=both_across),
    _entry("H07-single", "order swapped on one rank: no hang", "order-single", stand=MOVING, states=("progressing",),
           classes=("H07", "H00"), suspects=nobody, must_accuse=False),
    _entry("H08", "two ranks receive from each other", "recv-recv", suspects=both_partners, must_accuse=False),
    _entry("H09", "send and receive with other tags", "tag", classes=("H09", "H08"), suspects=both_partners,
           must_accuse=False),
    _entry("H10", "some in the loss broadcast, some in the exit flag", "phase-split", suspects=nobody,
           must_accuse=False, culprits="no matter"),
    _entry("H11", "one rank drops a step: no hang", "skip-step", stand=MOVING, states=("progressing",),
           classes=("H11", "H00"), must_accuse=False),
    _entry("H12", "skipped object collective", "skip-object", classes=("H12", "H01", "H02"), must_accuse=False),
    _entry("H13", "new_group on one rank only", "new-group"),
    _entry("H14", "first use of a group, one rank missing", "lazy-group", classes=("H14", "H01", "H02"),
           must_accuse=False),
    _entry("H15-file", "kill switch that one rank alone sees", "kill-switch", classes=("H15", "H10", "H02")),
    _entry("H15-signal", "SIGUSR1 that reaches one rank alone", "signal", classes=("H15", "H10", "H02")),
    _entry("H16", "all_gathers of other sizes in other order", "hook-order", stand=ENDED, states=("crashed",),
           classes=("H16", "H04", "H70", "H71"), must_accuse=False),
    _entry("H17", "the collective is in another thread", "other-thread", classes=("H17", "H31")),
    _entry("H18", "asynchronous collective, waited for elsewhere", "async-wait", classes=("H18", "H31")),
    _entry("H19", "two communicators in other order: gloo goes on", "two-communicators", stand=MOVING,
           states=("progressing",), classes=("H19", "H00"), must_accuse=False),
    _entry("H20", "rare group of first and last stage skipped", "embedding", classes=("H20", "H01"), shape="stages"),
    _entry("H21", "uneven all_to_all", "uneven-splits", stand=ENDED, states=("crashed",),
           classes=("H21", "H04", "H70", "H71"), must_accuse=False),
    _entry("H22", "one rank has another flag", "other-flag", classes=("H22", "H01"), must_accuse=False),
)  # fmt: skip

HOST_STALL = _entries(
    "host_stall",
    _entry("H30", "Python that never ends", "spin"),
    _entry("H31", "blocked in C, GIL free", "sleep"),
    _entry("H32", "blocked in C, GIL held", "gil-held"),
    _entry("H33", "GIL deadlock", "gil-deadlock", classes=("H33", "H32")),
    _entry("H34", "two threads and two locks", "crossed-locks"),
    _entry("H35", "fork with a lock held", "fork-lock"),
    _entry("H37", "thread that feeds the batches has stopped", "feed-stops"),
    _entry("H40", "stale lock file of a build", "lock-file"),
    _entry("H41", "file lock held by another process", "flock"),
    _entry("H42", "forgotten breakpoint", "debugger"),
    _entry("H43", "network call without a timeout", "silent-server"),
    _entry("H44", "key of the store that nobody sets", "store-key"),
    _entry("H45", "one rank is late for the rendezvous", "late-start", stand=Stand.JOINING),
    _entry("H46", "one rank looks for the others elsewhere", "unreachable", stand=Stand.JOINING,
           classes=("H46", "H45")),
    _entry("H47-finally", "exception, and a barrier in finally", "finally-barrier", classes=("H47", "H02", "H01")),
    _entry("H47-atexit", "exception, and a barrier at exit", "atexit-barrier", classes=("H47", "H02", "H03")),
    _entry("H48", "exception, and a thread that does not end", "thread-keeps-alive"),
    _entry("H49", "signal handler wants the lock that it interrupted", "handler-lock", classes=("H49", "H34")),
    _entry("H52", "__del__ waits for the others", "del", classes=("H52", "H02")),
    _entry("H55", "stopped", "stopped"),
    _entry("H55-traced", "stopped by a debugger", "traced"),
    _entry("H56", "storm of signals", "signal-storm", classes=("H56", "H31", "H30")),
    _entry("H55-H30", "two faults at once", "two-faults", suspects=both_across, classes=("H55", "H30", "")),
)  # fmt: skip

HOST_CHILDREN = _entries(
    "host_children",
    _entry("H36-stopped", "data loader worker stopped", "worker-stopped"),
    _entry("H36-lock", "data loader worker inherited a lock", "worker-lock"),
    _entry("H38", "process of a pool killed", "pool-killed"),
    _entry("H39", "nobody reads the output", "stdout-pipe"),
    _entry("H50", "compiler at work: no hang", "compile", states=("slow", "progressing"), must_accuse=False),
    _entry("H51", "one rank prepares data: no hang", "build-index", states=("slow", "progressing"),
           must_accuse=False),
)  # fmt: skip

KERNEL = _entries(
    "kernel",
    _entry("H60", "state D", "killable-d"),
    _entry("H61", "state D, cannot be killed", "unkillable-d", needs=("root", "loop device"), stage="frozen-disk"),
    _entry("H62", "lock of the memory map held", "poisoned", needs=("root", "loop device"), stage="frozen-disk",
           classes=("H62", "H60", "H61")),
    _entry("H63", "page fault that does not end", "mapped-fault", needs=("root", "loop device"), stage="frozen-disk",
           classes=("H63", "H60", "H61")),
    _entry("H64", "slow checkpoint: no hang", "slow-save", states=("slow", "progressing"), classes=("H64", "H102"),
           must_accuse=False),
    _entry("H65", "disk full, and a barrier after it", "disk-full", classes=("H65", "H47", "H02")),
    _entry("H66", "core being written", "core-dump", needs=("root", "loop device", "core files here"),
           stage="frozen-disk", classes=("H66", "H60", "H61")),
    _entry("H67", "device that does not answer", "silent-device", needs=("root", "fuse"), stage="silent-fuse",
           classes=("H67", "H60")),
    _entry("H68", "file server lost", "lost-server", needs=("root", "fuse"), stage="lost-server",
           classes=("H68", "H60", "H61")),
)  # fmt: skip

LOSS = _entries(
    "loss",
    _entry("H70", "one rank killed: gloo ends the others", "killed", stand=ENDED, states=("crashed",)),
    _entry("H70-unseen", "one rank killed, nobody reads from it", "killed-unseen", stand=Stand.CULPRIT_ENDED,
           states=("hang", "crashed"), classes=("H70", "H72"), culprits="not rank 0"),
    _entry("H71", "one rank crashes in native code", "segfault", stand=ENDED, states=("crashed",),
           classes=("H71", "H70")),
    _entry("H72-exited", "one rank has exited", "exited", stand=Stand.CULPRIT_ENDED, states=("hang", "crashed"),
           classes=("H72", "H70"), culprits="not rank 0"),
    _entry("H72-zombie", "one rank has exited, its parent does not care", "zombie", states=("hang", "crashed"),
           classes=("H72", "H70"), culprits="not rank 0"),
    _entry("H75", "one rank may not be read", "not-readable", needs=("no right to trace",), must_accuse=False,
           classes=("H75", "H31")),
    _entry("H76", "rank 0 and its store answer no more", "store-host", classes=("H76", "H55"), suspects=rank_0,
           culprits="rank 0"),
    _entry("H77", "SIGTERM that reaches one rank alone", "half-delivered", classes=("H77", "H15", "H10", "H02")),
)  # fmt: skip

NETWORK = _entries(
    "network",
    _entry("H80", "link down between two halves", "link-down", needs=("root", "network namespaces"),
           stage="two-networks", suspects=nobody, must_accuse=False, culprits="no matter"),
    _entry("H81", "large packets vanish", "small-packets", needs=("root", "network namespaces"),
           stage="two-networks", suspects=nobody, must_accuse=False, culprits="no matter", classes=("H81", "H80")),
    _entry("H82", "slow link: no hang", "slow-link", needs=("root", "network namespaces", "traffic control"),
           stage="two-networks", stand=MOVING, states=("slow", "progressing"), suspects=nobody, must_accuse=False,
           culprits="no matter", classes=("H82", "H00")),
)  # fmt: skip

ACCELERATOR = _entries(
    "accelerator",
    _entry("H91", "device never ends its kernel (imitated)", "device-fault", needs=("compiler",),
           classes=("H91", "H31")),
)  # fmt: skip

NOT_A_HANG = _entries(
    "not_a_hang",
    _entry("H00", "healthy training", "healthy", stand=MOVING, states=("progressing",), suspects=nobody,
           must_accuse=False, culprits="no matter"),
    _entry("H00-finished", "training that has ended", "finished", stand=ENDED, states=("finished",), suspects=nobody,
           must_accuse=False, culprits="no matter", classes=("H00", "H105")),
    _entry("H54", "all ranks on one core", "starved", stand=MOVING, states=("slow", "progressing"), suspects=nobody,
           must_accuse=False, culprits="no matter", classes=("H54", "H00")),
    _entry("H100", "straggler that sleeps", "straggler", stand=MOVING, states=("slow", "progressing"),
           classes=("H100", "H00"), must_accuse=False),
    _entry("H101", "straggler that computes", "straggler-busy", stand=MOVING, states=("slow", "progressing"),
           classes=("H101", "H100", "H00"), must_accuse=False),
    _entry("H103", "first steps compile", "warm-up", stand=Stand.LEAVING, states=("slow", "progressing"),
           suspects=nobody, must_accuse=False, culprits="no matter", classes=("H103", "H00")),
    _entry("H104", "long barrier that is meant", "evaluation", states=("slow", "progressing"),
           classes=("H104", "H00", "H51", "H30"), must_accuse=False),
    _entry("H105-teardown", "training has ended, one rank is slow to leave", "slow-teardown",
           stand=Stand.OTHERS_ENDED, states=("finished", "slow"), classes=("H105",), must_accuse=False),
    _entry("H105-leaving", "ranks leave while somebody looks", "leaving", stand=Stand.LEAVING,
           states=("finished", "progressing", "slow"), classes=("H105", "H00"), suspects=nobody, must_accuse=False,
           culprits="no matter"),
    _entry("H106", "log silent, steps go on", "silent-log", stand=MOVING, states=("progressing",), suspects=nobody,
           must_accuse=False, culprits="no matter", classes=("H106", "H00")),
)  # fmt: skip

SLOW_SAVE = next(one for one in KERNEL if one.name == "H64")
NOT_A_HANG += (replace(SLOW_SAVE, name="H102", hang_class="H102", title="slow checkpoint (as H64)",
                      classes=("H102", "H64")),)  # fmt: skip

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *DIVERGENCE, *HOST_STALL, *HOST_CHILDREN, *KERNEL, *LOSS, *NETWORK, *ACCELERATOR, *NOT_A_HANG,
)  # fmt: skip

DEVICE = "needs an accelerator"
NOT_REPRODUCED: tuple[NotReproduced, ...] = (
    NotReproduced("H53", "swap or memory.high", "needs a memory cgroup of its own, and would slow the machine"),
    NotReproduced("H73", "node lost", "needs a Slurm of several nodes"),
    NotReproduced("H74", "step cannot start", "needs a Slurm whose prolog can be changed"),
    NotReproduced("H83", "bootstrap differs between nodes", "NCCL alone; on gloo as H45"),
    NotReproduced("H84", "RDMA alone fails", "needs InfiniBand"),
    NotReproduced("H90", "Xid, device fell off the bus", DEVICE),
    NotReproduced("H92", "NVLink domain", DEVICE),
    NotReproduced("H93", "kernel never ends", DEVICE),
    NotReproduced("H94", "NCCL kernel spins", DEVICE),
    NotReproduced("H95", "lazy module loading against a collective", DEVICE),
    NotReproduced("H96", "abort of a communicator stuck", DEVICE),
    NotReproduced("H97", "device throttled", DEVICE),
    NotReproduced("H107", "clock jump, suspended machine", "needs a virtual machine that can be suspended"),
)
