"""Why a rank that others wait for does not arrive: what its process shows, outside any communication.

Each way to explain it is a row of `STALL_RULES`. All are tried; of those that fit, the one counts that none beats.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.spy.evidence.known_code import (
    CHILD_FILES,
    DAEMON_WAITS,
    DATA_LOADER_FILES,
    FAULT_WAITS,
    KERNEL_WAITS,
    KNOWN_WAITS,
    LOCK_WAITS,
    MAP_LOCK_WAITS,
    SLEEP_WAITS,
    KnownWait,
    bare_name,
    is_plumbing_file,
    is_server,
    is_shutdown,
    is_signal_handler,
)
from bigsci_launch.spy.evidence.ranks import NOT_FOUND, NOT_IDENTIFIED, RankEvidence
from bigsci_launch.spy.evidence.stacks import ThreadStack, is_idle, is_wrapper
from bigsci_launch.spy.judge.children import reading_worker, stuck_child
from bigsci_launch.spy.judge.commands import on_node
from bigsci_launch.spy.judge.conclusion import GracePeriod, Strength
from bigsci_launch.spy.judge.facts import (
    cpu_share,
    is_busy,
    kernel_wait,
    may_wait_for_store,
    switches_per_s,
    waits_in,
)
from bigsci_launch.spy.judge.last_calls import UNKNOWN_SETTER, wanted_key
from bigsci_launch.spy.judge.rule import TableRule, beaten_names, make_rule
from bigsci_launch.spy.taxonomy import HangClass

OUTSIDE = ", outside any collective"
CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
STORM_PER_S = 200.0


@dataclass(frozen=True, slots=True)
class Stall:
    """`words` completes "rank 3 ..."; `missing` is what would make it more certain.

    `grace`: how long the rank must stand still before this is a hang. `is_sign`: the sign cannot come from a rank
    that waits in a communication that no frame shows.
    """

    rank: int
    hang_class: HangClass
    words: str
    strength: Strength
    missing: str = ""
    next: str = ""
    grace: GracePeriod = GracePeriod.ELSEWHERE
    is_sign: bool = True


StallRule = TableRule[RankEvidence, Stall]
"""One way to explain why a process does not arrive."""


def explain_stall(seen: RankEvidence) -> Stall:
    """Return what holds up the process: the result of the matching rule that no other beats."""
    order = beaten_names(tuple((rule.name, rule.beats) for rule in STALL_RULES))
    found = {rule.name: stall for rule in STALL_RULES if (stall := rule.match(seen)) is not None}
    standing = [stall for name, stall in found.items() if not any(name in order[other] for other in found)]
    return max(standing, key=lambda stall: stall.strength.level, default=_no_reason(seen))


def _no_reason(seen: RankEvidence) -> Stall:
    """The stall of a rank whose place alone is known."""
    words = f"waits in {seen.place}{OUTSIDE}"
    return Stall(seen.rank, HangClass.BLOCKED_IN_C, words, Strength.DERIVED, is_sign=False)


def main_thread(seen: RankEvidence) -> ThreadStack | None:
    """Return the main thread if it has frames, whichever thread decides."""
    return next((thread for thread in seen.threads or () if thread.tid == seen.pid and thread.frames), None)


# ------------------------------------------------------------------------------------------- the process as a whole


def _ended(seen: RankEvidence) -> Stall | None:
    """A process that has ended."""
    if not seen.is_gone:
        return None
    error = f" after {seen.error}" if seen.error else ""
    if seen.exit is None:
        words, missing = f"has ended{error}: its process is gone", "its exit status"
        return Stall(seen.rank, HangClass.RANK_EXITED, words, Strength.DERIVED, missing, grace=GracePeriod.NONE)
    if seen.exit.signal:
        hang_class = HangClass.RANK_CRASHED if seen.exit.signal in CRASH_SIGNALS else HangClass.RANK_KILLED
        return Stall(
            seen.rank, hang_class, f"was killed by {seen.exit.signal}{error}", Strength.DIRECT, grace=GracePeriod.NONE
        )
    if seen.exit.code is None:
        words = f"has exited{error}, and its exit status was not recorded"
        return Stall(
            seen.rank, HangClass.RANK_EXITED, words, Strength.DERIVED, "its exit status", grace=GracePeriod.NONE
        )
    words = f"has ended with exit code {seen.exit.code}{error}"
    return Stall(seen.rank, HangClass.RANK_EXITED, words, Strength.DIRECT, grace=GracePeriod.NONE)


def _unreadable(seen: RankEvidence) -> Stall | None:
    """A rank that could not be read."""
    if seen.last is not None:
        return None
    if seen.unreached == NOT_FOUND:
        words = "has no process on any node: it has ended, or was never started"
        return Stall(seen.rank, HangClass.RANK_EXITED, words, Strength.DERIVED, "how it ended: see the job's output")
    hang_class = HangClass.MEMORY_MAP_LOCKED if seen.unreached == NOT_IDENTIFIED else HangClass.NODE_LOST
    words, missing = f"was not reached: {seen.unreached}", "what it does"
    # A node that does not answer is a sign. A process that could not be identified is none: it may be any rank.
    is_sign = seen.unreached != NOT_IDENTIFIED
    ask = f"scontrol show node {seen.node}  # whether Slurm has lost it" if is_sign and seen.node else ""
    return Stall(seen.rank, hang_class, words, Strength.GUESS, missing, ask, is_sign=is_sign)


def _stopped(seen: RankEvidence) -> Stall | None:
    """A process that is stopped, by a signal or a debugger."""
    if seen.last is None or seen.last.state not in ("T", "t"):
        return None
    if seen.last.tracer_pid:
        words = f"is stopped under a debugger (tracer pid {seen.last.tracer_pid})"
        return Stall(seen.rank, HangClass.PROCESS_STOPPED, words, Strength.DIRECT, grace=GracePeriod.NONE)
    words = f"is stopped (SIGSTOP or job control) in {seen.place}"
    return Stall(
        seen.rank,
        HangClass.PROCESS_STOPPED,
        words,
        Strength.DIRECT,
        next=on_node(seen.node, f"kill -CONT {seen.pid}"),
        grace=GracePeriod.NONE,
    )


# ------------------------------------------------------------------------------------------- in the kernel


def _dumps_core(seen: RankEvidence) -> Stall | None:
    """A process that has crashed, and whose core is still being written."""
    if seen.last is None or not seen.last.core_dumping:
        return None
    words = f"has crashed in {seen.place}, and its core is still being written"
    missing = "where the core goes: see /proc/sys/kernel/core_pattern"
    return Stall(seen.rank, HangClass.CORE_BEING_WRITTEN, words, Strength.DIRECT, missing, grace=GracePeriod.NONE)


def _in_kernel(seen: RankEvidence) -> Stall | None:
    """A process in uninterruptible sleep in every look."""
    if seen.last is None or seen.last.state != "D" or any(sample.state != "D" for sample in seen.samples):
        return None
    wchan = f" ({wait})" if (wait := kernel_wait(seen)) else ""
    if seen.last.kill_pending:
        words = f"cannot die: it was killed and sleeps in the kernel{wchan} in {seen.place}"
        drain = f"scontrol update nodename={seen.node} state=drain reason=D-state"
        return Stall(seen.rank, HangClass.UNKILLABLE, words, Strength.DIRECT, next=drain, grace=GracePeriod.NONE)
    if seen.threads is None and waits_in(seen, MAP_LOCK_WAITS):
        words = f"waits in the kernel{wchan} for the lock of its own memory map: ps and py-spy hang on it too"
        instead = on_node(seen.node, f"cat /proc/{seen.pid}/wchan", "and never ps")
        return Stall(seen.rank, HangClass.MEMORY_MAP_LOCKED, words, Strength.AGREED, next=instead)
    words = f"is in uninterruptible sleep in the kernel{wchan}, in {seen.place}"
    return Stall(seen.rank, _class_in_kernel(seen), words, Strength.DIRECT, "the file or device behind the call")


def _class_in_kernel(seen: RankEvidence) -> HangClass:
    assert seen.last is not None
    if waits_in(seen, FAULT_WAITS):
        return HangClass.PAGE_FAULT_NEVER_ENDS
    if waits_in(seen, DAEMON_WAITS):
        return HangClass.KERNEL_SLEEP  # a request that cannot be interrupted is a file system's, not a device's
    return next((known.hang_class for known in KERNEL_WAITS if _waits_in(known, seen)), HangClass.KERNEL_SLEEP)


def _in_known_call(seen: RankEvidence) -> Stall | None:
    """A wait that the kernel function alone identifies."""
    known = next((known for known in KERNEL_WAITS if _waits_in(known, seen)), None)
    return _of_known(known, seen) if known else None


def _waits_in(known: KnownWait, seen: RankEvidence) -> bool:
    return bool(known.wchan) and waits_in(seen, known.wchan) is True


# ------------------------------------------------------------------------------------------- children


def _held_by_child(seen: RankEvidence) -> Stall | None:
    """A child that is stopped, dead or in the kernel, or a worker of a data loader that waits for a lock."""
    if is_busy(seen) or not may_wait_for_child(seen):
        return None
    child = stuck_child(seen)
    if child is None:
        return None
    wchan = f", {child.wchan}" if child.wchan.strip("0") else ""
    words = f"waits in {seen.place} for its child process {child.pid} ({child.comm}, state {child.state}{wchan})"
    words += f", which is in {child.place}" if child.place else ""
    look = on_node(seen.node, f"py-spy dump --pid {child.pid}")
    grace = GracePeriod.NONE if child.state in ("T", "t", "Z") else GracePeriod.LOCAL
    missing = "" if child.place else "the stack of the child"
    return Stall(seen.rank, _class_of_child(seen), words, Strength.AGREED, missing, look, grace)


def _class_of_child(seen: RankEvidence) -> HangClass:
    if _in_data_loader(seen):
        return HangClass.DATA_LOADER_STUCK
    return HangClass.POOL_STUCK if _passes(seen, ("multiprocessing/",)) else HangClass.CHILD_STUCK


def may_wait_for_child(seen: RankEvidence) -> bool:
    """Whether the process waits in the kernel for a child, or is in code that waits for one."""
    return (waits_in(seen, ("do_wait",)) is True) or _passes(seen, CHILD_FILES)


def _passes(seen: RankEvidence, files: tuple[str, ...]) -> bool:
    threads = [thread for thread in (main_thread(seen), seen.thread) if thread]
    return any(part in frame.file for thread in threads for frame in thread.frames for part in files)


def _in_data_loader(seen: RankEvidence) -> bool:
    return _passes(seen, DATA_LOADER_FILES)


# ------------------------------------------------------------------------------------------- its threads


def _holds_gil(seen: RankEvidence) -> Stall | None:
    """A thread that sleeps in C code while it holds the interpreter's lock."""
    holder = next((thread for thread in seen.threads or () if thread.owns_gil and not thread.active), None)
    if holder is None or seen.last is None or seen.last.state == "R" or is_busy(seen):
        return None
    words = f"sleeps in C code while it holds the GIL, called from {_innermost(holder)}"
    waiting = [thread for thread in seen.threads or () if thread is not holder and not is_idle(thread)]
    if waits_in(seen, LOCK_WAITS) and waiting:
        words += f", and thread {waiting[0].label} waits to run"
        return Stall(
            seen.rank,
            HangClass.GIL_DEADLOCK,
            words,
            Strength.AGREED,
            "native frames (py-spy dump --native)",
            grace=GracePeriod.LOCAL,
        )
    return Stall(
        seen.rank,
        HangClass.BLOCKED_WITH_GIL,
        words,
        Strength.DIRECT,
        "native frames (py-spy dump --native)",
        grace=GracePeriod.LOCAL,
    )


