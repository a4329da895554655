"""The controller of a job with `survive`: a program next to the ranks that says which of them take part.

It starts the runners, which connect to it and start, end and kill the ranks as it says. Locally, it starts the command
once for each slot; with `--step`, the command is one that starts all runners, as srun does.

    python run_module.py bigsci_launch.recover.controller --attempt-dir DIR --level restart --slots 8 --exit-reason FILE
        -- PYTHON rank_runner.py OPTIONS -- PROGRAM

Signals: USR2 asks local ranks to save and stop. TERM, INT or HUP ends the job, with KILL after a grace period, and
nothing is recovered any more; a second one kills everything at once. The exit code is 0 if every rank of the last
generation has ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from bigsci_launch.awake_clock import AwakeClock
from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.survive import SurviveSection
from bigsci_launch.door import is_everywhere, listen_at
from bigsci_launch.errors import SlurmError
from bigsci_launch.recover.generation import Instant
from bigsci_launch.recover.members import BatchSizes, Rules, WantedLayout
from bigsci_launch.recover.orders import (
    DropSlot,
    FinishJob,
    JobEvent,
    RunnersEnded,
    SendToSlot,
    SlotNeverCame,
    SlotOrder,
    StartRunner,
    Terminated,
)
from bigsci_launch.recover.records import Records
from bigsci_launch.recover.slots import Slots
from bigsci_launch.recover.state_machine import TERMINATION_GRACE_S, JobStateMachine
from bigsci_launch.runs.control.request import OF_CONTROLLER, Request, follow_requests
from bigsci_launch.runs.layout import AttemptDir
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.lease import kept_lease
from bigsci_launch.scheduler.local import Children, say, split_command, write_exit
from bigsci_launch.scheduler.slurm import query_addresses

POLL_S = 0.1
REQUESTS_S = 0.5
"""How often requests of watchers are looked for."""
NOTE_S = 10.0
"""How often strangers are recorded, at most: there may be thousands a second."""
LEAVE_S = 20.0
"""How long runners may take to leave after they were asked to. They kill their ranks themselves before."""


class Controller:
    """Carries out what the course of the job orders: the only part that knows sockets, processes and signals."""

    def __init__(self, options: argparse.Namespace, rules: Rules) -> None:
        self._options = options
        self._clock = AwakeClock()
        self._machine = JobStateMachine(rules, self._now())
        self._inbox: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        self._token = secrets.token_hex(16)
        self._host = os.environ["MASTER_ADDR"] if options.step else "127.0.0.1"
        self._listeners = listen_at(self._host, only_here=os.environ.get("SLURM_JOB_NUM_NODES") == "1")
        self._slots = Slots(self._token, self._listeners, options.slots, self._clock)
        address = f"{self._host}:{self._slots.port}"
        self._environment = {**os.environ, "BSL_CONTROLLER": address, "BSL_CONTROLLER_TOKEN": self._token}
        self._noted, self._note_after = 0, 0.0
        self._children = Children()
        self._again: dict[int, int] = {}
        """Slots whose runner is to be started again, and the PID of the one that it follows."""
        self._bell = self._hang_bell()
        attempt = AttemptDir(options.attempt_dir)
        self._records = Records(attempt, self.tell, remembers_nodes=options.step)
        self._closed = threading.Event()
        self._requests: set[str] = set()
        """Keys of what watchers have asked, each of which is an event once."""
        follow = (attempt, OF_CONTROLLER, REQUESTS_S, self._closed, self._take_requests)
        threading.Thread(target=follow_requests, args=follow, name="bsl-requests", daemon=True).start()
        self._deadline: float | None = None
        self.terminated: float | None = None
        self.stop_requested = False

    @property
    def world_size(self) -> int:
        """The number of ranks of the newest generation; that of the full layout before there is one."""
        generation = self._machine.generation
        return len(generation.slots) if generation else self._options.world_size

    def tell(self, event: JobEvent) -> None:
        """Pass an event to the main loop, from any thread or signal handler."""
        self._inbox.put(event)
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell, b"!")

    def _take_requests(self, found: Iterable[Request]) -> None:
        for request in found:
            if request.key not in self._requests:
                self._requests.add(request.key)
                self.tell(request)

    def run(self) -> int:
        """Start the runners, and return the exit code of the job when all of them have ended."""
        self._start_runners()
        while self._children.numbers:
            for event in self._slots.poll(POLL_S):
                self._take(event)
            while not self._inbox.empty():
                self._take(self._inbox.get())
            self._reap()
            self._note_strangers()
            self._carry_out(self._machine.wake(self._now()))
            if self._deadline is not None and self._clock.read() >= self._deadline:
                self._children.kill()
        self._note_after = 0.0
        self._note_strangers()
        self._closed.set()
        self._records.close()
        self._slots.close()
        return 1 if self._machine.exit_code is None else self._machine.exit_code

    def _hang_bell(self) -> int:
        """Return a descriptor that wakes the main loop when it is written to, as signals do."""
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        self._slots.wake_on(reader)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        return writer

    def _start_runners(self) -> None:
        address = self._environment["BSL_CONTROLLER"]
        say(f"controller of {self._options.slots} slots at {address}")
        if is_everywhere(self._listeners):
            say(f"it listens on all addresses: {self._host} has none on this node that other nodes can use")
        if self._options.step:
            if (error := self._try_start(0, self._options.command)) is not None:
                say(f"{self._options.command[0]} cannot be started: {error}")
                self._take(RunnersEnded(127))
            return
        for slot in range(self._options.slots):
            self._start_runner(slot)
        if self.terminated is not None:
            self._children.signal(signal.SIGTERM)  # the request may have come while a runner was being started

    def _start_runner(self, slot: int, *more: str) -> None:
        """Start the runner of a slot on this machine, unless the job is being ended. One that cannot be started, such
        as for lack of files or memory, never came: the state machine decides whether to try again."""
        before, after = split_command(self._options.command)
        if self.terminated is not None:
            return
        if (error := self._try_start(slot, [*before, "--slot", str(slot), *more, *after])) is not None:
            say(f"the runner of slot {slot} cannot be started: {error}")
            self._take(SlotNeverCame(slot, 127))

    def _try_start(self, number: int, argv: Sequence[str]) -> OSError | None:
        try:
            self._children.start(number, argv, self._environment)
        except OSError as error:
            return error
        return None

    def _start_again(self) -> None:
        """Start the runners that follow others in their slots, once these have ended."""
        for slot in self._again.keys() - set(self._children.numbers):
            self._start_runner(slot, "--again", str(self._again.pop(slot)))

    def _reap(self) -> None:
        ended = self._children.reap()
        for number, code in ended:
            if not self._options.step:
                self._take(SlotNeverCame(number, code))
        if ended and not self._children.numbers:
            for event in self._slots.poll(0.0):
                self._take(event)
        self._start_again()
        if ended and not self._children.numbers:
            self._take(RunnersEnded(ended[-1][1]))

    def _note_strangers(self) -> None:
        count, host = self._slots.strangers
        if count > self._noted and self._clock.read() >= self._note_after:
            self._noted, self._note_after = count, self._clock.read() + NOTE_S
            self._records.note_strangers(count, host, time.time())

    def _take(self, event: JobEvent) -> None:
        self._carry_out(self._machine.take(event, self._now()))

    def _carry_out(self, orders: Sequence[SlotOrder]) -> None:
        moment = self._now()
        for order in orders:
            match order:
                case SendToSlot():
                    self._slots.tell(order.slot, order.message)
                case StartRunner():
                    self._again[order.slot] = order.runner_pid
                    self._children.end(order.slot)
                case DropSlot():
                    self._slots.drop(order.slot)
                case FinishJob():
                    grace_s = TERMINATION_GRACE_S + LEAVE_S * self._options.step if self.terminated else LEAVE_S
                    self._deadline = self._clock.read() + grace_s
                case _:
                    self._records.carry_out(order, moment)

    def _now(self) -> Instant:
        return Instant(self._clock.read(), time.time())

    def on_termination(self, _number: int, _frame: FrameType | None) -> None:
        if self.terminated is not None:
            self._children.kill()
            return
        self.terminated = time.time()
        if not self._options.step:
            self._children.signal(signal.SIGTERM)
        self.tell(Terminated(signal.SIGTERM))

    def on_stop_request(self, _number: int, _frame: FrameType | None) -> None:
        """Runners remember it for later generations. Slurm's job script tells those of a step itself."""
        self.stop_requested = True
        if not self._options.step:
            self._children.signal(signal.SIGUSR2)


