"""A network of its own for each rank, with a cable between each two: a link can be slow by itself. Needs root.

In the network of rank 1, the device `to3` leads to rank 3, and `own` has the address of the rank.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

Environment = dict[str, str]


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextmanager
def networks(count: int) -> Iterator[list[list[str]]]:
    """Yield, for each rank, the words that start a command in its network."""
    names = [f"bsl-slow-{os.getpid()}-{rank}" for rank in range(count)]
    try:
        for rank, name in enumerate(names):
            _run("ip", "netns", "add", name)
            _in(name, "ip link set lo up")
            _in(name, "ip link add own type veth peer name own-end")
            _in(name, f"ip addr add {address(rank)}/32 dev own")
            _in(name, "ip link set own up")
            _in(name, "ip link set own-end up")
        for one, other in combinations(range(count), 2):
            _connect(names, one, other)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _connect(names: Sequence[str], one: int, other: int) -> None:
    _run(*f"ip link add to{other} netns {names[one]} type veth peer name to{one} netns {names[other]}".split())
    for here, there in ((one, other), (other, one)):
        _in(names[here], f"ip link set to{there} up")
        _in(names[here], f"ip route add {address(there)}/32 dev to{there} src {address(here)}")


def _in(name: str, words: str) -> None:
    _run("ip", "netns", "exec", name, *words.split())


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
