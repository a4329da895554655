"""Rules about where metrics go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigsci_launch.config.check import CHECKS
from bigsci_launch.config.checks.exports import check_metrics
from bigsci_launch.config.load import load_run
from bigsci_launch.config.schema.monitor import MetricsSection
from tests.support.texts import has_parts

Find = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def findings(run_file: Path) -> Find:
    """`findings(file=...)` are severity, key and text of what is found about these keys of `monitor.metrics`."""
    loaded = load_run(run_file, [])

    def find(**keys: object) -> list[tuple[str, str, str]]:
        monitor = loaded.config.monitor.model_copy(update={"metrics": MetricsSection.model_validate(keys)})
        config = loaded.config.model_copy(update={"monitor": monitor})
        return [(each.severity, each.keys[0], each.text) for each in check_metrics(config, loaded.site)]

    return find


def test_it_is_one_of_the_checks() -> None:
    assert check_metrics in CHECKS


@pytest.mark.parametrize(
    "keys",
    [
        {"file": "/var/lib/node_exporter/textfile"},
        {"file": "/etc/textfile.d/"},
        {"file": "/x/bloom.prom"},
        {"port": 9464},
        {"otlp": "https://collector:4318/v1/metrics"},
        {"otlp": "http://[::1]:9090/api/v1/otlp/v1/metrics"},
    ],
)
def test_what_can_work_has_no_finding(findings: Find, keys: dict[str, object]) -> None:
    assert findings(**keys) == []


@pytest.mark.parametrize(
    ("keys", "severity", "parts"),
    [
        ({}, "error", ["no place"]),
        ({"file": "metrics.prom"}, "error", ["metrics.prom", "absolute"]),
        ({"file": "/x/bloom.txt"}, "warning", ["/x/bloom.txt", ".prom"]),
        ({"otlp": "collector:4318"}, "error", ["http://"]),
        ({"otlp": "grpc://collector:4317"}, "error", ["http://"]),
        ({"otlp": "http://collector:99999/v1/metrics"}, "error", ["http://"]),
        ({"otlp": "https://me:secret@collector/v1/metrics"}, "error", ["OTEL_EXPORTER_OTLP_HEADERS"]),
        ({"otlp": "http://collector:4318"}, "warning", ["/v1/metrics"]),
        ({"otlp": "http://collector:4317/v1/metrics"}, "warning", ["4317", "gRPC"]),
    ],
)
def test_what_cannot_work_is_one_finding(
    findings: Find, keys: dict[str, object], severity: str, parts: list[str]
) -> None:
    [(found, key, text)] = findings(**keys)
    assert found == severity and key.startswith("monitor.metrics")
    assert has_parts(text, *parts) and "secret" not in text
