"""The process next to a run that keeps its metrics and its trackers up to date. No rank waits for it.

Each tracker has a thread, and so has OTLP: one that waits for its server holds up neither the others nor the metrics.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bigsci_launch.config.load import load_resolved
from bigsci_launch.config.schema.monitor import MonitorSection
from bigsci_launch.errors import INSTALL_OTLP, BslError, RunDirError
from bigsci_launch.export.facts import ask_job, read_facts
from bigsci_launch.export.follow import TrackerFollower
from bigsci_launch.export.openmetrics import Metric, metrics_of, openmetrics_text
from bigsci_launch.export.port import MetricsPort, make_token
from bigsci_launch.progress import Report
from bigsci_launch.runs.find import find_attempt
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.places import is_owner
from bigsci_launch.safe_files import make_folder, open_lock, write_file
from bigsci_launch.scheduler.job import JobInfo
from bigsci_launch.scheduler.slurm import SLURM_EVERY_S
from bigsci_launch.watch.rounds.until_over import EndSignals

EVERY_S = 15.0
"""Seconds between two rounds: a usual interval of scrapes."""
AGAIN_S = 60.0
"""Seconds until a tracker that gave an error is tried again."""
LAST_S, ENDED_S = 600.0, 15.0
"""How long trackers may take for what is left when the run is over, and when this process was asked to end."""
OTHERS_WRITE = 0o022
"""Only the owner may write what packages of trackers leave in the run directory, whatever the umask."""


def keep_up_to_date(run: RunDir, signals: EndSignals, say: Report) -> None:
    """Keep what the newest attempt wants in `monitor` up to date until it is over, or until a signal comes.

    Raises:
        RunDirError: the run is another user's, or wants nothing. BslError: the port is taken.
    """
    if not is_owner(run):
        raise RunDirError(f"run {run.name} is another user's", hint="`bsl metrics` without --follow prints its metrics")
    attempt = find_attempt(run)
    wanted = load_resolved(attempt.config).monitor
    if wanted.metrics is None and not wanted.trackers:
        raise RunDirError(f"attempt {attempt.name} of run {run.name} has neither monitor.metrics nor monitor.trackers")
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)
    scrape, is_over = Scrape(run), threading.Event()
    threads = [_start(name, _follow, run, name, is_over, say) for name in wanted.trackers]
    if wanted.metrics is not None and wanted.metrics.otlp is not None:
        threads.append(_start("otlp", _push, wanted.metrics.otlp, run.name, scrape, is_over, say))
    port, writing = _open_port(run, wanted, scrape, say), Retried("the file of metrics", say)
    try:
        while True:
            with writing:
                _write_file(run, wanted, scrape)
            job = scrape.job
            if signals.have_come or (job is not None and (job.state.is_over or job.is_gone)):
                break
            if find_attempt(run) != attempt:
                break
            signals.wait(EVERY_S)
    finally:
        is_over.set()
        with writing:
            _write_file(run, wanted, scrape)
        deadline = time.monotonic() + (ENDED_S if signals.have_come else LAST_S)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if port is not None:
            port.close()


class Scrape:
    """The metrics of a run; Slurm is asked only so often. Any thread may call it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._asked = 0.0
        self.job: JobInfo | None = None

    def text(self) -> str:
        """Return the metrics now, as OpenMetrics.

        Raises:
            RunDirError, OSError: the run cannot be read.
        """
        return openmetrics_text(self.metrics())

    def metrics(self) -> list[Metric]:
        """Return the metrics now.

        Raises:
            RunDirError, OSError: the run cannot be read.
        """
        with self._lock:
            now = time.monotonic()
            if self.job is None or self.job.source == "launcher" or now - self._asked > SLURM_EVERY_S:
                self.job, self._asked = ask_job(self._run), now
            return metrics_of(read_facts(self._run, self.job))


class Retried:
    """What is tried again in the next round: its first error in a row is reported, and that it works again."""

    def __init__(self, what: str, say: Report) -> None:
        self._what, self._say = what, say
        self._fails = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and not isinstance(error, (BslError, OSError)):
            return False
        if self._fails == (error is None):
            self._say(f"{self._what}: {error or 'works again'}")
        self._fails = error is not None
        return True


def _write_file(run: RunDir, wanted: MonitorSection, scrape: Scrape) -> None:
    """Replace the file of metrics, whose folder is made if it is missing. Slurm is asked even if no file is wanted."""
    text = scrape.text()
    if wanted.metrics is not None and wanted.metrics.file is not None:
        path = file_of(Path(wanted.metrics.file), run)
        make_folder(path.parent)
        write_file(path, text)


def file_of(path: Path, run: RunDir) -> Path:
    """Return the file of a run's metrics: in a folder, each run has its own."""
    return path if path.suffix == ".prom" else path / f"bsl-{run.name}.prom"


def _open_port(run: RunDir, wanted: MonitorSection, scrape: Scrape, say: Report) -> MetricsPort | None:
    if wanted.metrics is None or wanted.metrics.port is None:
        return None
    port = MetricsPort(wanted.metrics.port, make_token(run), scrape.text)
    say(f"metrics at port {port.port}, for whoever has the token in {run.metrics_token}")
    return port


def _start(name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=f"bsl-{name}", daemon=True)
    thread.start()
    return thread


def _push(endpoint: str, run: str, scrape: Scrape, is_over: threading.Event, say: Report) -> None:
    """Send the metrics until the run is over, and then the last ones. A receiver that is away is reported once."""
    try:
        from bigsci_launch.export.otlp import OtlpPush
    except ImportError:
        say(
            f"monitor.metrics.otlp needs opentelemetry-exporter-otlp-proto-http, which is not installed: {INSTALL_OTLP}"
        )
        return
    push, sending = OtlpPush(endpoint, run), Retried("monitor.metrics.otlp", say)
    while True:
        is_last = is_over.is_set()
        with sending:
            push.send(scrape.metrics())
        if is_last:
            break
        is_over.wait(EVERY_S)
    push.close()


def _follow(run: RunDir, name: str, is_over: threading.Event, say: Report) -> None:
    """Keep one tracker up to date, and try again after an error, whatever a tracker's package may raise."""
    while True:
        try:
            with _only_one(run, name), contextlib.redirect_stdout(sys.stderr):
                _follow_until(run, name, is_over)
            return
        except Exception as error:
            say(f"tracker {name}: {' '.join(str(error).split()) or type(error).__name__}")
        if is_over.wait(AGAIN_S):
            return


def _follow_until(run: RunDir, name: str, is_over: threading.Event) -> None:
    follower = TrackerFollower(run, name)
    try:
        while True:
            is_last = is_over.is_set()
            follower.catch_up()
            if is_last:
                return
            is_over.wait(EVERY_S)
    finally:
        follower.close()


@contextlib.contextmanager
def _only_one(run: RunDir, name: str) -> Iterator[None]:
    """Hold the lock of a tracker of the run: two processes would give it each step twice."""
    make_folder(run.exports)
    handle = open_lock(run.tracker_cursor(name).with_suffix(".lock"))
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"another process keeps tracker {name} of run {run.name} up to date") from None
        yield
    finally:
        os.close(handle)
