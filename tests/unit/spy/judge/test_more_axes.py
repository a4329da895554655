"""A job with context parallelism, end to end: recordings of 8 ranks, read as tp=2,cp=2,dp=2.

The recorded jobs had two replicas and two stages. Ranks that were neighbours on the data axis are neighbours on the
context axis in this reading, and their groups are context-parallel groups.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.spy.evidence.bundle import Bundle, write_bundle
from bigsci_launch.spy.evidence.groups import group_members, group_text, is_scope, scope_of, smallest_group
from bigsci_launch.spy.judge.waits import build_graph
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

from ..conftest import make_evidence, rank_of

ZOO = Path(__file__).parents[1] / "recordings" / "zoo"
TOPOLOGY = "tp=2,cp=2,pp=1,dp=2"
AXES = Topology.parse(TOPOLOGY)


def spy(tmp_path: Path, name: str, *options: str) -> str:
    document = json.loads((ZOO / f"{name}.json").read_text())
    write_bundle(tmp_path / "bundle", Bundle(document["collection"], tuple(document["nodes"])), {}, "")
    done = CliRunner().invoke(bsl, ["spy", "--bundle", str(tmp_path / "bundle"), "--topology", TOPOLOGY, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_verdict_names_context_ranks_and_their_groups(tmp_path: Path) -> None:
    text = spy(tmp_path, "H07-8-ranks-culprit-0")
    claim = text.partition("\n")[0]
    assert has_parts(claim, "rank 0 (n0, dp0 pp0 cp0 tp0)", "all_reduce number 20", "tensor-parallel")
    assert has_parts(claim, "all_reduce number 10", "context-parallel group (ranks 0,2)")
    assert has_parts(claim, "rank 3 (n0, dp0 pp0 cp1 tp1)")
    assert has_parts(text, "tp=2,cp=2,pp=1,dp=2", "  pp0  !CC! AAAA")


def test_the_document_has_the_context_index(tmp_path: Path) -> None:
    document = json.loads(spy(tmp_path, "H07-8-ranks-culprit-0", "--json"))
    assert [suspect["coordinate"] for suspect in document["verdict"]["suspects"]] == [
        {"pp": 0, "tp": 0, "dp": 0, "cp": 0},
        {"pp": 0, "tp": 1, "dp": 0, "cp": 1},
    ]


@pytest.mark.parametrize(
    ("members", "scope", "words"),
    [
        ((0, 1), "tp", "the tensor-parallel group (ranks 0-1)"),
        ((5, 7), "cp", "the context-parallel group (ranks 5,7)"),
        ((1, 5), "dp", "the data-parallel group (ranks 1,5)"),
        ((0, 2, 4, 6), "dp-cp", "the data- and context-parallel group (ranks 0,2,4,6)"),
        ((0, 1, 4, 5), None, "the group (ranks 0-1,4-5)"),
    ],
)
def test_groups_by_what_they_are(members: tuple[int, ...], scope: str | None, words: str) -> None:
    assert scope_of(members, 8, AXES) == scope
    assert group_text(scope, members) == words
    assert scope is None or (is_scope(scope) and group_members(scope, members[0], 8, AXES) == members)


def test_members_that_are_seen_belong_to_the_smallest_group() -> None:
    assert smallest_group([0, 2], 8, AXES) == (0, 2)
    assert smallest_group([0, 6], 8, AXES) == (0, 2, 4, 6)
    assert smallest_group([0, 7], 8, AXES) == tuple(range(8))


GRADIENTS = "all_reduce@c10d:10 < average_tensor@/venv/deepspeed/runtime/zero/stage_1_and_2.py:9 < step@/src/train.py:5"


@pytest.mark.parametrize(
    ("topology", "scope", "members"), [(TOPOLOGY, "dp-cp", (0, 2, 4, 6)), ("tp=2,pp=2,dp=2", "dp", (0, 2))]
)
def test_gradients_are_reduced_over_all_copies_of_a_weight(topology: str, scope: str, members: tuple[int, ...]) -> None:
    evidence = make_evidence([rank_of(rank, GRADIENTS) for rank in range(8)], topology)
    wait = build_graph(evidence).waits[0]
    assert (wait.scope, wait.members) == (scope, members)
