from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.errors import CollectError
from bigsci_launch.scheduler.job import format_comment
from bigsci_launch.spy.evidence.bundle import Bundle
from bigsci_launch.spy.evidence.calls.flight_recorder import parse_recorder
from bigsci_launch.spy.look.collect import (
    LATE_NODE_S,
    AnswerDeadline,
    WireReader,
    agent_program,
    collect,
    missing_recorders,
    unpack,
)
from bigsci_launch.spy.look.target import Target, find_target
from tests.support.texts import has_parts


def test_documents_come_through_a_stream_that_mixes_them_with_chatter(agent: ModuleType) -> None:
    texts = {f"n{node}": "".join(random.choices("abcdef", k=5000)) for node in range(3)}
    documents = {node: {"node": node, "text": text, "ranks": []} for node, text in texts.items()}
    lines = [line for document in documents.values() for line in agent.wire_lines(document)]
    assert len(lines) > 6
    assert max(map(len, lines)) < 1000, "srun cuts longer lines"
    lines += ["loading module cuda", "", "@bsl", "@bsl is a word", "@bsl n0 is a word"]
    random.shuffle(lines)
    reader = WireReader()
    completed = {node for line in lines if (node := reader.feed(line))}
    assert completed == set(documents)
    assert reader.documents == documents
    assert not reader.torn


def test_a_document_that_breaks_off_is_known_to_be_torn(agent: ModuleType) -> None:
    lines = agent.wire_lines({"node": "n1", "ranks": [], "text": "".join(random.choices("abcdef", k=5000))})
    reader = WireReader()
    for line in lines[:-1]:
        assert reader.feed(line) is None
    assert reader.torn == {"n1"}


@pytest.mark.parametrize("flags", [["-I", "-S"], ["-I", "-S", "-W", "error"]])
def test_the_agent_runs_from_standard_input_without_the_package(tmp_path: Path, flags: list[str]) -> None:
    program = agent_program(Target("x", {"node": "n7", "pid_files": str(tmp_path)}))
    assert_answers(run_program(program, [sys.executable, *flags, "-"], tmp_path), "n7")


def test_another_version_of_python_takes_the_text(tmp_path: Path) -> None:
    """Byte code is for one Python version only: it is ignored if the magic number differs."""
    program = agent_program(Target("x", {"node": "n7", "pid_files": str(tmp_path)}))
    assert repr(importlib.util.MAGIC_NUMBER) in program
    other = program.replace(repr(importlib.util.MAGIC_NUMBER), "b'another'").replace(
        "codes, sources = b'", "codes, sources = b'!"
    )
    assert_answers(run_program(other, [sys.executable, "-I", "-S", "-"], tmp_path), "n7")


def run_program(program: str, argv: list[str], folder: Path) -> str:
    return subprocess.run(
        argv, input=program, capture_output=True, text=True, timeout=30, cwd=folder, check=True
    ).stdout


def assert_answers(output: str, node: str) -> None:
    reader = WireReader()
    assert [found for line in output.splitlines() if (found := reader.feed(line))] == [node]
    assert (reader.documents[node]["ranks"], reader.documents[node]["found_by"]) == ([], "pid files")


def py_spy_text(line: int) -> str:
    """A thread as py-spy prints it, with every field."""
    frame = {
        "name": "load", "filename": "/src/data.py", "module": None, "short_filename": "data.py", "line": line,
        "locals": None, "is_entry": True, "is_shim_entry": True,
    }  # fmt: skip
    thread = {
        "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": False, "owns_gil": True,
        "frames": [frame], "process_info": None,
    }  # fmt: skip
    return json.dumps([thread])


def test_py_spys_text_becomes_stacks_and_equal_ones_are_kept_once() -> None:
    samples = [{"dump": py_spy_text(3)}, {"dump": py_spy_text(3)}, {"why": "no answer"}, {"dump": py_spy_text(4)}]
    found = unpack({"node": "n1", "ranks": [{"samples": samples}]})["ranks"][0]["samples"]
    assert found[0]["stack"]["threads"] == [
        {
            "tid": 7, "name": "MainThread", "active": False, "owns_gil": True,
            "frames": [{"function": "load", "file": "/src/data.py", "line": 3}],
        }
    ]  # fmt: skip
    assert found[1] == {"same_stack": True}
    assert found[2] == {"why": "no answer"}
    assert found[3]["stack"]["threads"][0]["frames"][0]["line"] == 4


