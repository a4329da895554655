"""What `bsl status` and `bsl list` print, from records on disk and a fake squeue."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from bigsci_launch.runs.attempts import read_job, write_job
from bigsci_launch.status.read import read_status
from tests.support.command import invoke
from tests.support.texts import CheckText, has_parts, without_ages

pytestmark = pytest.mark.slow

Install = Callable[..., Any]
USER = pwd.getpwuid(os.getuid()).pw_name


def line(state: str, job_id: str = "12", comment: str = "(null)") -> str:
    return f"{job_id}|{state}|{USER}|debug|4|n[0-3]|None|2026-11-21T01:02:03|N/A|1:00|N/A|trial|{comment}\n"


@pytest.fixture
def slurm(fake_slurm: Install) -> Any:
    fake = fake_slurm("squeue", "sinfo")
    fake.answer("squeue", line("RUNNING"))
    fake.answer("sinfo", "".join(f"n{node}|allocated|none\n" for node in range(4)))
    return fake


def silence(trial: Any, rank: int, age_s: float) -> None:
    """Make the newest record of a rank that old."""
    trial.attempt.event_file(rank).unlink()
    trial.event(rank, "heartbeat", age_s, phase="step", step=7)


@pytest.fixture
def training(trial: Any) -> Any:
    """Ranks in step 8, and rank 5 in step 7 for ten minutes."""
    for rank in range(8):
        trial.event(rank, "start", 80)
        age_s, step = (600, 7) if rank == 5 else (2 + rank, 8)
        trial.event(rank, "heartbeat", age_s, phase="step", step=step)
    for step in (6, 7):
        fields = {"loss": 4.25, "seconds": 1.5, "tflops": 149.0, "consumed_samples": step * 16}
        trial.event(4, "step", 6 - (step - 6), step=step, **fields)
    trial.event(4, "heartbeat", 1, phase="step", step=8)
    folder = trial.run.checkpoints / "global_step5"
    folder.mkdir(parents=True)
    (trial.run.checkpoints / "latest").write_text("global_step5")
    os.utime(trial.run.checkpoints / "latest", (trial.now - 300, trial.now - 300))
    return trial


def test_a_running_training(slurm: Any, training: Any) -> None:
    document = json.loads(invoke("status", "trial", "--json").stdout)
    assert document["schema_version"] == 1
    assert document["job"]["state"] == "RUNNING" and document["world_size"] == 8
    step = document["step"]
    assert (step["step"], step["total_steps"], step["loss"], step["seconds"], step["tflops"]) == (7, 20, 4.25, 1.5, 149)
    slowest = document["slowest_rank"]
    assert (slowest["rank"], slowest["node"], slowest["coordinate"]) == (5, "n2", "dp0 pp1 tp1")
    assert slowest["phase"] == "step" and slowest["step"] == 7 and 599 < slowest["heartbeat_age_s"] < 660
    assert document["checkpoint"]["path"].endswith("checkpoints/global_step5")
    assert 299 < document["checkpoint"]["age_s"] < 360


def test_the_words_for_people(slurm: Any, training: Any, check_text: CheckText) -> None:
    check_text(without_ages(invoke("status").stdout))


def test_context_ranks_are_named_where_the_run_has_them(slurm: Any, training: Any) -> None:
    record = json.loads(training.run.record.read_text())
    training.run.record.write_text(json.dumps({**record, "topology": {"tp": 1, "pp": 2, "dp": 2, "cp": 2}}))
    pid = json.loads(training.attempt.pid_file(5).read_text())
    place = {"pp": 1, "tp": 0, "dp": 0, "cp": 1}
    training.attempt.pid_file(5).write_text(json.dumps({**pid, "coordinate": place}))
    assert has_parts(invoke("status").stdout, "(tp=1,cp=2,pp=2,dp=2)", "rank 5 (dp0 pp1 cp1 tp0)")
    training.ended("crashed", 137, first_failure={"rank": 5, "node": "n2", "coordinate": place, "signal": "SIGKILL",
                                                  "error": None})  # fmt: skip
    slurm.answer("squeue", line("FAILED"))
    assert has_parts(invoke("status").stdout, "rank 5 (dp0 pp1 cp1 tp0)", "SIGKILL")


def test_ranks_that_have_ended_are_not_slow(slurm: Any, training: Any) -> None:
    training.event(5, "end", 590, reason="finished")
    status = read_status(training.run)
    assert status.slowest is not None and status.slowest.rank == 7


def test_a_rank_that_has_written_nothing_is_judged_by_its_start(slurm: Any, trial: Any, check_text: CheckText) -> None:
    trial.event(0, "heartbeat", 1, phase="init", step=0)
    check_text(without_ages(invoke("status").stdout))
    slowest = json.loads(invoke("status", "--json").stdout)["slowest_rank"]
    assert slowest["rank"] == 1 and slowest["heartbeat_age_s"] > 89


def test_a_silent_node_with_silent_ranks_is_lost_while_squeue_says_running(
    slurm: Any, training: Any, check_text: CheckText
) -> None:
    silence(training, 4, 130)
    slurm.answer("sinfo", "n0|allocated|none\nn2|mixed*|Not responding\n")
    check_text(without_ages(invoke("status").stdout))
    assert [node["name"] for node in json.loads(invoke("status", "--json").stdout)["lost_nodes"]] == ["n2"]


def test_the_first_failure_after_a_crash(slurm: Any, training: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("FAILED"))
    failure = {"rank": 5, "node": "n2", "coordinate": {"pp": 1, "tp": 1, "dp": 0}, "signal": "SIGKILL", "error": None}
    training.ended("crashed", 137, first_failure=failure)
    check_text(without_ages(invoke("status").stdout))


def test_a_pending_job(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("PENDING").replace("n[0-3]", "").replace("|None|", "|Resources|"))
    check_text(without_ages(invoke("status").stdout))
    assert not slurm.calls("sinfo")


def test_a_node_whose_ranks_heartbeat_has_a_slurmd_to_wait_for(
    slurm: Any, training: Any, check_text: CheckText
) -> None:
    slurm.answer("sinfo", "n2|mixed*|Not responding\n")
    text = invoke("status").stdout
    document = json.loads(invoke("status", "--json").stdout)
    assert document["lost_nodes"] == [] and document["unreachable_nodes"][0]["fate"] == "alive"
    slurm.answer("sinfo", "n2|down*|Not responding\n")
    assert [node["name"] for node in json.loads(invoke("status", "--json").stdout)["lost_nodes"]] == ["n2"]
    check_text(without_ages(text), without_ages(invoke("status").stdout))


def test_a_sign_that_may_be_from_before_the_loss_tells_nothing(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("sinfo", "n2|mixed*|Not responding\n")
    trial.log(4, "up\n")
    for age_s, fate in ((0, "alive"), (30, "unknown")):
        os.utime(trial.attempt.log_file(4), (time.time() - age_s, time.time() - age_s))
        [node] = json.loads(invoke("status", "--json").stdout)["unreachable_nodes"]
        assert node["fate"] == fate
    check_text(without_ages(invoke("status").stdout))


def test_nobody_looks_for_a_hang_of_ranks_that_have_not_started(slurm: Any, trial: Any, check_text: CheckText) -> None:
    for rank in range(8):
        trial.attempt.pid_file(rank).unlink()
    trial.attempt.job_output.write_text("loading modules\n")
    os.utime(trial.attempt.job_output, (trial.now - 500, trial.now - 500))
    check_text(without_ages(invoke("status").stdout))


def test_a_node_without_signs_is_not_called_lost(slurm: Any, trial: Any, check_text: CheckText) -> None:
    """Its ranks are those of another program: an old log is that of a rank that prints nothing."""
    trial.log(4, "up\n")
    os.utime(trial.attempt.log_file(4), (trial.now - 1000, trial.now - 1000))
    for rank in (4, 5):
        identity = json.loads(trial.attempt.pid_file(rank).read_text())
        trial.attempt.pid_file(rank).write_text(json.dumps({**identity, "started": trial.now - 2000}))
    slurm.answer("sinfo", "n2|mixed*|Not responding\n")
    text = invoke("status").stdout
    for rank in (4, 5):
        trial.attempt.pid_file(rank).unlink()
    check_text(without_ages(text), without_ages(invoke("status").stdout))
    document = json.loads(invoke("status", "--json").stdout)
    assert document["lost_nodes"] == [] and document["unreachable_nodes"][0]["fate"] == "unknown"


def test_a_lost_node_of_a_job_that_slurm_requeues_needs_nobody(
    slurm: Any, training: Any, check_text: CheckText
) -> None:
    record = read_job(training.attempt)
    assert record is not None
    write_job(training.attempt, replace(record, requeue=True))
    silence(training, 4, 700)
    slurm.answer("sinfo", "n2|mixed*|Not responding\n")
    check_text(without_ages(invoke("status").stdout))


def test_a_running_job_is_not_called_ended_when_slurm_is_silent(
    slurm: Any, training: Any, check_text: CheckText
) -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", rc=1)
    check_text(without_ages(invoke("status").stdout))
    document = json.loads(invoke("status", "--json").stdout)
    assert document["job"]["state"] == "UNKNOWN" and document["slowest_rank"]["rank"] == 5
    assert document["exit"] is None and 4 < document["step"]["age_s"] < 60


def test_a_job_that_slurm_has_forgotten_has_ended(slurm: Any, training: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    text = invoke("status").stdout
    training.attempt.job_output.write_text("2026-11-23T01:00:00Z bsl: start attempt=0001 job=12\nnoise\n")
    check_text(without_ages(text), without_ages(invoke("status").stdout))


ITERATION = " iteration      {}/   100 | elapsed time per iteration (ms): {} | lm loss: 4.5E+00 |\n"


def stamped(moment: float, text: str) -> str:
    return f"{datetime.fromtimestamp(moment, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z {text}"


def test_a_program_of_its_own_that_prints_is_alive(slurm: Any, trial: Any, check_text: CheckText) -> None:
    for rank in range(8):
        trial.log(rank, stamped(trial.now - 80, "up\n"))
    for rank in range(7):
        os.utime(trial.attempt.log_file(rank), (trial.now - 3000, trial.now - 3000))
    trial.log(7, *(stamped(trial.now - 9 + step, ITERATION.format(step, "1000.0")) for step in (6, 7)))
    check_text(without_ages(invoke("status").stdout))
    step = json.loads(invoke("status", "--json").stdout)["step"]
    assert (step["step"], step["seconds"], step["loss"], step["source"], step["every_s"]) == (7, 1.0, 4.5, "log", 1.0)
    assert step["stride"] == 1
    [run] = json.loads(invoke("list", "--json").stdout)["runs"]
    assert run["step"] == 7 and run["last_sign"] > trial.now - 60


@pytest.mark.parametrize(("reason", "is_said"), [("finished", True), ("stopped", False)])
def test_a_program_that_left_before_its_last_step_has_not_made_it(
    slurm: Any, trial: Any, reason: str, is_said: bool
) -> None:
    slurm.answer("squeue", line("COMPLETED"))
    trial.log(7, *(ITERATION.format(step, "1000.0") for step in (13, 14)))
    trial.ended(reason, 0)
    [ended] = [text for text in invoke("status").stdout.splitlines() if text.startswith("ended")]
    assert has_parts(ended, reason, "exit code 0") and has_parts(ended, "14 of 100") is is_said


def test_a_program_that_prints_some_steps_need_not_print_its_last(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line("COMPLETED"))
    trial.log(7, *(ITERATION.format(step, "1000.0") for step in (80, 90, 95)[:2]), "done\n")
    trial.ended("finished", 0)
    assert "90 of 100" in invoke("status").stdout
    trial.log(7, ITERATION.format(99, "1000.0"))
    assert " of 100" not in invoke("status").stdout


def test_steps_are_read_as_the_run_file_says(slurm: Any, trial: Any) -> None:
    trial.attempt.step_line.write_text(r"at (?P<index>\d+): (?P<loss>\S+)")
    trial.log(7, ITERATION.format(6, "1000.0"), "at 41: 2.5\n", ITERATION.format(7, "1000.0"))
    step = json.loads(invoke("status", "--json").stdout)["step"]
    assert (step["step"], step["loss"]) == (42, 2.5)


def test_a_program_of_its_own_is_silent_if_nobody_prints(slurm: Any, trial: Any, check_text: CheckText) -> None:
    for rank in (0, 7):
        trial.log(rank, ITERATION.format(6, "1000.0"), ITERATION.format(7, "1000.0"))
        os.utime(trial.attempt.log_file(rank), (trial.now - 200, trial.now - 200))
    check_text(without_ages(invoke("status").stdout))
    trial.log(7, ITERATION.format(8, "100000.0"))
    os.utime(trial.attempt.log_file(7), (trial.now - 200, trial.now - 200))
    assert "bsl spy" not in invoke("status").stdout, "a step takes 100 s: 200 s are not long"


def test_a_fresh_log_is_a_sign_of_a_rank_with_an_old_heartbeat(
    slurm: Any, training: Any, check_text: CheckText
) -> None:
    training.log(5, "still converting\n")
    check_text(without_ages(invoke("status").stdout))


def test_a_batch_host_that_died_left_no_exit_record(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("NODE_FAIL"))
    check_text(without_ages(invoke("status").stdout))
    assert not trial.attempt.exit.exists()


def test_a_job_that_was_cancelled_before_it_started_lost_no_host(slurm: Any, trial: Any, check_text: CheckText) -> None:
    for rank in range(8):
        trial.attempt.pid_file(rank).unlink()
    slurm.answer("squeue", line("CANCELLED"))
    text = invoke("status").stdout
    trial.attempt.job_output.write_text("bsl: start attempt=0001\n")
    check_text(without_ages(text), without_ages(invoke("status").stdout))


def test_what_the_record_explains_is_shown(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("FAILED"))
    trial.ended("launch_failed", 127, cause="module: command not found", evidence=["one", "two"])
    check_text(without_ages(invoke("status").stdout))
    trial.ended("cancelled", 143, cause=None, evidence=[])
    assert "next:" not in invoke("status").stdout
    for reason, shown in (("crashed", ["one", "two"]), ("finished", [])):
        trial.ended(reason, 1, evidence=["one", "two"])
        text = invoke("status").stdout
        assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("evidence")] == shown


def test_a_broken_record_of_one_rank_hides_no_other(slurm: Any, training: Any) -> None:
    training.attempt.pid_file(3).write_text('{"rank": 3, ')
    with training.attempt.event_file(5).open("ab") as stream:
        stream.write(b'\xff\xfe{"kind": "heart')
    os.utime(training.attempt.event_file(5), (training.now - 300, training.now - 300))
    status = read_status(training.run)
    assert status.num_started == 7
    assert status.slowest is not None and status.slowest.rank == 5


def test_a_job_leads_to_its_run(slurm: Any, make_trial: Any) -> None:
    trial = make_trial("it's $HOME")
    slurm.answer("squeue", line("RUNNING", comment=f"bsl:{trial.run.path}".replace(" ", "%20")))
    assert json.loads(invoke("status", "--jobid", "12", "--json").stdout)["run"]["directory"] == str(trial.run.path)


def test_a_job_that_left_the_queue_is_found_by_its_record(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    trial.ended("finished", 0)
    assert has_parts(invoke("status", "--jobid", "12").stdout, "COMPLETED", "exit.json")


def test_a_foreign_job_gets_slurms_part_only(slurm: Any, trial: Any, check_text: CheckText) -> None:
    slurm.answer("squeue", line("RUNNING", job_id="99"))
    check_text(without_ages(invoke("status", "--jobid", "99").stdout))
    document = json.loads(invoke("status", "--jobid", "99", "--json").stdout)
    assert document["run"] is None and document["job"]["hostlist"] == "n[0-3]"


def test_the_run_directory_of_a_job_is_gone(slurm: Any, trial: Any) -> None:
    slurm.answer("squeue", line("RUNNING", job_id="99", comment="bsl:/no/such/run"))
    done = invoke("status", "--jobid", "99")
    assert done.exit_code == 2 and has_parts(done.stderr, "/no/such/run")


@pytest.mark.parametrize("argument", ["trial", "runs/trial", "./runs/trial/"])
def test_runs_are_named_by_name_or_path(slurm: Any, trial: Any, argument: str) -> None:
    assert str(trial.run.path) in invoke("status", argument).stdout


def test_runs_are_looked_up_under_bsl_runs(
    slurm: Any, trial: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert invoke("status", "trial").exit_code == 2
    monkeypatch.setenv("BSL_RUNS", str(tmp_path / "runs"))
    assert invoke("status", "trial").exit_code == 0


def test_what_is_not_there_is_one_clear_error(slurm: Any, trial: Any, check_text: CheckText) -> None:
    words = ("status nope", "status ./nope", "logs nope", "cancel nope", "status trial --jobid 12")
    refused = [invoke(*each.split()) for each in words]
    trial.run.attempts_folder.rename(trial.run.path / "away")
    refused.append(invoke("status", "trial"))
    assert {done.exit_code for done in refused} == {2}
    check_text(*(done.stderr for done in refused))


def test_list_asks_slurm_once_and_not_about_the_dead(slurm: Any, make_trial: Any) -> None:
    alive, dead, broken = make_trial("alive"), make_trial("dead"), make_trial("broken")
    alive.event(4, "step", 5, step=7)
    dead.add_attempt("0001", job_id="13")
    dead.ended("crashed", 1)
    broken.attempt.job.write_text("{")
    slurm.answer("squeue", line("RUNNING", comment=f"bsl:{alive.run.path}"))
    document = json.loads(invoke("list", "--json").stdout)
    states = {run["name"]: (run["state"], run["step"], bool(run["problem"])) for run in document["runs"]}
    assert states == {
        "alive": ("RUNNING", 7, False),
        "dead": ("FAILED", None, False),
        "broken": ("UNKNOWN", None, True),
    }
    [call] = slurm.calls("squeue")
    assert "--jobs=12" in call["argv"]
    text = invoke("list").stdout
    assert "7/20" in text and "alive" in text and "broken" in text


def as_somebody_else(*words: str) -> subprocess.CompletedProcess[str]:
    """`bsl` without root's right to read everything; anybody else does not have it."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("root needs setpriv to give its right away")
    rights = "-dac_override,-dac_read_search"
    less = [str(setpriv), f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.geteuid() == 0 else []
    argv = [*less, sys.executable, "-m", "bigsci_launch", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_that_may_not_be_read_is_one_line_of_the_list(make_trial: Any) -> None:
    trials = {name: make_trial(name) for name in ("open", "folder", "attempts", "attempt", "records")}
    closed = [
        trials["folder"].run.path,
        trials["attempts"].run.attempts_folder,
        trials["attempt"].attempt.path,
        trials["records"].attempt.events,
    ]
    for path in closed:
        path.chmod(0)
    try:
        runs = json.loads(as_somebody_else("list", "--json").stdout)["runs"]
        text, latest = as_somebody_else("list"), as_somebody_else("status")
    finally:
        for path in closed:
            path.chmod(0o755)
    problems = {run["name"]: (run["problem"] or "").rpartition(": ")[2] for run in runs}
    assert problems == {"open": "", **dict.fromkeys(sorted(set(trials) - {"open"}), "Permission denied")}
    assert text.returncode == 0 and text.stdout.count("Permission denied") == len(closed)
    assert "records/attempts/0001/events: Permission denied" in latest.stderr, "the run that was submitted last"


def test_an_empty_list(slurm: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSL_RUNS", str(tmp_path / "none"))
    done = invoke("list")
    assert (done.exit_code, done.stdout) == (0, "") and "no runs" in done.stderr
    assert json.loads(invoke("list", "--json").stdout)["runs"] == []
    assert not slurm.calls("squeue")
