"""Run files: layers, origins, every problem at once, and hostile input."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.config.load import LoadedRun, dump_resolved, load_resolved, load_run
from bigsci_launch.config.report import show_text
from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.config.schema.run import RampupSection, RunConfig
from bigsci_launch.config.schema.values import EnvironmentVariable
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology
from tests.support.texts import has_parts

GOLDEN = Path(__file__).parents[2] / "golden" / "reports" / "wrong-run-files.txt"
Load = Callable[..., LoadedRun]
Spoil = Callable[..., Path]


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    assert caught.value.exit_code == 2
    assert caught.value.problems
    return caught.value


def problems(path: Path, *overrides: str) -> list[str]:
    """Return each problem as the user reads it, without the folder of the run file."""
    return [str(problem).replace(f"{path.parent}/", "") for problem in refusal(path, *overrides).problems]


def test_a_time_limit_is_a_time(load: Load) -> None:
    assert load().config.slurm.time_limit == "20:00:00"
    assert load("slurm.time_limit=1-12:00:00").config.slurm.time_limit == "1-12:00:00"
    assert load('slurm.time_limit="90"').config.slurm.time_limit == "01:30:00"


def test_a_number_of_links_is_short_for_a_chain_by_queue(load: Load, run_file: Path) -> None:
    run = load("slurm.chain=3")
    assert run.config == load("slurm.chain={by: queue, links: 3}").config
    assert run.origins["slurm.chain.links"] == run.origins["slurm.chain.by"] == "--set"
    assert refusal(run_file, "slurm.chain=0").problems[0].key == "slurm.chain.links"
    assert has_parts(problems(run_file, "slurm.chain={by: requeue, links: 2}")[0], "`links`", "`by: queue`")


def test_every_leaf_has_an_origin(load: Load, run_file: Path) -> None:
    run = load("optimizer.betas.1=0.99", "monitor.save_time_s=5")
    assert run.origins["run.name"] == f"{run_file}:2:3"
    assert run.origins["slurm.partition"] == "site lake"
    assert run.origins["slurm.account"] == "site lake"
    assert run.origins["slurm.qos"] == "default"
    assert run.origins["slurm.time_limit"] == f"{run_file}:6:3"
    assert run.origins["monitor.peak_tflops_per_rank"] == "site lake"
    assert run.origins["env.CUDA_LAUNCH_BLOCKING.value"] == "site lake"
    assert run.origins["parallelism.data_parallel_size"] == "computed"
    assert run.origins["optimizer.betas.0"] == "default"
    assert run.origins["optimizer.betas.1"] == "--set"
    assert run.origins["monitor.save_time_s"] == "--set"
    assert run.origins["faults"] == "default"


def test_what_is_left_open_is_filled_in(load: Load) -> None:
    run = load()
    assert run.config.parallelism.data_parallel_size == 2
    assert run.layout.topology == Topology(tp=2, pp=2, dp=2)
    assert run.config.slurm.partition == "long"
    assert run.config.slurm.account == "six@a100"
    assert run.config.env["CUDA_LAUNCH_BLOCKING"].reason == "it hangs without"
    assert load("slurm.account=null").config.slurm.account is None
    assert run.warnings == ()


def test_a_child_stands_over_its_parents_and_an_override_over_all(run_file: Path) -> None:
    child = run_file.parent / "deep" / "child.yaml"
    child.parent.mkdir()
    (run_file.parent / "middle.yaml").write_text(
        "extends: run.yaml\ntraining:\n  steps: 30\n  rampup: {start: 8, increment: 4, samples: 64}\n"
        "env: {A: {value: '1', reason: x}}\n"
    )
    child.write_text("extends: ../middle.yaml\ntraining:\n  rampup: null\nrun: {name: child, seed: 7}\n")
    run = load_run(
        child,
        ["run.seed=9", "slurm.site=../sites/lake.yaml", "slurm.site=" + str(run_file.parent / "sites" / "lake.yaml")],
    )
    assert (run.config.run.name, run.config.run.seed) == ("child", 9)
    assert run.config.training.steps == 30
    assert run.config.training.rampup is None
    assert run.origins["training.steps"] == f"{child.parent}/../middle.yaml:3:3"
    assert run.origins["model.num_layers"].endswith("/run.yaml:11:3")
    assert set(run.config.env) == {"A", "CUDA_LAUNCH_BLOCKING"}


def test_a_site_given_by_path_is_found_from_the_file_that_names_it(run_file: Path, spoil: Spoil) -> None:
    spoil("site: lake", "site: ./sites/lake.yaml")
    (run_file.parent / "sub").mkdir()
    child = run_file.parent / "sub" / "child.yaml"
    child.write_text("extends: ../run.yaml\n")
    assert load_run(child).site.name == "lake"


def test_all_problems_come_at_once_in_reading_order(spoil: Spoil) -> None:
    spoil("nodes: 4", "nodes: four\n  partion: long")
    spoil("hidden_size: 64", "hidden: 64")
    path = spoil("steps: 20", "steps: 0")
    found = refusal(path, "optimizer.betas=[0.9]", "faults.0.kind=explode").problems
    assert [(problem.where.rpartition("/")[2], problem.key) for problem in found] == [
        ("--set", "optimizer.betas"),
        ("--set", "faults.0.kind"),
        ("--set", "faults.0.step"),
        ("run.yaml:5:3", "slurm.nodes"),
        ("run.yaml:6:3", "slurm.partion"),
        ("run.yaml:11:1", "model.hidden_size"),
        ("run.yaml:13:3", "model.hidden"),
        ("run.yaml:18:3", "training.steps"),
    ]


WRONG_VALUES = [
    ("nodes: 4", 'nodes: "4"', "5:3", "slurm.nodes"),
    ("nodes: 4", "nodes: 010", "5:3", "slurm.nodes"),
    ("nodes: 4", "nodes: 4.0", "5:3", "slurm.nodes"),
    ("nodes: 4", "nodes: true", "5:3", "slurm.nodes"),
    ("nodes: 4", "nodes: [4]", "5:3", "slurm.nodes"),
    ("nodes: 4", "nodes:", "5:3", "slurm.nodes"),
    ("nodes: 4", "requeue: yes", "5:3", "slurm.requeue"),
    ("nodes: 4", "nodes: 4\n  seed: 1", "6:3", "slurm.seed"),
    ("nodes: 4", "Nodes: 4", "5:3", "slurm.Nodes"),
    ("nodes: 4", "num-nodes: 4", "5:3", "slurm.num-nodes"),
    ("nodes: 4", "zzz: 4", "5:3", "slurm.zzz"),
    ("nodes: 4", "rpt: 4", "5:3", "slurm.rpt"),
    ("nodes: 4", 'partition: ""', "5:3", "slurm.partition"),
    ("nodes: 4", 'qos: "a\\n#SBATCH -x"', "5:3", "slurm.qos"),
    ("20:00:00", "1200", "6:3", "slurm.time_limit"),
    ("20:00:00", "20h", "6:3", "slurm.time_limit"),
    ("20:00:00", "0:00", "6:3", "slurm.time_limit"),
    ("20:00:00", "1.5", "6:3", "slurm.time_limit"),
    ("name: small", "name: 12", "2:3", "run.name"),
    ("name: small", "name: ../../etc", "2:3", "run.name"),
    ("name: small", 'name: "a\\n"', "2:3", "run.name"),
    ("steps: 20", "steps: 9_765", "17:3", "training.steps"),
    ("steps: 20", "steps: 20\n  precision: int8", "18:3", "training.precision"),
    ("data:", "dato: {}\ndata:", "20:1", "dato"),
    ("run:\n  name: small", "run: small", "1:1", "run"),
    ("data:\n  prefix: corpus/text\n", "data:\n", "20:1", "data"),
    ("data:\n  prefix: corpus/text\n", "", "1:1", "data.prefix"),
    ("site: lake", "site: 7", "4:3", "slurm.site"),
    ("site: lake", "site: lakes", "4:3", "slurm.site"),
    ("site: lake", "site: ./none.yaml", "4:3", "slurm.site"),
    ("site: lake", "site: sites", "4:3", "slurm.site"),
    ("site: lake", "site: ./sites", "4:3", "slurm.site"),
    ("nodes: 4", "nodes: 4\n  nodes: 8", "6:3", "nodes"),
    ("data:", "guards: {interval: 0}\ndata:", "20:10", "guards.interval"),
    ("data:", "env: {1A: {value: x, reason: y}}\ndata:", "20:7", "env.1A"),
    ("data:", "env: {A: {reason: x}}\ndata:", "20:7", "env.A"),
    ("data:", "env: {A: [1]}\ndata:", "20:7", "env.A"),
    ("data:", "env: {A: null}\ndata:", "20:7", "env.A"),
    ("data:", "env: {A: {value: [1], reason: y}}\ndata:", "20:11", "env.A.value"),
    ("data:", "optimizer: {learning_rate: .inf}\ndata:", "20:13", "optimizer.learning_rate"),
    ("data:", "optimizer: {betas: [0.9, 1.5]}\ndata:", "20:26", "optimizer.betas.1"),
]


WRONG_OVERRIDES = (
    "training.steps|=3|training..steps=3|training.steps =3|extends=other.yaml|run.name.x=3|"
    "optimizer.betas.5=0.1|optimizer.betas.x=0.1|optimizer.betas=[0.9|env={A: 1, A: 2}|training.stepz=3|"
    "optimiser.learning_rate=3|model=7|training.steps=010|training.steps=|slurm.time_limit=72000|"
    "faults.1.kind=hang|run.root=\udcff"
)


def test_one_wrong_value_gives_one_clear_problem(run_file: Path, check_golden: Callable[[Path, str], None]) -> None:
    text, lines = run_file.read_text(), []
    for old, new, place, key in WRONG_VALUES:
        assert text.count(old) == 1
        run_file.write_text(text.replace(old, new))
        (found,) = refusal(run_file).problems
        assert (found.where, found.key) == (f"{run_file}:{place}", key)
        lines += problems(run_file)
    run_file.write_text(text)
    for override in WRONG_OVERRIDES.split("|"):
        (problem,) = problems(run_file, override)
        assert problem.startswith("--set: ")
        lines.append(f"{override}  # {problem}")
    said = re.sub(r"\(known: .*\)", "(known: ...)", "\n".join(lines)).encode(errors="backslashreplace").decode()
    check_golden(GOLDEN, said + "\n")


def test_overrides_make_what_is_missing_and_the_last_one_counts(load: Load) -> None:
    faults = ["faults.0.kind=hang", "faults.0.rank=3", "faults.0.step=5", "faults.0.step=6"]
    run = load(*faults, "training.rampup.start=8", "training.rampup.increment=4", "training.rampup.samples=64")
    assert run.config.faults == [FaultSpec(kind="hang", rank=3, step=6)]
    assert run.config.training.rampup == RampupSection(start=8, increment=4, samples=64)
    assert load("env.A.value=x=y", "env.A.reason=why").config.env["A"].value == "x=y"
    assert load("faults=[{kind: die, rank: 0, step: 2}]").config.faults[0].kind == "die"


@pytest.mark.parametrize("written", ["8", "1.10", "6e-5", "True", "text", "010", "-1", "0x1f"])
def test_a_variable_may_be_its_value_alone(spoil: Spoil, written: str) -> None:
    path = spoil("data:", f"env:\n  A: {written}\n  B: '{written}'\n  D: {{value: {written}, reason: long}}\ndata:")
    run = load_run(path, [f"env.C={written}", f"env.CUDA_LAUNCH_BLOCKING={written}", f"env.E.value={written}"])
    assert [run.config.env[name].value for name in "ABCDE"] == [written] * 5
    assert run.config.env["A"].reason is None
    assert (run.origins["env.A.value"], run.origins["env.C.value"]) == (f"{path}:21:3", "--set")
    assert run.config.env["CUDA_LAUNCH_BLOCKING"].reason is None, "it replaces what the site says, reason and all"


def test_a_value_alone_is_masked_as_any_other(spoil: Spoil) -> None:
    path = spoil("data:", "env: {MY_TOKEN: hunter22, NCCL_DEBUG: INFO}\ndata:")
    shown = show_text(load_run(path))
    assert "hunter22" not in shown and "<secret>" in shown and "INFO" in shown


def test_extends_that_lead_nowhere_or_back(run_file: Path) -> None:
    folder = run_file.parent
    one, two = folder / "one.yaml", folder / "two.yaml"
    one.write_text("extends: two.yaml\n")
    two.write_text("run: {name: x}\nextends: ./one.yaml\n")
    (circle,) = problems(one)
    assert has_parts(circle, "two.yaml:2:1: extends: ", "one.yaml -> two.yaml -> one.yaml")
    for text, part in (("one.yaml", "one.yaml -> one.yaml"), ("none.yaml", "none.yaml"), ("[run.yaml]", "path")):
        one.write_text(f"extends: {text}\n")
        (problem,) = problems(one)
        assert has_parts(problem, "one.yaml:1:1: extends: ", part)
    one.write_text("extends: two.yaml\n")
    for content, place in ((b"a: [\n", "two.yaml:2:1"), (b"", "two.yaml")):
        two.write_bytes(content)
        assert refusal(one).problems[0].where == f"{folder}/{place}"


def test_a_value_of_the_parent_is_blamed_in_the_parent(run_file: Path, spoil: Spoil) -> None:
    spoil("steps: 20", "steps: -1")
    child = run_file.parent / "child.yaml"
    child.write_text("extends: run.yaml\nmodel: {num_layers: x}\n")
    assert [re.sub(r": .*", "", problem) for problem in problems(child)] == ["child.yaml:2:9", "run.yaml:17:3"]


def test_a_wrong_site_file_and_a_wrong_run_file_are_named_together(run_file: Path, spoil: Spoil) -> None:
    spoil("steps: 20", "steps: -1")
    site = run_file.parent / "sites" / "lake.yaml"
    site.write_text(site.read_text().replace("ranks_per_node: 2", "ranks_per_nod: 2"))
    assert [problem.split(": ")[0] for problem in problems(run_file)] == [
        "run.yaml:17:3",
        "sites/lake.yaml:1:1",
        "sites/lake.yaml:3:1",
    ]


def test_rules_across_sections_are_placed_at_the_key_somebody_wrote(run_file: Path) -> None:
    hidden, tp = problems(run_file, "model.num_attention_heads=3")
    assert has_parts(hidden, "--set: model.num_attention_heads: ", "64", "3 heads")
    assert has_parts(tp, "--set: model.num_attention_heads: ", "3 heads", "tp 2")
    batch, world = sorted(problems(run_file, "parallelism.data_parallel_size=3"), reverse=True)
    assert has_parts(world, "--set: parallelism.data_parallel_size: ", "8 ranks", "pp 2 x dp 3")
    assert has_parts(batch, "run.yaml:19:3: training.global_batch_size: ", "16", "2 x dp 3")


def test_the_error_says_what_to_do_next(run_file: Path) -> None:
    assert "bsl config schema" in (refusal(run_file, "a.b=1").hint or "")
    assert "bsl config show" in (refusal(run_file, "slurm.nodes=3").hint or "")
    assert "template.yaml" in (refusal(run_file, "slurm.site=x").hint or "")
    assert refusal(run_file, "a.b=1").message == f"{run_file}: 1 problem"


def test_a_resolved_file_is_complete_and_needs_no_site(load: Load, tmp_path: Path) -> None:
    run = load()
    path = tmp_path / "elsewhere" / "config.yaml"
    path.parent.mkdir()
    path.write_text(dump_resolved(run.config))
    assert load_resolved(path) == run.config
    path.write_text(path.read_text().replace("  steps: 20\n", ""))
    with pytest.raises(ConfigError) as caught:
        load_resolved(path)
    assert [problem.key for problem in caught.value.problems] == ["training.steps"]


TEXT = st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
POSITIVE = st.integers(min_value=1, max_value=10**18)
NUMBER = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
FAULT = st.builds(FaultSpec, kind=st.sampled_from(["hang", "slow"]), rank=POSITIVE, step=POSITIVE, seconds=NUMBER)


@st.composite
def configs(draw: st.DrawFn, base: RunConfig) -> RunConfig:
    """Return `base` with values of every kind that a file can contain."""
    fraction = st.floats(min_value=0, max_value=1, exclude_max=True)
    variable = st.builds(EnvironmentVariable, value=TEXT, reason=TEXT)
    rampup = st.builds(RampupSection, start=POSITIVE, increment=POSITIVE, samples=POSITIVE)
    run = {"root": draw(TEXT), "command": draw(st.none() | st.lists(TEXT))}
    optimizer = {"learning_rate": draw(NUMBER), "betas": draw(st.lists(fraction, min_size=2, max_size=2))}
    training = {"steps": draw(POSITIVE), "rampup": draw(st.none() | rampup)}
    return base.model_copy(
        update={
            "run": base.run.model_copy(update=run),
            "optimizer": base.optimizer.model_copy(update=optimizer),
            "training": base.training.model_copy(update=training),
            "env": draw(st.dictionaries(NAME, variable, max_size=2)),
            "faults": draw(st.lists(FAULT, max_size=2)),
        }
    )


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_dump_and_load_of_any_config_give_it_back(load: Load, tmp_path: Path, data: st.DataObject) -> None:
    config = data.draw(configs(load().config))
    path = tmp_path / "config.yaml"
    path.write_text(dump_resolved(config), encoding="utf-8", newline="")
    assert load_resolved(path) == config


def test_hostile_file_names(run_file: Path) -> None:
    for name in ("a b.yaml", "a\"b'c.yaml", "a\nb.yaml", "$HOME.yaml", "-x.yaml"):
        path = run_file.parent / name
        path.write_text(run_file.read_text().replace("steps: 20", "steps: 0"))
        assert str(refusal(path).problems[0]).startswith(f"{path}:17:3: training.steps")
        path.write_text(run_file.read_text().replace("site: lake", "site: ./sites/lake.yaml"))
        assert load_run(path).site.name == "lake"
