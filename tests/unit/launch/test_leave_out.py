"""Bad nodes at a submission: excluded with their reasons, next to what the user wants."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from bigsci_launch.nodes.memory import BadNode, add_nodes
from tests.support.texts import has_parts

pytestmark = pytest.mark.slow

RunFile = Callable[..., Path]
CONFIG = "ClusterName             = jean\n"
NOW = time.time()
BAD = BadNode("jean", "n1", "gpu", "Xid 79, GPU has fallen off the bus", NOW, NOW + 9999, "other", "0002", 5, "alice")


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any], run_file: RunFile) -> Any:
    """A cluster `jean` whose partition debug has the nodes n0 to n3."""
    fake = fake_slurm("sbatch", "squeue", "scontrol", "sinfo")
    fake.answer("sbatch", "77\n")
    fake.answer("scontrol", CONFIG)
    fake.answer("sinfo", "".join(f"debug* n{number}\n" for number in range(4)))
    run_file()
    return fake


def remember(*entries: BadNode) -> None:
    add_nodes(Path("runs/nodes.json"), entries)


def submit(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(bsl, ["submit", "trial.yaml", *words])
    assert done.exit_code == code, done.output
    return done


def header(done: Result) -> list[str]:
    return [line for line in done.stdout.splitlines() if "exclude" in line or "remembered" in line]


def test_the_script_and_the_user_get_the_reason(slurm: Any, run_file: RunFile) -> None:
    remember(BAD)
    done = submit("--dry-run")
    [reason, option] = header(done)
    assert option == "#SBATCH --exclude=n1"
    assert reason.startswith("# ") and has_parts(reason, "n1 until 2", "Xid 79", "run other")
    assert has_parts(done.stderr, "n1 until 2", "attempt 0002", "rank 5")
    document = json.loads(submit("--dry-run", "--json").stdout)
    assert [(each["node"], each["reason"]) for each in document["left_out"]] == [("n1", "gpu")]
    assert "--exclude=n1" in document["options"]


def test_nodes_of_other_clusters_expired_ones_and_unknown_ones_do_not_matter(slurm: Any) -> None:
    remember(
        BadNode("lumi", "n0", "gpu", "x", NOW, None),
        BadNode("jean", "n2", "lost", "x", NOW - 99, NOW - 1),
        BadNode("jean", "n77", "lost", "x", NOW, None),
    )
    done = submit("--dry-run")
    assert header(done) == [] and "left out" not in done.stderr


def test_the_users_own_exclusion_is_kept(slurm: Any) -> None:
    remember(BAD)
    assert header(submit("--dry-run", "--set", "slurm.exclude=n[2-3]"))[-1] == "#SBATCH '--exclude=n[2-3],n1'" or (
        header(submit("--dry-run", "--set", "slurm.exclude=n[2-3]"))[-1] == '#SBATCH --exclude="n[2-3],n1"'
    )
    done = submit("--dry-run", "--set", "slurm.exclude=n[1-2]")
    assert [line for line in done.stdout.splitlines() if "--exclude" in line] == ['#SBATCH --exclude="n[1-2]"']


def test_a_node_that_the_user_demands_stays_with_a_warning(slurm: Any) -> None:
    remember(BAD)
    done = submit("--dry-run", "--set", "slurm.nodelist=n[0-1]")
    assert header(done) == []
    assert has_parts(done.stderr, "warning: slurm.nodelist ", "n1 until")


def test_too_few_nodes_are_left(slurm: Any) -> None:
    remember(*(BadNode("jean", f"n{number}", "lost", "x", NOW, None) for number in range(3)))
    done = submit("--dry-run")
    assert has_parts(done.stderr, "warning: ", "1 usable node ", "needs 2", "`bsl nodes forgive n0,n1,n2`")


def test_a_memory_that_cannot_be_read_stops_the_submission(slurm: Any) -> None:
    Path("runs").mkdir()
    Path("runs/nodes.json").write_text("{")
    done = submit(code=2)
    assert "runs/nodes.json: not a JSON document" in done.stderr
    assert slurm.calls("sbatch") == [] and sorted(path.name for path in Path("runs").iterdir()) == ["nodes.json"]


def test_a_local_attempt_knows_no_bad_nodes(slurm: Any) -> None:
    Path("runs").mkdir()
    Path("runs/nodes.json").write_text("{")
    submit("--dry-run", "--local")
