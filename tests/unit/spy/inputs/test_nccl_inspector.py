"""Lines of NCCL's Inspector: one for each collective that has ended."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.inputs.nccl_inspector import read_inspector_lines
from bigsci_launch.spy.inputs.reading import Damaged, NotThis
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import State


def line(place: int, number: int, operation: str = "AllReduce", group: str = "0xab") -> dict[str, Any]:
    return {
        "header": {"id": group, "rank": place, "n_ranks": 4, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "n0", "pid": 4000 + place},
        "coll_perf": {"coll": operation, "coll_sn": number, "coll_msg_size_bytes": 64, "coll_exec_time_us": 9},
    }


def text_of(place: int, newest: int) -> str:
    lines = [line(place, 3, "AllGather"), *(line(place, number) for number in range(newest - 2, newest + 1))]
    return "".join(json.dumps(each) + "\n" for each in lines)


def by_markers(text: str) -> str:
    """Return lines as NVIDIA/nccl#2359 writes them: what describes the communicator is in a line of its own."""
    lines, group = [], None
    for each in map(json.loads, text.splitlines()):
        if each["header"]["id"] != group:
            group = each["header"]["id"]
            marker = {"header": each["header"], "metadata": each["metadata"], "dump_stats": {"coll_records": 1}}
            lines.append(marker)
        lines += [{"p2p_perf": {"p2p": "Send"}}, {"coll_perf": each["coll_perf"]}]
    return "".join(json.dumps(each) + "\n" for each in lines)


def test_one_header_for_many_lines_is_that_of_each() -> None:
    text = "".join(json.dumps(line(2, number, group=group)) + "\n" for group in ("0xab", "0xcd") for number in (7, 8))
    whole, marked = (read_inspector_lines(Path("a.log"), each.encode()) for each in (text, by_markers(text)))
    assert marked == whole
    counts = marked.readings[0].recorder
    assert counts is not None and set(counts["counts"]["of_rank"]) == {"0xab", "0xcd"}


def test_a_torn_header_hides_the_lines_that_belong_to_it() -> None:
    first, second = (by_markers(json.dumps(line(2, 7, group=group)) + "\n") for group in ("0xab", "0xcd"))
    data = f"{first}{second[5:]}".encode()
    recorder = read_inspector_lines(Path("a.log"), data).readings[0].recorder
    assert recorder is not None and set(recorder["counts"]["of_rank"]) == {"0xab"}


@pytest.mark.parametrize("torn", ["", '{"header": {"id": "0xab", "coll_perf'])
def test_the_process_that_has_finished_less_comes_first(tmp_path: Path, torn: str) -> None:
    for place in range(4):
        (tmp_path / f"n0-pid{4000 + place}.log").write_text(text_of(place, 17 if place == 2 else 18) + torn)
    found = judge(open_evidence([tmp_path]).evidence())
    assert (found.state, found.hang_class, found.suspects) == (State.UNKNOWN, None, ())
    assert all(word in found.claim for word in ("process 4002 (n0)", "finished all_reduce", "17", "3 others", "18"))
    assert found.look_first[0].rank == 2
    assert all("all_gather" not in text for text in (found.claim, *found.evidence))


def test_equal_numbers_are_no_sign_of_a_hang(tmp_path: Path) -> None:
    for place in range(4):
        (tmp_path / f"n0-pid{4000 + place}.log").write_text(text_of(place, 18))
    found = judge(open_evidence([tmp_path]).evidence())
    assert (found.state, found.look_first, found.if_hang) == (State.UNKNOWN, (), None)


def test_lines_without_a_number_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text('{"header": {}, "coll_perf": {}}\n')
    with pytest.raises(EvidenceError, match="Inspector"):
        open_evidence([tmp_path / "a.log"])


@given(st.lists(st.tuples(st.integers(0, 1 << 12), st.binary(max_size=9)), max_size=6))
def test_damage_is_no_traceback(changes: list[tuple[int, bytes]]) -> None:
    data = text_of(1, 18).encode()
    for at, piece in changes:
        at %= len(data)
        data = data[:at] + piece + data[at + len(piece) :]
    with suppress(NotThis, Damaged):
        assert read_inspector_lines(Path("a.log"), data).readings
