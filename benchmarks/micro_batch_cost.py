"""What `micro_batch_size: auto` costs once the size is found, and how long it takes to find it.

    python benchmarks/micro_batch_cost.py [--steps 200]

Four gloo ranks (tp 2, pp 2, bf16) train a GPT. Every other step runs without anything that `auto` has put into the
schedule, so whatever else the machine does meets both kinds of steps alike. The result is the median difference of
neighbouring steps, and the time of each trial of a size with the vote on it.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from ranks import draw_corpus, require_success, start_ranks

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir

FIRST = 5
"""Steps before it are left out: caches are cold, and the guards check them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="micro-batch-cost-"))
    attempt = train(folder, options.steps)
    print(*lines_of(attempt), sep="\n")
    shutil.rmtree(folder)


def train(folder: Path, steps: int) -> AttemptDir:
    draw_corpus(folder / "corpus")
    run = RunDir(folder / "run")
    attempt = run.attempt("0001")
    attempt.make()
    attempt.config.write_text(dump_resolved(config_of(folder / "corpus", steps)))
    place = {"BSL_RUN_DIR": str(run.path), "BSL_ATTEMPT": attempt.name}
    processes = start_ranks(4, ["micro_batch_train"], attempt.log_file, place)
    require_success(processes, attempt.log_file(0), timeout_s=60 + 5.0 * steps)
    return attempt


def config_of(corpus: Path, steps: int) -> RunConfig:
    document: dict[str, Any] = {
        "run": {"name": "cost"},
        "parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "model": {
            **{"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4},
            **{"sequence_length": 64, "vocab_size": 300},
        },
        "training": {
            **{"steps": steps, "micro_batch_size": "auto", "global_batch_size": 16},
            **{"precision": "bf16", "device": "cpu"},
        },
        "data": {"prefix": str(corpus)},
        "guards": {"interval": "off"},
    }
    return RunConfig.model_validate(document)


def lines_of(attempt: AttemptDir) -> list[str]:
    events = [each for rank in range(4) for each in read_events(attempt.event_file(rank))]
    steps = {each["step"]: each["seconds"] for each in events if each["kind"] == "step"}
    pairs = [(steps[number + 1], steps[number]) for number in range(FIRST, max(steps), 2)]
    differences = [agreed - plain for plain, agreed in pairs]
    middle = statistics.median(plain for plain, _ in pairs)
    error = 1.25 * statistics.stdev(differences) / math.sqrt(len(differences))
    trials = [each for each in read_events(attempt.event_file(0)) if each["kind"] == "trial"]
    moments = [each["mono"] for each in trials]
    between = [after - before for before, after in pairwise(moments)]
    found = next(each for each in events if each["kind"] == "micro_batch")
    return [
        f"{len(pairs)} pairs of steps: {middle * 1e3:.1f} ms without, "
        f"{statistics.median(differences) / middle:+.2%} +- {error / middle:.2%} with the agreement",
        f"found {found['size']} by {len(trials)} trials: {found['words']}",
        f"a trial with its vote: {', '.join(f'{each * 1e3:.0f} ms' for each in between)}",
    ]


if __name__ == "__main__":
    sys.exit(main())
