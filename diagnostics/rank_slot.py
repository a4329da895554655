"""The agent of a slot: a rank runner that serves one rank after another, on orders of the controller of `survive`.

    rank_runner.py --survive restart|in_place [--standby] [--slot N] ... -- PROGRAM

`restart`: the program is started for each generation and ended with it. `in_place`: the program is started once and
waits; it learns through a socket (BSL_SLOT_FD, JSON lines) which rank it is, and leaves it again when the generation
ends. With `--standby` a second process waits next to the one that serves, to take the slot when that dies.

Whichever way, the records are those of rank_runner.py: `pids/` names the process that serves a rank now, `logs/` has
what was printed for it (`logs/slot-NNNN.log`: by processes that have no rank), `exits/` how the last one has ended.
A process that SIGSTOP has stopped for a while is killed. Without the controller, everything ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import threading
import time

import safe_files
from awake_clock import AwakeClock
from rank_again import place_of_task, start_runner
from rank_check import NodeCheck, NodeVerdict
from rank_link import Link, OfferedPort
from rank_log import StampedLog, say
from rank_process import TERMINATION_LAG_S, Rank, all_axes, node_name, signal_name
from rank_program import Program, kill_all_below
from rank_rings import Rings

TYPE_CHECKING = False  # typing costs start-up time, and annotations are never evaluated
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from types import FrameType
    from typing import Any

TICK_S = 0.5
LEAVE_GRACE_S = 10.0
"""Time from TERM to KILL for what still runs when the job is over, or when the controller is lost."""
HOLD_S = 2.0
"""When Slurm ends a job, the ranks may be signalled before the controller is. Later reports are no failure to it."""


class Slot:
    """What both levels share: the place of the slot, the process that serves, its end, and the end of everything."""

    stopped_s = 10.0
    """For how long a process may be stopped by SIGSTOP before it is taken for one that does not come back."""
    link: Link
    is_finished = False
    """Whether the process has reported that the training is over for its rank, as those at level 2 do: without that, 0
    is no good end there, and after that, no end is a bad one, unless the process was asked to stop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.attempt: Path = options.attempt_dir.absolute()
        self.is_local = options.slot is not None
        self.number: int = options.slot if self.is_local else int(os.environ["SLURM_PROCID"])
        self.local_rank = self.number if self.is_local else int(os.environ["SLURM_LOCALID"])
        self.name = f"slot-{self.number:04d}"
        self.stop_signal = signal.Signals["SIG" + options.stop_signal]
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.logs: dict[str, StampedLog] = {}
        self.port = OfferedPort()
        only_own_gpu = options.survive == "in_place"
        self.check = NodeCheck(self.local_rank, only_own_gpu=only_own_gpu, is_local=self.is_local, events=self.events)
        self.serving: Program | None = None
        self.standby: Program | None = None
        self.rank: Rank | None = None
        """The rank that is served now, or was served last."""
        self.generation: int | None = None
        """The generation in which the process serves; None while it waits, or while there is none."""
        self.over: int | None = None
        """The newest generation that is known to be over, for this slot at least."""
        self.was_requested, self.is_final, self.words = False, False, ""
        self.overdue = ""
        """The reason that is reported instead if the deadline passes."""
        self.was_killed = False
        """Whether this runner has sent KILL to the process."""
        self.clock = AwakeClock()
        self.deadline = math.inf
        self.is_stop_wanted = self.is_orphan = False
        self.asked: tuple[Program | None, int | None] | None = None
        """Which process was asked to save and stop, and in which generation."""
        self.terminated: float | None = None
        self.exit_code: int | None = None
        """What the runner exits with once no process is left; None while the job continues."""
        self.copies: list[threading.Thread] = []
        self.others: list[subprocess.Popen[bytes]] = []
        """Runners of other slots that this one has started, in place of those that died."""

    def hello(self) -> dict[str, Any]:
        """Return what the controller needs to know of this slot."""
        return {
            "slot": self.number,
            "local_rank": self.local_rank,
            "node": node_name(is_local=self.is_local),
            "host": socket.gethostname(),
            "runner_pid": os.getpid(),
            "place": {} if self.is_local else place_of_task(),
        }

    # ---------------------------------------------------------------- the loop

    def run(self, link: Link) -> int:
        self.link = link
        self.open()
        while self.exit_code is None or self.programs():
            with contextlib.suppress(queue.Empty):
                self.handle(self.events.get(timeout=TICK_S))
            self.look()
        for copy in self.copies:
            copy.join()
        link.close()
        for runner in self.others:
            runner.wait()  # Slurm takes a step for over when its tasks have ended
        if self.is_orphan and not self.is_local and self.local_rank == 0:
            from rank_orphan import end_orphaned_job

            end_orphaned_job(self.note, lambda: self.terminated is not None)
        return self.exit_code

    def handle(self, event: Any) -> None:
        if event is None:
            self.lose_controller()
        elif isinstance(event, dict):
            self.obey(event)
        elif isinstance(event, NodeVerdict):
            self.note_verdict(event)
        else:
            program: Program = event[0]
            message: dict[str, Any] | None = event[1]
            if message is not None:
                self.hear(program, message)
            elif program is self.serving:
                self.note_end(program)
            elif program is self.standby:
                self.standby = None
                self.note_standby_end(program)

    def obey(self, order: dict[str, Any]) -> None:
        what, generation = order.get("do"), order.get("generation")
        if what == "leave":
            self.leave(int(order.get("code") or 0), float(order.get("grace_s") or LEAVE_GRACE_S))
        elif self.exit_code is not None:
            return
        elif what == "begin":
            self.begin(order)
        elif what == "start_runner":
            self.start_other(order)
        elif what == "end":
            if self.generation == generation:
                self.end(order)
            else:
                self.over = order["generation"] if self.over is None else max(self.over, order["generation"])
                self.say_ready()
        elif what == "kill" and self.generation == generation:
            self.kill(f"killed by the controller: {order.get('why')}", was_requested=True)

    def look(self) -> None:
        """What time brings: a grace period that is over, and a process that stands still."""
        program = self.serving
        for runner in self.others:
            runner.poll()
        if self.clock.read() >= self.deadline:
            self.kill(self.overdue or self.words, was_requested=True)
            self.deadline = math.inf
        if self.is_stop_wanted:
            self.pass_stop()
        if program is not None and program.has_stood_still(self.stopped_s):
            self.kill(f"stopped by SIGSTOP for {self.stopped_s:g} s", was_requested=False)
        if self.terminated is not None and self.exit_code is None and (program is None or self.generation is None):
            self.hold()
            self.leave(128 + signal.SIGTERM)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on, as rank_runner.py does. Slurm itself sends TERM to every process."""
        if number == signal.SIGTERM:
            if self.terminated is None:
                self.note_termination()
            if self.is_local:
                for program in self.programs():
                    program.signal(signal.SIGTERM)
        elif number == signal.SIGURG or self.is_local:
            self.is_stop_wanted = True
            self.pass_stop(now=True)

    def pass_stop(self, *, now: bool = False) -> None:
        """Ask the process to save and stop, in each generation: `now`, as it has just been requested, or once it
        can take that as such."""
        program, here = self.serving, (self.serving, self.generation)
        if program is not None and self.generation is not None and (now or self.asked != here):
            is_heard = program.catches(self.stop_signal)
            if now or is_heard:
                program.signal(self.stop_signal)
            self.asked = here if is_heard else None

    def hold(self) -> None:
        """Wait before the controller hears that another process has asked this slot to end."""
        if not self.is_local:
            time.sleep(max(0.0, (self.terminated or time.time()) + HOLD_S - time.time()))

    def note_termination(self) -> None:
        self.terminated = time.time()
        if self.rank is not None and self.generation is not None:
            self.rank.note_termination()

    # ---------------------------------------------------------------- what the controller wants

    def open(self) -> None:
        raise NotImplementedError

    def begin(self, order: dict[str, Any]) -> None:
        raise NotImplementedError

    def end(self, order: dict[str, Any]) -> None:
        raise NotImplementedError

    def hear(self, program: Program, message: dict[str, Any]) -> None:
        """Only processes at level 2 send messages."""

    def follow(self, program: Program, code: int) -> None:
        """Have the slot ready again, or not, after its process has ended."""
        raise NotImplementedError

    def has_finished(self, code: int) -> bool:
        """Whether a process that has ended with `code` was done, rather than one that must be replaced."""
        raise NotImplementedError

    def note_standby_end(self, program: Program) -> None:
        """Only slots at level 2 have a standby."""

    def start_other(self, order: dict[str, Any]) -> None:
        """Start the runner of another slot of this node, which has died."""
        try:
            self.others.append(start_runner(order))
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            self.note(f"the runner of slot {order.get('slot')} cannot be started: {error}")

    def leave(self, code: int, grace_s: float = LEAVE_GRACE_S) -> None:
        """End everything; the runner exits with `code`. Programs that got TERM already do not get it twice."""
        if self.exit_code is None:
            self.exit_code = code
            self.was_requested, self.words, self.overdue = True, self.words or "the job is over", ""
            self.deadline = self.clock.read() + grace_s
            for program in self.programs():
                if self.terminated is None:
                    program.signal(signal.SIGTERM)
                program.close()

    def lose_controller(self) -> None:
        if self.exit_code is None:
            self.note("the controller is lost: ending the processes of this slot")
            self.is_orphan, self.words = True, "the controller was lost"
            self.leave(1)

    def note(self, text: str) -> None:
        """Write a message to the log of the rank, and to the output of the job."""
        log = self.rank.log if self.rank is not None else self.log(self.name)
        log.feed(f"rank_runner: {text}\n".encode())
        say(f"rank_runner: {self.name}: {text}")

    def kill(self, words: str, *, was_requested: bool) -> None:
        """KILL the process that serves and all that it has started."""
        program = self.serving
        if program is not None and program.status is None:
            self.was_requested, self.words, self.was_killed = was_requested, words, True
            program.signal(signal.SIGKILL)
        if self.exit_code is not None and self.standby is not None:
            self.standby.signal(signal.SIGKILL)
        self.kill_rest()

    def kill_rest(self) -> None:
        """KILL all that processes of this slot have left behind."""
        keep = [self.standby.pid] if self.standby is not None and self.exit_code is None else []
        others = [runner.pid for runner in self.others]
        kill_all_below([*keep, *others], [program.pid for program in self.programs()])

    # ---------------------------------------------------------------- the process that serves

    def programs(self) -> list[Program]:
        return [program for program in (self.serving, self.standby) if program is not None]

    def log(self, name: str) -> StampedLog:
        if name not in self.logs:
            limit: int = self.options.log_limit_mib << 20
            self.logs[name] = StampedLog(self.attempt / "logs" / f"{name}.log", limit)
        return self.logs[name]

    def rings(self, name: str) -> Rings:
        rings = Rings(self.options.ring, self.attempt, name)
        if self.options.ring != "none" and rings.why:
            self.log(name).feed(f"rank_runner: the last calls are not kept: {rings.why}\n".encode())
        return rings

    def make_rank(self, order: dict[str, Any], rings: Rings | None = None) -> Rank:
        """Return the rank that this slot serves from now on. How another process of that rank ended is over."""
        place = {"rank": order["rank"], "local_rank": self.local_rank, "node_rank": order["node_rank"],
                 "world_size": order["world_size"], "local_world_size": order["local_world_size"]}  # fmt: skip
        name = f"rank-{order['rank']:04d}"
        topology = all_axes(order["topology"])
        if self.rank is not None and self.rank.name != name:
            self.forget_pid(self.rank.name)
        with contextlib.suppress(OSError):
            (self.attempt / "exits" / f"{name}.json").unlink()
        rings = self.rings(name) if rings is None else rings
        rings.name = name
        self.rank = Rank(self.options, place, topology, rings, self.log(name), order["generation"])
        self.generation = order["generation"]
        self.was_requested, self.is_final, self.words = False, False, ""
        self.overdue, self.was_killed = "", False
        return self.rank

    def forget_pid(self, name: str) -> None:
        """Remove the PID record of a rank that this slot serves no longer, unless another slot has written its own."""
        path = self.attempt / "pids" / f"{name}.json"
        with contextlib.suppress(OSError, ValueError):
            record = safe_files.read_json(path)
            if (record["runner_pid"], record["host"]) == (os.getpid(), socket.gethostname()):
                path.unlink()

    def note_end(self, program: Program) -> None:
        """The process that serves has ended: record it, report it, and make the slot ready again."""
        status = program.status or 0
        if status == -signal.SIGKILL and not self.was_killed:
            self.was_requested, self.words = False, ""  # its order was not carried out
        if status not in (0, -signal.SIGKILL) and not self.was_requested and self.terminated is None:
            time.sleep(TERMINATION_LAG_S)
        if self.was_requested or not self.has_finished(status):
            self.kill_rest()
        self.serving, self.deadline = None, math.inf
        program.output.end()
        program.close()
        rank, generation = self.rank, self.generation
        code = 128 - status if status < 0 else status
        if rank is not None and generation is not None:
            code = self.end_rank(rank, status)
            if self.terminated is not None or (code == 128 + signal.SIGTERM and not self.was_requested):
                self.hold()
            by_signal = status < 0 and code != 0
            self.say_ended(None if by_signal else code, signal_name(-status) if by_signal else None, program.ended_at)
        self.keep_rings(program, status)
        self.generation, self.over = None, generation if generation is not None else self.over
        if self.terminated is not None:
            self.leave(code)
        elif self.exit_code is None:
            if self.options.check and code != 0 and not self.was_requested:
                self.check.begin()
            self.follow(program, code)

    def end_rank(self, rank: Rank, status: int) -> int:
        """Write the exit record of the rank, and return its exit code. Say it if that is not how its process ended."""
        code = rank.end(status, is_finished=self.is_finished and not self.was_requested)
        if code == 0 != status and self.is_finished:
            how = signal_name(-status) if status < 0 else f"exit code {status}"
            self.note(f"{rank.name} had finished before its process ended with {how}: not a failure")
        return code

    def note_verdict(self, verdict: NodeVerdict) -> None:
        self.check.end(verdict.fault)
        if verdict.fault is not None:
            self.link.say("unfit", words=verdict.fault)
        self.say_ready()

    def say_ended(self, code: int | None, ended_by: str | None, moment: float) -> None:
        self.link.say(
            "ended",
            generation=self.generation,
            rank=self.rank.number if self.rank is not None else None,
            code=code,
            signal=ended_by,
            time=moment,
            was_requested=self.was_requested or self.terminated is not None,
            is_final=self.is_final,
            words=self.words or None,
        )

    def keep_rings(self, program: Program, status: int) -> None:
        """Copy the last calls, in a thread: the next generation does not wait for it."""
        rank = self.rank
        if rank is not None and rank.pid == program.pid:
            self.copies.append(threading.Thread(target=rank.end_rings, args=(status,)))
            self.copies[-1].start()
        else:
            program.rings.remove()

    def say_ready(self) -> None:
        if not self.check.is_running and not self.check.is_unfit:
            self.link.say("ready", generation=self.over, port=self.port.find())