def _innermost(thread: ThreadStack) -> str:
    return str(thread.named_frames[0]) if thread.named_frames else "an unknown place"


def _is_ending(seen: RankEvidence) -> Stall | None:
    """An interpreter that is exiting, and waits for a thread or an executor that does not end."""
    main = main_thread(seen)
    if main is None or not any(is_shutdown(frame.function, frame.file) for frame in main.frames):
        return None
    others = [thread for thread in seen.threads or () if thread is not main and thread.frames and not is_idle(thread)]
    after = f" after {seen.failure.words}" if seen.failure else ""
    thread = f"thread {others[0].label} in {others[0].site}" if others else "a thread that has not ended"
    missing = "" if seen.failure else "why it exits: see its log"
    return Stall(
        seen.rank,
        HangClass.EXIT_WAITS_FOR_THREAD,
        f"is exiting{after}, and waits for {thread}",
        Strength.AGREED,
        missing,
    )


def _starved_of_batches(seen: RankEvidence) -> Stall | None:
    """A main thread that waits for its data loader, or for a queue that another thread of the process should fill."""
    main = main_thread(seen)
    if main is None or is_busy(seen):
        return None
    in_queue = bare_name(main.frames[0].function) in ("wait", "get") and any(
        bare_name(frame.function) == "get" and frame.file.endswith("/queue.py") for frame in main.frames[:3]
    )
    if not in_queue and not _in_data_loader(seen):
        return None
    own = (frame for frame in main.frames if not is_wrapper(frame) and not is_plumbing_file(frame.file))
    asking = next(own, None)
    words = f"waits in {asking} for a batch" if asking else "waits for a batch"
    feeder = seen.thread if seen.thread is not main else None
    if feeder is not None and in_queue:
        words += f"; thread {feeder.label}, which may be the one that fills the queue, is in {feeder.site}"
    worker = reading_worker(seen)
    if worker is None:
        hang_class = HangClass.BATCH_THREAD_STUCK if in_queue else HangClass.DATA_LOADER_STUCK
        return Stall(seen.rank, hang_class, f"{words}{OUTSIDE}", Strength.DERIVED)
    words += f" of its worker {worker.pid}, which is in {worker.reading}"
    look = on_node(seen.node, f"py-spy dump --subprocesses --pid {seen.pid}")
    return Stall(seen.rank, HangClass.DATA_LOADER_STUCK, words, Strength.DERIVED, next=look)


