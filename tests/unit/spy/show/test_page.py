from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch import __version__
from bigsci_launch.cli.main import bsl
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.page import render_page
from bigsci_launch.topology import Topology
from tests.support.pages import Page
from tests.support.texts import has_parts

from ..conftest import make_evidence, rank_of, recorded_evidence

pytestmark = pytest.mark.slow


class SpyPage(Page):
    """A page of ranks."""

    @property
    def cells(self) -> dict[int, dict[str, str]]:
        """The attributes of each rank's cell."""
        found = (attributes for tag, attributes, _ in self.elements if tag == "button")
        return {int(attributes["id"].removeprefix("rank-")): attributes for attributes in found}

    @property
    def data(self) -> dict[str, Any]:
        scripts = [texts for tag, attributes, texts in self.elements if attributes.get("id") == "data"]
        return json.loads(scripts[0][0])  # type: ignore[no-any-return]

    def told(self, rank: int, table: str) -> dict[str, str]:
        """What the page says about a rank in `waits` or `facts`."""
        return dict(self.data["tables"][self.data["ranks"][str(rank)][table]])


def page_of(evidence: Evidence) -> SpyPage:
    return SpyPage(render_page(evidence, judge(evidence)))


def test_the_sentence_comes_first_and_the_suspect_stands_out() -> None:
    evidence = recorded_evidence("deepspeed-skip-5", "tp=2,pp=2,dp=2")
    page = page_of(evidence)
    assert page.texts("h1") == [judge(evidence).claim]
    assert next(name for name, _, _ in page.elements if name in ("h1", "h2", "table")) == "h1"
    assert [rank for rank, cell in page.cells.items() if "suspect" in cell["class"].split()] == [5]
    assert page.cells[5]["title"].split(" · ") == ["rank 5", "n0", "dp0 pp1 tp1", "class E", "suspect"]
    # Ranks of the same class have the same colour; each class has its own.
    colours = {rank: cell["class"].split()[0] for rank, cell in page.cells.items()}
    assert {colours[rank] for rank in (2, 3, 6, 7)} == {"k0"}
    assert len({colours[rank] for rank in (0, 1, 4, 5)}) == 4


def test_a_rank_tells_its_stack_its_kernel_and_what_it_waits_for() -> None:
    page = page_of(recorded_evidence("deepspeed-skip-5", "tp=2,pp=2,dp=2"))
    rank = page.data["ranks"]["4"]
    first, *_ = page.data["stacks"][rank["stack"]]
    assert first["frames"][0] == [
        "all_reduce", "distributed_c10d.py:3252", "/venv/site-packages/torch/distributed/distributed_c10d.py", 0,
    ]  # fmt: skip
    waits_in, absent, awaited_by = page.told(4, "waits").values()
    assert has_parts(waits_in, "all_reduce number 176", "tensor-parallel", "(ranks 4-5)")
    assert (absent, awaited_by.partition(" ")[0]) == ("rank 5", "2")
    facts = page.told(4, "facts")
    assert facts["state"] == "S, sleeping in futex_do_wait"
    assert has_parts(facts["unfinished"], "all_reduce number 176", "tp (group 3)", "BFloat16 [2, 64, 64]")
    assert "tp (group 3): number 176, " in facts["newest collectives"]
    assert facts["activity"].endswith("in 1.0 s")
    waits_in, absent = page.told(3, "waits").values()
    assert has_parts(waits_in, "all_reduce number 36", "data-parallel", "(ranks 1,3)") and absent == "rank 1"


def test_rows_are_stages_and_blocks_are_replicas(synthetic: ModuleType) -> None:
    evidence = synthetic.SyntheticJob(Topology(tp=4, pp=12, dp=8), culprit=201, cause="loader").bundle().evidence()
    page = page_of(evidence)
    assert page.texts("th")[1:9] == [f"dp{replica}" for replica in range(8)]
    assert page.texts("th")[9:] == [f"pp{stage}" for stage in range(12)]
    assert list(page.cells) == list(range(384))
    assert [name for name, _, _ in page.elements].count("td") >= 12 * 8
    assert "suspect" in page.cells[201]["class"]


def test_a_block_holds_the_context_ranks_of_a_replica() -> None:
    ranks = [rank_of(rank, "a@/src/p.py:1") for rank in range(16)]
    evidence = make_evidence(ranks, "tp=2,cp=2,pp=2,dp=2")
    text = render_page(evidence, judge(evidence))
    assert "4 ranks: tp 2 x cp 2." in text
    page = SpyPage(text)
    assert list(page.cells) == list(range(16))
    assert page.cells[14]["title"] == "rank 14 · n7 · dp1 pp1 cp1 tp0 · class A"
    evidence = make_evidence(ranks, "cp=2,pp=2,dp=4")
    assert "2 context-parallel ranks." in render_page(evidence, judge(evidence))


def test_without_coordinates_rows_are_nodes() -> None:
    page = page_of(make_evidence([rank_of(rank, "a@/src/p.py:1") for rank in range(6)]))
    assert page.texts("th") == ["n0", "n1", "n2"]
    assert page.cells[3]["title"] == "rank 3 · n1 · class A"


