"""Calls as a stranger at every TCP port that a run opens, and says whether the run noticed.

    python benchmarks/fuzz_ports.py [--seconds 60] [--folder DIR]

Three things run for real: `bsl train` on 2 gloo ranks with `survive` (`bsl submit --local`), the same without, and the
check of 4 nodes on 127.0.0.1 to 127.0.0.4. /proc names the ports. Each gets random bytes, deep JSON, numbers that are
none, lone surrogates, HTTP, a hello of TLS, lines that do not end, connections that are closed on one side only, and
crowds of 1500 connections that say nothing. The losses must be those of a run that nobody disturbed, bit for bit.

The ports of torch's store and of gloo are torch's: whoever connects to the store may use it. The run with `survive` is
left alone there; the other one is attacked there and nowhere else, because `bsl` itself opens no port for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, write_run_file

from bigsci_launch.content import packaged
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.generations.strangers import read_strangers
from bigsci_launch.runs.layout import RunDir

CROWD = 1500
CROWD_EVERY_S = 5.0
NODES = [f"127.0.0.{number}" for number in range(1, 5)]
LAYOUT = Layout(tp=1, pp=1, dp=2, precision="fp32", dropout=0.0)
STEPS_PER_S = 25
"""A guess of how fast the tiny model trains, so that a run lasts about as long as the attack."""
CONTROLLER, STORE, GLOO, CHECK = "controller of survive", "torch's store", "gloo, of torch", "node check"
DRAW = random.Random(0)
CALLS: tuple[Callable[[], bytes], ...] = (
    lambda: DRAW.randbytes(DRAW.randrange(1, 5000)),
    lambda: DRAW.randbytes(DRAW.randrange(1, 300)) + b"\n",
    lambda: b"[" * 200_000 + b"\n",
    lambda: b'{"a":' * 50_000 + b"\n",
    lambda: b'{"say":"hello","token":"x","slot":1e999}\n',
    lambda: b'{"say":"hello","token":"x","slot":NaN}\n',
    lambda: b'{"say":"hello","token":"x","slot":' + b"9" * 6000 + b"}\n",
    lambda: b'{"say":"hello","token":"\\ud800","slot":0}\n',
    lambda: b"\xed\xa0\x80" * 40 + b"\n",
    lambda: b"0" * 64 + b" 00 " + b'{"slot":0}\n',
    lambda: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    lambda: bytes.fromhex("16030100c8010000c40303") + DRAW.randbytes(190),
    lambda: b"x" * 100_000,
)


@dataclass(frozen=True)
class Port:
    """Where something listens, and what."""

    address: str
    number: int
    what: str


@dataclass
class Attack:
    """What was sent to each kind of port, and for how long."""

    bytes: Counter[str] = field(default_factory=Counter)
    connections: Counter[str] = field(default_factory=Counter)
    ports: dict[str, set[int]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)


class Stranger:
    """Calls at the ports of some processes, in a thread, until told to stop. `wanted` says at which kinds of ports."""

    def __init__(self, folder: Path, wanted: set[str], attack: Attack, master: Callable[[], set[int]]) -> None:
        self._folder, self._wanted, self._attack, self._master = folder, wanted, attack, master
        self._crowd: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._leave()

    def _work(self) -> None:
        crowded = 0.0
        while not self._is_over.is_set():
            began = time.monotonic()
            ports = [port for port in open_ports(self._folder, self._master()) if port.what in self._wanted]
            for port in ports:
                self._attack.ports.setdefault(port.what, set()).add(port.number)
                for call in CALLS:
                    self._say(port, call())
            if ports and time.monotonic() - crowded > CROWD_EVERY_S:
                self._leave()
                for number in range(CROWD):
                    self._open(ports[number % len(ports)])
                crowded = time.monotonic()
            for what in {port.what for port in ports}:
                self._attack.seconds[what] += time.monotonic() - began  # type: ignore[assignment]
            self._is_over.wait(0.01)

    def _say(self, port: Port, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection((port.address, port.number), timeout=1) as link:
            self._attack.connections[port.what] += 1
            self._attack.bytes[port.what] += link.send(data)
            if DRAW.random() < 0.3:
                link.shutdown(socket.SHUT_WR)
            link.settimeout(0.05)
            link.recv(4096)

    def _open(self, port: Port) -> None:
        with contextlib.suppress(OSError):
            self._crowd.append(socket.create_connection((port.address, port.number), timeout=1))
            self._attack.connections[port.what] += 1
            if DRAW.random() < 0.3:
                self._attack.bytes[port.what] += self._crowd[-1].send(b"half a line")

    def _leave(self) -> None:
        for link in self._crowd:
            link.close()
        self._crowd.clear()


# ------------------------------------------------------------------------------------------------ ports, by /proc


def open_ports(folder: Path, masters: set[int]) -> list[Port]:
    """Return the TCP ports of all processes that have the folder in their environment or arguments."""
    found: dict[tuple[str, int], Port] = {}
    listening = dict(listeners())
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if str(folder).encode() in words + (path / "environ").read_bytes():
                for link in (path / "fd").iterdir():
                    with contextlib.suppress(OSError, KeyError):
                        address, number = listening[str(link.readlink())]
                        found[address, number] = Port(address, number, name_of(words, number, masters))
    return list(found.values())


def listeners() -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the name of each listening socket, with an address at which it can be reached, and its port."""
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A":
                place, _, port = row[1].partition(":")
                own = socket.inet_ntoa(bytes.fromhex(place)[::-1]) if name == "tcp" else "127.0.0.1"
                yield f"socket:[{row[9]}]", ("127.0.0.1" if own == "0.0.0.0" else own, int(port, 16))


