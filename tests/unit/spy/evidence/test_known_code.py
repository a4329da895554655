"""What is known of frames: every file of it is read, today's answers hold, and a broken file hides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.problems import read_valid
from bigsci_launch.content import packaged
from bigsci_launch.errors import ConfigError
from bigsci_launch.spy.evidence import known_code
from bigsci_launch.spy.evidence.code_schema import KnownCodeFile
from bigsci_launch.spy.evidence.known_code import (
    call_scope,
    is_file,
    is_server,
    is_signal_handler,
    may_communicate,
    operation_of,
    phase_of,
    read_known_code,
)
from bigsci_launch.spy.evidence.stacks import Frame, ThreadStack, decisive_thread, parse_threads
from bigsci_launch.spy.taxonomy import HangClass

TESTS = Path(__file__).parents[1]
RECORDINGS = TESTS / "recordings"
FILES = sorted(packaged("diagnostics", "known").glob("*.yaml"))
FILE = """\
sources: [a test]
may_communicate:
  ours/comm.py: [exchange]
phases:
  - hang_class: H64
    calls: {ours/io.py: ["*"]}
"""


def frames_in(document: Any) -> Iterator[tuple[str, str]]:
    if isinstance(document, dict):
        if "function" in document and "file" in document:
            yield document["function"], document["file"]
        document = list(document.values())
    for child in document if isinstance(document, list) else ():
        yield from frames_in(child)


@cache
def recorded_frames() -> frozenset[tuple[str, str]]:
    """Every frame that a recording holds."""
    paths = [*RECORDINGS.rglob("*.json"), *packaged("diagnostics", "signatures").rglob("*.json")]
    return frozenset(frame for path in paths for frame in frames_in(json.loads(path.read_text())))


def recorded(question: Callable[[str, str], object]) -> set[str]:
    """`NAME FILE` of the recorded frames for which the answer is true, with the answer if it says more than that."""
    found = set()
    for function, file in recorded_frames():
        answer = question(function, file)
        words = f"{known_code.bare_name(function)} {file.rpartition('/')[2]}"
        found |= {words if answer is True else f"{words}: {answer}"} if answer else set()
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_and_says_where_its_knowledge_is_from(path: Path) -> None:
    assert read_valid(KnownCodeFile, path).sources
    assert path.read_text().startswith("# ")


def test_no_packaged_file_is_left_out() -> None:
    assert not known_code.PROBLEMS
    assert {"torch", "fsdp", "deepspeed", "megatron", "python", "kernel", "jax", "ray"} <= {path.stem for path in FILES}


def test_a_name_is_known_for_one_thing_only() -> None:
    """A function cannot be a phase and sound like one, and a wait for others is no idle thread."""
    code = read_known_code()
    for one, other in (("no_phase", "norms"), ("signal_handlers", "no_signal_handlers"), ("idle", "may_communicate")):
        first, second = code.calls(one), code.calls(other)
        shared = first.files.keys() & second.files.keys() - {"*"}
        assert not [name for name in shared if set(first.files[name]) & set(second.files[name])], (one, other)


def test_recorded_communications() -> None:
    c10d = "distributed_c10d.py"
    same = (
        "all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce barrier broadcast recv send"
    )
    assert {line for line in recorded(operation_of) if c10d in line} >= {
        *(f"{name} {c10d}: {name}" for name in (*same.split(), "new_group", "init_process_group")),
        f"_new_process_group_helper {c10d}: new_group",
    }
    assert sorted(known_code.POINT_TO_POINT) == ["batch_isend_irecv", "irecv", "isend", "recv", "send"]


def test_recorded_scopes() -> None:
    found = recorded(lambda function, file: call_scope(function, file, "all_reduce"))
    assert found == {
        "_aggregate_total_loss engine.py: dp",
        "_bcast_pipe_scalar engine.py: pp",
        "_build_key_size_numel_dictionaries data.py: tp",
        "_exec_recv_activations engine.py: previous stage",
        "_exec_recv_grads engine.py: next stage",
        "_exec_reduce_grads engine.py: dp-cp",
        "_exec_reduce_tied_grads engine.py: tied",
        "_reduce_outputs engine.py: dp",
        "all_reduce tensor.py: tp",
        "backward tensor.py: tp",
        "broadcast_data data.py: tp",
        "buffered_allreduce_fallback engine.py: dp-cp",
        "full utils.py: tp",
        "get_grad_norm_direct stage_1_and_2.py: model",
    }
    assert call_scope("PipelineEngine._aggregate_total_loss", "/v/pipe/engine.py", "broadcast") == "pp"


def test_recorded_signal_handlers_and_norms() -> None:
    """`_env_rendezvous_handler` only sounds like a signal handler."""
    assert recorded(is_signal_handler) == {"save_on_signal host_stall.py"}
    assert recorded(known_code.is_norm) == {
        "get_grad_norm_direct stage_1_and_2.py",
        "scaled_global_norm stage_1_and_2.py",
    }
    assert recorded(known_code.is_shutdown) == {"_shutdown threading.py"}


def test_recorded_phases() -> None:
    found = recorded(phase_of)
    assert found >= {
        "evaluate training.py: H104",
        "eval_batch engine.py: H104",
        "evaluate_and_print_results not_a_hang.py: H104",
        "save_checkpoint kernel.py: H64",
        "write_shard kernel.py: H64",  # of the class SlowSave
        "upload_checkpoint host_stall.py: H64",
        "download_tokenizer host_stall.py: H51",
        "build_mapping host_children.py: H51",
    }
    assert not [line for line in found if line.startswith(("all_reduce", "train_step", "_engine_run_backward"))]


def test_known_functions_come_before_names_that_only_sound_alike() -> None:
    assert phase_of("checkpoint", "/venv/torch/utils/checkpoint.py") is None
    assert phase_of("save", "/venv/torch/serialization.py") is HangClass.SAVE_IN_PROGRESS
    assert phase_of("load_checkpoint", "/src/mine.py") is HangClass.PREPARES_ALONE
    assert phase_of("save_loaded_checkpoint", "/src/mine.py") is HangClass.SAVE_IN_PROGRESS
    assert (
        phase_of("_EvaluationLoop.advance", "/venv/lightning/pytorch/loops/evaluation_loop.py")
        is HangClass.BARRIER_MEANT
    )


def test_waits_are_tried_in_the_order_that_the_files_give() -> None:
    order = [
        (str(known.hang_class), known.function or known.file or known.wchan[0]) for known in known_code.KNOWN_WAITS
    ]
    classes = [hang_class for hang_class, _ in order]
    assert classes[:6] == ["H40", "H42", "H42", "H42", "H38", "H41"]
    assert order[-1] == ("H31", "hrtimer_nanosleep")
    assert [str(known.hang_class) for known in known_code.KERNEL_WAITS] == ["H41", "H39", "H68", "H67"]


@pytest.mark.parametrize(
    ("file", "known", "same"),
    [
        ("/venv/torch/autograd/graph.py", "torch/autograd/graph.py", True),
        ("torch/autograd/graph.py", "torch/autograd/graph.py", True),
        ("/venv/mytorch/autograd/graph.py", "torch/autograd/graph.py", False),
        ("/venv/torch/autograd/graph.pyx", "torch/autograd/graph.py", False),
        ("/venv/torch/_dynamo/eval_frame.py", "torch/_dynamo/", True),
        ("/venv/torch/_dynamo.py", "torch/_dynamo/", False),
        ("/tmp/torchinductor_me/ab/cab.py", "torchinductor_*/", True),
        ("/tmp/torchinductor_me", "torchinductor_*/", False),
        ("<frozen runpy>", "<frozen ", True),
        ("/src/<frozen >.py", "<frozen ", False),
        ("/src/a.py", "*", True),
    ],
)
def test_a_file_is_a_folder_an_end_of_a_path_or_the_beginning_of_a_name(file: str, known: str, same: bool) -> None:
    assert is_file(file, known) is same


def stack(*frames: tuple[str, str], tid: int = 1) -> ThreadStack:
    return ThreadStack(tid, "MainThread", False, False, tuple(Frame(function, file, 1) for function, file in frames))


def test_native_code_may_communicate_only_below_the_innermost_frame() -> None:
    backward = ("_engine_run_backward", "/venv/torch/autograd/graph.py")
    called = ("OpOverload.__call__", "/venv/torch/_ops.py")
    waits = ("wait_tensor", "/venv/torch/distributed/_functional_collectives.py")
    assert stack(backward, ("step", "/src/a.py")).native_call == Frame(*backward, 1)
    assert stack(called, waits).native_call == Frame(*waits, 1)
    assert stack(("hook", "/src/a.py"), backward).native_call is None
    assert stack(("forward", "/src/a.py"), called, waits).native_call is None
    assert stack().native_call is None


def test_the_frames_of_a_forked_rank_begin_where_it_was_forked() -> None:
    start = ("BaseProcess._bootstrap", "/python3.11/multiprocessing/process.py")
    agent = ("SimpleElasticAgent._invoke_run", "/venv/torch/distributed/elastic/agent/server/api.py")
    rank = stack(("train", "/src/a.py"), start, ("start", "/x/popen_fork.py"), agent)
    assert [frame.function for frame in rank.own_frames] == ["train", "BaseProcess._bootstrap"]


def test_the_main_thread_of_a_ray_worker_gives_way_to_the_one_that_trains() -> None:
    main = stack(
        ("main_loop", "/venv/ray/_private/worker.py"), ("<module>", "/venv/ray/_private/workers/default_worker.py")
    )
    training = stack(("step", "/src/a.py"), tid=2)
    assert decisive_thread([main, training], pid=1) is training
    assert is_server("Worker.main_loop", "/venv/ray/_private/worker.py")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`write(text)`: a file of one's own on the search path."""
    monkeypatch.setenv("BSL_PATH", str(tmp_path))

    def make(text: str = FILE, name: str = "ours") -> Path:
        path = tmp_path / "known" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return make


