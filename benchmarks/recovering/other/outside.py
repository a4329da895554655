"""Attacks on what a run stands on: its runners, its controller, their limits, the records, the disk, the clock."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recovering.attack import Attack, CannotRun, Expected
from recovering.attacked_run import StartedRun

FAULTS = Path(__file__).resolve().parents[2] / "faults"
EQUAL = Expected(equal=True)


def until_quiet(run: StartedRun, step: int = 12) -> None:
    run.until(step)
    run.until_standbys()


def then_kill(prepare: Callable[[StartedRun], None], *ranks: int) -> Callable[[StartedRun], None]:
    """Return an attack that prepares something after step 12, and then kills ranks."""

    def injure(run: StartedRun) -> None:
        until_quiet(run)
        pids = [run.rank_pid(rank) for rank in ranks]
        prepare(run)
        for pid in pids:
            run.kill(pid)

    return injure


def descriptors(pid: int) -> int:
    return max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1


def limit(pid: int, what: int, number: int) -> None:
    resource.prlimit(pid, what, (number, number))


def address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def _storm(run: StartedRun) -> None:
    until_quiet(run, 8)
    pid, until = run.runner_pid(1), time.monotonic() + 10
    while time.monotonic() < until and run.is_running:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            run.kill(pid, number)
            time.sleep(0.1)
    run.wait()
    run.claim("no generation ends", not run.failures())


def _stopped_runner(run: StartedRun) -> None:
    until_quiet(run, 8)
    run.kill(run.runner_pid(1), signal.SIGSTOP)
    run.wait()
    run.claim("rank 1 lost its runner", run.failures() == [("lost_runner", 1)])


def _term_runner(run: StartedRun) -> None:
    until_quiet(run)
    run.kill(run.runner_pid(1), signal.SIGTERM)
    code = run.wait()
    if code:
        run.claim("the attempt was stopped by a signal", run.status()["exit"]["reason"] in ("stopped", "cancelled"))
        run.note(f"the first attempt ended with {code}")
    if not (run.run.checkpoints / "global_step30").exists():
        run.start()


def _small_runner(run: StartedRun) -> None:
    pid = run.runner_pid(1)
    limit(pid, resource.RLIMIT_AS, address_space(pid))


def _few_descriptors(run: StartedRun) -> None:
    pid = run.runner_pid(1)
    limit(pid, resource.RLIMIT_NOFILE, descriptors(pid))


def _few_for_controller(run: StartedRun) -> None:
    until_quiet(run)
    pid = run.controller_pid
    limit(pid, resource.RLIMIT_NOFILE, descriptors(pid))
    run.kill(run.runner_pid(1))
    run.wait()
    run.claim("the controller did not crash", "Traceback" not in run.output.read_text(errors="replace"))


def _full_for_controller(run: StartedRun) -> None:
    limit(run.controller_pid, resource.RLIMIT_FSIZE, 0)


def _recover_is_file(run: StartedRun) -> None:
    for path in sorted(run.attempt.recover.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run.attempt.recover.rmdir()
    run.attempt.recover.write_text("no folder")


def _torn(run: StartedRun) -> None:
    path = run.attempt.generations
    os.truncate(path, path.stat().st_size - 40)


def _swapped(run: StartedRun) -> None:
    until_quiet(run)
    first, second = run.rank_pid(0), run.rank_pid(1)
    paths = [run.attempt.pids / f"rank-{rank:04d}.json" for rank in (0, 1)]
    texts = [path.read_text() for path in paths]
    for path, text in zip(paths, reversed(texts), strict=True):
        path.write_text(text)
    run.kill(second, signal.SIGSTOP)
    run.wait()
    run.claim("rank 1 was stopped, and no other", run.failures() == [("stopped", 1)])
    run.claim("rank 0 was not killed", not any(rank == 0 for _, rank in run.failures()) and first > 0)


def _small_rank(run: StartedRun) -> None:
    until_quiet(run)
    pid = run.rank_pid(1)
    limit(pid, resource.RLIMIT_AS, address_space(pid))


def _no_descriptors(run: StartedRun) -> None:
    until_quiet(run)
    limit(run.rank_pid(0), resource.RLIMIT_NOFILE, 3)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Have a folder mounted over itself, so that nothing can be written there.

    Raises:
        CannotRun: nothing may be mounted here.
    """
    try:
        subprocess.run(["mount", "--bind", folder, folder], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"nothing can be mounted here: {error}") from None
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], capture_output=True)


