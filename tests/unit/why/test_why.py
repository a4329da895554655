"""`bsl why`: what it reads of a folder, a log, a foreign job and a run, and how it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.cli.main import bsl
from bigsci_launch.endings.lines import UNKNOWN, Speaker
from bigsci_launch.errors import EvidenceError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.why.find import kind_of, why_logs, why_run
from bigsci_launch.why.sources import LONGEST_DOCUMENT, TAIL_BYTES, elastic_text, pod_of, read_material, speaker_of
from tests.support.texts import CheckText, has_parts

OOM = "srun: error: n1: task 3: Out Of Memory\n"
ERROR_FILE = {
    "message": {
        "message": "ValueError: vocab size 50257 is not divisible by 4",
        "extraInfo": {
            "py_callstack": 'Traceback (most recent call last):\n  File "t.py", line 1, in main\n'
            "ValueError: vocab size 50257 is not divisible by 4\n",
            "timestamp": "1732672800",
        },
    }
}


def asked(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(bsl, ["why", *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "speaker"),
    [
        ("rank-3.log", Speaker(3)),
        ("train_rank12.out", Speaker(12)),
        ("node1-rank_0003.txt", Speaker(3)),
        ("log.task-7", Speaker(7)),
        ("run/attempt_0/2/stderr.log", Speaker(local_rank=2)),
        ("run/attempt_0/2/error.json", Speaker(local_rank=2)),
        ("process_2.log", Speaker(2)),
        ("dmesg-gpu-b07.txt", Speaker(node="gpu-b07")),
        ("messages-node031", Speaker(node="node031")),
        ("n12.dmesg.txt", Speaker(node="n12")),
        ("worker-3.log", UNKNOWN),
        ("slurm-1234.out", UNKNOWN),
        ("frank3.log", UNKNOWN),
    ],
)
def test_the_name_of_a_file_says_whose_output_it_is(name: str, speaker: Speaker) -> None:
    assert speaker_of(Path(name)) == speaker


def test_a_folder_of_torchruns_logs(tmp_path: Path) -> None:
    for local_rank in range(2):
        folder = tmp_path / "none_x1" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.2]:1\n")
    (folder / "stderr.log").write_text("loading\n")
    (folder / "error.json").write_text(json.dumps(ERROR_FILE))
    (folder / "model.pt").write_bytes(bytes(100))
    found = why_logs([tmp_path])
    assert (found.kind, found.culprit.local_rank, len(found.read)) == ("crashed", 1, 3)
    assert found.evidence[0].said == "ValueError: vocab size 50257 is not divisible by 4"


def test_the_log_of_a_kernel_and_the_list_of_a_launcher_belong_together(tmp_path: Path) -> None:
    listed = "process {} spawned with command: ['python', 't.py', '--local_rank={}']\n"
    launcher = "".join(
        f"{node}: {listed.format(4711 + number, number % 2)}" for number, node in enumerate(("n1", "n1", "n2", "n2"))
    )
    mapping = "global_rank_mapping=defaultdict(<class 'list'>, {'n1': [0, 1], 'n2': [2, 3]})\n"
    (tmp_path / "job.log").write_text(mapping + launcher)
    (tmp_path / "dmesg-n2.txt").write_text("[12.1] Out of memory: Killed process 4713 (python) total-vm:1kB\n")
    found = why_logs([tmp_path])
    assert (found.kind, found.culprit.ranks, found.culprit.node) == ("out_of_memory", (2,), "n2")


@pytest.mark.parametrize(("tasks", "task"), [(2, None), (4, 1)])
def test_a_task_that_is_a_launcher_has_not_the_number_of_a_rank(tmp_path: Path, tasks: int, task: int | None) -> None:
    """Ranks 0, 2 and 3 lose rank 1. Two tasks end alike: launchers of two ranks each; four tasks are the ranks."""
    lines = [f"[rank{rank}]: RuntimeError: Connection closed by peer [10.0.0.2]:4711" for rank in (0, 2, 3)]
    lines += [f"srun: error: n{number}: task {number}: Exited with exit code 1" for number in range(tasks)]
    (tmp_path / "slurm-7.out").write_text("step 1/40 loss 1.5\n" + "\n".join(lines) + "\n")
    found = why_logs([tmp_path])
    assert (found.culprit.tasks, found.culprit.node) == (((task,), "n1") if task is not None else ((), None))


def test_in_jax_a_worker_is_a_process(tmp_path: Path) -> None:
    error = "Traceback (most recent call last):\n  File 't.py', line 1, in main\n{}ValueError: no such field\n"
    (tmp_path / "worker-3.log").write_text(error.format(""))
    assert why_logs([tmp_path]).culprit.ranks == ()
    for program in ("jax 0.5", "mindformers[core/callback.py:550] - INFO - step 5"):
        (tmp_path / "worker-3.log").write_text(f"{program}\n" + error.format(""))
        assert why_logs([tmp_path]).culprit.ranks == (3,)


@pytest.mark.parametrize(
    ("document", "pod"),
    [
        ("Name:             sft-worker-2\nNode:             gke-1/10.2.7.119\n", "sft-worker-2"),
        ("kind: Pod\nmetadata:\n  name: sft-worker-2\nspec:\n  nodeName: gke-1\n", "sft-worker-2"),
        ("Name:  a-0\nNode:  gke-1/10.2.7.119\nName:  a-1\nNode:  gke-2/10.2.7.120\n", None),
        ("kind: Job\nmetadata:\n  name: sft\n", None),
    ],
)
def test_the_pod_of_a_document(document: str, pod: str | None) -> None:
    assert pod_of(document) == pod


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"message": {"extraInfo": {}}}', '{"message": 3}'])
def test_another_document_is_no_error_file(text: str) -> None:
    assert not elastic_text(text)


def test_a_document_of_a_cloud_is_read_as_text_and_a_long_one_is_data(tmp_path: Path) -> None:
    events = {"Events": [{"EventType": "Preempt", "Resources": ["gpu-3"]}]}
    (tmp_path / "events.json").write_text(json.dumps(events, indent=1))
    assert (why_logs([tmp_path]).kind, why_logs([tmp_path]).read) == ("preempted", (str(tmp_path / "events.json"),))
    (tmp_path / "events.json").write_text(json.dumps({**events, "data": "x" * LONGEST_DOCUMENT}))
    assert why_logs([tmp_path]).kind == "unknown"


def test_lines_of_a_long_log_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigsci_launch.why.sources.TAIL_BYTES", 1000)
    log = tmp_path / "job.out"
    log.write_text("".join(f"step {number}\n" for number in range(1, 501)) + OOM)
    found = read_material([log])
    assert [each.line for each in found.statements] == [501]
    assert found.notes
    log.write_text(OOM)
    assert not read_material([log]).notes


def test_of_a_log_of_many_gigabytes_only_the_end_is_read(tmp_path: Path) -> None:
    log, size = tmp_path / "job.out", 6 << 30
    with log.open("wb") as stream:
        stream.seek(size)  # a hole takes no room on the disk
        stream.write(b"\n" + b"step 1 of many\n" * (TAIL_BYTES // 15) + OOM.encode())
    found = asked(str(log))
    assert (found["kind"], found["evidence"][0]["line"]) == ("out_of_memory", None)
    assert has_parts(found["notes"][0], "from byte 64424")


@pytest.mark.parametrize("earlier", [0, 3000])
def test_of_very_many_lines_the_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int) -> None:
    monkeypatch.setattr("bigsci_launch.why.sources.MOST_LINES", 100)
    monkeypatch.setattr("bigsci_launch.why.sources.TAIL_BYTES", 1000)
    log = tmp_path / "job.out"
    log.write_text(f"{OOM}\n" + "\n" * (earlier + 300) + OOM)
    found = read_material([log])
    assert [each.line for each in found.statements] == [earlier + 303]
    assert len(found.notes) == 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="no such file"):
        why_logs([tmp_path / "nothing.log"])
    with pytest.raises(EvidenceError, match="invalid argument"):  # no user may seek its end
        read_material([Path("/proc/self/mem")])
    with pytest.raises(EvidenceError, match="no log"):
        why_logs([tmp_path])
    assert CliRunner().invoke(bsl, ["why", str(tmp_path)]).exit_code == 2


def test_binary_files_and_loops_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\0" * 50 + OOM.encode())
    (tmp_path / "again").symlink_to(tmp_path)
    found = why_logs([tmp_path])
    assert (found.kind, len(found.notes)) == ("unknown", 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400))
def test_any_bytes_have_an_answer(tmp_path: Path, content: bytes) -> None:
    for name in ("job.out", "error.json"):
        (tmp_path / name).write_bytes(content)
    assert why_logs([tmp_path]).kind


def test_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_text: CheckText) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.out").write_text(f"step 1\n{OOM}")
    check_text(CliRunner().invoke(bsl, ["why", "job.out"]).stdout)
    found = asked("job.out")
    assert (found["kind"], found["is_certain"]) == ("out_of_memory", True)
    assert (found["first_failure"]["tasks"], found["first_failure"]["node"]) == ([3], "n1")
    assert (found["evidence"][0]["file"], found["evidence"][0]["line"]) == ("job.out", 2)


def test_what_is_not_said_is_unknown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    found = asked(str(log), code=1)
    assert (found["kind"], found["first_failure"]["is_known"], found["evidence"]) == ("unknown", False, [])


def job(state: str) -> str:
    return f"12|{state}|me|debug|2|n[0-1]|None|2026-11-21T01:02:03|2026-11-21T01:09:03|1:00|N/A|train|(null)\n"


@pytest.fixture
def slurm(fake_slurm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return fake_slurm("squeue", "scontrol")


def test_a_job_of_another_launcher(slurm: Any, tmp_path: Path) -> None:
    out, err = tmp_path / "a.out", tmp_path / "a.err"
    out.write_text("step 1\n")
    err.write_text(OOM)
    slurm.answer("squeue", job("FAILED"))
    slurm.answer("scontrol", f"JobId=12 JobName=train StdErr={err} StdIn=/dev/null StdOut={out} Power=\n")
    found = asked("12")
    assert (found["kind"], found["about"], found["first_failure"]["tasks"]) == ("out_of_memory", "job 12", [3])
    assert sorted(found["read"]) == sorted(["Slurm", str(out), str(err)])


@pytest.mark.parametrize(
    ("state", "kind", "code"),
    [
        ("TIMEOUT", "time_limit", 0),
        ("OUT_OF_MEMORY", "out_of_memory", 0),
        ("NODE_FAIL", "node_failure", 0),
        ("PREEMPTED", "preempted", 0),
        ("CANCELLED", "cancelled", 0),
        ("COMPLETED", "finished", 0),
        ("FAILED", "crashed", 0),
        ("RUNNING", "running", 1),
    ],
)
def test_what_slurm_alone_knows(slurm: Any, state: str, kind: str, code: int) -> None:
    slurm.answer("squeue", job(state))
    slurm.answer("scontrol", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    found = asked("12", code=code)
    assert (found["kind"], found["first_failure"]["is_known"]) == (kind, False)
    assert bool(found["notes"]) == (state != "RUNNING")


def test_the_usual_output_is_found_where_slurm_has_forgotten_it(slurm: Any) -> None:
    slurm.answer("squeue", job("FAILED"))
    slurm.answer("scontrol", rc=1)
    Path("slurm-12.out").write_text("srun: error: n1: task 1: Segmentation fault (core dumped)\n")
    found = asked("12")
    assert (found["kind"], found["first_failure"]["text"]) == ("crashed", "task 1 on n1")


def test_a_job_that_still_runs_may_have_printed_a_failure(slurm: Any) -> None:
    slurm.answer("squeue", job("RUNNING"))
    slurm.answer("scontrol", rc=1)
    Path("slurm-12.out").write_text("srun: error: n1: task 1: Killed\n")
    found = asked("12", code=1)
    assert (found["kind"], found["first_failure"]["text"]) == ("running", "task 1 on n1")


ROOT_CAUSE = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_05:38:07
  host      : n1
  rank      : 10 (local_rank: 2)
  exitcode  : -6 (pid: 214033)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 214033
============================================================
"""


