"""`bsl submit` and related commands against fakes of Slurm's commands."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import load_run
from bigsci_launch.launch import start_job
from bigsci_launch.launch.freeze import write_tools
from bigsci_launch.launch.notes import notes
from bigsci_launch.launch.prepare import prepare
from bigsci_launch.runs.attempts import JobRecord, read_job, write_job
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.scheduler.job import format_comment
from bigsci_launch.scheduler.local import Launcher
from tests.support.command import invoke
from tests.support.texts import CheckText, has_parts

pytestmark = pytest.mark.slow

Install = Callable[..., Any]
USER = pwd.getpwuid(os.getuid()).pw_name
RunFile = Callable[..., Path]
RUN = Path("runs/trial")
MODEL = {"hidden_size": 8, "num_attention_heads": 2, "sequence_length": 8, "vocab_size": 64}
COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "sacct", "scontrol")
TIMED_OUT = "error: Socket timed out on send/recv operation\n"


def line(job_id: str, state: str, comment: str = "(null)", reason: str = "None") -> str:
    return f"{job_id}|{state}|{USER}|debug|2|n[0-1]|{reason}|2026-11-21T01:02:03|N/A|1:00|N/A|trial|{comment}\n"


@pytest.fixture
def slurm(fake_slurm: Install) -> Any:
    fake = fake_slurm("sbatch", "squeue", "scancel", "sinfo")
    fake.answer("sbatch", "77\n")
    fake.answer("squeue", line("77", "RUNNING"))
    return fake


def test_a_pipe_gets_the_job_id_alone(slurm: Any, run_file: RunFile) -> None:
    done = invoke("submit", str(run_file()))
    assert (done.exit_code, done.stdout) == (0, "77\n"), done.output
    [call] = slurm.calls("sbatch")
    attempt = RUN.resolve() / "attempts" / "0001"
    assert call["argv"] == ["sbatch", "--parsable", str(attempt / "script.sh")]
    assert call["cwd"] == str(Path.cwd())
    record = read_job(RunDir(RUN.resolve()).attempt("0001"))
    assert record is not None and (record.scheduler, record.job_id, record.launcher) == ("slurm", "77", None)
    assert (attempt / "script.sh").stat().st_mode & 0o111


def test_the_tools_of_an_attempt_need_nothing_else(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("0001")
    attempt.make()
    write_tools(attempt)
    names = {path.relative_to(attempt.tools).as_posix() for path in attempt.tools.rglob("*") if path.is_file()}
    assert {"bsl-job.pyz", "rank_runner.py", "check_node.py", "ring_site/sitecustomize.py", "calls_native.c"} <= names
    assert not {name for name in names if name.startswith("node_")}
    for words in (["rank_runner.py"], ["bsl-job.pyz", "exit-reason"], ["bsl-job.pyz", "keep-watch"]):
        argv = [sys.executable, "-I", "-S", str(attempt.tools / words[0]), *words[1:], "--help"]
        subprocess.run(argv, check=True, capture_output=True, timeout=300)


def test_the_script_is_that_of_the_dry_run(slurm: Any, run_file: RunFile, check_text: CheckText) -> None:
    path = str(run_file())
    dry = invoke("submit", path, "--dry-run")
    document = json.loads(invoke("submit", path, "--dry-run", "--json").stdout)
    assert not slurm.calls("sbatch") and not RUN.exists()
    invoke("submit", path)
    script = (RUN / "attempts" / "0001" / "script.sh").read_text()
    assert dry.stdout.startswith(script)
    check_text(dry.stdout.removeprefix(script))
    assert document["script"] == script and document["schema_version"] == 1
    assert document["rank_map"][1] == {"node_rank": 1, "ranks": "2-3", "coordinates": "dp1 pp0 tp0-1"}
    assert document["exit_margin"]["margin_s"] == 64
    assert "--nodes=2" in document["options"] and "--kill-on-bad-exit=1" in document["step_options"]


def test_context_and_expert_ranks_of_another_program_are_laid_out(slurm: Any, run_file: RunFile) -> None:
    sizes = {"tensor_parallel_size": 1, "context_parallel_size": 2}
    path = str(run_file(parallelism=sizes))
    dry = invoke("submit", path, "--dry-run")
    assert has_parts(dry.stdout, "4 ranks", "tp=1,cp=2,pp=1,dp=2; ", "--topology tp=1,cp=2,pp=1,dp=2 ")
    assert has_parts(dry.stdout, "dp1 pp0 cp0-1 tp0") and "axes: " not in dry.stderr
    assert invoke("submit", path).exit_code == 0
    assert json.loads((RUN / "run.json").read_text())["topology"] == {"tp": 1, "pp": 1, "dp": 2, "cp": 2}
    smaller = ["--set", "parallelism.context_parallel_size=1", "--set", "slurm.nodes=1"]
    assert "topology.cp: 2 -> 1\n" in invoke("submit", path, *smaller).stderr


def test_the_trainer_takes_no_context_parallelism(slurm: Any, run_file: RunFile) -> None:
    path = run_file(run={"name": "trial"}, parallelism={"context_parallel_size": 2})
    done = invoke("submit", str(path), "--dry-run")
    assert done.exit_code == 2 and has_parts(done.stderr, "parallelism.context_parallel_size: ", "run.command")


def test_the_cut_of_the_layers_is_shown_and_written_down(slurm: Any, run_file: RunFile) -> None:
    """A queued job keeps its cut when the calibration changes."""
    path = str(
        run_file(
            run={"name": "trial"},
            model={**MODEL, "num_layers": 5, "vocab_size_multiple": 32},
            parallelism={"pipeline_parallel_size": 2, "partition_method": "time"},
        )
    )
    dry = invoke("submit", path, "--dry-run")
    assert "# stage 0: VocabularyEmbedding, LearnedPositions, 3 x TransformerLayer; " in dry.stdout
    assert "# stage 1: 2 x TransformerLayer, FinalNorm, VocabularyEmbedding; " in dry.stdout
    document = json.loads(invoke("submit", path, "--dry-run", "--json").stdout)
    assert [stage["layers"].count("TransformerLayer") for stage in document["stages"]] == [3, 2]
    # Per layer 12 x 64 + 13 x 8, both positions and the table of 64 rows of 8.
    assert document["stages"][0]["num_parameters"] == 3 * (12 * 64 + 13 * 8) + 8 * 8 + 64 * 8
    assert document["stages"][0]["milliseconds"] is None
    invoke("submit", path)
    assert 'partition_method: "time:3,2"' in (RUN / "attempts" / "0001" / "config.yaml").read_text().replace("'", '"')
    origins = json.loads((RUN / "attempts" / "0001" / "origins.json").read_text())
    assert origins["parallelism.partition_method"] == "computed"


def test_a_dry_run_asks_no_slurm(fake_slurm: Install, run_file: RunFile) -> None:
    fake = fake_slurm("sbatch", "squeue", "scontrol")
    for command in ("sbatch", "squeue", "scontrol"):
        fake.answer(command, rc=1, stderr="fatal\n")
    assert invoke("submit", str(run_file()), "--dry-run").exit_code == 0
    assert not any(fake.calls(command) for command in ("sbatch", "squeue", "scontrol"))


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        ("", (), {"sbatch": 1, "squeue": 1, "scontrol": 1}),
        ("COMPLETED", (), {"sbatch": 1, "squeue": 3, "scontrol": 1}),
        ("RUNNING", ("--set", "slurm.chain={by: queue, links: 2}"), {"sbatch": 2, "squeue": 4, "scontrol": 2}),
    ],
)
def test_a_submission_asks_each_question_once(
    fake_slurm: Install, run_file: RunFile, state: str, more: tuple[str, ...], expected: dict[str, int]
) -> None:
    fake, path = fake_slurm(*COMMANDS), str(run_file(run={"name": "trial"}))
    fake.answer("sbatch", "77\n")
    fake.answer("squeue", "")
    if state:
        invoke("submit", path)
        fake.answer("squeue", line("77", state))
    before = Counter({name: len(fake.calls(name)) for name in COMMANDS})
    assert invoke("submit", path, *more).exit_code == 0
    assert Counter({name: len(fake.calls(name)) for name in COMMANDS}) - before == expected


def test_refusal_shows_slurms_words_and_leaves_nothing(slurm: Any, run_file: RunFile) -> None:
    slurm.answer("sbatch", stderr="sbatch: error: Invalid qos specification\n", rc=1)
    done = invoke("submit", str(run_file()))
    assert done.exit_code == 3
    assert has_parts(done.stderr, "error: ", "sbatch", "Invalid qos specification")
    assert not RUN.exists()


def test_a_refused_second_attempt_leaves_the_first(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file())
    invoke("submit", path)
    slurm.answer("squeue", line("77", "COMPLETED"))
    slurm.answer("sbatch", stderr="sbatch: error: no\n", rc=1)
    assert invoke("submit", path).exit_code == 3
    assert [each.name for each in RunDir(RUN.resolve()).attempts()] == ["0001"]


def test_an_absent_controller_is_one_clear_error(slurm: Any, run_file: RunFile, check_text: CheckText) -> None:
    slurm.answer("sbatch", stderr="sbatch: error: Unable to contact slurm controller (connect failure)\n", rc=1)
    done = invoke("submit", str(run_file()))
    assert done.exit_code == 3
    check_text(done.output)
    assert not RUN.exists()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_one_attempt_at_a_time(slurm: Any, run_file: RunFile, state: str) -> None:
    path = str(run_file())
    invoke("submit", path)
    slurm.answer("squeue", line("77", state))
    done = invoke("submit", path)
    assert done.exit_code == 2
    assert f"attempt 0001 (job 77) is {state}" in done.stderr and "bsl cancel" in done.stderr
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL"])
def test_the_next_attempt_after_the_end(slurm: Any, run_file: RunFile, state: str) -> None:
    path = str(run_file())
    invoke("submit", path)
    slurm.answer("squeue", line("77", state))
    assert invoke("submit", path).exit_code == 0
    assert [each.name for each in RunDir(RUN.resolve()).attempts()] == ["0001", "0002"]


def test_a_job_that_nobody_knows_any_more_blocks_nothing(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file())
    invoke("submit", path)
    slurm.answer("squeue", "")
    assert invoke("submit", path).exit_code == 0


def test_a_submission_under_way_is_not_overtaken(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file())
    invoke("submit", path)
    job = RUN / "attempts" / "0001" / "job.json"
    job.unlink()
    done = invoke("submit", path)
    assert done.exit_code == 2 and "is being submitted" in done.stderr
    os.utime(job.parent / "script.sh", (1, 1))
    assert invoke("submit", path).exit_code == 0


# tests/slurm/test_lost_answers.py has the same with a slurmctld that answers late.
def test_an_attempt_stays_that_may_have_a_job(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch, check_text: CheckText
) -> None:
    monkeypatch.setattr(start_job, "LOOK_S", 0.0)
    path, script = str(run_file()), RUN.resolve() / "attempts" / "0001" / "script.sh"
    slurm.answer("sbatch", stderr=TIMED_OUT, rc=1)
    slurm.answer("squeue", "")
    done = invoke("submit", path)
    assert done.exit_code == 3
    texts = [done.stderr, invoke("status", "trial").stdout]
    slurm.answer("squeue", stderr=TIMED_OUT, rc=1)
    check_text(*texts, invoke("status", "trial").stdout, invoke("cancel", "trial").stderr)
    slurm.answer("squeue", f"78|(null)|{script}\n" + line("78", "PENDING"))
    assert "(job 78) is PENDING" in invoke("submit", path).stderr
    assert len(slurm.calls("sbatch")) == 1


def test_a_job_of_the_run_that_no_attempt_records_is_named(slurm: Any, run_file: RunFile) -> None:
    slurm.answer("squeue", f"79|{format_comment(str(RUN.resolve()))}|/some/where/script.sh\n")
    done = invoke("submit", str(run_file()))
    assert done.exit_code == 2 and has_parts(done.stderr, "job 79", "`scancel 79`")
    assert not slurm.calls("sbatch") and not RUN.exists()


def test_another_model_is_another_run(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file(run={"name": "trial"}))
    invoke("submit", path)
    slurm.answer("squeue", line("77", "COMPLETED"))
    done = invoke("submit", path, "--set", "model.num_layers=3", "--set", "parallelism.partition_method=uniform")
    assert done.exit_code == 2
    expected = "model.num_layers: 2 -> 3; parallelism.partition_method: type:transformer|embedding -> uniform"
    assert expected in done.stderr


def test_a_folder_that_is_no_run_is_left_alone(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file())
    RUN.mkdir(parents=True)
    (RUN / "thesis.tex").write_text("ten years of work")
    done = invoke("submit", path)
    assert done.exit_code == 2 and str(RUN) in done.stderr
    assert [each.name for each in RUN.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written(slurm: Any, run_file: RunFile) -> None:
    path = str(run_file())
    Path("runs").write_text("a file")
    done = invoke("submit", path)
    assert done.exit_code == 2 and "error: " in done.stderr and "hint: " in done.stderr, done.output
    assert isinstance(done.exception, SystemExit)


def test_a_job_that_cannot_be_noted_down_is_taken_back(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(start_job, "write_job", full)
    done = invoke("submit", str(run_file()))
    assert done.exit_code == 2 and "No space left on device" in done.stderr
    assert slurm.calls("scancel")[0]["argv"] == ["scancel", "77"]
    assert not RUN.exists()


def test_options_of_the_callers_environment_do_not_reach_the_job(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    done = invoke("submit", str(run_file()), "--set", "slurm.partition=debug")
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & set(slurm.calls("sbatch")[0]["env"])
    assert has_parts(done.stderr, "SBATCH_PARTITION=other", "slurm.partition (--set)", "--partition=debug")


SITE = "description: x\nscheduler: slurm\nranks_per_node: 2\naccount: six@a100\ndefault_time_limit: '01:00:00'\n"


@pytest.mark.parametrize(
    ("variable", "settings", "sent"),
    [
        ("SBATCH_ACCOUNT=mine", (), True),
        ("SBATCH_ACCOUNT=mine", ("slurm.account=theirs",), False),
        ("SBATCH_WCKEY=paper", (), True),
        ("SBATCH_TIMELIMIT=5", (), False),
        ("SBATCH_EXPORT=NONE", (), False),
        ("SBATCH_REQUEUE=1", (), False),
        ("SBATCH_OUTPUT=here", (), False),
    ],
)
def test_each_option_of_the_environment_applies_or_is_named(
    slurm: Any,
    run_file: RunFile,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    settings: tuple[str, ...],
    sent: bool,
    check_text: CheckText,
) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    Path("mysite.yaml").write_text(SITE)
    words = [word for each in settings for word in ("--set", each)]
    done = invoke("submit", str(run_file(site="mysite.yaml")), *words)
    assert done.exit_code == 0
    check_text(*(text for text in done.stderr.splitlines() if name in text))
    assert slurm.calls("sbatch")[0]["env"].get(name) == (value if sent else None)
    script = (RUN / "attempts" / "0001" / "script.sh").read_text()
    assert not sent or "#SBATCH --account=" not in script or name != "SBATCH_ACCOUNT"
    [told] = json.loads(invoke("submit", str(run_file()), "--dry-run", "--json").stdout)["caller_options"]
    assert (told["variable"], told["value"]) == (name, value)


def test_what_sbatch_says_although_it_accepts_the_job(slurm: Any, run_file: RunFile) -> None:
    warning = "sbatch: warning: account six@a100 has used 97 % of its hours"
    slurm.answer("sbatch", "plugin: hello\n77\n", stderr=f"{warning}\n\n")
    done = invoke("submit", str(run_file()))
    assert (done.stdout, done.exit_code) == ("77\n", 0)
    assert ["plugin: hello", warning] == [
        text for text in done.stderr.splitlines() if "hello" in text or "97 %" in text
    ]
    record = read_job(RunDir(RUN.resolve()).attempt("0001"))
    assert record is not None and record.said == ("plugin: hello", warning)
    slurm.answer("squeue", line("77", "COMPLETED"))
    document = json.loads(invoke("submit", str(run_file()), "--json").stdout)
    assert document["said"] == ["plugin: hello", warning]


def test_waiting_says_each_state_and_exits_as_the_training(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    real_sleep = time.sleep

    def pause(seconds: float) -> None:
        if seconds < 1:  # another's, such as subprocess waiting for a child
            return real_sleep(seconds)
        pauses.append(seconds)
        states = ["PENDING", "PENDING", "RUNNING", "RUNNING", "RUNNING", "RUNNING", "FAILED"]
        slurm.answer("squeue", line("77", states[len(pauses) - 1]))
        (RUN / "attempts" / "0001" / "exit.json").write_text('{"reason": "crashed", "exit_code": 41}')

    monkeypatch.setattr(time, "sleep", pause)
    slurm.answer("squeue", line("77", "PENDING"))
    done = invoke("submit", str(run_file()), "--wait")
    assert done.exit_code == 41
    assert done.stdout == "77\n"
    assert [text for text in done.stderr.splitlines() if text.startswith("job 77")] == [
        "job 77: PENDING",
        "job 77: RUNNING",
        "job 77: FAILED",
    ]
    assert pauses == [2, 4, 8, 16, 30, 30, 30]


def test_where_there_is_no_sbatch_nothing_starts_unless_asked(fake_slurm: Install, run_file: RunFile) -> None:
    fake_slurm()
    done = invoke("submit", str(run_file()))
    assert done.exit_code == 3 and not RUN.exists()
    assert has_parts(done.stderr, "minicluster", "sbatch")
    request = prepare(run_file(), working_directory=Path.cwd(), python=sys.executable, local=True).request
    assert (request.scheduler, request.topology.world_size, request.nodes) == ("local", 4, 1)


def test_more_ranks_than_a_machine_can_have_are_refused(
    slurm: Any, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("bigsci_launch.launch.start_job.start_launcher")  # if nothing refuses them, they must not start
    many = ["--set", "slurm.nodes=50000", "--set", "training.global_batch_size=50000"]
    done = invoke("submit", str(run_file()), "--local", *many)
    assert done.exit_code == 2 and "100000 ranks" in done.stderr
    assert not RUN.exists()


def test_a_dry_run_shows_the_job_of_a_slurm_site_where_there_is_no_slurm(
    fake_slurm: Install, run_file: RunFile
) -> None:
    fake_slurm()
    done = invoke("submit", str(run_file()), "--dry-run")
    assert "#SBATCH --nodes=2\n" in done.stdout and "\nsrun " in done.stdout
    assert has_parts(done.stderr, "sbatch", "--dry-run")
    document = json.loads(invoke("submit", str(run_file()), "--dry-run", "--json").stdout)
    assert (document["scheduler"], document["nodes"]) == ("slurm", 2)
    local = json.loads(invoke("submit", str(run_file()), "--dry-run", "--local", "--json").stdout)
    assert (local["scheduler"], local["world_size"], local["nodes"]) == ("local", 4, 1)


def test_detach_is_refused_on_slurm(slurm: Any, run_file: RunFile) -> None:
    done = invoke("submit", str(run_file()), "--detach")
    assert done.exit_code == 2 and "--detach" in done.stderr


def test_cancel_asks_scancel(slurm: Any, run_file: RunFile) -> None:
    invoke("submit", str(run_file()))
    slurm.answer("squeue", line("77", "RUNNING", comment=format_comment(str(RUN.resolve()))))
    done = invoke("cancel", "trial")
    assert (done.exit_code, slurm.calls("scancel")[0]["argv"]) == (0, ["scancel", "77"])
    assert "job 77" in done.stdout
    slurm.answer("squeue", line("77", "CANCELLED"))
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and "has ended: CANCELLED" in done.stderr


def test_somebody_elses_job_cannot_be_cancelled(slurm: Any, run_file: RunFile) -> None:
    invoke("submit", str(run_file()))
    slurm.answer("squeue", line("77", "RUNNING", comment=format_comment(str(RUN.resolve()))))
    slurm.answer("scancel", stderr="scancel: error: Kill job error on job id 77: Access/permission denied\n", rc=1)
    done = invoke("cancel", "trial")
    assert done.exit_code == 3 and "permission denied" in done.stderr and "only the owner" in done.stderr


def test_a_local_attempt_of_another_machine_cannot_be_cancelled_here(slurm: Any, run_file: RunFile) -> None:
    invoke("submit", str(run_file()))
    attempt = RunDir(RUN.resolve()).attempt("0001")
    record = read_job(attempt)
    assert record is not None
    write_job(attempt, JobRecord("local", record.submitted, launcher=Launcher(1, 1, f"not-{socket.gethostname()}")))
    done = invoke("cancel", "trial")
    assert done.exit_code == 2 and f"not-{socket.gethostname()}" in done.stderr


def test_a_secret_in_the_run_file_is_warned_of(slurm: Any, run_file: RunFile) -> None:
    env = {"HF_TOKEN": {"value": "hunter2", "reason": "downloads"}, "HF_HOME": {"value": "x", "reason": "cache"}}
    done = invoke("submit", str(run_file(env=env)))
    assert done.exit_code == 0
    assert [text.split(":")[1] for text in done.stderr.splitlines() if "run directory" in text] == [" env.HF_TOKEN"]


def test_a_run_for_a_slurm_site_says_that_it_starts_here(run_file: RunFile) -> None:
    loaded = load_run(run_file())
    [note] = notes(loaded, is_local=True)
    assert "4 ranks" in note
    assert notes(loaded, is_local=False) == []
