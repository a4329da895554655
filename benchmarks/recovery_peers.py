"""How long the same job does not train after SIGKILL to a rank, with `survive` and with what restarts it instead.

    python benchmarks/recovery_peers.py [--repeats 5] [--ft-launcher FILE] [--page docs/measurements/recovery.md]

Four gloo ranks (pp 2, dp 2, bf16, dropout) train a tiny GPT and save every sixth step. One rank is killed in step 10,
each time another. Measured: from the kill to the first step that is finished afterwards, and to the first that had not
been finished before.

- `survive`: `bsl submit` with `survive: true`.
- `torchrun`: torchrun starts all ranks again (`--max-restarts`).
- `ft_launcher`: so does the launcher of nvidia-resiliency-ext, if `--ft-launcher` says where it is.
- `attempt`: the attempt ends, and `bsl submit` starts the next one at once.

All but the first resume from the last checkpoint on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ranks import draw_corpus
from recovering.cases import LAYOUTS, SAVE_EVERY
from recovering.injured_run import BSL, steps_of, write_run_file

from bigsci_launch.config.load import dump_resolved, load_run
from bigsci_launch.runs.layout import RunDir, read_json

LAYOUT = LAYOUTS[0]
KILLED_IN = SAVE_EVERY + 4
LIMIT_S = 90.0
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"


@dataclass(frozen=True, slots=True)
class Interruption:
    """Seconds from a kill to the next finished step, and to the first step that was new; steps done again."""

    finished_s: float
    new_s: float
    num_again: int


class Stand:
    """A folder with a dataset, in which jobs run one after the other."""

    def __init__(self, folder: Path, ft_launcher: Path | None) -> None:
        self._folder, self._ft_launcher = folder, ft_launcher
        self._corpus = folder / "corpus"
        draw_corpus(self._corpus)

    def run_file(self, name: str, survive: bool) -> Path:
        return write_run_file(self._folder, name, LAYOUT, self._corpus, {} if survive else None)

    def run(self, name: str) -> RunDir:
        return RunDir(self._folder / "runs" / name)

    @contextlib.contextmanager
    def survive(self, name: str) -> Iterator[None]:
        with _started(submit(self.run_file(name, survive=True))):
            yield

    @contextlib.contextmanager
    def torchrun(self, name: str) -> Iterator[None]:
        with self._elastic(name, [sys.executable, "-m", "torch.distributed.run", "--standalone"]):
            yield

    @contextlib.contextmanager
    def ft_launcher(self, name: str) -> Iterator[None]:
        with self._elastic(name, [str(self._ft_launcher), "--ignore-missing-fault-tol-cfg"]):
            yield

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Submit again whenever an attempt has ended."""
        loop = 'until "$@"; do sleep 0.1; done'
        with _started(["bash", "-c", loop, "bash", *submit(self.run_file(name, survive=False))]):
            yield

    @contextlib.contextmanager
    def _elastic(self, name: str, launcher: list[str]) -> Iterator[None]:
        config = load_run(self.run_file(name, survive=False), ()).config
        attempt = self.run(name).attempt("0001")
        attempt.make()
        attempt.config.write_text(dump_resolved(config))
        place = {"BSL_RUN_DIR": str(self.run(name).path), "BSL_ATTEMPT": attempt.name, "OMP_NUM_THREADS": "1"}
        # Otherwise torchrun 2.13 gives restarted ranks a store with the addresses of those that are gone.
        place["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        options = ["--nproc-per-node", str(LAYOUT.ranks), "--max-restarts", "3", "--monitor-interval", "0.1"]
        with _started([*launcher, *options, "-m", "bigsci_launch.train"], place):
            yield


def submit(path: Path) -> list[str]:
    return [sys.executable, "-c", BSL, "submit", str(path), "--local"]


@contextlib.contextmanager
def _started(command: list[str], more: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **(more or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(start: Callable[[str], contextlib.AbstractContextManager[None]], run: RunDir, rank: int) -> Interruption:
    """Start a job, kill a rank, and measure until a step is finished that had not been finished before."""
    until = time.monotonic() + LIMIT_S
    with start(run.name):
        while not _losses(run, KILLED_IN - 1):
            _wait(until)
        killed = time.time()
        os.kill(_pid_of(run, rank), signal.SIGKILL)
        done = max(step for step, moment in _steps(run) if moment < killed)
        while not any(step > done for step, _ in _steps(run)):
            _wait(until)
        after = [(step, moment) for step, moment in _steps(run) if moment > killed + 0.02]
    finished = min(moment for step, moment in after)
    new = min(moment for step, moment in after if step > done)
    return Interruption(finished - killed, new - killed, sum(step <= done for step, _ in after))


def _wait(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError("the job did not continue")
    time.sleep(0.005)


def _losses(run: RunDir, step: int) -> bool:
    return any(each >= step for each, _ in _steps(run))


def _steps(run: RunDir) -> list[tuple[int, float]]:
    """Return the finished steps of all attempts of a run, each with its moment."""
    records = [each for attempt in run.attempts() for each in steps_of(attempt, LAYOUT)] if run.path.exists() else []
    return [(int(each["step"]), float(each["time"])) for each in records]


def _pid_of(run: RunDir, rank: int) -> int:
    """Return the process of a rank, from the record that it writes itself when it starts."""
    attempt = run.attempts()[-1]
    if attempt.pid_file(rank).exists():
        return int(read_json(attempt.pid_file(rank))["pid"])
    from bigsci_launch.runs.events import read_events

    return int([each for each in read_events(attempt.event_file(rank)) if each["kind"] == "start"][-1]["pid"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ft-launcher", type=Path, help="the ft_launcher of an environment that has this package too")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its marks")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery-peers-"))
    stand = Stand(folder, options.ft_launcher)
    ways = {"survive": stand.survive, "torchrun": stand.torchrun}
    ways |= {"ft_launcher": stand.ft_launcher} if options.ft_launcher else {}
    ways |= {"attempt": stand.attempt}
    found: dict[str, list[Interruption]] = {name: [] for name in ways}
    # In turn, so that whatever else the machine does meets all of them alike.
    for number in range(options.repeats):
        for name, way in ways.items():
            run = stand.run(f"{name}-{number}")
            found[name].append(measure(way, run, number % LAYOUT.ranks))
            print(name, found[name][-1], flush=True)
    text = table_of(found)
    print(text)
    if options.page:
        page = options.page.read_text()
        before, rest = page.split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    shutil.rmtree(folder)


def table_of(found: dict[str, list[Interruption]]) -> str:
    lines = ["| | kills | first finished step, p50 | largest | first new step, p50 | largest | steps done again |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, each in found.items():
        finished, new = sorted(one.finished_s for one in each), sorted(one.new_s for one in each)
        half = len(each) // 2
        again = max(one.num_again for one in each)
        lines.append(
            f"| {name} | {len(each)} | {finished[half]:.1f} s | {finished[-1]:.1f} s | {new[half]:.1f} s | "
            f"{new[-1]:.1f} s | {again} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