def _locked(seen: RankEvidence) -> Stall | None:
    """A lock of the process itself: wanted in a signal handler, or crossed with the lock of another thread."""
    main = main_thread(seen)
    if main is None or seen.last is None or not waits_in(seen, LOCK_WAITS) or is_idle(main):
        return None
    handler = next((frame for frame in main.frames if is_signal_handler(frame.function, frame.file)), None)
    if handler is not None:
        words = (
            f"waits for a lock in {main.site}, apparently in a signal handler: the interrupted code may hold the lock"
        )
        missing = "whether the interrupted code holds that lock"
        return Stall(
            seen.rank,
            HangClass.SIGNAL_HANDLER_LOCKED,
            words,
            Strength.DERIVED,
            missing,
            grace=GracePeriod.LOCAL,
            is_sign=False,
        )
    waits = seen.last.thread_waits or {}
    partners = [thread for thread in seen.threads or () if thread is not main and thread.frames and not is_idle(thread)]
    partner = next((each for each in partners if waits.get(str(each.tid), "").startswith(LOCK_WAITS)), None)
    if partner is None:
        return None
    words = f"waits for a lock in {main.site}, and its thread {partner.label} for one in {partner.site}"
    return Stall(
        seen.rank,
        HangClass.THREAD_DEADLOCK,
        f"{words}: each may hold the lock that the other waits for",
        Strength.DERIVED,
        grace=GracePeriod.LOCAL,
        is_sign=False,
    )


