"""Each rule across sections: what it refuses, what it lets pass, and the keys it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.check import CHECKS, check_rampup_range, check_run
from bigsci_launch.config.finding import Finding, finding_line
from bigsci_launch.config.load import LoadedRun
from bigsci_launch.config.rules.described import check_layout
from bigsci_launch.config.schema.run import RampupSection, RunConfig, TrainingSection
from bigsci_launch.config.site import Site, load_site

Load = Callable[..., LoadedRun]


@pytest.fixture
def run(load: Load) -> LoadedRun:
    return load()


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Return `config` with dotted keys set, validated so that only rules across sections can object."""
    data = config.model_dump()
    for key, value in changes.items():
        section, name = key.split(".", 1)
        data[section][name] = value
    return RunConfig.model_validate(data)


def brief(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    """Return severity, rule and both keys; the second is empty for a rule about one key."""
    return [(finding.severity, finding.rule, *(*finding.keys, "")[:2]) for finding in findings]


TP, PP, DP = (f"parallelism.{axis}_parallel_size" for axis in ("tensor", "pipeline", "data"))
CP, OVERLAP = "parallelism.context_parallel_size", "parallelism.overlap"
HEADS, BATCH, MICRO = "model.num_attention_heads", "training.global_batch_size", "training.micro_batch_size"
LIMIT, PARTITION, STEPS = "slurm.time_limit", "slurm.partition", "training.steps"
MARGIN, METHOD = "monitor.exit_margin_s", "parallelism.partition_method"
MULTIPLE, LOWEST = "model.vocab_size_multiple", "optimizer.min_learning_rate"
WARMUP, DECAY = "optimizer.warmup_steps", "optimizer.decay_steps"
NO_EFFECT = "steps_without_effect"
FAULT = {"kind": "hang", "rank": 3, "step": 5}


OBJECTIONS: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"slurm.nodes": 3}, "error", "world size", DP, "slurm.nodes"),
    ({DP: None, PP: 3, "slurm.nodes": 4}, "error", "world size", TP, "slurm.nodes"),
    ({CP: 2, DP: 1}, "error", "axes", CP, "run.command"),
    ({OVERLAP: ["data", "tensor"]}, "error", "technique", OVERLAP, "run.command"),
    ({OVERLAP: ["data"], MICRO: "auto"}, "error", "overlap", OVERLAP, MICRO),
    ({OVERLAP: ["data"], "training.precision": "fp32"}, "error", "overlap", OVERLAP, "training.precision"),
    ({"model.vocab_size": 100}, "warning", "vocabulary_padding", "model.vocab_size_multiple", "model.vocab_size"),
    ({BATCH: 18}, "error", "batch", BATCH, MICRO),
    ({LOWEST: 1.0}, "error", "learning_rate", LOWEST, "optimizer.learning_rate"),
    ({WARMUP: 21}, "error", "learning_rate", WARMUP, STEPS),
    ({WARMUP: 9, DECAY: 8}, "error", "learning_rate", WARMUP, DECAY),
    ({PARTITION: "lon"}, "error", "partition", PARTITION, "slurm.site"),
    ({PARTITION: "gpu"}, "error", "partition", PARTITION, "slurm.site"),
    ({PARTITION: None}, "error", "partition", PARTITION, "slurm.site"),
    ({"slurm.nodes": 6, DP: 3, BATCH: 12}, "error", "nodes", "slurm.nodes", "site.reserve_nodes"),
    ({LIMIT: "2-00:00:01"}, "error", "time_limit", LIMIT, PARTITION),
    ({PARTITION: "short"}, "error", "time_limit", LIMIT, PARTITION),
    ({LIMIT: "2-00:00:01", "slurm.reservation": "big"}, "warning", "time_limit", LIMIT, PARTITION),
    ({LIMIT: "2-00:00:01", "slurm.qos": "long"}, "warning", "time_limit", LIMIT, PARTITION),
    ({LIMIT: None}, "warning", "time_limit", LIMIT, PARTITION),
    ({MARGIN: 72000}, "error", "exit_margin", MARGIN, LIMIT),
    ({MARGIN: 100}, "warning", "exit_margin", MARGIN, "monitor.save_time_s"),
    ({LIMIT: "00:06:00"}, "warning", "exit_margin", "monitor.step_time_s", LIMIT),
    ({METHOD: "type:tr(ansformer"}, "error", "partition_method", METHOD, ""),
    ({METHOD: "type:none:transformer"}, "error", "partition_method", METHOD, ""),
    ({METHOD: "type:"}, "error", "partition_method", METHOD, ""),
    ({METHOD: "tme"}, "error", "partition_method", METHOD, ""),
    ({METHOD: "time:2,x"}, "error", "partition_method", METHOD, ""),
    ({METHOD: "memory:9,9"}, "error", "partition_method", METHOD, "parallelism.pipeline_parallel_size"),
    ({METHOD: "unifrom"}, "error", "partition_method", METHOD, ""),
    ({"checkpoint.save_interval": 21}, "warning", NO_EFFECT, "checkpoint.save_interval", STEPS),
    ({"training.stop_after_steps": 20}, "warning", NO_EFFECT, "training.stop_after_steps", STEPS),
    ({"monitor.dump_weights_steps": [5, 21]}, "warning", NO_EFFECT, "monitor.dump_weights_steps.1", STEPS),
]


