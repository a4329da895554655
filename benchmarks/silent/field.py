"""Makes the runs: datasets, run folders, the checks of `bsl submit`, and ranks that train many attempts in turn."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
from click.testing import CliRunner
from ranks import start_ranks

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.guards import GuardsSection
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.data.indexed import IndexedWriter
from bigsci_launch.errors import BslError
from bigsci_launch.launch.claim import identity
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, write_json
from bigsci_launch.topology import Topology
from silent.case import SAVE_EVERY, STEPS, Case
from silent.cases_restart import BASES, HALF
from silent.edits import EDITS
from silent.program import CRASH, SPEC

VOCABULARY, NUM_TOKENS = 300, 20_000
AT_A_TIME, STALL_S = 40, 150


class Submitted(Exception):
    """Carries what `bsl submit` would have started now: all of its checks have passed."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config


@dataclass(frozen=True, slots=True)
class Made:
    """A case as far as it came: its attempt, or why `bsl submit` refused it; and what `bsl submit` printed."""

    attempt: AttemptDir | None
    refusal: str = ""
    printed: str = ""


# --- datasets


def make_datasets(folder: Path) -> None:
    """Make the datasets: `own`, and others that differ from it in one way."""
    if folder.exists():
        return
    own = draw_tokens(0)
    one = own.copy()
    one[40:NUM_TOKENS:100] = (one[40:NUM_TOKENS:100] + 1) % 290
    datasets = {
        "own": own,
        "moving": own,
        "other": draw_tokens(1),
        "retokenized": (own * 7 + 11) % VOCABULARY,
        "grown": np.concatenate([own, draw_tokens(2)[:4000]]),
        "short": own[: NUM_TOKENS - 3000],
        "one": one,
    }
    for name, tokens in datasets.items():
        with IndexedWriter(folder / name / "tokens", np.dtype(np.uint16)) as writer:
            for part in np.array_split(tokens, 10):
                writer.add_document(part)


def draw_tokens(seed: int) -> Any:
    """Return tokens with something to learn: each one mostly determines the next."""
    draw = np.random.default_rng(seed)
    noise = np.where(draw.random(NUM_TOKENS) < 0.2, draw.integers(VOCABULARY, size=NUM_TOKENS), 0)
    tokens = np.empty(NUM_TOKENS, np.int64)
    tokens[0] = draw.integers(VOCABULARY)
    for index in range(1, NUM_TOKENS):
        tokens[index] = (7 * tokens[index - 1] + 3 + noise[index]) % VOCABULARY
    return tokens


# --- run files


