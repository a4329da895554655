"""Injures seeded runs of `bsl train` with `survive`, and compares each with the undisturbed run.

    python benchmarks/recovery_chaos.py [--seeds 0:100] [--held-out] [--folder DIR] [--page PAGE]

A seed decides the layout (4 or 8 gloo ranks, tp/pp/dp mixes, bf16 and fp32), what is done to which ranks, and when:
`recovering/cases.py`. A run must end with exit code 0, and with the losses and final weights of the undisturbed run,
bit for bit where the layout was kept, and to 1e-6 relative where data-parallel replicas were lost; or its controller
must say why it could not continue. `bsl diff-weights` judges the weights. `--held-out` adds seeds that nothing was
tuned to. With `--like-nccl` the ranks communicate over `tests/support/nccl_like`, which blocks as NCCL does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ranks import draw_corpus
from recovering.cases import Case, Layout, draw_case
from recovering.injured_run import run_injured, run_undisturbed, write_run_file
from recovering.judged import Outcome, judge, phase_table

from bigsci_launch.runs.layout import RunDir

NCCL_LIKE = Path(__file__).parents[1] / "tests" / "support" / "nccl_like"
HELD_OUT = range(1000, 1020)
BEGIN, END = "<!-- chaos -->", "<!-- /chaos -->"


class Runs:
    """The folder of all runs of this benchmark."""

    def __init__(self, folder: Path, backend: Path | None) -> None:
        self._folder, self._backend = folder, backend
        self._corpus = folder / "corpus"
        if not self._corpus.with_suffix(".idx").exists():
            draw_corpus(self._corpus)
        self._undisturbed: dict[Layout, RunDir] = {}
        self._outcomes = folder / "outcomes.jsonl"

    def outcome(self, seed: int) -> Outcome:
        """Return the outcome of a seed: that of an earlier call of this program in the same folder, or a new one."""
        lines = self._outcomes.read_text().splitlines() if self._outcomes.exists() else []
        found = [document for document in map(json.loads, lines) if document["case"]["seed"] == seed]
        if found:
            return Outcome.of_document(found[-1], draw_case(seed))
        return _told(self.injured(draw_case(seed)))

    def reference(self, layout: Layout) -> RunDir:
        """Return the undisturbed run of a layout, which has no `survive`."""
        if layout not in self._undisturbed:
            name = f"sound-{layout.name}-{layout.dropout}"
            run = RunDir(self._folder / "runs" / name)
            if not run.path.exists():
                run_undisturbed(write_run_file(self._folder, name, layout, self._corpus, None), run)
            self._undisturbed[layout] = run
        return self._undisturbed[layout]

    def injured(self, case: Case) -> Outcome:
        reference = self.reference(case.layout)
        name = f"case-{case.seed}"
        run = RunDir(self._folder / "runs" / name)
        path = write_run_file(self._folder, name, case.layout, self._corpus, {})
        code, done = run_injured(path, run, case, self._folder / "injuries" / name, self._backend)
        outcome = judge(case, code, done, run, reference)
        with self._outcomes.open("a") as stream:
            stream.write(json.dumps(asdict(outcome)) + "\n")
        if not outcome.problems:
            shutil.rmtree(run.path, ignore_errors=True)  # its watcher may still be leaving
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, or seeds separated by commas")
    parser.add_argument("--held-out", action="store_true", help="also run what nothing was tuned to")
    parser.add_argument("--like-nccl", action="store_true", help="ranks block as NCCL does; undisturbed ones do not")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and continue with what is there")
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its marks")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="recovery-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder, NCCL_LIKE if options.like_nccl else None)
    outcomes = [runs.outcome(seed) for seed in parse_seeds(options.seeds)]
    held_out = [runs.outcome(seed) for seed in HELD_OUT] if options.held_out else []
    text = page_of(outcomes, held_out)
    print(text)
    if options.page:
        write_page(options.page, text)
    if options.folder is None and not any(outcome.problems for outcome in (*outcomes, *held_out)):
        shutil.rmtree(folder)
    sys.exit(any(outcome.problems for outcome in (*outcomes, *held_out)))


def parse_seeds(text: str) -> Sequence[int]:
    if ":" in text:
        first, last = map(int, text.split(":"))
        return range(first, last)
    return [int(each) for each in text.split(",")]


def _told(outcome: Outcome) -> Outcome:
    what = "; ".join(map(str, outcome.case.injuries))
    total = ", ".join(f"{each['total']:.1f} s" for each in outcome.seconds)
    result = "; ".join(outcome.problems) or (f"gave up: {outcome.said}" if outcome.said else "equal")
    document = {
        "seed": outcome.case.seed,
        "layout": outcome.case.layout.name,
        "what": what,
        "code": outcome.exit_code,
        "generations": outcome.num_generations,
        "sources": outcome.sources,
        "recovered": total,
        "result": result,
    }
    print(json.dumps(document), flush=True)
    return outcome


def page_of(outcomes: Sequence[Outcome], held_out: Sequence[Outcome]) -> str:
    """Return the tables."""
    lines = [*_table("seeded runs", outcomes)]
    if held_out:
        lines += ["", *_table("held-out runs", held_out)]
    seconds = [each for outcome in (*outcomes, *held_out) for each in outcome.seconds]
    # A stopped process is given time to continue before it counts as lost, so those are shown apart.
    prompt = [each for each in seconds if each["noticed"] < 5]
    lines += ["", *phase_table(prompt, f"phase of {len(prompt)} recoveries")]
    return "\n".join(lines)


def _table(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    went_on = [each for each in outcomes if each.exit_code == 0 and not each.problems]
    said = [each for each in outcomes if each.said and not each.problems]
    kinds = Counter(injury.kind for outcome in outcomes for injury in outcome.case.injuries)
    moments = Counter(injury.moment for outcome in outcomes for injury in outcome.case.injuries)
    shrunk = [each for each in went_on if each.dp != each.case.layout.dp]
    replayed = [each.steps_replayed for each in went_on]
    rows = [
        ("runs", str(len(outcomes))),
        ("ended with 0 and the numbers of the undisturbed run", str(len(went_on))),
        ("of these with fewer replicas, largest relative difference of a loss", _worst(shrunk)),
        ("could not continue, and said why", str(len(said))),
        ("anything else", str(sum(1 for each in outcomes if each.problems))),
        ("injuries", ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())),
        ("moments", ", ".join(f"{number} {moment}" for moment, number in moments.most_common())),
        ("restored from", _sources(went_on)),
        ("steps done again, mean and most", f"{statistics.mean(replayed):.1f}, {max(replayed)}" if replayed else "-"),
        ("samples lost, or consumed twice", str(sum("samples" in text for each in outcomes for text in each.problems))),
    ]
    return [f"| {name} | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]


def _worst(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "0"
    return f"{len(outcomes)}, {max(each.largest_difference for each in outcomes):.1e}"


def _sources(outcomes: Sequence[Outcome]) -> str:
    found = Counter(source for outcome in outcomes for source in outcome.sources[1:])
    return ", ".join(f"{number} {source}" for source, number in found.most_common())


def write_page(path: Path, text: str) -> None:
    page = path.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