def test_one_rule_objects(run: LoadedRun, check_golden: Callable[[Path, str], None]) -> None:
    said = ""
    for changes, *expected in OBJECTIONS:
        (finding,) = check_run(changed(run.config, changes), run.site)
        assert brief([finding]) == [tuple(expected)], changes
        said += f"{finding_line(finding)}\n"
    check_golden(Path(__file__).parents[2] / "golden" / "reports" / "run-file-rules.txt", said)


@pytest.mark.parametrize(
    "changes",
    [
        {DP: None},
        {"slurm.nodes": 5, TP: 1, PP: 2, DP: 5, BATCH: 20},
        {"slurm.time_limit": "2-00:00:00"},
        {"slurm.partition": "short", "slurm.time_limit": "01:00:00"},
        {WARMUP: 20},
        {LOWEST: 3e-4},
        {"parallelism.partition_method": "parameters"},
        {"parallelism.partition_method": "type:a|b"},
        {"monitor.dump_weights_steps": [20], "checkpoint.save_interval": 20, "training.stop_after_steps": 19},
        {"monitor.exit_margin_s": 180},
        {"model.ffn_hidden_size": 100},
        {OVERLAP: ["data"]},
    ],
)
def test_what_just_holds_is_let_pass(run: LoadedRun, changes: dict[str, Any]) -> None:
    assert check_run(changed(run.config, changes), run.site) == []


