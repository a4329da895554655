"""What the controller does next, given what has happened. Pure: events in, orders out, and time is passed in.

A generation is gathered, runs, and ends with the first failure. Then those that are left gather for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigsci_launch.recover.generation import FailureKind, GenerationFailure, Instant, Level, Membership, RankGroup, Slot
from bigsci_launch.recover.members import Rules
from bigsci_launch.recover.orders import (
    Archived,
    ArchiveRecords,
    DropSlot,
    FinishJob,
    JobEvent,
    LeaveOut,
    LookAtRanks,
    RankEnded,
    RankSaid,
    RanksSeen,
    RecordLine,
    RequestAnswer,
    RunnersEnded,
    SayLine,
    SendToSlot,
    SlotJoined,
    SlotLost,
    SlotNeverCame,
    SlotOrder,
    SlotReady,
    SlotUnfit,
    Terminated,
)
from bigsci_launch.recover.phases import StandstillCount
from bigsci_launch.recover.rendezvous import CannotBegin, LostRunners, Rendezvous, SlotDeaths, WaitWords, slots_to_avoid
from bigsci_launch.recover.running import (
    DROP_AFTER_S,
    FINAL_S,
    KILL_AFTER_S,
    LOOK_S,
    JobStage,
    Running,
    why_refused,
)
from bigsci_launch.runs.control.request import Request
from bigsci_launch.topology import compress_ranks

GRACE_S: Mapping[Level, float] = {"restart": 5.0, "in_place": 10.0}
"""How long ranks may take to leave a generation that has ended, or to say that they make progress with it. Their
runners then kill them."""
LOST_PEER_S = 5.0
"""How long ranks may say that they have lost a peer before the generation ends, although no rank has died."""
TERMINATION_LAG_S = 1.0
TERMINATION_GRACE_S = 30.0
"""Time from TERM to KILL when the job is cancelled: Slurm's default KillWait."""
LEFT_OUT_S = 86400.0


