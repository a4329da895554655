"""The port at which metrics of a run are read: one text, for whoever has the token of the run."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.safe_files import make_folder, read_file, write_file

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PATH = "/metrics"
WAIT_S = 5.0
"""How long one caller may take to say what it wants, or to take the answer."""
MOST_CALLERS = 16
LONGEST_TOKEN = 1 << 10


def make_token(run: RunDir) -> str:
    """Return the token of the run's metrics; it is made if there is none. Only the run's owner can read it.

    Raises:
        OSError: it cannot be read or written.
    """
    try:
        return read_file(run.metrics_token, LONGEST_TOKEN).decode("ascii", "replace").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        make_folder(run.exports)
        write_file(run.metrics_token, f"{token}\n", 0o600)
        return token


class MetricsPort:
    """Serves what `text` returns, in threads of its own, until it is closed."""

    def __init__(self, port: int, token: str, text: Callable[[], str]) -> None:
        try:
            self._server = _MetricsServer(port, token, text)
        except OSError as error:
            raise BslError(
                f"monitor.metrics.port: cannot listen at {port}: {error.strerror or error}",
                hint="another run on this node may have it: choose another port",
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="bsl-metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, token: str, text: Callable[[], str]) -> None:
        self.authorization = f"Bearer {token}".encode()
        self.text = text
        self._free = threading.BoundedSemaphore(MOST_CALLERS)
        super().__init__(("", port), _MetricsRequest)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave it: a caller that goes away, or talks nonsense, is no concern of the run."""


class _MetricsRequest(BaseHTTPRequestHandler):
    timeout = WAIT_S
    server: _MetricsServer
    server_version, sys_version = "bsl", ""

    def do_GET(self) -> None:
        asked = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(asked, self.server.authorization):
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path != PATH:
            self.send_error(404)
        else:
            body = self.server.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a scrape every 15 seconds is no event."""
