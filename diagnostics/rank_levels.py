"""The two levels of `survive`, as the slot of a rank carries them out. For rank_runner.py. Standard library only."""

from __future__ import annotations

import math
import os
import signal
import time

from rank_again import end_rest_of_slot
from rank_link import Link
from rank_log import say
from rank_process import run_variables
from rank_program import Program, adopt_orphans
from rank_slot import Slot

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import argparse
    from typing import Any

MAX_FAILED_STARTS = 3
# Of a slot: they come with the rank, not from the environment of the runner.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_THE_AGENT = ("BSL_CONTROLLER", "BSL_CONTROLLER_TOKEN")


def serve(options: argparse.Namespace) -> int:
    """Serve until the job is over, and return the exit code for the runner."""
    address, token = (os.environ.get(name) for name in OF_THE_AGENT)
    if not address or not token:
        say(f"rank_runner: --survive needs {' and '.join(OF_THE_AGENT)}, which bsl's controller sets")
        return 2
    slot = InPlaceSlot(options) if options.survive == "in_place" else RestartSlot(options)
    adopt_orphans()
    if options.again is not None:
        end_rest_of_slot(slot.number, slot.attempt, options.again)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGURG):
        signal.signal(number, slot.receive)
    try:
        link = Link(address, token, slot.hello(), slot.events)
    except OSError as error:
        say(f"rank_runner: {slot.name} cannot reach the controller at {address}: {error}")
        return 1
    return slot.run(link)


class RestartSlot(Slot):
    """Level 1: any program. It is started for a generation, and ended with it."""

    def open(self) -> None:
        self.say_ready()

    def begin(self, order: dict[str, Any]) -> None:
        if self.serving is not None:
            say(f"rank_runner: {self.name} still serves and cannot begin generation {order['generation']}")
            return
        rank = self.make_rank(order)
        inherited = {name: value for name, value in os.environ.items() if name not in OF_THE_AGENT}
        of_generation = {
            "MASTER_ADDR": str(order["master_addr"]),
            "MASTER_PORT": str(order["master_port"]),
            "BSL_GENERATION": str(order["generation"]),
            "BSL_SLOT": str(self.number),
        }
        environment = {**inherited, **rank.environment(), **of_generation}
        program = self.options.program
        try:
            self.serving = Program(program, environment, rank.log, rank.rings, self.events,
                                   stop_signal=self.stop_signal, has_channel=False)  # fmt: skip
        except OSError as error:
            code = rank.end_unstarted(program[0], error)
            self.words = f"cannot start {program[0]}: {error.strerror}"
            self.say_ended(code, None, time.time())
            self.generation, self.over = None, order["generation"]
            self.say_ready()
            return
        rank.write_pid(self.serving.pid)

    def end(self, order: dict[str, Any]) -> None:
        if self.serving is not None:
            self.was_requested, self.words = True, f"ended with its generation: {order.get('why')}"
            self.deadline = self.clock.read() + float(order.get("grace_s") or 0)
            self.serving.signal(signal.SIGTERM)

    def has_finished(self, code: int) -> bool:
        return code == 0

    def follow(self, program: Program, code: int) -> None:
        if code != 0 or self.was_requested:
            self.say_ready()

    def say_ready(self) -> None:
        if self.serving is None:
            super().say_ready()