def test_of_a_launcher_that_is_a_task_the_rank_is_the_one_that_it_names(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path / "run").attempt("0001")
    attempt.make()
    attempt.log_file(1).write_text(ROOT_CAUSE)
    said = "torchrun saw rank 10 (local rank 2) on n1 end first, SIGABRT"
    failure = {"rank": 1, "node": "n1", "error": said}
    found = why_run("demo", attempt, {"reason": "crashed", "first_failure": failure}, None)
    assert (found.culprit.ranks, found.culprit.local_rank, found.culprit.node) == ((10,), 2, "n1")
    assert has_parts(found.first, "rank 10 (local rank 2)") and "rank 1 " not in found.first
    own = why_run("demo", attempt, {"reason": "crashed", "first_failure": {**failure, "error": "ValueError: 1"}}, None)
    assert own.culprit.ranks == (1,)


@pytest.mark.parametrize(
    ("reason", "error", "kind"),
    [
        ("crashed", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
        ("crashed", "OSError: [Errno 28] No space left on device: '/x'", "disk"),
        ("crashed", "ValueError: loss is NaN", "crashed"),
        ("crashed", "RuntimeError: Connection closed by peer", "crashed"),
        ("hang", "did not take part", "hang"),
        ("crashed", None, "crashed"),
    ],
)
def test_a_run_has_the_kinds_of_any_other_log(reason: str, error: str | None, kind: str) -> None:
    assert kind_of({"reason": reason, "first_failure": {"error": error}}) == kind
    assert kind_of({"reason": reason, "first_failure": None}) == reason
