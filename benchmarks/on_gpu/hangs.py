"""Hangs of a real GPU: what `bsl spy` says of each, and what torch and NCCL say when their time is over.

A look is asked as `bsl spy --local --pid LAUNCHER --json`. On a CPU each hang has a stand-in of the same shape, and
gloo is in the place of NCCL. Logs, records, dumps and evidence of all cases are in hangs-recordings.tar.gz, next to the
JSON. Few kernels spin at a time: other phases compute on the same card.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigsci_launch.spy.taxonomy import State
from on_gpu.card import Card
from on_gpu.looks import Answer, Hang, Ranks, ask, started
from on_gpu.record import Record, run_phase
from on_gpu.recordings import keep, names_in, pack
from on_gpu.verdicts import functions, last_words, verdict_figures

SPINNING_AT_A_TIME, WAITING_AT_A_TIME = 2, 3
ANSWER_S = 15.0
"""How long `bsl spy` may take besides the time that it was told to look; a CPU that starts all of this is busy."""
LATE_S = 15.0
"""How long after its time-out a rank may still run."""
WATCHDOG_MS = 2000
"""torch's watchdog waits four times as long before it ends the process. It would wait a minute by default."""
FAR_S = 600
MAX_ARCHIVE_MIB = 16
TINY = ("watchdog", "no_group, rank 1 absent", "killed, rank 1 killed", "item", "gil held by a child")
"""The hangs of a tiny session: one of each kind."""
KERNEL_WAITS = ("device_synchronize", "stream_synchronize", "event_query", "event_never_comes", "item")
WAITS_IN = {"no_group": "form_group"}
"""The function of collectives.py that waits, where it is not `reduce_gradients`."""


@dataclass(frozen=True, slots=True)
class Case:
    """A hang, and what is done with it: look at it, or let it end (`kills` ends its culprit)."""

    hang: Hang
    limit_s: float | None = None
    """How long it may take to end; None to look at it instead."""
    kills: bool = False
    must_end: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """What one case has shown."""

    row: dict[str, Any]
    checks: list[tuple[str, bool, str]] = field(default_factory=list)

    def check(self, name: str, passed: bool, detail: object = "") -> None:
        self.checks.append((f"{self.row['case']}: {name}", passed, str(detail)))


def run(record: Record, card: Card) -> None:
    """Run the cases side by side, and record each when it is over."""
    archive = Path(sys.argv[1]).with_name("hangs-recordings.tar.gz")
    # A core of a process that uses the card is large, and takes long to write.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _note_memory(record, card, "before")
    cases = [case for case in _cases(card) if not card.is_tiny or case.hang.name in TINY]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = {
            spins: stack.enter_context(ThreadPoolExecutor(number))
            for spins, number in ((True, SPINNING_AT_A_TIME), (False, WAITING_AT_A_TIME))
        }
        futures = {pools[case.hang.spins].submit(_play, case, card, work): case for case in cases}
        for future in as_completed(futures):
            _note(record, futures[future], future)
            if (work / "kept").exists():
                pack(work / "kept", archive)
    _check_archive(record, archive, cases)
    _note_memory(record, card, "after")


def _cases(card: Card) -> Iterator[Case]:
    """Yield every case, those first that take long."""
    time_out_s = 4 if card.is_tiny else 15
    late_s = time_out_s + LATE_S
    given = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(WATCHDOG_MS)}
    watchdog = replace(_collective("watchdog", 1, time_out_s), name="watchdog", spins=True, environment=given)
    # On a card, the kernel is what the collective waits for.
    watchdog = replace(watchdog, world_size=1, culprit=0) if card.is_gpu else watchdog
    yield Case(watchdog, late_s + 4 * WATCHDOG_MS / 1000)
    for mode, culprit in (("no_group", 0), ("no_group", 1), ("no_collective", 1)):
        # Rank 0 waits inside NCCL, which has no time-out of its own for this.
        yield Case(_collective(mode, culprit, time_out_s), late_s, must_end=not card.is_gpu or culprit == 0)
    yield Case(_collective("killed", 1, FAR_S), LATE_S, kills=True)
    for mode in KERNEL_WAITS:
        is_like_work = mode == "event_query" and not card.is_gpu
        yield Case(Hang(mode, "kernel_waits.py", (mode,), "wait_for_the_gpu", spins=True, looks_busy=is_like_work))
    for mode, culprit in (("no_group", 0), ("no_group", 1), ("no_collective", 1)):
        yield Case(_collective(mode, culprit, FAR_S))
    for mode, waits_in in (("thread", "hold_the_gil"), ("child", "wait_for_the_child")):
        arguments = (mode, str(FAR_S), "1")
        yield Case(Hang(f"gil held by a {mode}", "held_gil.py", arguments, waits_in, world_size=2, culprit=1))


def _collective(mode: str, culprit: int, time_out_s: float) -> Hang:
    name = f"{mode}, rank {culprit} {'killed' if mode == 'killed' else 'absent'}"
    arguments = (mode, str(time_out_s), str(culprit))
    return Hang(
        name, "collectives.py", arguments, WAITS_IN.get(mode, "reduce_gradients"), world_size=2, culprit=culprit
    )


def _note(record: Record, case: Case, future: Future[Found]) -> None:
    if (error := future.exception()) is not None:
        record.check(f"{case.hang.name}: it could be tried", False, f"{type(error).__name__}: {error}"[:900])
        return
    found = future.result()
    record.row(**found.row)
    for check in found.checks:
        record.check(*check)


