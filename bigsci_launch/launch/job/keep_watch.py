"""Keeps the watcher of an attempt alive, or what exports its metrics.

    python -I -S bsl-job.pyz keep-watch --attempt-dir DIR [--log NAME] -- PYTHON ... bigsci_launch watch RUN --agent

The job script starts it next to the ranks. It starts the program again when that dies, gives up with a line in job.out
if it cannot live, and ends when the program has left by itself: when the attempt is over. On TERM it lets the program
finish what it does, for some seconds; one that was not up yet is started again, to report the end. What the program
prints goes to watch.log in DIR, or to NAME.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from bigsci_launch.launch.job.say import say
from bigsci_launch.own_place import why_not_ours

AGAIN_S = 5.0
SHORT_S = 30.0
"""A watcher that lived for less than this could not watch."""
MOST_SHORT = 3
LOOK_S = 0.5
LAST_WORDS_S = 20.0
"""How long the watcher may take to say how the attempt ended."""
NICENESS = 10
LOG_LIMIT = 16 << 20
WORDS = {
    "watch.log": ("the watcher", "nothing watches this attempt"),
    "metrics.log": ("what exports metrics", "no metrics of this attempt are exported"),
}
"""What a program is called, by the name of its log, and what it means if it cannot live."""


def main(tools: Path, arguments: Sequence[str]) -> int:
    """Keep the watcher of an attempt alive, as long as it is still its owner's. `tools` is what the attempt froze."""
    parser = argparse.ArgumentParser(description="Keep the watcher of an attempt alive.")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--log", choices=WORDS, default="watch.log")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(arguments)
    return Keeper(options.attempt_dir / options.log, options.program, tools).run()


class Keeper:
    """Starts a program again and again until it leaves with 0."""

    def __init__(self, log: Path, program: list[str], tools: Path) -> None:
        self._tools = tools
        self._log = log
        self._program = program
        self._name, self._without = WORDS[log.name]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._tell)
        num_short = 0
        while not self._is_stopping:
            began = time.monotonic()
            code = self._watch()
            if code == -signal.SIGTERM and self._is_stopping:
                code = self._watch(is_asked=False)
            if code == 0 or self._is_stopping:
                return 0
            num_short = num_short + 1 if time.monotonic() - began < SHORT_S else 0
            if num_short >= MOST_SHORT:
                say(f"{self._without}: {self._name} ended {num_short} times with {code}, see {self._log}")
                return 1
            self._pause()
        return 0

    def _watch(self, *, is_asked: bool = True) -> int:
        """Run the program and return its exit code. Unless `is_asked`, it leaves by itself: the attempt is over."""
        if (why := why_not_ours(self._tools)) is not None:
            say(f"{self._name} is not started: {why}")
            return 127
        try:
            with self._open_log() as stream:
                self._process = subprocess.Popen(
                    self._program, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                    preexec_fn=lower_priority,
                )  # fmt: skip
        except OSError as error:
            say(f"{self._name} cannot be started: {self._program[0]}: {error.strerror}")
            return 127
        if self._is_stopping and is_asked:
            self._process.terminate()
        left_s = LAST_WORDS_S
        while True:
            try:
                return self._process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                left_s -= LOOK_S if self._is_stopping else 0
                if left_s <= 0:
                    self._process.kill()

    def _open_log(self) -> IO[bytes]:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            stream = os.fdopen(os.open(self._log, flags, 0o644), "ab")
            if stream.seek(0, os.SEEK_END) >= LOG_LIMIT:
                stream.truncate(0)
            return stream
        except OSError:
            return Path(os.devnull).open("wb")

    def _pause(self) -> None:
        deadline = time.monotonic() + AGAIN_S
        while not self._is_stopping and time.monotonic() < deadline:
            time.sleep(0.2)

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def lower_priority() -> None:
    """The ranks come first."""
    os.nice(NICENESS)
