"""Makes the confusion table: every hang that can be reproduced here, and the verdict of each tool.

    python benchmarks/hang_confusion.py --ranks 4,8 --culprits first,middle,last --peers \
        --results hang_confusion.jsonl --page docs/measurements/hang-confusion.md

`bsl spy` runs on each reproduction as a user would run it, once for each of `--preparations`: `prepared` ranks offer
the collectives that torch recorded, those with `rings` keep what every job of `bsl submit` keeps, and `unprepared` ones
offer nothing. Where they are prepared, the same hangs are given to torchfrtrace, with the table of groups that it lacks
on gloo, and to torch's DETAIL mode in a separate run. Results are appended to `--results`, one line each. A trial that
is already there is not repeated, so an interrupted series can be continued, and a subset (`--classes H01,H36 --ranks
4`) can be run alone. `--bundles DIR` keeps the evidence of every run; `--again` runs nothing and judges that evidence
with the current engine, also as the kernel would show it an hour later, and that with rings also without them.
`--peers-from FILE` takes the peers' answers from the rows of an earlier series, because their input does not depend on
this engine.

Exits with 1 if a rank is wrongly accused or a hang is reported where there is none: the assertion over all classes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hang_page import PREPARATIONS, REMOVED, write_page
from hang_peers import ask_detail, ask_torchfrtrace
from hang_recordings import let_time_pass

from bigsci_launch.errors import LabError
from bigsci_launch.hang_lab.catalogue import Reproduction
from bigsci_launch.hang_lab.comparison import JudgedVerdict, compare
from bigsci_launch.hang_lab.judgement import Judgement, expectation, judge, read_verdict
from bigsci_launch.hang_lab.needs import missing_need
from bigsci_launch.hang_lab.nursery import Nursery, open_nursery
from bigsci_launch.hang_lab.runner import Trial, reproduce
from bigsci_launch.hang_lab.zoo import REPRODUCTIONS, find_reproduction, find_reproductions
from bigsci_launch.spy.evidence.bundle import Bundle, read_bundle
from bigsci_launch.spy.judge.verdict import judge as judge_evidence
from bigsci_launch.spy.show.document import to_document

Row = dict[str, Any]
LATER_S = 3600.0
OFFERED = [each for each in PREPARATIONS if each != REMOVED]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The verdict of each tool on every hang that can be reproduced here.")
    parser.add_argument("--classes", help="H01,H36-lock,... (default: all)")
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--culprits", default="first,middle,last", help="places or rank numbers")
    parser.add_argument("--preparations", default="prepared", help=f"some of {','.join(OFFERED)}")
    parser.add_argument("--peers", action="store_true", help="also run torchfrtrace and TORCH_DISTRIBUTED_DEBUG=DETAIL")
    parser.add_argument("--peers-from", type=Path, help="rows of an earlier series to take the peers' answers from")
    parser.add_argument("--results", type=Path, default=Path("hang_confusion.jsonl"))
    parser.add_argument("--bundles", type=Path, help="folder to keep the evidence in")
    parser.add_argument("--settle", type=float, help="let each look last for so many seconds")
    parser.add_argument("--again", action="store_true", help="judge the evidence in --bundles again, run nothing")
    parser.add_argument("--page", type=Path, help="write a page of all results to this file")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks of a reproduction end with this process
    done = read_rows(options.results)
    if options.again:
        ran = [row for row in done if row["preparation"] != REMOVED]
        removed = [{**row, "preparation": REMOVED} for row in ran if row["preparation"] == "rings"]
        done = [judge_again(row, options.bundles) for row in (*ran, *removed)]
        options.results.write_text("".join(json.dumps(row) + "\n" for row in done))
    else:
        run_missing(options, done)
    if options.peers_from:
        done = [with_peers(row, read_rows(options.peers_from)) for row in done]
    if options.page:
        write_page(options.page, [row for row in done if "judgement" in row], sys.argv[1:])
    harmful = [row for row in done if "judgement" in row and Judgement(row["judgement"]).is_harmful]
    for row in harmful:
        print(line_of(row))
    sys.exit(1 if harmful else 0)


def run_missing(options: argparse.Namespace, done: list[Row]) -> None:
    """Run the requested trials that are not in `done`; add each to `done` and to the results file."""
    known = {key_of(row) for row in done}
    with open_nursery() as nursery, options.results.open("a") as results:
        for trial, preparation in wanted(options):
            key = (trial.reproduction.name, trial.num_ranks, trial.culprit, preparation)
            if key in known:
                continue
            row = run_trial(trial, preparation, options, nursery)
            done.append(row)
            results.write(json.dumps(row) + "\n")
            results.flush()
            print(line_of(row), flush=True)


def judge_again(row: Row, bundles: Path) -> Row:
    """Return `row` with the current engine's verdict on the kept evidence; unchanged if none was kept."""
    folder = bundle_folder(bundles, row)
    if "judgement" not in row or not (folder / "collection.json").exists():
        return row
    now, later = (judged(row, bundle_of(folder, row), later_s).document() for later_s in (0.0, LATER_S))
    return {**row, **now, "later": {key: later[key] for key in ("verdict", "judgement")}}


