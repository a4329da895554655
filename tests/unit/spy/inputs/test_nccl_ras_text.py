"""Reports of NCCL's RAS as text, in the forms of NCCL 2.24 to 2.31."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.inputs.nccl_ras_text import MOST_MISSING, read_ras_text
from bigsci_launch.spy.inputs.reading import NotThis
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import State

SUMMARY = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8
"""
TABLE = """
Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {world}
    1         2         2         2         4         8   RUNNING  {parts}
"""
BEHIND = """
Warnings
========

#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 31
  Rank 5 has launched up to operation 30 -- GPU 1 managed by process 4105 on node n1
"""
OLDER = """
#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 31
  2 ranks have not launched any operations
  Rank 2 -- GPU 2 managed by process 4002 on node n0
  Rank 6 -- GPU 2 managed by process 4106 on node n1
"""
IN_A_PART = """
#1-1 (0f1e2d3c4b5a6978) MISMATCH
  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation 9
  Rank 3 has launched up to operation 8 -- GPU 3 managed by process 4107 on node n1
"""
TIE = """
#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different AllReduce operation counts
  4 ranks have launched up to operation 31
  4 ranks have launched up to operation 30
"""
SILENT = """
Errors
======

{kind}
  Missing communicator data from 1 job process
  Process 4105 on node n1 managing GPU 1

#0-0 (a1b2c3d4e5f60718) INCOMPLETE
  Missing communicator data from 1 rank
  {which}
"""
STATUS = """
#0-0 (a1b2c3d4e5f60718) MISMATCH
  Communicator ranks have different status
  7 ranks have status RUNNING
  Rank 5 has status FINALIZE -- GPU 1 managed by process 4105 on node n1
"""


def text_of(details: str = "", world: str = "OK", parts: str = "OK") -> str:
    return SUMMARY + TABLE.format(world=world, parts=parts) + details


def conclusion_of(tmp_path: Path, text: str) -> Conclusion:
    (tmp_path / "ras.txt").write_text(text)
    return judge(open_evidence([tmp_path]).evidence())


@pytest.mark.parametrize("wrapped", [str, lambda text: "\n".join(f"> {line}" for line in text.split("\n"))])
def test_the_rank_that_has_launched_less_comes_first_and_is_not_accused(tmp_path: Path, wrapped: type[str]) -> None:
    found = conclusion_of(tmp_path, wrapped(text_of(BEHIND, world="MISMATCH")))
    assert (found.state, found.hang_class, found.suspects) == (State.UNKNOWN, None, ())
    assert [pointer.rank for pointer in found.look_first] == [5]
    assert found.look_first[0].hit_rate is None
    assert all(word in found.claim for word in ("rank 5 (n1)", "30 all_reduces", "7 others 31"))


def test_ranks_that_are_listed_below_their_number(tmp_path: Path) -> None:
    found = conclusion_of(tmp_path, text_of(OLDER, world="MISMATCH"))
    assert [pointer.rank for pointer in found.look_first] == [2, 6]
    assert all(word in found.claim for word in ("ranks 2,6", "no collectives", "6 others 31"))


def test_a_process_of_a_smaller_communicator_has_no_rank(tmp_path: Path) -> None:
    """RAS numbers the ranks of a communicator, and not those of the job."""
    found = conclusion_of(tmp_path, text_of(IN_A_PART, parts="MISMATCH"))
    assert all(word in found.claim for word in ("process 4107 (n1)", "8 all_gathers", "3 others 9"))


def test_no_rank_is_named_where_half_of_them_is_behind(tmp_path: Path) -> None:
    found = conclusion_of(tmp_path, text_of(TIE, world="MISMATCH"))
    assert all(word in found.claim for word in ("4 ranks", "30 all_reduces", "31"))
    assert found.look_first == ()


