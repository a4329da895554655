"""Text of `py-spy dump`, as the engineers of a large training run collected it: one file per node."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.inputs.looks import node_of
from bigsci_launch.spy.inputs.reading import NotThis
from bigsci_launch.spy.inputs.stack_text import read_stack_text
from tests.support.texts import has_parts

LEFT = """Thread {pid} (active): "MainThread"
    train (megatron/training.py:915)
    pretrain (megatron/training.py:187)
    <module> (pretrain_gpt.py:239)
"""
INSIDE = """Thread {pid} (active): "MainThread"
    broadcast (torch/distributed/distributed_c10d.py:1191)
    _aggregate_total_loss (deepspeed/runtime/pipe/engine.py:540)
    train_batch (deepspeed/runtime/pipe/engine.py:330)
    <module> (pretrain_gpt.py:239)
Thread 0x7F3B2C (idle+gil): "Thread-1"
    wait (threading.py:306)
"""
LAUNCHER = """Process 99: python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py
Python v3.8.8 (/usr/bin/python3.8)

Thread 99 (idle): "MainThread"
    main (torch/distributed/launch.py:260)
"""
WORKER = """Process 300: python -u pretrain_gpt.py
Python v3.8.8 (/usr/bin/python3.8)

Thread 300 (idle): "MainThread"
    select (selectors.py:415)
    _worker_loop (torch/utils/data/_utils/worker.py:180)
    <module> (pretrain_gpt.py:239)
"""


def process(pid: int, stack: str, options: str = "") -> str:
    return f"Process {pid}: python -u pretrain_gpt.py{options}\nPython v3.8.8 (/usr/bin/python3.8)\n\n" + stack.format(
        pid=pid
    )


def test_processes_threads_and_frames(tmp_path: Path) -> None:
    path = tmp_path / "trace-r7i3n0.out"
    found = read_stack_text(path, (process(10, LEFT) + process(11, INSIDE)).encode())
    assert [(reading.node, reading.pid) for reading in found.readings] == [("r7i3n0", 10), ("r7i3n0", 11)]
    threads = found.readings[1].threads or []
    assert [(thread["tid"], thread["name"], thread["owns_gil"]) for thread in threads] == [
        (11, "MainThread", False),
        (0x7F3B2C, "Thread-1", True),
    ]
    assert threads[0]["frames"][0] == {
        "function": "broadcast", "file": "torch/distributed/distributed_c10d.py", "line": 1191,
    }  # fmt: skip
    assert len(threads[0]["frames"]) == 4


def test_launchers_and_data_loader_workers_are_no_ranks(tmp_path: Path) -> None:
    text = LAUNCHER + process(10, LEFT) + WORKER
    assert [reading.pid for reading in read_stack_text(tmp_path / "t", text.encode()).readings] == [10]


def test_an_excerpt_without_processes(tmp_path: Path) -> None:
    text = LEFT.format(pid=835990) + "\nsome words\n\n" + INSIDE.format(pid=835995)
    found = read_stack_text(tmp_path / "trace.txt", text.encode()).readings
    assert [reading.pid for reading in found] == [835990, 835995]


def test_locals_native_frames_and_processes_that_did_not_answer(tmp_path: Path) -> None:
    text = """Error: Failed to get process executable name. Check that the process is running.
Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    clock_nanosleep (libc.so.6)
    load (data.py:3)
        Arguments:
            a: 5
    <module> (train.py:9)
"""
    found = read_stack_text(tmp_path / "t", text.encode())
    frames = (found.readings[0].threads or [])[0]["frames"]
    assert [(frame["function"], frame["line"]) for frame in frames] == [("load", 3), ("<module>", 9)]
    assert [has_parts(problem, "py-spy: ", "process executable name") for problem in found.problems] == [True]


@pytest.mark.parametrize("text", ["", "Thread of a story\n", "Process 7: x\n", 'Thread 7 (idle): "MainThread"\n'])
def test_other_text_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotThis):
        read_stack_text(tmp_path / "t", text.encode())


@pytest.mark.parametrize(
    ("name", "node"), [("trace-r7i3n0.out", "r7i3n0"), ("trace_node-12.txt", "node-12"), ("jean-zay-3.out", "zay-3"),
                       ("n3.out", "n3")]
)  # fmt: skip
def test_the_name_of_the_file_is_the_node(name: str, node: str) -> None:
    assert node_of(Path(name)) == node


def test_ranks_are_counted_over_the_nodes_in_natural_order(tmp_path: Path) -> None:
    for node in (2, 10):
        stacks = [process(900 + index, INSIDE if index == 1 else LEFT) for index in range(3)]
        (tmp_path / f"trace-n{node}.out").write_text(LAUNCHER + "".join(stacks))
    (tmp_path / "notes.txt").write_text("we think that node 3 is slow\n")
    evidence = open_evidence([tmp_path]).evidence()
    assert [(seen.rank, seen.node, seen.pid) for seen in evidence.ranks[2:5]] == [
        (2, "n2", 902), (3, "n10", 900), (4, "n10", 901),
    ]  # fmt: skip
    operations = [seen.thread.operation if seen.thread else "" for seen in evidence.ranks]
    assert operations == [None, "broadcast", None, None, "broadcast", None]
    assert any("numbered" in problem for problem in evidence.problems)


def test_a_rank_that_did_not_answer_leaves_a_gap_where_the_command_line_numbers_the_others(tmp_path: Path) -> None:
    for node, locals_ in (("n1", (0, 1, 2)), ("n2", (0, 2))):
        text = "".join(process(10 + local, LEFT, f" --local_rank={local}") for local in locals_)
        (tmp_path / f"trace-{node}.out").write_text(text)
    evidence = open_evidence([tmp_path]).evidence("dp=6")
    assert [seen.rank for seen in evidence.ranks if seen.threads is None] == [4]
    assert str(evidence.coordinate(5)) == "dp5 pp0 tp0"


def test_of_a_long_text_the_end_is_read_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigsci_launch.spy.inputs.stack_text.MOST_BYTES", 4000)
    text = "".join(f"Process {pid}: python t.py\n{LEFT.format(pid=pid)}" for pid in range(100, 200))
    found = read_stack_text(tmp_path / "all.txt", text.encode())
    assert 10 < len(found.readings) < 40 and found.readings[-1].pid == 199
    assert any("all.txt" in problem and "last" in problem for problem in found.problems)
    assert not read_stack_text(tmp_path / "all.txt", text[:3000].encode()).problems


@pytest.mark.parametrize("unit", [b"\n", b"\0", b"3: \n", b"step 4 loss 2.1\n"])
def test_what_holds_no_stack_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch, unit: bytes) -> None:
    monkeypatch.setattr("bigsci_launch.spy.inputs.stack_text.passages_of", lambda data: pytest.fail("it was"))
    with pytest.raises(NotThis):
        read_stack_text(Path("rank-0.txt"), unit * 1000)
