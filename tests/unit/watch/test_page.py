"""The page of a run holds all attempts, findings and acts in one file; text of the job is never markup."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.runs.layout import RunDir, write_json
from bigsci_launch.runs.watching.heartbeat import Health, own_heartbeat, write_heartbeat
from bigsci_launch.runs.watching.ledger import Act, RunFinding, clear_finding, raise_finding, record_act
from bigsci_launch.runs.watching.outbox import Notice, Try, queue_notice, record_try
from bigsci_launch.status.read import read_status
from bigsci_launch.watch.show import history
from bigsci_launch.watch.show.curves import COLUMNS, Curve, draw
from bigsci_launch.watch.show.history import read_history
from bigsci_launch.watch.show.overview import points_of, read_overview
from bigsci_launch.watch.show.page import render_run_page
from tests.support.texts import has_parts

from .conftest import lose_a_node, write_steps

pytestmark = pytest.mark.slow

FINDING = RunFinding(
    "hang", "h", "rank 77 <script>left()</script>", 1.0, "0002", 90, 0.5, ("as on 04-30",), "/runs/bloom/spy/1"
)


ELSEWHERE = re.compile(r"(src|href)=|url\(|https?:")


def page_of(run: RunDir) -> str:
    return render_run_page(read_overview(read_status(run)))


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects texts and scripts."""

    VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts = 0
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def places_of(page: str, label: str) -> dict[str, list[tuple[int, float]]]:
    """Return the values of a chart by attempt, as its script reads them."""
    found = re.search(rf'aria-label="{label} by step" data-places="([^"]*)"', page)
    assert found
    return dict(json.loads(found[1].replace("&quot;", '"'))[1])


def test_the_page_shows_every_attempt_and_its_seam(bloom: RunDir) -> None:
    page = page_of(bloom)
    text = " ".join(Reader(page).texts)
    losses = places_of(page, "loss")
    assert [step for step, _ in losses["0001"]] == list(range(1, 51))  # the others were repeated
    assert [step for step, _ in losses["0002"]] == list(range(51, 101))
    assert page.count('<path class="old"') == 3 and "gradient norm" in page
    jumps = re.findall(r'<g class="jump"><title>([^<]*)<', page)
    assert jumps and all(has_parts(jump, "attempt 0002", "step 51", "0001: time_limit") for jump in jumps)
    assert has_parts(text, "restart spike: ", "step 51, ", "5.88")
    assert "time_limit" in text and "step 1 to 60" not in text and "1 to 60" in text and "51 to 100" in text


def test_open_findings_come_first_and_text_is_never_markup(bloom: RunDir) -> None:
    raise_finding(bloom, replace(FINDING, key="old", sentence="old spike"))
    clear_finding(bloom, "old", "back")
    raise_finding(bloom, FINDING)
    record_act(bloom, Act("k", "save", "alice", "<b>before</b> maintenance", "begun"))
    record_act(bloom, Act("k", "save", "alice", "<b>before</b> maintenance", "done", "384 ranks saved"))
    page = page_of(bloom)
    reader = Reader(page)
    text = " ".join(reader.texts).partition("Findings")[2]
    assert reader.scripts == 1 and "rank 77 <script>left()</script>" in text
    assert text.index("rank 77") < text.index("1 resolved") < text.index("old spike")
    assert "evidence:" in text and "/runs/bloom/spy/1" in text and text.count("384 ranks saved") == 1
    assert "<b>before</b> maintenance" in text and "done: 384 ranks saved" in text
    assert not ELSEWHERE.search(page)


def test_health_is_what_a_living_watcher_says(bloom: RunDir) -> None:
    def health() -> str:
        found = re.search(r'<p class="health">(.*?)</p>', page_of(bloom))
        assert found
        return re.sub("<.*?>", " ", found[1]).strip()

    assert health().startswith("not watched")
    fields = {"every_s": 30.0, "sentence": "steps as usual", "attempt": "0002", "may_act": False}
    here = own_heartbeat("agent", health=Health.HEALTHY, **fields)
    write_heartbeat(bloom, here)
    assert health() == f"healthy {here.sentence}"
    raise_finding(bloom, FINDING)
    assert health() == f"finding {here.sentence}"
    write_heartbeat(bloom, replace(here, start_ticks=1))
    assert health().startswith("unknown ") and health().endswith(f": {here.sentence}")