def test_the_ranks_of_a_large_group_take_no_room() -> None:
    recorder = {"first_record": 0, "tokens": [], "stream": [], "last_sequence": {}, "open": []}
    sample = {"recorder": {**recorder, "members": {"0": list(range(4096)), "7": [1, 3]}}}
    found = unpack({"node": "n1", "ranks": [{"samples": [sample]}]})["ranks"][0]["samples"][0]["recorder"]
    assert found["members"] == {"0": "0-4095", "7": "1,3"}
    assert parse_recorder(found).members == {"0": tuple(range(4096)), "7": (1, 3)}


def test_a_torn_text_of_py_spy_is_a_reason() -> None:
    found = unpack({"node": "n1", "ranks": [{"samples": [{"dump": py_spy_text(3)[:-9]}]}]})
    assert "py-spy" in found["ranks"][0]["samples"][0]["why"]


def test_no_answer_from_any_node_is_one_clear_error(fake_slurm: Callable[..., Any], tmp_path: Path) -> None:
    slurm = fake_slurm("squeue", "sinfo", "srun")
    slurm.answer("squeue", "7|RUNNING|me|debug|2|n[1-2]|None|N/A|N/A|0:10|N/A|job|(null)\n")
    slurm.answer("sinfo", "n1|mixed|none\nn2|mixed|none\n")
    slurm.answer("srun", stderr="srun: error: Unable to create step for job 7: Job/step already completing\n", rc=1)
    with pytest.raises(CollectError, match="Unable to create step") as caught:
        collect(find_target(None, "7"))
    assert has_parts(caught.value.hint or "", "srun --overlap", "--jobid=7", "--gres=gpu:0")
    argv = slurm.calls("srun")[0]["argv"]
    assert {"--overlap", "--gres=gpu:0", "--jobid=7", "--nodelist=n1,n2", "--ntasks-per-node=1"} <= set(argv)


