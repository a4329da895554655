"""Kills real ranks with SIGKILL while they save, at seeded moments, and examines what is left.

    python benchmarks/kill_during_save.py [--moments 24] [--seed 1] [--background]
        [--page docs/how-to/checkpoints.md]

Two ranks (dp 2) train a tiny GPT in bf16 with dropout, save every second step and keep the last two checkpoints. The
program watches the file system from outside (inotify). A moment is an event of a save, such as the third file being
closed, plus a delay of up to 3 ms. Every attempt resumes from what the previous one left and is killed at the next
moment. After each kill, `latest` must name a checkpoint in which every byte is as it was saved, and at most one
interval may be lost; two if the ranks save in the background, because training is then ahead of the save. At the end,
every loss of every attempt must be bitwise equal to that of an uninterrupted run. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import draw_corpus, require_success, start_attempt

from bigsci_launch.checkpoints.folder import CheckpointsDir, find_checkpoint, read_record, require_complete
from bigsci_launch.checkpoints.verify import find_damage, pin_path
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import BslError
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

RANKS, INTERVAL, KEPT = 2, 2, 2
MAX_DELAY_S = 0.003
LIMIT_S = 600
CREATE, CLOSE_WRITE, MOVED_TO, DELETE = 0x100, 0x8, 0x80, 0x200
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"
# The moments of a save, in order: the event, and its folder. If it concerns a file, which one is drawn at random.
MOMENTS = (
    ("it begins", "checkpoints", CREATE, ".saving-"),
    ("a file is being written", "staged", CREATE, ""),
    ("a file is being synced", "staged", CLOSE_WRITE, ""),
    ("the record is written", "staged", MOVED_TO, "checkpoint.json"),
    ("the checkpoint is marked complete", "staging", MOVED_TO, "commit"),
    ("the checkpoint has its name", "checkpoints", MOVED_TO, "global_step"),
    ("the first pointer is written", "checkpoints", MOVED_TO, "latest_checkpointed_iteration.txt"),
    ("the second pointer is written", "checkpoints", MOVED_TO, "latest"),
    ("an old checkpoint is being deleted", "checkpoints", MOVED_TO, ".deleting-"),
)
IS_WHOLE_NAME = {"latest", "commit", "checkpoint.json", "latest_checkpointed_iteration.txt"}


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill which ranks: `delay_s` after an event is seen for the `count`-th time."""

    name: str
    folder: str
    event: int
    text: str
    count: int
    delay_s: float
    victims: tuple[int, ...]

    def is_seen(self, folder: str, event: int, name: str) -> bool:
        matches = name == self.text if self.text in IS_WHOLE_NAME else name.startswith(self.text)
        return folder == self.folder and bool(event & self.event) and matches


class Watch:
    """Watches a folder of checkpoints and the current save in it; events are (folder, event, name)."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_CLOEXEC)
        self._names: dict[int, tuple[str, Path]] = {}
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._add("checkpoints", folder)

    def _add(self, kind: str, folder: Path) -> None:
        mask = CREATE | CLOSE_WRITE | MOVED_TO | DELETE
        number = self._libc.inotify_add_watch(self._file, str(folder).encode(), mask)
        if number >= 0:
            self._names[number] = (kind, folder)

    def events(self, until: float) -> Iterator[tuple[str, int, str]]:
        """Yield events until the clock reaches `until`."""
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._file], [], [], min(left, 0.05))[0]:
                yield "", 0, ""
                continue
            data, at = os.read(self._file, 1 << 16), 0
            while at < len(data):
                number, mask, _, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                yield from self._seen(number, mask, name)

    def _seen(self, number: int, mask: int, name: str) -> Iterator[tuple[str, int, str]]:
        kind, folder = self._names.get(number, ("", self._folder))
        yield kind, mask, name
        if mask & CREATE and kind == "checkpoints" and name.startswith(".saving-"):
            self._add("staging", folder / name)
            self._add("staged", folder / name / name.removeprefix(".saving-"))

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, and what it left."""

    moment: str
    victims: str
    left: str
    latest: int | None
    done: int
    problem: str

    @property
    def lost(self) -> int:
        return self.done - (self.latest or 0)


