"""Facts about one rank that rules rest on. Each is three-valued: True, False, or None where it is not known.

None is never read as False. A rule that accuses a rank asks for `is False` or `is True`, and abstains otherwise.
"""

from __future__ import annotations

from bigsci_launch.spy.evidence.known_code import (
    CHILD_FILES,
    KNOWN_WAITS,
    LOCK_WAITS,
    bare_name,
    is_idle_call,
    is_plumbing_file,
    is_server,
    operation_of,
)
from bigsci_launch.spy.evidence.ranks import RankEvidence
from bigsci_launch.spy.evidence.samples import Sample
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, decisive_thread
from bigsci_launch.spy.taxonomy import HangClass

BUSY_SHARE = 0.5
STARVED_SHARE = 0.02
QUEUED_SHARE = 0.1
"""Minimum CPU share of a process starved of cores; threads that only wait use less."""
MOVED_BYTES = 65536
"""Minimum between two samples that counts as work. Less may be a log, or a thread that writes heartbeats."""
CARRIED_BYTES = 16384
CARRIED_BYTES_PER_S = 4096
"""Minimum over a long look: Ray's processes exchange 1 KiB/s each, to know who is alive."""
MOVED_PAGES = 16
INNER_FRAMES = 2
"""Innermost frames that are ignored: they change even in a loop that goes nowhere."""
POLLING_PER_S = 20.0
"""A thread that wakes up this often polls; `time.sleep` in a program of its own wakes up less often."""
POLL_CALLS = {7: "poll", 271: "ppoll"}
UNKNOWN_STATE = "?"
"""State of a rank known only from its recorder's dump. Evidence made of such dumps holds no stacks at all."""


# ------------------------------------------------------------------------------------------- the samples


def was_seen_twice(seen: RankEvidence) -> bool:
    """Whether there are two looks at the process: without a second one, nothing is known about what moves."""
    return len(seen.samples) > 1 and elapsed_s(seen) != 0


def elapsed_s(seen: RankEvidence) -> float | None:
    """Return the seconds between the first and the last sample, 0 with one; None if only their order is known."""
    if len(seen.samples) < 2:
        return 0.0
    first, last = seen.samples[0].mono, seen.samples[-1].mono
    return None if first is None or last is None else last - first


def per_s(seen: RankEvidence, amount: float | None) -> float | None:
    """Return what came between the first and the last sample as an amount per second, or None if either is unknown."""
    span = elapsed_s(seen)
    return None if amount is None or span is None else amount / max(span, 1e-3)


def kernel_wait(seen: RankEvidence) -> str | None:
    """The kernel function that the main thread sleeps in, or None if it is not known."""
    return _known_wait(seen.last.wchan) if seen.last else None


def _known_wait(text: str | None) -> str | None:
    return text if text and text.strip("0") else None


def deciding_wait(seen: RankEvidence) -> str | None:
    """The kernel function that the thread that decides sleeps in, or None if it is not known."""
    thread = seen.thread
    if seen.last is None or thread is None or thread.tid == seen.pid:
        return kernel_wait(seen)
    return _known_wait((seen.last.thread_waits or {}).get(str(thread.tid)))


def waits_in(seen: RankEvidence, functions: tuple[str, ...]) -> bool | None:
    """Whether the main thread sleeps in one of these kernel functions."""
    wait = kernel_wait(seen)
    return None if wait is None else wait.startswith(functions)


def sleeps_on_futex(seen: RankEvidence) -> bool | None:
    """Whether the thread that decides sleeps on a futex, as in a lock, in gloo's wait, or in `Work.wait()`."""
    wait = deciding_wait(seen)
    return None if wait is None else wait.startswith(LOCK_WAITS)


def may_wait_for_store(seen: RankEvidence) -> bool:
    """Whether it may wait for a key of torch's store, which another rank sets: it is in `poll`, called straight from
    the line of its caller."""
    thread = seen.thread
    if seen.last is None or seen.last.call_number not in POLL_CALLS or thread is None or not thread.frames:
        return False
    is_own = not thread.frames[0].file.endswith(("/selectors.py", "/socket.py", "/ssl.py"))
    return is_own and thread.frames[0] is thread.site and waits_in(seen, ("poll_schedule",)) is True


