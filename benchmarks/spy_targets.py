"""Runs three ranks under every Python and in every container that this machine has, and asks `bsl spy` about them.

    python benchmarks/spy_targets.py docs/measurements/spy-targets.md [DIRECTORY_OF_ANOTHER_SYSTEM ...]

Rank 2 sleeps, the others wait for a lock. Namespaces, and other systems, need root: each is entered with chroot in a
mount namespace of its own, such as those that slurm/minicluster/with-slurm.sh makes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK = """
import os, threading, time
def load_batch(): time.sleep(600)
lock = threading.Lock()
def wait_for_peers(): lock.acquire(); lock.acquire()
open("ready-" + os.environ["RANK"], "w").close()
load_batch() if os.environ["RANK"] == "2" else wait_for_peers()
"""
NOT_RUN = {
    "3.13t, 3.14t (free-threaded)": "no Python of this kind on this machine",
    "musl": "no Python of this kind on this machine",
    "aarch64": "another processor",
    "conda, uv": "their interpreters cannot be fetched here; what becomes of a folder under a rank is in the table",
}
HEAD = """# Which ranks `bsl spy` can read

{date}, Linux {kernel}, load {load:.0f} on {cores} cores, by `benchmarks/spy_targets.py`. Each row is three ranks:
rank 2 sleeps in `load_batch`, the others wait for a lock. *Found* means: the answer names rank 2, as class H31. *Seen
asleep* is for how long a thread of rank 2 had not run, by the kernel.

"""
COLUMNS = """| ranks run | read | found | seen asleep | `bsl` says of what it cannot read |
| --- | --- | --- | --- | --- |"""
LATE = "no answer in"
AGAIN = f"Repeated, where py-spy gave no answer in time on the loaded machine:\n\n{COLUMNS}"
TAIL = """
{found} of {all} rows found the sleeping rank{more}. Not run:

