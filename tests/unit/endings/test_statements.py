"""Who says what in a log: labels, colours, tracebacks, and words of several lines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.endings.conclude import conclude
from bigsci_launch.endings.lines import UNKNOWN, Speaker, plain_line
from bigsci_launch.endings.statements import Statement, read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.entries import read_entries

ORDINARY = (Path(__file__).parent / "ordinary_lines.txt").read_text().splitlines()
FULL = "OSError: [Errno 28] No space left on device"
PIECES = [
    *(entry.fields["example"] for entry in read_entries("endings")),
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in f',
    "Root Cause (first observed failure):",
    "=======",
    "[rank99999999999999999999]: x",
    "srun: error: n1: tasks 0-999999999: Out Of Memory",
    "  exitcode  : -99999999999999999999 (pid: 1)",
    "\x1b[31m",
    "\x00",
    "",
]


def said(text: str, speaker: Speaker = UNKNOWN) -> tuple[Statement, ...]:
    return read_statements(text, "job.out", speaker, read_words()).statements


@pytest.mark.parametrize(
    ("line", "speaker"),
    [
        (f"3: {FULL}", Speaker(3)),
        (f" 12: {FULL}", Speaker(12)),
        (f"[rank3]: {FULL}", Speaker(3)),
        (f"[rank: 3] {FULL}", Speaker(3)),
        (f"[default2]:{FULL}", Speaker(local_rank=2)),
        (f"[node-0] {FULL}", Speaker(node="node-0")),
        (f"n7: 3: {FULL}", Speaker(3, "n7")),
        (f"[1,5]<stderr>:{FULL}", Speaker(5)),
        (f"(TrainWorker pid=7, ip=10.0.0.3) {FULL}", Speaker(node="10.0.0.3", pid=7)),
        (f"(Trainer(rank=2) pid=7, ip=10.0.0.3) {FULL}", Speaker(2, "10.0.0.3", pid=7)),
        (f"(raylet, ip=10.0.0.3) {FULL}", Speaker(node="10.0.0.3")),
        (f"2026-11-23T01:00:00.25Z [rank1]: {FULL}", Speaker(1)),
        (f"\x1b[31m[rank1]\x1b[0m: {FULL}", Speaker(1)),
        (FULL, UNKNOWN),
    ],
)
def test_a_label_says_who_speaks(line: str, speaker: Speaker) -> None:
    found = plain_line(line, UNKNOWN)
    assert (found.text, found.speaker) == (FULL, speaker)
    assert [each.speaker for each in said(line)] == [speaker]


def test_labels_of_a_launcher_are_no_ranks() -> None:
    told = read_statements(f"1: {FULL}\n1: [rank5]: {FULL}\n", "a", UNKNOWN, read_words())
    assert (set(told.ranks), [each.by for each in told.statements]) == ({1, 5}, [1, 5])
    closing = (
        "1: W0726 1 torch/distributed/elastic/multiprocessing/api.py:858] Sending process 14 closing signal SIGTERM"
    )
    told = read_statements(f"1: {FULL}\n1: [rank5]: {FULL}\n{closing}\n", "a", UNKNOWN, read_words())
    assert (set(told.ranks), [each.by for each in told.statements]) == ({5}, [None, 5, None])


def test_a_line_of_source_in_a_traceback_says_nothing() -> None:
    frames = '  File "a.py", line 1\n    raise OSError("No space left on device")'
    text = f"Traceback (most recent call last):\n{frames}\nKeyError: 1"
    assert [(each.word.name, each.line) for each in said(text)] == [("python: exception", 4)]


def test_an_exception_needs_its_traceback() -> None:
    assert not said("ValueError: printed by a program that goes on")


def test_tracebacks_of_ranks_may_be_mixed() -> None:
    header = "Traceback (most recent call last):"
    text = f"0: {header}\n1: {header}\n1: KeyError: 1\n0: ValueError: 2\n"
    assert [(each.by, each.named["what"]) for each in said(text)] == [(1, "KeyError: 1"), (0, "ValueError: 2")]


def test_tracebacks_without_labels_may_be_mixed() -> None:
    header = "Traceback (most recent call last):"
    others = "INFO: step\nloss: 2.5\nEpoch: 3\n"
    text = f"{header}\nstep 3\n{header}\n  f()\n{others}KeyError: 1\n    x\nValueError: 2\nstep: 6\n"
    assert [each.named["what"] for each in said(text)] == ["KeyError: 1", "ValueError: 2"]
    endless = f"{header}\n" + "step 3\n" * 40 + "step: 6\n"
    assert not said(endless)


def test_lines_of_two_tables_may_be_mixed() -> None:
    table = ["Root Cause (first observed failure):", "  time      : 2026-11-27_05:37:4{0}", "  host      : n{0}"]
    table += ["  rank      : {0} (local_rank: 0)", "  exitcode  : -9 (pid: 5{0})", "=" * 20]
    text = "\n".join(f"{task}: {line.format(task)}" for line in table for task in (1, 2))
    found = [each for each in said(text) if each.word.name == "torchrun: root cause"]
    assert [(each.named_ranks, each.named["node"]) for each in found] == [((1,), "n1"), ((2,), "n2")]


def test_what_only_looks_like_a_table_is_read_as_any_lines() -> None:
    assert [each.word.name for each in said(f"time      : 12 s\n{FULL}\n")] == ["disk: full"]


def test_a_pid_of_two_nodes_is_the_rank_of_neither() -> None:
    label = "(Trainer(rank={}) pid=7, ip=10.0.0.{})"
    died = "ray.exceptions.ActorDiedError: The actor died\n\tpid: 7\n\tip: 10.0.0.{}\nThe actor is dead\n"
    one, other = (label.format(number, number) + " step 1\n" for number in (3, 4))
    both = one + other
    for text, ranks in ((one + died.format(3), (3,)), (both + died.format(4), (4,)), (both + died.format(5), ())):
        assert [each.named_ranks for each in said(text) if each.word.name == "ray: actor died"] == [ranks]


def test_the_line_above_a_traceback_gives_its_time() -> None:
    text = "Traceback (most recent call last):\nKeyError: 1\n"
    first, second = said(
        f"2026-11-27 06:03:33,5 ERROR [rank 3] failed\n{text}2026-11-27 06:03:35 error on rank 0\n{text}"
    )
    assert (first.by, second.by) == (3, 0)
    assert first.moment is not None and second.moment == first.moment + 1.5


def test_who_prints_on_as_before_has_survived() -> None:
    before, after = "0: step 1 loss 2.5\n", "0: step {} loss 1e-3\n"
    text = f"{before}0: Traceback (most recent call last):\n0: KeyError: 1\n"
    assert conclude(said(text + "".join(after.format(step) for step in range(3)))).kind == "unknown"
    assert conclude(said(text + "".join(after.format(step) for step in range(2)))).kind == "crashed"
    assert conclude(said(text + "0: cleaning up\n0: uploading\n0: bye\n")).kind == "crashed"
    unlabelled = text.replace("0: ", "") + "".join(after.format(step) for step in range(9)).replace("0: ", "")
    assert conclude(said(unlabelled)).kind == "crashed", "others may have printed them"


def test_who_prints_on_has_survived() -> None:
    steps = "".join(f"1: step {number}\n" for number in range(60))
    text = f"0: Traceback (most recent call last):\n0: KeyError: 1\n{steps}"
    assert [each.printed_after for each in said(text)] == [0]
    assert [each.printed_after for each in said(text.replace("1: step", "0: step"))] == [60]
    assert conclude(said(text)).kind == "crashed"
    assert conclude(said(text.replace("1: step", "0: step"))).kind == "unknown"


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=60)), max_size=30))
def test_any_text_has_an_answer(lines: list[str]) -> None:
    found = conclude(said("\n".join(lines)))
    assert found.kind
    assert found.sentence


@given(st.sampled_from(PIECES), st.binary(max_size=40), st.integers(0, 200))
def test_damaged_lines_have_an_answer(line: str, damage: bytes, at: int) -> None:
    raw = line.encode()
    assert conclude(said((raw[:at] + damage + raw[at:]).decode("utf-8", "replace"))).kind


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_ends_nothing(line: str) -> None:
    assert not said(line)


@pytest.mark.parametrize(
    ("line", "speaker"),
    [
        ("[1,0]<stderr>:5: [allreduce.x]", Speaker(0)),
        ("[0]<stderr>:5: [allreduce.x]", Speaker(0)),
        ("Sep 14 09:14:51 gpu-d21 kernel: nvidia-nvswitch2: up", Speaker(node="gpu-d21")),
        ("nvme0n1: up", UNKNOWN),
    ],
)
def test_what_is_below_a_label_is_no_label(line: str, speaker: Speaker) -> None:
    assert plain_line(line, UNKNOWN).speaker == speaker


@pytest.mark.parametrize(
    "piece", ["from 10.0.0.1 ", "NET/IB : Got completion ", "Rank 1] ", "(", "a" * 9, " \t", "[rank1]: "]
)
def test_no_line_takes_long(piece: str) -> None:
    held = " ".join(hint for hint, _ in read_words().hints)
    line = (held + piece * 100_000)[:200_000]
    before = time.process_time()
    said(f"{line}\n{line[::-1]}")
    assert time.process_time() - before < 2.0


def test_only_a_sure_word_says_that_it_finished_after_a_failure() -> None:
    text = "[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 1\n" + "x\n" * 12
    assert conclude(said(f"{text}training finished\n")).kind == "finished"
    assert conclude(said(f"{text}upload of the report: done\n")).kind == "crashed"
    assert conclude(said("x\n" * 12 + "[RANK 0] done\n")).kind == "finished"