@pytest.mark.parametrize("kind", ["INCOMPLETE", "DEAD"])
@pytest.mark.parametrize(
    "which", ["The missing rank: 5", "Rank 5 -- GPU 1 managed by process 4105 on node n1"], ids=["2.24", "2.31"]
)
def test_a_rank_that_does_not_answer_is_named_with_its_process(tmp_path: Path, kind: str, which: str) -> None:
    (tmp_path / "ras.txt").write_text(text_of(SILENT.format(kind=kind, which=which), world="INCOMPLETE"))
    seen = open_evidence([tmp_path]).evidence().ranks[5]
    assert (seen.node, seen.pid) == ("n1", 4105)
    assert ("dead" in (seen.why_unreadable or "")) == (kind == "DEAD")
    found = judge(open_evidence([tmp_path]).evidence())
    assert [pointer.rank for pointer in found.look_first] == [5]


@pytest.mark.parametrize("details", ["", STATUS])
def test_equal_numbers_are_no_sign_of_a_hang(tmp_path: Path, details: str) -> None:
    found = conclusion_of(tmp_path, text_of(details))
    assert (found.state, found.look_first, found.if_hang) == (State.UNKNOWN, (), None)
    assert "8 ranks" in found.claim


@pytest.mark.parametrize("text", ["", "Job summary", "ranks per comm, says the manual of a Job summary", TABLE])
def test_what_is_no_report_is_left_to_others(text: str) -> None:
    with pytest.raises(NotThis):
        read_ras_text(Path("x.txt"), text.encode() if text != TABLE else b"Group  per comm")


def test_a_range_of_missing_ranks_is_bounded() -> None:
    text = text_of(SILENT.format(kind="INCOMPLETE", which="The missing ranks: 0-99999999,7"), world="INCOMPLETE")
    found = read_ras_text(Path("ras.txt"), text.encode())
    assert len(found.readings) == 8
    assert MOST_MISSING < 1 << 16


AHEAD = """
NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node n1
  Rank 13 -- GPU 5 managed by process 323033 on node n1
"""
"""Of NVIDIA/nccl#1911, with another name of the node."""
UNEQUAL_NODES = """
Job summary
===========

  Nodes  Processes         GPUs
          per node  per process
      1          8            1
      1          2            1

  Nodes  Processes         GPUs
(total)    (total)      (total)
      2         10           10

The outlier node:
  Node n1 running processes 60004,60035

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         1         2         1   RUNNING  INCOMPLETE
    1         4         1         1         2         1   RUNNING  MISMATCH
    2         4         0         0         0         0    NOCOMM  INCOMPLETE,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node n1 managing GPU 0

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node n1

#2-0 (93d7000200000001) INCOMPLETE
  Missing communicator data from 255 ranks
  Rank 1057455228 --
"""
"""Of NVIDIA/nccl#1762, cut off where the thread ends: RAS of 2.27.3 read memory that was not its own."""


def test_ranks_that_are_ahead_are_not_those_that_wait(tmp_path: Path) -> None:
    found = conclusion_of(tmp_path, AHEAD)
    assert found.state is State.UNKNOWN
    assert all(word in found.claim for word in ("ranks 12-13", "641 all_gathers", "30 others 640"))


def test_a_rank_that_cannot_be_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(UNEQUAL_NODES)
    evidence = open_evidence([tmp_path]).evidence()
    assert evidence.world_size is None or evidence.world_size < 1000
    assert [(seen.node, seen.pid) for seen in evidence.ranks if seen.pid is not None] == [("n1", 60004)]


@given(st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(max_size=12)), max_size=6), st.integers(0, 1 << 12))
def test_damage_is_no_traceback(changes: list[tuple[int, bytes]], cut: int) -> None:
    data = text_of(OLDER + IN_A_PART + SILENT.format(kind="DEAD", which="The missing ranks: 1,3-4")).encode()
    for at, piece in changes:
        at %= len(data)
        data = data[:at] + piece + data[at + len(piece) :]
    with suppress(NotThis):
        for reading in read_ras_text(Path("ras.txt"), data[: len(data) - cut]).readings:
            assert reading.why
