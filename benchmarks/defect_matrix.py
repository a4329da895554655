"""Injects each defect behind restart spikes into a real run, and shows what loss, guards and diff-weights say of it.

    python benchmarks/defect_matrix.py [--dp 1 2] [--page docs/measurements/defects.md] [--keep FOLDER]

Ranks on this machine (tp 2, pp 2) train a tiny GPT in bf16. Each defect gets three runs: one that saves after step 60
and continues, one that resumes from that checkpoint (both without guards), and one with guards
(`guards: {interval: 1}`). The loss jump compares the first resumed step with the same step of the continued run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import BSL, prepare_corpus, require_success, start_ranks

from bigsci_launch.config.load import dump_resolved
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.file_names import checkpoint_tag, dump_name
from bigsci_launch.runs.events import read_events
from bigsci_launch.runs.layout import AttemptDir, RunDir, read_json

SAVE_AT, LAST, MID_RUN = 60, 64, 7
LIMIT_S = 1800
DEFECTS = {
    "healthy": "",
    "B1 tied gradients not reduced": "unreduced_tied_gradients",
    "B2 a norm travels in the tied module": "passenger_norm",
    "B3 and it decays": "decayed_norm",
    "B4 the last stage's tied copy is not clipped": "unclipped_tied_copy",
    "B5 gradients not reduced over tp": "unreduced_tp_gradients",
    "gradients of replicas divided by tp": "scaled_gradients",
    "random states not restored": "lost_random_states",
    "AdamW's step lost on load": "lost_optimizer_step",
    "one bit of a shard wrong on disk": "flipped_byte",
}
# Defects that may begin at any step, not only at a load or when the model is built.
BEGINNING = ("unreduced_tied_gradients", "unclipped_tied_copy", "unreduced_tp_gradients", "scaled_gradients")
INTERVALS = (1, "auto")


@dataclass(frozen=True, slots=True)
class Row:
    """What was observed for one defect."""

    name: str
    jump: float
    later: float
    guard: str
    compared: str
    checkpoints: str
    audited: str


def sections(kind: str, corpus: Path, dp: int) -> dict[str, Any]:
    """Return the run file of a defect, without guards and faults."""
    return {
        "run": {"name": kind or "healthy"},
        "parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": dp},
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "sequence_length": 64,
            "vocab_size": 512,
            "dropout": 0.1 if kind == "lost_random_states" else 0.0,
        },
        "training": {"steps": LAST, "micro_batch_size": 2, "global_batch_size": 16, "precision": "bf16"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0, "decay_steps": 1000, "clip_grad": 0.2},
        "data": {"prefix": str(corpus)},
        "checkpoint": {"save_interval": SAVE_AT},
        "monitor": {"dump_weights_steps": [SAVE_AT, SAVE_AT + 1]},
        "guards": {"interval": "off"},
    }


def prepare(folder: Path, kind: str, corpus: Path, dp: int) -> Iterator[AttemptDir]:
    """Yield the attempts of a defect: the continued run, the resumed one, and those with guards."""
    base = sections(kind, corpus, dp)
    rank = {"rank": 1} if kind == "flipped_byte" else {}
    first_step = SAVE_AT if kind == "flipped_byte" else 1
    faults = [{"kind": kind, "step": first_step, **rank}] if kind else []
    name = kind or "healthy"
    saved = {**base["checkpoint"], "load": str(folder / name / "checkpoints" / checkpoint_tag(SAVE_AT))}
    at_load = kind.startswith("lost_") or kind == "flipped_byte"
    guarded = {**base, "faults": faults, "guards": {"interval": 1}}
    yield write(folder / name, {**base, "faults": faults})
    yield write(folder / f"{name}-resumed", {**base, "faults": faults, "checkpoint": saved})
    yield write(folder / f"{name}-guarded", {**guarded, **({"checkpoint": saved} if at_load else {})})
    for interval in INTERVALS if kind in BEGINNING else ():
        late = {**base, "faults": [{"kind": kind, "step": MID_RUN}], "guards": {"interval": interval}}
        yield write(folder / f"{name}-late-{interval}", late)


def write(folder: Path, config: dict[str, Any]) -> AttemptDir:
    """Return the attempt of a run: the finished one of an earlier call, or a new one."""
    attempt = RunDir(folder).attempt("0001")
    if has_ended(attempt):
        return attempt
    shutil.rmtree(folder, ignore_errors=True)
    attempt.make()
    attempt.config.write_text(dump_resolved(RunConfig.model_validate(config)))
    return attempt


def has_ended(attempt: AttemptDir) -> bool:
    """Return whether every rank has finished or was stopped by a guard."""
    if not attempt.config.exists():
        return False
    files = sorted(attempt.events.glob("*.jsonl"))
    ended = [any(record["kind"] == "end" for record in read_events(file)) for file in files]
    return attempt.error_file(0).exists() or (bool(ended) and all(ended))


def train(attempts: list[AttemptDir], logs: Path, num_ranks: int, program: str = "several") -> None:
    """Train all attempts in turn, on the same ranks."""
    module = [program, *(str(attempt.path) for attempt in attempts)]
    ranks = start_ranks(num_ranks, module, lambda rank: logs / f"rank-{rank}.log", {})
    require_success(ranks, logs / "rank-0.log", LIMIT_S)


def losses(run: Path) -> dict[int, float]:
    """Return the loss by step, from whichever rank recorded it."""
    files = sorted(RunDir(run).attempt("0001").event_file(0).parent.glob("*.jsonl"))
    records = [record for file in files for record in read_events(file)]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def guard_of(run: Path) -> str:
    """Return what stopped the guarded run."""
    path = RunDir(run).attempt("0001").error_file(0)
    return read_json(path)["message"] if path.exists() else "passes"


def diff_weights(*arguments: object) -> str:
    """Return the first findings of `bsl diff-weights`, or how many tensors differ without a finding."""
    command = [sys.executable, "-c", BSL, "diff-weights", *map(str, arguments), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not result.stdout:
        return f"exit {result.returncode}: {result.stderr.strip()[-200:]}"
    document = json.loads(result.stdout)
    claims = [f"{finding['pattern']}: {finding['claim']}" for finding in document["findings"]]
    found = ". ".join(claims[:3]) or ("equal" if document["equal"] else f"{len(document['different'])} differ")
    return found if len(found) < 900 else found[:900] + "..."


def look(folder: Path, name: str, kind: str) -> Row:
    run = folder / (kind or "healthy")
    resumed = folder / f"{run.name}-resumed"
    went_on, again = losses(run), losses(resumed)
    step = SAVE_AT + 1
    # A loss during a load is in the checkpoints saved after it, not in the one that was loaded.
    saver, saved_at = (resumed, LAST) if kind.startswith("lost_") else (run, SAVE_AT)
    audited = saver / "checkpoints" / checkpoint_tag(saved_at)
    # A loss during a load shows between the continued and the resumed run; other defects, against a healthy run.
    other = (run if saver == resumed else folder / "healthy") / "checkpoints" / audited.name
    dumps = (run / "dumps" / dump_name(SAVE_AT, "after"), resumed / "dumps" / dump_name(step, "before"))
    return Row(
        name=name,
        jump=again[step] - went_on[step],
        later=again[LAST] - went_on[LAST],
        guard=guard_of(folder / f"{run.name}-guarded"),
        compared=diff_weights(*dumps),
        checkpoints=diff_weights(other, audited),
        audited=diff_weights("--audit", audited),
    )


ABOUT = f"""\
Each number of ranks has five tables:

