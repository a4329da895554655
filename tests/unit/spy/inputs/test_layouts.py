"""The layouts in which people hand over stacks: as terminals, schedulers, forums and debuggers write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.errors import EvidenceError
from bigsci_launch.spy.evidence.numbering import NumberedBy, Numbering
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.inputs.layout import passages_of, unpack
from bigsci_launch.spy.inputs.pyspy_json import read_pyspy_json
from bigsci_launch.spy.inputs.reading import Damaged, NotThis
from bigsci_launch.spy.inputs.stack_text import read_stack_text
from bigsci_launch.spy.inputs.unread import describe
from bigsci_launch.spy.judge.conclusion import Reason
from bigsci_launch.spy.judge.verdict import judge
from tests.support.texts import has_parts

Wrap = Callable[[str], str]
TORCH = "torch/distributed/distributed_c10d.py"
WAITS = ("all_reduce", TORCH, 2501), ("step", "train.py", 40)
READS = ("read_shard", "data.py", 88), ("step", "train.py", 31)


def dump(pid: int, *calls: tuple[str, str, int], command: str = "python -u train.py") -> str:
    lines = "".join(f"    {name} ({file}:{line})\n" for name, file, line in (*calls, ("<module>", "train.py", 9)))
    head = f"Process {pid}: {command}\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
    return f'{head}Thread {pid} (active): "MainThread"\n{lines}'


FOUR = [dump(70 + rank, *(READS if rank == 2 else WAITS)) for rank in range(4)]


def labelled(text: str, label: str) -> str:
    return "".join(f"{label}{line}\n" for line in text.splitlines())


def evidence_of(folder: Path, text: str | bytes, name: str = "all.txt") -> Evidence:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return open_evidence([folder / name]).evidence()


def seen_in(evidence: Evidence) -> list[tuple[int | None, str | None]]:
    """Pid and operation of each rank."""
    return [(seen.pid, seen.thread.operation if seen.thread else None) for seen in evidence.ranks]


EXPECTED = [(70, "all_reduce"), (71, "all_reduce"), (72, None), (73, "all_reduce")]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: labelled(text, "> "),
        lambda text: labelled(text, "> > ").replace("> > \n", ">>\n"),
        lambda text: "".join(f"   {line:<90}\n" for line in text.splitlines()),
        lambda text: text.replace("    ", "\t"),
        lambda text: text.replace("Thread", "\x1b[1mThread\x1b[0m").replace("    ", "    \x1b[38;5;2m"),
        lambda text: "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.splitlines(), 1)),
        lambda text: "".join(f"dump.txt:{line}\n" for line in text.splitlines()),
        lambda text: labelled(text, "2026-11-27T03:12:09.123456Z "),
        lambda text: labelled(text, "[03:12:09] "),
        lambda text: "we saw this:\n```\n" + text + "```\n",
        lambda text: text.replace("    ", "\xa0\xa0\xa0\xa0"),
        lambda text: "\ufeff" + text,
        lambda text: "".join(line.strip() + "\n" for line in text.splitlines()),
    ],
    ids=[
        *("crlf", "quote", "nested-quote", "padded", "tabs", "colours", "numbered", "grep", "dates", "times"),
        *("prose", "no-break-blanks", "mark", "flat"),
    ],
)  # fmt: skip
def test_what_a_text_was_wrapped_in_is_taken_off(tmp_path: Path, wrap: Wrap) -> None:
    assert seen_in(evidence_of(tmp_path, wrap("".join(FOUR)))) == EXPECTED


def test_compressed_and_wide_text(tmp_path: Path) -> None:
    text = "".join(FOUR)
    assert seen_in(evidence_of(tmp_path, gzip.compress(text.encode()), "all.txt.gz")) == EXPECTED
    assert seen_in(evidence_of(tmp_path, text.encode("utf-16"), "wide.txt")) == EXPECTED
    assert len(unpack(gzip.compress(bytes(1 << 20)), 1 << 10)) == 1 << 10


def test_the_label_of_a_task_is_its_rank(tmp_path: Path) -> None:
    parts = [labelled(FOUR[rank], f"{rank}: ").splitlines() for rank in (3, 1, 0, 2)]
    mixed = "".join(f"{line}\n" for lines in zip(*parts, strict=True) for line in lines)
    evidence = evidence_of(tmp_path, mixed)
    assert seen_in(evidence) == EXPECTED
    assert evidence.numbering is Numbering.KNOWN


def test_a_task_with_several_processes_is_a_node(tmp_path: Path) -> None:
    text = labelled("".join(FOUR[:2]), "0: ") + labelled("".join(FOUR[2:]), "1: ")
    evidence = evidence_of(tmp_path, text)
    assert seen_in(evidence) == EXPECTED
    assert [seen.node for seen in evidence.ranks] == ["task-0", "task-0", "task-1", "task-1"]
    assert evidence.numbering is Numbering.GUESSED


@pytest.mark.parametrize(
    ("label", "nodes"),
    [("[node-{}] ", ["node-0", "node-1"]), ("gpu{}: ", ["gpu0", "gpu1"]), ("worker-{}  | ", ["worker-0", "worker-1"]),
     ("[pod/train-{}/torch] ", ["train-0", "train-1"])],
)  # fmt: skip
def test_the_label_of_a_node_is_kept(tmp_path: Path, label: str, nodes: list[str]) -> None:
    text = labelled("".join(FOUR[:2]), label.format(0)) + labelled("".join(FOUR[2:]), label.format(1))
    evidence = evidence_of(tmp_path, text)
    assert seen_in(evidence) == EXPECTED
    assert [seen.node for seen in evidence.ranks] == [nodes[0], nodes[0], nodes[1], nodes[1]]


@pytest.mark.parametrize("label", ["[rank{}]: ", "[1,{}]<stdout>:", "0: [rank{}]: "])
def test_the_label_of_a_rank_is_kept(tmp_path: Path, label: str) -> None:
    evidence = evidence_of(tmp_path, "".join(labelled(FOUR[rank], label.format(rank)) for rank in (3, 2, 1, 0)))
    assert (seen_in(evidence), evidence.numbering) == (EXPECTED, Numbering.KNOWN)


def test_the_label_of_node_and_local_rank_is_kept(tmp_path: Path) -> None:
    evidence = evidence_of(
        tmp_path, "".join(labelled(FOUR[rank], f"[n{rank // 2}:{rank % 2}]: ") for rank in (3, 2, 1, 0))
    )
    assert seen_in(evidence) == EXPECTED
    assert [seen.node for seen in evidence.ranks] == ["n0", "n0", "n1", "n1"]


def stack_only(rank: int, tid: str) -> str:
    return FOUR[rank].split("\n\n")[1].replace(f"Thread {70 + rank}", f"Thread {tid}")


def test_separators_name_node_and_process_and_not_the_rank(tmp_path: Path) -> None:
    text = "".join(
        f"===== n{rank // 2} PID {70 + rank} =====\n{stack_only(rank, f'0x7F4A{rank}')}" for rank in range(4)
    )
    evidence = evidence_of(tmp_path, text)
    assert seen_in(evidence) == EXPECTED
    assert evidence.name(2) == "process 72 (n1)"


def test_separators_that_name_the_rank(tmp_path: Path) -> None:
    text = "".join(f"--- rank {rank} ---\n{FOUR[rank]}" for rank in (2, 0, 3, 1))
    evidence = evidence_of(tmp_path, text)
    assert (seen_in(evidence), evidence.numbering) == (EXPECTED, Numbering.KNOWN)
    heads = "".join(f"==> dumps/rank-{rank}.txt <==\n{FOUR[rank]}" for rank in (2, 0, 3, 1))
    assert evidence_of(tmp_path, heads, "heads.txt").numbering is Numbering.KNOWN


def test_a_place_in_the_text_is_no_rank(tmp_path: Path) -> None:
    evidence = evidence_of(tmp_path, "".join(stack_only(rank, f"0x7F4A{rank}") for rank in range(4)))
    assert [seen.thread.operation if seen.thread else "" for seen in evidence.ranks][1:3] == ["all_reduce", None]
    assert {seen.numbered_by for seen in evidence.ranks} == {NumberedBy.FILE_ORDER}
    assert evidence.names([2]) == "process #3"


# ------------------------------------------------------------------------------------------- other tools


FAULT = """Timeout (0:05:00)!
Thread 0x00007f24{0}fb36c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get