def polls_for_lock(thread: ThreadStack) -> bool:
    """Whether a thread tries again and again to get a file lock."""
    known = [each for each in KNOWN_WAITS if each.hang_class is HangClass.FILE_LOCK_HELD and each.file]
    return any(
        bare_name(frame.function) == each.function and frame.file.endswith(each.file)
        for frame in thread.frames
        for each in known
    )


def named_frames(seen: RankEvidence, sample: Sample) -> tuple[Frame, ...]:
    """Return the frames of the thread that decides in this sample, empty if it has none."""
    thread = _thread_in(seen, sample)
    return thread.named_frames if thread else ()


def _thread_in(seen: RankEvidence, sample: Sample) -> ThreadStack | None:
    return decisive_thread(sample.threads, seen.pid or 0) if sample.threads else None


def is_only_counted(seen: RankEvidence) -> bool:
    """Whether nothing is known of the rank but how many collectives it has launched or finished."""
    return seen.recorder is not None and seen.recorder.counts is not None and not seen.threads


# ------------------------------------------------------------------------------------------- CPU and bytes


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def cpu_share(seen: RankEvidence) -> float | None:
    """Return the CPU time of the process between first and last sample, as a share of one core."""
    if not was_seen_twice(seen):
        return None
    ticks = _growth(seen.samples[0].cpu_ticks, seen.samples[-1].cpu_ticks)
    return per_s(seen, None if ticks is None else ticks / seen.clock_ticks_per_s)


def switches_per_s(seen: RankEvidence) -> float | None:
    """Return how often per second the main thread went to sleep or was taken off its core."""
    if not was_seen_twice(seen):
        return None
    return per_s(seen, _growth(seen.samples[0].switches, seen.samples[-1].switches))


def wanted_share(seen: RankEvidence) -> float | None:
    """Return the CPU time of the process plus the time it waited for a core, as a share of one core."""
    share = cpu_share(seen)
    if share is None:
        return None
    delay_ns = _growth(seen.samples[0].run_delay_ns, seen.samples[-1].run_delay_ns) or 0
    return share + (per_s(seen, max(0, delay_ns) / 1e9) or 0.0)


def is_busy(seen: RankEvidence) -> bool | None:
    """Whether the process computed for most of the time, or wanted to while others held the cores."""
    share, wanted = cpu_share(seen), wanted_share(seen)
    if share is None or wanted is None:
        return None
    wants_cpu = all(sample.state == "R" for sample in seen.samples)
    is_starved = share >= QUEUED_SHARE and wanted >= BUSY_SHARE
    return is_starved or share >= (STARVED_SHARE if wants_cpu else BUSY_SHARE)


def file_bytes_per_s(seen: RankEvidence) -> tuple[float, float] | None:
    """Return the bytes (written, read) per second between first and last sample, without what went over sockets."""
    moved = _file_growth(seen)
    if moved is None:
        return None
    written, read = per_s(seen, moved[0]), per_s(seen, moved[1])
    return None if written is None or read is None else (written, read)


def _file_growth(seen: RankEvidence) -> tuple[int, int] | None:
    if not was_seen_twice(seen):
        return None
    first, last = seen.samples[0], seen.samples[-1]
    written = _growth(first.written_bytes, last.written_bytes)
    read = _growth(first.read_bytes, last.read_bytes)
    if written is None or read is None or not first.written_bytes or not last.written_bytes:
        return None
    sent, received = socket_growth(seen) or (0, 0)
    return max(written - sent, 0), max(read - received, 0)


def socket_growth(seen: RankEvidence) -> tuple[int, int] | None:
    """Return the bytes that its TCP connections (sent, received) between first and last sample."""
    if not was_seen_twice(seen):
        return None
    sent = _growth(seen.samples[0].socket_sent, seen.samples[-1].socket_sent)
    received = _growth(seen.samples[0].socket_received, seen.samples[-1].socket_received)
    return None if sent is None or received is None else (max(sent, 0), max(received, 0))


