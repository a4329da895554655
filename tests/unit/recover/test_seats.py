"""The controller's connections, with real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bigsci_launch.recover import seats as module
from bigsci_launch.recover.generation import Seat
from bigsci_launch.recover.orders import JobEvent, RankEnded, RankSaid, SeatJoined, SeatLost, SeatReady
from bigsci_launch.recover.seats import Seats

HELLO = {"say": "hello", "token": "t0", "seat": 3, "local_rank": 1, "node": "n0", "host": "h0", "runner_pid": 9}


class Runner:
    """A runner that says only what the test wants it to."""

    def __init__(self, port: int) -> None:
        self.link = socket.create_connection(("127.0.0.1", port))
        self.link.settimeout(5)
        self.lines = self.link.makefile("rb")

    def say(self, **message: Any) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def hears(self) -> dict[str, Any] | None:
        """The next message that is no beat; None if the connection was closed."""
        while line := self.lines.readline():
            if (message := json.loads(line)) != {"do": "beat"}:
                return dict(message)
        return None


@pytest.fixture
def seats() -> Iterator[Seats]:
    seats = Seats("t0", is_local=True)
    yield seats
    seats.close()


@pytest.fixture
def connect(seats: Seats) -> Iterator[Callable[[], Runner]]:
    runners: list[Runner] = []

    def start() -> Runner:
        runners.append(Runner(seats.port))
        return runners[-1]

    yield start
    for runner in runners:
        runner.lines.close()
        runner.link.close()


def poll(seats: Seats, number: int = 1, timeout_s: float = 5.0) -> list[JobEvent]:
    """Return the next events, at least `number` of them, or those that came until the time was over."""
    events: list[JobEvent] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < number and time.monotonic() < deadline:
        events += seats.poll(0.02)
    return events


def test_a_runner_says_who_it_is_and_then_what_happens(seats: Seats, connect: Callable[[], Runner]) -> None:
    runner = connect()
    runner.say(**HELLO)
    runner.say(say="ready", generation=None, port=23456)
    assert poll(seats, 2) == [SeatJoined(Seat(3, "n0", "h0", 1, 9)), SeatReady(3, None, 23456)]
    runner.say(say="ended", generation=0, rank=2, code=None, signal="SIGKILL", time=5.5, was_told=False, is_final=False)
    runner.say(say="rank", generation=1, rank=2, word="restored", step=4, source="memory", time=7.5)
    assert poll(seats, 2) == [
        RankEnded(3, 0, 2, None, "SIGKILL", 5.5, False, False, None),
        RankSaid(3, 1, "restored", {"rank": 2, "step": 4, "source": "memory", "time": 7.5}),
    ]
    seats.tell(3, {"do": "kill", "generation": 1, "why": "it hangs"})
    assert runner.hears() == {"do": "kill", "generation": 1, "why": "it hangs"}


def test_a_message_may_come_in_pieces_and_several_at_once(seats: Seats, connect: Callable[[], Runner]) -> None:
    runner = connect()
    data = b"".join(json.dumps(each).encode() + b"\n" for each in (HELLO, {"say": "beat"}))
    ready = b'{"say": "ready", "generation": 1, "port": 1}\n'
    runner.link.sendall(data + ready[:10])
    assert len(poll(seats)) == 1
    runner.link.sendall(ready[10:] + ready)
    assert poll(seats, 2) == [SeatReady(3, 1, 1)] * 2


@pytest.mark.parametrize(
    "first",
    [
        {**HELLO, "token": "t1"},
        {**HELLO, "token": None},
        {"say": "ready", "generation": None, "port": 1},
        {"say": "hello"},
        {"port": 1},
    ],
)
def test_whoever_does_not_belong_to_the_job_is_sent_away(
    seats: Seats, connect: Callable[[], Runner], first: dict[str, Any]
) -> None:
    runner = connect()
    runner.say(**first)
    assert poll(seats, timeout_s=0.3) == []
    assert runner.hears() is None


def test_a_seat_is_taken_once(seats: Seats, connect: Callable[[], Runner]) -> None:
    first, second = connect(), connect()
    first.say(**HELLO)
    assert len(poll(seats)) == 1
    second.say(**HELLO)
    assert poll(seats, timeout_s=0.3) == []
    assert second.hears() is None
    seats.tell(3, {"do": "leave", "code": 0})
    assert first.hears() == {"do": "leave", "code": 0}


def test_a_closed_connection_is_a_lost_seat_after_what_it_said_last(
    seats: Seats, connect: Callable[[], Runner]
) -> None:
    runner = connect()
    runner.say(**HELLO)
    runner.say(say="ended", generation=0, rank=2, code=1)
    runner.lines.close()
    runner.link.close()
    events = poll(seats, 3)
    assert [type(event) for event in events] == [SeatJoined, RankEnded, SeatLost]
    assert events[-1] == SeatLost(3, "its connection was closed", is_silent=False)


@pytest.mark.parametrize("line", [b"no JSON\n", b"[1]\n", b'{"say": "ready"}\n', b'{"say": "sing"}\n'])
def test_a_seat_that_speaks_nonsense_is_lost(seats: Seats, connect: Callable[[], Runner], line: bytes) -> None:
    runner = connect()
    runner.say(**HELLO)
    runner.link.sendall(line)
    assert poll(seats, 2)[1:] == [SeatLost(3, "it sent what is no message", is_silent=False)]
    assert runner.hears() is None


def test_a_silent_seat_is_lost_when_its_lease_is_over_and_a_beat_renews_it(
    seats: Seats, connect: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.6)
    silent, beating = connect(), connect()
    silent.say(**HELLO)
    beating.say(**{**HELLO, "seat": 4})
    assert len(poll(seats, 2)) == 2
    events: list[JobEvent] = []
    for _ in range(8):
        beating.say(say="beat")
        events += poll(seats, timeout_s=0.15)
    assert events == [SeatLost(3, "nothing was heard from it for 0.6 s", is_silent=True)]
    assert seats.numbers == [4]


def test_what_came_while_the_controller_was_held_up_counts(
    seats: Seats, connect: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.3)
    runner = connect()
    runner.say(**HELLO)
    assert len(poll(seats)) == 1
    time.sleep(0.4)
    runner.say(say="beat")
    time.sleep(0.05)
    assert seats.poll(0.0) == []
    assert seats.numbers == [3]


def test_a_connection_that_says_nothing_at_all_is_closed(
    seats: Seats, connect: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.2)
    runner = connect()
    assert poll(seats, timeout_s=0.5) == []
    assert runner.hears() is None


def test_beats_go_out_each_second(seats: Seats, connect: Callable[[], Runner]) -> None:
    runner = connect()
    runner.say(**HELLO)
    poll(seats, 2, timeout_s=2.3)
    runner.link.setblocking(False)
    assert runner.link.recv(4096).count(b'{"do": "beat"}\n') in (2, 3)


def test_a_seat_that_does_not_read_holds_up_nobody(
    seats: Seats, connect: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 1e9)
    runner, other = connect(), connect()
    runner.say(**HELLO)
    other.say(**{**HELLO, "seat": 4})
    assert len(poll(seats, 2)) == 2
    large = {"do": "begin", "nodes": ["node"] * 10**6}
    began = time.monotonic()
    seats.tell(3, large)
    seats.tell(4, {"do": "end"})
    assert time.monotonic() - began < 10
    assert other.hears() == {"do": "end"}
    runner.link.setblocking(False)
    received = b""
    while not received.endswith(b"]}\n"):
        assert time.monotonic() < began + 20
        seats.poll(0.01)
        try:
            received += runner.link.recv(1 << 20)
        except BlockingIOError:
            continue
    assert json.loads(received.splitlines()[-1]) == large
