"""Metrics: both parsers read them, what is not known has none, and the dashboard asks only for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from bigsci_launch.errors import BslError
from bigsci_launch.export.companion import file_of
from bigsci_launch.export.dashboard import dashboard_text
from bigsci_launch.export.facts import read_facts, seconds_by_phase
from bigsci_launch.export.openmetrics import metrics_of, openmetrics_text
from bigsci_launch.export.port import MetricsPort, make_token
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.heartbeat import Health
from tests.support.generation_records import GenerationRecords

from .conftest import FINDING, TOPOLOGY, watch

Samples = dict[str, list[tuple[dict[str, str], float]]]


def text_of(run: RunDir) -> str:
    return openmetrics_text(metrics_of(read_facts(run)))


def samples(text: str) -> Samples:
    """Return the samples by the name of their metric, as both parsers read them."""
    found: Samples = {}
    for family in openmetrics(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    other = {sample.name for family in prometheus(text) for sample in family.samples}
    assert other == set(found)
    return found


def test_what_the_records_hold_is_a_metric(run: RunDir) -> None:
    watch(run, Health.FINDING, FINDING)
    found = samples(text_of(run))
    assert found["bsl_step"] == [({"run": "three"}, 12)]
    assert found["bsl_tokens_per_second"][0][1] == 16 * 64 / 1.0
    assert found["bsl_mfu_ratio"][0][1] == 0.4
    assert found["bsl_restarts"][0][1] == 2
    assert {labels["phase"]: value for labels, value in found["bsl_phase_duration_seconds"]} == {"step": 1, "save": 0.5}
    assert found["bsl_findings"] == [({"run": "three", "kind": "slower"}, 1)]
    assert (found["bsl_straggler"][0][1], found["bsl_hang"][0][1]) == (1, 0)
    assert found["bsl_ranks"] == [({"run": "three", "phase": "save"}, 1)]


def test_what_is_not_known_is_absent_and_not_zero(run: RunDir) -> None:
    run.attempt("0003").event_file(1).unlink()
    unwatched = samples(text_of(run))
    names = "step loss mfu_ratio tokens_per_second hang straggler findings findings_open ranks generation"
    absent = {f"bsl_{name}" for name in [*names.split(), "phase_duration_seconds"]}
    assert not absent & set(unwatched)
    watch(run, Health.BLIND)
    assert not absent & set(samples(text_of(run))), "a watcher that cannot see knows of no hang"


def test_phases_count_between_the_steps_of_one_process() -> None:
    def at(mono: float, kind: str, **fields: str) -> dict[str, object]:
        return {"mono": mono, "kind": kind, **fields}

    first = [at(5, "start"), at(5, "heartbeat", phase="init"), at(95, "heartbeat", phase="step"), at(97, "step")]
    second = [at(98, "heartbeat", phase="rm -rf"), at(99, "heartbeat", phase="step"), at(101, "step")]
    assert seconds_by_phase(first) == {}
    assert seconds_by_phase([*first, *second]) == {"step": 3.0, "other": 1.0}
    assert seconds_by_phase([*first, *second[:2], at(1, "start"), at(2, "step")]) == {}


def test_the_dashboard_asks_for_metrics_and_labels_that_a_run_has(run: RunDir) -> None:
    watch(run, Health.FINDING, FINDING)
    GenerationRecords(run.attempt("0003"), 1.0).begins(TOPOLOGY, ["n0", "n1"])
    found = samples(text_of(run))
    dashboard = json.loads(dashboard_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["expr"] for each in dashboard["annotations"]["list"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    for query in queries:
        for name in re.findall(r"bsl_\w+", query):
            assert name in found, query
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            name = re.search(r"bsl_\w+", target["expr"])
            assert name is not None
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= set(found[name[0]][0][0]), target


def test_promtool_takes_them(run: RunDir) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text_of(run), text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def port(run: RunDir) -> Iterator[tuple[int, str]]:
    token = make_token(run)
    served = MetricsPort(0, token, lambda: text_of(run))
    yield served.port, token
    served.close()


def ask(port: int, token: str | None, path: str = "/metrics") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_only_who_has_the_token_reads_them(run: RunDir, port: tuple[int, str]) -> None:
    number, token = port
    assert run.metrics_token.stat().st_mode & 0o777 == 0o600
    assert make_token(run) == token
    assert [ask(number, each)[0] for each in (None, "", "wrong", f"{token}x")] == [401] * 4
    code, text = ask(number, token)
    assert code == 200 and samples(text)["bsl_step"]
    assert ask(number, token, "/")[0] == 404


def test_a_port_that_is_taken_is_one_clear_error(port: tuple[int, str]) -> None:
    with pytest.raises(BslError) as error:
        MetricsPort(port[0], "t", str)
    assert str(port[0]) in error.value.message and error.value.hint


def test_a_folder_gets_a_file_for_each_run(run: RunDir) -> None:
    assert file_of(Path("/x"), run) == Path("/x/bsl-three.prom")
    assert file_of(Path("/x/y.prom"), run) == Path("/x/y.prom")
