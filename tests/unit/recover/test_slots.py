"""The controller's connections, with real sockets."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bigsci_launch import awake_clock
from bigsci_launch.awake_clock import AwakeClock
from bigsci_launch.door import call, listen_at
from bigsci_launch.recover import slots as module
from bigsci_launch.recover.generation import Slot
from bigsci_launch.recover.orders import JobEvent, RankEnded, RankSaid, SlotJoined, SlotLost, SlotReady
from bigsci_launch.recover.slots import Slots
from tests.support.tiers import with_long

pytestmark = pytest.mark.slow

HELLO = {"slot": 3, "local_rank": 1, "node": "n0", "host": "h0", "runner_pid": 9}
TOKEN = "t0"
NOW = time.time()


class Runner:
    """A runner that says only what the test wants it to; without `hello`, somebody who only connects."""

    def __init__(self, port: int, hello: dict[str, Any] | None = None, token: str = TOKEN) -> None:
        if hello is None:
            self.link = socket.create_connection(("127.0.0.1", port), timeout=5)
        else:
            self.link = call(("127.0.0.1", port), token, json.dumps(hello).encode(), 5)
        self.link.settimeout(5)
        self.lines = self.link.makefile("rb")

    def say(self, **message: Any) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def hears(self) -> dict[str, Any] | None:
        """The next message that is no heartbeat; None if the connection was closed."""
        while line := self.lines.readline():
            if (message := json.loads(line)) != {"do": "heartbeat"}:
                return dict(message)
        return None


@pytest.fixture
def slots() -> Iterator[Slots]:
    slots = Slots(TOKEN, listen_at("127.0.0.1"), 8, AwakeClock())
    yield slots
    slots.close()


class Runners:
    """Makes runners. `Runner` waits for the controller to answer, so each is made in a thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.events: list[JobEvent] = []
        self._made: list[Runner] = []

    def __call__(self, hello: dict[str, Any] | None = None, token: str = TOKEN) -> Runner:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(Runner, self._slots.port, hello, token)
            while not made.done():
                self.events += self._slots.poll(0.01)
        self._made.append(made.result())
        return self._made[-1]

    def close(self) -> None:
        for runner in self._made:
            runner.lines.close()
            runner.link.close()


@pytest.fixture
def connect(slots: Slots) -> Iterator[Runners]:
    runners = Runners(slots)
    yield runners
    runners.close()


def poll(slots: Slots, number: int = 1, timeout_s: float = 60.0) -> list[JobEvent]:
    """Return the next events, at least `number` of them, or those that came until the time was over."""
    events: list[JobEvent] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < number and time.monotonic() < deadline:
        events += slots.poll(0.02)
    return events


def test_a_runner_says_who_it_is_and_then_what_happens(slots: Slots, connect: Runners) -> None:
    runner = connect(HELLO)
    assert connect.events == [SlotJoined(Slot(3, "n0", "h0", 1, 9))]
    runner.say(say="ready", generation=None, port=23456)
    assert poll(slots) == [SlotReady(3, None, 23456)]
    runner.say(
        say="ended", generation=0, rank=2, code=None, signal="SIGKILL", time=NOW, was_requested=False, is_final=False
    )
    runner.say(say="rank", generation=1, rank=2, word="restored", step=4, source="memory", time=7.5)
    assert poll(slots, 2) == [
        RankEnded(3, 0, 2, None, "SIGKILL", NOW, False, False, None),
        RankSaid(3, 1, "restored", {"rank": 2, "step": 4, "source": "memory", "time": 7.5}),
    ]
    slots.tell(3, {"do": "kill", "generation": 1, "why": "it hangs"})
    assert runner.hears() == {"do": "kill", "generation": 1, "why": "it hangs"}