Current thread 0x00007f24{0}fd4740 (most recent call first):
  File "{1}", line {2} in {3}
  File "/src/train.py", line 40 in step
"""


def fault(rank: int, moment: int = 1) -> str:
    function, file, line = (READS if rank == 2 else WAITS)[0]
    return FAULT.format(f"{moment}{rank}", f"/site-packages/{file}", line, function)


def test_stacks_of_faulthandler_in_the_logs_of_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        log = f"step 12 loss 3.1\n{fault(rank)}step 13\nTraceback (most recent call last):\n"
        log += f'  File "/src/other.py", line 1, in other\n{fault(rank, 2)}'
        log += 'Traceback (most recent call last):\n  File "/src/other.py", line 1, in other\nValueError\n'
        (tmp_path / f"rank-{rank}.log").write_text(labelled(log, f"[rank{rank}]: "))
    evidence = open_evidence([tmp_path]).evidence()
    assert seen_in(evidence) == [(None, operation) for _, operation in EXPECTED]
    assert [[len(thread.frames) for thread in seen.threads or ()] for seen in evidence.ranks] == [[2, 2]] * 4
    assert [(seen.threads or ())[0].name for seen in evidence.ranks] == ["MainThread"] * 4
    assert [(seen.threads or ())[0].frames[1].function for seen in evidence.ranks] == ["step"] * 4
    assert evidence.ranks[2].place == "read_shard (data.py:88)"


def test_stacks_of_faulthandler_of_several_processes_one_after_the_other(tmp_path: Path) -> None:
    end = '  File "/src/train.py", line 9 in <module>\n'
    text = "".join(fault(rank).split("!\n")[1] + end for rank in range(4))
    evidence = evidence_of(tmp_path, text)
    assert [operation for _, operation in seen_in(evidence)] == [operation for _, operation in EXPECTED]
    assert [len(seen.threads or ()) for seen in evidence.ranks] == [2] * 4


def test_the_dump_of_torchs_debug_server(tmp_path: Path) -> None:
    parts = [f"=== Rank {rank}: http://n{rank}:25999 ===\n{fault(rank)}" for rank in range(3)]
    evidence = evidence_of(tmp_path, "".join(parts) + "=== Rank 3: http://n3:25999 ===\nError: 503\n", "stacks_1.txt")
    assert [seen.node for seen in evidence.ranks] == ["n0", "n1", "n2", "n3"]
    assert [seen.thread.operation if seen.thread else "" for seen in evidence.ranks] == [
        "all_reduce", "all_reduce", None, "",
    ]  # fmt: skip
    assert has_parts(evidence.ranks[3].why_unreadable or "", "503")


GDB = """[New LWP {lwp}]
Thread 2 (Thread 0x7f33 (LWP {lwp}) "pt_nccl"):
#0  0x00007f68194a8adf in poll () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f68194b5a27 in start_thread () from /lib/x86_64-linux-gnu/libc.so.6

