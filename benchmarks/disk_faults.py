"""What a run of `bsl train` loses, and what `bsl` says, when its file system or its clock fails. Needs root.

    unshare --mount python3 benchmarks/disk_faults.py [NAME ...]
    unshare --mount python3 benchmarks/disk_faults.py server_gone --root DIR --stop COMMAND --back COMMAND

`server_gone` without a server of yours, and `read_write`, run in a user-mode Linux with an NFS server (packages
user-mode-linux, nfs-kernel-server, nfs-common, kmod). Nothing of this machine is changed there.

In a mount namespace of its own, because another process that copies the mounts of this machine would hold its disks.

Two gloo ranks train a tiny GPT and save every 10 steps. In the middle, the fault is done; after it, the run is
submitted again until it is finished. Its losses and its last checkpoint must be those of the undisturbed run. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ranks import draw_corpus
from recovering.cases import Layout
from recovering.injured_run import BSL, write_run_file

from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import RunDir

STEPS, SAVE_EVERY, FAULT_AT = 60, 10, 23
OUTAGE_S, LIMIT_S, LEAVES_S, POLL_S = 60.0, 900.0, 60.0, 0.1
SMALL_QUOTA_KIB, QUOTA_KIB = 300, 6000
PROJECT = "7"
NO_ROOM_FOR_ROOT = ("setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource")
"""root may exceed quotas, but not without this capability."""
FAULTS_FOLDER = Path(__file__).resolve().parent / "faults"
STOP_NFS, START_NFS = "rpc.nfsd 0", "rpc.nfsd --no-udp -N 3 4"
ROW = "row "
"""What a line begins with in which a guest says a row."""
SLOW = {"faults": [{"kind": "slow", "rank": 0, "step": FAULT_AT, "seconds": 0.6}]}
"""Steps that last long enough to look at them."""
CLOCKS = {
    "launcher": "scheduler.local",
    "runner": "rank_runner.py",
    "rank": "bigsci_launch.train",
    "watcher": "--agent",
}
"""A word in the first arguments of each kind of process."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a run: the exit code of the attempt with the fault, what is lost, and what `bsl` said."""

    fault: str
    exit_code: int
    lost: str
    said: str


@dataclass(slots=True)
class Trial:
    """A run whose file system or clock fails. `before` starts its commands, such as `unshare`."""

    folder: Path
    root: Path
    name: str
    before: tuple[str, ...] = ()
    more: dict[str, str] | None = None
    survive: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        return RunDir(self.root / self.name)

    def write(self) -> Path:
        changes = {
            "run": {"root": str(self.root)},
            "training": {"steps": STEPS},
            "checkpoint": {"save_interval": SAVE_EVERY},
            **self.changes,
        }
        layout = Layout(1, 1, 2, "fp32", 0.1)
        corpus = self.folder / "corpus"
        return write_run_file(self.folder, self.name, layout, corpus, {} if self.survive else None, changes)

    def start(self) -> subprocess.Popen[str]:
        how = ("--wait",) if "slurm" in self.changes else ("--local",)
        command = [*self.before, sys.executable, "-c", BSL, "submit", str(self.write()), *how]
        environment = {**os.environ, **(self.more or {})}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
        )

    def ask(self, *arguments: str) -> str:
        """Return the exit code and the last lines of what another `bsl` says now."""
        begun = time.monotonic()
        known = {**os.environ, **{name: value for name, value in (self.more or {}).items() if name == "SLURM_CONF"}}
        command = [sys.executable, "-c", BSL, *arguments]
        done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
        words = [line for line in (done.stdout + done.stderr).splitlines() if line.split(" ")[0] in SAYINGS]
        return f"`{arguments[0]}` {done.returncode} after {time.monotonic() - begun:.0f} s: {'; '.join(words)}"

    def status(self) -> str:
        return self.ask("status", str(self.run.path))


SAYINGS = ("state", "ended", "cause", "watcher", "slowest", "error:", "hint:", "finding")


def wait_for_step(trial: Trial, step: int) -> None:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and max(losses(trial.run), default=0) < step:
        time.sleep(POLL_S)


def losses(run: RunDir) -> dict[int, set[float]]:
    """Return the losses of every step, as all attempts have recorded them."""
    found: dict[int, set[float]] = {}
    for path in run.path.glob("attempts/*/events/rank-*.jsonl"):
        for event in read_events(path):
            if event["kind"] == "step":
                found.setdefault(event["step"], set()).add(event["loss"])
    return found


