"""`bsl config` as a user meets it: streams, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import load_run
from tests.support.texts import has_parts

from .conftest import SITE

DESCRIPTION = SITE.partition("\n")[0].removeprefix("description: ")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(bsl, ["config", *map(str, arguments)], catch_exceptions=False)


def test_check_says_ok_and_the_topology(run_file: Path) -> None:
    done = call("check", run_file)
    assert done.exit_code == 0
    assert has_parts(
        done.stdout,
        f"{run_file}: ok; ",
        "8 ranks (4 nodes x 2)",
        "site lake",
        str(load_run(run_file).layout.topology.product),
    )
    assert done.stderr == ""


def test_check_talks_of_warnings_and_still_succeeds(run_file: Path) -> None:
    done = call("check", run_file, "--set", "checkpoint.save_interval=99")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: --set: checkpoint.save_interval: no effect")
    run_file.write_text(run_file.read_text() + "checkpoint:\n  save_interval: 99\n")
    assert call("check", run_file).stderr.startswith(f"warning: {run_file}:23:3: checkpoint.save_interval: no effect")


def test_check_names_every_problem_and_exits_with_2(run_file: Path) -> None:
    done = call("check", run_file, "--set", "training.stepz=3", "--set", "slurm.nodes=x")
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "error", "hint"]


def test_check_in_json(run_file: Path) -> None:
    good, bad = call("check", run_file, "--json"), call("check", run_file, "--json", "--set", "slurm.nodes=3")
    assert (good.exit_code, bad.exit_code) == (0, 2)
    document = json.loads(good.stdout)
    assert document["schema_version"] == 1 and document["ok"] is True
    assert document["layout"] == {"nodes": 4, "ranks_per_node": 2, "topology": {"tp": 2, "pp": 2, "dp": 2}}
    document = json.loads(bad.stdout)
    assert document["ok"] is False and document["layout"] is None
    assert document["problems"][0]["key"] == "parallelism.tensor_parallel_size"


def test_show_prints_a_run_file_with_origins(run_file: Path) -> None:
    done = call("show", run_file, "--set", "run.seed=7")
    assert "  seed: 7" in done.stdout and "# --set" in done.stdout and "# site lake" in done.stdout
    assert f"# {run_file}:6:3" in done.stdout
    again = run_file.parent / "again.yaml"
    again.write_text(done.stdout)
    assert load_run(again).config == load_run(run_file, ["run.seed=7"]).config


def test_show_in_json(run_file: Path) -> None:
    document = json.loads(call("show", run_file, "--json").stdout)
    assert document["schema_version"] == 1
    assert document["config"]["slurm"]["time_limit"] == "20:00:00"
    assert document["origins"]["slurm.partition"] == "site lake"
    assert document["site"]["name"] == "lake"


def test_sites_are_listed(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_file.parent)
    assert DESCRIPTION in call("sites").stdout
    names = [site["name"] for site in json.loads(call("sites", "--json").stdout)["sites"]]
    assert names == sorted(names)
    assert {"jean-zay-a100", "lake", "local", "minicluster"} <= set(names)


def test_a_broken_site_does_not_hide_the_others(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_file.parent)
    (run_file.parent / "sites" / "broken.yaml").write_text("partitions: [\n")
    done = call("sites")
    assert done.exit_code == 0 and has_parts(done.stdout, DESCRIPTION, "sites/broken.yaml:2:1: ")
    sites = {site["name"]: site for site in json.loads(call("sites", "--json").stdout)["sites"]}
    assert sites["broken"]["config"] is None and "not YAML" in sites["broken"]["problem"]
    assert sites["lake"]["config"] and sites["lake"]["problem"] is None


@pytest.mark.parametrize("name", ["run", "site"])
def test_schema_prints_the_published_file(name: str) -> None:
    assert json.loads(call("schema", name).stdout)["title"] == f"bsl {name} file"


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    for verb in ("check", "show"):
        done = call(verb, tmp_path / "none.yaml")
        assert done.exit_code == 2
        assert has_parts(done.stderr, f"error: {tmp_path}/none.yaml: ", "No such file")
