"""Real ranks on this machine: a small dataset, a launcher of N processes, and the records that they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigsci_launch.checkpoints.changes import Acceptance, write_accepted
from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json
from bigsci_launch.topology import Topology
from tests.support.ports import find_port
from tests.support.waiting import wait_until

from .rank_processes import RankProcess, StartRank, rank_starter

VOCABULARY = 300
LIMIT_S = 240


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks of a run."""

    run: RunDir
    folder: AttemptDir
    processes: tuple[RankProcess, ...]

    def events(self, rank: int, kind: str | None = None) -> list[dict[str, Any]]:
        records = read_events(self.folder.event_file(rank))
        return [record for record in records if kind is None or record["kind"] == kind]

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the `step` records of the attempt, from whichever rank wrote them."""
        ranks = range(len(self.processes))
        return {record["step"]: record for rank in ranks for record in self.events(rank, "step")}

    def phase(self, rank: int) -> str | None:
        """Return the phase that a rank is in, or None before its first one."""
        beats = self.events(rank, "heartbeat") if self.folder.event_file(rank).exists() else []
        return beats[-1]["phase"] if beats else None

    def error(self, rank: int) -> dict[str, Any] | None:
        path = self.folder.error_file(rank)
        return read_json(path) if path.exists() else None

    def stopped(self) -> tuple[int, str]:
        """Return the step and message of the guard that stopped the attempt: the same on every rank."""
        errors = [self.error(rank) for rank in range(len(self.processes))]
        known = [error for error in errors if error is not None]
        assert len(known) == len(errors), f"silent: {errors}"
        assert {error["type"] for error in known} == {"GuardError"}, known[0]["traceback"]
        (message,) = {error["message"] for error in known}
        return known[0]["step"], message

    def log(self, rank: int) -> str:
        return self.folder.log_file(rank).read_text()

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-3000:]}" for rank in range(len(self.processes)))

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for all ranks and return their exit codes."""
        until = time.monotonic() + limit_s
        return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(180)

    def until(self, condition: Callable[[], bool], limit_s: float = 180) -> None:
        wait_until(condition, limit_s, evidence=self.logs)


