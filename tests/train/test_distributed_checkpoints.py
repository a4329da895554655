"""`bsl diff-weights` on what FSDP2 with tensor parallelism writes: sharded, whole, and rank by rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl

from .rank_processes import StartRank

pytestmark = pytest.mark.torch
PROGRAM = Path(__file__).parent / "programs" / "distributed_checkpoints.py"
NUM_RANKS = 4


@pytest.fixture(scope="module")
def saved(start_rank: StartRank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with everything that the program writes."""
    out = tmp_path_factory.mktemp("saved")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(NUM_RANKS):
        environment = {**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        ranks.append(start_rank([str(PROGRAM), str(out)], environment, out / f"rank-{rank}.log"))
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    tails = [(out / f"rank-{rank}.log").read_text()[-2000:] for rank, code in enumerate(codes) if code]
    assert not tails, "\n".join(tails)
    return out


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(bsl, ["diff-weights", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("other", ["dp2", "whole.pt"])
def test_one_state_is_equal_however_it_was_sharded(saved: Path, other: str) -> None:
    answer = diff(saved / "dp2-tp2", saved / other)
    assert answer.exit_code == 0
    # 13 parameters, each with two moments and a step, and the step of the run.
    assert answer.stdout.startswith("53 tensors compared")


@pytest.mark.parametrize("other", ["dp2-tp2", "dp2", "whole.pt"])
def test_one_element_is_named_by_its_index_in_the_whole(saved: Path, other: str) -> None:
    answer = diff(saved / other, saved / "changed")
    assert answer.exit_code == 1
    assert "layers.1.up.weight exp_avg" in answer.stdout
    assert "1 element at [19, 5]" in answer.stdout


def test_the_audit_of_a_sharded_state_finds_nothing(saved: Path) -> None:
    assert diff("--audit", saved / "dp2-tp2").exit_code == 0


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_what_each_rank_saved_by_itself(saved: Path, rank: int) -> None:
    folder = saved / f"rank-{rank}"
    assert diff(folder / "plain.pt", folder / "same.pt").exit_code == 0
    element = diff(folder / "plain.pt", folder / "element.pt")
    assert element.exit_code == 1
    assert "layers.0.down.weight" in element.stdout
    assert "1 element at [0, 0]" in element.stdout
    placement = diff(folder / "plain.pt", folder / "placement.pt")
    assert placement.exit_code == 1
    assert "layers.0.norm.weight" in placement.stdout
    assert "lacement" in placement.stdout