def test_a_message_may_come_in_pieces_and_several_at_once(slots: Slots, connect: Runners) -> None:
    runner = connect(HELLO)
    ready = b'{"say": "ready", "generation": 1, "port": 1}\n'
    runner.link.sendall(b'{"say": "heartbeat"}\n' + ready[:10])
    assert poll(slots, timeout_s=0.2) == []
    runner.link.sendall(ready[10:] + ready)
    assert poll(slots, 2) == [SlotReady(3, 1, 1)] * 2


def test_whoever_does_not_have_the_token_is_sent_away_and_counted(slots: Slots, connect: Runners) -> None:
    with pytest.raises(OSError, match="closed"):
        connect(HELLO, token="t1")
    assert connect.events == [] and slots.strangers == (1, "127.0.0.1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": 8},
        {"slot": -1},
        {"slot": 1.0},
        {"slot": True},
        {"slot": "3"},
        {"slot": None},
        {"node": 5},
        {"runner_pid": 2**99},
    ],
    ids=str,
)
def test_a_runner_that_asks_for_no_slot_of_the_job_is_sent_away(
    slots: Slots, connect: Runners, wrong: dict[str, Any]
) -> None:
    runner = connect({**HELLO, **wrong})
    assert connect.events == [] and slots.numbers == []
    assert runner.hears() is None


def test_a_slot_is_taken_once(slots: Slots, connect: Runners) -> None:
    first = connect(HELLO)
    second = connect(HELLO)
    assert len(connect.events) == 1
    assert second.hears() is None
    slots.tell(3, {"do": "leave", "code": 0})
    assert first.hears() == {"do": "leave", "code": 0}


def losses(events: Sequence[JobEvent]) -> list[tuple[int, bool]]:
    """Return the slots that were lost, each with whether it was silent; anything else is an error."""
    assert all(isinstance(event, SlotLost) for event in events), events
    return [(event.slot, event.is_silent) for event in events if isinstance(event, SlotLost)]


def test_a_closed_connection_is_a_lost_slot_after_what_it_said_last(slots: Slots, connect: Runners) -> None:
    runner = connect(HELLO)
    runner.say(say="ended", generation=0, rank=2, code=1)
    runner.lines.close()
    runner.link.close()
    events = poll(slots, 2)
    assert [type(event) for event in events] == [RankEnded, SlotLost]
    assert losses(events[1:]) == [(3, False)]


@pytest.mark.parametrize(
    "line",
    [
        *(b"no JSON\n", b"[1]\n", b'{"say": "ready"}\n', b'{"say": "sing"}\n', b"[" * 200_000 + b"\n", b"\xff\n"),
        *(b'{"say": "ready", "port": 1e999}\n', b'{"say": "ready", "port": 65536}\n'),
        *(b'{"say": "unfit", "words": "\\ud800"}\n', b'{"say": "ended", "rank": [1]}\n'),
        *(b'{"say": "ended", "time": "nan"}\n', b'{"say": "ended", "time": true}\n'),
        *(b'{"say": "ended", "time": 1e300}\n', b'{"say": "ended", "time": 5.5}\n'),
    ],
)
def test_a_slot_that_speaks_nonsense_is_lost(slots: Slots, connect: Runners, line: bytes) -> None:
    runner = connect(HELLO)
    runner.link.sendall(line)
    assert losses(poll(slots)) == [(3, False)]
    assert runner.hears() is None


@pytest.mark.parametrize("name", ["", "n1\nn2", "n0\x1b[2J", "-w", "n 0", "x" * 300, 7])
@pytest.mark.parametrize("field", ["node", "host"])
def test_a_runner_whose_node_has_no_name_gets_no_slot(slots: Slots, connect: Runners, field: str, name: Any) -> None:
    assert connect({**HELLO, field: name}).hears() is None
    assert (slots.numbers, connect.events) == ([], [])


