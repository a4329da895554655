"""Sends the metrics of a run as OTLP over HTTP: the names, labels and values of OpenMetrics. It alone imports
OpenTelemetry."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from bigsci_launch import __version__
from bigsci_launch.errors import BslError
from bigsci_launch.export.openmetrics import Metric

UNITS = {"seconds": "s", "": ""}
"""Units of OpenMetrics in OTLP's words. Prometheus adds no suffix for one that the name already has."""


class OtlpPush:
    """Sends metrics of a run to one receiver. It is for the only one of its process: it takes the library's log."""

    def __init__(self, endpoint: str, run: str) -> None:
        self._endpoint = endpoint
        self._resource = Resource.create({"service.name": "bsl", "service.instance.id": run})
        self._log = _Messages()
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._log], False
        self._exporter = OTLPMetricExporter(endpoint)

    def send(self, metrics: Iterable[Metric]) -> None:
        """Send the values of now; it may take some seconds, in which the library tries again.

        Raises:
            BslError: the receiver did not take them.
        """
        self._log.messages.clear()
        done = self._exporter.export(metrics_data(metrics, time.time_ns(), self._resource))
        if done is not otel.MetricExportResult.SUCCESS:
            raise BslError(f"monitor.metrics.otlp: {self._endpoint}: {' '.join(self._log.messages)}")

    def close(self) -> None:
        self._exporter.shutdown()


class _Messages(logging.Handler):
    """Keeps what the library logs: the only place where it gives the reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def metrics_data(metrics: Iterable[Metric], now_ns: int, resource: Resource) -> otel.MetricsData:
    """Return the metrics as gauges of OTLP, all with the time `now_ns`, in ns since the epoch."""
    gauges = [
        otel.Metric(
            name=f"bsl_{metric.name}",
            description=metric.help,
            unit=UNITS[metric.unit],
            data=otel.Gauge([otel.NumberDataPoint(labels, 0, now_ns, value) for labels, value in metric.samples]),
        )
        for metric in metrics
    ]
    scope = otel.ScopeMetrics(InstrumentationScope("bsl", __version__), gauges, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])
