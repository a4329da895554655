"""break_clusters.py DIRECTORY HOW ARGV: break `bsl cluster up ARGV` in many ways, run `down` each time, list the rest.

Runs as PID 1 of a PID namespace with its own network and mounts, so everything else in there was left by `up`.
HOW: `effects`: SIGKILL before each of its side effects in turn, until one `up` survives.
     `moments`: SIGKILL after 0.05 s, 0.1 s, ...
     `downs`: a whole cluster with a running job, and SIGKILL before one of the side effects of a first `down`.
     `few-downs`: the same before a signal in the middle, and the first file that it deletes.
     `failures`: a slurmd that ends at once, and Ctrl-C while `up` waits for nodes: `up` itself removes its leftovers.
Prints one JSON line per try: what existed before the last `down`, and after it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType

DIE_AT = Path(__file__).with_name("die_at.py")
PERIOD_S = 0.05
LAST_MOMENT_S = 1.5
WAIT_S = 300.0
# The first side effects of a `down` are the signals to each process; then every deleted file follows.
FEW = (12, 24)


def main() -> None:
    directory, how, argv = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.environ["BSL_CLUSTER_DIR"] = str(directory / "c")
    clean = look_around(directory)
    ways = {"effects": break_at_effects, "moments": break_at_moments, "downs": break_downs, "failures": fail}
    tries = break_downs(argv, FEW) if how == "few-downs" else ways[how](argv)
    for name, returncode in tries:
        broken = look_around(directory)
        done = run_bsl("cluster", "down")
        left = look_around(directory)
        print(
            json.dumps(
                {
                    "try": name,
                    "returncode": returncode,
                    "broken": differences(clean, broken),
                    "down": done.returncode,
                    "said": done.stderr,
                    "left": differences(clean, left),
                }
            ),
            flush=True,
        )


def break_at_effects(argv: list[str]) -> Iterator[tuple[str, int]]:
    for number in count():
        returncode = run_dying(number, "cluster", "up", *argv)
        yield f"effect {number}", returncode
        if returncode != -signal.SIGKILL:
            return


def break_downs(argv: list[str], numbers: Iterable[int] | None = None) -> Iterator[tuple[str, int]]:
    for number in numbers or chain(range(0, 24, 4), count(24, 25)):
        run_bsl("cluster", "up", *argv)
        start_job()
        returncode = run_dying(number, "cluster", "down")
        yield f"effect {number} of down", returncode
        if returncode != -signal.SIGKILL:
            return


def start_job() -> None:
    """Start a job whose step has a child process, so that there are processes of every kind."""
    conf = Path(os.environ["BSL_CLUSTER_DIR"]) / "slurm.conf"
    script = "#!/bin/sh\nsrun sh -c 'sleep 999 & sleep 999; true'\n"
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    subprocess.run(["sbatch", "-o", "/dev/null"], input=script, text=True, env=environment, check=True)
    wait_until(lambda: list(living()).count("sleep") >= 2)


def fail(argv: list[str]) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        slurmd = Path(folder) / "slurmd"
        path = {"PATH": f"{folder}:{os.environ['PATH']}"}
        slurmd.write_text("#!/bin/sh\necho no such luck >&2; exit 7\n")
        slurmd.chmod(0o755)
        yield "slurmd ends", run_bsl("cluster", "up", *argv, environment=path).returncode
        slurmd.write_text("#!/bin/sh\nexec sleep 999\n")
        up = subprocess.Popen([*bsl(), "cluster", "up", *argv], env={**os.environ, **path}, stderr=subprocess.DEVNULL)
        wait_until(lambda: "sleep" in living() and "slurmctld" in living())
        up.send_signal(signal.SIGINT)
        yield "Ctrl-C", up.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("it did not come true in time")
        time.sleep(0.02)


def run_dying(number: int, *argv: str) -> int:
    return subprocess.run([sys.executable, str(DIE_AT), str(number), *argv], capture_output=True).returncode


def break_at_moments(argv: list[str]) -> Iterator[tuple[str, int]]:
    for number in range(1, int(LAST_MOMENT_S / PERIOD_S)):
        up = subprocess.Popen([*bsl(), "cluster", "up", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            up.wait(number * PERIOD_S)
        except subprocess.TimeoutExpired:
            up.kill()
        yield f"{number * PERIOD_S:.2f} s", up.wait()
        if up.returncode == 0:
            return


def bsl() -> list[str]:
    return [sys.executable, "-m", "bigsci_launch"]


def run_bsl(*argv: str, environment: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*bsl(), *argv], capture_output=True, text=True, env={**os.environ, **environment})


def look_around(directory: Path) -> dict[str, list[str]]:
    reap()
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    return {
        "processes": sorted(living()),
        "interfaces": sorted(link["ifname"] for link in links),
        "mounts": sorted(Path("/proc/self/mountinfo").read_text().splitlines()),
        "files": sorted(str(path) for path in directory.iterdir()),
    }


def reap() -> None:
    """Reap the daemons, which this process inherits as PID 1 of the namespace."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def living() -> Iterator[str]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                text = (path / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if text.rpartition(")")[2].split()[0] not in "ZX":
                yield text.rpartition(")")[0].partition("(")[2]


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    changed = {key: sorted(set(after[key]) ^ set(before[key])) for key in before}
    # A mount of the machine vanishes from this namespace too when its folder is removed there.
    changed["mounts"] = sorted(set(after["mounts"]) - set(before["mounts"]))
    return {key: value for key, value in changed.items() if value}


main()
