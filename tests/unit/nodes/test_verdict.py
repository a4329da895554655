"""The verdict on what nodes have measured: failed, slow, not known, ok."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigsci_launch.nodes import verdict
from tests.support.texts import CheckText, has_parts
from tests.unit.house.conftest import standalone


def result(node: str, *, gpus: int | None = None, peers: dict[str, float | None] | None = None, **rates: Any) -> str:
    """A line of a node; a rate that is a text is the reason of a failure, and None a test that was not tried."""
    tests = []
    for name, value in rates.items():
        status = "failed" if isinstance(value, str) else "not_tried" if value is None else "ok"
        number = None if isinstance(value, str) else value
        why = value if isinstance(value, str) else "no torch" if value is None else ""
        tests.append({"name": name.replace("_", " "), "status": status, "value": number, "unit": "", "why": why})
    exchanges = [
        {"round": 0, "peer": peer, "status": "failed" if rate is None else "ok", "value": rate, "why": "reset"}
        for peer, rate in (peers or {}).items()
    ]
    record = {"node": node, "kind": "result", "tests": tests, "peers": exchanges, "gpus": gpus, "seconds": 1.0}
    return "@check " + json.dumps(record)


def judge(*lines: str, names: str = "") -> dict[str, tuple[str, str]]:
    document = verdict.judge(lines, names.split())
    assert verdict.summary(document)
    return {node["node"]: (node["verdict"], node["why"]) for node in document["nodes"]}


def verdicts(*lines: str, names: str = "") -> str:
    return " ".join(f"{node}:{verdict}" for node, (verdict, _) in judge(*lines, names=names).items())


def test_all_is_well() -> None:
    assert verdicts(*(result(f"n{n}", cpu=10.0 + n, gpu=None) for n in range(4))) == "n0:ok n1:ok n2:ok n3:ok"


def test_a_failed_test_is_quoted() -> None:
    found = judge(result("n0", cpu=10.0), result("n1", cpu=10.0, memory="A REASON"))
    assert found == {"n0": ("ok", ""), "n1": ("failed", "memory: A REASON")}


@pytest.mark.parametrize(
    ("name", "rate", "verdict"),
    [("cpu", 5.1, "ok"), ("cpu", 4.9, "slow"), ("gpu_3_matmul", 8.1, "ok"), ("gpu_3_matmul", 7.9, "slow")],
)
def test_slow_is_relative_to_the_others(name: str, rate: float, verdict: str) -> None:
    lines = [result(f"n{n}", **{name: 10.0}) for n in range(3)]
    assert judge(*lines, result("n3", **{name: rate}))["n3"][0] == verdict


def test_each_gpu_is_compared_with_those_of_other_nodes() -> None:
    healthy = {f"gpu_{index}_matmul": 100.0 for index in range(8)}
    found = judge(result("n0", **healthy), result("n1", **healthy), result("n2", **{**healthy, "gpu_5_matmul": 60.0}))
    assert found["n2"][0] == "slow" and has_parts(found["n2"][1], "gpu matmul: 60", "1.7 times")
    assert found["n0"][0] == "ok"


def test_a_gpu_that_is_gone() -> None:
    found = judge(*(result(f"n{n}", gpus=8) for n in range(3)), result("n3", gpus=7))
    assert found["n3"][0] == "failed" and has_parts(found["n3"][1], "7 GPUs", "3 of 3", 8)
    assert verdicts(result("n0", gpus=8), result("n1", gpus=None)) == "n0:ok n1:ok"


def test_nodes_without_a_result_are_not_known_and_end_nothing(check_text: CheckText) -> None:
    started = '@check {"node": "n1", "kind": "start"}'
    found = judge(result("n0", cpu=1.0), started, "torch: a warning", "@check {", names="n0 n1 n2")
    assert found["n1"][0] == found["n2"][0] == "not_known"
    check_text(*(f"{node}: {why}" for node, (_, why) in found.items()))
    assert verdicts(names="n0") == "n0:not_known"


def test_a_node_whose_network_is_broken() -> None:
    found = judge(
        result("n0", peers={"n1": 100.0, "n2": 100.0, "n3": None}),
        result("n1", peers={"n0": 100.0, "n2": 100.0, "n3": None}),
        result("n2", peers={"n0": 100.0, "n1": 100.0, "n3": 99.0}),
        result("n3", peers={"n0": None, "n1": None}),
    )
    assert found["n3"][0] == "failed" and "with n0, n1" in found["n3"][1]
    assert found["n0"][0] == "not_known"


def test_a_broken_pair_blames_neither() -> None:
    found = judge(result("n0", peers={"n1": None}), result("n1", peers={"n0": None}))
    assert {verdict for verdict, _ in found.values()} == {"not_known"}
    assert found["n0"][1]


def test_two_nodes_cannot_say_who_slows_their_exchange() -> None:
    assert verdicts(result("n0", peers={"n1": 100.0}), result("n1", peers={"n0": 40.0})) == "n0:ok n1:ok"


def test_the_rounds_of_a_tournament() -> None:
    with standalone() as program:
        peers = program("check_peers")
        for count in range(2, 12):
            rounds = peers.tournament(count)
            met = sorted(pair for pairs in rounds for pair in pairs)
            assert met == [(a, b) for a in range(count) for b in range(a + 1, count)]
            assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
            assert len(rounds) == count - 1 + count % 2