def run_file(name: str, shape: str, data: Path, *sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file: a tiny GPT, overridden by `sections`, later ones last."""
    sizes = Topology.parse(shape)
    found: dict[str, Any] = {
        "run": {"name": name},
        "slurm": {"site": "local"},
        "parallelism": {
            "tensor_parallel_size": sizes.tp,
            "pipeline_parallel_size": sizes.pp,
            "data_parallel_size": sizes.dp,
        },
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "sequence_length": 32,
            "vocab_size": VOCABULARY,
            "vocab_size_multiple": 32,
        },
        "training": {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 8, "precision": "bf16"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "decay_steps": 60, "clip_grad": 0.2},
        "data": {"prefix": "own"},
        "checkpoint": {"save_interval": SAVE_EVERY},
        "guards": {"interval": 1},
    }
    for section in sections:
        for key, values in section.items():
            found[key] = {**found.get(key, {}), **values}
    prefix = found["data"]["prefix"]
    if "/" not in prefix:
        found["data"]["prefix"] = str(data / prefix / "tokens")
    known = GuardsSection.model_fields
    found["guards"] = {key: value for key, value in found["guards"].items() if key in known}
    return found


def new_run(run: RunDir, config: RunConfig) -> None:
    """Make the folder of a run as `bsl submit` does."""
    shutil.rmtree(run.path, ignore_errors=True)
    run.path.mkdir(parents=True)
    topology = config.parallelism.topology(1)
    record = {"schema_version": 1, "name": config.run.name, "run_id": uuid4().hex, "made": time.time(), "site": "local"}
    write_json(run.record, {**record, **identity(config, topology)})


def new_attempt(run: RunDir, config: RunConfig, spec: Mapping[str, Any]) -> AttemptDir:
    attempt = run.attempt(run.next_attempt_name())
    attempt.make()
    attempt.config.write_text(dump_resolved(config))
    if spec:
        (attempt.path / SPEC).write_text(json.dumps(spec))
    return attempt


class Field:
    """The folder of all runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.bases = folder, folder / "data", folder / "bases"
        make_datasets(self.data)

    def spec(self, case: Case) -> dict[str, Any]:
        """Return what the ranks must know of a defect."""
        if not case.defect:
            return {}
        options = {
            key: str(self.data / value) if key in ("own", "other") else value for key, value in case.options.items()
        }
        return {"defect": case.defect, "at": case.at, "ranks": list(case.ranks), "options": options}

    # --- first part

    def base(self, name: str) -> Made:
        """Make a run that stops after step `HALF`, from which others resume."""
        shape, sections = BASES[name]
        stop = {
            "training": {"stop_after_steps": HALF},
            "checkpoint": {"save_interval": 3},
        }
        config = RunConfig.model_validate(run_file("base", shape, self.data, sections, stop))
        return self._begin(RunDir(self.bases / name), config, {})

    def first(self, case: Case, *, is_reference: bool = False) -> Made:
        """Make the first attempt of a case that begins at step 0; as a reference, without its defect."""
        sections: list[Mapping[str, Any]] = [case.sections]
        if case.group == "healthy":
            steps = case.sections.get("training", {}).get("steps", STEPS)
            sections.append({"training": {"stop_after_steps": steps // 2}})
        if is_reference:
            sections.append({"guards": {"interval": "off"}})
        config = RunConfig.model_validate(run_file(case.name, case.shape, self.data, *sections))
        folder = self.folder / ("references" if is_reference else "runs") / case.name
        if is_reference and config.data.prefix.startswith("/proc"):
            config = config.model_copy(
                update={"data": config.data.model_copy(update={"prefix": str(self.data / "own" / "tokens")})}
            )
        return self._begin(RunDir(folder), config, {} if is_reference else self.spec(case))

    def _begin(self, run: RunDir, config: RunConfig, spec: Mapping[str, Any]) -> Made:
        new_run(run, config)
        return Made(new_attempt(run, config, spec))

    # --- second part

    def second(self, case: Case, *, is_reference: bool = False) -> Made:
        """Make the attempt that resumes: a copy of the base with its edit, or the second half of a run."""
        run = RunDir(self.folder / ("references" if is_reference else "runs") / case.name)
        if not case.base:
            return self.submit(run, run_file(case.name, case.shape, self.data, case.sections), self.spec(case))
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(self.bases / case.base, run.path, symlinks=True)
        record = json.loads(run.record.read_text())
        run.record.write_text(json.dumps({**record, "name": case.name}))
        shape, base = BASES[case.base]
        every = {"checkpoint": {"save_interval": 3}}
        if is_reference:
            return self.submit(run, run_file(case.name, shape, self.data, base, every), {})
        if case.edit:
            EDITS[case.edit](run.path, self.bases)
        content = run_file(case.name, shape, self.data, base, every, case.sections)
        if content["checkpoint"].get("load") == "BASE":
            content["checkpoint"]["load"] = str(self.bases / case.base / "checkpoints")
        return self.submit(run, content, self.spec(case))

    def submit(self, run: RunDir, content: Mapping[str, Any], spec: Mapping[str, Any]) -> Made:
        """Put a run file through everything that `bsl submit` does before it starts a process."""
        for attempt in run.attempts():
            os.utime(attempt.path, (0, 0))  # else `bsl submit` takes it for one that is being submitted
        path = self.folder / "files" / f"{run.path.name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**content, "run": {**content["run"], "root": str(run.path.parent)}}, indent=1))

        def instead(loaded: Any, *args: Any, **kwargs: Any) -> None:
            raise Submitted(loaded.config)

        with patch("bigsci_launch.launch.submit.start_attempt", instead):
            result = CliRunner().invoke(bsl, ["submit", str(path), "--local"])
        printed = result.output
        if not isinstance(result.exception, Submitted):
            error = result.exception
            words = str(error) if isinstance(error, BslError) else ""
            if not printed and not words:
                words = f"{type(error).__name__}: {error}"
            return Made(None, f"{printed}{words}".strip(), printed)
        config = result.exception.config
        if not run.record.exists():
            new_run(run, config)
        return Made(new_attempt(run, config, spec), printed=printed)


# --- ranks


def train(attempts: Sequence[AttemptDir], logs: Path) -> None:
    """Train all attempts, many in turn on the same ranks; one that ended the ranks is not repeated, the rest is."""
    by_size: dict[int, list[AttemptDir]] = defaultdict(list)
    for attempt in attempts:
        by_size[world_size(attempt)].append(attempt)
    for size, same in sorted(by_size.items()):
        left, num_in_vain = list(same), 0
        while left:
            some, left = left[:AT_A_TIME], left[AT_A_TIME:]
            begun = time.monotonic()
            run_ranks(some, size, logs)
            done = [attempt for attempt in some if has_ended(attempt, size)]
            culprit = next((attempt for attempt in some if attempt not in done), None)
            left = [attempt for attempt in some if attempt not in done and attempt is not culprit] + left
            num_in_vain = 0 if done else num_in_vain + 1
            if culprit is not None and num_in_vain > 2:
                sys.exit(f"{culprit.path}: no attempt came to its end: {crash_text(culprit)}; see {logs}")
            print(
                f"{len(done)} of {len(some)} attempts on {size} ranks in {time.monotonic() - begun:.0f} s; "
                f"{len(left)} to do" + (f"; {culprit.path} ended its ranks" if culprit else ""),
                flush=True,
            )


def world_size(attempt: AttemptDir) -> int:
    from bigsci_launch.config.load import load_resolved

    return load_resolved(attempt.config).parallelism.topology(1).world_size


def run_ranks(attempts: Sequence[AttemptDir], size: int, logs: Path) -> None:
    """Start ranks that train the attempts, and end them if they stand still."""
    logs.mkdir(parents=True, exist_ok=True)
    number = len(list(logs.glob("*-rank-0.log")))
    module = ["silent.program", *(str(attempt.path) for attempt in attempts)]
    processes = start_ranks(size, module, lambda rank: logs / f"{number:02d}-{size}-rank-{rank}.log", {})
    last, since = -1, time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.5)
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(5)  # the others say what they know of it
                break
            grown = sum(path.stat().st_size for attempt in attempts for path in attempt.events.glob("*.jsonl"))
            if grown != last:
                last, since = grown, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                break
    finally:
        for process in processes:
            process.kill()
            process.wait()


def has_ended(attempt: AttemptDir, size: int) -> bool:
    """Return whether every rank has come to an end that the trainer recorded."""
    return all(attempt.error_file(rank).exists() or ended(attempt, rank) for rank in range(size))


def ended(attempt: AttemptDir, rank: int) -> bool:
    return any(record["kind"] == "end" for record in read_events(attempt.event_file(rank)))


def records(attempt: AttemptDir) -> Iterator[dict[str, Any]]:
    """Yield the records of all ranks."""
    for path in sorted(attempt.events.glob("*.jsonl")):
        yield from read_events(path)


def crash_text(attempt: AttemptDir) -> str:
    """Return what a rank left that failed in a way that the trainer does not record."""
    found = [path.read_text() for path in sorted(attempt.path.glob(CRASH.format("*")))]
    return found[0].strip().splitlines()[-1] if found else ""


if __name__ == "__main__":
    sys.exit("run benchmarks/silent_defects.py")