def _play(case: Case, card: Card, work: Path) -> Found:
    """Start the ranks of a case, and look at them or wait for their end."""
    what = "looked at" if case.limit_s is None else "ends"
    name = f"{case.hang.name}, {what}"
    answer = Answer({}, 0.0, "it was not asked")
    with started(case.hang, work / "runs" / name, card.device) as ranks:
        try:
            ranks.wait_until_ready()
            answer, found = _look(ranks, name, card) if case.limit_s is None else _let_end(ranks, name, case)
        finally:
            keep(ranks, answer, work / "kept" / name)
    return found


def _look(ranks: Ranks, name: str, card: Card) -> tuple[Answer, Found]:
    settle_s = 2.0 if card.is_tiny else 5.0
    answer = ranks.spy(settle_s)
    disturbed, hang = ranks.disturbances(), ranks.hang
    verdict = verdict_figures(answer.document)
    first = next(iter(verdict.get("suspects") or verdict.get("look_first") or ()), None)
    found = Found(
        {
            **{"case": name, **verdict, "seconds": answer.seconds, "why_no_answer": answer.why},
            **{"culprit": hang.culprit, "is_right_rank": None if first is None else first == hang.culprit},
            "disturbed": disturbed,
        }
    )
    if not hang.looks_busy:
        _check_not_healthy(found, answer)
    shown = verdict.get("innermost"), verdict.get("claim")
    is_shown = hang.waits_in in functions(answer.document) or f"{hang.waits_in} (" in str(verdict.get("claim"))
    found.check(f"{hang.waits_in} is in the answer", is_shown, shown)
    if hang.world_size > 1:
        found.check("the right rank is named first", first == hang.culprit, verdict.get("claim"))
    limit_s = settle_s + ANSWER_S * (2 if card.is_tiny else 1)
    found.check("bsl spy answers in time", answer.seconds <= limit_s, f"{answer.seconds} s")
    found.check("no rank is disturbed", not disturbed, disturbed)
    return answer, found


def _check_not_healthy(found: Found, answer: Answer) -> None:
    verdict = answer.document.get("verdict", {})
    is_called_bad = bool(verdict) and not State(verdict["state"]).is_healthy
    found.check("bsl spy does not call it healthy", is_called_bad, verdict.get("claim") or answer.why)


def _let_end(ranks: Ranks, name: str, case: Case) -> tuple[Answer, Found]:
    """Wait for the end of the ranks, and read what is left of them as `bsl` does."""
    assert case.limit_s is not None
    hang, began = ranks.hang, time.monotonic()
    if case.kills:
        os.kill(ranks.pid(hang.culprit), signal.SIGKILL)
    has_ended = ranks.wait_until_ended(case.limit_s)
    words, is_recognised = last_words(ranks.log(hang.waiting))
    reason, end = ranks.reason(), ranks.exit_of(hang.waiting)
    first = (reason.get("first_failure") or {}).get("rank")
    found = Found(
        {
            **{"case": name, "has_ended": has_ended, "seconds": round(time.monotonic() - began, 1)},
            **{"code": end.get("code"), "signal": end.get("signal"), "words": words, "recognised": is_recognised},
            **{"reason": reason.get("reason"), "first_failure": first, "evidence": reason.get("evidence")},
        }
    )
    if has_ended or case.must_end:
        # Where a rank was killed, the launcher ends the others in the same moment.
        by_itself = has_ended and end.get("code") != 0 and (case.kills or end.get("terminated") is None)
        found.check("the rank that waits ends with an error", by_itself, end)
        found.check("its words are known to be about others", is_recognised, words)
    if has_ended and hang.world_size > 1:
        allowed = (hang.culprit,) if case.kills else (hang.culprit, None)
        found.check("exit.json does not blame the wrong rank", first in allowed, reason.get("evidence"))
    return _read_dump(ranks, found) if hang.arguments[0] == "watchdog" else Answer({}, 0.0), found


def _read_dump(ranks: Ranks, found: Found) -> Answer:
    """Have `bsl spy --bundle` read what the watchdog has dumped."""
    dumps = [path for path in ranks.attempt.recorder.glob("nccl_trace_rank_*") if path.stat().st_size]
    found.row["dumps"] = {path.name: path.stat().st_size for path in dumps}
    found.check("the watchdog ends the process", found.row["signal"] == "SIGABRT", found.row["signal"])
    found.check("there is a dump of torch's flight recorder", bool(dumps))
    answer = ask(["--bundle", *map(str, dumps)], ANSWER_S) if dumps else Answer({}, 0.0, "there is no dump")
    found.row["dump"] = verdict_figures(answer.document)
    _check_not_healthy(found, answer)
    stack = found.row["dump"].get("innermost")
    found.check("the collective is in the dump", ranks.hang.waits_in in functions(answer.document), stack)
    return answer


def _check_archive(record: Record, archive: Path, cases: list[Case]) -> None:
    names = names_in(archive) if archive.exists() else []
    mib = archive.stat().st_size / 2**20 if archive.exists() else 0.0
    record.row(archive=archive.name, files=len(names), mib=round(mib, 2))
    num_logs = sum("/exits/" in name or "/spy/" in name for name in names)
    record.check("the recordings are there", num_logs >= len(cases), f"{len(names)} files, {mib:.2f} MiB")
    record.check("the recordings are small enough", mib < MAX_ARCHIVE_MIB, f"{mib:.2f} MiB")


def _note_memory(record: Record, card: Card, when: str) -> None:
    """Note what is free on the card. Other phases use it at the same time, so nothing is concluded from it."""
    free = whole = None
    if card.is_gpu:
        import torch

        free, whole = (bytes_ / 2**30 for bytes_ in torch.cuda.mem_get_info())
    record.row(memory=when, free_gib=free, whole_gib=whole)


if __name__ == "__main__":
    run_phase(run)