def carries_data(seen: RankEvidence) -> bool | None:
    """Whether its connections carried more between the samples than programs exchange to see who is alive."""
    growth = socket_growth(seen)
    carried = None if growth is None else sum(growth)
    rate = per_s(seen, carried)
    if carried is None or rate is None:
        return None
    return carried >= CARRIED_BYTES and rate >= CARRIED_BYTES_PER_S


def moves_bytes(seen: RankEvidence) -> bool | None:
    """Whether the process read or wrote much between the samples, and its deciding thread ran.

    Where it is not known how much of that went over sockets, a rank that may send to its peers may only do that.
    """
    moved = _file_growth(seen)
    if moved is None:
        return None
    if sum(moved) < MOVED_BYTES:
        return False
    return deciding_thread_ran(seen)


def faults_per_s(seen: RankEvidence) -> float | None:
    """Return the pages per second that the process fetched from mapped files; 0 if few, or if its thread slept."""
    if not was_seen_twice(seen):
        return None
    fetched = _growth(seen.samples[0].major_faults, seen.samples[-1].major_faults)
    if fetched is None:
        return None
    if fetched < MOVED_PAGES or deciding_thread_ran(seen) is not True:
        return 0.0
    return per_s(seen, fetched)


# ------------------------------------------------------------------------------------------- what moved


def deciding_thread_ran(seen: RankEvidence) -> bool | None:
    """Whether it ran between the samples: by its time on a core or, if that is not known, by how often the main thread
    went to sleep."""
    if not was_seen_twice(seen):
        return None
    first, last = seen.samples[0], seen.samples[-1]
    tid = str(seen.thread.tid if seen.thread else seen.pid)
    before, after = (first.thread_times or {}).get(tid), (last.thread_times or {}).get(tid)
    if before is not None and after is not None:
        return after > before
    switches = _growth(first.switches, last.switches)
    return None if not first.switches or switches is None else switches > 0


def deciding_thread_share(seen: RankEvidence) -> float | None:
    """Return the time on a core of the thread that decides between first and last sample, as a share of that time."""
    tid = str(seen.thread.tid if seen.thread else seen.pid)
    times = (
        [(sample.thread_times or {}).get(tid) for sample in (seen.samples[0], seen.samples[-1])] if seen.samples else []
    )
    growth_ns = _growth(*times) if len(times) == 2 and was_seen_twice(seen) else None
    return per_s(seen, None if growth_ns is None else growth_ns / 1e9)


def still_s(seen: RankEvidence) -> float | None:
    """For how many seconds the thread that decides has certainly not run, or None if that is not known.

    From the kernel's own clock if it shows that, else from the samples, between which it did not run.
    """
    if seen.last is None or seen.is_gone:
        return None
    tid = str(seen.thread.tid if seen.thread else seen.pid)
    asleep = (seen.last.thread_idle_s or {}).get(tid)
    if asleep is not None:
        return float(asleep)
    return elapsed_s(seen) if deciding_thread_ran(seen) is False and frames_moved(seen) is not True else None


def may_be_at_work(seen: RankEvidence) -> bool:
    """Whether it moves bytes, computes without a stack that shows what, or was seen twice and yet nothing shows whether
    it ran: none of that is to stand still."""
    computes_unseen = not seen.threads and is_busy(seen) is True
    return moves_bytes(seen) is True or computes_unseen or (was_seen_twice(seen) and not is_motion_known(seen))


def is_motion_known(seen: RankEvidence) -> bool:
    """Whether anything shows if it ran between the looks. Stacks do not: a rank that is at one place twice may have
    made many steps in between."""
    return not (deciding_thread_ran(seen) is None and is_busy(seen) is None and still_s(seen) is None)


def stood_s(seen: RankEvidence) -> float | None:
    """For how many seconds the rank has been at one place: as long as it slept, else between the looks."""
    between = elapsed_s(seen) if frames_moved(seen) is False else None
    known = [seconds for seconds in (still_s(seen), between) if seconds is not None]
    return max(known, default=None)


def collectives_moved(seen: RankEvidence) -> bool | None:
    """Whether the recorder counted new collectives between the samples."""
    numbers = [sample.sequences for sample in seen.samples if sample.sequences is not None]
    return numbers[0] != numbers[-1] if len(numbers) >= 2 else None


