"""`bsl plan --survive`, `--lose` and `--trace` as people type them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl

BLOOM = "configs/bloom-176b-2022.yaml"
TRACE = "benchmarks/rows/gcp-a2-trace.csv"


@pytest.fixture(autouse=True)
def in_the_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    # No Slurm: nodes are called node1, node2 and so on.
    monkeypatch.setenv("PATH", "/nonexistent")


def run(*arguments: str, config: str = BLOOM) -> Result:
    return CliRunner().invoke(bsl, ["plan", config, *arguments])


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_the_answer_in_words_and_as_a_page(tmp_path: Path, root: Path) -> None:
    page = tmp_path / "survive.html"
    # The page shows the name of the site, which is the name of its file.
    sites, site = root / "slurm/sites", tmp_path / "a<b>&c.yaml"
    known = f"calibration: {root / 'slurm/calibrations/jean-zay-a100.json'}"
    site.write_text(
        (sites / "jean-zay-a100-2022.yaml")
        .read_text()
        .replace("calibration: ../calibrations/jean-zay-a100.json", known)
    )
    here = ["--set", f"slurm.site={site}", "--html", str(page)]
    result = run("--survive", "f=1", "--lose", "node[3,7]", "--trace", TRACE, *here)
    assert result.exit_code == 0
    for text in (
        "(f 1) while 14 ",
        "n0 7: ",
        "templates of 7, 8, 9, 10 nodes",
        "lost node[3,7]: 46 nodes",
        "f 1 is left",
        "trace: 15 nodes",
    ):
        assert text in result.output
    shown = page.read_text()
    assert "<b>" not in shown
    assert "bloom-176b-2022 on a&lt;b&gt;&amp;c: " in shown
    assert not re.search(r"<script|src=|href=|@import|url\(|https?://(?!www\.w3\.org)", shown)
    assert shown.count("<svg") == shown.count("</svg>") == 3
    for text in ("number of nodes", "lost node[3,7]", "f 1 from", "10x2"):
        assert text in shown


@pytest.mark.slow
def test_the_answer_in_json() -> None:
    result = run("--lose", "node2,node8", "--trace", TRACE, "--json")
    document = strict(result.stdout)
    assert (document["schema_version"], document["failures"], document["guaranteed_nodes"]) == (1, 1, 14)
    assert [on["num_nodes"] for on in document["on_nodes"]] == list(range(48, 9, -1))
    for on in document["on_nodes"]:
        assert sum(pipeline["micro_batches"] for pipeline in on["pipelines"]) == 1024
        assert sum(pipeline["num_nodes"] for pipeline in on["pipelines"]) + on["idle_nodes"] == on["num_nodes"]
    assert {each["fewest_replicas"] for each in document["templates"] if each["is_needed"]} == {2}
    loss = document["loss"]
    assert loss["lost"] == ["node2", "node8"]
    assert all(link["bytes"] > 0 and link["source"] != link["target"] for link in loss["links"])
    assert not {link[end] for link in loss["links"] for end in ("source", "target")} & {"node2", "node8"}
    assert {part["kind"] for part in loss["lost_state"]} == {"state"}
    assert [each["strategy"] for each in document["strategies"]] == ["templates", "whole replicas"]
    assert all(0 < each["trace"]["effective_share"] < 1 for each in document["strategies"])


@pytest.mark.slow
def test_two_buddies_are_said() -> None:
    assert re.search(r"LOST: .* optimizer state .*layers 12-23: ", run("--lose", "node2,node8").output)


def test_a_site_that_does_not_know(tmp_path: Path, root: Path) -> None:
    site = (root / "slurm/sites/jean-zay-a100-2022.yaml").read_text()
    (tmp_path / "new.yaml").write_text(
        "\n".join(line for line in site.splitlines() if not line.startswith(("calibration", "node_mtbf_h")))
    )
    result = run("--survive", "1", "--json", "--set", f"slurm.site={tmp_path / 'new.yaml'}", "--nodes", "24")
    document = strict(result.stdout)
    assert document["node_mtbf_h"] is None
    assert all(each["expected"] is None for each in document["strategies"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--survive", "f=x"], "--survive f=x: "),
        (["--survive", "f=-1"], "--survive f=-1: "),
        (["--survive", ""], "not f=N"),
        (["--lose", "node[3-"], "unbalanced brackets"),
        (["--lose", ""], "--lose"),
        (["--lose", "node3,nod4"], "--lose nod4: "),
        (["--lose", "node[1-39]"], "9 nodes are left"),
        (["--trace", "/nonexistent.csv"], "does not exist"),
        (["--trace", "configs/demo.yaml"], "has 1 cells, not 3"),
        (["--survive", "f=1", "--free", "heads"], "--free, --explain and --rejected"),
        (["--lose", "node1", "--explain"], "--free, --explain and --rejected"),
        (["--trace", TRACE, "--rejected"], "--free, --explain and --rejected"),
        (["--survive", "f=40"], "--survive f=11 "),
        (["--survive", "f=1", "--nodes", "0"], "--nodes 0"),
    ],
)
def test_mistakes_exit_with_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not result.stdout
