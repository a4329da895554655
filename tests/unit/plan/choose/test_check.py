"""The arithmetic of a whole run: each finding appears where it should, with its keys and its price."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import resolve_run
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site
from bigsci_launch.plan.choose.answer import configured_setup
from bigsci_launch.plan.choose.check import check_everything, check_lines, check_plan, parse_size
from bigsci_launch.plan.price.calibration import calibration_of
from bigsci_launch.units import format_count

from ..conftest import changed

START = date(2022, 3, 11)


def on_site(site: Site, **values: object) -> Site:
    return Site(site.name, site.path, site.config.model_copy(update=values))


def checked(config: RunConfig, site: Site) -> list[Finding]:
    """Return the findings of the arithmetic by the site's own calibration."""
    calibration = calibration_of(site)
    return check_plan(config, site, configured_setup(config, site, calibration), calibration, starts=START)


def findings(config: RunConfig, site: Site, rule: str) -> list[Finding]:
    return [finding for finding in checked(config, site) if finding.rule == rule]


def only(config: RunConfig, site: Site, rule: str) -> Finding:
    (finding,) = findings(config, site, rule)
    return finding


def test_bloom_has_no_error(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    assert {finding.severity for finding in checked(config, site)} == {"warning", "note"}


def test_a_ramp_that_does_not_fill_the_pipeline(bloom_run: tuple[RunConfig, Site]) -> None:
    """main-1 began with a batch of 16 at 8 TFLOP/s, which would have lasted for days."""
    config, site = bloom_run
    assert not findings(config, site, "pipeline fill")
    ramp = config.training.rampup
    assert ramp is not None
    slow = changed(config, "training", rampup=ramp.model_copy(update={"start": 16}))
    finding = only(slow, site, "pipeline fill")
    assert finding.keys == ("training.rampup.start", "parallelism.pipeline_parallel_size")
    assert "192" in finding.text
    days, lost = re.findall(r"[0-9]+\.[0-9]+", finding.price)[:2]
    assert float(days) > float(lost) > 0.2


def test_the_58b_that_was_trained_as_104b(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    sizes = {"num_layers": 64, "hidden_size": 11600, "num_attention_heads": 80, "ffn_hidden_size": 20480}
    # The MLP width was left at that of the 13B model.
    wrong = changed(config, "model", **sizes, vocab_size=50257, declared_parameters="104B")
    wrong = changed(wrong, "parallelism", pipeline_parallel_size=12)
    finding = only(wrong, site, "declared size")
    assert finding.severity == "error"
    assert finding.keys == ("model.declared_parameters", "model.ffn_hidden_size")
    assert "65.5B" in finding.text
    assert not findings(changed(wrong, "model", ffn_hidden_size=None), site, "declared size")


@pytest.mark.parametrize(
    ("text", "size"),
    [("176B", 176e9), ("1.3b", 1.3e9), ("350 M", 350e6), ("12", 12), ("a lot", None), ("1.2.3B", None)],
)
def test_sizes_as_people_write_them(text: str, size: float | None) -> None:
    assert parse_size(text) == size


@given(st.floats(1, 1e13))
def test_sizes_round_trip(number: float) -> None:
    size = parse_size(format_count(number))
    assert size is not None
    assert size == pytest.approx(number, rel=0.06, abs=0.5)


def test_an_unreadable_size_is_an_error(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    assert only(changed(config, "model", declared_parameters="huge"), site, "declared size").severity == "error"


def test_young_and_daly(bloom_run: tuple[RunConfig, Site]) -> None:
    """40 s and a failure a week: sqrt(2 x 40 x 604800) = 6956 s = 66 steps of 105 s; 100 is near, 250 is far."""
    config, site = bloom_run
    near = only(config, site, "save interval")
    assert near.severity == "note"
    assert "67 steps" in near.text
    far = only(changed(config, "checkpoint", save_interval=250), site, "save interval")
    assert far.severity == "warning"
    assert "3.7 x" in far.text
    assert far.keys == ("checkpoint.save_interval", "site.node_mtbf_h")
    never = only(changed(config, "checkpoint", save_interval=None), site, "save interval")
    assert "no save" in never.text
    assert not findings(config, on_site(site, node_mtbf_h=None), "save interval")


def test_save_before_eval(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    trainer = changed(config, "run", command=None, framework=None)
    assert not findings(changed(trainer, "monitor", eval_interval=1000), site, "save before eval")
    evaluated = changed(config, "monitor", eval_interval=1000)
    assert "2.9 h" in only(evaluated, site, "save before eval").price
    assert not findings(changed(config, "monitor", eval_interval=1050), site, "save before eval")


def test_exit_margin(bloom_run: tuple[RunConfig, Site]) -> None:
    """5990 of 6000 minutes left ten for an evaluation of twelve."""
    config, site = bloom_run
    short = changed(config, "monitor", eval_time_s=720.0, exit_margin_s=600)
    assert "865 s" in only(short, site, "exit margin").text
    assert not findings(changed(short, "monitor", exit_margin_s=900), site, "exit margin")


def test_disk(bloom_run: tuple[RunConfig, Site]) -> None:
    """About 19 TB a day were written."""
    config, site = bloom_run
    finding = only(config, site, "disk")
    assert 18 < float(finding.price.split()[0]) < 22
    assert finding.severity == "warning"


def test_reserve(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    assert not findings(config, site, "reserve")
    partition = site.config.partitions["gpu_p5"].model_copy(update={"nodes": 48})
    full = on_site(site, reserve_nodes=0, partitions={"gpu_p5": partition})
    assert "1.0 nodes" in only(config, full, "reserve").price


def test_a_lost_node(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    finding = only(config, site, "lost node")
    assert "7 replicas" in finding.text
    assert "dp 4 on 24 nodes" in finding.text
    assert "x the time" in finding.price
    one_replica = changed(config, "parallelism", data_parallel_size=1)
    one_replica = changed(changed(one_replica, "slurm", nodes=6), "training", micro_batch_size=1)
    assert "no replica" in only(one_replica, site, "lost node").text


def test_the_end_of_the_allocation(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    assert not findings(config, on_site(site, allocation_ends="2022-12-31"), "allocation")
    late = only(config, on_site(site, allocation_ends="2022-07-04"), "allocation")
    assert late.severity == "error"
    assert "days too late" in late.price
    assert only(config, on_site(site, allocation_ends="2022-07-25"), "allocation").severity == "warning"


def test_memory(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    finding = only(changed(config, "training", activation_checkpointing=False), site, "memory")
    assert finding.severity == "error"
    assert "out of memory" in finding.price


def test_a_step_time_that_nobody_will_see(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    assert "104 s predicted" in only(changed(config, "monitor", step_time_s=60.0), site, "step time").text


def test_shapes_that_kernels_do_not_like(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    odd = changed(config, "model", hidden_size=13824, num_attention_heads=128, declared_parameters=None)
    finding = only(odd, site, "shape")
    assert "head size 108" in finding.text
    assert 20 < float(finding.price.split()[0]) < 40


def test_empty_stages_are_errors_that_only_the_partitioner_sees(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    config = changed(config, "run", command=None, framework=None)
    thin = changed(config, "parallelism", partition_method="type:embedding")
    errors = [found for found in checked(thin, site) if found.severity == "error"]
    assert {found.rule for found in errors} == {"preflight: equal parameter groups"}
    wrapped = changed(thin, "run", command=["nice", "python", "-m", "bigsci_launch.train"])
    assert [found.rule for found in checked(wrapped, site) if found.is_error] == [found.rule for found in errors]


def test_the_layers_of_another_program_are_not_known(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    thin = changed(config, "parallelism", partition_method="type:embedding")
    [found] = checked(thin, site)
    assert (found.rule, found.severity) == ("empty stage", "warning") and "Megatron-DeepSpeed" in found.price
    [unknown] = checked(changed(thin, "run", framework=None), site)
    assert (unknown.rule, unknown.severity, unknown.keys[0]) == ("framework", "note", "run.framework")


def test_sizes_that_do_not_fit_are_left_to_the_checks_of_run_files(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    broken = changed(config, "parallelism", data_parallel_size=7)
    rules = {finding.rule for finding in check_everything(broken, site, None)}
    assert rules == {"world size", "batch", "ramp-up"}


def test_a_site_without_gpus_is_checked_without_a_model(root: Path) -> None:
    config, site, _ = resolve_run(root / "configs/demo.yaml")
    assert all(finding.severity != "error" for finding in check_everything(config, site, None))


def test_lines_name_both_keys_and_the_price(bloom_run: tuple[RunConfig, Site]) -> None:
    config, site = bloom_run
    lines = check_lines("bloom", checked(config, site))
    assert any(line.startswith("warning: checkpoint.save_interval and model.num_layers: ") for line in lines)
    (nothing_found,) = check_lines("bloom", [])
    assert nothing_found.startswith("bloom: ")


def test_the_exit_margin_is_that_of_the_job_script(bloom_run: tuple[RunConfig, Site]) -> None:
    """60 s of slack are in it, and it is at most half of the limit."""
    config, site = (
        changed(bloom_run[0], "monitor", exit_margin_s=None, step_time_s=100.0, save_time_s=100.0),
        bloom_run[1],
    )
    assert not findings(changed(config, "monitor", eval_time_s=200.0), site, "exit margin"), "460 s for 400 s"
    short = changed(changed(config, "monitor", eval_time_s=200.0), "slurm", time_limit="00:12:00")
    assert "360 s" in only(short, site, "exit margin").text