def frames_moved(seen: RankEvidence) -> bool | None:
    """Whether the deciding thread was at different places, including lines, in different samples."""
    with_stacks = [sample for sample in seen.samples if sample.threads]
    if len(with_stacks) < 2:
        return None
    if all(sample.threads is with_stacks[0].threads for sample in with_stacks):
        return False
    return len({named_frames(seen, sample) for sample in with_stacks}) > 1


def outer_frames_moved(seen: RankEvidence) -> bool | None:
    """Whether the thread moved by more than its innermost calls."""
    stacks = [
        [frame.function for frame in reversed(named_frames(seen, sample))] for sample in seen.samples if sample.threads
    ]
    if len(stacks) < 2:
        return None
    return len({tuple(stack[: max(1, min(map(len, stacks)) - INNER_FRAMES)]) for stack in stacks}) > 1


def callers_moved(seen: RankEvidence) -> bool | None:
    """Whether the program itself moved on: the calls outside the communication library, or the communication.

    Lines within the library change also in a call that polls and goes nowhere.
    """
    found = [_callers(thread) for sample in seen.samples if (thread := _thread_in(seen, sample))]
    return len(set(found)) > 1 if len(found) > 1 else None


def _callers(thread: ThreadStack) -> tuple[str | None, tuple[Frame, ...]]:
    frames = thread.frames
    inner = [at for at, frame in enumerate(frames) if operation_of(frame.function, frame.file)]
    return thread.operation, tuple(frames[inner[-1] + 1 :] if inner else thread.named_frames)


def was_communicating(seen: RankEvidence) -> bool | None:
    """Whether the rank was in a communication in its first sample."""
    first = next((sample for sample in seen.samples if sample.threads), None)
    thread = _thread_in(seen, first) if first else None
    return None if thread is None else thread.operation is not None


def changed_wait(seen: RankEvidence) -> bool | None:
    """Whether the rank left a communication between the samples, or entered one from work elsewhere.

    None if it ran in between and is at the same place again: it may have made many steps, or only have polled.
    """
    thread, before = seen.thread, was_communicating(seen)
    if thread is None or before is None or not was_seen_twice(seen):
        return None
    if before is False and thread.operation is None:
        return False
    if before is False:
        return True
    moved = callers_moved(seen)
    return moved if moved or deciding_thread_ran(seen) is False else None


def finished_something(seen: RankEvidence) -> bool | None:
    """Whether the rank made progress between the samples: new collectives, or a communication left or entered.

    CPU time is no progress: threads of a backend poll while they wait.
    """
    counted = collectives_moved(seen)
    return changed_wait(seen) if counted is None else counted


# ------------------------------------------------------------------------------------------- communication unseen


def holds_gil_throughout(seen: RankEvidence) -> bool | None:
    """Whether the deciding thread held the interpreter's lock in some look. Python that computes does so."""
    found = [_thread_in(seen, sample) for sample in seen.samples if sample.threads]
    return any(each is not None and each.owns_gil for each in found) if found else None


def spins_in_native_code(seen: RankEvidence) -> bool | None:
    """Whether the process computes in one place, and its deciding thread never held the interpreter's lock there.

    A call that waits for a device does so, and so does one of MPI. One that asks a device again and again holds the
    lock, but is known by its name.
    """
    busy, held = is_busy(seen), holds_gil_throughout(seen)
    if busy is None or held is None:
        return None
    asks_device = seen.thread is not None and seen.thread.native_call is not None
    return busy and frames_moved(seen) is not True and (asks_device or not held)


def waits_for_work(seen: RankEvidence) -> bool:
    """Whether the thread that decides waits for requests or tasks: nothing is wrong if none come."""
    frames = seen.thread.frames if seen.thread else ()
    return any(is_server(frame.function, frame.file) for frame in frames)


def waits_in_library(seen: RankEvidence) -> bool:
    """Whether the innermost frame is a wait of the standard library: no communication of ranks is below it."""
    frames = seen.thread.frames if seen.thread else ()
    return bool(frames) and (
        is_plumbing_file(frames[0].file)
        or is_server(frames[0].function, frames[0].file)
        or is_idle_call(frames[0].function, frames[0].file)
        or any(part in frames[0].file for part in CHILD_FILES)
    )
