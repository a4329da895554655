"""Lists the facts about one rank, for a person who selects it on the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bigsci_launch.spy.evidence.calls.flight_recorder import Recorder, Token
from bigsci_launch.spy.evidence.calls.ring import Ring
from bigsci_launch.spy.evidence.calls.written_stacks import WrittenStacks
from bigsci_launch.spy.evidence.groups import scope_of
from bigsci_launch.spy.evidence.kernel import Socket
from bigsci_launch.spy.evidence.ranks import Evidence, RankEvidence
from bigsci_launch.spy.evidence.samples import Child
from bigsci_launch.spy.judge.facts import cpu_share, elapsed_s, is_motion_known

RankFact = tuple[str, str]
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped under a debugger",
    "Z": "zombie: ended, not reaped by its parent",
    "X": "ended",
    "gone": "gone",
}
MAX_ROWS = 6


def facts_of(seen: RankEvidence, evidence: Evidence) -> tuple[RankFact, ...]:
    """Return (name, words) of every fact, those of the kernel first."""
    return tuple((name, words) for name, words in _facts(seen, evidence) if words)


def _facts(seen: RankEvidence, evidence: Evidence) -> Iterator[RankFact]:
    if seen.last is not None:
        yield "state", ", then ".join(dict.fromkeys(_state(sample.state, sample.wchan) for sample in seen.samples))
        yield "system call", seen.last.system_call or _call_text(seen)
        yield "activity", _activity(seen)
        yield "signals", "SIGKILL is pending" if seen.last.kill_pending else ""
        yield "debugger", f"pid {seen.last.tracer_pid}" if seen.last.tracer_pid else ""
        yield "other threads", _thread_waits(seen)
        yield from (("child", _child(child)) for child in (seen.last.children or ())[:MAX_ROWS])
    yield from (("tcp", _socket(socket)) for socket in seen.sockets[:MAX_ROWS])
    yield from (("lock", str(lock)) for lock in evidence.locks if lock.node == seen.node and seen.pid in lock.waiters)
    if seen.memory_events is not None and seen.memory_events.num_kills:
        yield "memory", f"processes of its cgroup killed by the kernel to free memory: {seen.memory_events.num_kills}"
    yield from _records(seen, evidence)


def _records(seen: RankEvidence, evidence: Evidence) -> Iterator[RankFact]:
    """Yield what the run and torch recorded."""
    if seen.heartbeat is not None:
        yield "last heartbeat", f"phase {seen.heartbeat.phase}, step {seen.heartbeat.step}"
    if seen.ring is not None:
        yield from _ring_facts(seen.ring)
    yield "failed with", str(seen.failure or seen.error or "")
    yield "ended", str(seen.exit or "")
    if seen.recorder is not None:
        names = {group: _group_name(group, seen.recorder, evidence) for group in seen.recorder.last_sequence}
        numbers = sorted((names[group], number) for group, number in seen.recorder.last_sequence.items())
        yield "newest collectives", ", ".join(f"{name}: number {number}" for name, number in numbers)
        for call in seen.recorder.open_calls[-MAX_ROWS:]:
            yield "unfinished", f"{call} of {names[call.token.group]}, {_tensors(call.token)}"


def _ring_facts(ring: Ring) -> Iterator[RankFact]:
    """Yield the facts in the ring of the rank's last calls."""
    phase = f", phase {ring.phase}" if ring.phase else ""
    yield "step in its ring", f"{ring.step}{phase}; heartbeat {max(0.0, ring.read - ring.heartbeat):.0f} s before"
    for call in ring.open_calls[-MAX_ROWS:]:
        since = "not waited for since" if call.is_async else "in it for"
        yield "open call", f"{call}: {since} {max(0.0, ring.read - call.entered):.0f} s"
    if ring.calls and not ring.open_calls:
        yield "last call", f"{ring.calls[-1]}: entered {max(0.0, ring.read - ring.calls[-1].entered):.0f} s before"
    if ring.stacks is not None:
        yield from (("stack", words) for words in _stack_facts(ring.stacks))
    if ring.lost_names or ring.lost_threads:
        yield "ring", f"incomplete: {ring.lost_names} names and {ring.lost_threads} threads did not fit"


def _stack_facts(stacks: WrittenStacks) -> Iterator[str]:
    """Yield each thread's innermost calls, the main thread first."""
    for thread in stacks.threads[:MAX_ROWS]:
        calls = " < ".join(str(frame) for frame in thread.named_frames[:MAX_ROWS])
        yield f"{calls} (from faulthandler, {stacks.age_s:.0f} s old)"


def _group_name(group: str, recorder: Recorder, evidence: Evidence) -> str:
    """Return `world` or `tp (group 3)`. Torch's name is kept, because two groups may have the same members."""
    scope = scope_of(recorder.members.get(group, ()), evidence.world_size, evidence.topology)
    return "world" if scope == "world" else f"{scope} (group {group})" if scope else f"group {group}"


def _tensors(token: Token) -> str:
    """Return `Float [16384]` for what torch writes as `['Float']` and `[[16384]]`."""
    return f"{token.types[1:-1]} {token.sizes[1:-1]}".replace("'", "")


def _state(state: str, wchan: str | None) -> str:
    where = f" in {wchan}" if wchan and wchan != "0" else ""
    return f"{state}, {_STATES[state]}{where}" if state in _STATES else f"unknown{where}"


def _call_text(seen: RankEvidence) -> str:
    if seen.last is not None and seen.last.call_name:
        return seen.last.call_name
    number = seen.last.call_number if seen.last else None
    return f"number {number}" if number is not None and number >= 0 else ""


def _activity(seen: RankEvidence) -> str:
    """Describe what changed between the first and the last sample."""
    if len(seen.samples) < 2:
        return "unknown: only one sample"
    first, last = seen.samples[0], seen.samples[-1]
    ran = f"{cpu_share(seen):.0%} of a core" if last.cpu_ticks != first.cpu_ticks else ""
    changes = (
        ran,
        _count(first.switches, last.switches, "context switches"),
        _count(first.read_bytes, last.read_bytes, "bytes read"),
        _count(first.written_bytes, last.written_bytes, "bytes written"),
    )
    span = elapsed_s(seen)
    seconds = "between the looks" if span is None else f"in {span:.1f} s"
    if not is_motion_known(seen):
        return f"unknown: no counter shows whether it ran {seconds}"
    return f"{', '.join(words for words in changes if words) or 'none'} {seconds}"


def _count(before: int | None, after: int | None, words: str) -> str:
    """Return `17 bytes read`, or nothing if the count has not grown, or is not known."""
    return f"{after - before} {words}" if before is not None and after is not None and after > before else ""


def _thread_waits(seen: RankEvidence) -> str:
    """Return `12 in futex_do_wait, 2 in do_epoll_wait`."""
    counts = Counter((seen.last.thread_waits or {}).values() if seen.last else ())
    return ", ".join(f"{count} in {place}" for place, count in counts.most_common(MAX_ROWS))


def _child(child: Child) -> str:
    frames = child.thread.own_frames if child.thread else ()
    stack = f", in {' < '.join(map(str, frames))}" if frames else ""
    return f"{child.pid} ({child.comm}): {_state(child.state, child.wchan)}{stack}"


def _socket(socket: Socket) -> str:
    queues = ((socket.unacked, "bytes unacknowledged"), (socket.unread, "bytes unread"))
    parts = [f"{count} {words}" for count, words in queues if count]
    parts += ["retransmitting"] if socket.is_stuck else []
    return f"{socket.local} to {socket.remote} {socket.state}" + "".join(f", {part}" for part in parts)
