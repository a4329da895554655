"""A rank that fails on demand, without torch: python rank.py [steps=N] [until=PATH] [RANKS@STEP=ACTION[:TEXT]] ...

Prints `iteration N` every 0.2 s, N times or until PATH exists; without either, it never ends. RANKS is a rank, `*` for
all, or `!R` for all but R. Several actions at one step happen in the order of the words.
  say:TEXT     print it                      raise:TEXT    print it and end with 1
  exit:CODE    end with that status          kill:NAME     signal itself
  flag:PATH    wait until PATH exists        gone:PATH     create PATH and end with 1 at once
  wait         do nothing, for ever          deaf          ignore TERM
  flood:MB     print so many megabytes       line:MB       the same without a line end
  bind         listen on MASTER_PORT, as a rendezvous does
  fill:PATH    write until the disk is full  inodes:PATH   make files until the disk takes none
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
listening: list[socket.socket] = []


def concerns(ranks: str) -> bool:
    return ranks == "*" or (ranks[1:] != str(rank) if ranks.startswith("!") else ranks == str(rank))


def flood(megabytes: int) -> None:
    block = b"".join(b"loss of micro batch %06d is 1.2345678901234567890 and its norm is 2.34567890\n" % n
                     for n in range(13107))  # fmt: skip
    for _ in range(megabytes):
        os.write(1, block) if len(block) < 4096 else sys.stdout.buffer.write(block)
    sys.stdout.flush()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 16))


def use_inodes(path: Path) -> None:
    path.mkdir()
    for number in range(10**7):
        (path / str(number)).touch()


def bind() -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        print(f"RuntimeError: the server socket cannot listen on port {os.environ['MASTER_PORT']}: {error}", flush=True)
        sys.exit(1)
    listener.listen()
    listening.append(listener)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
    time.sleep(0.05)


def act(action: str, text: str) -> None:
    if action in ("say", "raise"):
        print(text, flush=True)
    if action in ("raise", "exit"):
        sys.exit(int(text) if action == "exit" else 1)
    if action == "kill":
        os.kill(os.getpid(), signal.Signals[text])
    if action == "gone":
        Path(text).touch()
        os._exit(1)
    if action == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True))
    if action == "wait":
        while True:
            time.sleep(60)
    simple = {
        "flood": lambda: flood(int(text)),
        "line": lambda: print(int(text) * 2**20 * "x", end="", flush=True),
        "bind": bind,
        "flag": lambda: wait_for(Path(text)),
    }
    full = {"fill": fill, "inodes": use_inodes}
    if action in simple:
        simple[action]()
    if action in full:
        try:
            full[action](Path(text))
        except OSError as error:
            print(f"OSError: {error}", flush=True)


def main() -> None:
    steps, until, actions = 10**9, None, []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key == "steps":
            steps = int(value)
        elif key == "until":
            until = Path(value)
        else:
            ranks, _, step = key.partition("@")
            action, _, text = value.partition(":")
            actions += [(int(step), action, text)] if concerns(ranks) else []
    for step in range(steps + 1):
        for when, action, text in actions:
            if when == step:
                act(action, text)
        time.sleep(0.2)
        print("iteration", step, flush=True)
        if until and until.exists():
            return


main()