def _read_only_save(run: StartedRun) -> None:
    run.until(12)
    with read_only(run.run.checkpoints):
        run.until(21)
        run.kill(run.rank_pid(2))
        run.until_generation(1)
        run.until(23)
    run.wait()
    run.claim("rank 2 died, and nothing else", run.failures() == [("died", 2)])


def _no_latest(run: StartedRun) -> None:
    (run.run.checkpoints / "latest").unlink()


def _short_shard(run: StartedRun) -> None:
    folder = run.run.checkpoints / (run.run.checkpoints / "latest").read_text().strip()
    shard = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    run.note(f"{folder.name}/{shard.name} was cut")


def _short_shard_told(run: StartedRun) -> None:
    then_kill(_short_shard, 0, 1)(run)
    run.wait()
    text = run.output.read_text(errors="replace") + run.bsl("status", run.run.path).stdout
    run.claim("the damaged file is named", "optim_states.pt" in text)


def _clock(run: StartedRun) -> None:
    library, number = run.injuries / "jump.so", run.injuries / "jump"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, FAULTS / "jump.c"], check=True)
    number.write_bytes((0).to_bytes(8, "little"))
    run.start(environment={"LD_PRELOAD": str(library), "JUMP_FILE": str(number), "JUMP_WORD": "python"})
    until_quiet(run)
    run.kill(run.rank_pid(1))
    run.until_noticed()
    with number.open("r+b") as stream:
        stream.write((3600).to_bytes(8, "little"))


def _watchers(run: StartedRun) -> list[int]:
    return [pid for pid, line in run.processes().items() if "--agent" in line or "keep-watch" in line]


def _no_watcher(run: StartedRun) -> None:
    until_quiet(run)
    found = _watchers(run)
    run.claim("there was a watcher", bool(found))
    for pid in found:
        run.kill(pid)
    run.kill(run.rank_pid(1), signal.SIGSTOP)
    run.wait()
    run.claim("rank 1 was stopped", run.failures() == [("stopped", 1)])


def _watcher_stopped(run: StartedRun) -> None:
    until_quiet(run)
    for pid in _watchers(run):
        run.kill(pid, signal.SIGSTOP)
    run.kill(run.rank_pid(2))
    run.wait()
    run.claim("rank 2 died", run.failures() == [("died", 2)])


def ask(run: StartedRun, name: str, document: object) -> None:
    """Leave a request for the controller, as a file that asks to fence."""
    part = run.attempt.requests / f".{name}"
    part.write_text(document if isinstance(document, str) else json.dumps(document))
    part.rename(run.attempt.requests / f"fence.{name}.json")


def fence(run: StartedRun, name: str, rank: object, generation: object = 0) -> dict[str, object]:
    said = {"why": "attack", "who": "attacker", "attempt": run.attempt.name}
    return {"key": f"fence.{name}", "verb": "fence", "rank": rank, "generation": generation, **said}


def _two_requests(run: StartedRun) -> None:
    until_quiet(run)
    ask(run, "a", fence(run, "a", 1))
    ask(run, "b", fence(run, "b", 2))
    run.wait()
    answers = [json.loads(path.read_text())["granted"] for path in sorted(run.attempt.answers.glob("*.json"))]
    run.claim("one was granted, one refused", sorted(answers) == [False, True])
    run.claim("one rank was ended", len(run.failures()) == 1)


def _bad_requests(run: StartedRun) -> None:
    until_quiet(run)
    texts = ("[1]", "[" * 5000, '{"verb": "fence", "rank": 1e999, "generation": 0}', "null", '"x"', "\xff")
    fences = [(True, 0), ("x", 0), (-1, 0), (1, [0])]
    documents = [fence(run, f"b{number}", *each) for number, each in enumerate(fences)]
    for number, text in enumerate((*texts, *documents)):
        ask(run, f"{'a' if number < len(texts) else 'b'}{number % len(texts)}", text)
    time.sleep(2)
    run.note(f"before the good request, generations ended by {run.failures() or 'nothing'}")
    ask(run, "c", fence(run, "c", 2, max(each["generation"] for each in run.generations() if each["event"] == "began")))
    run.wait()
    run.claim("the good request was granted", ("hung", 2) in run.failures())
    run.claim("no bad one was", all(rank == 2 for _, rank in run.failures()))


