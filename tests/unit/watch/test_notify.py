"""Messages reach people by real programs and a real HTTP server, once; what fails says why, without an address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.errors import ConfigError
from bigsci_launch.launch.provenance import collect_provenance
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.ledger import Act, RunFinding, record_act
from bigsci_launch.runs.watching.outbox import KEPT_S, MOST_TRIES, Notice, Pending, Try, read_pending, undelivered
from bigsci_launch.watch.notify.deliver import DIED_S, deliver, send_now, tell
from bigsci_launch.watch.notify.message import notice_of_finding, subject, text
from bigsci_launch.watch.notify.of_run import deliver_waiting
from bigsci_launch.watch.notify.ways import CommandWay, NotificationFailed, WebhookWay, post, run_command
from bigsci_launch.watch.watched import WatchedRun
from tests.support.texts import has_parts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SECRET = "/services/T0SECRET/B0SECRET"
NOTICE = Notice(
    key="finding hang 1",
    what="hang",
    sentence="rank 3 hangs in an all-reduce",
    run="/runs/bloom",
    who="agent",
    time=time.time(),
    attempt="0002",
    step=1234,
    details=("usual is 105 s",),
    next="bsl status bloom",
    bundle="/runs/bloom/spy/1",
)


@dataclass
class Hook:
    """A server that answers each POST with the next of `answers`, and the last of them from then on."""

    url: str
    answers: list[Callable[[BaseHTTPRequestHandler], None]]
    posted: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def answer(code: int, said: str = "", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(said.encode())))
        handler.end_headers()
        handler.wfile.write(said.encode())

    return send


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            found.posted.append(json.loads(self.rfile.read(length)))
            found.paths.append(self.path)
            (found.answers.pop(0) if len(found.answers) > 1 else found.answers[0])(self)

        def do_GET(self) -> None:
            answer(200, "ok")(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Hook(f"http://127.0.0.1:{server.server_address[1]}{SECRET}", [answer(200, "ok")])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """`make_run("command=[...]", ...)`: a run whose newest attempt has these keys of `monitor.notify`."""
    monkeypatch.setenv("BSL_RUNS", str(tmp_path))

    def make(*keys: str) -> RunDir:
        run = RunDir(tmp_path / "bloom")
        write_json(run.record, {"name": "bloom"})
        loaded = load_run(ROOT / "configs" / "demo.yaml", [f"monitor.notify.{key}" for key in keys])
        run.attempt("0001").make()
        run.attempt("0001").config.write_text(dump_resolved(loaded.config))
        return run

    return make


def shell(script: str) -> str:
    return f"command={json.dumps(['/bin/sh', '-c', script])}"


def age_claims(run: RunDir, seconds: float) -> None:
    for path in (run.watch / "claims").iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_program_gets_text_subject_and_document(make_run: Callable[..., RunDir], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = make_run(shell(f'{{ echo "Subject: $BSL_SUBJECT"; cat; printf "%s" "$BSL_MESSAGE"; }} > {out}'))
    [delivery] = tell(run, NOTICE)
    assert delivery.ok, delivery
    head, *lines, document = out.read_text().splitlines()
    assert head == f"Subject: {NOTICE.sentence} [bloom]" and lines[0] == f"bloom: {NOTICE.sentence}"
    assert has_parts("\n".join(lines), "/runs/bloom, attempt 0002, step 1234", "/runs/bloom/spy/1", "bsl status bloom")
    assert json.loads(document)["what"] == "hang"


def test_a_webhook_gets_text_and_fields_once(make_run: Callable[..., RunDir], hook: Hook) -> None:
    run = make_run(f"webhook={hook.url}")
    assert [each.ok for each in tell(run, NOTICE)] == [True]
    assert tell(run, NOTICE) == [] and deliver(run) == []
    [posted] = hook.posted
    assert posted["text"] == text(NOTICE) and (posted["step"], posted["attempt"]) == (1234, "0002")
    assert read_pending(run) == [] and "SECRET" not in run.outbox.read_text()


def test_what_a_watcher_has_done_is_told_once(make_run: Callable[..., RunDir], hook: Hook) -> None:
    run = make_run(f"webhook={hook.url}")
    begun = Act("end_ranks:0001:1", "end_ranks", "watcher agent", "rank 3 hangs", "begun")
    done = replace(begun, state="done", words="the ranks were ended")
    for act in (begun, replace(done, key="save:1", what="save"), done, replace(done, key="pin:1", time=1.0)):
        record_act(run, act)
        deliver_waiting(WatchedRun(run, run, None, None))
    [posted] = hook.posted
    assert (posted["what"], posted["who"], posted["details"]) == ("end_ranks", "watcher agent", ["why: rank 3 hangs"])


def test_watchers_at_the_same_time_send_one_message(make_run: Callable[..., RunDir], hook: Hook) -> None:
    run = make_run(f"webhook={hook.url}")
    together = threading.Barrier(6)

    def watch() -> None:
        together.wait()
        tell(run, NOTICE)

    watchers = [threading.Thread(target=watch) for _ in range(6)]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    assert len(hook.posted) == 1


def test_what_fails_is_tried_again_after_a_pause_and_each_way_alone(
    make_run: Callable[..., RunDir], hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    run = make_run(shell(f"echo called >> {calls}"), f"webhook={hook.url}")
    hook.answers = [answer(500, "try later"), answer(200)]
    assert [(each.way, each.ok) for each in tell(run, NOTICE)] == [("command", True), ("webhook", False)]
    (waiting,) = undelivered(run, time.time())
    assert has_parts(waiting, "1 message ", "webhook, ", "1 try, ", os.uname().nodename, "500: try later")
    assert deliver(run) == []  # too soon
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert [(each.way, each.ok) for each in deliver(run)] == [("webhook", True)]
    assert calls.read_text() == "called\n" and len(hook.posted) == 2 and undelivered(run, now) == []


def test_another_machine_need_not_wait_and_tries_end() -> None:
    now = NOTICE.time

    def failed(count: int, host: str, ago: float) -> Pending:
        tries = [Try(NOTICE.key, "webhook", at + 1, host, now - ago, False, "no way out") for at in range(count)]
        return Pending(NOTICE, "webhook", tuple(tries))

    assert not failed(3, "n1", 60).is_due("n1", now) and failed(3, "n1", 130).is_due("n1", now)
    assert failed(MOST_TRIES, "n1", 0).is_due("login", now)
    assert not failed(MOST_TRIES, "n1", 10**6).is_due("n1", now)
    assert not failed(0, "", 0).is_due("n1", now + KEPT_S + 1)


def test_a_watcher_that_died_while_sending_loses_no_message(make_run: Callable[..., RunDir], hook: Hook) -> None:
    run = make_run(f"webhook={hook.url}")
    hook.answers = [lambda handler: time.sleep(60)]
    program = f"""
