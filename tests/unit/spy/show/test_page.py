from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
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

MakeRank = Callable[..., dict[str, Any]]
MakeEvidence = Callable[..., Evidence]


class Page(HTMLParser):
    """The content of a page: every element with its attributes and its text, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = (tag, {name: value or "" for name, value in attributes}, [])
        self.elements.append(found)
        if tag != "meta":
            self._open.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open[-1:]:
            texts.append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(texts) for name, _, texts in self.elements if name == tag]

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


def page_of(evidence: Evidence) -> Page:
    return Page(render_page(evidence, judge(evidence)))


def test_the_sentence_comes_first_and_the_suspect_stands_out(recorded: Callable[..., Evidence]) -> None:
    evidence = recorded("deepspeed-skip-5", "tp=2,pp=2,dp=2")
    page = page_of(evidence)
    assert page.texts("h1") == [judge(evidence).claim]
    assert next(name for name, _, _ in page.elements if name in ("h1", "h2", "table")) == "h1"
    assert [rank for rank, cell in page.cells.items() if "suspect" in cell["class"].split()] == [5]
    assert page.cells[5]["title"] == "rank 5 · n0 · dp0 pp1 tp1 · class E · suspect"
    # Ranks of the same class have the same colour; each class has its own.
    colours = {rank: cell["class"].split()[0] for rank, cell in page.cells.items()}
    assert {colours[rank] for rank in (2, 3, 6, 7)} == {"k0"}
    assert len({colours[rank] for rank in (0, 1, 4, 5)}) == 4


def test_a_rank_tells_its_stack_its_kernel_and_what_it_waits_for(recorded: Callable[..., Evidence]) -> None:
    page = page_of(recorded("deepspeed-skip-5", "tp=2,pp=2,dp=2"))
    rank = page.data["ranks"]["4"]
    first, *_ = page.data["stacks"][rank["stack"]]
    assert first["frames"][0] == [
        "all_reduce", "distributed_c10d.py:3252", "/venv/site-packages/torch/distributed/distributed_c10d.py", 0,
    ]  # fmt: skip
    assert page.told(4, "waits") == {
        "waits in": "all_reduce number 176 of the tensor-parallel group (ranks 4-5)",
        "not there yet": "rank 5",
        "awaited by": "2 ranks directly",
    }
    facts = page.told(4, "facts")
    assert facts["state"] == "S, sleeping in futex_do_wait"
    assert facts["unfinished"] == "all_reduce number 176 of tp (group 3), BFloat16 [2, 64, 64]"
    assert "tp (group 3): number 176, " in facts["newest collectives"]
    assert facts["activity"].endswith("in 1.0 s")
    assert page.told(3, "waits") == {
        "waits in": "all_reduce number 36 of the data-parallel group (ranks 1,3)",
        "not there yet": "rank 1",
    }


def test_rows_are_stages_and_blocks_are_replicas(synthetic: ModuleType) -> None:
    evidence = synthetic.SyntheticJob(Topology(tp=4, pp=12, dp=8), culprit=201, cause="loader").bundle().evidence()
    page = page_of(evidence)
    assert page.texts("th")[1:9] == [f"dp{replica}" for replica in range(8)]
    assert page.texts("th")[9:] == [f"pp{stage}" for stage in range(12)]
    assert list(page.cells) == list(range(384))
    assert [name for name, _, _ in page.elements].count("td") >= 12 * 8
    assert "suspect" in page.cells[201]["class"]


def test_a_block_holds_the_context_ranks_of_a_replica(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(rank, "a@/src/p.py:1") for rank in range(16)]
    evidence = make_evidence(ranks, "tp=2,cp=2,pp=2,dp=2")
    text = render_page(evidence, judge(evidence))
    assert "Rows are pipeline stages; blocks are replicas (dp), each of 4 ranks: tp 2 x cp 2." in text
    page = Page(text)
    assert list(page.cells) == list(range(16))
    assert page.cells[14]["title"] == "rank 14 · n7 · dp1 pp1 cp1 tp0 · class A"
    evidence = make_evidence(ranks, "cp=2,pp=2,dp=4")
    assert "each of 2 context-parallel ranks." in render_page(evidence, judge(evidence))


def test_without_coordinates_rows_are_nodes(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    page = page_of(make_evidence([make_rank(rank, "a@/src/p.py:1") for rank in range(6)]))
    assert page.texts("th") == ["n0", "n1", "n2"]
    assert page.cells[3]["title"] == "rank 3 · n1 · class A"


def test_ranks_without_a_stack_and_silent_nodes_are_there(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(rank, "all_reduce@c10d:1 < step@/src/p.py:1" if rank else None) for rank in range(4)]
    ranks.append(make_rank(4, None, state="gone"))
    silent = [{"node": "n3", "why": "no answer in 40 s"}]
    page = page_of(make_evidence(ranks, "tp=2,pp=2,dp=2", world_size=8, nodes_silent=silent))
    kinds = {rank: cell["class"].split()[0] for rank, cell in page.cells.items()}
    assert [rank for rank, kind in kinds.items() if kind == "unread"] == [0, 5, 6, 7]
    assert [rank for rank, kind in kinds.items() if kind == "gone"] == [4]
    assert "node n3 is silent: no answer in 40 s" in page.texts("li")
    assert page.data["ranks"]["0"]["unread"].startswith("py-spy gave no answer in 3 s")
    assert page.data["ranks"]["0"]["stack"] is None


def test_no_name_of_the_job_becomes_markup(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    evil = "</script><script>alert(1)</script><b onclick='x'>&amp;"
    ranks = [make_rank(rank, f"{evil}@/src/{evil}:1" if rank == 1 else "all_reduce@c10d:1") for rank in range(4)]
    evidence = make_evidence(ranks, job=evil, nodes_silent=[{"node": evil, "why": evil}], world_size=4)
    text = render_page(evidence, judge(evidence))
    page = Page(text)
    assert "<b onclick" not in text
    assert [name for name, _, _ in page.elements if name == "script"] == ["script", "script"]
    assert not [attributes for _, attributes, _ in page.elements if any(name.startswith("on") for name in attributes)]
    assert page.data["stacks"][page.data["ranks"]["1"]["stack"]][0]["frames"][0][0] == evil


def test_the_page_needs_no_network(recorded: Callable[..., Evidence]) -> None:
    evidence = recorded("stop-1")
    text = render_page(evidence, judge(evidence))
    assert not re.findall(r"https?:|url\(|@import|\bimport\(|fetch\(|XMLHttp", text)
    page = Page(text)
    links = [each[name] for _, each, _ in page.elements for name in ("href", "src") if name in each]
    assert links
    assert all(re.fullmatch(r"#rank=\d+", link) for link in links)
    policy = next(attributes["content"] for _, attributes, _ in page.elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none';")


def test_what_ranks_share_stands_in_a_large_page_once(synthetic: ModuleType) -> None:
    evidence = synthetic.SyntheticJob(Topology(tp=8, pp=8, dp=32), culprit=1025, cause="loader").bundle().evidence()
    page = render_page(evidence, judge(evidence))
    assert len(page) < 300 * 2048
    assert len(Page(page).data["stacks"]) == 5


def test_the_command_writes_it(tmp_path: Path, synthetic: ModuleType) -> None:
    from bigsci_launch.spy.evidence.bundle import write_bundle

    write_bundle(tmp_path / "bundle", synthetic.SyntheticJob(Topology(2, 2, 2), 5).bundle(), {}, "")
    arguments = ["spy", "--bundle", str(tmp_path / "bundle"), "--html"]
    done = CliRunner().invoke(bsl, [*arguments, str(tmp_path / "spy.html")])
    assert done.exit_code == 0
    assert f"page: {tmp_path}/spy.html" in done.stderr
    assert len(Page((tmp_path / "spy.html").read_text()).cells) == 8
    refused = CliRunner().invoke(bsl, [*arguments, str(tmp_path / "nowhere" / "spy.html")])
    assert refused.exit_code == 1
    assert refused.stderr.endswith("nowhere/spy.html: no such file or directory\n")


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
            "a:1 to b:2 ESTABLISHED, 7 bytes unacknowledged",
        ),
    ],
)
def test_kernel_evidence_in_words(
    make_evidence: MakeEvidence, make_rank: MakeRank, sample: dict[str, Any], name: str, words: str
) -> None:
    page = page_of(make_evidence([make_rank(0, "a@/src/p.py:1", sample=sample)]))
    assert words in page.told(0, "facts")[name]


def test_the_page_says_what_it_rests_on(make_rank: MakeRank, make_evidence: MakeEvidence) -> None:
    evidence = make_evidence([make_rank(0, "work@/src/train.py:5")], time=1795657415.0)
    page = render_page(evidence, judge(evidence), Path("/runs/night/spy/20261126-014335Z"))
    said = "looked at 2026-11-26 01:43:35 UTC · evidence: /runs/night/spy/20261126-014335Z"
    assert f'<footer><p class="soft">bsl {__version__} · {said}</p></footer>' in page
    unknown = render_page(make_evidence([make_rank(0, "work@/src/train.py:5")]), judge(evidence))
    assert f'<footer><p class="soft">bsl {__version__}</p></footer>' in unknown