| ranks run | why not |
| --- | --- |"""
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """How ranks are started in a folder, and what happens to their files once they run."""

    name: str
    python: str
    before: Sequence[str] = ()
    prepare: Change = lambda folder: None
    change: Change = lambda folder: None


def version_of(python: str) -> str:
    done = subprocess.run([python, "-c", "import sys; print(sys.version.split()[0])"], capture_output=True, text=True)
    return done.stdout.strip()


def local_pythons() -> Iterator[Target]:
    found = Path.home().glob(".pyenv/versions/3.*/bin/python")
    for python in sorted(found, key=lambda path: [int(part) for part in path.parts[-3].split(".")]):
        yield Target(f"Python {version_of(str(python))}, libpython apart", str(python))
    if Path("/usr/bin/python3").exists():
        yield Target(f"Python {version_of('/usr/bin/python3')}, libpython in the executable", "/usr/bin/python3")


def in_namespaces(python: str) -> Iterator[Target]:
    pid = ("--pid", "--fork", "--kill-child", "--mount-proc")
    yield Target("in a PID namespace", python, ("unshare", *pid))
    yield Target("in a user and a PID namespace", python, ("unshare", "--user", "--map-root-user", *pid))


def in_system(root: Path, folder_in_it: str = "mnt") -> Target:
    enter = f'mount --rbind "$PWD" {root}/{folder_in_it}; mount -t proc proc {root}/proc; exec chroot {root} "$@"'
    python = next(path.name for path in sorted((root / "usr/bin").glob("python3.*")) if path.name[8:].isdigit())
    before = ("unshare", "--mount", "sh", "-c", enter, "sh", "sh", "-c", f'cd /{folder_in_it}; "$@"', "sh")
    return Target(f"{python} of another system, by chroot", f"/usr/bin/{python}", before)


def with_changed_files(python: str) -> Iterator[Target]:
    """A copy of the interpreter that is deleted, moved or loses its library while ranks run it."""
    real = Path(python).resolve()
    library = next((real.parent.parent / "lib").glob("libpython3.*.so.1.0"), None)

    def copy(folder: Path) -> None:
        (folder / "env").mkdir()
        shutil.copy(real, folder / "env" / "python")
        if library is not None:
            shutil.copy(library, folder / "env" / library.name)

    path = "./env/python"
    of = ("env", f"PYTHONHOME={real.parent.parent}", "LD_LIBRARY_PATH=env")
    yield Target("environment deleted", path, of, copy, lambda folder: shutil.rmtree(folder / "env"))
    yield Target("environment moved", path, of, copy, lambda folder: (folder / "env").rename(folder / "moved"))
    yield Target("executable deleted", path, of, copy, lambda folder: (folder / "env" / "python").unlink())
    if library is not None:
        name = library.name
        yield Target("libpython deleted", path, of, copy, lambda folder: (folder / "env" / name).unlink())


def ask(target: Target) -> dict[str, Any]:
    """Start the ranks of a target, and return what `bsl spy` answers, with the seconds that rank 2 was seen asleep."""
    with tempfile.TemporaryDirectory(prefix="bsl-", dir="/tmp") as made:
        folder = Path(made)
        (folder / "rank.py").write_text(RANK)
        target.prepare(folder)
        line = f"for r in 0 1 2; do RANK=$r WORLD_SIZE=3 {target.python} rank.py & done; wait"
        argv = [*target.before, "sh", "-c", line]
        started = subprocess.Popen(argv, cwd=folder, start_new_session=True)
        try:
            wait_for_ranks(folder, started)
            target.change(folder)
            return spy(started.pid, folder)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def wait_for_ranks(folder: Path, started: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while len(list(folder.glob("ready-*"))) < 3:
        if started.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the ranks do not start: {started.args!r}")
        time.sleep(0.1)
    time.sleep(5)


def spy(launcher: int, folder: Path) -> dict[str, Any]:
    options = ["spy", "--local", "--pid", str(launcher), "--output", str(folder / "evidence"), "--json"]
    argv = [sys.executable, "-m", "bigsci_launch", *options]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    document: dict[str, Any] = json.loads(done.stdout)
    document["asleep_s"] = max(map(slept_s, (folder / "evidence").glob("nodes/*.json")), default=0.0)
    return document


def slept_s(node: Path) -> float:
    [rank] = (each for each in json.loads(node.read_text())["ranks"] if each["rank"] == 2)
    return max(map(float, (rank["samples"][-1].get("thread_idle_s") or {}).values()), default=0.0)


def row(target: Target, answer: dict[str, Any]) -> str:
    verdict, coverage = answer["verdict"], answer["coverage"]
    named = verdict["suspects"] or verdict["look_first"]
    is_found = verdict["class"] == "H31" and bool(named) and named[0]["rank"] == 2
    whys = dict.fromkeys(
        re.sub(r"/tmp/[^/]*/| \(state .*?\)", "", each["why"]) for each in coverage["ranks_unreadable"]
    )
    asleep = f"{answer['asleep_s']:.0f} s" if answer["asleep_s"] else "not known"
    found = "yes" if is_found else "**no**"
    return f"| {target.name} | {coverage['ranks_read']} of 3 | {found} | {asleep} | {'; '.join(whys) or '-'} |"


def write_page(page: Path, rows: Sequence[str], again: Sequence[str], load: float) -> None:
    head = HEAD.format(date=time.strftime("%Y-%m-%d"), kernel=platform.release(), load=load, cores=os.cpu_count())
    repeated = ["", AGAIN, *again] if again else []
    found = sum("| yes |" in line for line in rows), sum("| yes |" in line for line in again)
    tail = TAIL.format(found=found[0], all=len(rows), more=f", and {found[1]} more when repeated" if again else "")
    not_run = [f"| {name} | {why} |" for name, why in NOT_RUN.items()]
    page.write_text("\n".join([head + COLUMNS, *rows, *repeated, tail, *not_run]) + "\n")


def main() -> None:
    page, *systems = map(Path, sys.argv[1:])
    targets = [*local_pythons(), *map(in_system, systems), *in_namespaces(sys.executable)]
    targets += with_changed_files(sys.executable)
    load = os.getloadavg()[1]
    rows = [row(target, ask(target)) for target in targets]
    late = [target for target, line in zip(targets, rows, strict=True) if LATE in line]
    write_page(page, rows, [row(target, ask(target)) for target in late], load)


if __name__ == "__main__":
    main()