def end(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=LIMIT_S)
    return process.returncode


def finish(trial: Trial) -> None:
    """Submit the run again until it is finished."""
    for _ in range(3):
        if not (trial.run.checkpoints / f"global_step{STEPS}").is_dir():
            end(trial.start())


def lost(trial: Trial, sound: Trial) -> str:
    """Return what differs from the undisturbed run, and what is left half-written."""
    mine, theirs = losses(trial.run), losses(sound.run)
    wrong = [step for step in mine if mine[step] != theirs.get(step)]
    unrecorded = sorted(set(theirs) - set(mine))
    folder = f"global_step{STEPS}"
    same = _contents(trial.run.checkpoints / folder) == _contents(sound.run.checkpoints / folder) != {}
    words = [f"losses of {len(wrong)} steps differ"] if wrong else []
    words += [f"the records of {len(unrecorded)} steps"] if unrecorded else []
    words += [] if same else ["the last checkpoint is another one"]
    words += [f"left: {path.name}" for path in trial.run.checkpoints.glob(".*")]
    return "; ".join(words) or "nothing"


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


@contextmanager
def loop_mount(folder: Path, options: Sequence[str] = (), features: Sequence[str] = ()) -> Iterator[Path]:
    """Mount an ext4 of its own. Raises CalledProcessError, with the words of `mount`, where it cannot be had."""
    image, place = folder / "image", folder / "disk"
    image.write_bytes(b"")
    os.truncate(image, 256 << 20)
    place.mkdir(exist_ok=True)
    run_quietly("mkfs.ext4", "-q", "-F", "-e", "remount-ro", *features, image)
    run_quietly("mount", "-o", ",".join(("loop", *options)), image, place)
    try:
        yield place
    finally:
        unmount(place)


def unmount(place: Path) -> None:
    """Unmount a disk. The watcher of a run may need some seconds to leave it."""
    until = time.monotonic() + LEAVES_S
    while subprocess.run(("umount", str(place)), check=False, capture_output=True).returncode:
        if time.monotonic() > until:
            run_quietly("umount", "--lazy", place)
            return
        time.sleep(1)