- **The loss and the guards**, as above.
- **In mid-run**: the same defects, begun at step {MID_RUN} of a run that saves after step {SAVE_AT}.
  `guards: {{interval: 1}}` catches them in the same step. The default, `guards: {{interval: auto}}`, checks the first
  two steps, each step that is saved, after each load, and every N steps, where N keeps the checks at 0.15 % of the
  time. So it catches such a defect up to N steps late, but always before the next save.
- **Dumps**: `bsl diff-weights A B` on the weights after step {SAVE_AT} and those before step {SAVE_AT + 1} of the
  resumed run, as every rank dumped them. This shows what a resume loses or repairs. A defect that both sides share is
  reported, but it is not a difference (exit code 0). The cause is found from the moments in the checkpoint saved with
  the dump.
- **Checkpoints**: `bsl diff-weights A B` on the checkpoints of a healthy run and of one with the defect, after step
  {SAVE_AT}. For state lost on load, A is the continued run and B the resumed one, both after step {LAST}. Then all
  weights differ, and the optimizer state shows why.
- **Audit**: `bsl diff-weights --audit` on a single checkpoint, after step {SAVE_AT}; for state lost on load, after step
  {LAST}. Gradients that are too small everywhere, and random states, cannot be judged without a second run: see the
  table of checkpoints."""
TABLES = {"compared": "Dumps", "checkpoints": "Checkpoints", "audited": "Audit"}


def answers(title: str, said: dict[str, str]) -> Iterator[str]:
    """Yield the table for one use of diff-weights; `said` by the defect's name."""
    yield from ("", f"{title}:", "", "| defect | what it says |", "|---|---|")
    yield from (f"| {name} | {words} |" for name, words in said.items())


