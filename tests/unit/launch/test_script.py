"""Job scripts: whole golden files, and the laws that hold for any values."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from bigsci_launch.config.load import load_run
from bigsci_launch.errors import ConfigError
from bigsci_launch.launch.decide import Turn, behind
from bigsci_launch.launch.job.options import Option, bound_cpus
from bigsci_launch.launch.job.request import JobRequest, Variable, make_request
from bigsci_launch.launch.job.script import (
    comment_lines,
    header_lines,
    quote,
    quote_directive,
    render_script,
    template_environment,
)
from bigsci_launch.runs.layout import RunDir

GOLDEN = Path(__file__).parents[2] / "golden" / "sbatch"
SHAPES = sorted(path.stem for path in GOLDEN.glob("*-*.yaml"))


def request_of(shape: str, *overrides: str, run: str = "/home/alice/runs/my run", local: bool = False) -> JobRequest:
    return make_request(
        load_run(GOLDEN / f"{shape}.yaml", overrides),
        run=RunDir(Path(run)),
        attempt="0001",
        working_directory=Path("/home/alice/llm"),
        python="/opt/bsl/bin/python",
        local=local,
    )


def test_there_are_several_sites_and_shapes() -> None:
    assert len(SHAPES) == 7


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_script(shape: str, check_golden: Callable[[Path, str], None]) -> None:
    check_golden(GOLDEN / f"{shape}.sh", render_script(request_of(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_bash_reads_it(shape: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / f"{shape}.sh")], check=True, timeout=300)


@pytest.mark.parametrize("shape", SHAPES)
def test_shellcheck_finds_nothing(shape: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(GOLDEN / f"{shape}.sh")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_a_foreign_sites_modules_and_container_are_left_out_locally() -> None:
    request = request_of("apptainer-own-program", local=True)
    assert (request.scheduler, request.activation, request.step_prefix) == ("local", (), ())
    assert request.rank_python == "/opt/bsl/bin/python"
    assert "module load" not in render_script(request)


@pytest.mark.parametrize(("wait_s", "said"), [(60, "still run 60 s"), (900, "still run 900 s"), (0, "without limit")])
def test_how_long_ranks_may_run_after_the_first(wait_s: int, said: str) -> None:
    lines = render_script(request_of("jean-zay-48-nodes", f"slurm.wait_s={wait_s}")).splitlines()
    at = lines.index(f"  --wait={wait_s}")
    assert said in lines[at - 1] and "slurm.wait_s" in lines[at - 1]
    local = render_script(request_of("jean-zay-48-nodes", f"slurm.wait_s={wait_s}", local=True))
    assert f"  --wait-s {wait_s} \\\n" in local


def test_no_time_limit_no_signal() -> None:
    request = request_of("apptainer-own-program")
    assert request.exit_margin is None
    assert "#SBATCH --signal" not in render_script(request)


@pytest.mark.parametrize(
    ("overrides", "margin_s", "how"),
    [
        ((), 350, "350 s = 2 x (step 105 s + save 40 s) + slack 60 s"),
        (("slurm.time_limit=00:10:00",), 300, "half of the time limit"),
        (("monitor.exit_margin_s=900",), 900, "monitor.exit_margin_s"),
    ],
)
def test_the_margin_and_its_terms_are_in_the_header(overrides: tuple[str, ...], margin_s: int, how: str) -> None:
    script = render_script(request_of("jean-zay-48-nodes", *overrides))
    header = script[: script.index("set -euo pipefail")].splitlines()
    at = header.index(f"#SBATCH --signal=B:USR2@{margin_s}")
    assert how in header[at - 1]


@pytest.mark.parametrize(
    ("bind", "ranks_per_task", "expected"),
    [
        (None, 2, None),
        ("cores", 2, "cores"),
        ("mask_cpu:fe,fe00,fe0000,fe000000", 1, "mask_cpu:fe,fe00,fe0000,fe000000"),
        ("mask_cpu:fe,fe00,fe0000,fe000000", 2, "mask_cpu:fefe,fefe0000"),
        ("verbose,mask_cpu:0x1,0x2,0x4,0x8", 4, "verbose,mask_cpu:f"),
    ],
)
def test_a_task_has_the_cpus_of_all_its_ranks(bind: str | None, ranks_per_task: int, expected: str | None) -> None:
    assert bound_cpus(bind, ranks_per_task) == expected


@pytest.mark.parametrize("local", [False, True])
def test_tasks_that_start_several_ranks(local: bool) -> None:
    request = request_of("torchrun-2-nodes", local=local)
    script = render_script(request)
    assert script.count(" --ranks-per-task 4 ") == 1 + local
    assert (request.topology.world_size, request.ranks_per_node) == (16, 16 if local else 8)


def test_a_misspelt_name_in_a_template_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "slurm.sbatch.j2").write_text("{{ request.nodez }}")
    with pytest.raises(UndefinedError, match="nodez"):
        render_script(request_of("minicluster-4-nodes"), tmp_path)


@pytest.mark.parametrize("bad", ["/runs/a\nb", "/runs/a\\b", "/runs/a\x7fb"])
def test_a_path_that_slurm_cannot_take_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.root"):
        request_of("minicluster-4-nodes", run=bad)


def test_a_path_that_a_container_cannot_mount_is_refused() -> None:
    with pytest.raises(ConfigError, match="/runs/a,b"):
        request_of("pyxis-2-nodes", run="/runs/a,b")


@pytest.mark.parametrize("run", ["/runs/it's", '/runs/q"uote', "/runs/$HOME `id`", "/runs/100%j", "/runs/#hash;"])
def test_hostile_run_directories_reach_bash_unchanged(run: str) -> None:
    script = render_script(request_of("minicluster-4-nodes", run=run))
    assignment = next(line for line in script.splitlines() if line.startswith("run_dir="))
    said = subprocess.run(["bash", "-c", assignment + '\nprintf %s "$run_dir"'], capture_output=True, check=True)
    assert said.stdout.decode() == run


def test_only_the_output_file_doubles_percent_signs() -> None:
    script = render_script(request_of("minicluster-4-nodes", run="/runs/100%j"))
    assert "#SBATCH --output=/runs/100%%j/attempts/0001/job.out" in script


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40)


@given(st.lists(texts, min_size=1, max_size=5))
def test_any_text_survives_the_quoting_and_bash(values: list[str]) -> None:
    environment = template_environment(Path())
    template = environment.from_string("printf '%s\\0' {% for value in values %}{{ value | sh }} {% endfor %}\n")
    said = subprocess.run(["bash", "-c", template.render(values=values)], capture_output=True, check=True, timeout=300)
    assert said.stdout.split(b"\0")[:-1] == [value.encode() for value in values]


@given(value=texts, reason=texts)
def test_any_variable_and_its_reason_survive_a_whole_script(value: str, reason: str) -> None:
    request = replace(request_of("local-8-ranks"), variables=(Variable("GREETING", value, reason),), watch="off")
    script = render_script(request)
    lines = script[script.index("# Only") if "# Only" in script else script.index("cd --") :]
    head = lines[lines.index("\n") : lines.index("# The launcher replaces")]
    said = subprocess.run(["bash", "-c", head + 'printf %s "$GREETING"'], capture_output=True, check=True, timeout=300)
    assert said.stdout == value.encode()
    assert said.stderr == b""


@pytest.mark.parametrize("name", ["local-8-ranks", "minicluster-4-nodes"])
def test_a_variable_needs_no_reason(name: str) -> None:
    made = replace(request_of(name), variables=(Variable("GREETING", "hello"), Variable("OTHER", None, "why")))
    lines = render_script(made).splitlines()
    at = lines.index("export GREETING=hello")
    assert (lines[at - 1], lines[at + 1]) == ("", "# why")


@given(texts)
def test_a_reason_can_never_become_a_command(text: str) -> None:
    assert all(line.startswith("#") for line in comment_lines(text).split("\n"))


@given(texts)
def test_a_directive_is_one_line_or_refused(text: str) -> None:
    try:
        quoted = quote_directive(text)
    except ValueError:
        assert not text.isprintable()
    else:
        assert "\n" not in quoted and "\r" not in quoted


def test_options_without_a_value() -> None:
    assert header_lines((Option("requeue", None, "why"),)) == "# why\n#SBATCH --requeue"
    assert quote("a b") == "'a b'"


def test_a_chain_is_requeued_or_waits_behind() -> None:
    options = ("slurm.chain.by=requeue", "slurm.dependency=afterok:7")
    text = render_script(request_of("jean-zay-48-nodes", *options))
    assert "#SBATCH --requeue\n" in text and "#SBATCH --dependency=afterok:7\n" in text
    assert "carry_on gate" in text and "carry_on end" in text
    request = request_of("jean-zay-48-nodes", "slurm.chain.by=queue", "slurm.dependency=afterok:7")
    assert "#SBATCH --no-requeue\n" in render_script(request)
    turn = Turn(request.run.attempt("0002"), ("12", "13"), num_starts=2, num_waiting=1)
    waiting = behind(replace(request, attempt=request.run.attempt("0003")), turn)
    text = render_script(waiting)
    assert "#SBATCH --dependency=afterany:12:13\n" in text and "afterok" not in text
    assert waiting.chain is not None and (waiting.chain.after, waiting.chain.first) == ("0002", "0003")
    assert "carry_on" not in render_script(request_of("jean-zay-48-nodes"))
    assert request_of("jean-zay-48-nodes", *options, local=True).chain is None
    text = render_script(request_of("minicluster-4-nodes", *options, "slurm.requeue=expedite"))
    assert "#SBATCH --requeue=expedite\n" in text


SURVIVE = ("survive=true", "slurm.spare_nodes=2", "slurm.node_check=true")


def test_a_job_that_survives_outlives_its_nodes_and_has_spare_ones() -> None:
    script = render_script(request_of("minicluster-4-nodes", *SURVIVE, "slurm.wait_s=60"))
    lines = script.splitlines()
    header = [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=6" in header and "#SBATCH --no-kill" in header
    assert "4 with ranks, and slurm.spare_nodes: 2" in lines[lines.index("#SBATCH --nodes=6") - 1]
    check, step = script.partition("check_options=(")[2].split("step_options=(")
    assert "--nodes=6\n" in check
    options = step.partition("\n)\n")[0].splitlines()
    assert {"  --no-kill", "  --kill-on-bad-exit=0", "  --wait=0"} <= set(options)
    assert not [
        option for option in options if option.startswith(("  --nodes", "  --kill-on-bad-exit=1", "  --wait=60"))
    ]
    ranks = request_of("minicluster-4-nodes").topology.world_size
    assert f"--slots {ranks // 4 * 6} " in step.replace("\\\n", "")
    assert script.count("srun ") == 3, "comment, check and step"


def test_a_local_job_that_survives_is_started_by_its_controller() -> None:
    script = render_script(request_of("jean-zay-48-nodes", "survive={standby: false}", local=True))
    launched = script[script.index("exec ") :].replace(" \\\n ", "")
    assert launched.startswith(
        'exec "$host_python" -E "$tools/run_module.py" --path "$host_path" bigsci_launch.recover.controller '
        '--attempt-dir "$attempt_dir"'
    )
    slots = request_of("jean-zay-48-nodes", local=True).topology.world_size
    assert f' --level in_place --slots {slots} --exit-reason "$tools/bsl-job.pyz" -- ' in launched
    assert " --survive in_place --log-limit-mib" in launched
    assert "scheduler.local" not in script
    assert "recover" not in render_script(request_of("jean-zay-48-nodes", local=True))


def test_the_program_says_how_a_job_survives() -> None:
    trainer = render_script(request_of("minicluster-4-nodes", "survive=true"))
    assert "--level in_place" in trainer and "--survive in_place --standby" in trainer
    alone = render_script(request_of("minicluster-4-nodes", "survive={standby: false}"))
    assert "--survive in_place \\\n" in alone
    program = render_script(request_of("apptainer-own-program", "survive=true"))
    assert "--level restart" in program and "--survive restart \\\n" in program


def test_rank_0_of_any_node_has_the_suffix_of_its_address() -> None:
    assert "--address-suffix=i" in render_script(request_of("site-keys-4-nodes", "survive=true"))
    assert "--address-suffix" not in render_script(request_of("minicluster-4-nodes", "survive=true"))


@pytest.mark.parametrize("requeue", ["true", "false"])
def test_what_survive_leaves_to_slurm_is_said(requeue: str) -> None:
    lines = render_script(request_of("minicluster-4-nodes", *SURVIVE, f"slurm.requeue={requeue}")).splitlines()
    at = lines.index("#SBATCH --requeue" if requeue == "true" else "#SBATCH --no-requeue")
    assert "survive" in lines[at - 1]


@pytest.mark.slow
def test_bash_and_shellcheck_read_a_script_that_survives(tmp_path: Path) -> None:
    for number, shape in enumerate(name for name in SHAPES if not name.startswith("torchrun")):
        spares = () if shape.startswith("local") else SURVIVE
        (tmp_path / f"{number}.sh").write_text(render_script(request_of(shape, "survive=true", *spares)))
    paths = [str(path) for path in sorted(tmp_path.glob("*.sh"))]
    for path in paths:
        subprocess.run(["bash", "-n", path], check=True, timeout=300)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *paths], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
