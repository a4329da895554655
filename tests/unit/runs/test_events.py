"""Event records never block, and torn files are read."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from bigsci_launch.runs.events import QUEUE_SIZE, EventWriter, read_events, read_last_events
from tests.support.waiting import wait_until


def test_records_come_back_in_order(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "rank-0000.jsonl")
    for step in range(100):
        writer.write("heartbeat", step=step, phase="step")
    writer.close()
    assert [record["step"] for record in read_events(tmp_path / "rank-0000.jsonl")] == list(range(100))


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "start"}\n[1]\n\xff\n{"kind": "step", "st')
    assert [record["kind"] for record in read_events(path)] == ["start"]
    assert [record["kind"] for record in read_last_events(path)] == ["start"]
    assert list(read_events(tmp_path / "missing")) == []


def test_the_tail_of_a_long_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(10_000)))
    last = read_last_events(path, tail_bytes=1000)
    assert last[-1]["step"] == 9999
    assert len(last) < 50


def test_a_stuck_disk_drops_records_but_never_blocks(tmp_path: Path) -> None:
    """The file is a full pipe that nobody reads, so the first write to it blocks."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"x")
    os.close(filler)
    writer = EventWriter(path)
    for step in range(QUEUE_SIZE * 3):
        writer.write("heartbeat", step=step, filler="x" * 200)
    # Nothing can be written: what the queue does not drop, its thread does.
    wait_until(lambda: writer._num_dropped == QUEUE_SIZE * 3)
    with contextlib.suppress(BlockingIOError):
        while os.read(reader, 65536):
            pass
    writer.write("heartbeat", step=-1)
    writer.close(timeout_s=60.0)
    records = [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    assert [(each["kind"], each.get("num_records")) for each in records] == [
        ("dropped", QUEUE_SIZE * 3),
        ("heartbeat", None),
    ]
    os.close(reader)
    assert not any(thread.name == "bsl-events" and thread.is_alive() for thread in threading.enumerate())