def run_quietly(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def read_only(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """The disk makes itself read-only, as ext4 does after an error; then it is mounted again."""
    for survive in (False, True):
        name = "survive" if survive else "plain"
        with loop_mount(folder) as disk:
            trial = Trial(folder, disk, name, survive=survive)
            process = trial.start()
            wait_for_step(trial, FAULT_AT)
            device = Path(subprocess.check_output(("findmnt", "-no", "SOURCE", str(disk)), text=True).strip()).name
            Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
            code = end(process)
            said = [trial.status(), trial.ask("submit", str(folder / f"{name}.yaml"), "--local")]
            unmount(disk)
            subprocess.run(("e2fsck", "-fy", str(folder / "image")), check=False, capture_output=True)
            run_quietly("mount", "-o", "loop", folder / "image", disk)
            finish(trial)
            yield Row(f"read-only, {name}", code, lost(trial, sound), " / ".join(said))


def quota(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """A project quota that ends during the submission, and one that ends in a save."""
    features = ("-O", "quota", "-E", "quotatype=prjquota")
    with loop_mount(folder, ("prjquota",), features) as disk:
        place = disk / "runs"
        place.mkdir()
        run_quietly("chattr", "-p", PROJECT, "+P", place)
        trial = Trial(folder, place, "quota", NO_ROOM_FOR_ROOT)
        for limit, moment in ((SMALL_QUOTA_KIB, "in the submission"), (QUOTA_KIB, "in a save")):
            run_quietly("setquota", "-P", PROJECT, "0", str(limit), "0", "0", disk)
            code, said = end(trial.start()), trial.status()
            run_quietly("setquota", "-P", PROJECT, "0", "0", "0", "0", disk)
            if limit == QUOTA_KIB:
                finish(trial)
            left = "nothing" if not trial.run.path.exists() else lost(trial, sound)
            yield Row(f"EDQUOT {moment}", code, left, said)


def full_memory_disk(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """/dev/shm is full, for the processes of this run only."""
    fill = 'mount -t tmpfs -o size=1m none /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null; exec "$@"'
    trial = Trial(folder, folder / "runs", "shm", ("unshare", "-m", "bash", "-c", fill, "bash"))
    yield Row("/dev/shm is full", end(trial.start()), lost(trial, sound), trial.status())


def clock(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """The clock of one kind of process is one hour ahead, and then one hour behind."""
    for kind, word in CLOCKS.items():
        more = preloaded(folder, f"{kind}.jump", JUMP_WORD=word)
        trial = Trial(folder, folder / "runs", f"clock-{kind}", more=more, changes=SLOW)
        yield from jumps(trial, sound, folder / f"{kind}.jump", f"clock of the {kind}")


def clock_of_node(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """The clock of one node of a Slurm job does: that of every process of the job there. It needs the mini cluster."""
    more = preloaded(folder, "node.jump", JUMP_NODE="1")
    variables = {name: {"value": value, "reason": "a clock that jumps"} for name, value in more.items()}
    one = {"OMP_NUM_THREADS": {"value": "1", "reason": "all nodes share the cores of one machine"}}
    site = {"description": "two nodes", "scheduler": "slurm", "ranks_per_node": 1, "environment": {**one, **variables}}
    (folder / "site.yaml").write_text(json.dumps(site))
    changes = {**SLOW, "slurm": {"site": str(folder / "site.yaml"), "nodes": 2, "time_limit": "00:10:00"}}
    with two_nodes(folder) as environment:
        for survive in (False, True):
            (folder / "node.jump").write_bytes(bytes(8))
            name = f"node-{'survive' if survive else 'plain'}"
            trial = Trial(folder, folder / "runs", name, more=environment, changes=changes, survive=survive)
            yield from jumps(trial, sound, folder / "node.jump", f"clock of one of two nodes, {name}")


def preloaded(folder: Path, file: str, **chosen: str) -> dict[str, str]:
    """Return variables that let the clock of the chosen processes follow `file`."""
    library = folder / "jump.so"
    run_quietly("cc", "-shared", "-fPIC", "-O1", "-o", library, FAULTS_FOLDER / "jump.c")
    (folder / file).write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "JUMP_FILE": str(folder / file), **chosen}


def jumps(trial: Trial, sound: Trial, file: Path, what: str) -> Iterator[Row]:
    process, said = trial.start(), []
    for step, shift in ((FAULT_AT + 2, 3600), (2 * FAULT_AT, -3600)):
        wait_for_step(trial, step)
        with file.open("r+b") as stream:
            stream.write(struct.pack("<q", shift))
        time.sleep(3)
        said.append(f"{shift:+d} s: {trial.status()}")
    yield Row(f"{what}: +1 h, -1 h", end(process), lost(trial, sound), " / ".join(said))


@contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a Slurm with two nodes, each with namespaces of its own."""
    with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as short:
        environment = {"BSL_CLUSTER_DIR": f"{short}/cluster"}
        command = [sys.executable, "-c", BSL, "cluster"]
        known = {**os.environ, **environment}
        up = subprocess.run([*command, "up", "--nodes", "2", "--isolated"], env=known, capture_output=True, text=True)
        if up.returncode:
            raise OSError(up.stderr)
        try:
            yield {**environment, "SLURM_CONF": up.stdout.partition("SLURM_CONF=")[2].strip().strip("'")}
        finally:
            subprocess.run([*command, "down"], env=known, check=False, capture_output=True)


def two_hosts(folder: Path, sound: Trial, _options: argparse.Namespace) -> Iterator[Row]:
    """A second host, which has the same files and other processes, asks, and submits the run that trains."""
    trial = Trial(folder, folder / "runs", "two")
    process = trial.start()
    wait_for_step(trial, FAULT_AT)
    there = ("unshare", "-u", "-p", "-f", "--mount-proc", "bash", "-c", 'hostname elsewhere; exec "$@"', "bash")
    command = [*there, sys.executable, "-c", BSL]
    asked = subprocess.run([*command, "status", str(trial.run.path)], capture_output=True, text=True, check=False)
    second = subprocess.run(
        [*command, "submit", str(folder / "two.yaml"), "--local"], capture_output=True, text=True, check=False
    )
    code = end(process)
    state = next((line for line in asked.stdout.splitlines() if line.startswith("state")), "")
    number = len(trial.run.attempts())
    said = (
        f"{state} / `submit` {second.returncode}: {number} attempts of the run trained at once" if number > 1 else state
    )
    yield Row("a second host submits", code, lost(trial, sound), said)


def server_gone(folder: Path, sound: Trial, options: argparse.Namespace) -> Iterator[Row]:
    """The server of the file system is away for a minute: of `--root`, else an NFS server in a guest."""
    if not options.in_guest and not options.root:
        yield from in_guest("server_gone")
        return
    places = {"hard": Path("/tmp/hard"), "soft": Path("/tmp/soft")} if options.in_guest else {"given": options.root}
    stop, back = (STOP_NFS, START_NFS) if options.in_guest else (options.stop, options.back)
    for kind, place in places.items():
        for survive in (False, True):
            trial = Trial(folder, place, f"{kind}-{'survive' if survive else 'plain'}", survive=survive)
            process = trial.start()
            wait_for_step(trial, FAULT_AT)
            subprocess.run(shlex.split(stop), check=True)
            returns = subprocess.Popen(["bash", "-c", f"sleep {OUTAGE_S}; {back}"])
            said = trial.status()
            returns.wait()
            code = end(process)
            after = trial.status()
            finish(trial)
            yield Row(f"server away for {OUTAGE_S:.0f} s, {trial.name}", code, lost(trial, sound), f"{said} / {after}")


def read_write(folder: Path, sound: Trial, options: argparse.Namespace) -> Iterator[Row]:
    """A disk is read-only for ten seconds and then writable again, without being unmounted. In a guest: the kernel does
    that to all its disks at once."""
    if not options.in_guest:
        yield from in_guest("read_write")
        return
    for survive in (False, True):
        trial = Trial(folder, Path("/tmp/served"), f"rw-{'survive' if survive else 'plain'}", survive=survive)
        process = trial.start()
        wait_for_step(trial, FAULT_AT)
        Path("/proc/sysrq-trigger").write_text("u")
        time.sleep(10)
        said = trial.status()
        run_quietly("mount", "-o", "remount,rw", "/tmp/served")
        code = end(process)
        after = trial.status()
        finish(trial)
        yield Row(f"read-only for 10 s, {trial.name}", code, lost(trial, sound), f"{said} / {after}")


def in_guest(name: str) -> Iterator[Row]:
    """Do a fault in a user-mode Linux, whose kernel this process may break: its files are this machine's, read-only."""
    words = ["linux.uml", "mem=6G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]
    words += ["con=null", "con0=fd:0,fd:1", f"init={FAULTS_FOLDER / 'guest.sh'}"]
    words += [f"FAULTS={name}", f"PYTHON={sys.executable}", f"PROGRAM={Path(__file__).resolve()}"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as guest:
        assert guest.stdout is not None
        for line in guest.stdout:
            if line.startswith(ROW):
                yield Row(**json.loads(line.removeprefix(ROW)))
            elif "rror" in line:
                print(line.rstrip(), file=sys.stderr)


Fault = Callable[[Path, Trial, argparse.Namespace], Iterator[Row]]
FAULTS: dict[str, Fault] = {
    each.__name__: each
    for each in (read_only, read_write, quota, full_memory_disk, clock, clock_of_node, two_hosts, server_gone)
}


def rows(name: str, sound: Trial, options: argparse.Namespace) -> Iterator[Row]:
    """Do one fault; where this machine cannot, its own words say why."""
    with tempfile.TemporaryDirectory(prefix="bsl-fault-") as folder:
        draw_corpus(Path(folder) / "corpus")
        try:
            yield from FAULTS[name](Path(folder), sound, options)
        except (OSError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            yield Row(name, -1, "not tried", " ".join(str(words).split()))


def main() -> None:
    parser = argparse.ArgumentParser(description="What is lost and said when the file system or the clock fails.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(FAULTS)}")
    parser.add_argument("--root", type=Path, help="a folder on the server that is stopped")
    parser.add_argument("--stop", help="the command that stops the server")
    parser.add_argument("--back", help="the command that brings it back")
    parser.add_argument("--in-guest", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bsl-sound-") as name:
        folder = Path(name)
        draw_corpus(folder / "corpus")
        sound = Trial(folder, folder / "runs", "sound")
        said, _ = (process := sound.start()).communicate(timeout=LIMIT_S)
        if process.returncode:
            sys.exit(f"error: the undisturbed run failed: {said}")
        if not options.in_guest:
            print("| fault | exit code | lost | said |\n|---|---|---|---|", flush=True)
        for fault in options.names or FAULTS:
            for row in rows(fault, sound, options):
                text = f"| {row.fault} | {row.exit_code} | {row.lost} | {row.said} |"
                print(ROW + json.dumps(asdict(row)) if options.in_guest else text, flush=True)


if __name__ == "__main__":
    main()