def name_of(words: bytes, number: int, masters: set[int]) -> str:
    if b"recover.controller" in words:
        return CONTROLLER
    if b"check_node.py" in words:
        return CHECK
    return STORE if number in masters else GLOO


# ------------------------------------------------------------------------------------------------ what runs


@dataclass(frozen=True)
class Outcome:
    """How a thing that was attacked has ended, in words; `is_good`: as if nobody had called."""

    is_good: bool
    words: str


def train(folder: Path, name: str, steps: int, survive: bool, wanted: set[str], attack: Attack) -> RunDir:
    """Run `bsl train` to its end, with strangers at the `wanted` ports."""
    more: dict[str, Any] = {"training": {"steps": steps}, "checkpoint": {"save_interval": 100}}
    path = write_run_file(folder, name, LAYOUT, folder / "corpus", {} if survive else None, more)
    run = RunDir(folder / "runs" / name)
    command = [sys.executable, "-c", BSL, "submit", str(path), "--local"]
    with Stranger(run.path, wanted, attack, lambda: store_ports(run)) if wanted else contextlib.nullcontext():
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        print(f"{name} ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return run


def store_ports(run: RunDir) -> set[int]:
    """Return the ports at which the ranks meet: those in the environment of its processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = dict(each.split(b"=", 1) for each in path.read_bytes().split(b"\0") if b"=" in each)
            if str(run.path).encode() in words.get(b"BSL_RUN_DIR", b""):
                found.add(int(words[b"MASTER_PORT"]))
    return found


def losses(run: RunDir) -> dict[int, str]:
    records = read_events(run.attempt("0001").event_file(0))
    return {each["step"]: each["loss_hex"] for each in records if each.get("kind") == "step" and "loss_hex" in each}


def trained(run: RunDir, sound: RunDir, steps: int) -> Outcome:
    found, wanted = losses(run), losses(sound)
    same = found == wanted and len(found) == steps
    strangers = read_strangers(run.attempt("0001"))
    said = "" if strangers.survive is None else f"; {strangers.survive} strangers by `bsl status`"
    return Outcome(same, f"{len(found)} of {steps} steps, {'same losses' if same else 'OTHER LOSSES'}{said}")


def check(folder: Path, seconds: float, attack: Attack) -> Outcome:
    """Check the nodes again and again while strangers call."""
    program = str(packaged("diagnostics", "check_node.py"))
    verdicts: Counter[str] = Counter()
    strangers, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        token = os.urandom(16).hex()
        with Stranger(folder, {CHECK}, attack, set):
            nodes = [start_node(program, folder, index, token) for index in range(len(NODES))]
            records = [json.loads(node.communicate(timeout=100)[0].splitlines()[-1][7:]) for node in nodes]
        strangers += sum(record["strangers"] for record in records)
        statuses = Counter(peer["status"] for record in records for peer in record["peers"])
        verdicts["good" if statuses == {"ok": len(NODES) * (len(NODES) - 1)} else str(dict(statuses))] += 1
    return Outcome(set(verdicts) == {"good"}, f"checks: {dict(verdicts)}; {strangers} strangers counted")


def start_node(program: str, folder: Path, index: int, token: str) -> subprocess.Popen[str]:
    place = {"SLURM_NODEID": str(index), "SLURMD_NODENAME": NODES[index], "BSL_CHECK_TOKEN": token}
    argv = [sys.executable, "-I", program, "--hosts", " ".join(NODES)]
    environment = {**os.environ, **place, "BSL_FUZZED": str(folder)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="about how long each of the three is attacked")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    draw_corpus(folder / "corpus")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    steps = int(options.seconds * STEPS_PER_S)
    attack = Attack()
    sound = train(folder, "sound", steps, survive=False, wanted=set(), attack=attack)
    survived = trained(train(folder, "survive", steps, True, {CONTROLLER}, attack), sound, steps)
    plain = trained(train(folder, "plain", steps, False, {STORE, GLOO, CONTROLLER}, attack), sound, steps)
    outcomes = {CONTROLLER: survived, STORE: plain, GLOO: plain, CHECK: check(folder, options.seconds, attack)}
    print("| what listens | ports | MiB | connections | minutes | the run |\n|---|---|---|---|---|---|")
    for what, outcome in outcomes.items():
        if what in attack.ports:
            print(
                f"| {what} | {len(attack.ports[what])} | {attack.bytes[what] / 2**20:.1f} | {attack.connections[what]} "
                f"| {attack.seconds[what] / 60:.1f} | {outcome.words} |"
            )
    sys.exit(not all(outcomes[what].is_good for what in (CONTROLLER, CHECK)))


if __name__ == "__main__":
    main()
