"""The dashboard on a real Prometheus: each of its queries finds what a real run wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.export.dashboard import dashboard_text
from bigsci_launch.runs.layout import RunDir, read_json
from tests.support.ports import find_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(1800)]
PATIENCE_S = 900.0
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "sequence_length": 32, "vocab_size": 512}
SCRAPES = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
scrape_configs:
  - job_name: bsl
    authorization: {credentials_file: %s}
    static_configs: [{targets: ['127.0.0.1:%d']}]
"""


class Prometheus:
    """A Prometheus of this machine, by its API."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, find_port()
        self.began = time.time()

    def argv(self, program: str) -> list[str]:
        own = [f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data"]
        return [program, *own, f"--web.listen-address=127.0.0.1:{self.port}"]

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}") as answer:
            return json.load(answer)["data"]

    def ever(self, query: str) -> list[Any]:
        """Return what a query finds at any second since the start, as a panel of Grafana asks."""
        times = {"start": f"{self.began}", "end": f"{time.time()}", "step": "1s"}
        return list(self.get("query_range", query=query, **times)["result"])

    def now(self, query: str) -> list[Any]:
        try:
            return list(self.get("query", query=query)["result"])
        except OSError:
            return []


@contextmanager
def started(argv: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=120)


def bsl(folder: Path, *words: str) -> None:
    argv = [sys.executable, "-m", "bigsci_launch", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def run_file(folder: Path, port: int, **more: object) -> None:
    """Write a run that knows its peak, and does not end by itself."""
    config = {
        "run": {"name": "seen"},
        "slurm": {"site": "local"},
        "parallelism": {"data_parallel_size": 2},
        "model": MODEL,
        "training": {"steps": 100000, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32"},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"prefix": "corpus/own"},
        "checkpoint": {"save_interval": 50},
        "monitor": {"watch": "observe", "peak_tflops_per_rank": 0.1, "metrics": {"port": port}},
        **more,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen two attempts of a run, and a rank of the first one that stood still."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    folder = tmp_path_factory.mktemp("dashboard")
    found, port, run = Prometheus(folder), find_port(), RunDir(folder / "runs" / "seen")
    run_file(folder, port)
    (folder / "prometheus.yml").write_text(SCRAPES % (run.metrics_token, port))
    source = str(Path(json.__file__).parent)
    bsl(folder, "data", "prepare", source, "--glob", "*.py", "--vocab-size", "512", "--output", "corpus/own")
    own = [sys.executable, "-m", "bigsci_launch"]
    with ExitStack() as ended:
        ended.callback(bsl, folder, "cancel", "seen")
        bsl(folder, "submit", "run.yaml", "--local", "--detach")
        ended.enter_context(started(found.argv(program), folder, "prometheus"))
        ended.enter_context(started([*own, "watch", "seen"], folder, "watch"))
        with started([*own, "metrics", "seen", "--follow"], folder, "metrics"):
            until(lambda: found.now("bsl_step > 3 and bsl_hang == 0"), folder)
            with stopped(run):
                until(lambda: found.ever("bsl_findings"), folder)
            bsl(folder, "cancel", "seen")
        run_file(folder, port, survive={"standby": False})
        bsl(folder, "submit", "run.yaml", "--local", "--detach")
        with started([*own, "metrics", "seen", "--follow"], folder, "metrics-2"):
            until(lambda: found.now("bsl_attempts == 2") and found.ever("bsl_generation"), folder)
        yield found


@contextmanager
def stopped(run: RunDir) -> Iterator[None]:
    """Have rank 1 stand still."""
    attempt = run.latest_attempt()
    assert attempt is not None
    pid = int(read_json(attempt.pid_file(1))["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(look: Callable[[], object], folder: Path) -> None:
    logs = sorted(folder.glob("*.log"))
    wait_until(look, PATIENCE_S, evidence=lambda: [(each.name, each.read_text()[-800:]) for each in logs])


def queries() -> list[str]:
    dashboard = json.loads(dashboard_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*found, *(each["expr"] for each in dashboard["annotations"]["list"])]


@pytest.mark.parametrize("query", queries())
def test_a_query_of_the_dashboard_returns_data(prometheus: Prometheus, query: str) -> None:
    assert prometheus.ever(query.replace("$run", "seen")), query
    assert not prometheus.ever(query.replace("$run", "other")), query


def test_the_choice_of_runs_has_the_run(prometheus: Prometheus) -> None:
    assert prometheus.get("label/run/values", **{"match[]": "bsl_run_about"}) == ["seen"]