# ------------------------------------------------------------------------------------------- what is left


def _busy(seen: RankEvidence) -> Stall | None:
    """A process that computes."""
    if not is_busy(seen):
        return None
    words = f"computes in {seen.place} ({cpu_share(seen) or 0:.0%} of a core) and has not reached the collective"
    again = "bsl spy  # again in a minute"
    return Stall(
        seen.rank,
        HangClass.PYTHON_NEVER_ENDS,
        words,
        Strength.GUESS,
        "whether it would end",
        again,
        GracePeriod.COMPUTES,
        is_sign=False,
    )


def _stormed(seen: RankEvidence) -> Stall | None:
    """A process that is woken again and again in one place, by a timer or a storm of signals."""
    rate = switches_per_s(seen)
    if rate is None or rate < STORM_PER_S or is_busy(seen):
        return None
    words = f"is woken {rate:.0f} times per second in {seen.place} and makes no progress"
    return Stall(
        seen.rank,
        HangClass.SIGNAL_STORM,
        words,
        Strength.DERIVED,
        "which signal or timer wakes it",
        "",
        GracePeriod.COMPUTES,
        is_sign=False,
    )


def _polls(seen: RankEvidence) -> Stall | None:
    """`poll` called straight from the caller's line: a library's own connection, such as that of torch's store. A ring
    names the key."""
    if (key := wanted_key(seen)) is not None and not seen.is_gone:
        words = f"waits for key '{key}' of the store, and {UNKNOWN_SETTER}"
        return Stall(seen.rank, HangClass.STORE_KEY_MISSING, words, Strength.AGREED)
    if not may_wait_for_store(seen):
        return None
    words = f"waits for an answer to a request in {seen.place}, perhaps for a key of torch's store that is never set"
    missing = "native frames (py-spy dump --native): they would show the store"
    return Stall(seen.rank, HangClass.STORE_KEY_MISSING, words, Strength.DERIVED, missing, is_sign=False)


def _serves(seen: RankEvidence) -> Stall | None:
    """A process that waits for requests: without requests, it has nothing to do."""
    frames = seen.thread.frames if seen.thread else ()
    server = next((frame for frame in frames if is_server(frame.function, frame.file)), None)
    if server is None or seen.last is None or seen.last.state in ("T", "t", "D"):
        return None
    words = f"waits for requests in {server}, called from {seen.place}{OUTSIDE}"
    missing = "whether it should have received a request"
    return Stall(seen.rank, HangClass.BLOCKED_IN_C, words, Strength.GUESS, missing, grace=GracePeriod.COMPUTES)


