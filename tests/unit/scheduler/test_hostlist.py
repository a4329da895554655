from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.scheduler.hostlist import compress_hostlist, expand_hostlist
from bigsci_launch.scheduler.reservations import parse_reservation


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("n[01-04,7],gpu-a[001-003]", ["n01", "n02", "n03", "n04", "n7", "gpu-a001", "gpu-a002", "gpu-a003"]),
        ("n2,n1,n[1-2]", ["n2", "n1", "n1", "n2"]),
        ("r[1-2]n[1-3]", ["r1n1", "r1n2", "r1n3", "r2n1", "r2n2", "r2n3"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("login", ["login"]),
        ("", []),
    ],
)
def test_expands_in_slurms_order(expression: str, names: list[str]) -> None:
    assert expand_hostlist(expression) == names


@pytest.mark.parametrize(
    ("names", "expression"),
    [
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n1", "n3", "n2"], "n[1,3,2]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["n9", "n10"], "n[9-10]"),
        (["n2", "a", "n3"], "n2,a,n3"),
        (["login"], "login"),
        ([], ""),
    ],
)
def test_compresses_without_sorting(names: list[str], expression: str) -> None:
    assert compress_hostlist(names) == expression


@pytest.mark.parametrize("expression", ["n[1-2", "n1-2]", "n[[1]]", "n[a]", "n[3-1]", "n[1-9999999]", "n[]", "a b"])
def test_refuses_what_is_no_hostlist(expression: str) -> None:
    with pytest.raises(ValueError, match=r"n\[|\]|a b"):
        expand_hostlist(expression)


prefixes = st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z-]", fullmatch=True)
node_names = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}", prefixes, st.integers(0, 1200), st.integers(1, 4)
)


@given(st.lists(st.one_of(node_names, prefixes), max_size=30))
def test_compressing_loses_nothing(names: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(names)) == names


@pytest.fixture(scope="module")
def offline_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=none\nNodeName=none\nPartitionName=none Nodes=none\n")
    return conf


ranges = st.one_of(
    st.integers(0, 120).map(str),
    st.tuples(st.integers(0, 120), st.integers(0, 9), st.integers(1, 4)).map(
        lambda item: f"{item[0]:0{item[2]}d}-{item[0] + item[1]}"
    ),
)
parts = st.one_of(
    prefixes, st.tuples(prefixes, st.lists(ranges, min_size=1, max_size=4)).map(lambda p: f"{p[0]}[{','.join(p[1])}]")
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(parts, min_size=1, max_size=4).map(",".join))
def test_expands_as_scontrol_does(offline_conf: Path, expression: str) -> None:
    said = subprocess.run(
        ["scontrol", "show", "hostnames", expression],
        env={"SLURM_CONF": str(offline_conf), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert expand_hostlist(expression) == said.stdout.split()


def test_long_lists_take_as_long_as_they_are() -> None:
    """Slurm's answers and what people type are read before anything is known of them."""
    began = time.process_time()
    assert len(expand_hostlist("a," * 50_000)) == 50_000
    assert compress_hostlist(["1" * 40_000 + "a"]) == "1" * 40_000 + "a"
    assert parse_reservation("x" * 200_000) is None
    with pytest.raises(ValueError, match="unbalanced") as caught:
        expand_hostlist("[" * 100_000)
    assert time.process_time() - began < 2 and len(str(caught.value)) < 200
