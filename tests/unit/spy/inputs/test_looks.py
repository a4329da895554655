"""Several dumps of the same processes by other tools: they are several looks, and say no more than they know."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from bigsci_launch.spy.evidence.numbering import NumberedBy, Numbering
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.inputs.gather import MOST_LOOKS, open_evidence
from bigsci_launch.spy.inputs.looks import node_of, said_time
from bigsci_launch.spy.judge.case import JobCase
from bigsci_launch.spy.judge.facts import elapsed_s, frames_moved, still_s, stood_s, was_seen_twice
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.show.document import to_document
from bigsci_launch.spy.taxonomy import State
from tests.support.texts import has_parts

RECORDED = Path(__file__).parents[1] / "recordings" / "one-look"
ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
BEGAN_S = 1_790_000_000


def text_of(*places: str) -> str:
    """Text of py-spy of processes that are in `all_reduce`, each called from a place of its own."""
    return "".join(
        f'Process {pid}: python train.py\nPython v3.11.7 (python)\n\nThread {pid} (idle): "MainThread"\n'
        f"    {ALL_REDUCE}\n    {place}\n    <module> (train.py:120)\n"
        for pid, place in enumerate(places, 100)
    )


REDUCES, LATER = ["step (train.py:88)"] * 4, ["step (train.py:90)"] * 4


def write_looks(folder: Path, looks: Sequence[Sequence[str]], gap_s: float | None) -> Evidence:
    """One folder for each look; `gap_s` is the time between two looks, None where the files do not tell."""
    for number, places in enumerate(looks, 1):
        path = folder / f"look-{number}" / "trace-n0.out"
        path.parent.mkdir()
        path.write_text(text_of(*places))
        written_s = BEGAN_S + (gap_s or 0) * number
        os.utime(path, (written_s, written_s))
    return open_evidence([folder]).evidence()


@pytest.mark.parametrize("gap_s", [20.0, None])
def test_two_folders_are_two_looks(tmp_path: Path, gap_s: float | None) -> None:
    evidence = write_looks(tmp_path, [REDUCES, REDUCES], gap_s)
    assert len(evidence.ranks) == 4
    for seen in evidence.ranks:
        assert (was_seen_twice(seen), frames_moved(seen), elapsed_s(seen)) == (True, False, gap_s)
        assert (still_s(seen), stood_s(seen)) == (None, gap_s)
    conclusion = judge(evidence)
    assert (conclusion.state, conclusion.suspects) == (State.WAITING, ())


@pytest.mark.parametrize(
    ("names", "span_s"),
    [
        (("trace-n0-look-1.out", "trace-n0-look-2.out"), None),
        (("trace-n0.1.out", "trace-n0.2.out"), None),
        (("before.txt", "later.txt"), None),
        (("trace-n0-20261122-100500.out", "trace-n0-20261122-100620.out"), 80.0),
        (("rank-3-first.txt", "rank-3-second.txt"), None),
    ],
)
def test_two_files_of_one_process(tmp_path: Path, names: tuple[str, str], span_s: float | None) -> None:
    for name, place in zip(names, (REDUCES[0], LATER[0]), strict=True):
        (tmp_path / name).write_text(text_of(place))
        os.utime(tmp_path / name, (BEGAN_S, BEGAN_S))
    found = [seen for seen in open_evidence([tmp_path]).evidence().ranks if seen.samples]
    assert [(frames_moved(seen), elapsed_s(seen)) for seen in found] == [(True, span_s)]
    assert stood_s(found[0]) is None


def test_two_dumps_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "trace-n0.out").write_text(text_of(*REDUCES) + text_of(*LATER))
    evidence = open_evidence([tmp_path]).evidence()
    assert [(frames_moved(seen), elapsed_s(seen)) for seen in evidence.ranks] == [(True, None)] * 4
    assert judge(evidence).state is State.PROGRESSING


def test_equal_process_ids_on_two_nodes_are_no_second_look(tmp_path: Path) -> None:
    for node in ("n2", "n10"):
        (tmp_path / f"trace-{node}.out").write_text(text_of(*REDUCES))
    evidence = open_evidence([tmp_path]).evidence()
    assert [(seen.node, len(seen.samples)) for seen in evidence.ranks] == [("n2", 1)] * 4 + [("n10", 1)] * 4


@pytest.mark.parametrize(
    ("num_looks", "gap_s", "state"),
    [
        (2, 3600.0, State.WAITING),
        (3, 20.0, State.WAITING),
        (3, None, State.WAITING),
        (3, 149.0, State.WAITING),
        (3, 150.0, State.HANG),
    ],
)
def test_equal_stacks_are_a_hang_only_if_known_to_last(
    tmp_path: Path, num_looks: int, gap_s: float | None, state: State
) -> None:
    conclusion = judge(write_looks(tmp_path, [REDUCES] * num_looks, gap_s))
    assert (conclusion.state, conclusion.suspects) == (state, ())


@pytest.mark.parametrize("with_recorders", [False, True])
@pytest.mark.parametrize("name", ["healthy", "ddp-steps", "ddp-saves"])
def test_a_healthy_job_that_is_twice_at_one_place_is_no_hang(tmp_path: Path, name: str, with_recorders: bool) -> None:
    for number in (1, 2):
        look = Path(shutil.copytree(RECORDED / name, tmp_path / f"look-{number}"))
        if not with_recorders:
            for path in look.glob("nccl_trace_*"):
                path.unlink()
        for path in look.iterdir():
            os.utime(path, (BEGAN_S + 900 * number,) * 2)
    conclusion = judge(open_evidence([tmp_path]).evidence())
    assert conclusion.state in (State.WAITING, State.UNKNOWN, State.PROGRESSING)
    assert conclusion.suspects == ()


def test_recorders_of_two_looks_show_progress(tmp_path: Path) -> None:
    for number in (1, 2):
        look = Path(shutil.copytree(RECORDED / "healthy", tmp_path / f"look-{number}"))
        (look / "trace-n0.out").unlink()
    for path in (tmp_path / "look-1").glob("nccl_trace_*"):
        document = pickle.loads(path.read_bytes())
        document["entries"] = document["entries"][:-3]
        path.write_bytes(pickle.dumps(document))
    assert judge(open_evidence([tmp_path]).evidence()).state is State.PROGRESSING


def test_the_ranks_without_a_recorder_are_named(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "async-3", tmp_path / "some")
    for rank in (1, 2):
        (tmp_path / "some" / f"nccl_trace_rank_{rank}").unlink()
    conclusion = judge(open_evidence([tmp_path / "some"]).evidence("dp=4"))
    assert any(has_parts(line, "recorder", "ranks 1-2") for line in conclusion.missing)


@pytest.mark.parametrize(
    ("name", "numbered_by", "numbering"),
    [
        ("rank-3.txt", NumberedBy.FILES, Numbering.KNOWN),
        ("dump_17.txt", NumberedBy.FILE_ORDER, Numbering.GUESSED),
        ("trace-n0.out", NumberedBy.FILE_ORDER, Numbering.GUESSED),
        ("nccl_trace_rank_3", NumberedBy.FILES, Numbering.KNOWN),
        ("dump_17.pkl", NumberedBy.FILE_NUMBER, Numbering.GUESSED),
    ],
)
def test_what_numbers_a_rank(tmp_path: Path, name: str, numbered_by: NumberedBy, numbering: Numbering) -> None:
    if name.endswith((".txt", ".out")):
        (tmp_path / name).write_text(text_of(REDUCES[0]))
    else:
        shutil.copy(RECORDED / "healthy" / "nccl_trace_rank_3", tmp_path / name)
    evidence = open_evidence([tmp_path]).evidence()
    assert [seen.numbered_by for seen in evidence.ranks if seen.samples] == [numbered_by]
    assert to_document(evidence, judge(evidence))["coverage"]["numbering"] == numbering.value


def test_members_that_gloo_does_not_list_are_assumed(tmp_path: Path) -> None:
    for path in (RECORDED / "loader-2").glob("nccl_trace_*"):
        shutil.copy(path, tmp_path)
    evidence = open_evidence([tmp_path]).evidence()
    graph = JobCase.of(evidence).graph
    assert not graph.is_certain
    assert graph.surely_awaited <= {0, 2, 3}
    conclusion = judge(evidence)
    assert "assumed)" in conclusion.claim and any("assumed" in line for line in conclusion.missing)


def test_who_never_used_an_assumed_group_is_not_accused(tmp_path: Path) -> None:
    """Rank 1 waits in a group of ranks 1 and 3. Rank 0 never used it, and is in no collective."""
    for rank, path in enumerate(sorted((RECORDED / "async-3").glob("nccl_trace_*"))):
        document = pickle.loads(path.read_bytes())
        if rank == 0:
            document["entries"] = document["entries"][:-1]
        if rank in (0, 1):
            (tmp_path / path.name).write_bytes(pickle.dumps(document))
    conclusion = judge(open_evidence([tmp_path]).evidence())
    assert 0 not in [suspect.rank for suspect in (conclusion.if_hang or conclusion).suspects]


def test_a_rank_whose_recorder_has_a_call_open_is_in_that_call() -> None:
    """Rank 1 is in `Work.wait()`, which its stack does not show; rank 3 has left."""
    evidence = open_evidence([RECORDED / "async-3"]).evidence()
    assert JobCase.of(evidence).communicates(evidence.ranks[1]) is True
    assert judge(evidence).look_first[0].rank == 3


@pytest.mark.parametrize(
    ("name", "node"),
    [("trace-n0-look-2.out", "n0"), ("look-2.out", ""), ("host7_rank3.txt", "host7"), ("trace-n0.2.out", "n0")],
)
def test_the_node_in_the_name_of_a_look(name: str, node: str) -> None:
    assert node_of(Path(name)) == node


def test_times_in_names() -> None:
    assert said_time("trace-2026-11-22T10:05:00.out") == said_time("20261122_100500") == 1795341900.0
    assert said_time("dump-1795341900.txt") == 1795341900.0
    assert said_time("trace-n0.out") is said_time("20269922-100500") is None


def test_of_a_thousand_looks_some_are_judged_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    looks = [[f"work (train.py:{number})"] for number in range(1, 1000)]
    (tmp_path / "trace-n0.out").write_text("".join(text_of(*places) for places in looks))
    (seen,) = open_evidence([tmp_path]).evidence().ranks
    assert len(seen.samples) == MOST_LOOKS
    lines = [sample.threads[0].frames[1].line for sample in seen.samples if sample.threads]
    assert (lines[0], lines[-1]) == (1, 999) and lines == sorted(lines)
