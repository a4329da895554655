"""The addresses of an isolated cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from ipaddress import IPv4Network
from itertools import islice
from pathlib import Path

import pytest

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster import ports
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.network import (
    free_subnets,
    hardware_address,
    login_batch,
    parse_routes,
    subnet,
    switch_batch,
)
from bigsci_launch.minicluster.settings import ClusterShape, isolated_cluster

from ..other_users import AS_ROOT

ROUTES = [
    {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
    {"dst": "192.0.2.0/24", "dev": "eth0", "scope": "link"},
    {"type": "local", "dst": "192.0.2.2", "dev": "eth0", "table": "local"},
    {"dst": "10.213.1.0/24", "dev": "bsl1"},
]


def test_routes_are_read_without_the_default():
    assert parse_routes(json.dumps(ROUTES)) == [
        IPv4Network("192.0.2.0/24"),
        IPv4Network("192.0.2.2/32"),
        IPv4Network("10.213.1.0/24"),
    ]
    assert parse_routes("") == []


def test_a_subnet_that_overlaps_a_route_is_left_out():
    used = [IPv4Network("10.213.1.7/32"), IPv4Network("10.213.2.0/23")]
    assert [one.interface for one in islice(free_subnets(used), 3)] == ["bsl0", "bsl4", "bsl5"]
    assert list(free_subnets([IPv4Network("10.0.0.0/8")])) == []


def test_interface_names_are_short_enough_for_the_kernel():
    assert all(len(subnet(number).interface) < 16 for number in range(256))


def test_hardware_addresses_are_local_and_differ():
    one, other = (hardware_address(ClusterDir(Path(path))) for path in ("/tmp/a", "/tmp/b"))
    assert one != other
    for address in (one, other):
        octets = [int(octet, 16) for octet in address.split(":")]
        assert len(octets) == 6
        assert octets[0] & 0b11 == 0b10  # locally administered, not a group


def test_every_node_is_plugged_into_the_switch(check_text):
    cluster = isolated_cluster(ClusterShape(2, 0, True), subnet(3), "root")
    check_text(switch_batch(cluster, [111, 222]), login_batch(subnet(3)))


def test_ports_in_use_are_left_out(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST_PORT", port - 1)
        monkeypatch.setattr(ports, "LAST_PORT", port + 50)
        assert ports.find_ports(2) > port
        assert ports.is_listening("127.0.0.1", port)
    assert not ports.is_listening("127.0.0.1", port)


def test_more_ports_than_there_are_is_an_error():
    with pytest.raises(ClusterError, match="no 4000 consecutive free ports"):
        ports.find_ports(4000)


def test_two_clusters_of_one_user_do_not_choose_ports_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_home", lambda: tmp_path)
    monkeypatch.setattr(ports, "MUTEX_TIMEOUT_S", 0.05)
    with ports.port_mutex(), pytest.raises(ClusterError, match="another mini cluster of yours"), ports.port_mutex():
        pass
    with ports.port_mutex():
        pass


HOLDS = """
import fcntl, os, socket, sys, time
os.setuid(65000)
name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
name.bind("\\0bsl-minicluster-ports")
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
except PermissionError:
    print("denied", flush=True)
time.sleep(60)
"""


@AS_ROOT
def test_nobody_else_can_hold_a_cluster_back(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_home", lambda: tmp_path)
    monkeypatch.setattr(ports, "MUTEX_TIMEOUT_S", 0.05)
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o011)
    with ports.port_mutex():
        pass
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / ports.LOCK)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout.readline() == "denied\n"
            with ports.port_mutex():
                pass
        finally:
            stranger.kill()


def test_a_cluster_does_without_the_lock_where_it_cannot_be(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_home", lambda: tmp_path / "missing")
    with ports.port_mutex(), ports.port_mutex():
        pass


def test_users_begin_at_different_ports(monkeypatch):
    found = set()
    for uid in (1001, 1002, 1003):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        found.add(ports.find_ports(3))
    assert len(found) == 3