def test_ranks_without_a_stack_and_silent_nodes_are_there() -> None:
    ranks = [rank_of(rank, "all_reduce@c10d:1 < step@/src/p.py:1" if rank else None) for rank in range(4)]
    ranks.append(rank_of(4, None, state="gone"))
    silent = [{"node": "n3", "why": "no answer in 40 s"}]
    page = page_of(make_evidence(ranks, "tp=2,pp=2,dp=2", world_size=8, nodes_silent=silent))
    kinds = {rank: cell["class"].split()[0] for rank, cell in page.cells.items()}
    assert [rank for rank, kind in kinds.items() if kind == "unread"] == [0, 5, 6, 7]
    assert [rank for rank, kind in kinds.items() if kind == "gone"] == [4]
    assert any(has_parts(line, "node n3", silent[0]["why"]) for line in page.texts("li"))
    assert page.data["ranks"]["0"]["unread"].startswith("py-spy gave")
    assert page.data["ranks"]["0"]["stack"] is None


def test_no_name_of_the_job_becomes_markup() -> None:
    evil = "</script><script>alert(1)</script><b onclick='x'>&amp;"
    ranks = [rank_of(rank, f"{evil}@/src/{evil}:1" if rank == 1 else "all_reduce@c10d:1") for rank in range(4)]
    evidence = make_evidence(ranks, job=evil, nodes_silent=[{"node": evil, "why": evil}], world_size=4)
    text = render_page(evidence, judge(evidence))
    page = SpyPage(text)
    assert "<b onclick" not in text
    assert [name for name, _, _ in page.elements if name == "script"] == ["script", "script"]
    assert not [attributes for _, attributes, _ in page.elements if any(name.startswith("on") for name in attributes)]
    assert page.data["stacks"][page.data["ranks"]["1"]["stack"]][0]["frames"][0][0] == evil


def test_the_page_needs_no_network() -> None:
    evidence = recorded_evidence("stop-1")
    text = render_page(evidence, judge(evidence))
    assert not re.findall(r"https?:|url\(|@import|\bimport\(|fetch\(|XMLHttp", text)
    page = SpyPage(text)
    assert page.links
    assert all(re.fullmatch(r"#rank=\d+", link) for link in page.links)
    policy = next(attributes["content"] for _, attributes, _ in page.elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none';")


def test_what_ranks_share_stands_in_a_large_page_once(synthetic: ModuleType) -> None:
    evidence = synthetic.SyntheticJob(Topology(tp=8, pp=8, dp=32), culprit=1025, cause="loader").bundle().evidence()
    page = render_page(evidence, judge(evidence))
    assert len(page) < 300 * 2048
    assert len(SpyPage(page).data["stacks"]) == 5


def test_the_command_writes_it(tmp_path: Path, synthetic: ModuleType) -> None:
    from bigsci_launch.spy.evidence.bundle import write_bundle

    write_bundle(tmp_path / "bundle", synthetic.SyntheticJob(Topology(2, 2, 2), 5).bundle(), {}, "")
    arguments = ["spy", "--bundle", str(tmp_path / "bundle"), "--html"]
    done = CliRunner().invoke(bsl, [*arguments, str(tmp_path / "spy.html")])
    assert done.exit_code == 0
    assert f"page: {tmp_path}/spy.html" in done.stderr
    assert len(SpyPage((tmp_path / "spy.html").read_text()).cells) == 8
    refused = CliRunner().invoke(bsl, [*arguments, str(tmp_path / "nowhere" / "spy.html")])
    assert refused.exit_code == 1
    assert "nowhere/spy.html: " in refused.stderr


@pytest.mark.parametrize(
    ("sample", "name", "words"),
    [
        ({"system_call": {"number": 0, "name": "read", "fd": 5, "target": "pipe:[1]"}}, "system call", "read on fd 5"),
        ({"system_call": {"number": 202}}, "system call", "number 202"),
        ({"system_call": {"number": 202, "call": "futex"}}, "system call", "futex"),
        ({"tracer_pid": 77}, "debugger", "pid 77"),
        ({"kill_pending": True}, "signals", "SIGKILL is pending"),
        ({"children": [{"pid": 9, "comm": "worker", "state": "T"}]}, "child", "9 (worker): T, stopped"),
        (
            {"sockets": {"count": 1, "list": [{"local": "a:1", "remote": "b:2", "state": "ESTABLISHED", "tx": 7}]}},
            "tcp",
            "a:1 to b:2 ESTABLISHED, 7 bytes",
        ),
    ],
)
def test_kernel_evidence_in_words(sample: dict[str, Any], name: str, words: str) -> None:
    page = page_of(make_evidence([rank_of(0, "a@/src/p.py:1", sample=sample)]))
    assert words in page.told(0, "facts")[name]


def test_the_page_says_what_it_rests_on() -> None:
    evidence = make_evidence([rank_of(0, "work@/src/train.py:5")], time=1795657415.0)
    page = render_page(evidence, judge(evidence), Path("/runs/night/spy/20261126-014335Z"))
    footer = page.partition("<footer>")[2]
    assert has_parts(footer, f"bsl {__version__}", "2026-11-26 01:43:35 UTC", "/runs/night/spy/20261126-014335Z")
    unknown = render_page(make_evidence([rank_of(0, "work@/src/train.py:5")]), judge(evidence))
    assert f">bsl {__version__}</p></footer>" in unknown
