"""`bsl plan` as people type it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bigsci_launch import __version__
from bigsci_launch.cli.main import bsl
from bigsci_launch.plan.price.calibration import UNCALIBRATED_BAND
from tests.support.pages import Page
from tests.support.texts import has_parts

ROWS = "benchmarks/rows/chronicle.csv"
WIDEST = f"{UNCALIBRATED_BAND:.4f}"


@pytest.fixture(autouse=True)
def in_the_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bsl, ["plan", *arguments])


def test_the_first_word_may_be_a_file_or_a_verb(tmp_path: Path) -> None:
    assert "number 1 of" in run("configs/bloom-176b-2022.yaml").output
    assert "number 1 of" in run("--top", "1", "configs/bloom-176b-2022.yaml").output
    help_text = run("--help").output
    assert "bsl plan [OPTIONS] CONFIG" in help_text
    assert "--explain" in help_text
    assert {"calibrate", "check", "predict", "score"} <= set(re.findall(r"^  (\w+) ", help_text, re.MULTILINE))


def test_the_answer_in_words(root: Path, check_golden: Callable[[Path, str], None]) -> None:
    said = run("configs/bloom-176b-2022.yaml", "--top", "2", "--explain", "--rejected").stdout
    check_golden(root / "tests/golden/reports/plan.txt", "".join(f"{line.rstrip()}\n" for line in said.splitlines()))


def test_the_answer_in_json() -> None:
    result = run("configs/bloom-176b-2022.yaml", "--top", "3", "--json")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["world_size"] == 384
    assert document["num_parameters"] == 176276602880
    assert len(document["plans"]) == 3
    best = document["plans"][0]
    assert (best["tp"], best["pp"], best["dp"], best["micro_batch_size"]) == (4, 12, 8, 2)
    assert sum(best["terms"].values()) == pytest.approx(best["seconds_per_step"])
    throughput = best["tokens_per_second_per_gpu"] * 384 * best["seconds_per_step"]
    assert throughput == pytest.approx(2048 * 2048)
    assert best["mfu"] == pytest.approx(best["model_tflops"] / 312)
    assert best["hardware_tflops"] == pytest.approx(best["tflops"]["full"])
    assert best["model_tflops"] < best["hardware_tflops"]
    assert best["seconds_low"] < best["seconds_per_step"] < best["seconds_high"]
    assert sum(stage["num_transformer_layers"] for stage in document["stages"]) == 70
    assert {"ramp-up", "tp in a node"} <= {entry["rule"] for entry in document["refused"]}


def test_without_a_gpu_the_sizes_are_said() -> None:
    result = run("configs/demo.yaml")
    assert result.exit_code == 0
    assert has_parts(result.output, "tp=2,pp=2,dp=2", "8 ranks", "no GPU")
    assert json.loads(run("configs/demo.yaml", "--json").stdout)["plans"] is None


def test_uncalibrated_figures_say_so(tmp_path: Path, root: Path) -> None:
    site = (root / "slurm/sites/jean-zay-a100-2022.yaml").read_text()
    (tmp_path / "new.yaml").write_text("\n".join(line for line in site.splitlines() if "calibration" not in line))
    output = run("configs/bloom-176b-2022.yaml", "--set", f"slurm.site={tmp_path / 'new.yaml'}", "--top", "1").output
    assert "uncalibrated" in output
    assert f"±{100 * UNCALIBRATED_BAND:.0f}%" in output


def test_nothing_fits() -> None:
    result = run("configs/bloom-176b-2022.yaml", "--nodes", "1")
    assert result.exit_code == 1
    assert "0 plans fit" in result.output


def test_a_program_of_unknown_framework_has_no_price() -> None:
    own = ["--set", "run.command=['true']", "--set", "run.framework=null"]
    refused = run("configs/bloom-176b-2022.yaml", *own)
    assert refused.exit_code == 2
    assert has_parts(refused.output, "run.framework: ", "run.command")
    checked = run("check", "configs/bloom-176b-2022.yaml", *own, "--json")
    rules = [found["rule"] for found in json.loads(checked.stdout)["findings"]]
    assert (checked.exit_code, rules.count("framework")) == (0, 1)


def test_context_parallelism_has_a_price_and_needs_another_program() -> None:
    sizes = ["--set", "parallelism.context_parallel_size=2", "--set", "parallelism.data_parallel_size=4"]
    answer = run("configs/bloom-176b.yaml", *sizes, "--top", "1")
    assert answer.exit_code == 0
    assert has_parts(answer.output, "parallelism.context_parallel_size: ", "cp=2")
    refused = run("configs/bloom-176b.yaml", *sizes, "--survive", "f=1")
    assert refused.exit_code == 2
    assert has_parts(refused.output, "parallelism.context_parallel_size: ", "--survive")


def test_context_parallelism_stays_as_configured() -> None:
    sizes = ["--set", "parallelism.context_parallel_size=2", "--set", "parallelism.data_parallel_size=4"]
    own = ["--set", "run.command=['true']", "--set", "run.framework=megatron", "--set", "model.num_layers=72"]
    document = json.loads(run("configs/bloom-176b.yaml", *sizes, *own, "--json").stdout)
    plans = [*document["plans"], *document["out_of_memory"]]
    assert plans and {plan["cp"] for plan in plans} == {2}
    assert document["program_needed"] is None
    assert "not priced" not in run("check", "configs/bloom-176b.yaml", *sizes, *own).stdout


def test_what_bsl_train_cannot_do_is_planned_and_said() -> None:
    output = run("configs/bloom-176b.yaml", "--set", "parallelism.zero_stage=0", "--top", "1").output
    assert has_parts(output, "parallelism.zero_stage: ", "plans fit")


def test_bsl_train_does_fp8_and_sequence_parallelism() -> None:
    options = ["--set", "training.precision=fp8", "--set", "parallelism.sequence_parallel=true"]
    document = json.loads(run("configs/bloom-176b.yaml", *options, "--json").stdout)
    assert document["plans"] and document["program_needed"] is None


def test_the_head_comes_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that never ends has said what was asked."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bigsci_launch.plan.choose.answer.search", stop)
    output = run("configs/bloom-176b.yaml").output
    assert "176.3B parameters" in output
    assert "calibrated on" in output


def test_a_stage_costs_the_same_in_every_view(tmp_path: Path) -> None:
    document = json.loads(run("configs/bloom-176b.yaml", "--json").stdout)
    milliseconds = [stage["micro_batch_milliseconds"] for stage in document["stages"]]
    page = tmp_path / "plan.html"
    text = run("configs/bloom-176b.yaml", "--html", str(page)).output
    dry_run = CliRunner().invoke(bsl, ["submit", "configs/bloom-176b.yaml", "--dry-run"]).output
    for stage in (0, 11):
        words = f"{milliseconds[stage]:.0f} ms"
        assert f"{words} a micro batch" in text and f"{words} a micro batch" in dry_run
        assert f"stage {stage}: 5 layers, {words}" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "model.num_layers=1000000"), "model.num_layers: "),
        (("--set", f"model.num_layers={10**21}"), "model.num_layers: "),
        (("--set", f"model.hidden_size={10**21}", "--free", "heads"), "model.hidden_size: "),
        (("--set", "training.global_batch_size=999999999"), "training.global_batch_size: "),
        (("--nodes", "1:100000"), "--nodes 1:100000: "),
        (("--nodes", "99999999999"), "--nodes: 99999999999 "),
        (("--set", "slurm.nodes=99999999999"), "slurm.nodes: 99999999999 "),
    ],
)
def test_absurd_sizes_are_refused_with_their_limit(arguments: tuple[str, ...], words: str) -> None:
    result = run("configs/bloom-176b.yaml", *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_more_ranks_than_any_cluster_has_are_refused_before_they_are_listed() -> None:
    sizes = ["--set", "parallelism.data_parallel_size=99999999999", "--set", "training.global_batch_size=1000000"]
    asked, most = "dp 99999999999 = 399999999996 ranks", "200000"
    assert has_parts(run("configs/demo.yaml", *sizes).output, asked, most)
    submitted = CliRunner().invoke(bsl, ["submit", "configs/demo.yaml", "--dry-run", *sizes])
    assert submitted.exit_code == 2
    assert has_parts(submitted.output, "parallelism.data_parallel_size: ", asked, most)


@pytest.mark.parametrize("nodes", ["0", "a", "9:3", "1:"])
def test_nodes_that_are_none(nodes: str) -> None:
    result = run("configs/bloom-176b-2022.yaml", "--nodes", nodes)
    assert result.exit_code == 2
    assert f"--nodes {nodes}" in result.output


@pytest.mark.slow
def test_calibrate_predict_and_score(tmp_path: Path) -> None:
    calibration, predicted = tmp_path / "cal.json", tmp_path / "out.csv"
    result = run("calibrate", ROWS, "--site", "jean-zay-a100-2022", "-o", str(calibration))
    assert result.exit_code == 0
    assert "gemm_efficiency" in result.output
    assert "p030a: nlayers " in result.output
    result = run("predict", ROWS, "--calibration", str(calibration), "-o", str(predicted))
    assert result.exit_code == 0
    assert "89 of 98 rows priced" in result.output
    timed = [row for row in table(predicted) if row["score_time"] == "1" and row["sec_per_it"] and row["pred_band"]]
    assert {row["pred_closeness"] for row in timed} == {"1.0000"}
    assert {row["pred_band"] for row in timed} == {timed[0]["pred_band"]}
    assert 0.01 < float(timed[0]["pred_band"]) < 0.05
    document = json.loads(run("score", str(predicted), "--json").stdout)
    assert document["time"]["num_rows"] == 64
    assert document["oom"] == {"num_oom": 3, "num_caught": 3, "num_fitting": 47, "num_false": 0}
    assert document["tflops_weights"]["mean"] < 0.1
    assert document["tflops_full"]["mean"] < 0.1
    assert "Kendall tau" in run("score", str(predicted)).output


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


SHIPPED = ("--calibration", "slurm/calibrations/jean-zay-a100.json")


def test_rows_of_another_place_have_the_widest_band_and_say_so(tmp_path: Path) -> None:
    predicted = tmp_path / "out.csv"
    result = run("predict", ROWS, *SHIPPED, "--site", "jean-zay-a100", "-o", str(predicted))
    assert {row["pred_band"] for row in table(predicted) if row["pred_band"]} == {WIDEST}
    assert "89 of 89 rows" in result.stderr
    result = run("predict", ROWS, *SHIPPED, "--site", "superpod-pyxis", "-o", str(predicted))
    assert result.exit_code == 2
    assert has_parts(result.stderr, "A100-SXM4-80GB", "H100-SXM5-80GB", "--site superpod-pyxis")


def test_rows_may_name_their_place_themselves(tmp_path: Path) -> None:
    first = next(row for row in table(Path(ROWS)) if row["score_time"] == "1" and row["sec_per_it"])
    unfused = {"attention": "unfused", "recompute": "full"}
    places = (
        {},
        {"gpu": "NVIDIA A100-SXM4-80GB", "site": "jean-zay-a100-2022", "framework": "deepspeed", **unfused},
        {"site": "selene"},
        {"framework": "megatron", **unfused},
        {"gpu": "H100-SXM5-80GB"},
    )
    rows, predicted = tmp_path / "rows.csv", tmp_path / "out.csv"
    write_table(rows, [{**first, **place} for place in places])
    result = run("predict", str(rows), *SHIPPED, "-o", str(predicted))
    unsaid, own, elsewhere, another, h100 = table(predicted)
    assert float(unsaid["pred_band"]) < 0.1 and float(own["pred_band"]) < 0.1
    assert elsewhere["pred_band"] == another["pred_band"] == WIDEST
    assert (h100["pred_band"], h100["pred_sec_per_it"]) == ("", "")
    assert has_parts(result.stderr, "H100-SXM5-80GB", "A100-SXM4-80GB", "warning: 2 of 4 rows")


def test_a_calibration_of_rows_of_several_gpus_is_refused(tmp_path: Path) -> None:
    given = [row for row in table(Path(ROWS)) if row["score_time"] == "1" and row["sec_per_it"]][:2]
    rows, output = tmp_path / "rows.csv", tmp_path / "cal.json"
    write_table(rows, [{**row, "gpu": gpu} for row, gpu in zip(given, ("A100-SXM4-80GB", "H200"), strict=True)])
    several = run("calibrate", str(rows), "-o", str(output))
    assert "A100-SXM4-80GB, H200-SXM-141GB" in several.stderr
    assert (several.exit_code, output.exists()) == (2, False)


@pytest.mark.slow
def test_an_impossible_fit_is_refused(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.csv", tmp_path / "cal.json"
    given = table(Path(ROWS))[::4]
    fast = [{**row, "sec_per_it": row["sec_per_it"] and str(float(row["sec_per_it"]) / 2.5)} for row in given]
    write_table(rows, fast)
    result = run("calibrate", str(rows), "--site", "jean-zay-a100-2022", "-o", str(output))
    assert re.search(r"gemm_efficiency is [12][\d.]*", result.stderr)
    assert (result.exit_code, output.exists()) == (2, False)


def test_the_shipped_calibration_is_not_taken_for_another_program() -> None:
    output = run("configs/bloom-176b.yaml", "--top", "1").output
    assert "unfused attention" in output
    assert f"±{100 * UNCALIBRATED_BAND:.0f}%" not in output
    document = json.loads(run("configs/bloom-176b-2022.yaml", "--json").stdout)
    assert document["calibration"]["site"] == "jean-zay-a100-2022"
    assert (document["calibration"]["differences"], document["calibration"]["assumed"]) == ([], [])


def test_what_a_site_does_not_say_is_said_in_every_report(tmp_path: Path, root: Path) -> None:
    site = tmp_path / "new.yaml"
    text = (root / "slurm/sites/jean-zay-a100-2022.yaml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("calibration", "network_gb_per_s"))]
    site.write_text("\n".join(kept))
    here, said = ("--set", f"slurm.site={site}"), ": network_gb_per_s 200"
    page = tmp_path / "page.html"
    assert said in run("configs/bloom-176b-2022.yaml", "--top", "1", *here, "--html", str(page)).output
    assert said in page.read_text()
    assert said in run("check", "configs/bloom-176b-2022.yaml", *here).output
    document = json.loads(run("configs/bloom-176b-2022.yaml", *here, "--json").stdout)
    assert document["calibration"]["assumed"] == ["network_gb_per_s"]


def test_an_unknown_gpu_is_not_priced_and_can_be_submitted_to(tmp_path: Path, root: Path) -> None:
    site = tmp_path / "new.yaml"
    text = (root / "slurm/sites/jean-zay-a100-2022.yaml").read_text().replace("A100-SXM4-80GB\n", "Z9000\n")
    site.write_text("\n".join(line for line in text.splitlines() if not line.startswith("calibration")))
    here = ("--set", f"slurm.site={site}")
    for command in (("search",), ("check",)):
        refused = run(*command, "configs/bloom-176b-2022.yaml", *here)
        assert refused.exit_code != 0
        assert has_parts(refused.output, "Z9000", "gpu.hbm_tb_per_s", "gpu.nvlink_gb_per_s")
    submitted = CliRunner().invoke(bsl, ["submit", "configs/bloom-176b-2022.yaml", "--dry-run", *here])
    assert submitted.exit_code == 0, submitted.output
    assert has_parts(submitted.stderr, "Z9000", "gpu.hbm_tb_per_s")


def test_check(tmp_path: Path) -> None:
    result = run("check", "configs/bloom-176b-2022.yaml", "--starts", "2022-03-11")
    assert result.exit_code == 0
    assert "TB a day" in result.output
    result = run("check", "configs/bloom-176b-2022.yaml", "--set", "model.declared_parameters=104B", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["findings"][0]
    assert (found["rule"], found["severity"], found["key"]) == ("declared size", "error", "model.declared_parameters")
    result = run("check", "configs/bloom-176b-2022.yaml", "--set", "training.global_batch_size=2047")
    assert result.exit_code == 1


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run("configs/bloom-176b-2022.yaml", "--html", str(page)).exit_code == 0
    read = Page(page.read_text())
    assert not read.links and not read.texts("script")
    assert len(read.texts("svg")) >= 5 and len(read.texts("title")) > 60
    for text in (
        "Time against memory",
        "step of tp=4,pp=12,dp=8",
        "… 112 more micro batches",
        "Stages of tp=4,pp=12,dp=8",
        "Ramp-up",
        "192 fill the pipeline",
        f"bsl {__version__}, 20",
        "Refused",
    ):
        assert text in page.read_text()


def test_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    method = "parallelism.partition_method=type:transformer|<b>"
    run("configs/bloom-176b-2022.yaml", "--set", method, "--html", str(page))
    assert "<b>" not in page.read_text()


@pytest.mark.slow
def test_planning_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; sys.argv = ['bsl', 'plan', 'configs/bloom-176b-2022.yaml', '--json']\n"
        "from bigsci_launch.cli.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'numpy', 'deepspeed') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().endswith("[]")


def test_submit_refuses_on_errors_of_check_unless_forced() -> None:
    wrong = ["submit", "configs/bloom-176b-2022.yaml", "--dry-run", "--set", "model.declared_parameters=104B"]
    result = CliRunner().invoke(bsl, wrong)
    assert result.exit_code == 2
    assert "error: --set: model.declared_parameters: 104B is declared" in result.stderr
    assert "--force" in result.stderr
    assert not result.stdout
    forced = CliRunner().invoke(bsl, [*wrong, "--force"])
    assert forced.exit_code == 0
    assert "forced despite error: model.declared_parameters" in forced.stderr
    assert forced.stdout.startswith("#!/bin/bash")


def test_submit_shows_the_warnings_of_check() -> None:
    result = CliRunner().invoke(bsl, ["submit", "configs/bloom-176b-2022.yaml", "--dry-run"])
    assert result.exit_code == 0
    assert "TB a day" in result.stderr
    assert "warning" not in CliRunner().invoke(bsl, ["submit", "configs/demo.yaml", "--dry-run"]).stderr


def test_a_domain_of_many_nodes_is_priced_as_one_fabric(tmp_path: Path) -> None:
    site = tmp_path / "rack.yaml"
    text = "description: a rack\nscheduler: slurm\nranks_per_node: 4\nnetwork_gb_per_s: 50\ngpu: {name: GB200}\n"
    seconds = []
    for domain in (1, 18):
        site.write_text(f"{text}nvlink_domain_nodes: {domain}\n")
        sizes = ["slurm.nodes=96", f"slurm.site={site}", "slurm.partition=null", "slurm.qos=null"]
        options = [word for size in sizes for word in ("--set", size)]
        document = json.loads(run("configs/bloom-176b-2022.yaml", *options, "--json").stdout)
        seconds.append(document["configured"]["seconds_per_step"])
    assert seconds[1] < 0.95 * seconds[0]


def test_a_gpu_without_fp8_is_said() -> None:
    said = "(gpu.fp8_tflops): "
    assert said in run("configs/bloom-176b-2022.yaml", "--set", "training.precision=fp8", "--top", "1").output
    assert said not in run("configs/bloom-176b-2022.yaml", "--top", "1").output


def test_a_mixture_of_experts_says_what_a_token_meets() -> None:
    experts = "model.experts={count: 8, per_token: 2, ffn_hidden_size: 14336}"
    output = run("configs/bloom-176b-2022.yaml", "--set", experts, "--top", "1").output
    assert "; each token meets " in " ".join(output.split())
    assert "; each token meets " not in " ".join(run("configs/bloom-176b-2022.yaml", "--top", "1").output.split())