class InPlaceSlot(Slot):
    """Level 2: a process waits for a rank, serves it, leaves it when the generation ends, and waits again."""

    stopped_s = 1.0
    """Less than at level 1: here, to lose a rank that would have come back costs one step."""

    num_failed_starts = 0
    """Processes in a row that ended before they were ready."""
    num_failed_standbys = 0
    """The same of those that were to wait next to one that serves: without any, the slot serves on."""
    is_standby_notified = False
    grace_s = 0.0
    """How long the process may take to leave, from the end of its generation and from each sign of progress."""

    def open(self) -> None:
        self.serving = self.start_or_give_up()

    def start_or_give_up(self) -> Program | None:
        """Start the process that is to serve next. If that is not possible, this slot has nothing to offer."""
        try:
            return self.start()
        except OSError as error:
            self.give_up(self.why_not_started(error), 127)
            return None

    def start_standby(self) -> Program | None:
        """Start a process that waits next to the one that serves. Without it, the slot serves on."""
        try:
            return self.start()
        except OSError as error:
            self.num_failed_standbys += 1
            self.note(f"there is no standby: {self.why_not_started(error)}")
            return None

    def why_not_started(self, error: OSError) -> str:
        return f"cannot start {self.options.program[0]}: {error.strerror or error}"

    def start(self) -> Program:
        """Start a process that waits. Raises OSError if that is not possible."""
        rings = self.rings(self.name)
        inherited = {name: value for name, value in os.environ.items() if name not in (*OF_THE_AGENT, *OF_A_RANK)}
        own = {"LOCAL_RANK": str(self.local_rank), "BSL_SLOT": str(self.number)}
        variables = {**run_variables(self.attempt, self.options.topology), **rings.variables()}
        try:
            return Program(self.options.program, {**inherited, **variables, **own}, self.log(self.name), rings,
                           self.events, stop_signal=self.stop_signal, has_channel=True)  # fmt: skip
        except OSError:
            rings.remove()
            raise

    def give_up(self, words: str, code: int) -> None:
        self.words, self.is_final = words, True
        self.log(self.name).feed(f"rank_runner: {words}\n".encode())
        self.say_ended(code, None, time.time())
        self.leave(code)

    def begin(self, order: dict[str, Any]) -> None:
        program = self.serving
        if program is None or self.generation is not None:
            say(f"rank_runner: {self.name} cannot begin generation {order['generation']}")
            return
        rank, self.is_standby_notified, self.is_finished = self.make_rank(order, program.rings), False, False
        program.output.switch(rank.log)
        rank.write_pid(program.pid)
        program.tell(order)

    def end(self, order: dict[str, Any]) -> None:
        if self.serving is not None:
            self.grace_s = float(order.get("grace_s") or 0)
            self.was_requested = True
            self.overdue = f"did not leave generation {order['generation']} in {self.grace_s:g} s"
            self.deadline = self.clock.read() + self.grace_s
            self.serving.tell(order)

    def hear(self, program: Program, message: dict[str, Any]) -> None:
        word = message.get("word")
        if word == "warm":
            program.is_warm, self.num_failed_starts = True, 0
            self.num_failed_standbys = 0 if program is self.standby else self.num_failed_standbys
            self.notify_standby()
        if program is not self.serving or self.exit_code is not None:
            return
        if word == "final":
            self.is_final = True
        elif word == "finished" and self.generation is not None:
            self.is_finished = True
        if self.rank is not None and self.generation is not None:
            self.link.say("rank", **{"generation": self.generation, "rank": self.rank.number, **message,
                                     "time": time.time()})  # fmt: skip
        if word == "warm" and self.generation is None:
            self.say_ready()
        elif word == "leaving" and self.deadline < math.inf:
            self.deadline = self.clock.read() + self.grace_s
        elif word == "left":
            self.note_leaving(program)
        elif word == "stepped" and self.options.standby:
            if self.standby is None and self.num_failed_standbys < MAX_FAILED_STARTS:
                # Not before: it would compete for the processor with those that begin.
                self.standby = self.start_standby()
            self.notify_standby()

    def notify_standby(self) -> None:
        """Say once in each generation that a standby waits."""
        if self.rank is None or self.generation is None or self.is_standby_notified:
            return
        if self.standby is not None and self.standby.is_warm:
            self.is_standby_notified = True
            self.link.say("rank", generation=self.generation, rank=self.rank.number, word="standby", time=time.time())

    def note_leaving(self, program: Program) -> None:
        """The process has left its rank and waits."""
        if self.generation is not None:
            self.over, self.generation, self.deadline = self.generation, None, math.inf
            program.output.switch(self.log(self.name))
            self.say_ready()

    def may_try(self) -> bool:
        return self.num_failed_starts < MAX_FAILED_STARTS

    def has_finished(self, code: int) -> bool:
        return code == 0 and self.is_finished

    def follow(self, program: Program, code: int) -> None:
        if self.is_finished and not self.was_requested:
            return  # the training is over; `leave` comes when that is so for all
        self.num_failed_starts += not program.is_warm
        if not self.may_try():
            self.give_up(f"{MAX_FAILED_STARTS} processes in a row ended before they were ready", code or 1)
            return
        if self.standby is not None:
            self.serving, self.standby = self.standby, None
            self.log(self.name).feed(f"rank_runner: process {self.serving.pid} takes over\n".encode())
        else:
            self.serving = self.start_or_give_up()
        self.say_ready()

    def note_standby_end(self, program: Program) -> None:
        program.output.end()
        program.rings.remove()
        if not program.is_warm:
            self.num_failed_standbys += 1

    def say_ready(self) -> None:
        if self.serving is not None and self.serving.is_warm and self.generation is None:
            super().say_ready()
