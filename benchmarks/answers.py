"""Writes every answer that `bsl` gives from files to one text each, to compare two revisions with `diff -r`.

    python benchmarks/answers.py FOLDER [--runs RUNS]

It covers the verdict on every recording as text, JSON and page; plans, checks and calibrations; the dry run of every
run file; and, with --runs, comparison, audit and seam of the runs that `bsl demo --folder` left. Commands run in this
process, from the root of the checkout, so that the paths in the answers are the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from click.testing import CliRunner

from bigsci_launch.cli.main import bsl

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "tests" / "unit" / "spy" / "recordings"
Call = tuple[str, list[str]]
# How long a command took, and where it ran.
VOLATILE = (
    (re.compile(r"\b\d+(\.\d+)? m?s\b|(?<=\"age_s\": )[\d.]+"), "T"),
    (re.compile(r"^calibrating: \d+/\d+\n", re.MULTILINE), ""),
    (re.compile(re.escape(sys.executable)), "PYTHON"),
    (re.compile(re.escape(str(ROOT))), "ROOT"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes every answer that bsl gives from files.")
    parser.add_argument("folder", type=Path, help="a new folder for the answers")
    parser.add_argument("--runs", type=Path, help="run directories that `bsl demo --folder` made")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    runs = options.runs.resolve() if options.runs else None
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        calls = [*spy_calls(Path(scratch)), *plan_calls(), *config_calls(), *(weights_calls(runs) if runs else ())]
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(answer, folder, Path(scratch)), calls, chunksize=8))
    print(f"{len(calls)} commands, {sum(1 for _ in folder.iterdir())} answers in {folder}")


def answer(folder: Path, scratch: Path, call: Call) -> None:
    """Run one command; write its exit code, its output, and the page or file that it wrote."""
    name, arguments = call
    product = scratch / f"{name}.product"
    result = CliRunner().invoke(bsl, [str(product) if word == "PRODUCT" else word for word in arguments])
    text = f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
    if product.exists():
        text += product.read_text()
    for pattern, replacement in ((re.compile(re.escape(str(scratch))), "SCRATCH"), *VOLATILE):
        text = pattern.sub(replacement, text)
    (folder / name).write_text(text)


def spy_calls(scratch: Path) -> Iterator[Call]:
    """Yield the calls for the verdict on every recording and every signature's recording, as bundles on disk."""
    for path in sorted(RECORDINGS.rglob("*.json")):
        recording = json.loads(path.read_text())
        if not recording.keys() & {"nodes", "node"}:
            continue  # stacks by themselves
        name = path.relative_to(RECORDINGS).as_posix().replace("/", "-").removesuffix(".json")
        yield from formats(f"spy-{name}", unpack(recording, scratch / name))
    for path in sorted((ROOT / "diagnostics" / "signatures").glob("*/recording")):
        yield from formats(f"signature-{path.parent.name}", path)


def unpack(recording: dict[str, object], folder: Path) -> Path:
    nodes = recording.get("nodes", [recording])
    assert isinstance(nodes, list)
    collection = recording.get("collection", {})
    assert isinstance(collection, dict)
    (folder / "nodes").mkdir(parents=True)
    (folder / "collection.json").write_text(json.dumps({"schema_version": 1, **collection}))
    for node in nodes:
        (folder / "nodes" / f"{node['node']}.json").write_text(json.dumps(node))
    return folder


def formats(name: str, bundle: Path) -> Iterator[Call]:
    yield f"{name}.txt", ["spy", "--bundle", str(bundle)]
    yield f"{name}.json", ["spy", "--bundle", str(bundle), "--json"]
    yield f"{name}.html", ["spy", "--bundle", str(bundle), "--html", "PRODUCT"]


def plan_calls() -> Iterator[Call]:
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config, name = str(path.relative_to(ROOT)), path.stem
        for command in ("search", "check"):
            yield f"plan-{command}-{name}.txt", ["plan", command, config]
            yield f"plan-{command}-{name}.json", ["plan", command, config, "--json"]
        yield f"plan-search-{name}.html", ["plan", "search", config, "--html", "PRODUCT"]
    bloom = "configs/bloom-176b.yaml"
    yield "plan-explain.txt", ["plan", "search", bloom, "--explain", "--rejected"]
    yield "plan-layers.txt", ["plan", "search", bloom, "--nodes", "46:48", "--free", "layers"]
    for path in sorted((ROOT / "benchmarks" / "rows").glob("*.csv")):
        rows, name = str(path.relative_to(ROOT)), path.stem
        calibration = "slurm/calibrations/jean-zay-a100.json"
        yield f"plan-predict-{name}.csv", ["plan", "predict", rows, "--calibration", calibration, "-o", "PRODUCT"]
        yield f"plan-calibrate-{name}.json", ["plan", "calibrate", rows, "--site", "jean-zay-a100", "-o", "PRODUCT"]


def config_calls() -> Iterator[Call]:
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config, name = str(path.relative_to(ROOT)), path.stem
        yield f"config-show-{name}.txt", ["config", "show", config]
        yield f"config-check-{name}.json", ["config", "check", config, "--json"]
        yield f"submit-{name}.txt", ["submit", config, "--dry-run"]
        yield f"submit-{name}.json", ["submit", config, "--dry-run", "--json"]
    bad = ["--set", "parallelism.data_parallel_size=7", "--set", "model.num_layers=x"]
    yield "config-check-bad.txt", ["config", "check", "configs/demo.yaml", *bad]
    yield "config-sites.txt", ["config", "sites"]
    yield "config-schema.json", ["config", "schema"]
    yield "hang-lab.txt", ["hang-lab", "list"]
    yield "hang-lab.json", ["hang-lab", "list", "--json"]


def weights_calls(runs: Path) -> Iterator[Call]:
    a, b = (str(runs / "runs" / name) for name in ("undisturbed", "stopped"))
    first, last = (str(path) for path in (sorted(Path(a).glob("checkpoints/*step*")) * 2)[:2])
    for name, words in {
        "equal": [a, b],
        "steps": [first, last],
        "audit": ["--audit", a],
        "tolerance": [first, last, "--tolerance", "0.1"],
    }.items():
        yield f"weights-{name}.txt", ["diff-weights", *words]
        yield f"weights-{name}.json", ["diff-weights", *words, "--json"]
    logs = [str(Path(run) / "attempts" / "0001" / "job.out") for run in (a, b)]
    yield "weights-seam.txt", ["diff-weights", "--seam", *logs]
    yield "weights-seam.json", ["diff-weights", "--seam", *logs, "--json"]
    yield "weights-steps.html", ["diff-weights", first, last, "--html", "PRODUCT"]
    yield "checkpoint-list.json", ["checkpoint", "list", a, "--json"]
    yield "checkpoint-verify.json", ["checkpoint", "verify", a, "--json"]
    yield "status.json", ["status", a, "--json"]


if __name__ == "__main__":
    main()