def test_a_silent_node_does_not_delay_the_others(
    fake_slurm: Callable[..., Any], agent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three nodes answer, and srun never ends: the look ends anyway, long before its limit."""
    slurm = fake_slurm("squeue", "sinfo")
    slurm.answer("squeue", "7|RUNNING|me|debug|3|n[1-3]|None|N/A|N/A|0:10|N/A|job|(null)\n")
    slurm.answer("sinfo", "n1|mixed|none\nn2|mixed|none\nn3|mixed|none\n")
    lines = [line for node in ("n1", "n3") for line in agent.wire_lines({"node": node, "ranks": []})]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    srun = slurm.folder / "bin" / "srun"
    srun.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/lines\nexec /bin/sleep 60\n")
    srun.chmod(0o755)
    monkeypatch.setattr("bigsci_launch.spy.look.collect.LATE_NODE_S", 0.5)
    began = time.monotonic()
    found = collect(find_target(None, "7")).collection
    assert time.monotonic() - began < 20.0
    assert [silent["node"] for silent in found["nodes_silent"]] == ["n2"]
    assert found["nodes_silent"][0]["why"].startswith("no answer in ")


def test_a_node_that_slurm_cannot_reach_is_left_out_and_told(fake_slurm: Callable[..., Any]) -> None:
    slurm = fake_slurm("squeue", "sinfo")
    slurm.answer("squeue", "7|RUNNING|me|debug|2|n[1-2]|None|N/A|N/A|0:10|N/A|job|(null)\n")
    slurm.answer("sinfo", "n1|mixed|none\nn2|mixed*|none\n")
    target = find_target(None, "7")
    assert (target.nodes, list(target.down)) == (("n1",), ["n2"]) and "mixed*" in target.down["n2"]


def test_a_job_runs_on_though_its_run_directory_was_deleted(fake_slurm: Callable[..., Any], tmp_path: Path) -> None:
    slurm = fake_slurm("squeue", "sinfo")
    comment = format_comment(str(tmp_path / "runs" / "deleted"))
    slurm.answer("squeue", f"7|RUNNING|me|debug|1|n1|None|N/A|N/A|0:10|N/A|job|{comment}\n")
    slurm.answer("sinfo", "n1|mixed|none\n")
    target = find_target(None, "7")
    assert (target.nodes, target.run, dict(target.request)) == (("n1",), None, {"scheduler": "Slurm", "job_id": "7"})


def test_a_job_that_waits_has_no_stacks(fake_slurm: Callable[..., Any]) -> None:
    slurm = fake_slurm("squeue")
    slurm.answer("squeue", "7|PENDING|me|debug|2||Resources|N/A|N/A|0:00|N/A|job|(null)\n")
    with pytest.raises(CollectError, match="PENDING"):
        find_target(None, "7")


def test_of_local_variables_only_whom_a_communication_is_with_is_kept() -> None:
    """py-spy lists every variable with its text; none of the others may reach the evidence."""

    def frame(name: str, file: str, **local: str) -> dict[str, Any]:
        variables = [{"name": key, "addr": 1, "arg": True, "repr": text} for key, text in local.items()]
        return {"name": name, "filename": file, "line": 5, "locals": variables}

    c10d = "/venv/torch/distributed/distributed_c10d.py"
    frames = [
        frame("recv", c10d, src="3", tag="7", group="None", tensor="<Tensor>", group_src="secret"),
        frame("load", "/src/train.py", src="4", token="1234"),
    ]
    threads = [{"os_thread_id": 9, "thread_name": None, "active": False, "owns_gil": False, "frames": frames}]
    sample = {"mono": 0.0, "state": "S", "dump": json.dumps(threads)}
    kept = unpack({"ranks": [{"samples": [sample]}]})["ranks"][0]["samples"][0]["stack"]["threads"][0]["frames"]
    assert kept == [
        {"function": "recv", "file": c10d, "line": 5, "arguments": {"src": 3, "tag": 7}},
        {"function": "load", "file": "/src/train.py", "line": 5},
    ]


@pytest.mark.parametrize(
    ("arguments", "own_group"),
    [
        ({"args": "(<Tensor at 0x7>)", "kwargs": "{}"}, ["0"]),
        ({"args": "()", "kwargs": '{"group": <torch._C._distributed_c10d.ProcessGroup at 0x7>}'}, ["1"]),
        ({"args": "(<Tensor at 0x7>, ...)", "kwargs": "{}"}, []),
        ({"args": "([<Tensor at 0x7>, ...], <Tensor at 0x8>)", "kwargs": '{"group": None}'}, ["0"]),
        ({}, []),
    ],
)
def test_only_variables_that_tell_communications_apart_leave_the_node(
    agent: ModuleType, arguments: dict[str, str], own_group: list[str]
) -> None:
    def frame(name: str, file: str, **values: str) -> dict[str, Any]:
        given = [{"name": each, "repr": value} for each, value in values.items()]
        return {"name": name, "filename": file, "line": 5, "locals": given}

    frames = [
        frame("all_reduce", "/venv/torch/distributed/distributed_c10d.py", tag="7", key="secret"),
        frame("wrapper", "/venv/torch/distributed/c10d_logger.py", **arguments),
    ]
    found = json.loads(sys.modules["node_stacks"].without_values(json.dumps([{"frames": frames}])))[0]["frames"]
    assert [(each["name"], each["repr"]) for each in found[0]["locals"]] == [
        ("tag", "7"), *(("own_group", value) for value in own_group),
    ]  # fmt: skip
    assert found[1]["locals"] is None


def test_ranks_whose_recorder_could_not_be_had_are_counted_by_the_reason() -> None:
    """A reason given in the first sample does not count if the recorder was read later."""
    why = "it could not be pulled: the process is stopped or traced"
    samples = {
        0: [{}, {"recorder_why": why}],
        1: [{"recorder_why": "no answer"}, {"recorder": {}}],
        2: [{"recorder_why": "no answer"}, {"recorder_why": why}],
        3: [{}, {}],
    }
    document = {"node": "n1", "ranks": [{"rank": rank, "samples": each} for rank, each in samples.items()]}
    assert missing_recorders(Bundle({}, (document,))) == {why: [0, 2]}


def test_a_stack_that_never_changes_is_stored_once() -> None:
    samples = [{"dump": py_spy_text(3)}, {"same_stack": True}, {"dump": py_spy_text(3)}, {"why": "x"}]
    samples.append({"dump": py_spy_text(3)})
    found = unpack({"ranks": [{"samples": samples}]})["ranks"][0]["samples"]
    assert [sorted(sample) for sample in found] == [["stack"], ["same_stack"], ["same_stack"], ["why"], ["stack"]]


def test_every_node_gets_the_time_that_it_is_asked_to_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    grace = AnswerDeadline(4, 40.0, settle_s=60.0)
    assert grace.until == 200.0
    now = 165.0
    grace.hear(1)
    assert grace.until == 200.0
    grace.hear(2)
    assert grace.until == 165.0 + LATE_NODE_S, "they needed 5 s more"


def test_settling_looks_at_processes_and_not_at_files() -> None:
    done = CliRunner().invoke(bsl, ["spy", "--settle", "5", "--bundle", "somewhere"])
    assert done.exit_code == 2
    assert has_parts(done.stderr, "--settle", "--native", "--step", "--flight-recorder", "--bundle")
    assert CliRunner().invoke(bsl, ["spy", "--settle", "601"]).exit_code == 2
