"""Rules about `monitor.metrics`: node_exporter reads no other names, and a URL is no place for a password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bigsci_launch.config.finding import Finding
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.site import Site

KEY = "monitor.metrics"
FILE, OTLP = f"{KEY}.file", f"{KEY}.otlp"
OF_FOLDERS = ("", ".d")
"""What the name of a folder for node_exporter may end in."""
PATH = "/v1/metrics"


def check_metrics(config: RunConfig, _site: Site) -> Iterator[Finding]:
    """Metrics have a place to go, and each place can work."""
    metrics = config.monitor.metrics
    if metrics is None:
        return
    if metrics.file is None and metrics.port is None and metrics.otlp is None:
        yield Finding("metrics", "error", (KEY,), "has no place to go: set file, port or otlp")
    if metrics.file is not None:
        yield from _check_file(metrics.file)
    if metrics.otlp is not None:
        yield from _check_endpoint(metrics.otlp)


def _check_file(name: str) -> Iterator[Finding]:
    path = Path(name)
    if not path.is_absolute():
        text = f"{name!r} is relative, but a process in another folder writes it: write an absolute path"
        yield Finding("metrics", "error", (FILE,), text)
    elif path.suffix not in (".prom", *OF_FOLDERS):
        text = f"{name} is taken as a folder: a file must end in .prom, since node_exporter reads no other"
        yield Finding("metrics", "warning", (FILE,), text)


def _check_endpoint(url: str) -> Iterator[Finding]:
    """Check a URL. It is not quoted: it may hold a password."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        text = f"must be a URL that begins with https:// or http://, such as http://collector:4318{PATH}"
        yield Finding("metrics", "error", (OTLP,), text)
    elif "@" in parts.netloc:
        text = (
            "must hold no user and password: put a header with a key into OTEL_EXPORTER_OTLP_HEADERS of the environment"
        )
        yield Finding("metrics", "error", (OTLP,), text)
    elif parts.path in ("", "/"):
        text = f"is only the address of a receiver: most take metrics at {PATH}"
        yield Finding("metrics", "warning", (OTLP,), text)
    elif parts.port == 4317:
        text = "port 4317 is usually that of OTLP over gRPC; metrics are sent over HTTP, usually to 4318"
        yield Finding("metrics", "warning", (OTLP,), text)
