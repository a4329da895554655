"""What a run stands on: its disk, its clock, its ports, its records, the memory of its ranks."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from recovering.attack import ATTACK_STEPS, Attack, CannotRun, Expected
from recovering.attacked_run import StartedRun, events_of

EQUAL = Expected(equal=True)
UNHURT = Expected(equal=True, recovered=())
JUMP = Path(__file__).resolve().parents[2] / "faults" / "jump.c"
SECOND_SAVE_IS_TOO_LARGE = "7m"
FILL = 'mount -t tmpfs -o size=1m none /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null; exec "$@"'


def _shell(*command: str | Path) -> None:
    """Run a command that needs root.

    Raises:
        CannotRun: it is not there, or it fails.
    """
    try:
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"needs root and {command[0]}: {error}") from error


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def _disk_full(run: StartedRun) -> None:
    run.run.path.mkdir(parents=True)
    _shell("mount", "-t", "tmpfs", "-o", f"size={SECOND_SAVE_IS_TOO_LARGE}", "tmpfs", run.run.path)
    run.at_end(lambda: _unmount(run.run.path))
    run.start()
    while not events_of(run.run, "save_refused"):
        run.keep_waiting("a save that is refused")
    run.note(f"refused after step {events_of(run.run, 'save_refused')[0]['step']}")
    told = run.bsl("status", run.run.path).stdout
    run.claim("status says what the disk refuses", "not saved" in told and "No space left" in told)
    run.until(ATTACK_STEPS)
    _shell("mount", "-o", "remount,size=60m", run.run.path)


def _frozen(run: StartedRun) -> None:
    image = run.path.with_suffix(".img")
    with image.open("wb") as stream:
        stream.truncate(200 << 20)
    run.at_end(image.unlink)
    run.run.path.mkdir(parents=True)
    _shell("mkfs.ext4", "-q", "-F", image)
    _shell("mount", "-o", "loop", image, run.run.path)
    run.at_end(lambda: _unmount(run.run.path))
    (run.run.path / "lost+found").rmdir()
    run.start()
    run.until(14)
    _shell("fsfreeze", "-f", run.run.path)
    try:
        time.sleep(25)
    finally:
        _shell("fsfreeze", "-u", run.run.path)


FLIPS = """
import gc, time
from bigsci_launch.train.survive.snapshot import Memory
memories = [each for each in gc.get_objects() if type(each) is Memory]
until = time.time() + 1.5
while time.time() < until:
    for copy in [copy for memory in memories for copies in memory._copies.values() for copy in copies]:
        copy.buffer[len(copy.buffer) // 2] ^= 1
    time.sleep(0.01)
"""


def _flipped(run: StartedRun) -> None:
    run.until(16)
    for rank in (1, 2, 3):
        run.inject(rank, FLIPS)
    time.sleep(0.7)
    run.kill(run.rank_pid(0))


def _clock(run: StartedRun) -> None:
    library, file = run.path.with_suffix(".so"), run.path.with_suffix(".jump")
    _shell("cc", "-shared", "-fPIC", "-O1", "-o", library, JUMP)
    file.write_bytes(bytes(8))
    run.start(environment={"LD_PRELOAD": str(library), "JUMP_FILE": str(file), "JUMP_WORD": "tools/"})
    run.until(13)
    _jump(file, 3600)
    run.until(20)
    _jump(file, -7200)
    run.until(24)
    run.kill(run.rank_pid(1))


def _jump(file: Path, seconds: int) -> None:
    with file.open("r+b") as stream:
        stream.write(struct.pack("<q", seconds))


def _evaluation(run: StartedRun) -> None:
    run.until(20)
    while not _is_in(run, 1, "eval", 20):
        run.keep_waiting("an evaluation")
    run.kill(run.rank_pid(1))
    run.wait()
    found = {each["step"]: each["loss"] for each in events_of(run.run, "evaluation")}
    run.note(f"evaluations after steps {', '.join(map(str, sorted(found)))}")
    run.claim("there are three", len(found) == 3)


def _is_in(run: StartedRun, rank: int, phase: str, step: int) -> bool:
    beats = [each for each in events_of(run.run, "heartbeat", rank) if each["step"] >= step]
    return bool(beats) and beats[-1]["phase"] == phase


def _shared_memory(run: StartedRun) -> None:
    if os.geteuid() != 0:
        raise CannotRun("needs root: a mount namespace")
    run.start(before=("unshare", "-m", "bash", "-c", FILL, "bash"))


def _garbage(run: StartedRun) -> None:
    run.until(12)
    ports = _listening(set(run.processes()))
    draw = random.Random(5)
    texts = (b"GET / HTTP/1.0\r\n\r\n", b'{"kind": "hello"}\n', b"\n" * 50, b"[1,2]\n", b'{"slot": 0}\n', b"\xff" * 8)
    with ExitStack() as held:
        sent = 0
        for port in ports * 30:
            with suppress(OSError):
                caller = held.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                caller.sendall(draw.choice([draw.randbytes(draw.choice([1, 7, 64, 4000, 70000])), *texts]))
                sent += 1
                if draw.random() < 0.5:
                    caller.close()
        run.note(f"{sent} connections to {len(ports)} ports")
        run.kill(run.rank_pid(1))
        run.wait()


def _listening(pids: set[int]) -> list[int]:
    """Return the ports at which these processes listen."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line for line in lines if any(f"pid={pid}," in line for pid in pids)]
    return sorted({int(line.split()[3].rsplit(":", 1)[1]) for line in mine})


def _records_deleted(run: StartedRun) -> None:
    run.until(12)
    pid = run.rank_pid(2)
    shutil.rmtree(run.attempt.recover)
    shutil.rmtree(run.attempt.pids)
    run.kill(pid)


RINGLESS = {"monitor": {"ring": "none"}}
EVALUATED = {"monitor": {"eval_interval": 10, "eval_batches": 60}}
ATTACKS = (
    Attack(
        "disk-full",
        "disk",
        "22. the disk is full in the save after step 20",
        _disk_full,
        UNHURT,
        settings=RINGLESS,
        starts=False,
        limit_s=500,
    ),
    Attack(
        "frozen",
        "disk",
        "23. the file system is frozen for 25 s",
        _frozen,
        UNHURT,
        settings={"training": {"steps": 60}},
        starts=False,
    ),
    Attack(
        "flips",
        "memory",
        "24. bits flip in all snapshots of ranks 1 to 3, and rank 0 is killed",
        _flipped,
        Expected(equal=True, recovered=("checkpoint",)),
    ),
    Attack("clock", "clock", "25. clock +1 h, then -2 h, then KILL of a rank", _clock, EQUAL, starts=False),
    Attack("evaluation", "kills", "26. KILL in an evaluation", _evaluation, EQUAL, settings=EVALUATED),
    Attack("full-shm", "memory", "31. /dev/shm is full", _shared_memory, UNHURT, starts=False),
    Attack("garbage", "ports", "33. random bytes to all ports, then KILL of a rank", _garbage, EQUAL),
    Attack(
        "no-records", "disk", "34. `recover/` and `pids/` are deleted, then KILL of a rank", _records_deleted, EQUAL
    ),
)
