"""What moved between the samples: the difference between hung, slow and working."""

from __future__ import annotations

from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence, Sample
from bigsci_launch.spy.evidence.stacks import Frame, decisive_thread
from bigsci_launch.spy.judge.waits import WaitGraph

BUSY_SHARE = 0.5
STARVED_SHARE = 0.02
QUEUED_SHARE = 0.1
"""Minimum CPU share of a process starved of cores; threads that only wait use less."""
MOVED_BYTES = 65536
"""Minimum between two samples that counts as work. Less may be a log, or a thread that writes heartbeats."""
MOVED_PAGES = 16
INNER_FRAMES = 2
"""Innermost frames that are ignored: they change even in a loop that goes nowhere."""


def named_frames(seen: RankEvidence, sample: Sample) -> tuple[Frame, ...]:
    """Return the frames of the thread that decides in this sample, empty if it has none."""
    thread = decisive_thread(sample.threads, seen.pid or 0) if sample.threads else None
    return thread.named_frames if thread else ()


def cpu_share(seen: RankEvidence) -> float:
    """Return the CPU time of the process between first and last sample, as a share of one core."""
    if len(seen.samples) < 2:
        return 0.0
    first, last = seen.samples[0], seen.samples[-1]
    elapsed_s = max(last.mono - first.mono, 1e-3)
    return (last.cpu_ticks - first.cpu_ticks) / seen.clock_ticks_per_s / elapsed_s


def switches_per_s(seen: RankEvidence) -> float:
    """Return how often per second the main thread went to sleep or was taken off its core."""
    if len(seen.samples) < 2:
        return 0.0
    first, last = seen.samples[0], seen.samples[-1]
    return (last.switches - first.switches) / max(last.mono - first.mono, 1e-3)


def wanted_share(seen: RankEvidence) -> float:
    """Return the CPU time of the process plus the time it waited for a core, as a share of one core."""
    if len(seen.samples) < 2:
        return 0.0
    first, last = seen.samples[0], seen.samples[-1]
    return cpu_share(seen) + max(0, last.run_delay_ns - first.run_delay_ns) / 1e9 / max(last.mono - first.mono, 1e-3)


def is_busy(seen: RankEvidence) -> bool:
    """Whether the process computed for most of the time, or wanted to while others held the cores."""
    share = cpu_share(seen)
    wants_cpu = len(seen.samples) > 1 and all(sample.state == "R" for sample in seen.samples)
    is_starved = share >= QUEUED_SHARE and wanted_share(seen) >= BUSY_SHARE
    return is_starved or share >= (STARVED_SHARE if wants_cpu else BUSY_SHARE)


def bytes_per_s(seen: RankEvidence) -> tuple[float, float]:
    """Return the bytes (written, read) per second between first and last sample."""
    if len(seen.samples) < 2:
        return 0.0, 0.0
    first, last = seen.samples[0], seen.samples[-1]
    elapsed_s = max(last.mono - first.mono, 1e-3)
    written, read = last.written_bytes - first.written_bytes, last.read_bytes - first.read_bytes
    return max(written, 0) / elapsed_s, max(read, 0) / elapsed_s


def moves_bytes(seen: RankEvidence) -> bool:
    """Whether the process read or wrote much between the samples, and its deciding thread ran."""
    if len(seen.samples) < 2:
        return False
    first, last = seen.samples[0], seen.samples[-1]
    if not first.written_bytes or not last.written_bytes:
        return False  # not known in both
    moved = (last.written_bytes - first.written_bytes) + (last.read_bytes - first.read_bytes)
    return moved >= MOVED_BYTES and _deciding_thread_ran(seen, first, last)


def faults_per_s(seen: RankEvidence) -> float:
    """Return the pages per second that the process fetched from mapped files; 0 if few, or if its thread slept."""
    if len(seen.samples) < 2:
        return 0.0
    first, last = seen.samples[0], seen.samples[-1]
    fetched = last.major_faults - first.major_faults
    if fetched < MOVED_PAGES or not _deciding_thread_ran(seen, first, last):
        return 0.0
    return fetched / max(last.mono - first.mono, 1e-3)