from pathlib import Path
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.runs.watching.outbox import Notice
from bigsci_launch.watch.notify.deliver import tell
print(tell(RunDir(Path({str(run.path)!r})), {NOTICE!r}, wait_s=0.3)[0].ok)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout == "None\n" and len(hook.posted) == 1
    hook.answers = [answer(200)]
    assert deliver(run) == [] and len(hook.posted) == 1  # it may still be sending
    age_claims(run, DIED_S + 1)
    assert deliver(run) == [] and "died while sending" in undelivered(run, time.time())[0]
    [pending] = read_pending(run)
    write_try_long_ago(run, pending)
    assert [each.ok for each in deliver(run)] == [True] and len(hook.posted) == 2


def write_try_long_ago(run: RunDir, pending: Pending) -> None:
    tried = replace(pending.tries[-1], time=time.time() - 60)
    lines = [line for line in run.outbox.read_text().splitlines() if '"tried"' not in line]
    lines.append(json.dumps({"event": "tried", **asdict(tried)}))
    run.outbox.write_text("\n".join(lines) + "\n")


def test_a_watcher_waits_only_a_moment_for_a_slow_program(make_run: Callable[..., RunDir], tmp_path: Path) -> None:
    run = make_run(shell(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; touch {tmp_path}/done"))
    [delivery] = tell(run, NOTICE, wait_s=0.2)
    assert delivery.ok is None
    (tmp_path / "go").touch()
    wait_until(lambda: not read_pending(run))
    assert (tmp_path / "done").exists()


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(NotificationFailed, match=r"/bin/sh was killed after 0\.5 s: waiting"):
        run_command(["/bin/sh", "-c", f"echo waiting; sleep 300 & echo $! > {pid}; wait"], NOTICE, 0.5)
    wait_until(lambda: not is_running(int(pid.read_text())))


def is_running(pid: int) -> bool:
    """Whether a process exists that has not ended; nobody may be there to collect an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["/no/such/program"], "/no/such/program: No such file or directory"),
        (["/bin/sh", "-c", "echo no relay at https://x/T0SECRET >&2; exit 75"], "exit code 75: no relay at <address>"),
        (["/bin/sh", "-c", "kill -9 $$"], "SIGKILL"),
    ],
)
def test_a_program_that_fails_says_why(words: list[str], why: str) -> None:
    with pytest.raises(NotificationFailed) as error:
        run_command(words, NOTICE)
    assert why in str(error.value) and "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (answer(404, "no_service"), "127.0.0.1 answered 404: no_service"),
        (answer(404, f"Cannot POST {SECRET}"), "127.0.0.1 answered 404: Not Found"),
        (answer(302, Location="/elsewhere/T0SECRET"), "127.0.0.1 answered 302: redirects"),
        (answer(307, Location="/elsewhere/T0SECRET"), "127.0.0.1 answered 307: redirects"),
        (garbage, "127.0.0.1: the answer is not HTTP"),
        (lambda handler: None, "127.0.0.1: the connection was closed"),
        (lambda handler: time.sleep(2), "127.0.0.1: no answer within 0.4 s"),
    ],
)
def test_a_webhook_that_fails_says_why(
    hook: Hook, behaviour: Callable[[BaseHTTPRequestHandler], None], why: str
) -> None:
    hook.answers = [behaviour]
    with pytest.raises(NotificationFailed) as error:
        post(hook.url, {"text": "x"}, 0.4)
    assert why in str(error.value) and "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        f"http://no-such-host.invalid{SECRET}",
        f"http://127.0.0.1:1{SECRET}",
        f"nothing:{SECRET}",
        f"http://[::1{SECRET}",
        f"http://127.0.0.1:1{SECRET} T0SECRET",
    ],
)
def test_an_address_that_leads_nowhere_is_not_quoted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(NotificationFailed) as error:
        post(url, {"text": "x"}, 5)
    assert "SECRET" not in str(error.value) and "SECRET" not in repr(WebhookWay(url))


def test_a_proxy_of_the_environment_is_used(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hook.url.removesuffix(SECRET))
    assert post("http://outside.invalid/hook", {"text": "x"}) == "outside.invalid answered 200"
    assert hook.paths == ["http://outside.invalid/hook"]


def test_a_full_disk_stops_no_message(make_run: Callable[..., RunDir], hook: Hook) -> None:
    run = make_run(f"webhook={hook.url}")
    run.watch.write_text("no folder can be made here")
    hook.answers = [answer(500), answer(200)]
    assert [each.ok for each in tell(run, NOTICE)] == [False]
    assert [each.ok for each in tell(run, NOTICE)] == [True]
    assert tell(run, NOTICE) == [] and len(hook.posted) == 2


def test_a_run_that_names_nobody_tells_nobody(make_run: Callable[..., RunDir]) -> None:
    run = make_run()
    assert tell(run, NOTICE) == [] and not run.outbox.exists()


def test_the_subject_is_one_line_that_a_mail_program_can_trust() -> None:
    notice = replace(NOTICE, sentence=f"loss\nBcc: all@example.org\x1b[2J {'x' * 500}")
    assert "\n" not in subject(notice) and "\x1b" not in subject(notice) and len(subject(notice)) <= 160


def test_a_finding_raised_again_is_another_message() -> None:
    run, finding = RunDir(Path("/runs/bloom")), RunFinding("hang", "hang 12", "hangs", 100.0)
    keys = {notice_of_finding(run, each, "agent", "bsl status bloom").key for each in (finding, replace(finding))}
    again = notice_of_finding(run, replace(finding, noticed=200.0), "agent", "bsl status bloom")
    assert len(keys) == 1 and again.key not in keys


def test_notify_says_what_came_of_each_way(
    make_run: Callable[..., RunDir], hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_HOOK", hook.url)
    make_run(shell("cat > /dev/null"), "webhook_variable=TEAM_HOOK")
    done = CliRunner().invoke(bsl, ["notify", "bloom", "--why", "hello"])
    command, webhook = done.output.splitlines()
    assert done.exit_code == 0 and command.startswith("command  delivered, after ")
    assert webhook.startswith("webhook  delivered, after ") and webhook.endswith(": 127.0.0.1 answered 200")
    assert hook.posted[0]["text"].startswith("bloom: hello\n")
    monkeypatch.delenv("TEAM_HOOK")
    done = CliRunner().invoke(bsl, ["notify", "bloom", "--json"])
    deliveries = json.loads(done.output)["deliveries"]
    assert done.exit_code == 1 and [each["ok"] for each in deliveries] == [True, False]
    assert "TEAM_HOOK" in deliveries[1]["words"]


def test_notify_without_a_way_says_what_to_set(make_run: Callable[..., RunDir]) -> None:
    make_run()
    done = CliRunner().invoke(bsl, ["notify", "bloom"])
    assert done.exit_code == 2 and "set monitor.notify" in done.output


@pytest.mark.parametrize(
    "keys",
    [
        ["command=[]"],
        ["command=[./tell.sh]"],
        ["webhook=hooks.slack.com/T0SECRET"],
        ["webhook_variable=https://hooks.slack.com/T0SECRET"],
        ["webhook=https://x/T0SECRET", "webhook_variable=HOOK"],
        ["command=null"],
    ],
    ids=["no program", "relative program", "no URL", "no variable", "two hooks", "no way"],
)
def test_nonsense_is_refused_and_not_quoted(
    make_run: Callable[..., RunDir], keys: list[str], check_text: Callable[..., None]
) -> None:
    with pytest.raises(ConfigError) as error:
        make_run(*keys)
    said = [str(problem).replace(f"{ROOT}/", "") for problem in error.value.problems]
    assert "SECRET" not in " ".join(said)
    check_text(*said)


def test_a_url_in_the_file_warns_and_is_not_shown() -> None:
    file = str(ROOT / "configs" / "demo.yaml")
    done = CliRunner().invoke(bsl, ["config", "show", file, "--set", "monitor.notify.webhook=https://x/T0SECRET"])
    assert "webhook: <secret>" in done.output.replace('"', "") and "your group" in done.output
    assert done.exit_code == 0 and "SECRET" not in done.output


def test_provenance_stores_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_ROOM", "https://x/T0SECRET")
    words = ["bsl", "submit", "--set", "monitor.notify.webhook=https://x/T0SECRET"]
    document = collect_provenance(words, tmp_path, {"TEAM_ROOM"}).document
    assert "TEAM_ROOM" in document["other_variables"] and "SECRET" not in json.dumps(document)


def test_waiting_for_all_ways_is_waiting_at_once(tmp_path: Path) -> None:
    """Each program ends when all have begun."""
    meet = f"mktemp -p {tmp_path}; until [ $(ls {tmp_path} | wc -l) = 6 ]; do sleep 0.05; done"
    assert all(each.ok for each in send_now(NOTICE, [CommandWay(("/bin/sh", "-c", meet))] * 6))
