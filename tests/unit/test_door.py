"""The door of everything that listens: who is let in, and what strangers can do to it. Real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bigsci_launch import door as module
from bigsci_launch.door import GREETING, Door, Guest, call, is_everywhere, listen_at, prove, read_line
from tests.support.waiting import wait_until

TOKEN = "a secret"
STRANGE = {
    "nothing": b"",
    "random": os.urandom(5000),
    "a line": b"x\n",
    "three words": b"a b c\n",
    "deep JSON": b"[" * 200_000 + b"\n",
    "an odd number": b'{"say":"hello","token":"x","slot":1e999}\n',
    "a huge number": b'{"slot":' + b"9" * 5000 + b"}\n",
    "a lone surrogate": b'{"slot":"\\ud800"}\n',
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "no end": b"x" * 100_000,
    "bytes that are no ASCII": b"\xff" * 64 + b" \xff \xff\n",
}


class Listening:
    """A door, polled by a thread as its owner does, and whoever was let in."""

    def __init__(self) -> None:
        self.door = Door(listen_at("127.0.0.1"), TOKEN)
        self.address = ("127.0.0.1", self.door.port)
        self.guests: list[Guest] = []
        self.error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._is_over:
                self.guests += self.door.poll(0.02)
        except BaseException as error:
            self.error = error

    def call(self, words: bytes = b"me", timeout_s: float = 5.0) -> socket.socket:
        before = len(self.guests)
        link = call(self.address, TOKEN, words, timeout_s)
        wait_until(lambda: len(self.guests) > before)
        return link

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self.door.close()
        for guest in self.guests:
            guest.link.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.close()
    assert made.error is None


def test_a_caller_with_the_token_is_let_in_with_its_words(listening: Listening) -> None:
    with listening.call(b"slot 3 of n0"):
        assert [guest.words for guest in listening.guests] == [b"slot 3 of n0"]
    assert listening.door.strangers == 0


def test_the_token_is_never_said_and_an_answer_is_good_once(listening: Listening) -> None:
    with socket.create_connection(listening.address, timeout=5) as link:
        challenge = read_line(link, time.monotonic() + 5)[len(GREETING) :]
        line = b"%s 00 me\n" % prove(TOKEN, b"caller", challenge, b"00", b"me")
        link.sendall(line)
        read_line(link, time.monotonic() + 5)
        assert TOKEN.encode() not in line
    with socket.create_connection(listening.address, timeout=5) as link:
        read_line(link, time.monotonic() + 5)
        link.sendall(line)
        assert link.recv(1) == b""
    assert len(listening.guests) == 1


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_whatever_a_stranger_says_it_is_sent_away_and_nobody_else_notices(listening: Listening, data: bytes) -> None:
    with socket.create_connection(listening.address, timeout=5) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while link.recv(4096):
                continue
        except OSError:
            pass  # it was sent away before it had said everything
    with listening.call():
        assert len(listening.guests) == 1
    assert (listening.door.strangers, listening.door.newest_stranger) == (1, "127.0.0.1")


def test_a_caller_that_says_nothing_or_a_letter_now_and_then_has_to_leave(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_S", 0.3)
    with socket.create_connection(listening.address, timeout=5) as silent:
        with socket.create_connection(listening.address, timeout=5) as slow, pytest.raises(OSError):
            began = time.monotonic()
            while time.monotonic() < began + 5:
                slow.send(b"x")
                time.sleep(0.05)
        assert time.monotonic() < began + 3
        assert silent.recv(4096).startswith(GREETING) and silent.recv(4096) == b""


def test_a_crowd_leaves_room_for_those_who_belong_here(listening: Listening) -> None:
    number = module.MOST_CALLERS + 100
    crowd = [socket.create_connection(listening.address, timeout=5) for _ in range(number)]
    with listening.call():
        assert len(listening.guests) == 1
    assert listening.door.strangers >= 100
    for each in crowd:
        each.close()
    wait_until(lambda: listening.door.strangers == number)


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 40, before[1]))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(taken[0]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for each in taken:
        os.close(each)


@pytest.mark.parametrize("is_empty", [False, True])
def test_callers_make_room_when_no_descriptor_is_left(
    listening: Listening, request: pytest.FixtureRequest, is_empty: bool
) -> None:
    """The oldest caller at the door has to leave; if there is none, the spare descriptor serves to send one away."""
    with socket.socket() as first, socket.socket() as second:
        if not is_empty:
            first.connect(listening.address)
            assert first.recv(4096).startswith(GREETING)
        request.getfixturevalue("no_descriptor_left")
        second.connect(listening.address)
        wait_until(lambda: listening.door.strangers == 1)
        assert (second if is_empty else first).recv(4096) == b""
        began = os.times()
        time.sleep(0.3)
        assert os.times().user + os.times().system - began.user - began.system < 0.15, "it spins"


def test_a_caller_does_not_take_another_listener_for_its_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(GREETING + b"00\n")
                link.recv(4096)
                link.sendall(b"0" * 64 + b"\n")

        threading.Thread(target=answer).start()
        with pytest.raises(ConnectionRefusedError, match="token"):
            call(listener.getsockname(), TOKEN, b"me", 5)


@pytest.mark.parametrize(("host", "only_here", "everywhere"), [
    ("127.0.0.1", False, False),
    ("localhost", True, False),
    ("localhost", False, True),
    ("no.such.host.invalid", False, True),
    ("192.0.2.1", False, True),
])  # fmt: skip
def test_it_listens_where_others_look_for_it(host: str, only_here: bool, everywhere: bool) -> None:
    """A loopback address behind a name, or an address of another machine, is not where others look."""
    listeners = listen_at(host, only_here=only_here)
    try:
        assert is_everywhere(listeners) is everywhere
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
    finally:
        for listener in listeners:
            listener.close()