Thread 1 (Thread 0x7f68 (LWP {pid}) "python"):
#0  0x00007f68194a8adf in clock_nanosleep () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f67471b224b in ?? () from {library}
#2  0x00007f67471be402 in {call} (comm=0x1, count=5) from {library}
#3  0x00007f67a9ff6236 in c10d::(anonymous namespace)::go(std::vector<int>&, int) () from /site/libtorch_cuda.so
"""


def test_native_stacks_of_gdb(tmp_path: Path) -> None:
    calls = [("pncclAllReduce", "/usr/lib/libnccl.so.2"), ("PMPI_Bcast_c", "/usr/lib/libmpi.so.12"),
             ("wait_file.isra.0", "/usr/lib/libfs.so")]  # fmt: skip
    for rank, (call, library) in enumerate(calls):
        text = GDB.format(pid=70 + rank, lwp=700 + rank, call=call, library=library)
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    evidence = open_evidence([tmp_path]).evidence()
    assert seen_in(evidence) == [(70, "all_reduce"), (71, "broadcast"), (72, None)]
    assert evidence.ranks[0].place == "c10d::go (libtorch_cuda.so)"
    assert [frame.function for frame in evidence.ranks[2].thread.frames][:2] == ["clock_nanosleep", "wait_file"]  # type: ignore[union-attr]


def test_a_bare_backtrace_and_one_with_frames_of_python(tmp_path: Path) -> None:
    text = "#0  0x00007f in poll () from /lib/libc.so.6\n#7  0x00007f in PMPI_Barrier () from /lib/libmpi.so.12\n"
    python = "#4  Frame 0x7f1, for file /src/data.py, line 88, in read_shard (x=1)\n#9  0x00007f in main ()\n"
    (tmp_path / "rank-0.txt").write_text("0x00007f in poll () from /lib/libc.so.6\n" + text)
    (tmp_path / "rank-1.txt").write_text("#0  0x00007f in poll () from /lib/libc.so.6\n" + python)
    evidence = open_evidence([tmp_path]).evidence()
    assert evidence.ranks[0].thread is not None and evidence.ranks[0].thread.operation == "barrier"
    assert evidence.ranks[1].place == "read_shard (data.py:88)"


PYSTACK = """Traceback for thread {tid} (pt_worker) [] (most recent call last):
    (Python) File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
        self._bootstrap_inner()
    (Python) File "/usr/lib/python3.11/queue.py", line 171, in get

