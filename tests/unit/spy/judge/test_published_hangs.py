"""The hangs of BLOOM's chronicles, at their full size: one sentence says what took its engineers days."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.conclusion import Reason
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.known.library import name_hang, read_library
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "measurements" / "published-hangs.md"

EXPECTED = {
    "prequel": (
        [],
        "loss-broadcast-left-behind",
        (
            *("80 ranks (tp5-6; 2 of 8 on each of 40 nodes)", "broadcast", "pipeline-parallel"),
            *("240 ranks (tp0-4,7; 6 of 8 on each of 40 nodes)", "train_step", "train (training.py:915)"),
        ),
    ),
    "replica": ([4], "data-loader-thread-lock", ("rank 4 (jean-zay-iam48, dp1 pp0 tp0)", "_try_get_data", "15 ranks")),
    "evaluation": (
        [376],
        "data-loader-thread-lock",
        ("rank 376 (jean-zay-iam52, dp6 pp11 tp0)", "_try_get_data", "383 ranks"),
    ),
}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    path = ROOT / "benchmarks" / "published_hangs.py"
    spec = importlib.util.spec_from_file_location("published_hangs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_hangs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["bundle", "text"])
def rebuilt(request: pytest.FixtureRequest, program: ModuleType, tmp_path: Path) -> dict[str, tuple[Bundle, str]]:
    """Each hang with its topology, as a bundle or from the text that py-spy printed on each node."""
    found = {}
    for hang in program.HANGS:
        if request.param == "bundle":
            program.write_bundle(hang, tmp_path / hang.name)
            found[hang.name] = (read_bundle(tmp_path / hang.name), str(hang.topology))
        else:
            program.write_text(hang, tmp_path / hang.name)
            found[hang.name] = (open_evidence([tmp_path / hang.name]), str(hang.topology))
    return found


def test_one_sentence_says_what_took_days(rebuilt: dict[str, tuple[Bundle, str]]) -> None:
    library = read_library()
    assert set(rebuilt) == set(EXPECTED)
    for name, (suspects, signature, parts) in EXPECTED.items():
        bundle, topology = rebuilt[name]
        evidence = bundle.evidence(topology)
        conclusion = name_hang(evidence, judge(evidence), library)
        assert (conclusion.state.value, conclusion.suspects) == ("unknown", ()), "py-spy's text is one look"
        assert conclusion.if_hang is not None
        assert [one.rank for one in conclusion.look_first if one.reason is Reason.ACCUSED] == suspects
        assert conclusion.signature is not None
        assert conclusion.signature.name == signature
        assert has_parts(conclusion.claim, *parts)


def test_they_have_the_size_and_the_groups_that_are_published(program: ModuleType, tmp_path: Path) -> None:
    prequel, replica, evaluation = program.HANGS
    assert [(len(hang.nodes), hang.topology.world_size) for hang in program.HANGS] == [(40, 320), (2, 16), (48, 384)]
    for node in prequel.nodes:
        assert program.text_of(prequel, node).count("train (megatron/training.py:915)") == 6
    innermost = [next(program.frames_of(replica.stack(rank)))["function"] for rank in range(16)]
    assert innermost == ["broadcast"] * 4 + ["wait"] + ["broadcast"] * 3 + ["all_reduce"] * 4 + ["recv"] * 4
    listing = {
        node.removeprefix("jean-zay-"): [
            next(program.frames_of(evaluation.stack(rank)))["function"] for rank in evaluation.ranks_of(node)
        ]
        for node in evaluation.nodes
    }
    assert listing["iam03"] == ["broadcast"] * 8
    assert listing["iam06"] == ["send"] * 4 + ["broadcast"] * 4
    assert listing["iam50"] == ["all_reduce"] * 8
    assert listing["iam52"] == ["wait"] + ["broadcast"] * 3 + ["all_reduce"] * 4
    assert len({tuple(functions) for functions in listing.values()}) == 4


def test_other_ranks_of_a_node_on_another_side_change_nothing(program: ModuleType) -> None:
    """It is not published which two processes of a node stayed behind: whichever it was, nobody is accused."""
    prequel = program.HANGS[0]
    nodes = []
    for index, node in enumerate(prequel.nodes):
        ranks = [program.rank_document(prequel, rank) for rank in prequel.ranks_of(node)]
        stacks = [rank["samples"] for rank in ranks]
        shift = index % 8
        for rank, samples in zip(ranks, stacks[shift:] + stacks[:shift], strict=True):
            rank["samples"] = samples
        nodes.append({"node": node, "clock_ticks_per_s": 100, "problems": [], "ranks": ranks})
    evidence = Bundle({"topology": str(prequel.topology)}, tuple(nodes)).evidence()
    conclusion = judge(evidence)
    assert (conclusion.hang_class, conclusion.suspects) == (HangClass.PHASES_SPLIT, ())
    assert has_parts(conclusion.claim, "80 ranks (2 of 8", "40 nodes)", "broadcast")
