"""Launchers in `run.command`, and variables that no shell expands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import LoadedRun, load_run
from bigsci_launch.config.schema.launcher import CommandLauncher, find_launcher
from bigsci_launch.errors import ConfigError
from tests.support.texts import has_parts

Load = Callable[..., LoadedRun]

TRAIN = ("python", "-m", "train", "--lr", "1")


@pytest.mark.parametrize(
    ("command", "name", "processes", "program"),
    [
        ("torchrun --nproc_per_node 8 --rdzv_id 1 -m train --lr 1", "torchrun", 8, TRAIN),
        ("torchrun --nproc-per-node=gpu --standalone train.py", "torchrun", None, ("python", "train.py")),
        ("torchrun train.py --num_processes 3", "torchrun", 1, ("python", "train.py", "--num_processes", "3")),
        ("python3 -u -m torch.distributed.run --nproc_per_node=4 a.py", "torchrun", 4, ("python3", "a.py")),
        ("numactl --localalloc /venv/bin/torchrun x.py", "torchrun", 1, ("numactl", "--localalloc", "python", "x.py")),
        ("torchrun --no-python --nproc_per_node 2 ./train", "torchrun", 2, ()),
        ("accelerate launch --num_processes 32 --num_machines 4 a.py", "accelerate launch", 8, ("python", "a.py")),
        ("accelerate launch --config_file c.yaml a.py", "accelerate launch", None, ("python", "a.py")),
        ("deepspeed --num_gpus 4 a.py --deepspeed", "deepspeed", 4, ("python", "a.py", "--deepspeed")),
        ("./bind.sh deepspeed a.py", "deepspeed", None, ("./bind.sh", "python", "a.py")),
        ("mpirun -np 16 -x A python -m train --lr 1", "mpirun", 16, TRAIN),
        ("srun -m block -n 4 torchrun --nproc_per_node 8 -m train --lr 1", "srun", 4, TRAIN),
    ],
)
def test_a_launcher_and_its_program(command: str, name: str, processes: int | None, program: tuple[str, ...]) -> None:
    is_global = name in ("mpirun", "srun")
    is_alone = name == "torchrun"
    says, stands_alone = processes not in (None, 1), "--standalone" in command
    expected = CommandLauncher(name, processes, is_global, is_alone, program, says, stands_alone)
    assert find_launcher(command.split()) == expected


@pytest.mark.parametrize(
    ("script", "name", "processes"),
    [
        ("exec torchrun --nnodes $N --master_port $((P+1)) --nproc_per_node 8 -m train", "torchrun", 8),
        ("cd /work && A=1 accelerate launch a.py", "accelerate launch", None),
        ("ulimit -c 0; numactl -N 0 torchrun \\\n --nproc_per_node=2 a.py", "torchrun", 2),
        ("python prepare.py\ndeepspeed --num_gpus 2 a.py", "deepspeed", 2),
        ("exec python -m torch.distributed.run a.py", "torchrun", 1),
        ("torchrun $ARGS a.py # with its --nnodes", "torchrun", None),
        ("uv run torchrun --nproc_per_node 8 ${ARGS[@]} a.py # with its --nnodes", "torchrun", 8),
    ],
)
def test_a_launcher_in_a_line_of_a_shell(script: str, name: str, processes: int | None) -> None:
    found = find_launcher(["bash", "-lc", script])
    assert found is not None and (found.name, found.processes, found.program) == (name, processes, ())
    assert found.is_alone == (name == "torchrun" and "--nnodes" not in script)


@pytest.mark.parametrize(
    "command",
    [
        None,
        [],
        ["python", "train.py", "--launcher", "torchrun"],
        ["train.py", "deepspeed"],
        ["./run.sh", "--strategy", "deepspeed"],
        ["accelerate", "config"],
        ["python", "-m", "train", "-m", "torch.distributed.run"],
        ["python", "-c", "torchrun"],
        ["bash", "-c", "which torchrun; echo 'deepspeed'; exec python train.py"],
        ["bash", "-c", "exec python train.py --strategy deepspeed"],
        ["bash", "run.sh", "unclosed ' quote"],
        ["bash", "-c"],
    ],
)
def test_what_is_no_launcher(command: list[str] | None) -> None:
    assert find_launcher(command) is None


WORDS = st.sampled_from(
    ["torchrun", "python", "-m", "bash", "-c", "srun", "--nproc_per_node", "8", "a.py", "accelerate"]
)


@given(st.lists(WORDS | st.text(max_size=12), max_size=12))
def test_any_command_can_be_looked_at(command: list[str]) -> None:
    found = find_launcher(command)
    assert found is None or set(found.program) <= {*command, "python", "-m"}


def setting(*command: str) -> str:
    return f"run.command={json.dumps(command)}"


def refusal(load: Load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (problem,) = caught.value.problems
    assert problem.key == "run.command"
    return problem.text


def warned(run: LoadedRun, rule: str) -> list[Finding]:
    return [finding for finding in run.warnings if finding.rule == rule]


def test_a_launcher_for_each_rank_is_refused_with_what_was_meant(load: Load) -> None:
    text = refusal(load, setting("torchrun", "--nproc_per_node", "2", "-m", "train", "--secret", "s3cret"))
    assert has_parts(text, "2 tasks of a node", "2 processes: 4 on a node", "command: [python, -m, train, ...]")
    assert text.endswith("slurm.ranks_per_task: 2") and "s3cret" not in text
    text = refusal(load, setting("bash", "-c", "accelerate launch a.py"))
    assert has_parts(text, "2 tasks of a node", "accelerate launch") and "command:" not in text
    text = refusal(load, setting("mpirun", "-np", "8", "python", "a.py"))
    assert has_parts(text, "8 tasks", "all nodes", "command: [python, a.py]")


def test_a_launcher_that_starts_one_process_is_a_warning(load: Load) -> None:
    (found,) = warned(load(setting("torchrun", "--nnodes", "8", "a.py")), "launcher")
    assert has_parts(found.text, "torchrun 8 times")


def test_one_launcher_a_node_is_a_warning_if_they_join(run_file: Path) -> None:
    site = run_file.parent / "sites" / "lake.yaml"
    site.write_text(site.read_text().replace("ranks_per_node: 2", "ranks_per_node: 1"))
    sizes = ["parallelism.tensor_parallel_size=1"]

    def load(*more: str) -> LoadedRun:
        return load_run(run_file, [*more, *sizes])

    one = ("torchrun", "--nproc_per_node=8", "a.py")
    (found,) = warned(load(setting(one[0], "--nnodes=4", *one[1:])), "launcher")
    assert has_parts(found.text, "torchrun 4 times")
    assert has_parts(refusal(load, setting(*one)), "4 tasks", "of its own", "--nnodes")
    assert "all nodes" in refusal(load, setting("srun", "python", "a.py"))
    assert warned(load(), "launcher") == []


ONE_LAUNCHER = "slurm.ranks_per_task=2"


def test_one_launcher_for_the_ranks_of_a_task_is_accepted(load: Load) -> None:
    for command in (
        ("torchrun", "a.py"),
        ("torchrun", "--nproc_per_node=2", "a.py"),
        ("torchrun", "--nproc_per_node=gpu", "a.py"),
        ("bash", "-c", "exec accelerate launch --num_processes $WORLD_SIZE --num_machines $NNODES a.py"),
        ("./start.sh",),
    ):
        assert warned(load(setting(*command), ONE_LAUNCHER), "launcher") == []


def test_a_launcher_that_starts_another_number_of_ranks_is_refused(load: Load) -> None:
    text = refusal(load, setting("torchrun", "--nproc_per_node", "1", "a.py"), ONE_LAUNCHER)
    assert has_parts(text, "torchrun starts 1 process,", "slurm.ranks_per_task is 2")
    text = refusal(load, setting("bash", "-c", "torchrun --nproc_per_node 4 a.py"), ONE_LAUNCHER)
    assert has_parts(text, "4 processes", "is 2")
    assert has_parts(refusal(load, setting("mpirun", "-np", "8", "a"), ONE_LAUNCHER), "4 tasks", "all nodes")
    text = refusal(load, setting("torchrun", "--standalone", "a.py"), ONE_LAUNCHER)
    assert has_parts(text, "4 tasks", "--standalone", "of its own")


def test_a_launcher_of_a_part_of_a_node_is_offered_as_it_is(load: Load) -> None:
    text = refusal(load, setting("torchrun", "--nproc_per_node", "3", "a.py"))
    assert text.endswith("one torchrun for each node: slurm.ranks_per_task: 2")


def problems(load: Load, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return [(problem.key, problem.text) for problem in caught.value.problems]


TORCHRUN = setting("torchrun", "a.py")


@pytest.mark.parametrize(
    ("overrides", "key", "parts"),
    [
        ((ONE_LAUNCHER,), "slurm.ranks_per_task", ("`bsl train`", "run.command")),
        ((ONE_LAUNCHER, TORCHRUN, "survive=true"), "slurm.ranks_per_task", ("survive", "leave out one")),
        (("slurm.ranks_per_task=3", TORCHRUN), "slurm.ranks_per_task", ("3 does not divide the 2 ranks",)),
        ((ONE_LAUNCHER, TORCHRUN, "env.PET_NNODES=2"), "env.PET_NNODES", ("leave it out",)),
        ((ONE_LAUNCHER, TORCHRUN, "env.NNODES=2"), "env.NNODES", ("leave it out",)),
        ((ONE_LAUNCHER, TORCHRUN, 'slurm.sbatch_options=["--gpus-per-task=1"]'), "slurm.ranks_per_task", ("2 ranks",)),
    ],
)
def test_what_does_not_fit_several_ranks_in_a_task(
    load: Load, overrides: tuple[str, ...], key: str, parts: tuple[str, ...]
) -> None:
    ((found, text),) = problems(load, *overrides)
    assert found == key and has_parts(text, *parts)


@pytest.mark.parametrize(
    ("bind", "is_refused"), [("cores", False), ("verbose,mask_cpu:f,f0", False), ("map_cpu:0,1", True)]
)
def test_where_tasks_of_several_ranks_are_bound(run_file: Path, bind: str, is_refused: bool) -> None:
    site = run_file.parent / "sites" / "lake.yaml"
    site.write_text(f"{site.read_text()}\ncpu_bind: {bind}\n")
    try:
        load_run(run_file, [ONE_LAUNCHER, TORCHRUN])
    except ConfigError as error:
        assert is_refused and has_parts(error.problems[0].text, f"cpu_bind {bind}", "mask_cpu")
    else:
        assert not is_refused


@pytest.mark.parametrize(
    ("command", "names", "at"),
    [
        (("a", "--name=${SLURM_JOB_ID}", "$A", "$A"), ("${SLURM_JOB_ID}, $A reaches",), 1),
        (("a", "$(hostname)"), ("$(...)",), 1),
        (("taskset", "-c", "$CPUS", "a"), ("$CPUS",), 2),
        (("bash", "-c", 'exec a $A "$@"', "x", "$B"), ("$B reaches",), 4),
    ],
)
def test_a_variable_that_no_shell_expands(
    load: Load, command: tuple[str, ...], names: tuple[str, ...], at: int
) -> None:
    (found,) = warned(load(setting(*command)), "unexpanded")
    assert found.keys == (f"run.command.{at}",) and has_parts(found.text, *names)


@pytest.mark.parametrize("command", [("bash", "-c", "a $A"), ("a", "^x$", "$1", "$"), ("env", "sh", "-ec", "a ${A}")])
def test_what_a_shell_expands_and_what_is_no_variable(load: Load, command: tuple[str, ...]) -> None:
    assert warned(load(setting(*command)), "unexpanded") == []