def bundle_of(folder: Path, row: Row) -> Bundle:
    """Return the evidence of `row`. Without rings, the frames of what writes them stay on the stacks."""
    bundle = read_bundle(folder)
    if row["preparation"] == REMOVED:
        bundle.collection.pop("rings", None)
        for sample in (sample for node in bundle.nodes for rank in node["ranks"] for sample in rank["samples"]):
            sample.pop("ring", None)
    return bundle


def judged(row: Row, bundle: Bundle, later_s: float) -> JudgedVerdict:
    """Return the verdict on `bundle`, as the kernel would show it `later_s` seconds later."""
    if later_s:
        let_time_pass(bundle, later_s)
    evidence = bundle.evidence()
    verdict = read_verdict(to_document(evidence, judge_evidence(evidence)))
    reproduction = find_reproduction(row["name"])
    topology = reproduction.topology(row["ranks"])
    return JudgedVerdict(
        name=row["name"],
        title=row["title"],
        topology=str(topology),
        culprit=row["culprit"],
        expected=expectation(reproduction, row["culprit"], topology),
        verdict=verdict,
        judgement=judge(verdict, reproduction, row["culprit"], topology),
    )


def with_peers(row: Row, earlier: list[Row]) -> Row:
    """Return `row` with the peers' answers to the same trial in an earlier series."""
    same = next((other for other in earlier if key_of(other) == key_of(row)), {})
    return {**{peer: same[peer] for peer in ("torchfrtrace", "detail") if peer in same}, **row}


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(row: Row) -> tuple[str, int, int, str]:
    return (row["name"], row["ranks"], row["culprit"], row["preparation"])


def wanted(options: argparse.Namespace) -> Iterator[tuple[Trial, str]]:
    """Yield every requested trial that this machine can run."""
    reproductions = find_reproductions(options.classes.split(",")) if options.classes else REPRODUCTIONS
    for num_ranks in (int(text) for text in options.ranks.split(",")):
        for reproduction in reproductions:
            if reason := missing_need(reproduction):
                print(f"{reproduction.name}: skipped, {reason}")
                continue
            for culprit in culprits(reproduction, num_ranks, options.culprits.split(",")):
                for preparation in options.preparations.split(","):
                    yield prepared_trial(preparation, reproduction, num_ranks, culprit), preparation


def prepared_trial(preparation: str, reproduction: Reproduction, num_ranks: int, culprit: int) -> Trial:
    """Return the trial in which ranks offer what `preparation` says, and nothing else."""
    if preparation not in OFFERED:
        sys.exit(f"there is no preparation {preparation!r}: they are {', '.join(OFFERED)}")
    environment = {} if preparation == "prepared" else {"BSL_LAB_RECORDER": "0"}
    return Trial(reproduction, num_ranks, culprit, environment, keeps_rings=preparation == "rings")


def culprits(reproduction: Reproduction, num_ranks: int, places: list[str]) -> list[int]:
    """Return the ranks to make the culprit, each once."""
    if reproduction.culprits in ("rank 0", "no matter"):
        return [0]
    middle = num_ranks // 2 - 1
    named = {"first": 0, "middle": middle, "last": num_ranks - 1}
    ranks = {named[place] if place in named else int(place) for place in places}
    return sorted(ranks - {0} if reproduction.culprits == "not rank 0" else ranks)


def run_trial(trial: Trial, preparation: str, options: argparse.Namespace, nursery: Nursery) -> Row:
    """Run one reproduction and collect the verdict of every tool."""
    row: Row = {"name": trial.reproduction.name, "title": trial.reproduction.title, "ranks": trial.num_ranks,
                "culprit": trial.culprit, "preparation": preparation}  # fmt: skip
    began = time.monotonic()
    try:
        with reproduce(trial, nursery=nursery) as standing:
            row["stood_after_s"] = round(time.monotonic() - began, 1)
            began = time.monotonic()
            settle = ["--settle", f"{options.settle:g}"] if options.settle else []
            comparison = compare(standing, *keep_evidence(options.bundles, row), *settle)
            row["spy_s"] = round(time.monotonic() - began, 1)
            row.update(comparison.document())
            if options.peers and preparation == "prepared":
                row["torchfrtrace"] = ask_torchfrtrace(standing).document()
    except LabError as error:
        return {**row, "failed": str(error)}
    if options.peers and preparation == "prepared":
        row["detail"] = ask_detail(trial, nursery).document()
    return row


def keep_evidence(folder: Path | None, row: Row) -> list[str]:
    if folder is None:
        return []
    kept = bundle_folder(folder, row)
    shutil.rmtree(kept, ignore_errors=True)
    return ["--output", str(kept)]


def bundle_folder(folder: Path, row: Row) -> Path:
    preparation = "rings" if row["preparation"] == REMOVED else row["preparation"]
    return folder / row["name"] / f"{row['ranks']}-ranks-culprit-{row['culprit']}-{preparation}"


def line_of(row: Row) -> str:
    head = f"{row['name']:14} {row['ranks']} ranks, culprit {row['culprit']}"
    if "failed" in row:
        return f"{head}: FAILED {row['failed']}"
    verdict = row["verdict"]
    return (
        f"{head}, {row['preparation']}: {row['judgement'].upper()}: {verdict['state']}"
        f" {verdict['class']} {verdict['suspects']}; expected {row['expected']}"
    )


if __name__ == "__main__":
    main()
