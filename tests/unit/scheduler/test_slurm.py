from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.errors import AmbiguousJob, JobNotFound, SlurmError, SlurmRefused, SlurmUnavailable
from bigsci_launch.scheduler import slurm
from bigsci_launch.scheduler.command import run_slurm, scrubbed_environment
from bigsci_launch.scheduler.job import JobState

Install = Callable[..., Any]
LINE = "12|RUNNING|root|debug|4|n[1-4]|None|2026-11-21T01:02:03|N/A|1:00|N/A|demo|bsl:/runs/demo\n"


def test_a_missing_command_is_unavailable_with_a_hint(fake_slurm: Install) -> None:
    fake_slurm()
    with pytest.raises(SlurmUnavailable, match="squeue: command not found") as caught:
        slurm.query_job("1")
    assert "--local" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "squeue: fatal: Could not establish a configuration source",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
    ],
)
def test_an_absent_controller_is_unavailable(fake_slurm: Install, words: str) -> None:
    fake_slurm("squeue").answer("squeue", stderr=words + "\n", rc=1)
    with pytest.raises(SlurmUnavailable) as caught:
        slurm.query_job("1")
    assert words.split(": ")[-1] in caught.value.message
    assert caught.value.returncode == 1 and caught.value.argv[0] == "squeue"


def test_a_command_that_hangs_is_ended_and_quoted(fake_slurm: Install) -> None:
    fake_slurm("squeue").answer("squeue", sleep_s=60)
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match=r"no answer in 0\.3 s"):
        run_slurm(["squeue"], timeout_s=0.3)
    assert time.monotonic() - began < 50


def test_a_refusal_shows_all_words_of_a_sites_plugin_once(fake_slurm: Install) -> None:
    said = [
        "Your project has no hours left.",
        "Balance: -12 h.",
        "Ask for more.",
        "Or use --qos=lowprio.",
        "Thank you.",
    ]
    last = "Batch job submission failed: Unspecified error"
    words = "".join(f"sbatch: error: {line}\n" for line in [*said, *said, last])
    fake_slurm("sbatch").answer("sbatch", stderr=words, rc=1)
    with pytest.raises(SlurmRefused) as caught:
        slurm.submit_script(["sbatch", "--parsable", "x.sh"])
    assert caught.value.message.endswith("; ".join([*said, last]))
    assert all(caught.value.message.count(line) == 1 for line in said) and caught.value.stderr == words


@pytest.mark.parametrize("said", ["77\n", "77;cluster2\n", "a plugin talks\n77\n"])
def test_submission_returns_the_job_id_alone(fake_slurm: Install, said: str) -> None:
    fake_slurm("sbatch").answer("sbatch", said)
    assert slurm.submit_script(["sbatch", "--parsable", "x.sh"]).job_id == "77"


CONFIG = "Configuration data as of 2026-11-21T01:02:03\nAccountingStorageHost   = localhost\nClusterName     = moon\n"


@pytest.mark.parametrize(
    ("said", "config", "cluster"),
    [("77\n", CONFIG, "moon"), ("77;sun\n", CONFIG, "sun"), ("77\n", "", None), ("77\n", None, None)],
)
def test_submission_notes_the_cluster(fake_slurm: Install, said: str, config: str | None, cluster: str | None) -> None:
    fake = fake_slurm("sbatch") if config is None else fake_slurm("sbatch", "scontrol")
    fake.answer("sbatch", said)
    fake.answer("scontrol", config or "", rc=0 if config else 1)
    assert slurm.submit_script(["sbatch", "--parsable", "x.sh"]).cluster == cluster
    assert bool(fake.calls("scontrol")) == (config is not None and ";" not in said)


def test_an_answer_of_several_clusters_names_each(fake_slurm: Install) -> None:
    fake_slurm("squeue").answer("squeue", "CLUSTER: sun\n" + LINE + "CLUSTER: moon\n" + LINE.replace("12|", "13|", 1))
    assert {job.job_id: job.cluster for job in slurm.query_jobs({"12": None, "13": None}).values()} == {
        "12": "sun",
        "13": "moon",
    }


def test_a_number_that_two_clusters_gave_is_that_of_the_run(fake_slurm: Install) -> None:
    fake_slurm("squeue").answer("squeue", "CLUSTER: sun\n" + LINE + "CLUSTER: moon\n" + LINE)
    assert slurm.query_jobs({"12": "sun"})["12"].cluster == "sun"
    with pytest.raises(AmbiguousJob, match="moon, sun"):
        slurm.query_job("12")


def test_the_name_of_a_cluster_is_no_node(fake_slurm: Install) -> None:
    fake_slurm("sinfo").answer("sinfo", "CLUSTER: sun\ndebug* n0\nCLUSTER: moon\ngpu m0\n")
    assert (slurm.partition_nodes("debug"), slurm.partition_nodes(None)) == (["n0", "m0"], ["n0"])


GONE = "Unable to contact slurm controller (connect failure)"
LOST = "Zero Bytes were transmitted or received"


