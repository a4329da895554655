"""What connections say about process groups: all of them are the world, not all are, or that is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.spy.evidence.groups import is_world_only
from bigsci_launch.spy.evidence.kernel import Connections, parse_connections

from ..conftest import Document, mesh_of

Change = Callable[[list[Document]], None]


def fact(ranks: list[Document], nodes: str = "aaaa") -> bool | None:
    return is_world_only([parse(each, node) for each, node in zip(ranks, nodes, strict=False)])


def parse(connections: Document, node: str = "a") -> Connections | None:
    return parse_connections([{"state": "S", "connections": connections}], node)


def connect(ranks: list[Document], one: int, other: int, port: int) -> None:
    """`one` opens another connection to `other`, at a port at which that listens."""
    ranks[one]["opened"]["127.0.0.1"].append(port)
    ranks[other]["listening"].setdefault(f"127.0.0.1:{port}", 0)
    ranks[other]["listening"][f"127.0.0.1:{port}"] += 1


def test_one_connection_for_each_pair_is_the_world_alone() -> None:
    """The store is no group: all connect to it, its server too."""
    assert fact(mesh_of(4)) is True
    assert fact(mesh_of(4, store=None)) is True, "it is served by a launcher"


def test_a_second_group_of_two_is_seen() -> None:
    ranks = mesh_of(4)
    connect(ranks, 1, 0, 50001)
    ranks[1]["listening"]["127.0.0.1:50002"] = 0
    assert fact(ranks) is False


def test_two_groups_of_all_are_both_the_world() -> None:
    ranks = mesh_of(3)
    ranks[2]["listening"]["127.0.0.1:50002"] = 0
    for one, other in ((1, 0), (2, 0), (2, 1)):
        assert fact(ranks, "aaa") is not True, "as long as one of them lacks a member"
        connect(ranks, one, other, 50000 + other)
    assert fact(ranks, "aaa") is True


def test_two_connections_for_one_group_are_not_understood() -> None:
    """gloo opens several where it was told to use several networks."""
    ranks = mesh_of(2)
    connect(ranks, 1, 0, 40000)
    assert fact(ranks, "aa") is None


def has_device(ranks: list[Document]) -> None:
    ranks[3]["devices"] = ["/dev/nvidia0"]


def listens_twice(ranks: list[Document]) -> None:
    """A group whose members connect when they first need it."""
    ranks[3]["listening"]["127.0.0.1:50001"] = 0


def lost_a_connection(ranks: list[Document]) -> None:
    ranks[2]["opened"]["127.0.0.1"].remove(40000)
    ranks[0]["listening"]["127.0.0.1:40000"] -= 1


def one_end_is_not_seen(ranks: list[Document]) -> None:
    """Somebody who was not found is connected with rank 0."""
    ranks[0]["listening"]["127.0.0.1:40000"] += 1


def all_connect_elsewhere(ranks: list[Document]) -> None:
    """The store, and a rank that was not found."""
    for each in ranks:
        each["opened"]["127.0.0.1"].append(40009)


def one_address_twice(ranks: list[Document]) -> None:
    """Two networks that use the same addresses."""
    ranks[3]["listening"] = {"127.0.0.1:40000": 0}


@pytest.mark.parametrize(
    "change",
    [has_device, listens_twice, lost_a_connection, one_end_is_not_seen, all_connect_elsewhere, one_address_twice],
)
def test_what_is_not_known_is_not_the_world_alone(change: Change) -> None:
    ranks = mesh_of(4)
    change(ranks)
    assert fact(ranks) is None


def test_a_rank_that_was_not_read_may_be_in_any_group() -> None:
    ranks = [parse(each) for each in mesh_of(4)]
    assert is_world_only([*ranks[:3], None]) is None
    assert is_world_only([]) is None
    assert is_world_only(ranks[:1]) is None


def test_one_connection_elsewhere_is_that_ranks_own_matter() -> None:
    ranks = mesh_of(4)
    ranks[2]["opened"]["10.0.0.9"] = [443, 443]
    assert fact(ranks) is True


def test_an_address_of_one_machine_is_not_that_of_another() -> None:
    """Ranks 0 and 1 are on node a, 2 and 3 on node b: they cannot meet at 127.0.0.1."""
    assert fact(mesh_of(4), "aabb") is None
    assert fact(mesh_of(4, host="10.0.0.1"), "aabb") is True


@pytest.mark.parametrize(
    ("later", "is_known"),
    [
        ({"state": "S"}, True),
        ({"state": "S", "children": [], "unread": {"connections": "too many sockets"}}, False),
        ({"state": "S", "unread": {"kernel": "no answer in 1 s"}}, False),
        ({"state": "gone"}, False),
    ],
    ids=["nothing ran since", "too many", "no answer", "ended"],
)
def test_the_latest_look_counts(later: dict[str, Any], is_known: bool) -> None:
    samples = [{"state": "S", "children": [], "connections": mesh_of(2)[0]}, later]
    assert (parse_connections(samples, "a") is not None) is is_known