class JobStateMachine:
    """Decides about one job. `take` and `wake` return what to do; `exit_code` is None until the job is over."""

    def __init__(self, rules: Rules, now: Instant) -> None:
        self._rules = rules
        self._now = self._since = now
        self._stage = JobStage.GATHER
        self._orders: list[SlotOrder] = []
        self._slots: dict[int, Slot] = {}
        self._lost = LostRunners(is_local=self._is_local)
        self._ready: dict[int, int] = {}
        self._absent = set(range(rules.num_slots))
        self._gone: dict[int, str] = {}
        self._deaths = SlotDeaths()
        self._newest_slot: float | None = None
        self._run: Running | None = None
        self._cause: GenerationFailure | None = None
        self._is_archiving, self._is_archived = False, True
        self._leave_due: float | None = None
        """When the slots are asked to leave after the job was asked to end."""
        self._code: int | None = None
        self._silent_nodes: set[str] = set()
        self._progress = StandstillCount(knows_steps=rules.level == "in_place")
        self._waiting = WaitWords()

    @property
    def generation(self) -> RankGroup | None:
        """The newest generation that has begun."""
        return self._run.generation if self._run else None

    @property
    def exit_code(self) -> int | None:
        ended_well = self._leave_due is not None and self._run is not None and self._run.has_finished
        return 0 if ended_well else self._code

    def take(self, event: JobEvent, now: Instant) -> list[SlotOrder]:
        """Note what has happened, and return what to do about it at once. `wake` does the rest: a large job has many
        events at a time, and who takes part is decided after the last of them."""
        self._now = now
        self._note(event)
        return self._flush()

    def wake(self, now: Instant) -> list[SlotOrder]:
        """Return what to do because of all that has happened, and because time has passed."""
        self._now = now
        if self._stage is not JobStage.LEAVE:
            self._orders += self._lost.start(self._slots, now.clock)
        self._move_on()
        return self._flush()

    # ------------------------------------------------------------------------------------------ what has happened

    def _note(self, event: JobEvent) -> None:
        match event:
            case SlotJoined():
                self._note_joined(event.slot)
            case SlotLost():
                self._note_lost(event)
            case SlotNeverCame() if event.slot in self._absent:
                self._absent.discard(event.slot)
                self._gone[event.slot] = f"its runner ended with exit code {event.code} before it connected"
            case SlotReady():
                self._note_ready(event)
            case SlotUnfit():
                self._note_unfit(event)
            case RankEnded():
                self._note_ended(event)
            case RankSaid():
                self._note_said(event)
            case Request():
                self._order(RequestAnswer(event, self._grant(event)))
            case RanksSeen():
                if self._run and event.generation == self._run.number:
                    self._run.seen = event
            case Archived():
                self._is_archived = True
            case RunnersEnded():
                if self._stage is not JobStage.LEAVE:
                    self._give_up(event.code or 1, "every runner has ended")
            case Terminated():
                if self._stage is not JobStage.LEAVE:
                    self._terminate(event.signal)

    def _note_joined(self, slot: Slot) -> None:
        self._absent.discard(slot.number)
        self._gone.pop(slot.number, None)
        self._lost.remove(slot.number)
        self._slots[slot.number] = slot
        self._newest_slot = self._now.clock
        if self._stage is JobStage.LEAVE:
            self._order(SendToSlot(slot.number, {"do": "leave", "code": self._code or 0}))

    def _note_lost(self, event: SlotLost) -> None:
        slot = self._slots.pop(event.slot, None)
        if slot is None:
            return
        self._ready.pop(event.slot, None)
        self._gone[event.slot] = event.why
        if event.is_silent:
            self._silent_nodes.add(slot.node)
        if self._stage is JobStage.LEAVE:
            return
        run = self._run
        rank = run.ranks.get(slot.number) if run else None
        if run is not None and rank in run.finished and self._stage is JobStage.RUN:
            self._note_done(run, rank, run.failure("lost_runner", self._now, rank, words=event.why))
            return
        self._lost.add(slot, self._now.clock)
        self._note_lost_rank(slot, run, rank, event.why)
        self._leave_out_if_lost(slot.node, event.why)
        self._orders += self._lost.start(self._slots, self._now.clock)

    def _note_lost_rank(self, slot: Slot, run: Running | None, rank: int | None, why: str) -> None:
        if run is None or rank is None:
            self._order(SayLine(f"spare slot {slot.number} on {slot.node} has lost its runner: {why}"))
            return
        failure = run.failure("lost_runner" if self._lives(slot.node) else "lost_node", self._now, rank, words=why)
        if self._stage is JobStage.RUN and rank not in run.done:
            run.inside.discard(rank)
            self._fail(failure)
        elif self._stage is JobStage.END:
            run.inside.discard(rank)
            run.failures.append(failure)
        elif self._stage is JobStage.GATHER:
            self._record("failed", failure.as_dict())

    def _leave_out_if_lost(self, node: str, why: str) -> None:
        if self._lives(node):
            return
        if node in self._silent_nodes:
            self._record_left_out(node, "lost")
            self._order(LeaveOut(node, "lost", why))
        else:
            self._record("left_out", {"node": node, "reason": "all of its runners have ended", "until": None})

    def _note_unfit(self, event: SlotUnfit) -> None:
        slot = self._slots.get(event.slot)
        if slot is None:
            return
        for number in slots_to_avoid(slot, self._usable(), self._rules.wanted.topology.world_size):
            self._deaths.rule_out(number)
            self._gone[number] = f"{slot.node} failed a check: {event.words}"
            self._lost.remove(number)
            self._ready.pop(number, None)
        self._record_left_out(slot.node, f"failed a check: {event.words}")
        self._order(LeaveOut(slot.node, "failed_check", event.words))

    def _usable(self) -> dict[int, Slot]:
        """The slots that may take a rank: those with a runner, and those that get one again."""
        known = {**self._lost.coming(self._slots, self._now.clock), **self._slots}
        return {number: slot for number, slot in known.items() if not self._deaths.is_out(number)}

    def _note_ready(self, event: SlotReady) -> None:
        run = self._run
        if event.slot not in self._slots:
            return
        rank = run.ranks.get(event.slot) if run and self._stage in (JobStage.RUN, JobStage.END) else None
        if run is not None and rank in run.inside:
            if event.generation is None or event.generation < run.number:
                return  # it was said before the slot heard of this generation
            self._note_left(run, rank)
        self._ready[event.slot] = event.port

    def _note_left(self, run: Running, rank: int) -> None:
        if self._stage is JobStage.RUN:
            run.note_left_alone(rank, self._now)
        else:
            run.inside.discard(rank)

    def _note_ended(self, event: RankEnded) -> None:
        run = self._run
        self._ready.pop(event.slot, None)
        rank = run.ranks.get(event.slot) if run else None
        if run is None or rank not in run.inside or self._stage is JobStage.GATHER:
            self._note_death_in_waiting(event)
            return
        run.inside.discard(rank)
        stays = self._rules.level == "in_place"
        if run.takes_end(rank, event, self._stage, stays=stays):
            kind: FailureKind = "left_early" if event.is_good else "died"
            self._note_done(run, rank, run.failure(kind, self._now, rank, event))
        elif self._stage is JobStage.END:
            run.note_ended_while_ending(rank, event, self._now, stays=stays)
        elif self._stage is JobStage.RUN:
            run.final = event if event.is_final else None
            has_left = event.is_good and not event.was_requested
            self._fail(run.failure("left_early" if has_left else "died", self._now, rank, event))

    def _note_done(self, run: Running, rank: int, failure: GenerationFailure) -> None:
        """Note that a rank is done: it has ended with 0, or had finished before this happened to it."""
        if rank not in run.done and failure.kind != "left_early":
            self._order(SayLine(f"{failure}, after it had finished: not a failure"))
        run.inside.discard(rank)
        run.done.setdefault(rank, failure)
        run.first_done = run.first_done or self._now
        if self._stage is JobStage.RUN and run.has_finished:
            self._record("finished", {"exit_code": 0})
            self._leave(0)

    def _note_death_in_waiting(self, event: RankEnded) -> None:
        """A process has died that had no rank: a spare, or one that waited for the next generation."""
        if self._stage is JobStage.LEAVE:
            return
        self._deaths.note(event.slot, is_final=event.is_final)
        how = event.signal or f"exit code {event.code}"
        self._order(SayLine(f"a standby process in slot {event.slot} has ended: {how}"))
        if self._deaths.is_out(event.slot):
            self._lost.remove(event.slot)
            self._gone[event.slot] = event.words or f"its process exits before it takes a rank, with {how}"
            self._cause = self._cause or GenerationFailure(
                "died", noticed=self._now.time, slot=event.slot, status=event.status
            )

    def _note_said(self, event: RankSaid) -> None:
        run = self._run
        rank = run.ranks.get(event.slot) if run else None
        if run is None or rank is None or event.generation != run.number:
            return
        if event.word == "left" and rank in run.inside:
            self._note_left(run, rank)
        elif event.word == "lost":
            run.lost_peers.append((self._now, f"rank {rank}: {event.fields.get('text') or 'a peer is gone'}"))
        elif event.word in ("finished", "final", "leaving"):
            run.note_word(rank, event.word, self._now.clock)
        elif self._stage is JobStage.RUN:
            phase = run.phases.note(rank, event.word, event.fields, self._now.clock - run.began.clock)
            if phase is not None:
                self._record("phase", phase)

    def _grant(self, request: Request) -> str | None:
        """Do what a watcher asks for, or return why not."""
        run, refused = self._run, request.wrong or why_refused(request, self._run, self._stage)
        if run is None or refused is not None:
            return refused
        words = f"{request.why} ({request.who})"
        if request.verb == "begin_again":
            self._fail(run.blame_nobody("asked", self._now, words))
            return None
        if request.rank is None or request.rank not in run.inside:
            return f"rank {request.rank} is not running"
        self._order(SendToSlot(run.slot(request.rank), run.kill_message(words)))
        self._fail(run.failure(request.failure, self._now, request.rank, words=words), fenced=request.rank)
        return None

    # ------------------------------------------------------------------------------------------ what is done about it

    def _move_on(self) -> None:
        before = None
        while before is not self._stage:
            before = self._stage
            if self._stage is JobStage.GATHER:
                self._gather()
            elif self._stage is JobStage.RUN and self._run is not None:
                self._watch(self._run)
            elif self._stage is JobStage.END and self._run is not None:
                self._see_out(self._run)
            elif self._stage is JobStage.LEAVE:
                self._see_off()

    def _flush(self) -> list[SlotOrder]:
        orders, self._orders = self._orders, []
        return orders

    def _gather(self) -> None:
        usable = self._usable()
        began = None if self._newest_slot is None else max(self._since.clock, self._newest_slot)
        decision = Rendezvous(
            wanted=self._rules.wanted,
            before=self._run.generation.membership if self._run else None,
            slots=usable,
            ready=self._ready.keys() & usable.keys(),
            absent=self._absent,
            gone=self._gone,
            waited_s=None if began is None else self._now.clock - began,
        ).decide()
        if isinstance(decision, Membership) and self._has_archived():
            self._begin(decision)
        elif isinstance(decision, Membership):
            return
        elif isinstance(decision, CannotBegin):
            self._give_up(self._cause.status if self._cause else 1, decision.why)
        else:
            self._orders += self._waiting.say(decision.text, self._since.clock, self._now.clock)

    def _has_archived(self) -> bool:
        """Whether nothing is left of the ranks of the generation before. What is left when there is no other one says
        how the job ended."""
        if self._run is not None and not self._is_archiving:
            self._is_archiving, self._is_archived = True, False
            self._order(ArchiveRecords(self._run.number))
        return self._is_archived

    def _begin(self, line: Membership) -> None:
        number = self._run.number + 1 if self._run else 0
        first = line.slots[0]
        generation = RankGroup(number, line, (self._rules.address_of(first), self._ready[first.number]))
        self._run = Running(generation, self._now)
        self._stage, self._is_archiving = JobStage.RUN, False
        taken = self._run.ranks
        self._record("began", generation.as_dict([slot for n, slot in sorted(self._slots.items()) if n not in taken]))
        for slot_number, message in generation.begin_messages():
            self._ready.pop(slot_number, None)
            self._order(SendToSlot(slot_number, message))

    def _watch(self, run: Running) -> None:
        """End a running generation, where time or a late slot is a reason to."""
        clock, wait_s = self._now.clock, self._rules.wait_s
        if run.lost_peers and clock - run.lost_peers[0][0].clock >= LOST_PEER_S:
            self._fail(run.blame_nobody("lost_peer", self._now, run.lost_peers[0][1]))
        elif run.first_done is not None and wait_s and clock - run.first_done.clock >= wait_s:
            ranks = compress_ranks(run.inside)
            self._give_up(1, f"ranks {ranks} still run {wait_s:g} s after the first rank ended")
        elif self._can_grow(run):
            self._order(SayLine(f"generation {run.number} ends: more replicas fit now"))
            self._end(run, "more replicas fit now")
        for rank in [rank for rank, since in run.finals.items() if clock - since >= FINAL_S and rank in run.inside]:
            run.finals[rank] = clock
            self._order(SendToSlot(run.slot(rank), run.kill_message("it did not exit")))

    def _can_grow(self, run: Running) -> bool:
        """Whether a late slot allows more replicas. Only where ranks tell their steps: there, it costs one at most.
        Programs that start again would lose all since their last checkpoint."""
        spares = [number for number in self._ready if not (number in run.ranks or self._deaths.is_out(number))]
        return not run.done and run.phases.has_stepped and run.would_grow(self._rules.wanted, len(spares))

    def _fail(self, failure: GenerationFailure, fenced: int | None = None) -> None:
        run = self._run
        assert run is not None
        run.failures.append(failure)
        self._order(SayLine(f"generation {run.number} ends: {failure}"))
        self._end(run, str(failure), fenced)

    def _end(self, run: Running, why: str, fenced: int | None = None) -> None:
        self._stage, self._since = JobStage.END, self._now
        message = {"do": "end", "generation": run.number, "why": why, "grace_s": self._grace_s}
        for rank in sorted(run.inside - {fenced}):
            self._order(SendToSlot(run.slot(rank), message))

    def _see_out(self, run: Running) -> None:
        """Wait until all ranks have left, and kill those that do not. Then the generation is over."""
        late_s = self._now.clock - max(self._since.clock, run.progressed) - self._grace_s
        if run.inside and late_s >= DROP_AFTER_S:
            for rank in sorted(run.inside):
                self._give_up_slot(run, rank)
        elif run.inside and late_s >= KILL_AFTER_S:
            for rank in sorted(run.inside - run.killed):
                run.killed.add(rank)
                self._order(SendToSlot(run.slot(rank), run.kill_message("it did not leave")))
        if not run.inside and not run.is_looked_at:
            run.is_looked_at, run.ended = True, self._now
            since = run.began.time if self._rules.level == "restart" else None
            self._order(LookAtRanks(run.number, run.ranks_with_words(), since))
        is_seen = run.ended is not None and (run.seen or self._now.clock - run.ended.clock >= LOOK_S)
        if run.ended is not None and is_seen and not self._lost.are_doubtful(self._slots, self._now.clock):
            self._conclude(run, run.ended)

    def _see_off(self) -> None:
        """After the job was asked to end: ask the slots to leave too. On this machine, their runners were asked."""
        due = self._leave_due
        if due is not None and self._now.clock >= due and self._rules.address_suffix is not None:
            self._leave_due = float("inf")
            self._tell_to_leave(grace_s=TERMINATION_GRACE_S)

    def _give_up_slot(self, run: Running, rank: int) -> None:
        slot, why = run.generation.slots[rank], "its rank could not be killed"
        run.inside.discard(rank)
        run.killed.discard(rank)
        run.failures.append(run.failure("stuck", self._now, rank, words=why))
        self._slots.pop(slot.number, None)
        self._ready.pop(slot.number, None)
        self._gone[slot.number] = why
        self._order(DropSlot(slot.number, why))

    def _conclude(self, run: Running, ended: Instant) -> None:
        """Record how the generation ended, and decide whether there will be another one."""
        began_to_end, self._stage, self._since = self._since, JobStage.GATHER, self._now
        stays = self._rules.level == "in_place"
        step = run.newest_step(stays=stays)
        if run.has_stepped(stays=stays):
            self._deaths.forget(run.ranks)
        failures = run.judged_failures(self._lives, stays=stays)
        for failure in failures:
            self._record("failed", failure.as_dict())
        seconds = round(ended.clock - began_to_end.clock, 3)
        self._record("ended", {"step": step, "seconds": seconds, "killed": sorted(run.killed)})
        if not failures:
            return
        self._cause = cause = failures[0]
        stands_still = self._progress.note(step, began_to_end.clock - run.began.clock, run.phases.back_at)
        why = run.why_last(cause) or (self._progress.words(cause) if stands_still else None)
        if why is not None:
            self._give_up(run.final.status if run.final is not None else cause.status, why)

    def _terminate(self, number: int) -> None:
        """End the job on request. What signals the controller signals the ranks too, a moment later at the latest:
        Slurm, or the controller itself on this machine. They are not signalled twice."""
        self._leave_due = self._now.clock + TERMINATION_LAG_S
        self._record("gave_up", {"exit_code": 128 + number, "why": "the job was told to end", "rank": None})
        self._stage, self._code = JobStage.LEAVE, 128 + number
        self._order(FinishJob(128 + number))

    def _tell_to_leave(self, **more: Any) -> None:
        for number in sorted(self._slots):
            self._order(SendToSlot(number, {"do": "leave", "code": self._code, **more}))

    def _give_up(self, code: int, why: str) -> None:
        rank = self._cause.rank if self._cause else None
        self._record("gave_up", {"exit_code": code, "why": why, "rank": rank})
        self._order(SayLine(f"giving up: {why}"))
        self._leave(code)

    def _leave(self, code: int) -> None:
        self._stage, self._code = JobStage.LEAVE, code
        self._tell_to_leave()
        self._order(FinishJob(code))

    # ------------------------------------------------------------------------------------------ the words for it

    @property
    def _is_local(self) -> bool:
        return self._rules.address_suffix is None

    def _lives(self, node: str | None) -> bool:
        """Whether a node has a runner, or is this machine."""
        return self._is_local or any(slot.node == node for slot in self._slots.values())

    @property
    def _grace_s(self) -> float:
        return GRACE_S[self._rules.level]

    def _record_left_out(self, node: str, reason: str) -> None:
        self._record("left_out", {"node": node, "reason": reason, "until": self._now.time + LEFT_OUT_S})

    def _record(self, event: str, fields: dict[str, Any]) -> None:
        self._order(RecordLine(event, self._run.number if self._run else None, fields))

    def _order(self, order: SlotOrder) -> None:
        self._orders.append(order)
