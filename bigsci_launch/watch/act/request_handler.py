"""Serves what people ask of a run, in `control/`, for a watcher that calls `serve` at each of its looks.

Nothing is kept in memory that must survive: a request that was taken up lies in `watch/requests/` with the name of its
watcher, and the ledger shows how far it has got. A watcher that is killed and restarted reads both and continues; if it
does not come back, another one takes its requests over. Each stage is recorded after it was done, and doing it again
does no harm, so nothing is forgotten if the watcher dies in between. Both are the owner's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigsci_launch.config.schema.monitor import MonitorSection
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError, JobNotFound, RunDirError, SlurmUnavailable
from bigsci_launch.runs.attempts import read_job
from bigsci_launch.runs.control.request import WITH_STEP, Request, put_request, read_requests, withdraw
from bigsci_launch.runs.control.requests import (
    MOST_OF_ONE,
    Taken,
    forget,
    is_complete,
    remove_surplus,
    take_over,
    take_up,
    taken_up,
    waiting,
)
from bigsci_launch.runs.events import read_last_events
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.layout import AttemptDir, RunDir, rank_files
from bigsci_launch.runs.watching.ended import EndedBy, write_ended_by
from bigsci_launch.runs.watching.heartbeat import LEAST_SILENCE_S, MISSED, WatcherHeartbeat, read_heartbeats
from bigsci_launch.runs.watching.ledger import Act, ActState, read_acts, record_act
from bigsci_launch.units import format_age
from bigsci_launch.watch.act.jobs import (
    END_GRACE_S,
    ask_to_stop,
    end_ranks,
    how_ended,
    kill_ranks,
    why_out_of_reach,
)

TakeBundle = Callable[[], tuple[Path | None, str]]
"""Looks at the ranks; returns the evidence, if there is any, and a sentence: the verdict, or why there is none."""
EMPTY_S = 0.5
MAX_LOOKS = 2
"""A look that has killed the watcher is tried again, once."""
UNKILLABLE_S = 120.0
"""Ranks that are still there so long after KILL cannot be ended from here."""
SLURM_RETRY_S = 30.0
SLACK_S = 30.0
EVENT_TAIL_BYTES = 1 << 20
STOPS = ("exit", "restart")
LOOK = "look "
_FINAL = ("done", "refused", "failed")


@dataclass(frozen=True, slots=True)
class _Case:
    """A request that is being carried through, its last line in the ledger, and the number of its lines."""

    taken: Taken
    act: Act
    num_lines: int

    @property
    def request(self) -> Request:
        return self.taken.request

    @property
    def stage(self) -> str:
        return self.act.stage


@dataclass(frozen=True, slots=True)
class _View:
    """What is known of the newest attempt at a look; see `RequestHandler.serve`. `ended` is how it has ended."""

    attempt: AttemptDir
    ended: str | None
    last_step: int | None
    grace_s: float


class RequestHandler:
    """The requests of one run. `name` is that of the watcher, which has written its heartbeat before."""

    def __init__(
        self, run: RunDir, name: str, take_bundle: TakeBundle, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._name = name
        self._take_bundle = take_bundle
        self._clock = clock
        self._seen: dict[str, float] = {}
        """When this watcher first saw something, by its own clock: those of two watchers may differ."""
        self._asked_slurm: dict[str, float] = {}
        self._recorded: list[Act] = []

    def serve(self, now: float, last_step: int | None, grace_s: float) -> list[Act]:
        """Take up what is asked, and carry on what was. Return the lines that were added to the ledger.

        `now` is this machine's time in seconds since the epoch, `last_step` the last optimizer step that is known to
        be done. Ranks that have neither saved nor ended `grace_s` after they were asked to are taken for hung: the
        longest time that a step, a save and an evaluation may take together, or the start.

        Raises:
            OSError: the run directory cannot be written. Nothing was done that is not in the ledger.
        """
        self._recorded = []
        attempt = self._run.latest_attempt()
        if attempt is None or why_out_of_reach(attempt) is not None:
            return []
        view = _View(attempt, how_ended(attempt), last_step, grace_s)
        self._take(now)
        cases = [case for case in self._open_cases() if self._is_accepted(case, view)]
        self._settle_stops(cases, view)
        for case in [case for case in cases if self._is_open(case)]:
            self._carry(case, view)
        self._ask_ranks(view)
        return self._recorded

    # ---------------------------------------------------------------------------------------- taking up

    def _take(self, now: float) -> None:
        for who, number in remove_surplus(self._run, taken_up(self._run)).items():
            self._note_surplus(who, number)
        for name in waiting(self._run):
            # A file without content may be written in a moment.
            if is_complete(self._run, name) or self._is_old(f"empty {name}", EMPTY_S):
                take_up(self._run, name, self._name)
        others = [taken for taken in taken_up(self._run) if taken.watcher != self._name]
        heartbeats = {heartbeat.name: heartbeat for heartbeat in read_heartbeats(self._run)} if others else {}
        for taken in others:
            if self._is_gone(heartbeats.get(taken.watcher), now):
                take_over(self._run, taken, self._name)

    def _note_surplus(self, who: str, number: int) -> None:
        """Record whose requests were removed: once, since there may be as many at each look."""
        if (said := f"surplus of {who}") not in self._seen:
            self._seen[said] = self._clock()
            words = f"{number:,} were removed unread: at most {MOST_OF_ONE} per user are taken at once (reported once)"
            self._record(Act(f"surplus-{time.time_ns()}", "requests", who, "", "refused", words))

    def _is_gone(self, heartbeat: WatcherHeartbeat | None, now: float) -> bool:
        """Whether a watcher is gone. On another host, by heartbeats that do not change: its clock may differ."""
        if heartbeat is None or heartbeat.ended:
            return True
        if heartbeat.is_here:
            return heartbeat.is_dead(now) is True
        return self._is_old(
            f"heartbeat of {heartbeat.name} at {heartbeat.time}", max(LEAST_SILENCE_S, MISSED * heartbeat.every_s)
        )

    def _is_old(self, what: str, least_s: float) -> bool:
        now = self._clock()
        return now - self._seen.setdefault(what, now) >= least_s

    def _open_cases(self) -> list[_Case]:
        return [case for case in self._all_open_cases() if case.taken.watcher == self._name]

    def _all_open_cases(self) -> list[_Case]:
        taken_ones = taken_up(self._run)
        lines: dict[str, list[Act]] = {}
        for act in read_acts(self._run) if taken_ones else ():
            lines.setdefault(act.key, []).append(act)
        cases = []
        for taken in taken_ones:
            request, known = taken.request, lines.get(taken.request.key, [])
            act = known[-1] if known else Act(request.key, request.verb, request.who, request.why, "begun")
            if any(each.state in _FINAL for each in known):
                forget(self._run, taken)
            else:
                cases.append(_Case(taken, act, len(known)))
        return cases

    def _is_open(self, case: _Case) -> bool:
        return not any(act.key == case.request.key and act.state in _FINAL for act in self._recorded)

    def _is_accepted(self, case: _Case, view: _View) -> bool:
        """Whether a request is carried through; one that was just taken up may have to be refused."""
        if case.num_lines:
            return True
        why = case.request.wrong or self._why_not(case.request, view)
        if why is not None:
            self._finish(replace(case, act=replace(case.act, why="", attempt=view.attempt.name)), "refused", why)
        return why is None

    def _why_not(self, request: Request, view: _View) -> str | None:
        name = view.attempt.name
        if view.ended is not None:
            return f"attempt {name} has ended: {view.ended}"
        if request.attempt is not None and request.attempt != name:
            return f"the request was for attempt {request.attempt}, which has ended; attempt {name} runs now"
        if request.attempt is None and request.asked <= _last_trace_before(self._run, view.attempt):
            return f"the request was made before attempt {name} began, for an attempt that has ended"
        if request.verb == "save" and not _is_trainer(view.attempt):
            return "only `bsl train` saves on request, and this run has another program; exit asks it to save and stop"
        step = request.after_step
        if step is not None and view.last_step is not None and view.last_step >= step:
            return f"step {step} has passed: {view.last_step} steps are done"
        return None

    def _settle_stops(self, cases: Sequence[_Case], view: _View) -> None:
        """Of several requests that end the attempt, one counts: what is being done already, kill, else the newest."""
        stops = [case for case in cases if case.request.verb in (*STOPS, "kill")]
        chosen = max(stops, key=_precedence, default=None)
        for case in stops:
            if chosen is None or case is chosen:
                continue
            if case.stage == "asked" and case.act.attempt == view.attempt.name:
                view.attempt.ended_by.unlink(missing_ok=True)
            self._finish(case, "refused", f"superseded by {chosen.request.verb} of {chosen.request.who}")

    # ---------------------------------------------------------------------------------------- carrying through

    def _carry(self, case: _Case, view: _View) -> None:
        request, name = case.request, view.attempt.name
        if not case.num_lines:
            act = replace(case.act, attempt=name, step=request.after_step)
            case = self._reach(replace(case, act=act), "", f"taken up by {self._name}")
        elif case.act.attempt not in (None, name):
            self._finish(case, *_end_of_earlier(case, self._run))
            return
        elif view.ended is not None:
            self._finish(case, *_end_of(case, view.attempt))
            return
        try:
            if request.verb == "dump":
                self._dump(case)
            elif request.verb == "save":
                self._save(case, view)
            elif self._clock() - self._asked_slurm.get(request.key, -SLURM_RETRY_S) >= SLURM_RETRY_S:
                self._stop(case, view)
        except JobNotFound as error:
            self._note_trouble(case, f"the ranks are gone: {error.message}")
        except SlurmUnavailable as error:
            self._note_trouble(case, error.message)
        except BslError as error:
            self._finish(case, "failed", error.message)

    def _dump(self, case: _Case) -> None:
        case = self._begin_look(case)
        bundle, sentence = self._take_bundle()
        self._finish(case, "done" if bundle else "failed", _bundle_text(bundle, sentence))

    def _begin_look(self, case: _Case) -> _Case:
        number = int(case.stage.removeprefix(LOOK)) + 1 if case.stage.startswith(LOOK) else 1
        if number > MAX_LOOKS:
            raise RunDirError("the watcher died each time it examined the ranks")
        return self._reach(case, f"{LOOK}{number}", "examining the ranks")

    def _save(self, case: _Case, view: _View) -> None:
        if case.stage == "":
            self._reach(case, "asked", "sent to rank 0; all ranks save at the end of a step")
            return
        saved = _saved(view.attempt, case.request.key)
        if saved is not None and saved["kind"] == "save_refused":
            self._finish(case, "failed", _refusal_text(saved))
        elif saved is not None:
            taken_s = f" in {saved['seconds']:.1f} s" if isinstance(saved.get("seconds"), (int, float)) else ""
            self._finish(case, "done", f"saved {saved.get('path')} after step {saved.get('step')}{taken_s}")
        elif self._is_overdue(case, view):
            where = "no step has ended" if view.last_step is None else f"the last step was {view.last_step}"
            self._finish(case, "failed", f"no save within {format_age(view.grace_s)}: {where}")

    def _is_overdue(self, case: _Case, view: _View) -> bool:
        return _is_due(case, view) and self._is_old(f"{case.request.key} due", view.grace_s)

    def _stop(self, case: _Case, view: _View) -> None:
        request, stage, attempt = case.request, case.stage, view.attempt
        if stage == "" and request.verb == "kill":
            _write_ended(case, attempt)
            self._reach(case, "ended", end_ranks(attempt))
        elif stage == "":
            self._ask_to_stop(case, view)
        elif stage.startswith(LOOK) or (stage == "asked" and self._is_overdue(case, view)):
            self._end_hung(case, view)
        elif stage == "ended" and self._is_old(f"{request.key} ended", END_GRACE_S):
            self._reach(case, "killed", kill_ranks(attempt))
        elif stage == "killed" and self._is_old(f"{request.key} killed", UNKILLABLE_S):
            self._finish(case, "failed", f"ranks are still running {UNKILLABLE_S:.0f} s after KILL")

    def _ask_to_stop(self, case: _Case, view: _View) -> None:
        """Ask the ranks: `bsl train` reads it in its requests, other programs get the stop signal when it is time.

        Where the step is named, rank 0 of `bsl train` writes ended.json when it is there: until then, the attempt may
        end for another reason.
        """
        if _is_trainer(view.attempt):
            if case.request.after_step is None:
                _write_ended(case, view.attempt)
            self._reach(
                case, "asked", f"sent to rank 0; all ranks save and stop at the end of a step{_limit(case, view)}"
            )
        elif _is_due(case, view) and rank_files(view.attempt.pids, ".json"):
            _write_ended(case, view.attempt)
            self._reach(case, "asked", f"{ask_to_stop(view.attempt)}{_limit(case, view)}")
        elif self._is_overdue(case, view):
            self._end_hung(case, view)

    def _end_hung(self, case: _Case, view: _View) -> None:
        """The ranks have not stopped: look at them, keep what was seen, and end them."""
        bundle: Path | None = None
        try:
            case = self._begin_look(case)
            bundle, sentence = self._take_bundle()
        except BslError as error:
            sentence = error.message
        _write_ended(case, view.attempt, bundle)
        did = end_ranks(view.attempt)
        asked = f"the ranks did not stop within {format_age(view.grace_s)}"
        self._reach(case, "ended", f"{asked}: {_bundle_text(bundle, sentence)}; {did}")

    # ---------------------------------------------------------------------------------------- asking the ranks

    def _ask_ranks(self, view: _View) -> None:
        """Pass on what the open requests ask of the trainer, whoever carries them, and nothing else."""
        attempt = view.attempt
        if view.ended is not None or not _is_trainer(attempt):
            return
        wanted = {
            case.request.key: replace(case.request, attempt=attempt.name)
            for case in self._all_open_cases()
            if case.stage == "asked" and case.act.attempt == attempt.name and case.request.verb in WITH_STEP
        }
        there = {request.key: request for request in read_requests(attempt, WITH_STEP)}
        for key, request in wanted.items():
            if there.get(key) != request:
                put_request(attempt, request)
        for key in there.keys() - wanted:
            withdraw(attempt, key)

    # ---------------------------------------------------------------------------------------- the ledger

    def _reach(self, case: _Case, stage: str, words: str) -> _Case:
        act = replace(case.act, state="begun", stage=stage, words=words)
        self._record(act)
        self._seen.setdefault(f"{act.key} {stage}", self._clock())
        return replace(case, act=act, num_lines=case.num_lines + 1)

    def _finish(self, case: _Case, state: ActState, words: str) -> None:
        self._record(replace(case.act, state=state, words=words))

    def _record(self, act: Act) -> None:
        act = replace(act, time=time.time())
        record_act(self._run, act)
        self._recorded.append(act)

    def _note_trouble(self, case: _Case, words: str) -> None:
        """What was asked could not be done now: it is tried again. That is said once."""
        self._asked_slurm[case.request.key] = self._clock()
        if case.act.words != words:
            self._record(replace(case.act, words=words))


def _limit(case: _Case, view: _View) -> str:
    """When ranks that do not stop are examined, for the record of a request; nothing if their step is not due yet."""
    if not _is_due(case, view):
        return ""
    due = time.strftime("%H:%M", time.gmtime(time.time() + view.grace_s))
    return f"; ranks that have not stopped by {due} UTC are examined and ended, and `kill` ends them now"


def grace_s(usual_s: Callable[[str], float | None], config: RunConfig | None) -> float:
    """Return the seconds after which ranks that have not done what they were asked to are taken for hung.

    Ended too early, they lose their work. As before the time limit: the step and the save in progress must end, then
    the step in which all ranks agree, and the last save; an evaluation may come first. `usual_s` says how long a phase
    of the run takes, or None; then it is what the run file expects.
    """
    monitor = config.monitor if config is not None else MonitorSection()
    step_s, save_s = usual_s("step") or monitor.step_time_s, usual_s("save") or monitor.save_time_s
    eval_s = usual_s("eval") or monitor.eval_time_s
    return max(monitor.exit_margin_s or 0.0, SLACK_S + 3 * step_s + 2 * save_s + 2 * eval_s)


def _is_due(case: _Case, view: _View) -> bool:
    after = case.request.after_step
    return after is None or (view.last_step is not None and view.last_step >= after)


def _write_ended(case: _Case, attempt: AttemptDir, bundle: Path | None = None) -> None:
    request, evidence = case.request, str(bundle) if bundle else None
    continues = request.verb == "restart"
    write_ended_by(attempt, EndedBy(request.verb, request.who, request.why, continues, request.after_step, evidence))


def _precedence(case: _Case) -> tuple[bool, bool, float]:
    is_being_done = case.stage not in ("", "asked")
    return is_being_done, case.request.verb == "kill", case.request.asked


def _is_trainer(attempt: AttemptDir) -> bool:
    """Whether the ranks are those of `bsl train`, which reads its requests."""
    with suppress(RunDirError):
        record = read_job(attempt)
        return record is not None and record.total_steps is not None
    return False


def _saved(attempt: AttemptDir, key: str) -> dict[str, Any] | None:
    """Return the event of the save that was asked for with `key`, or of its refusal; None if it was not tried."""
    events = reversed(read_last_events(attempt.event_file(0), EVENT_TAIL_BYTES, holding=b'"save'))
    kinds = ("save", "save_refused")
    return next((event for event in events if event.get("kind") in kinds and event.get("request") == key), None)


def _refusal_text(refused: Mapping[str, Any]) -> str:
    return f"not saved after step {refused.get('step')}: {refused.get('text')}; the ranks retry automatically"


def _end_of_earlier(case: _Case, run: RunDir) -> tuple[ActState, str]:
    try:
        attempt = find_attempt(run, case.act.attempt)
    except RunDirError as error:
        return "failed", error.message
    return _end_of(case, attempt)


def _end_of(case: _Case, attempt: AttemptDir) -> tuple[ActState, str]:
    ended = f"attempt {attempt.name} has ended: {how_ended(attempt) or 'it left no exit.json'}"
    if case.request.verb == "save":
        saved = _saved(attempt, case.request.key)
        if saved is not None and saved["kind"] == "save_refused":
            return "failed", f"{_refusal_text(saved)}; {ended}"
        return ("done", f"saved {saved.get('path')}; {ended}") if saved else ("failed", f"not saved: {ended}")
    if case.request.verb == "dump":
        return "failed", ended
    return ("done", ended) if case.stage else ("failed", f"no stop request was sent: {ended}")


def _bundle_text(bundle: Path | None, sentence: str) -> str:
    return f"{sentence} (stacks: {bundle})" if bundle else f"no stacks: {sentence}"


def _last_trace_before(run: RunDir, attempt: AttemptDir) -> float:
    """Return when an earlier attempt last wrote a record, by the clock of the file system; 0 if there was none."""
    newest = 0.0
    for earlier in run.attempts():
        if earlier.name == attempt.name:
            break
        for path in (earlier.exit, *earlier.exits.glob("*"), *earlier.events.glob("*")):
            with suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
    return newest