def test_a_framework_of_ones_own_needs_a_file_and_nothing_else(write: Callable[..., Path]) -> None:
    write()
    code = read_known_code()
    assert code.calls("may_communicate").has("Pipe.exchange", "/src/ours/comm.py")
    assert not code.calls("may_communicate").has("exchange", "/src/theirs/comm.py")
    assert len(code.files) == len(FILES) + 1


def test_ones_own_stands_in_place_of_a_packaged_one_of_the_same_name(write: Callable[..., Path]) -> None:
    write(name="torch")
    code = read_known_code()
    assert not code.calls("may_communicate").has("_engine_run_backward", "/venv/torch/autograd/graph.py")
    assert len(code.files) == len(FILES)


@pytest.mark.parametrize(
    ("wrong", "line", "text"),
    [
        (FILE.replace("may_communicate", "may_comunicate"), 2, "may_comunicate: "),
        (FILE.replace("[exchange]", "exchange"), 3, "may_communicate.ours/comm.py: "),
        (FILE.replace("exchange", "Pipe.exchange"), 3, "bare name"),
        (FILE.replace("[exchange]", "[]"), 3, "at least 1"),
        (FILE.replace("H64", "H99"), 5, "phases.0.hang_class: "),
        (FILE.replace("    calls", "    names: save\n    calls"), 5, "calls or names"),
        (FILE + "waits:\n  - {hang_class: H43, words: waits, order: 1}\n", 8, "kernel or calls"),
        (FILE + "kernel_functions: {locks: [futex]}\n", 7, "kernel_functions.locks"),
        (FILE + "signal_handler_names: ['(']\n", 7, "regular expression"),
        (FILE.replace("sources: [a test]\n", ""), 1, "sources: "),
        ("sources: [\n", 2, "not YAML"),
    ],
)
def test_a_broken_file_is_named_with_line_and_key_and_hides_nothing(
    write: Callable[..., Path], wrong: str, line: int, text: str
) -> None:
    path = write(wrong)
    with pytest.raises(ConfigError):
        read_valid(KnownCodeFile, path)
    code = read_known_code()
    assert len(code.files) == len(FILES)
    assert len(code.problems) == 1
    assert code.problems[0].startswith(f"{path}:{line}:")
    assert text in code.problems[0]


