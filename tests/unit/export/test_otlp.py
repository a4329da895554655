"""OTLP: a receiver decodes the names, labels and values of OpenMetrics, also after it was away for a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.errors import BslError
from bigsci_launch.export import companion
from bigsci_launch.export.facts import read_facts
from bigsci_launch.export.openmetrics import Metric, metrics_of, openmetrics_text
from bigsci_launch.export.otlp import OtlpPush
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health
from bigsci_launch.watch.rounds.until_over import EndSignals

from .conftest import FINDING, ROOT, watch

Sample = tuple[str, str, str, tuple[tuple[str, str], ...], float]


class Receiver(HTTPServer):
    """Takes OTLP over HTTP, or refuses it while `code` is not 200."""

    def __init__(self) -> None:
        self.code, self.refused = 200, 0
        self.taken: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), OtlpRequest)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/metrics"


class OtlpRequest(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.code == 200:
            self.server.taken.append(ExportMetricsServiceRequest.FromString(body))
            self.server.headers.append(dict(self.headers))
        else:
            self.server.refused += 1
        self.send_response(self.server.code if self.path == "/v1/metrics" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def decoded(request: ExportMetricsServiceRequest) -> set[Sample]:
    """Return what was received: names, help, units, labels and values."""
    [resource] = request.resource_metrics
    [scope] = resource.scope_metrics
    return {
        (metric.name, metric.description, metric.unit, labels_of(point.attributes), point.as_double or point.as_int)
        for metric in scope.metrics
        for point in metric.gauge.data_points
    }


def labels_of(attributes: object) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((each.key, each.value.string_value) for each in attributes))  # type: ignore[attr-defined]


def printed(text: str) -> set[Sample]:
    """Return the same of the text, as the parser of OpenMetrics reads it."""
    return {
        (family.name, family.documentation, {"seconds": "s"}.get(family.unit, family.unit),
         tuple(sorted(sample.labels.items())), sample.value)
        for family in openmetrics(text)
        for sample in family.samples
    }  # fmt: skip


def test_a_receiver_has_what_openmetrics_shows(
    run: RunDir, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    watch(run, Health.FINDING, FINDING)
    metrics = metrics_of(read_facts(run))
    push = OtlpPush(receiver.url, run.name)
    push.send(metrics)
    push.close()
    [request] = receiver.taken
    assert decoded(request) == printed(openmetrics_text(metrics))
    assert len(decoded(request)) > 20
    about = dict(labels_of(request.resource_metrics[0].resource.attributes))
    assert (about["service.name"], about["service.instance.id"]) == ("bsl", "three")
    assert receiver.headers[0]["authorization"] == "Bearer key"


def test_a_loss_that_is_no_number_arrives_as_it_is(receiver: Receiver) -> None:
    push = OtlpPush(receiver.url, "three")
    push.send([Metric("loss", "The loss.", (({"run": "three"}, math.nan),))])
    [point] = receiver.taken[0].resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points
    assert math.isnan(point.as_double) and point.time_unix_nano > 1e18


def test_a_refusal_names_the_receiver_and_its_answer(receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    receiver.code = 401
    with pytest.raises(BslError) as error:
        OtlpPush(receiver.url, "three").send([])
    assert receiver.url in error.value.message and "401" in error.value.message
    assert capfd.readouterr().err == "", "the library would fill metrics.log"


def test_a_receiver_that_was_away_gets_the_last_values(
    run: RunDir, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away, comes back, and the run ends: each is reported once, and the end arrives."""
    monkeypatch.setattr(companion, "EVERY_S", 0.05)
    monkeypatch.setattr(companion, "SLURM_EVERY_S", 0.0)
    overrides = [f"monitor.metrics.otlp={receiver.url}"]
    run.attempt("0003").config.write_text(dump_resolved(load_run(ROOT / "configs" / "demo.yaml", overrides).config))
    receiver.code = 400
    reported: list[str] = []

    def report(text: str) -> None:
        reported.append(text)
        if receiver.code != 200:
            threading.Timer(0.5, setattr, (receiver, "code", 200)).start()
        else:
            write_json(run.attempt("0003").exit, {"reason": "finished", "exit_code": 0})

    companion.keep_up_to_date(run, EndSignals(), report)
    assert receiver.refused > 1
    assert [("400" in text, text.endswith("again")) for text in reported] == [(True, False), (False, True)]
    states = [dict(labels)["state"] for name, _, _, labels, _ in decoded(receiver.taken[-1]) if name == "bsl_job_state"]
    assert states == ["COMPLETED"]