def late_lines(folder: Path) -> Iterator[str]:
    """Yield the table of defects that begin in mid-run: how late each interval of the guards notices them."""
    yield from ("", "In mid-run:", "")
    yield from ("| defect | `interval: 1` stops at | `interval: auto` stops at |", "|---|---|---|")
    for name, kind in DEFECTS.items():
        if kind in BEGINNING:
            said = [guard_of(folder / f"{kind}-late-{interval}").split(":")[0] for interval in INTERVALS]
            yield f"| {name} | {' | '.join(said)} |"


def section(folder: Path, dp: int) -> Iterator[str]:
    """Yield the tables for one number of ranks."""
    rows = [look(folder, name, kind) for name, kind in DEFECTS.items()]
    yield from ("", f"## {4 * dp} ranks: tp 2, pp 2, dp {dp}", "")
    yield from (f"| defect | jump at step {SAVE_AT + 1} | at step {LAST} | with guards |", "|---|---|---|---|")
    yield from (f"| {row.name} | {row.jump:+.6f} | {row.later:+.6f} | {row.guard} |" for row in rows)
    yield from late_lines(folder)
    for key, title in TABLES.items():
        yield from answers(title, {row.name: getattr(row, key) for row in rows})


def page(folder: Path, sizes: list[int]) -> str:
    """Return the matrix as Markdown."""
    options = f"--dp {' '.join(map(str, sizes))} --page docs/measurements/defects.md"
    lines = [
        f"<!-- Made by `python benchmarks/defect_matrix.py {options}`. -->",
        "",
        "# Defects, and what notices them",
        "",
    ]
    lines += [*(__doc__ or "").split("\n\n")[2].strip().split("\n"), "", *ABOUT.split("\n")]
    for dp in sizes:
        lines += section(folder / str(dp), dp)
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="+", default=[1], help="data-parallel sizes, with 4 ranks per replica")
    parser.add_argument("--page", type=Path, help="write the page to this file (default: print it)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and do not repeat those already there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        corpus = folder / "corpus"
        prepare_corpus(corpus, 512)
        for dp in options.dp:
            runs = folder / str(dp)
            runs.mkdir(exist_ok=True)
            attempts = [attempt for kind in DEFECTS.values() for attempt in prepare(runs, kind, corpus, dp)]
            if todo := [attempt for attempt in attempts if not has_ended(attempt)]:
                train(todo, runs, 4 * dp)
        text = page(folder, options.dp)
    if options.page:
        options.page.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
