"""The shape of a cluster, and its configuration files as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import ClusterError
from bigsci_launch.minicluster.directory import ClusterDir
from bigsci_launch.minicluster.network import subnet
from bigsci_launch.minicluster.settings import (
    Cluster,
    ClusterShape,
    cluster_document,
    configuration_texts,
    hosts_text,
    isolated_cluster,
    node_names,
    parse_cluster,
    parse_version,
    shared_cluster,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "minicluster"
DIRECTORY = ClusterDir(Path("/tmp/example"))


def isolated(num_nodes: int = 2, gpus: int = 2) -> Cluster:
    return isolated_cluster(ClusterShape(num_nodes, gpus, True), subnet(7), "root")


def shared(num_nodes: int = 2, gpus: int = 0) -> Cluster:
    return shared_cluster(ClusterShape(num_nodes, gpus, False), 17000, "login", "ada")


def test_node_names_are_of_one_width():
    assert node_names(1) == ("n0",)
    assert node_names(10)[-1] == "n9"
    assert node_names(48)[:2] == ("n00", "n01")
    assert node_names(200)[-1] == "n199"


@given(st.integers(1, 200))
def test_every_isolated_node_has_an_address_of_its_own(num_nodes: int):
    cluster = isolated(num_nodes)
    addresses = [node.address for node in cluster.nodes] + [cluster.controller_address, subnet(7).login_address]
    assert len(set(addresses)) == num_nodes + 2
    assert all(0 < int(address.rpartition(".")[2]) < 255 for address in addresses)


@given(st.integers(1, 200))
def test_every_shared_daemon_has_a_port_of_its_own(num_nodes: int):
    cluster = shared(num_nodes)
    ports = [cluster.controller_port, *(node.port for node in cluster.nodes)]
    assert ports == list(range(17000, 17001 + num_nodes))


@pytest.mark.parametrize(("cluster", "folder"), [(isolated(), "isolated"), (shared(), "shared")])
def test_configuration_files_are_as_reviewed(cluster: Cluster, folder: str):
    for name, text in configuration_texts(cluster, DIRECTORY, (22, 5)).items():
        assert text == (GOLDEN / folder / name).read_text(), f"{folder}/{name}"


@pytest.mark.parametrize(
    ("says", "settings"),
    [
        ("slurm-wlm 20.11.4", ["CgroupAutomount=no"]),
        ("slurm-wlm 22.05.8", ["CgroupPlugin=cgroup/v1", "CgroupAutomount=no"]),
        ("slurm 26.05.5", ["CgroupPlugin=disabled"]),
    ],
)
def test_each_version_gets_the_settings_that_it_knows(says: str, settings: list[str]):
    text = configuration_texts(shared(), DIRECTORY, parse_version(says))["cgroup.conf"]
    assert [line for line in text.splitlines() if not line.startswith("#")] == settings


def test_only_the_cluster_is_in_the_hosts_file_of_isolated_nodes():
    expected = "127.0.0.1 localhost\n10.213.7.1 ctl\n10.213.7.10 n0\n10.213.7.11 n1\n"
    assert hosts_text(isolated(), "192.0.2.9 printer\n") == expected


def test_shared_nodes_are_added_to_the_machines_hosts_file():
    assert hosts_text(shared(), "192.0.2.9 printer") == "192.0.2.9 printer\n127.0.0.1 n0\n127.0.0.1 n1\n"


@pytest.mark.parametrize("cluster", [isolated(), shared()])
def test_the_record_of_a_cluster_reads_back(cluster: Cluster):
    assert parse_cluster(json.loads(json.dumps(cluster_document(cluster)))) == cluster


def test_an_unknown_node_is_an_error_that_names_the_others():
    with pytest.raises(ClusterError) as caught:
        isolated().node("n2")
    assert caught.value.hint == "its nodes: n0, n1"
