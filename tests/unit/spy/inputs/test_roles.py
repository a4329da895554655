"""Who is a rank among stored stacks: launchers, helpers and children are none, a process that was not read is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.errors import ConfigError, EvidenceError
from bigsci_launch.spy.answer import answer_from
from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.inputs.gather import open_evidence
from bigsci_launch.spy.judge.verdict import judge
from tests.support.texts import has_parts

TORCH = "torch/distributed/distributed_c10d.py"
WAITS = f"all_reduce ({TORCH}:2501) < step (train.py:40) < <module> (train.py:9)"
READS = "read (fsspec/local.py:350) < load (train.py:12) < <module> (train.py:9)"
TRAIN = "/usr/bin/python3 -u train.py"
SPAWN = "/usr/bin/python3 -c from multiprocess.spawn import spawn_main; spawn_main(tracker_fd=5) --multiprocessing-fork"


def process(pid: int, calls: str, command: str = TRAIN, more: str = "") -> str:
    lines = "".join(f"    {call}\n" for call in calls.split(" < "))
    head = f"Process {pid}: {command}\n{more}Python v3.10.12 (/usr/bin/python3)\n\n"
    return f'{head}Thread {pid} (idle): "MainThread"\n{lines}\n'


RANKS = process(201, WAITS) + process(202, READS) + process(203, WAITS)
OTHERS = {
    "accelerate": ("launcher", "wait (subprocess.py:1264) < simple (commands/launch.py:7) < main (accelerate:8)",
                   "/usr/bin/python3 /usr/local/bin/accelerate launch train.py"),
    "elastic": ("launcher", "sleep (time.py:1) < _invoke_run (torch/distributed/elastic/agent/server/api.py:870) < "
                "<module> (launch.py:8)", "/usr/bin/python3 launch.py"),
    "spawn": ("launcher", "wait (connection.py:931) < join (torch/multiprocessing/spawn.py:12) < <module> (train.py:9)",
              TRAIN),
    "deepspeed": ("launcher", "wait (subprocess.py:1264) < main (deepspeed/launcher/runner.py:600) < <module> (ds:6)",
                  "/usr/bin/python3 ds train.py"),
    "pool": ("helper", "recv (multiprocess/connection.py:250) < get (multiprocess/queues.py:370) < "
             "worker (multiprocess/pool.py:114) < run (multiprocess/process.py:108) < "
             "_bootstrap (multiprocess/process.py:314)", SPAWN),
    "futures": ("helper", "get (multiprocessing/queues.py:103) < _process_worker (concurrent/futures/process.py:240) < "
                "_bootstrap (multiprocessing/process.py:314)", TRAIN),
    "loader": ("helper", "poll (x.py:1) < _worker_loop (torch/utils/data/_utils/worker.py:240) < "
               "_bootstrap (multiprocessing/process.py:314) < __init__ (torch/utils/data/dataloader.py:1040) < "
               "<module> (train.py:9)", TRAIN),
    "compiler": ("helper", "_read_exact (torch/_inductor/compile_worker/subproc_pool.py:61) < <module> (<string>:1)",
                 "/usr/bin/python3 -c from torch._inductor.compile_worker.__main__ import main; main() --workers=32"),
    "tracker": ("helper", "main (multiprocessing/resource_tracker.py:180) < <module> (<string>:1)",
                "/usr/bin/python3 -c from multiprocessing.resource_tracker import main;main(6)"),
    "tensorboard": ("helper", "select (selectors.py:415) < serve_forever (server.py:232) < <module> (tb:8)",
                    "/usr/bin/python3 /usr/local/bin/tensorboard --logdir runs"),
    "forked": ("helper", "read (queue.py:1) < saver (train.py:77) < _bootstrap (multiprocessing/process.py:314) < "
               "<module> (train.py:9)", TRAIN),
    "stranger": ("unknown", "sleep (monitor.py:8) < <module> (monitor.py:20)", "/usr/bin/python3 monitor.py"),
}  # fmt: skip


def evidence_of(folder: Path, text: str, axes: str | None = None) -> Evidence:
    (folder / "trace-n0.out").write_text(text)
    return open_evidence([folder]).evidence(axes)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", OTHERS)
def test_who_is_no_rank(tmp_path: Path, kind: str, place: int) -> None:
    role, calls, command = OTHERS[kind]
    other = process(300, calls, command)
    evidence = evidence_of(tmp_path, RANKS + other if place else other + RANKS)
    assert [seen.pid for seen in evidence.ranks] == [201, 202, 203]
    assert [(each.node, each.pid, each.role) for each in evidence.others] == [("n0", 300, role)]
    assert ("communicate" in evidence.others[0].why) == (kind in ("forked", "stranger"))
    assert [pointer.rank for pointer in judge(evidence).look_first][:1] == [1]


@pytest.mark.parametrize(
    "calls",
    [
        "_shutdown (threading.py:1500)",
        "worker (multiprocessing/pool.py:125) < run (threading.py:1) < other (train.py:8)",
        "save (train.py:88) < <module> (train.py:9)",
    ],
)
def test_a_rank_without_a_communication_is_one_by_its_program(tmp_path: Path, calls: str) -> None:
    main = calls if "pool.py" not in calls else READS
    text = process(201, WAITS) + process(202, main)
    if "pool.py" in calls:  # a pool of threads
        text += 'Thread 900 (idle): "Thread-1 (worker)"\n    worker (multiprocessing/pool.py:125)\n'
    assert [seen.pid for seen in evidence_of(tmp_path, text).ranks] == [201, 202]


def test_ranks_that_torch_has_spawned(tmp_path: Path) -> None:
    spawned = "_wrap (torch/multiprocessing/spawn.py:90) < run (multiprocessing/process.py:108)"
    spawned += " < _bootstrap (multiprocessing/process.py:314)"
    command = "/usr/bin/python3 -c from multiprocessing.spawn import spawn_main; spawn_main() --multiprocessing-fork"
    text = process(200, OTHERS["spawn"][1])
    text += "".join(process(201 + rank, f"{WAITS if rank else READS} < {spawned}", command) for rank in range(3))
    evidence = evidence_of(tmp_path, text)
    assert [seen.pid for seen in evidence.ranks] == [201, 202, 203]
    assert [(each.pid, each.role) for each in evidence.others] == [(200, "launcher")]


def test_a_child_that_py_spy_names_is_no_rank(tmp_path: Path) -> None:
    child = process(
        300, "push (save.py:3) < <module> (other.py:1)", "/usr/bin/python3 other.py", f"Parent Process 201: {TRAIN}\n"
    )
    evidence = evidence_of(tmp_path, RANKS + child)
    assert [(each.pid, each.role) for each in evidence.others] == [(300, "helper")]


def test_where_none_communicates_all_are_ranks(tmp_path: Path) -> None:
    text = process(201, READS) + process(202, OTHERS["stranger"][1], OTHERS["stranger"][2])
    assert [seen.pid for seen in evidence_of(tmp_path, text).ranks] == [201, 202]


def test_a_file_that_names_its_rank_is_believed(tmp_path: Path) -> None:
    (tmp_path / "rank-0.txt").write_text(process(201, WAITS))
    (tmp_path / "rank-1.txt").write_text(process(202, OTHERS["stranger"][1], OTHERS["stranger"][2]))
    assert [seen.pid for seen in open_evidence([tmp_path]).evidence().ranks] == [201, 202]


IDLE = "main_loop (ray/_private/worker.py:1066) < <module> (ray/_private/workers/default_worker.py:323)"
ACTOR = "/usr/bin/python3 ray::Worker.run"


def test_idle_workers_of_ray_are_no_ranks_unless_their_like_communicates(tmp_path: Path) -> None:
    idle = process(201, IDLE, ACTOR) + 'Thread 900 (idle): "GC"\n    wait (threading.py:355)\n    run (ray/gc.py:29)\n'
    with pytest.raises(EvidenceError) as caught:
        evidence_of(tmp_path, idle)
    assert has_parts(caught.value.message, "no rank", "Ray", "201")
    assert [seen.pid for seen in evidence_of(tmp_path, idle + process(202, WAITS, ACTOR)).ranks] == [201, 202]
    assert [seen.pid for seen in evidence_of(tmp_path, idle + process(202, WAITS)).ranks] == [202]


# ------------------------------------------------------------------------------------------- not read

FAILED = "Error: Failed to suspend process\nReason: EPERM: Operation not permitted\n"


@pytest.mark.parametrize("words", [FAILED, "process is in D state, skipped\n", ""])
@pytest.mark.parametrize("place", [0, 2])
def test_a_process_without_a_stack_is_a_rank_that_was_not_read(tmp_path: Path, words: str, place: int) -> None:
    parts = [process(201, WAITS), process(202, WAITS)]
    parts.insert(place, f"Process 300: {TRAIN}\n{words}\n")
    evidence = evidence_of(tmp_path, "".join(parts))
    assert [seen.pid for seen in evidence.ranks][place] == 300
    why = evidence.ranks[place].why_unreadable or ""
    assert has_parts(why, "1st" if place == 0 else "3rd", "trace-n0.out")
    assert all(has_parts(why, part) for part in ("EPERM", "D state") if part in words)
    conclusion = judge(evidence)
    assert has_parts(conclusion.claim, "2 ranks", "300", "n0")
    assert conclusion.look_first[0].rank == place


def test_a_file_with_nothing_but_the_error_of_py_spy_is_its_rank(tmp_path: Path) -> None:
    for rank, text in enumerate((process(201, WAITS), "Error: Permission Denied: try sudo\n", process(203, WAITS))):
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    (tmp_path / "rank-3.txt").write_text("loading ..\nError: Failed to load\n")
    evidence = open_evidence([tmp_path]).evidence()
    assert [seen.pid for seen in evidence.ranks] == [201, None, 203]
    assert has_parts(evidence.ranks[1].why_unreadable or "", "Permission Denied")


def test_those_that_do_not_look_like_ranks_are_named_if_there_are_too_many(tmp_path: Path) -> None:
    text = process(201, READS) + process(202, READS) + process(203, OTHERS["stranger"][1], OTHERS["stranger"][2])
    (tmp_path / "trace-n0.out").write_text(text)
    with pytest.raises(ConfigError) as caught:
        answer_from(open_evidence([tmp_path]), "dp=2")
    assert has_parts(caught.value.hint or "", "process 203", "sleep (monitor.py:8)")
    assert "201" not in (caught.value.hint or "")
    with pytest.raises(ConfigError) as caught:
        answer_from(open_evidence([tmp_path]), "dp=4")
    assert has_parts(caught.value.hint or "", "omit --topology")