def test_the_words_of_a_runner_are_one_line(slots: Slots, connect: Runners) -> None:
    connect(HELLO).say(say="ended", generation=0, rank=2, code=1, time=NOW, words="x\nexit_reason: \x1b[2J\u2028y")
    [ended] = poll(slots)
    assert isinstance(ended, RankEnded) and ended.words == r"x\nexit_reason: \x1b[2J\u2028y"


def test_a_silent_slot_is_lost_when_its_lease_is_over_and_a_heartbeat_renews_it(
    slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.6)
    _, beating = connect(HELLO), connect({**HELLO, "slot": 4})
    events: list[JobEvent] = []
    for _ in range(8):
        beating.say(say="heartbeat")
        events += poll(slots, timeout_s=0.15)
    assert losses(events) == [(3, True)]
    assert slots.numbers == [4]


def test_what_came_while_the_controller_was_held_up_counts(
    slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.3)
    runner, _ = connect(HELLO), connect({**HELLO, "slot": 4})
    time.sleep(0.4)
    runner.say(say="heartbeat")
    time.sleep(0.05)
    assert losses(slots.poll(0.0)) == [(4, True)]
    assert slots.numbers == [3]


class Moment:
    """Runners that heartbeat twice a second, and a time that only the test moves."""

    def __init__(self, slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.runners = {number: connect({**HELLO, "slot": number}) for number in range(4)}
        self._slots = slots

    def let_pass(self, seconds: float, *silent: int) -> list[JobEvent]:
        """Let time pass while some runners are silent; return what happens."""
        events: list[JobEvent] = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for number in self._slots.numbers:
                if number not in silent:
                    self.runners[number].say(say="heartbeat")
            events += self._slots.poll(0.0)
        return events


@pytest.mark.parametrize("seed", with_long(range(100), range(8, 100)))
def test_a_pause_of_the_controller_or_of_all_slots_loses_none(
    seed: int, slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, moment = random.Random(seed), Moment(slots, connect, monkeypatch)
    for _ in range(8):
        pause_s, slot = chance.uniform(1, 120), chance.randrange(4)
        match chance.choice(("controller", "slots", "both", "one")):
            case "controller":
                moment.now += pause_s
            case "slots":
                assert moment.let_pass(pause_s, *range(4)) == []
            case "both":
                assert moment.let_pass(chance.uniform(0, 14), *range(4)) == []
                moment.now += pause_s
            case "one":
                assert moment.let_pass(chance.uniform(1, 9), slot) == []
        assert moment.let_pass(chance.uniform(1, 20)) == []
    silence_s = chance.uniform(18, 40)
    moment.now += chance.uniform(0, 100)
    assert losses(moment.let_pass(silence_s, 2)) == [(2, True)]


def test_slots_that_are_all_silent_for_very_long_do_not_come_back(
    slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Moment(slots, connect, monkeypatch).let_pass(module.ALL_SILENT_S + 1, *range(4))
    assert losses(lost) == [(slot, False) for slot in range(4)]


def test_heartbeats_go_out_each_second(slots: Slots, connect: Runners) -> None:
    runner = connect(HELLO)
    poll(slots, 2, timeout_s=2.3)
    runner.link.setblocking(False)
    assert runner.link.recv(4096).count(b'{"do": "heartbeat"}\n') in (2, 3)


def test_a_slot_that_does_not_read_holds_up_nobody(
    slots: Slots, connect: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 1e9)
    runner, other = connect(HELLO), connect({**HELLO, "slot": 4})
    large = {"do": "begin", "nodes": ["node"] * 10**6}
    began = time.monotonic()
    slots.tell(3, large)
    slots.tell(4, {"do": "end"})
    assert time.monotonic() - began < 60
    assert other.hears() == {"do": "end"}
    runner.link.setblocking(False)
    received = b""
    while not received.endswith(b"]}\n"):
        assert time.monotonic() < began + 20
        slots.poll(0.01)
        try:
            received += runner.link.recv(1 << 20)
        except BlockingIOError:
            continue
    assert json.loads(received.splitlines()[-1]) == large