def test_generations_of_the_newest_attempt_are_on_the_page(bloom: RunDir) -> None:
    assert "Generations" not in page_of(bloom)
    lose_a_node(bloom)
    text = " ".join(Reader(page_of(bloom)).texts)
    assert has_parts(text, "1, 384 ranks (tp=4,pp=12,dp=8)", "n5 is left out ")
    table = text.partition("Generations of attempt 0002")[2].partition("Attempts")[0]
    assert has_parts(table, "node n5 was lost", "step 73 ", "1 min 35 s")
    assert has_parts(table, "left 3.00 s", "ready 0.00 s", "grouped 1.00 s", "restored 1.50 s", "first step 89.50 s")


def test_what_nobody_was_told_is_on_the_page(bloom: RunDir) -> None:
    queue_notice(bloom, Notice("k", "hang", "hangs", str(bloom.path), "agent", time.time()), ["webhook"])
    record_try(bloom, Try("k", "webhook", 1, "n1", time.time(), False, "hooks: no answer within 10 s"))
    assert has_parts(page_of(bloom), "1 message ", "webhook, ", "1 try, ", "n1: hooks: no answer")


def test_a_run_without_steps_has_a_page(bloom: RunDir) -> None:
    for attempt in bloom.attempts():
        for path in attempt.events.iterdir():
            path.unlink()
    text = " ".join(Reader(page_of(bloom)).texts)
    assert "No step " in text and "0001" in text


def test_a_log_of_a_foreign_program_is_read_in_blocks_and_whole(bloom: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BLOCK_BYTES", 1000)
    attempt = bloom.attempt("0003")
    attempt.make()
    line = " iteration {}/ 9000 | elapsed time per iteration (s): 1.0 | lm loss: 2.0E+00 |\n"
    bar = "\r".join(f"loading {at} %" for at in range(1000))
    text = "".join(line.format(step) for step in range(1, 601)) + bar + "\n" + line.format(601) + " iteration 602/ 9"
    attempt.log_file(0).write_text(text)
    points = history.read_history(bloom)[-1].points
    assert [point.step for point in points] == list(range(1, 602)) and {point.loss for point in points} == {2.0}


def test_steps_that_several_attempts_repeat_count_once(bloom: RunDir) -> None:
    for name, steps in (("0003", range(71, 81)), ("0004", range(61, 101))):
        attempt = bloom.attempt(name)
        attempt.make()
        write_steps(attempt, steps, lambda step: 2.0)
    kept = {held.attempt.name: [point.step for point in counted] for held, counted, _ in points_of(read_history(bloom))}
    assert kept == {
        "0001": list(range(1, 51)),
        "0002": list(range(51, 61)),
        "0003": [],
        "0004": list(range(61, 101)),
    }


def test_no_spike_is_lost_by_thinning_and_none_flattens_the_curve() -> None:
    places = [(step, 2.0 + step % 7 / 100) for step in range(1, 100_001)]
    places[54_321] = (54_322, 900.0)
    places[70_000] = (70_001, float("nan"))
    svg = draw([Curve("0001", tuple(places))], [], "loss")
    assert has_parts(svg, "step 54322: 900", "step 70001: ")
    assert len(svg) < 60 * COLUMNS * 2 and "[54322,900.0]" in svg.replace("&quot;", '"')
    ticks = [float(tick) for tick in re.findall(r'text-anchor="end">([\d.]+)<', svg)]
    assert max(ticks) < 3


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [float("nan")], [float("nan"), 3.0], [-1e-300, 1e300], []])
def test_odd_values_can_be_drawn(values: list[float]) -> None:
    svg = draw([Curve("0001", tuple(enumerate(values, 1)))], [], "loss")
    assert "nan," not in svg and "inf" not in svg


def test_status_writes_the_page(bloom: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSL_RUNS", str(bloom.path.parent))
    done = CliRunner().invoke(bsl, ["status", "bloom", "--html", str(tmp_path / "run.html")])
    assert done.exit_code == 0, done.output
    assert "restart spike" in (tmp_path / "run.html").read_text() and "attempt" in done.output


@pytest.mark.long  # that a curve of 100,000 steps is thinned is shown above
def test_a_page_of_115311_steps_is_small_and_quick(bloom: RunDir) -> None:
    for number in range(3, 33):
        attempt = bloom.attempt(f"{number:04d}")
        attempt.make()
        first = (number - 3) * 3844 + 101
        write_steps(attempt, range(first, min(115_311, first + 4000) + 1), lambda step: 2 + step % 11 / 100)
        write_json(attempt.exit, {"reason": "time_limit", "exit_code": 0, "first_failure": None})
    status = read_status(bloom)
    began = time.process_time()
    page = render_run_page(read_overview(status))
    assert time.process_time() - began < 20 and len(page) < 1_000_000
    assert re.search(r"\[115311,", page)