Traceback for thread {pid} (python) [Has the GIL,Garbage collecting] (most recent call last):
    (C) File "???", line 0, in _start (/usr/bin/python3.11)
    (Python) File "/src/train.py", line 9, in <module>
        main()
    (Python) File "{file}", line {line}, in {function}
        work()

"""


def test_stacks_of_pystack(tmp_path: Path) -> None:
    text = ""
    for rank in range(4):
        function, file, line = (READS if rank == 2 else WAITS)[0]
        text += PYSTACK.format(pid=70 + rank, tid=170 + rank, file=f"/site/{file}", line=line, function=function)
    evidence = evidence_of(tmp_path, "".join(f"=== pid {70 + n} ===\n{part}" for n, part in enumerate(halves(text))))
    assert seen_in(evidence) == EXPECTED
    assert [frame.line for frame in evidence.ranks[2].thread.frames] == [88, 9]  # type: ignore[union-attr]


def halves(text: str) -> list[str]:
    parts = text.split("Traceback for thread ")[1:]
    return ["".join(f"Traceback for thread {part}" for part in parts[at : at + 2]) for at in range(0, len(parts), 2)]


def test_ray_stack(tmp_path: Path) -> None:
    commands = ["ray::RayTrainWorker.run", "ray::RayTrainWorker.run", "ray::RayTrainWorker.run", "ray::IDLE"]
    text = "".join(
        f"Stack dump for me  {70 + rank}  0.1  2.0  99 88 ?  Sl  10:00  0:01 {command}\n"
        + dump(70 + rank, *(READS if rank == 2 else WAITS), command=command)
        + "\n"
        for rank, command in enumerate(commands)
    )
    evidence = evidence_of(tmp_path, text)
    assert seen_in(evidence) == EXPECTED[:3]
    assert [(other.pid, other.role) for other in evidence.others] == [(73, "helper")]


def json_dump(pid: int, *calls: tuple[str, str, int], command: str | None = None, parent: int | None = None) -> str:
    frames = [{"name": name, "filename": f"/site/{file}", "short_filename": file, "line": line, "locals": None}
              for name, file, line in calls]  # fmt: skip
    about = {"pid": pid, "command_line": command, "parent": {"pid": parent} if parent else None} if command else None
    thread = {"pid": pid, "thread_id": 140 + pid, "thread_name": "MainThread", "os_thread_id": pid, "active": True,
              "owns_gil": False, "frames": frames, "process_info": about}  # fmt: skip
    return json.dumps([thread], indent=2)


def test_json_of_py_spy(tmp_path: Path) -> None:
    dumps = [json_dump(70 + rank, *(READS if rank == 2 else WAITS)) for rank in range(4)]
    assert seen_in(evidence_of(tmp_path, "\n".join(dumps), "trace-n0.json")) == EXPECTED
    for rank, text in enumerate(dumps):
        (tmp_path / f"rank-{3 - rank}.json").write_text(text)
    evidence = open_evidence(sorted(tmp_path.glob("rank-*.json"))).evidence()
    assert (seen_in(evidence), evidence.numbering) == (EXPECTED[::-1], Numbering.KNOWN)


def test_a_child_that_json_names_is_no_rank(tmp_path: Path) -> None:
    child = json_dump(90, ("push", "save.py", 3), command="python -u other.py", parent=70)
    evidence = evidence_of(tmp_path, "\n".join([json_dump(70, *WAITS), json_dump(71, *READS), child]))
    assert [seen.pid for seen in evidence.ranks] == [70, 71]
    assert [(other.pid, other.role) for other in evidence.others] == [(90, "helper")]


# ------------------------------------------------------------------------------------------- what is none of it


def test_the_error_shows_what_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "a.cfg").write_text("size = 3\n")
    (tmp_path / "rank-0.log").write_text("[rank0]:[E419 10:42:28 ProcessGroupNCCL.cpp:616] Watchdog caught a timeout\n")
    with pytest.raises(EvidenceError) as caught:
        open_evidence([tmp_path])
    assert has_parts(caught.value.message, "rank-0.log", "Watchdog")
    assert has_parts(caught.value.hint or "", f"bsl why {tmp_path}", "py-spy")
    with pytest.raises(EvidenceError) as caught:
        open_evidence([tmp_path / "a.cfg"])
    assert has_parts(caught.value.message, "size = 3") and "bsl why" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("data", "part"),
    [(b"", "empty"), (b" \n", "empty"), (b"\xfd7zXZ\0\0\4", "xz"), (bytes(64), "no text"), (b"a\x1b[2Jb\nc", "ab / c")],
)
def test_what_a_file_is(data: bytes, part: str) -> None:
    assert has_parts(describe(data).words, part)


KINDS = st.sampled_from(
    [
        *FOUR,
        fault(1),
        GDB,
        PYSTACK,
        json_dump(7, *WAITS),
        "===== n0 PID 7 =====\n",
        "3: ",
        "> ",
        "\x1b[",
        "Error: Failed to ",
    ]
)
TEXTS = st.lists(st.one_of(KINDS, st.text(max_size=40)), max_size=6).map("\n".join)


@given(text=TEXTS, cuts=st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=6)), max_size=6))
def test_no_text_is_too_strange(text: str, cuts: list[tuple[int, bytes]]) -> None:
    data = text.encode("utf-8", "surrogatepass")
    for at, put in cuts:
        data = data[:at] + put + data[at + 3 :]
    for read in (read_stack_text, read_pyspy_json):
        try:
            found = read(Path("rank-3.txt"), data)
        except (NotThis, Damaged):
            continue
        for reading in found.readings:
            assert reading.threads or reading.why
    describe(unpack(data, 1 << 20))
    assert all("\n" not in line for passage in passages_of(data) for line in passage.lines)


@pytest.mark.parametrize(
    "line", ["a (" * 700, "#" * 2000, "= x" * 600, "Thread 1 (" + "a+" * 900, "[" * 2000, ">" * 2000]
)
def test_no_line_takes_long(line: str) -> None:
    with pytest.raises(NotThis):
        read_stack_text(Path("x"), f"{line}\n".encode() * 300)


def test_a_thread_of_json_whose_name_is_no_text(tmp_path: Path) -> None:
    threads = json.loads(json_dump(70, *WAITS))
    threads[0]["thread_name"] = 1.5
    assert seen_in(evidence_of(tmp_path, json.dumps(threads), "rank-0.json")) == EXPECTED[:1]


def test_an_error_does_not_quote_the_whole_file(tmp_path: Path) -> None:
    threads = json.loads(json_dump(70, *WAITS))
    threads[0]["pid"] = "x" * 70_000
    (tmp_path / "rank-0.json").write_text(json.dumps(threads))
    with pytest.raises(EvidenceError, match="damaged") as caught:
        open_evidence([tmp_path])
    assert len(caught.value.message) < 1000


def test_of_ranks_without_a_file_nothing_is_said(tmp_path: Path) -> None:
    """Two files of nine ranks, in two different calls: the seven others are no majority that they depart from."""
    calls = {
        0: (("isend", TORCH, 2371), ("step", "train.py", 40)),
        8: (("irecv", TORCH, 2401), ("step", "train.py", 41)),
    }
    for rank, frames in calls.items():
        (tmp_path / f"rank-{rank}.txt").write_text(dump(70 + rank, *frames))
    conclusion = judge(open_evidence([tmp_path]).evidence())
    assert has_parts(conclusion.claim, "unknown whether ranks 1-7", "they were not read")
    assert not conclusion.suspects
    assert {pointer.reason for pointer in conclusion.look_first} == {Reason.EQUAL_SIDE}