def draw_moments(count: int, seed: int) -> list[Moment]:
    """Return `count` moments: each moment of a save in turn, with its random part drawn."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        name, folder, event, text = MOMENTS[number % len(MOMENTS)]
        files = draw.randrange(1, 14) if not text else draw.randrange(1, 3)
        victims = draw.choice(((0,), (1,), (0, 1)))
        found.append(Moment(name, folder, event, text, files, draw.random() * MAX_DELAY_S, victims))
    return found


def make_config(prefix: Path, steps: int, *, background: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "kills"},
            "parallelism": {"data_parallel_size": RANKS},
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "sequence_length": 32,
                "vocab_size": 300,
                "dropout": 0.1,
            },
            "training": {"steps": steps, "micro_batch_size": 2, "global_batch_size": 4, "precision": "bf16"},
            "optimizer": {"learning_rate": 1e-3, "decay_steps": 1000},
            "data": {"prefix": str(prefix)},
            "checkpoint": {"save_interval": INTERVAL, "keep_last": KEPT, "background": background},
        }
    )


def kill_at(moment: Moment, run: RunDir, config: RunConfig) -> Kill:
    """Run one attempt and kill it at `moment`."""
    watch = Watch(run.checkpoints)
    attempt, processes = start_attempt(run, config, RANKS)
    seen = 0
    try:
        for folder, event, name in watch.events(time.monotonic() + LIMIT_S):
            if any(process.poll() is not None for process in processes):
                break
            seen += moment.is_seen(folder, event, name)
            if seen == moment.count:
                time.sleep(moment.delay_s)
                break
        for rank in moment.victims:
            processes[rank].send_signal(signal.SIGKILL)
        wait_for(processes)
    finally:
        watch.close()
        for process in processes:
            process.kill()
    done = max((record["step"] for record in all_steps(run)), default=0)
    problem = "" if seen == moment.count else f"not seen {moment.count} times:\n{tail(attempt)}"
    latest, damage = examine(CheckpointsDir(run.checkpoints))
    victims = "both ranks" if len(moment.victims) == 2 else f"rank {moment.victims[0]}"
    return Kill(moment.name, victims, left(run), latest, done, problem or damage)


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended; a rank that lost its peer ends on its own."""
    for process in processes:
        process.wait(60)


def tail(attempt: AttemptDir) -> str:
    return "\n".join(attempt.log_file(rank).read_text()[-1500:] for rank in range(RANKS))


def all_steps(run: RunDir) -> Iterator[dict[str, Any]]:
    """Yield the `step` records of every attempt, oldest first."""
    for attempt in run.attempts():
        for rank in range(RANKS):
            yield from (record for record in read_events(attempt.event_file(rank)) if record["kind"] == "step")


def left(run: RunDir) -> str:
    """Return in words which parts of the save were on disk."""
    checkpoints = CheckpointsDir(run.checkpoints)
    stagings = checkpoints.stagings()
    found = []
    for staging in stagings:
        tag = staging.name.removeprefix(".saving-")
        files = [path for path in (staging / tag).rglob("*") if path.is_file()] if (staging / tag).exists() else []
        if (staging / "commit").exists():
            found.append("complete, without its name" if files else "complete, with its name, not cleaned up")
        else:
            found.append(f"{len(files)} of its files")
    pointer = checkpoints.latest.read_text().strip() if checkpoints.latest.exists() else "nothing"
    newest = checkpoints.tags()[-1] if checkpoints.tags() else "nothing"
    if newest != pointer and not any("without" in each for each in found):
        found.append("`latest` one behind")
    if list(checkpoints.path.glob(".deleting-*")):
        found.append("an old checkpoint half deleted")
    return "; ".join(found) or "only complete checkpoints"