def test_knowing_nothing_is_reported(tmp_path: Path) -> None:
    (problem,) = read_known_code(tmp_path).problems
    assert problem.startswith(f"{tmp_path}: ")


def test_the_report_names_a_file_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "/x/known/ours.yaml:2:1: idel: unknown key"
    monkeypatch.setattr(known_code, "PROBLEMS", (problem,))
    bundle = packaged("diagnostics", "signatures", "stale-build-lock", "recording")
    done = CliRunner().invoke(bsl, ["spy", "--bundle", str(bundle)])
    assert done.exit_code == 0, done.output
    assert f": {problem}" in done.stderr
    assert "stale-build-lock" in done.stdout


STACKS = json.loads((RECORDINGS / "frameworks" / "stacks.json").read_text())


@pytest.mark.parametrize("case", STACKS)
def test_a_rank_that_waits_in_a_framework_is_seen_to_wait_for_others(case: str) -> None:
    """Stacks of rank 0 where rank 1 came late: each shows a communication, or native code that may hold one."""
    threads = parse_threads(STACKS[case], 0)
    thread = decisive_thread(threads, threads[0].tid)
    assert thread is not None
    assert thread.operation or thread.native_call, [str(frame) for frame in thread.frames]


def test_a_rank_that_came_late_or_imports_a_module_is_not() -> None:
    assert not may_communicate("late", "/src/prog.py")
    assert may_communicate("redistribute", "/venv/torch/distributed/tensor/_api.py")
    assert not may_communicate("<module>", "/venv/torch/distributed/tensor/_api.py")
