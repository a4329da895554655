"""The port for the rendezvous: probed with real sockets on this machine."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.support.texts import has_parts

from .attempt_records import run_here


def find(port: int) -> tuple[int, str]:
    done = run_here("free-port", str(port))
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.fixture
def quiet_port() -> int:
    """A port of the range that is free right now."""
    return find(23456)[0]


def test_a_free_port_is_taken_as_it_is(quiet_port: int) -> None:
    assert find(quiet_port) == (quiet_port, "")


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_on_which_somebody_listens_is_left(quiet_port: int, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            taken.bind((address, quiet_port))
        except OSError as error:
            pytest.skip(f"no {address} here: {error}")
        taken.listen(1)
        port, said = find(quiet_port)
    assert port != quiet_port and 10000 <= port < 30000
    assert has_parts(said, f"port {port} ", quiet_port, "in use")


def test_a_port_that_a_connection_uses_is_left(quiet_port: int) -> None:
    """Where the ephemeral range begins lower, any connection may sit on the port."""
    source = ("127.0.0.1", quiet_port)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=source),
    ):
        assert find(quiet_port)[0] != quiet_port


def test_the_way_back_from_the_ephemeral_range() -> None:
    port, said = find(40000)
    assert 10000 <= port < 30000 and has_parts(said, f"port {port} ", 40000, "ephemeral")