def examine(checkpoints: CheckpointsDir) -> tuple[int | None, str]:
    """Return the step of the checkpoint that `latest` names, and what is wrong with it."""
    try:
        folder = find_checkpoint("auto", checkpoints)
        if folder is None:
            return None, ""
        record = read_record(folder)
        require_complete(folder, record)
        return record.step, "; ".join(find_damage(folder))
    except BslError as error:
        return None, error.message


def finish(run: RunDir, config: RunConfig) -> None:
    """Train to the end."""
    attempt, processes = start_attempt(run, config, RANKS)
    require_success(processes, attempt.log_file(0), LIMIT_S)


def find_other_losses(run: RunDir, reference: RunDir) -> list[str]:
    """Return the steps of any attempt whose loss differs from that of the uninterrupted run."""
    expected = {record["step"]: record["loss_hex"] for record in all_steps(reference)}
    return [
        f"step {record['step']}: loss {record['loss_hex']}, uninterrupted {expected.get(record['step'])}"
        for record in all_steps(run)
        if record["loss_hex"] != expected.get(record["step"])
    ]


def table(kills: Sequence[Kill]) -> str:
    """Return the kills as a Markdown table."""
    lines = ["| # | killed when | who | on disk | steps done | `latest` | lost |", "|" + "---|" * 7]
    for number, kill in enumerate(kills, 1):
        cells = (number, kill.moment, kill.victims, kill.left, kill.done, kill.latest or "none", kill.lost)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write_page(page: Path, text: str, begin: str, end: str) -> None:
    """Replace what is between the marks `begin` and `end` of a page by `text`."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def run_kills(folder: Path, moments: Sequence[Moment], *, background: bool) -> tuple[list[Kill], list[str], int]:
    """Return the kills, the problems found, and how many losses were compared."""
    prefix = folder / "tokens"
    draw_corpus(prefix)
    run, reference = RunDir(folder / "killed"), RunDir(folder / "undisturbed")
    kills, problems = [], []
    most = 2 * INTERVAL if background else INTERVAL
    for number, moment in enumerate(moments, 1):
        kills.append(kill_at(moment, run, make_config(prefix, 100_000, background=background)))
        kill = kills[-1]
        print(f"{number:3} {kill.moment}, {kill.victims}: {kill.left}; lost {kill.lost} of {kill.done}", flush=True)
        problems += [f"kill {number}: {kill.problem}"] if kill.problem else []
        problems += [f"kill {number}: {kill.lost} steps are lost"] if kill.lost > most else []
        tags = CheckpointsDir(run.checkpoints).tags()
        if number == 1 and tags:
            pin_path(run.checkpoints / tags[0]).touch()
            pinned = tags[0]
        if number > 1 and kills[0].latest and pinned not in tags:
            problems.append(f"kill {number}: the pinned {pinned} is gone")
    steps = kills[-1].done + INTERVAL
    for each in (run, reference):
        finish(each, make_config(prefix, steps, background=background))
    problems += find_other_losses(run, reference)
    return kills, problems, sum(1 for _ in all_steps(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--background", action="store_true", help="save in the background")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        kills, problems, compared = run_kills(
            folder, draw_moments(arguments.moments, arguments.seed), background=arguments.background
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worst = max(kill.lost for kill in kills)
    text = (
        f"{len(kills)} kills (seed {arguments.seed}) of a run that saves every {INTERVAL} steps never damaged "
        f"`latest`, and cost at most {worst} steps each. "
        f"All {compared} losses are bitwise equal to the uninterrupted run's."
    )
    print(table(kills))
    print(json.dumps({"kills": len(kills), "most_lost": worst, "losses": compared, "problems": problems}))
    if problems:
        raise SystemExit("\n".join(problems))
    print(text)
    if arguments.page:
        write_page(arguments.page, f"{text}\n\n{table(kills)}", BEGIN, END)


if __name__ == "__main__":
    main()
