"""The classes of hangs, and of what looks like a hang: their names, their ids, what a job in each of them does.

This is the only file in which an id such as `H55` is written. Ids are part of what users see: reports, JSON documents,
signatures, `bsl hang-lab run H55`. They never change, and a new class gets a new number.
"""

from __future__ import annotations

from enum import Enum, unique


class State(Enum):
    """What the job is doing, as far as the evidence shows."""

    HANG = "hang"
    WAITING = "waiting"
    """Ranks wait for others, and nothing shows yet whether those will come: it may be a hang, or take its time."""
    SLOW = "slow"
    PROGRESSING = "progressing"
    CRASHED = "crashed"
    FINISHED = "finished"
    UNKNOWN = "unknown"

    @property
    def is_failure(self) -> bool:
        """Whether the job will not continue by itself."""
        return self in (State.HANG, State.CRASHED)

    @property
    def is_healthy(self) -> bool:
        """Whether the job does what it should, or has done it."""
        return self in (State.PROGRESSING, State.FINISHED)


@unique
class HangClass(Enum):
    """A class of hangs, or of look-alikes. The value is the id, `title` one line, `state` what a job in it does.

    The state is that of ranks on gloo, where some of what hangs on NCCL crashes or continues.
    """

    _value_: str
    title: str
    state: State

    def __new__(cls, number: str, title: str, state: State = State.HANG) -> HangClass:
        member = object.__new__(cls)
        member._value_, member.title, member.state = number, title, state
        return member

    HEALTHY = "H00", "healthy training", State.PROGRESSING

    # Divergence: every rank is in a collective, not all in the same one.
    COLLECTIVE_SKIPPED = "H01", "skipped collective"
    LEFT_EARLY = "H02", "one rank leaves the epoch early"
    OPERATION_DIFFERS = "H03", "different operation in the same place"
    SIZE_DIFFERS = "H04", "different size", State.CRASHED
    TYPE_DIFFERS = "H05", "different data type: garbage, no hang", State.PROGRESSING
    ROOT_DIFFERS = "H06", "two roots of one broadcast"
    GROUP_ORDER_DIFFERS = "H07", "order of two groups swapped on two ranks"
    MESSAGES_NEVER_MEET = "H08", "two ranks receive from each other"
    MESSAGE_TAG_DIFFERS = "H09", "send and receive with different tags"
    PHASES_SPLIT = "H10", "some ranks in one phase, the others in the next"
    STEP_DROPPED = "H11", "one rank drops a step: no hang", State.PROGRESSING
    OBJECT_COLLECTIVE_SKIPPED = "H12", "skipped object collective"
    GROUP_MADE_ALONE = "H13", "new_group on one rank only"
    FIRST_USE_SKIPPED = "H14", "first use of a group, one rank missing"
    LOCAL_DECISION = "H15", "one rank alone decides to leave"
    SIZE_ORDER_DIFFERS = "H16", "all_gathers of different sizes in different order", State.CRASHED
    COLLECTIVE_IN_OTHER_THREAD = "H17", "the collective is in another thread"
    ASYNC_COLLECTIVE_AWAITED = "H18", "asynchronous collective, waited for elsewhere"
    COMMUNICATOR_ORDER_DIFFERS = "H19", "two communicators in different order", State.PROGRESSING
    RARE_GROUP_SKIPPED = "H20", "rare group of first and last stage skipped"
    SPLITS_UNEVEN = "H21", "uneven all_to_all", State.CRASHED
    PROGRAM_DIFFERS = "H22", "one rank has a different program, flag or version"

    # One rank never comes to the collective.
    PYTHON_NEVER_ENDS = "H30", "Python that never ends"
    BLOCKED_IN_C = "H31", "blocked in C, GIL free"
    BLOCKED_WITH_GIL = "H32", "blocked in C, GIL held"
    GIL_DEADLOCK = "H33", "GIL deadlock"
    THREAD_DEADLOCK = "H34", "two threads and two locks"
    CHILD_STUCK = "H35", "child process stuck"
    DATA_LOADER_STUCK = "H36", "data loader worker stuck"
    BATCH_THREAD_STUCK = "H37", "thread that feeds the batches has stopped"
    POOL_STUCK = "H38", "process pool stuck"
    OUTPUT_PIPE_FULL = "H39", "output pipe full, not read"
    BUILD_LOCK_STALE = "H40", "stale lock file of a build"
    FILE_LOCK_HELD = "H41", "file lock held by another process"
    BREAKPOINT_FORGOTTEN = "H42", "forgotten breakpoint"
    NETWORK_CALL_UNANSWERED = "H43", "network call without a timeout"
    STORE_KEY_MISSING = "H44", "store key that is never set"
    RENDEZVOUS_LATE = "H45", "one rank is late for the rendezvous"
    RENDEZVOUS_ELSEWHERE = "H46", "one rank looks for the others elsewhere"
    BARRIER_AFTER_EXCEPTION = "H47", "exception, and a barrier after it"
    EXIT_WAITS_FOR_THREAD = "H48", "exit waits for a thread that does not end"
    SIGNAL_HANDLER_LOCKED = "H49", "signal handler wants the lock that it interrupted"
    COMPILER_AT_WORK = "H50", "compiler at work: no hang", State.SLOW
    PREPARES_ALONE = "H51", "one rank prepares data: no hang", State.SLOW
    COLLECTIVE_IN_DESTRUCTOR = "H52", "__del__ waits for the others"
    MEMORY_THROTTLED = "H53", "swap or memory.high", State.SLOW
    CPU_STARVED = "H54", "all ranks on one core", State.SLOW
    PROCESS_STOPPED = "H55", "stopped"
    SIGNAL_STORM = "H56", "storm of signals"

    # It waits in the kernel, or for a file system.
    KERNEL_SLEEP = "H60", "state D"
    UNKILLABLE = "H61", "state D, cannot be killed"
    MEMORY_MAP_LOCKED = "H62", "lock of the memory map held"
    PAGE_FAULT_NEVER_ENDS = "H63", "page fault that does not end"
    SAVE_IN_PROGRESS = "H64", "slow checkpoint: no hang", State.SLOW
    DISK_FULL = "H65", "disk full, and a barrier after it"
    CORE_BEING_WRITTEN = "H66", "core being written"
    DEVICE_SILENT = "H67", "device that does not answer"
    FILE_SERVER_LOST = "H68", "file server lost"

    # A rank, a node or a signal is lost.
    RANK_KILLED = "H70", "one rank killed", State.CRASHED
    RANK_CRASHED = "H71", "one rank crashes in native code", State.CRASHED
    RANK_EXITED = "H72", "one rank has exited"
    NODE_LOST = "H73", "node lost"
    STEP_CANNOT_START = "H74", "step cannot start"
    RANK_UNREADABLE = "H75", "one rank cannot be read: no permission"
    STORE_LOST = "H76", "rank 0 and its store no longer answer"
    SIGNAL_HALF_DELIVERED = "H77", "SIGTERM that reaches one rank alone"

    # The network.
    LINK_DOWN = "H80", "link down between two halves"
    LARGE_PACKETS_LOST = "H81", "large packets vanish"
    LINK_SLOW = "H82", "slow link: no hang", State.SLOW
    BOOTSTRAP_DIFFERS = "H83", "bootstrap differs between nodes"
    RDMA_FAILED = "H84", "RDMA alone fails"

    # The device.
    DEVICE_LOST = "H90", "Xid, device fell off the bus"
    DEVICE_FAULT = "H91", "device never ends its kernel"
    NVLINK_FAILED = "H92", "NVLink domain"
    KERNEL_NEVER_ENDS = "H93", "kernel never ends"
    NCCL_KERNEL_SPINS = "H94", "NCCL kernel spins"
    MODULE_LOADING_BLOCKED = "H95", "lazy module loading against a collective"
    ABORT_STUCK = "H96", "abort of a communicator stuck"
    DEVICE_THROTTLED = "H97", "device throttled", State.SLOW

    # Not a hang.
    STRAGGLER_SLEEPS = "H100", "straggler that sleeps", State.SLOW
    STRAGGLER_COMPUTES = "H101", "straggler that computes", State.SLOW
    CHECKPOINT_SLOW = "H102", "slow checkpoint (as H64)", State.SLOW
    WARM_UP = "H103", "first steps compile", State.SLOW
    BARRIER_MEANT = "H104", "long barrier on purpose", State.SLOW
    LEAVING = "H105", "training has ended, ranks are on their way out", State.FINISHED
    LOG_SILENT = "H106", "silent log, steps continue", State.PROGRESSING
    CLOCK_JUMPED = "H107", "clock jump, suspended machine", State.PROGRESSING

    def __str__(self) -> str:
        return self._value_

    @property
    def is_divergence(self) -> bool:
        """Whether ranks call other collectives than their peers, as programs make them, and not machines."""
        return HangClass.HEALTHY._value_ < self._value_ < HangClass.PYTHON_NEVER_ENDS._value_

    @classmethod
    def parse(cls, text: str) -> HangClass:
        """Return the class with this id.

        Raises:
            ValueError: there is none.
        """
        found = next((member for member in cls if str(member) == text), None)
        if found is None:
            raise ValueError("not the id of a class: `bsl hang-lab list` shows them")
        return found
