"""A hang reproduced as a job on two nodes, and the verdict of `bsl spy` through Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bigsci_launch.hang_lab.judgement import Judgement
from tests.docs.test_documents import check as check_document

if TYPE_CHECKING:
    from .conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def test_a_hang_on_two_nodes(isolated_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = isolated_cluster.bsl("hang-lab", "run", "H01", "--slurm", "--culprit", "2", "--json", timeout_s=200)
    check_document("bsl hang-lab run --json", done.stdout)
    document = json.loads(done.stdout)
    assert document["judgement"] in (Judgement.RIGHT.value, Judgement.TOO_EARLY.value), document
    assert document["verdict"]["suspects"] == [2]
    assert not list(tmp_path.iterdir())
    assert "H01" not in isolated_cluster.run("squeue", "--noheader", "--format=%j").stdout