def with_faults(config: RunConfig, *faults: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({**config.model_dump(), "faults": list(faults)})


def test_faults_hit_ranks_and_steps_that_exist(run: LoadedRun) -> None:
    late, outside = {**FAULT, "step": 21}, {**FAULT, "rank": 8}
    slow, odd = {**FAULT, "kind": "slow", "seconds": 3.0}, {**FAULT, "seconds": 3.0}
    findings = check_run(with_faults(run.config, FAULT, late, outside, slow, odd), run.site)
    assert brief(findings) == [
        ("error", "faults", "faults.2.rank", DP),
        ("warning", "faults", "faults.1.step", "training.steps"),
        ("warning", "faults", "faults.4.seconds", "faults.4.kind"),
    ]
    assert "8 ranks" in findings[0].text


def test_another_program_ignores_what_only_the_trainer_does(run: LoadedRun) -> None:
    keys: dict[str, Any] = {
        "guards.action": "warn",
        "guards.interval": 5,
        "checkpoint.keep_last": 2,
        "checkpoint.load": "none",
        "monitor.dump_weights_steps": [3],
        "monitor.eval_interval": 4,
        "training.stop_after_steps": 5,
        "data.held_out": 0.1,
    }
    config = with_faults(changed(run.config, {"run.command": ["true"], **keys}), FAULT)
    findings = check_run(config, run.site)
    named = {finding.keys[0]: finding for finding in findings if finding.rule == "command_without_effect"}
    assert named.keys() == {"faults", *keys}
    assert {(finding.severity, finding.keys[1]) for finding in named.values()} == {("warning", "run.command")}
    assert "`bsl plan check`" in named["monitor.eval_interval"].text
    plain = changed(run.config, {"run.command": ["true"]})
    assert [finding for finding in check_run(plain, run.site) if finding.rule == "command_without_effect"] == []
    ours = changed(run.config, keys)
    assert [finding for finding in check_run(ours, run.site) if finding.rule == "command_without_effect"] == []


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID", "BSL_RUN_DIR"])
def test_the_launchers_variables_are_its_own(run: LoadedRun, name: str) -> None:
    env = {name: {"value": "0", "reason": "x"}, "MY_RANK": {"value": "0", "reason": "x"}}
    findings = check_run(RunConfig.model_validate({**run.config.model_dump(), "env": env}), run.site)
    assert brief(findings) == [("error", "environment", f"env.{name}", "")]


def test_slurm_options_have_no_effect_on_a_local_site(run: LoadedRun) -> None:
    config = changed(run.config, {"slurm.requeue": True, "slurm.partition": "long", "slurm.time_limit": "00:01:00"})
    findings = check_run(config, load_site("local"))
    assert {finding.rule for finding in findings} == {"local_without_effect"}
    keys = [finding.keys[0] for finding in findings]
    assert keys == ["slurm.nodes", "slurm.time_limit", "slurm.partition", "slurm.account", "slurm.requeue"]


def test_a_site_without_partitions_leaves_them_to_slurm(run: LoadedRun) -> None:
    bare = run.site.config.model_copy(update={"partitions": {}, "default_partition": None})
    config = changed(run.config, {"slurm.partition": None, "slurm.nodes": 4})
    assert check_run(config, replace(run.site, config=bare)) == []


def ramp(run: LoadedRun, start: int, increment: int, goal: int, micro: int = 2) -> RunConfig:
    rampup = RampupSection(start=start, increment=increment, samples=1000)
    training = TrainingSection(steps=20, micro_batch_size=micro, global_batch_size=goal, rampup=rampup)
    return run.config.model_copy(update={"training": training})


@pytest.mark.parametrize(
    ("start", "increment", "goal", "expected"),
    [
        (4, 4, 16, []),
        (4, 6, 16, [("error", "ramp-up", "training.rampup.increment", MICRO)]),
        (6, 5, 16, [("error", "ramp-up", "training.rampup.start", MICRO)]),
        (4, 8, 16, [("error", "rampup_range", "training.rampup.increment", BATCH)]),
        (20, 4, 16, [("error", "rampup_range", "training.rampup.start", BATCH)]),
        (16, 4, 16, [("warning", "rampup_range", "training.rampup.start", BATCH)]),
    ],
)
def test_ramps(run: LoadedRun, start: int, increment: int, goal: int, expected: list[Any]) -> None:
    assert brief(check_run(ramp(run, start, increment, goal), run.site)) == expected


SIZE = st.integers(min_value=1, max_value=40)


@given(start=SIZE, increment=SIZE, goal=SIZE, micro=st.integers(min_value=1, max_value=5))
def test_a_ramp_is_legal_exactly_when_every_size_on_it_is(start: int, increment: int, goal: int, micro: int) -> None:
    """Against Megatron's loop written out: from start by increments to the goal, each a multiple of micro x dp."""
    site = load_site("local")
    base = {
        "run": {"name": "x"},
        "parallelism": {"data_parallel_size": 3},
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "sequence_length": 8, "vocab_size": 128},
        "training": {
            "steps": 1,
            "micro_batch_size": micro,
            "global_batch_size": goal,
            "rampup": {"start": start, "increment": increment, "samples": 9},
        },
        "data": {"prefix": "x"},
    }
    config = RunConfig.model_validate(base)
    sizes, size = [], start
    while size < goal:
        sizes.append(size)
        size += increment
    legal = start <= goal and (size == goal) and all(each % (micro * 3) == 0 for each in sizes)
    sizes_break = any(finding.rule == "ramp-up" for finding in check_layout(config, site))
    range_breaks = any(finding.is_error for finding in check_rampup_range(config, site))
    assert legal == (not sizes_break and not range_breaks)


def test_every_rule_is_run_and_says_what_it_wants() -> None:
    from bigsci_launch.config import check

    written = {value for name, value in vars(check).items() if name.startswith("check_") and name != "check_run"}
    assert written == set(CHECKS)
    assert all(rule.__doc__ for rule in CHECKS)


def test_the_rules_hold_for_sites_that_are_files(run: LoadedRun, tmp_path: Path) -> None:
    site = Site("other", tmp_path, run.site.config.model_copy(update={"ranks_per_node": 4}))
    findings = check_run(changed(run.config, {DP: 2}), site)
    assert brief(findings) == [("error", "world size", DP, "slurm.nodes")]
    assert "(site other)" in findings[0].text
