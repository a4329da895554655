"""What versions of Slurm print, read by the code that reads a real one.

Four are recorded from real ones by benchmarks/slurm_outputs.py. Six that no distribution has are written by hand:
recorded lines of the version next to them, changed as `written_from` says, and lines of sacct. The formats that bsl
passes to squeue, sinfo and sacct mean the same in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.endings.conclude import conclude
from bigsci_launch.endings.lines import Speaker
from bigsci_launch.endings.statements import read_statements
from bigsci_launch.endings.words import read_words
from bigsci_launch.errors import AmbiguousJob, JobNotFound, SlurmRefused
from bigsci_launch.runs.ending.output import parse_output
from bigsci_launch.scheduler import slurm
from bigsci_launch.scheduler.hostlist import expand_hostlist
from bigsci_launch.scheduler.job import JobState, format_comment, parse_job_line
from bigsci_launch.scheduler.reservations import query_maintenance
from bigsci_launch.scheduler.waiting import find_reason

Install = Callable[..., Any]
FOLDER = Path(__file__).parent / "recorded"


class Call(NamedTuple):
    """One recorded call."""

    version: str
    case: str
    argv: list[str]
    stdout: str
    stderr: str
    returncode: int
    truth: dict[str, Any]


def calls(pattern: str) -> list[Call]:
    documents = [json.loads(path.read_text()) for path in sorted(FOLDER.glob(pattern))]
    return [Call(document["version"], **printed) for document in documents for printed in document["printed"]]


RECORDED, WRITTEN = calls("slurm-*.json"), calls("written-*.json")
CALLS = RECORDED + WRITTEN


def cases(suffix: str, *keys: str) -> Any:
    """Parametrize over the calls whose case ends so, and of which the named facts are known."""
    found = [call for call in CALLS if call.case.endswith(suffix) and all(call.truth.get(key) for key in keys)]
    for group in (RECORDED, WRITTEN):
        has = {call.version for call in found if call in group}
        assert found and has in (set(), {call.version for call in group}), (suffix, has)
    return pytest.mark.parametrize("call", found, ids=lambda call: f"{call.version} {call.case}")


def answer(fake_slurm: Install, call: Call) -> None:
    fake_slurm(call.argv[0]).answer(call.argv[0], call.stdout, stderr=call.stderr, rc=call.returncode)


def test_every_version_since_20_11_is_there() -> None:
    assert sorted({call.version[:5] for call in CALLS}) == [
        "20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.argv[0] == "squeue" and "state" in call.truth],
    ids=lambda call: f"{call.version} {call.case}",
)  # fmt: skip
def test_a_job(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    job = slurm.query_job(call.truth["job"])
    assert (job.number, job.state, job.comment) == (
        str(int(call.truth["job"]) + len(call.truth.get("tasks", ())) // 2),
        JobState(call.truth["state"]),
        "bsl:/runs/a%20demo",
    )
    assert call.truth.get("nodes") in (None, expand_hostlist(job.hostlist))
    assert call.truth.get("reason") in (None, job.reason)
    assert call.truth.get("name") in (None, job.name)
    assert len(job.components) == call.truth.get("components", 0)
    assert None not in (job.submitted, job.num_nodes)
    assert job.state is JobState.PENDING or job.started is not None
    assert job.state is not JobState.PENDING or find_reason(job.reason) is not None


@cases("array", "tasks")
def test_the_tasks_of_an_array(call: Call, fake_slurm: Install) -> None:
    lines = [parse_job_line(line, "squeue") for line in call.stdout.splitlines()]
    found = {job.job_id: job for job in lines if job is not None}
    assert set(found) == {f"{call.truth['job']}_{task}" for task in call.truth["tasks"]}
    waiting = found[f"{call.truth['job']}_{call.truth['tasks'][1]}"]
    assert waiting.reason == call.truth["reason_of_others"] and find_reason(waiting.reason) is not None
    running, _ = call.truth["tasks"]
    both = call.stdout.replace("PENDING", "RUNNING")
    fake_slurm("squeue").answer("squeue", both)
    with pytest.raises(AmbiguousJob):
        slurm.query_job(call.truth["job"])
    assert slurm.query_job(f"{call.truth['job']}_{running}").state is JobState.RUNNING


@cases(": control", "output")
def test_where_a_job_prints(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    assert slurm.query_output(call.truth["job"]) == Path(call.truth["output"])


CONTROLS = [call for call in CALLS if call.case.endswith(": control") and call.truth.get("output")]
FREE = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=40) | st.sampled_from(
    ["StdOut=/evil", "a\n StdErr=/e StdIn=/e StdOut=/evil Power="]
)


@given(st.sampled_from(CONTROLS), FREE, FREE, FREE, FREE)
def test_where_a_job_prints_whatever_its_owner_writes_elsewhere(
    call: Call, name: str, comment: str, command: str, path: str
) -> None:
    """A blank and the next key end a path: a path with both cannot be told from them."""
    path = "/" + re.sub(r"[%=]", "", path).strip()
    line = call.stdout.replace(f"StdOut={call.truth['output']}", f"StdOut={path}")
    for before, text in (("JobName=", name), ("Comment=", comment), ("Command=", command), ("SubmitLine=", command)):
        line = line.replace(f" {before}", f" {before}{text} ")
    assert slurm.parse_outputs(line)[0][1] == Path(path)


@given(st.sampled_from(CALLS), st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"])))
def test_fields_are_those_that_were_printed_whatever_comes_last(call: Call, text: str) -> None:
    if call.argv[0] == "squeue" and call.truth:
        comment = format_comment(f"/{text}")
        for line in call.stdout.splitlines():
            job, changed = parse_job_line(line, ""), parse_job_line(line.replace("bsl:/runs/a%20demo", comment), "")
            assert job is not None and changed is not None
            assert changed.run_directory == f"/{text}"
            assert (changed.job_id, changed.state, changed.hostlist) == (job.job_id, job.state, job.hostlist)


@cases("accounting", "states")
def test_what_accounting_says_of_jobs_that_have_left(call: Call, fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "sacct")
    fake.answer("sacct", call.stdout)
    fake.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", rc=1)
    found = slurm.query_jobs(dict.fromkeys(call.truth["states"]))
    assert {job_id: job.state.value for job_id, job in found.items()} == call.truth["states"]
    assert {job.source for job in found.values()} == {"sacct"}
    assert (found["8"].num_nodes, found["1"].comment) == (3, "bsl:/runs/a%20demo")
    assert [job_id for job_id, job in found.items() if job.reason] == ["12"], "what it waited for is over"


@cases("nodes", "n0")
def test_only_nodes_that_are_down_are_lost(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    found = {node.name: node for node in slurm.query_nodes("n[0-5]")}
    assert {name: "given up" if node.is_given_up else "works" for name, node in found.items()} == call.truth
    assert {name for name, node in found.items() if not node.is_responding} == {"n5"}
    assert found["n1"].reason == "k8s: cordon" and found["n2"].raw_state in ("fail", "failing")


@cases("addresses", "nodes")
def test_the_addresses_of_nodes(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    found = slurm.query_addresses(call.truth["nodes"])
    assert list(found) == call.truth["nodes"] and all(address.startswith("10.213.") for address in found.values())


@cases("partition", "nodes")
def test_the_nodes_of_the_default_partition(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    assert slurm.partition_nodes(None) == call.truth["nodes"]


def named_node(call: Call) -> str | None:
    """The node that is lost; the srun of 20.11 names none."""
    return None if call.version.startswith("20.11") else call.truth.get("node")


@cases(": output", "kind")
def test_the_words_about_an_end(call: Call) -> None:
    ending = conclude(read_statements(call.stdout, "job.out", Speaker(), read_words()).statements, ())
    assert ending.kind == call.truth["kind"], ending
    assert named_node(call) in (None, ending.culprit.node if ending.culprit else None)


@cases("left early: output")
def test_who_left_early_and_who_still_ran(call: Call) -> None:
    output = parse_output(call.stdout, "0001")
    assert (output.left, output.running, output.waited_s) == ((0,), (1,), 2.0)


@cases("node fail: output", "node")
def test_a_lost_node_is_named(call: Call) -> None:
    assert list(parse_output(call.stdout, "0001").lost_nodes) == [node for node in [named_node(call)] if node]


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.case.startswith("refused") and call.returncode],
    ids=lambda call: f"{call.version} {call.case}",
)  # fmt: skip
def test_a_refusal_is_no_absence(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    with pytest.raises(SlurmRefused):
        slurm.submit_script(["sbatch", "--parsable", "job.sh"])


@cases("unknown job")
def test_a_job_that_slurm_does_not_know(call: Call, fake_slurm: Install) -> None:
    fake = fake_slurm("squeue", "sacct")
    fake.answer("squeue", call.stdout, stderr=call.stderr, rc=call.returncode)
    off = next(each for each in CALLS if each.case == "no accounting" and each.version[:2] >= call.version[:2])
    fake.answer("sacct", off.stdout, stderr=off.stderr, rc=off.returncode)
    with pytest.raises(JobNotFound):
        slurm.query_job("99999")


@cases("reservations", "name")
def test_a_maintenance(call: Call, fake_slurm: Install) -> None:
    answer(fake_slurm, call)
    (found,) = query_maintenance(["n0", "n1"])
    assert (found.name, found.nodes) == (call.truth["name"], {"n0"}) and found.ends is not None
    assert found.ends - found.begins == 3600