def _deciding_thread_ran(seen: RankEvidence, first: Sample, last: Sample) -> bool:
    """Judged by its time on a core or, if that is not known, by how often the main thread went to sleep."""
    tid = str(seen.thread.tid if seen.thread else seen.pid)
    before, after = first.thread_times.get(tid), last.thread_times.get(tid)
    return last.switches > first.switches if before is None or after is None else after > before


def collectives_moved(seen: RankEvidence) -> bool:
    """Whether the recorder counted new collectives between the samples."""
    numbers = [sample.sequences for sample in seen.samples if sample.sequences is not None]
    return len(numbers) >= 2 and numbers[0] != numbers[-1]


def frames_moved(seen: RankEvidence) -> bool:
    """Whether the deciding thread was at different places, including lines, in different samples."""
    stacks = {named_frames(seen, sample) for sample in seen.samples if sample.threads}
    return len(stacks) > 1


def spins_in_native_code(seen: RankEvidence) -> bool:
    """Whether the process computes in one place, and its deciding thread never held the interpreter's lock there.

    A call that waits for a device does so. Python that computes holds the lock in every look.
    """
    found = [decisive_thread(sample.threads, seen.pid or 0) for sample in seen.samples if sample.threads]
    return (
        is_busy(seen) and not frames_moved(seen) and bool(found) and not any(each and each.owns_gil for each in found)
    )


def outer_frames_moved(seen: RankEvidence) -> bool:
    """Whether the thread moved by more than its innermost calls."""
    stacks = [
        [frame.function for frame in reversed(named_frames(seen, sample))] for sample in seen.samples if sample.threads
    ]
    outer = {tuple(stack[: max(1, min(map(len, stacks)) - INNER_FRAMES)]) for stack in stacks}
    return len(outer) > 1


def was_communicating(seen: RankEvidence) -> bool:
    """Whether the rank was in a communication in its first sample."""
    first = next((sample for sample in seen.samples if sample.threads), None)
    thread = decisive_thread(first.threads, seen.pid or 0) if first and first.threads else None
    return thread is not None and thread.operation is not None


def woke_up(seen: RankEvidence) -> bool:
    """Whether the deciding thread ran between the samples although it slept on a futex in each of them.

    gloo's wait sleeps until its partners arrive: a rank that waits for one that never arrives does not run at all.
    """
    tid = str(seen.thread.tid) if seen.thread else ""
    if len(seen.samples) < 2 or not all(sample.wchan.startswith("futex") for sample in seen.samples):
        return False
    times = {sample.thread_times.get(tid) for sample in seen.samples}
    return None not in times and len(times) > 1


def moving_ranks(evidence: Evidence, graph: WaitGraph) -> tuple[int, ...]:
    """Return the ranks that show progress: new collectives, or a communication that they left or entered.

    A rank that computes does not count while others wait: it may be the one that never ends. If nobody waits in a
    communication, any change of the outer frames counts.
    """
    alive = [seen for seen in evidence.ranks if not seen.is_gone]
    moved = [seen.rank for seen in alive if collectives_moved(seen) or (not counts_twice(seen) and changed_wait(seen))]
    if moved or graph.waits:
        return tuple(moved)
    return tuple(seen.rank for seen in alive if outer_frames_moved(seen))


def counts_twice(seen: RankEvidence) -> bool:
    """Whether two samples have the recorder's numbers; a recorder that was pulled is known in the last sample only."""
    return sum(sample.sequences is not None for sample in seen.samples) > 1


def changed_wait(seen: RankEvidence) -> bool:
    """Whether the rank left a communication between the samples, or entered one from work elsewhere."""
    return left_wait(seen) or came_to_wait(seen)


def came_to_wait(seen: RankEvidence) -> bool:
    """Whether the rank was in no communication in the first sample and is in one now, as in healthy steps."""
    first = next((sample for sample in seen.samples if sample.threads), None)
    thread = seen.thread
    return first is not None and thread is not None and thread.operation is not None and not was_communicating(seen)


def left_wait(seen: RankEvidence) -> bool:
    """Whether a rank that was in a communication has left it, or moved within it."""
    return was_communicating(seen) and (frames_moved(seen) or woke_up(seen))