def require_door(command: Sequence[str]) -> None:
    """End if the runners were frozen by a version in which they do not prove who they are: none of them would get in.

    The programs of an attempt are those of its submission. This one is that of today.
    """
    for word in command:
        runner = Path(word)
        if runner.name == "rank_runner.py" and runner.exists() and not runner.with_name("door.py").exists():
            sys.exit(
                f"controller: {runner} is from an earlier version of bsl, which has no door.py: submit the run again"
            )


def rules_of(config: RunConfig, options: argparse.Namespace) -> Rules:
    """Return what the run file says about the job."""
    survive = config.survive or SurviveSection()
    topology = config.parallelism.topology(options.slots)
    # Uneven pipelines divide every batch among any number of ranks.
    is_even = config.run.starts_trainer and config.parallelism.engine == "deepspeed"
    batches = batches_of(config) if is_even else None
    return Rules(
        options.level,
        WantedLayout(topology, survive.shrink, batches),
        options.slots,
        wait_s=float(config.slurm.wait_s),
        address_suffix=options.address_suffix if options.step else None,
        addresses=addresses_of_nodes(options.address_suffix) if options.step else {},
    )


def addresses_of_nodes(suffix: str) -> dict[str, str]:
    """Return Slurm's address of each node of the job if the job script had to ask for it; empty if names are enough."""
    nodes = expand_hostlist(os.environ.get("SLURM_JOB_NODELIST", ""))
    if not nodes or os.environ.get("MASTER_ADDR") == nodes[0] + suffix:
        return {}
    try:
        return query_addresses(nodes)
    except SlurmError as error:
        say(f"cannot determine the addresses of the nodes: {error.message}")
        return {}


