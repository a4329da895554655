"""Why a rank that others wait for does not come: what its process says, outside of any communication."""

from __future__ import annotations

from dataclasses import dataclass

from bigsci_launch.spy.evidence import NOT_FOUND, NOT_IDENTIFIED, Child, RankEvidence
from bigsci_launch.spy.known_frames import STALLS, bare_name
from bigsci_launch.spy.known_frames import Stall as KnownStall
from bigsci_launch.spy.motion import cpu_share, is_busy
from bigsci_launch.spy.stacks import ThreadStack


@dataclass(frozen=True, slots=True)
class Stall:
    """`words` completes "rank 3 ..."; `kind` is a class of the taxonomy; `missing` is what would make it surer."""

    rank: int
    kind: str
    words: str
    confidence: float
    missing: str = ""
    next: str = ""


def explain_stall(seen: RankEvidence) -> Stall:
    """What holds the process, from the surest sign to the weakest."""
    for explain in (_ended, _unreadable, _stopped, _in_kernel, _held_by_child, _holds_gil, _busy, _known):
        stall = explain(seen)
        if stall is not None:
            return stall
    return Stall(seen.rank, "H31", f"waits in {_place(seen)}, outside of any collective", 0.8)


def _place(seen: RankEvidence) -> str:
    """`load_batch (train.py:88)`, or `a place that its stack does not show`."""
    thread = seen.thread
    return str(thread.site) if thread and thread.site else "a place that its stack does not show"


def _ended(seen: RankEvidence) -> Stall | None:
    if not seen.is_gone:
        return None
    error = f" after {seen.error}" if seen.error else ""
    if seen.exit is None:
        return Stall(seen.rank, "H72", f"has ended{error}: its process is gone", 0.8, "its exit status")
    if seen.exit.signal:
        return Stall(seen.rank, "H70", f"was killed by {seen.exit.signal}{error}", 0.95)
    return Stall(seen.rank, "H72", f"has ended with exit code {seen.exit.code}{error}", 0.95)


def _unreadable(seen: RankEvidence) -> Stall | None:
    if seen.last is not None:
        return None
    if seen.unreached == NOT_FOUND:
        words = "has no process on any node: it has ended, or was never started"
        return Stall(seen.rank, "H72", words, 0.7, f"how rank {seen.rank} ended: see the job's output")
    kind = "H62" if seen.unreached == NOT_IDENTIFIED else "H73"
    return Stall(seen.rank, kind, f"was not seen: {seen.unreached}", 0.7, f"anything about rank {seen.rank}")


def _stopped(seen: RankEvidence) -> Stall | None:
    if seen.last is None or seen.last.state not in ("T", "t"):
        return None
    if seen.last.tracer_pid:
        words = f"is stopped under a debugger (tracer pid {seen.last.tracer_pid})"
        return Stall(seen.rank, "H55", words, 0.95)
    words = f"is stopped (SIGSTOP or job control) in {_place(seen)}"
    return Stall(seen.rank, "H55", words, 0.95, next=f"kill -CONT {seen.pid}  # on {seen.node}")


def _in_kernel(seen: RankEvidence) -> Stall | None:
    if seen.last is None or seen.last.state != "D" or any(sample.state != "D" for sample in seen.samples):
        return None
    wchan = f" ({seen.last.wchan})" if seen.last.wchan.strip("0") else ""
    if seen.last.kill_pending:
        words = f"cannot die: it was killed and sleeps in the kernel{wchan} in {_place(seen)}"
        return Stall(
            seen.rank, "H61", words, 0.9, next=f"scontrol update nodename={seen.node} state=drain reason=D-state"
        )
    words = f"sleeps in the kernel, uninterruptibly{wchan}, in {_place(seen)}"
    return Stall(seen.rank, "H60", words, 0.9, "the file or device behind the call")


def _held_by_child(seen: RankEvidence) -> Stall | None:
    child = _stuck_child(seen)
    if child is None or is_busy(seen):
        return None
    wchan = f", {child.wchan}" if child.wchan.strip("0") else ""
    words = f"waits in {_place(seen)} for its child process {child.pid} ({child.comm}, state {child.state}{wchan})"
    return Stall(seen.rank, "H36", words, 0.85, "the stack of the child")


def _stuck_child(seen: RankEvidence) -> Child | None:
    children = seen.last.children if seen.last else ()
    return next((child for child in children if child.state in ("T", "t", "D", "Z")), None)


def _holds_gil(seen: RankEvidence) -> Stall | None:
    holder = next((thread for thread in seen.threads or () if thread.owns_gil and not thread.active), None)
    if holder is None or seen.last is None or seen.last.state == "R" or is_busy(seen):
        return None
    words = f"sleeps in C code with the GIL held, called from {_innermost(holder)}"
    return Stall(seen.rank, "H32", words, 0.9, "native frames (py-spy dump --native)")


def _innermost(thread: ThreadStack) -> str:
    return str(thread.named_frames[0]) if thread.named_frames else "an unknown place"


def _busy(seen: RankEvidence) -> Stall | None:
    if not is_busy(seen):
        return None
    words = f"computes in {_place(seen)} ({cpu_share(seen):.0%} of a core) and has not come to the collective"
    return Stall(seen.rank, "H30", words, 0.65, "whether it would end", next="bsl spy  # again in a minute")


def _known(seen: RankEvidence) -> Stall | None:
    thread = seen.thread
    known = next((stall for stall in STALLS if _fits(stall, seen, thread)), None)
    if known is None:
        return None
    call = f", {seen.last.system_call}" if seen.last and seen.last.system_call else ""
    return Stall(seen.rank, known.kind, f"{known.words} in {_place(seen)}{call}, outside of any collective", 0.85)


def _fits(stall: KnownStall, seen: RankEvidence, thread: ThreadStack | None) -> bool:
    if stall.wchan:
        return seen.last is not None and seen.last.wchan == stall.wchan
    return thread is not None and any(
        stall.function in ("", bare_name(frame.function)) and frame.file.endswith(stall.file) for frame in thread.frames
    )