def _known(seen: RankEvidence) -> Stall | None:
    """A call that is known to wait, from the tables of known code."""
    known = next((known for known in KNOWN_WAITS if _fits(known, seen, seen.thread)), None)
    return _of_known(known, seen) if known else None


def held_s(seen: RankEvidence) -> float:
    """For how many seconds the child that holds up the process has not run; 0 if there is none, or it is not known.

    A rank may wait for its child in turns, and wake up between them.
    """
    child = stuck_child(seen) if may_wait_for_child(seen) and not is_busy(seen) else None
    return (child.idle_s or 0.0) if child else 0.0


def _of_known(known: KnownWait, seen: RankEvidence) -> Stall:
    call = f", {seen.last.system_call}" if seen.last and seen.last.system_call else ""
    words = f"{known.words} in {seen.place}{call}{OUTSIDE}"
    strength = Strength.DIRECT if known in KERNEL_WAITS else Strength.AGREED
    is_sign = bool(known.file or known.function) or known in KERNEL_WAITS
    return Stall(seen.rank, known.hang_class, words, strength, grace=_grace_of(known), is_sign=is_sign)


def _grace_of(known: KnownWait) -> GracePeriod:
    """How long such a wait may take by itself."""
    if known.hang_class is HangClass.BREAKPOINT_FORGOTTEN:
        return GracePeriod.NONE
    if set(known.wchan) & set(SLEEP_WAITS) or known.hang_class is HangClass.BUILD_LOCK_STALE:
        return GracePeriod.TIMER
    is_local = known.hang_class in (HangClass.FILE_LOCK_HELD, HangClass.OUTPUT_PIPE_FULL)
    return GracePeriod.LOCAL if is_local else GracePeriod.ELSEWHERE


def _fits(known: KnownWait, seen: RankEvidence, thread: ThreadStack | None) -> bool:
    if known.wchan:
        return _waits_in(known, seen)
    return thread is not None and any(
        known.function in ("", bare_name(frame.function)) and frame.file.endswith(known.file) for frame in thread.frames
    )


# fmt: off
STALL_RULES = (
    make_rule(_ended, "unreadable", "wait(2)",
              "zoo/H70-4-ranks-culprit-3", "zoo/H55-4-ranks-culprit-1"),
    make_rule(_unreadable, "", "what no node shows",
              "dead-1", "zoo/H60-4-ranks-culprit-3"),
    make_rule(_stopped, "holds-gil", "proc(5): state T, t; TracerPid",
              "zoo/H55-4-ranks-culprit-1", "zoo/H60-4-ranks-culprit-3"),
    make_rule(_dumps_core, "in-kernel", "core(5); proc(5): CoreDumping",
              "zoo/H66-4-ranks-culprit-3", "zoo/H60-4-ranks-culprit-3"),
    make_rule(_in_kernel, "in-known-call holds-gil", "proc(5): state D, wchan; py-spy#526",
              "zoo/H60-4-ranks-culprit-3", "zoo/H55-4-ranks-culprit-1"),
    make_rule(_in_known_call, "", "proc(5): wchan",
              "zoo/H39-4-ranks-culprit-0", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_held_by_child, "starved-of-batches known", "proc(5): children; fork(2) keeps locks; pytorch#1355",
              "zoo/H36-lock-4-ranks-culprit-3", "zoo/H37-4-ranks-culprit-1"),
    make_rule(_holds_gil, "known", "CPython: the GIL; pytorch#167023",
              "zoo/H32-4-ranks-culprit-1", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_is_ending, "", "CPython: exit joins threads",
              "zoo/H48-4-ranks-culprit-1", "zoo/H34-4-ranks-culprit-0"),
    make_rule(_busy, "", "proc(5): utime, stime",
              "zoo/H30-4-ranks-culprit-3", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_starved_of_batches, "", "torch's DataLoader; pytorch#87995",
              "zoo/H37-4-ranks-culprit-1", "zoo/H34-4-ranks-culprit-0"),
    make_rule(_locked, "", "futex(2): a lock has an owner",
              "zoo/H34-4-ranks-culprit-0", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_stormed, "known", "proc(5): context switches",
              "zoo/H56-4-ranks-culprit-1", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_serves, "known polls stormed", "a server waits for requests",
              "test: a-server-sleeps", "zoo/H31-4-ranks-culprit-0"),
    make_rule(_known, "", "diagnostics/known",
              "zoo/H31-4-ranks-culprit-0", "zoo/H55-4-ranks-culprit-1"),
    make_rule(_polls, "", "poll(2) of torch's store",
              "zoo/H44-4-ranks-culprit-3", "zoo/H31-4-ranks-culprit-0"),
)
# fmt: on
