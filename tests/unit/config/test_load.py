"""Run files: layers, origins, every problem at once, and hostile input."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsci_launch.config.load import LoadedRun, dump_resolved, load_resolved, load_run
from bigsci_launch.config.schema.guards import FaultSpec
from bigsci_launch.config.schema.run import RampupSection, RunConfig
from bigsci_launch.config.schema.values import EnvironmentVariable
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology

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
    run = load()
    assert run.config.slurm.time_limit == "20:00:00"
    assert load("slurm.time_limit=1-12:00:00").config.slurm.time_limit == "1-12:00:00"
    assert load('slurm.time_limit="90"').config.slurm.time_limit == "01:30:00"


def test_a_number_of_links_is_short_for_a_chain_by_queue(load: Load, run_file: Path) -> None:
    run = load("slurm.chain=3")
    assert run.config == load("slurm.chain={by: queue, links: 3}").config
    assert run.origins["slurm.chain.links"] == run.origins["slurm.chain.by"] == "--set"
    assert "slurm.chain.links: must be greater than 0 (got 0)" in problems(run_file, "slurm.chain=0")[0]
    assert "`links` needs `by: queue`" in problems(run_file, "slurm.chain={by: requeue, links: 2}")[0]


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


KINDS = (
    "'hang', 'skip', 'die', 'slow', 'unreduced_tied_gradients', 'passenger_norm', 'decayed_norm', 'tied_norm', "
    "'unclipped_tied_copy', 'unreduced_tp_gradients', 'scaled_gradients', 'lost_random_states', "
    "'lost_optimizer_step', 'flipped_byte' or 'out_of_memory'"
)


def test_all_problems_come_at_once_in_reading_order(spoil: Spoil) -> None:
    spoil("nodes: 4", "nodes: four\n  partion: long")
    spoil("hidden_size: 64", "hidden: 64")
    path = spoil("steps: 20", "steps: 0")
    assert problems(path, "optimizer.betas=[0.9]", "faults.0.kind=explode") == [
        "--set: optimizer.betas: must have at least 2 items (got a list)",
        f"--set: faults.0.kind: must be {KINDS} (got 'explode')",
        "--set: faults.0.step: the key is required",
        "run.yaml:5:3: slurm.nodes: must be a whole number (got 'four')",
        "run.yaml:6:3: slurm.partion: unknown key; did you mean slurm.partition?",
        "run.yaml:11:1: model.hidden_size: the key is required",
        "run.yaml:13:3: model.hidden: unknown key; did you mean model.hidden_size?",
        "run.yaml:18:3: training.steps: must be greater than 0 (got 0)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("nodes: 4", 'nodes: "4"', "run.yaml:5:3: slurm.nodes: must be a whole number (got '4'); write it"),
        ("nodes: 4", "nodes: 010", "run.yaml:5:3: slurm.nodes: must be a whole number (got '010'); a leading zero"),
        ("nodes: 4", "nodes: 4.0", "run.yaml:5:3: slurm.nodes: must be a whole number (got 4.0)"),
        ("nodes: 4", "nodes: true", "run.yaml:5:3: slurm.nodes: must be a whole number (got true)"),
        ("nodes: 4", "nodes: [4]", "run.yaml:5:3: slurm.nodes: must be a whole number (got a list)"),
        ("nodes: 4", "nodes:", "run.yaml:5:3: slurm.nodes: must be a whole number (got nothing)"),
        ("nodes: 4", "requeue: yes", "run.yaml:5:3: slurm.requeue: must be true or false (got 'yes'); write true"),
        ("nodes: 4", "nodes: 4\n  seed: 1", "run.yaml:6:3: slurm.seed: unknown key; did you mean run.seed?"),
        ("nodes: 4", "Nodes: 4", "run.yaml:5:3: slurm.Nodes: unknown key; did you mean slurm.nodes?"),
        ("nodes: 4", "num-nodes: 4", "run.yaml:5:3: slurm.num-nodes: unknown key; did you mean slurm.nodes?"),
        ("nodes: 4", "zzz: 4", "run.yaml:5:3: slurm.zzz: unknown key"),
        ("nodes: 4", 'partition: ""', "run.yaml:5:3: slurm.partition: does not match ^\\S+$ (got '')"),
        ("nodes: 4", 'qos: "a\\n#SBATCH -x"', "run.yaml:5:3: slurm.qos: does not match ^\\S+$"),
        ("20:00:00", "1200", "run.yaml:6:3: slurm.time_limit: a bare number is ambiguous"),
        ("20:00:00", "20h", "run.yaml:6:3: slurm.time_limit: '20h' is not a Slurm duration"),
        ("20:00:00", "0:00", "run.yaml:6:3: slurm.time_limit: to Slurm, zero means no limit at all"),
        ("20:00:00", "1.5", "run.yaml:6:3: slurm.time_limit: must be text (got 1.5)"),
        ("name: small", "name: 12", "run.yaml:2:3: run.name: must be text (got 12); write it in quotes"),
        ("name: small", "name: ../../etc", "run.yaml:2:3: run.name: does not match"),
        ("name: small", 'name: "a\\n"', "run.yaml:2:3: run.name: does not match"),
        ("steps: 20", "steps: 9_765", "run.yaml:17:3: training.steps: must be a whole number (got '9_765'); write 97"),
        ("steps: 20", "steps: 20\n  precision: int8", "run.yaml:18:3: training.precision: must be 'fp32', 'bf16'"),
        ("data:", "dato: {}\ndata:", "run.yaml:20:1: dato: unknown key; did you mean data?"),
        ("run:\n  name: small", "run: small", "run.yaml:1:1: run: must be a section with keys below it (got 'small')"),
        ("data:\n  prefix: corpus/text\n", "data:\n", "run.yaml:20:1: data: must be a section with keys below it"),
        ("data:\n  prefix: corpus/text\n", "", "run.yaml:1:1: data.prefix: the key is required"),
        ("site: lake", "site: 7", "run.yaml:4:3: slurm.site: must be text (got 7)"),
        ("site: lake", "site: lakes", "run.yaml:4:3: slurm.site: unknown site 'lakes'; did you mean lake?"),
        ("site: lake", "site: ./none.yaml", "run.yaml:4:3: slurm.site: no such site file: none.yaml"),
        ("site: lake", "site: sites", "run.yaml:4:3: slurm.site: unknown site 'sites'"),
        ("site: lake", "site: ./sites", "run.yaml:4:3: slurm.site: no such site file: sites"),
        ("nodes: 4", "nodes: 4\n  nodes: 8", "run.yaml:6:3: nodes: the key occurs twice (first at "),
        ("data:", "guards: {interval: 0}\ndata:", "run.yaml:20:10: guards.interval: must be 'auto' or 'off' or g"),
        ("data:", "env: {1A: {value: x, reason: y}}\ndata:", "run.yaml:20:7: env.1A: does not match"),
        ("data:", "env: {A: {value: x}}\ndata:", "run.yaml:20:7: env.A.reason: the key is required"),
        ("data:", "env: {A: {value: 1, reason: y}}\ndata:", "run.yaml:20:11: env.A.value: must be text (got 1)"),
        ("data:", "optimizer: {learning_rate: .inf}\ndata:", "run.yaml:20:13: optimizer.learning_rate: must be"),
        ("data:", "optimizer: {betas: [0.9, 1.5]}\ndata:", "run.yaml:20:26: optimizer.betas.1: must be less than 1"),
    ],
)  # fmt: skip
def test_one_wrong_value_gives_one_clear_problem(spoil: Spoil, old: str, new: str, problem: str) -> None:
    (found,) = problems(spoil(old, new))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.steps", "is not section.key=value"),
        ("=3", "is not section.key=value"),
        ("training..steps=3", "is not section.key=value"),
        ("training.steps =3", "is not section.key=value"),
        ("extends=other.yaml", "only a file can extend another"),
        ("run.name.x=3", "a single value has no keys below it"),
        ("optimizer.betas.5=0.1", "the list has 2 items; 5 is neither one of them nor the next"),
        ("optimizer.betas.x=0.1", "the list has 2 items; x is neither one of them nor the next"),
        ("optimizer.betas=[0.9", "not YAML"),
        ("env={A: 1, A: 2}", "twice"),
        ("training.stepz=3", "unknown key; did you mean training.steps?"),
        ("optimiser.learning_rate=3", "unknown key; did you mean optimizer?"),
        ("model=7", "must be a section"),
        ("training.steps=010", "leading zero"),
        ("training.steps=", "must be a whole number (got nothing)"),
        ("slurm.time_limit=72000", "bare number"),
        ("faults.1.kind=hang", "the list has 0 items"),
        ("run.root=\udcff", "U+DCFF"),
    ],
)
def test_wrong_overrides(run_file: Path, override: str, words: str) -> None:
    (problem,) = problems(run_file, override)
    assert problem.startswith("--set: ")
    assert words in problem


def test_overrides_make_what_is_missing_and_the_last_one_counts(load: Load) -> None:
    faults = ["faults.0.kind=hang", "faults.0.rank=3", "faults.0.step=5", "faults.0.step=6"]
    run = load(*faults, "training.rampup.start=8", "training.rampup.increment=4", "training.rampup.samples=64")
    assert run.config.faults == [FaultSpec(kind="hang", rank=3, step=6)]
    assert run.config.training.rampup == RampupSection(start=8, increment=4, samples=64)
    assert load("env.A.value=x=y", "env.A.reason=why").config.env["A"].value == "x=y"
    assert load("faults=[{kind: die, rank: 0, step: 2}]").config.faults[0].kind == "die"


def test_extends_that_lead_nowhere_or_back(run_file: Path) -> None:
    folder = run_file.parent
    one, two = folder / "one.yaml", folder / "two.yaml"
    one.write_text("extends: two.yaml\n")
    two.write_text("run: {name: x}\nextends: ./one.yaml\n")
    assert problems(one) == [
        "two.yaml:2:1: extends: the files extend each other in a circle: one.yaml -> two.yaml -> one.yaml"
    ]
    one.write_text("extends: one.yaml\n")
    assert "in a circle" in problems(one)[0]
    one.write_text("extends: none.yaml\n")
    assert problems(one) == ["one.yaml:1:1: extends: no such file: none.yaml"]
    one.write_text("extends: [run.yaml]\n")
    assert problems(one) == ["one.yaml:1:1: extends: must be the path of one run file"]
    one.write_text("extends: two.yaml\n")
    two.write_text("a: [\n")
    assert problems(one)[0].startswith("two.yaml:2:1: not YAML")
    two.write_bytes(b"")
    assert problems(one) == ["two.yaml: the file is empty"]


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
    assert problems(run_file, "model.num_attention_heads=3") == [
        "--set: model.num_attention_heads: hidden size 64 is not a multiple of 3 heads",
        "--set: model.num_attention_heads: 3 heads are not a multiple of tp 2",
    ]
    batch, world = sorted(problems(run_file, "parallelism.data_parallel_size=3"), reverse=True)
    assert world.startswith(
        "--set: parallelism.data_parallel_size: 4 nodes x 2 ranks = 8 ranks, but tp 2 x pp 2 x dp 3"
    )
    assert batch.startswith(
        "run.yaml:19:3: training.global_batch_size: global batch 16 is not a multiple of micro batch 2 x dp 3"
    )


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
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