def batches_of(config: RunConfig) -> BatchSizes:
    """Return every global batch size that occurs, which a smaller layout must keep."""
    training, ramp = config.training, config.training.rampup
    grown = () if ramp is None else range(ramp.start, training.global_batch_size, ramp.increment)
    micro_batch = 1 if training.micro_batch_size == "auto" else training.micro_batch_size
    return BatchSizes(micro_batch, (*grown, training.global_batch_size))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    require_door(options.command)
    started = time.time()
    rules = rules_of(load_resolved(AttemptDir(options.attempt_dir).config), options)
    options.world_size = rules.wanted.topology.world_size
    controller = Controller(options, rules)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, controller.on_termination)
    signal.signal(signal.SIGUSR2, controller.on_stop_request)
    say(f"start attempt={options.attempt_dir.name} ranks={options.world_size} survive={options.level}")
    with contextlib.nullcontext() if options.step else kept_lease(AttemptDir(options.attempt_dir).lease):
        code = controller.run()
    if options.exit_reason is not None:
        code = write_exit(
            options.exit_reason,
            options.attempt_dir,
            controller.world_size,
            started,
            code,
            terminated=controller.terminated,
            stop_requested=controller.stop_requested,
        )
        say(f"end attempt={options.attempt_dir.name} exit_code={code}")
    return code


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Control the generations of a job, and start its runners.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--level", choices=("restart", "in_place"), required=True)
    parser.add_argument("--slots", type=int, required=True, help="number of runners, spares included")
    parser.add_argument("--step", action="store_true", help="the command starts all runners, on several nodes")
    parser.add_argument("--address-suffix", default="", help="appended to a node's name for the address of rank 0")
    parser.add_argument(
        "--exit-reason", type=Path, help="the helper that writes exit.json; default: none, the job script does it"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--")
    options = parser.parse_args(words[:at])
    options.command = words[at + 1 :]
    return options


if __name__ == "__main__":
    sys.exit(main())