@pytest.mark.parametrize(
    ("command", "words", "is_repeated"),
    [
        ("squeue", GONE, True),
        ("squeue", LOST, True),
        ("scancel 12", GONE, True),
        ("sbatch job.sh", GONE, True),
        ("sbatch job.sh", LOST, False),
        ("scontrol requeue 12", LOST, False),
        ("squeue", "Invalid partition name specified", False),
    ],
)
def test_what_met_a_restart_of_slurmctld_is_repeated_once(
    fake_slurm: Install, monkeypatch: pytest.MonkeyPatch, command: str, words: str, is_repeated: bool
) -> None:
    """What was sent may have been done, and is not asked for twice."""
    argv = command.split()
    fake = fake_slurm(argv[0])
    monkeypatch.setattr("bigsci_launch.scheduler.command.AGAIN_AFTER_S", 60.0)
    monkeypatch.setattr("time.sleep", lambda _: fake.answer(argv[0], "done"))
    fake.answer(argv[0], stderr=f"slurm_load_jobs error: {words}\n", rc=1)
    if is_repeated:
        assert run_slurm(argv).stdout == "done"
    else:
        with pytest.raises(SlurmError):
            run_slurm(argv)
    assert len(fake.calls(argv[0])) == 1 + is_repeated


@pytest.mark.parametrize(
    ("private", "user", "hides"), [("jobs,nodes", 1, True), ("nodes", 1, False), ("jobs", 0, False)]
)
def test_a_cluster_may_hide_jobs(
    fake_slurm: Install, monkeypatch: pytest.MonkeyPatch, private: str, user: int, hides: bool
) -> None:
    fake = fake_slurm("squeue", "scontrol")
    fake.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    fake.answer("scontrol", f"{CONFIG}PrivateData             = {private}\n")
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(JobNotFound) as caught:
        slurm.query_job("12")
    assert (caught.value.hint == slurm.ONLY_OWN_JOBS) == hides


def test_an_answer_without_a_job_id_is_refused(fake_slurm: Install) -> None:
    fake_slurm("sbatch").answer("sbatch", "Submitted batch job 77\n")
    with pytest.raises(SlurmRefused, match="no job ID"):
        slurm.submit_script(["sbatch", "--parsable", "x.sh"])


def test_the_outer_jobs_variables_do_not_reach_slurm(fake_slurm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_slurm("sbatch")
    fake.answer("sbatch", "77\n")
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SLURM_CONF", "SQUEUE_USERS"):
        monkeypatch.setenv(name, "outer")
    slurm.submit_script(["sbatch", "--parsable", "x.sh"])
    [call] = fake.calls("sbatch")
    assert {name for name in call["env"] if name.startswith(("SLURM", "SBATCH", "SQUEUE"))} == {"SLURM_CONF"}


def test_scrubbing_keeps_what_is_not_slurms() -> None:
    kept = {"PATH": "p", "SLURM_CONF": "c", "MY_SLURM_THING": "x"}
    assert scrubbed_environment({**kept, "SLURM_PROCID": "3", "PMIX_RANK": "3"}) == kept


def test_squeue_is_asked_once_for_all_jobs(fake_slurm: Install) -> None:
    fake = fake_slurm("squeue")
    fake.answer("squeue", LINE + LINE.replace("12|", "13|", 1))
    assert set(slurm.query_jobs(dict.fromkeys(["12", "13", "14"]))) == {"12", "13"}
    [call] = fake.calls("squeue")
    assert call["argv"][1:6] == ["-h", "-t", "all", "--jobs=12,13,14", "-o"]


@pytest.mark.parametrize("job_id", ["12+x", f"12+{'9' * 5000}", "12+-1", "twelve"])
def test_an_answer_about_a_job_with_no_id_is_left_out(fake_slurm: Install, job_id: str) -> None:
    fake = fake_slurm("squeue")
    fake.answer("squeue", LINE.replace("12|", "12+0|", 1) + LINE.replace("12|", f"{job_id}|", 1))
    assert list(slurm.query_jobs({"12": None})["12"].components) == [0]


def test_a_job_id_is_never_an_option(fake_slurm: Install) -> None:
    """`-j -1` would be the option `-1` of squeue and of sacct: what is no ID is not asked about at all."""
    fake = fake_slurm("squeue", "sacct")
    with pytest.raises(JobNotFound, match="'-1' is not the ID of a job"):
        slurm.query_job("-1")
    assert not [call for name in ("squeue", "sacct") for call in fake.calls(name)]


def test_sacct_answers_for_a_job_that_left_the_queue(fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "sacct")
    fake.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    fake.answer("sacct", LINE.replace("RUNNING", "CANCELLED by 0"))
    job = slurm.query_job("12")
    assert (job.state, job.source, job.raw_state) == (JobState.CANCELLED, "sacct", "CANCELLED by 0")


def test_a_job_that_nobody_knows_is_not_found(fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "sacct")
    fake.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    fake.answer("sacct", stderr="Slurm accounting storage is disabled\n", rc=1)
    with pytest.raises(JobNotFound, match="job 12"):
        slurm.query_job("12")


def test_cancelling_somebody_elses_job_is_refused(fake_slurm: Install) -> None:
    words = "scancel: error: Kill job error on job id 12: Access/permission denied\n"
    fake_slurm("scancel").answer("scancel", stderr=words, rc=1)
    with pytest.raises(SlurmRefused, match="permission denied"):
        slurm.cancel_job("12")


def test_a_step_overlaps_and_takes_no_gpu() -> None:
    argv = slurm.step_argv("12", ["sh", "-c", 'echo "$HOME"'], nodes=["n1", "n4"])
    assert {"--overlap", "--gres=gpu:0", "--jobid=12", "--nodelist=n1,n4", "--ntasks=2"} < set(argv)
    assert (argv[0], argv[-3:]) == ("srun", ["sh", "-c", 'echo "$HOME"'])


def test_nodes_are_listed_once(fake_slurm: Install) -> None:
    fake_slurm("sinfo").answer("sinfo", "n1|allocated|none\nn1|allocated|none\nn2|down*|Not responding\n")
    assert [(node.name, node.is_responding) for node in slurm.query_nodes("n[1-2]")] == [("n1", True), ("n2", False)]