def _steal(run: StartedRun) -> None:
    """Bind each port that a slot offers, for some seconds after a kill."""
    until_quiet(run)
    held: dict[int, socket.socket] = {}
    known = _offered()
    run.kill(run.rank_pid(3))
    until = time.monotonic() + 6
    while time.monotonic() < until and not _has_joined(run):
        for port in _offered() - known - held.keys():
            link = socket.socket()
            with suppress(OSError):
                link.bind(("", port))
                link.listen()
            held[port] = link
    run.note(f"{len(held)} ports were taken")
    for link in held.values():
        link.close()
    run.wait()
    run.claim("ports were taken", bool(held))


def _has_joined(run: StartedRun) -> bool:
    return any(each["generation"] and each.get("phase") for each in run.generations())


def _offered() -> set[int]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {int(line.rpartition("@bsl-port-")[2].rstrip("@")) for line in lines if "@bsl-port-" in line}


NO_LOOKUP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int getaddrinfo(const char *n, const char *s, const struct addrinfo *h, struct addrinfo **r) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
  real = dlsym(RTLD_NEXT, "getaddrinfo");
  const char *f = getenv("NO_LOOKUP");
  if (f && !access(f, F_OK) && n && n[strspn(n, "0123456789.:")]) return EAI_AGAIN;
  return real(n, s, h, r);
}
"""


def _no_lookup(run: StartedRun) -> None:
    library, source, switch = (run.injuries / name for name in ("lookup.so", "lookup.c", "switch"))
    source.write_text(NO_LOOKUP)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    run.start(environment={"LD_PRELOAD": str(library), "NO_LOOKUP": str(switch)})
    until_quiet(run)
    switch.touch()
    run.kill(run.rank_pid(2))


def _large_environment(run: StartedRun) -> None:
    run.start(environment={f"LARGE_{number}": "x" * 100_000 for number in range(12)})
    until_quiet(run)
    run.kill(run.runner_pid(1))
    run.until_generation(1)
    run.until(run.step() + 2)
    run.kill(run.rank_pid(0))


def _temporary_gone(run: StartedRun) -> None:
    folder = run.injuries / "tmp"
    folder.mkdir()
    run.start(environment={"TMPDIR": str(folder)})
    until_quiet(run)
    subprocess.run(["rm", "-rf", folder])
    folder.write_text("no folder")
    run.kill(run.rank_pid(1))


def _deaf_output(run: StartedRun, *, is_closed: bool) -> None:
    """Start the run with its output in a pipe that is closed, or full, from step 12 on."""
    reader, writer = os.pipe()
    path = Path(f"/proc/{os.getpid()}/fd/{writer}")
    run.path.with_suffix(".out").unlink(missing_ok=True)
    run.path.with_suffix(".out").symlink_to(path)
    run.start()
    os.set_blocking(reader, False)
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(0.05):
            with suppress(OSError):
                os.read(reader, 1 << 16)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until_quiet(run)
    stop.set()
    thread.join()
    run.path.with_suffix(".out").unlink()
    if is_closed:
        os.close(writer)
        os.close(reader)
    else:
        full = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(full, b"x" * 4096)
        with suppress(BlockingIOError):
            while True:
                os.write(full, b"x")
    step = run.step()
    run.kill(run.rank_pid(1))
    if is_closed:
        _await_record(run)
        return
    try:
        run.until(min(30, step + 6))
    finally:
        run.note(f"without a reader it came from step {step} to {run.step()}")
        os.set_blocking(reader, True)
        threading.Thread(target=_drain, args=(reader,), daemon=True).start()


def _await_record(run: StartedRun) -> None:
    """Wait for the end of an attempt that `bsl submit` follows no longer."""
    until = time.monotonic() + 120
    while not run.attempt.exit.exists() and time.monotonic() < until:
        time.sleep(0.2)
    if run.attempt.exit.exists():
        run.exit_code = json.loads(run.attempt.exit.read_text())["exit_code"]
    run.note(f"`bsl submit` {'follows it still' if run.is_running else 'ended before it'}")


def _drain(reader: int) -> None:
    while os.read(reader, 1 << 16):
        pass


def _touched(run: StartedRun) -> None:
    later = time.time() + 5
    os.utime(run.attempt.config, (later, later))


def _touched_told(run: StartedRun) -> None:
    then_kill(_touched, 0, 1)(run)


CHECKPOINT = Expected(equal=True, recovered=("checkpoint",))
BUDDIES = Expected(equal=True, recovered=("buddies",))
LOAD_NONE = {"checkpoint": {"load": "none"}}
ATTACKS = (
    Attack("runner-storm", "runner", "STOP and CONT to a runner, every 0.1 s for 10 s", _storm, EQUAL),
    Attack("runner-stopped", "runner", "SIGSTOP to the runner of rank 1", _stopped_runner, BUDDIES,
           settings={"faults": [{"kind": "slow", "rank": 0, "step": 1, "seconds": 1.0}]}),
    Attack("runner-term", "runner", "SIGTERM to the runner of rank 1; submitted again", _term_runner, EQUAL),
    Attack("runner-memory", "runner", "the memory of a runner is limited to what it has; its rank is killed",
           then_kill(_small_runner, 1), EQUAL),
    Attack("runner-files", "runner", "a runner cannot open further files; its rank is killed",
           then_kill(_few_descriptors, 1), EQUAL),
    Attack("controller-files", "controller", "the controller cannot open further files; a runner is killed",
           _few_for_controller, EQUAL),
    Attack("controller-disk", "controller", "nothing that the controller writes gets to its disk; rank 1 is killed",
           then_kill(_full_for_controller, 1), Expected(equal=True)),
    Attack("recover-file", "records", "recover/ becomes a file; rank 1 is killed",
           then_kill(_recover_is_file, 1), EQUAL),
    Attack("torn-records", "records", "generations.jsonl is cut in a line; rank 1 is killed",
           then_kill(_torn, 1), EQUAL),
    Attack("swapped-pids", "records", "the records of ranks 0 and 1 change places; SIGSTOP to rank 1", _swapped, EQUAL),
    Attack("rank-memory", "limits", "the memory of rank 1 is limited to what it has", _small_rank, EQUAL),
    Attack("rank-files", "limits", "rank 0 cannot open further files, before a save", _no_descriptors, EQUAL),
    Attack("read-only", "disk", "checkpoints/ is read-only in a save, and rank 2 is killed in that time",
           _read_only_save, EQUAL),
    Attack("no-latest", "disk", "latest is removed; two buddies are killed", then_kill(_no_latest, 0, 1), EQUAL),
    Attack("short-shard", "disk", "a file of the checkpoint is cut; two buddies are killed", _short_shard_told,
           Expected(reason="crashed")),
    Attack("touched-config", "disk", "config.yaml of the attempt is touched, load: none; two buddies are killed",
           _touched_told, CHECKPOINT, settings=LOAD_NONE),
    Attack("clock", "clock", "wall clocks gain an hour in a recovery", _clock, EQUAL, starts=False),
    Attack("no-watcher", "watcher", "the watcher is killed; SIGSTOP to rank 1", _no_watcher, EQUAL),
    Attack("watcher-stopped", "watcher", "SIGSTOP to the watcher; rank 2 is killed", _watcher_stopped, EQUAL),
    Attack("two-requests", "watcher", "two watchers ask for two ranks at once", _two_requests, EQUAL),
    Attack("bad-requests", "watcher", "requests that are none; then one for rank 2", _bad_requests, EQUAL),
    Attack("stolen-port", "network", "each port that is offered for the store is taken; rank 3 was killed",
           _steal, EQUAL),
    Attack("no-lookup", "network", "names cannot be looked up; rank 2 is killed", _no_lookup, EQUAL, starts=False),
    Attack("environment", "start", "12 variables of 100 kB; a runner is killed, then rank 0", _large_environment, EQUAL,
           starts=False),
    Attack("no-tmp", "start", "TMPDIR becomes a file; rank 1 is killed", _temporary_gone, EQUAL, starts=False),
    Attack("closed-output", "start", "whoever reads the output of the job is gone; rank 1 is killed",
           lambda run: _deaf_output(run, is_closed=True), EQUAL, starts=False),
    Attack("full-output", "start", "the output of the job is not read; rank 1 is killed",
           lambda run: _deaf_output(run, is_closed=False), EQUAL, starts=False, limit_s=100.0),
)  # fmt: skip