def losses(attempt: Attempt) -> dict[int, str]:
    """Return the loss of each step, bit for bit."""
    return {step: record["loss_hex"] for step, record in attempt.steps().items()}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset of 60,000 tokens with something to learn: each token mostly determines the next one."""
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(30):
            tokens = np.empty(2000, np.int64)
            tokens[0] = draw.integers(VOCABULARY)
            noise = np.where(draw.random(2000) < 0.2, draw.integers(VOCABULARY, size=2000), 0)
            for index in range(1, 2000):
                tokens[index] = (7 * tokens[index - 1] + 3 + noise[index]) % VOCABULARY
            writer.add_document(tokens)
    return prefix


PROGRAMS = (str(Path(__file__).parent / "programs"), str(Path(__file__).parents[2] / "benchmarks"))
"""Folders of what ranks run instead of the trainer."""
Start = Callable[..., Attempt]


@pytest.fixture(scope="session")
def start_rank() -> Iterator[StartRank]:
    """`start_rank(["-m", "module"], environment, log)` starts one process."""
    with rank_starter() as starter:
        yield starter


@pytest.fixture(scope="session")
def start(dataset: Path, start_rank: StartRank) -> Iterator[Start]:
    """`start(folder, "tp=2,dp=2", training={...}, ...)` starts all ranks of a new attempt of the run in `folder`."""
    started: list[Attempt] = []

    def start_attempt(
        folder: Path, topology: str = "tp=1", module: str = "bigsci_launch.train", **sections: Any
    ) -> Attempt:
        shape = Topology.parse(topology)
        run = RunDir(folder)
        attempt = run.attempt(run.next_attempt_name())
        attempt.make()
        attempt.config.write_text(dump_resolved(make_config(shape, dataset, sections)))
        port = find_port()
        processes = tuple(
            start_in(start_rank, run, attempt, rank, shape.world_size, port, (module,))
            for rank in range(shape.world_size)
        )
        started.append(Attempt(run, attempt, processes))
        return started[-1]

    yield start_attempt
    for attempt in started:
        attempt.kill()


@pytest.fixture(scope="session")
def finish(start: Start) -> Start:
    """Like `start`, but waits until all ranks have ended with status 0."""

    def finish_attempt(*args: Any, **kwargs: Any) -> Attempt:
        attempt = start(*args, **kwargs)
        codes = attempt.wait()
        # A rank may abort while the interpreter shuts down, after all work is done and recorded (pytorch#190489).
        bad = [rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGABRT)]
        assert not bad, f"ranks {bad} of {codes} failed\n{attempt.logs()}"
        assert all(attempt.events(rank)[-1]["kind"] == "end" for rank in range(len(codes)))
        return attempt

    return finish_attempt


Scenario = tuple[str, dict[str, Any]]


class Trained(dict[str, Attempt]):
    """Attempts by name. Those of `further` are trained, all of them, when a test first looks at one."""

    def __init__(self, train: Callable[[Sequence[Scenario]], dict[str, Attempt]], further: Sequence[Scenario]) -> None:
        super().__init__()
        self._train, self._further = train, further

    def __missing__(self, name: str) -> Attempt:
        if not self._further:
            raise KeyError(name)
        further, self._further = self._further, ()
        self.update(self._train(further))
        return self[name]


@pytest.fixture(scope="session")
def train_several(dataset: Path, start_rank: StartRank) -> Callable[..., dict[str, Attempt]]:
    """`train_several(folder, "tp=2,pp=2", [("name", {section: ...}), ...])` runs attempts in turn on the same ranks.

    `name` is the name of the run; if it occurs twice, the second attempt resumes the first. The result has the keys
    `name`, and `name+` for a second attempt. Runs in `accepting` accept whatever has changed since their checkpoint.
    Those in `further` are for tests of the long tier, and are not trained without them.
    """

    def train_all(
        folder: Path,
        topology: str,
        scenarios: Sequence[Scenario],
        module: str = "several",
        accepting: Collection[str] = (),
        further: Collection[str] = (),
    ) -> dict[str, Attempt]:
        shape = Topology.parse(topology)

        def train(scenarios: Sequence[Scenario]) -> dict[str, Attempt]:
            found: dict[str, tuple[RunDir, AttemptDir]] = {}
            for name, sections in scenarios:
                run = RunDir(folder / name)
                attempt = run.attempt(run.next_attempt_name())
                attempt.make()
                attempt.config.write_text(dump_resolved(make_config(shape, dataset, sections)))
                if name in accepting:
                    write_accepted(attempt, Acceptance(everything=True))
                found[f"{name}+" if name in found else name] = run, attempt
            run = RunDir(folder / "ranks")
            first = run.attempt(run.next_attempt_name())
            first.make()
            port, program = find_port(), (module, *(str(each.path) for _, each in found.values()))
            processes = tuple(
                start_in(start_rank, run, first, rank, shape.world_size, port, program)
                for rank in range(shape.world_size)
            )
            ranks = Attempt(run, first, processes)
            try:
                codes = ranks.wait(240)
            finally:
                ranks.kill()
            assert all(code in (0, -signal.SIGABRT) for code in codes), ranks.logs()
            return {key: Attempt(run, attempt, processes) for key, (run, attempt) in found.items()}

        trained = Trained(train, [each for each in scenarios if each[0] in further])
        trained.update(train([each for each in scenarios if each[0] not in further]))
        return trained

    return train_all


def start_in(
    start_rank: StartRank,
    run: RunDir,
    attempt: AttemptDir,
    rank: int,
    world_size: int,
    port: int,
    program: Sequence[str] = ("bigsci_launch.train",),
) -> RankProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (*PROGRAMS, os.environ.get("PYTHONPATH")))),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "BSL_RUN_DIR": str(run.path),
        "BSL_ATTEMPT": attempt.name,
    }
    return start_rank(["-m", *program], environment, attempt.log_file(rank))


def make_config(shape: Topology, dataset: Path, sections: dict[str, Any]) -> RunConfig:
    """Return the config of a tiny run, overridden by `sections`."""
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "parallelism": {
            "tensor_parallel_size": shape.tp,
            "pipeline_parallel_size": shape.pp,
            "data_parallel_size": shape.dp,
        },
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "sequence_length": 32,
            "vocab_size": VOCABULARY,
        },
        "training": {
            **{"steps": 8, "micro_batch_size": 2, "global_batch_size": 16},
            # Tests of a GPU, in tests/gpu, say so.
            **{"precision": "fp32", "device": "cpu"},
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "clip_grad": 0.5},
        "data": {"prefix": str(dataset)},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(base)
