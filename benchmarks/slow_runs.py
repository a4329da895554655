"""Does `bsl slow` name who makes a job slow? Ranks of gloo are slowed down in some steps, by a known part of a step.

    python benchmarks/slow_runs.py --work /tmp/slow --seeds 0-1            # the seeds that it was made with
    python benchmarks/slow_runs.py --work /tmp/slow --seeds 10-12 --page docs/measurements/slow.md

A job has sections of steps: an undisturbed one before and after each disturbed one, its twins. `bsl slow` gets the
rings of one section at a time. Results are kept in the working folder, and the page has all of them. Quotas and slow
links need root, and ranks have priority then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import parity
from defect_matrix import write
from ranks import Process, draw_corpus, start_ranks
from slow_looks import hurry
from slowing.network import address, networks

from bigsci_launch.content import packaged
from bigsci_launch.slow.chance import interval
from bigsci_launch.slow.job import PlayedJob
from bigsci_launch.slow.judge import JudgedSteps, judge
from bigsci_launch.slow.straggler import SlowKind, StepPhase
from bigsci_launch.slow.timeline import RankTimeline, timeline_of
from bigsci_launch.topology import Topology
from bigsci_launch.trace.read import ALL_CALLS, files_in, read_files

HELD_OUT_FROM = 11
FIRST_STEP, LENGTH = 6, 20
SHARES, SMALL_SHARE = (0.1, 0.2, 0.5), 0.05
WITH_SMALL = ("ddp", "tensor")
"""Programs that are slowed down by the small share as well."""
PHASES = {
    "forward": StepPhase.FORWARD,
    "backward": StepPhase.BACKWARD,
    "loader": StepPhase.DATA,
    "garbage": StepPhase.GARBAGE_COLLECTION,
    "save": StepPhase.SAVE,
    "device": StepPhase.OUTSIDE_PYTHON,
    "quota": StepPhase.OUTSIDE_PYTHON,
}
WORDS = {
    "forward": "slow forward pass",
    "backward": "slow backward pass",
    "loader": "slow loader",
    "garbage": "garbage collection in each fifth step",
    "save": "slow save in each fourth step",
    "device": "all of its work slower by that share",
    "stage": "work of the last stage is moved to the first",
    "quota": "CPU quota by a cgroup",
    "link": "link between two ranks at a lower rate",
    "none": "undisturbed",
    "uneven": "uneven by nature",
}
TIMEOUT_S, COPY_EVERY_S, MOST_COPIES = 600.0, 1.0, 2
TWIN_STEPS = {"garbage": 5}
"""Steps that count as one when twins are compared: what happens in each fifth or fourth step is once in each."""
MOST_USUAL = 4
NICE = -15
FOREIGN = ("forward", "backward", "loader", "garbage", "save", "device", "quota")
OF_OTHERS = ("forward", "backward", "loader", "garbage", "device", "quota")
"""Of programs of another shape than those that the rules were made with."""
KINDS = {
    "ddp": FOREIGN,
    "fsdp2": FOREIGN,
    "pipe": ("forward", "backward", "loader", "garbage", "stage", "link"),
    "train": ("forward", "backward", "loader", "garbage", "stage", "link"),
    "tensor": ("forward", "backward", "loader", "garbage", "save"),
    "train tp2": ("forward", "backward", "loader"),
    "train 3d": ("forward", "backward", "loader", "garbage", "link"),
    "3d": ("forward", "backward", "loader", "garbage", "save", "link"),
    "trainer": OF_OTHERS,
    "mesh": OF_OTHERS,
}
LAYOUTS = {
    "train": Topology(tp=1, pp=2, dp=2),
    "train tp2": Topology(tp=2, pp=2, dp=1),
    "train 3d": Topology(tp=2, pp=2, dp=2),
}
"""Of `bsl train`."""
UNEVEN = ("lengths", "experts", "loss")
"""Programs whose work is uneven by nature, in all of their sections."""
NUM_UNEVEN = 6
RANKS, RANKS_3D = 4, 8
MOST_MOVED = 0.5
"""The other stage does not have half a step of work that could be moved."""


@dataclass(frozen=True, slots=True)
class Section:
    """Steps of a job, and who is slow in them."""

    kind: str
    share: float
    ranks: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was found in a section, in ms of a step. `added` is what its ranks themselves have measured that they were
    slowed down by. `twin` is how much longer its typical step was than that of its twins, with a 95 % interval."""

    program: str
    seed: int
    section: Section
    steps: int
    step_ms: float
    typical_ms: float
    added: float | None
    twin: tuple[float, float, float] | None
    found: list[dict[str, Any]] = field(default_factory=list)
    by_nature: list[str] = field(default_factory=list)
    undecided: str | None = None
    load: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        return bool(self.section.ranks)

    @property
    def hits(self) -> list[dict[str, Any]]:
        guilty = set(self.section.ranks)
        if self.section.kind in ("stage", "link"):
            return [each for each in self.found if set(each["ranks"]) == guilty and each["kind"] != SlowKind.RANK]
        return [each for each in self.found if set(each["ranks"]) <= guilty]

    @property
    def innocent(self) -> list[dict[str, Any]]:
        return [each for each in self.found if each not in self.hits]

    @property
    def has_right_phase(self) -> bool:
        wanted = PHASES.get(self.section.kind)
        return bool(self.hits) and (wanted is None or self.hits[0]["phase"] == wanted)

    @property
    def ms_off(self) -> float | None:
        """How far the stated cost is from what was added, as a share of that."""
        if not self.hits or not self.added:
            return None
        return float(abs(self.hits[0]["ms"] - self.added) / self.added)

    @property
    def slower(self) -> float | None:
        """By which part its typical step was longer than those of its twins."""
        return None if self.twin is None else self.twin[0] / max(1e-3, self.typical_ms - self.twin[0])

    @property
    def agrees(self) -> bool | None:
        """Whether the stated cost is within 15 % of the difference to the twins, as far as that is known."""
        if not self.hits or self.twin is None:
            return None
        _, low, high = self.twin
        return bool(0.85 * low <= self.hits[0]["ms"] <= 1.15 * high)


def sections_of(kinds: Sequence[str], shares: Sequence[float], ranks: int, draw: random.Random) -> list[Section]:
    """Return the sections of a job in a random order, each disturbed one between two undisturbed ones."""
    cases = [(kind, share) for kind in kinds for share in shares if kind != "stage" or share < MOST_MOVED]
    draw.shuffle(cases)
    found, first = [], FIRST_STEP
    for kind, share in [*((None, 0.0) if at % 2 == 0 else cases[at // 2] for at in range(2 * len(cases) + 1))]:
        last = first + LENGTH - 1
        if kind is None:
            found.append(Section("none", 0.0, (), first, last))
        else:
            found.append(Section(kind, share, _ranks_of(kind, ranks, draw), first, last))
        first = last + 1
    return found


def _ranks_of(kind: str, ranks: int, draw: random.Random) -> tuple[int, ...]:
    if kind == "stage":
        return tuple(range(ranks // 2))  # the first of two stages: pipeline is the slowest axis
    if kind == "link":
        first = draw.randrange(ranks // 2)
        return first, first + ranks // 2
    return (draw.randrange(ranks),)


def is_other(program: str) -> bool:
    """Whether a program has another shape than those that the rules were made with."""
    return KINDS.get(program) is OF_OTHERS


def size_of(program: str) -> int:
    return RANKS_3D if program.endswith("3d") else RANKS


def start(
    program: str, folder: Path, sections: Sequence[Section], homes: Sequence[Sequence[str]] | None
) -> list[Process]:
    """Start the ranks of a job, which record rings and follow the schedule. `homes` start a command in the network of
    each rank."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rings").mkdir(parents=True)
    disturbed = [asdict(each) for each in sections if each.ranks]
    (folder / "schedule.json").write_text(json.dumps(disturbed))
    more = {
        "BSL_RING_DIR": str(folder / "rings"),
        "BSL_SLOW_SCHEDULE": str(folder / "schedule.json"),
        "OMP_NUM_THREADS": "1",
    }
    if homes is not None:
        more |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "own"}
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (packaged("diagnostics", "ring_site"), here, here / "slowing")))
    os.environ["PYTHONPATH"] = path
    steps = sections[-1].last + 3

    def log_of(rank: int) -> Path:
        return folder / f"rank-{rank}.log"

    if program in UNEVEN:
        return start_ranks(RANKS, ["slowing.uneven", program, str(steps)], log_of, more)
    if is_other(program):
        return start_ranks(RANKS, ["slowing.trainer", program, str(steps)], log_of, more)
    if program not in LAYOUTS:
        return start_ranks(size_of(program), ["slowing.foreign", program, str(steps)], log_of, more, homes=homes)
    topology = LAYOUTS[program]
    parity.STEPS = steps
    draw_corpus(folder / "corpus")
    asked = parity.sections("rotary", topology, folder / "corpus") | {"guards": {"interval": 1000}}
    attempt = write(folder / "run", asked)
    more["BSL_TOPOLOGY"] = str(topology)
    return start_ranks(topology.world_size, ["slowing.trained", str(attempt.path)], log_of, more, homes=homes)


def wait(processes: Sequence[Process], folder: Path) -> None:
    """Wait for the end of the ranks, and copy their rings from time to time: a ring keeps some dozens of steps.

    Sections that they have not reached in time are left out.
    """
    began, copied = time.monotonic(), 0
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() - began < TIMEOUT_S:
            time.sleep(COPY_EVERY_S)
            if (reached := _reached(folder)) >= copied + LENGTH:
                copied = reached
                shutil.copytree(folder / "rings", folder / f"copy-{reached:06d}")
        shutil.copytree(folder / "rings", folder / "copy-end")
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(code not in (0, None, -signal.SIGABRT) for code in codes):
        sys.exit(f"ranks ended with {codes}:\n{(folder / 'rank-0.log').read_text()[-3000:]}")


def judged(program: str, seed: int, folder: Path, sections: Sequence[Section]) -> Iterator[Result]:
    """Yield what is found in each section, by the rings that the ranks have left."""
    jobs = _jobs(folder, sections)
    notes = _notes(folder, size_of(program))
    kept = [each for each in sections if each in jobs]
    for at, each in enumerate(kept):
        near = [jobs[other] for other in kept[max(0, at - 1) : at + 2] if other.kind == "none"]
        size = TWIN_STEPS.get(each.kind, MOST_USUAL)
        twin = _longer(jobs[each], near, size) if each.ranks and near else None
        added, busy = (_of_steps(notes, jobs[each].numbers, key) for key in ("added", "busy"))
        yield _result(program, seed, each, jobs[each], added, busy, twin)


def _jobs(folder: Path, sections: Sequence[Section]) -> dict[Section, PlayedJob]:
    """Return the sections that the copies of the rings hold. Reading a copy takes seconds: few are read."""
    jobs: dict[Section, PlayedJob] = {}
    copies = sorted(folder.glob("copy-*"))
    done: set[Path] = set()
    for latest in reversed(sections):
        later = [copy for copy in copies if copy.name > f"copy-{latest.last + 1:06d}"]
        for copy in later[:MOST_COPIES]:
            if latest in jobs or copy in done:
                continue
            done.add(copy)
            read = read_files(files_in(copy), ALL_CALLS)
            rings = {each.rank: each.ring for each in read if each.rank is not None and each.ring is not None}
            timelines = [timeline_of(rank, ring) for rank, ring in sorted(rings.items())]
            held = range(max(each.steps.start for each in timelines), min(each.steps.stop for each in timelines))
            topology = next(iter(rings.values())).topology
            for each in sections:
                if each not in jobs and each.first in held and each.last + 1 in held:
                    jobs[each] = _job(timelines, topology, each)
    return jobs


def _reached(folder: Path) -> int:
    """Return the last step that the first rank has noted."""
    file = folder / "notes-0.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _notes(folder: Path, size: int) -> list[dict[int, dict[str, float]]]:
    """Return what each rank has noted of its steps."""
    files = [folder / f"notes-{rank}.jsonl" for rank in range(size)]
    lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
    return [{(note := json.loads(line))["step"]: note for line in each} for each in lines]


def _of_steps(notes: Sequence[dict[int, dict[str, float]]], steps: Sequence[int], key: str) -> list[float]:
    """Return for each rank how many ms of a step that was."""
    return [fmean(of.get(step, {key: 0.0})[key] for step in steps) * 1e3 for of in notes]


def _job(timelines: Sequence[RankTimeline], topology: Topology | None, section: Section) -> PlayedJob:
    # The first step of a section may have begun before the rank knew of it.
    steps = range(section.first, section.last + 2)
    return PlayedJob([each.within(steps) for each in timelines], topology, {})


def _longer(job: PlayedJob, twins: Sequence[PlayedJob], size: int) -> tuple[float, float, float]:
    """Return by how many ms a step was longer than those of twins, with an interval: of medians, so that a moment in
    which another program ran does not count."""
    own, theirs = _windows(job, size), [each for twin in twins for each in _windows(twin, size)]
    usual = median(theirs)
    low, high = interval([each - usual for each in own], 0.95)
    slack_low, slack_high = interval([each - usual for each in theirs], 0.95)
    return tuple(1e3 * each for each in (median(own) - usual, low - slack_high, high - slack_low))  # type: ignore[return-value]


def _windows(job: PlayedJob, size: int = MOST_USUAL) -> list[float]:
    """Return the mean step of each few steps in a row."""
    return [fmean(job.base[at : at + size]) for at in range(0, len(job.base) - size + 1)]


def _result(
    program: str,
    seed: int,
    section: Section,
    job: PlayedJob,
    added: Sequence[float],
    busy: Sequence[float],
    twin: tuple[float, float, float] | None,
) -> Result:
    found: JudgedSteps = judge(job, {})
    named = [
        {
            "kind": each.kind,
            "ranks": each.ranks,
            "phase": each.phase,
            "ms": each.cost.ms_per_step,
            "site": each.site,
            "busy_ms": _busier(job, each.ranks[0], busy),
            "causes": each.causes,
        }
        for each in found.stragglers
    ]
    reasons = [each.reason for each in found.imbalances]
    count, mean, typical = len(job.numbers), job.step_s * 1e3, median(_windows(job)) * 1e3
    most = max(added) or None
    load = os.getloadavg()[0]
    return Result(program, seed, section, count, mean, typical, most, twin, named, reasons, found.undecided, load)


def _busier(job: PlayedJob, rank: int, busy: Sequence[float]) -> float:
    """Return for how many ms of a step a rank was longer on a core, or ready without one, than its peers."""
    return busy[rank] - median([busy[peer] for peer in job.peers(rank)] or [busy[rank]])


def run(program: str, seed: int, options: argparse.Namespace) -> list[Result]:
    """Run a program with a seed, or judge again what it has left, and keep what was found."""
    shares, kinds = ([each for each in given.split(",") if each] for given in (options.shares, options.kinds))
    sections = drawn(program, seed, list(map(float, shares)), kinds)
    folder = options.work / f"{program}-{seed}"
    if not options.again:
        needs_links = any(each.kind == "link" for each in sections)
        with networks(size_of(program)) if needs_links else nullcontext() as homes:
            wait(start(program, folder, sections, homes), folder)
    results = list(judged(program, seed, folder, sections))
    folder.with_name(f"{folder.name}.json").write_text(json.dumps([asdict(each) for each in results]))
    for copy in folder.glob("copy-*") if not options.keep else ():
        shutil.rmtree(copy)
    return results


def drawn(program: str, seed: int, given: Sequence[float], only: Sequence[str]) -> list[Section]:
    """Return the sections of a seed. `given` shares and `only` these kinds, if there are any."""
    if program in UNEVEN:
        firsts = range(FIRST_STEP, FIRST_STEP + NUM_UNEVEN * LENGTH, LENGTH)
        return [Section("uneven", 0.0, (), first, first + LENGTH - 1) for first in firsts]
    kinds = [kind for kind in KINDS.get(program, ()) if not only or kind in only]
    shares = given or ((SMALL_SHARE, *SHARES) if program in WITH_SMALL else SHARES)
    return sections_of(kinds, shares, size_of(program), random.Random(f"{program} {seed}"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--seeds", default="", help="such as 0-2")
    options.add_argument("--programs", default=",".join(KINDS))
    options.add_argument("--shares", default="", help="of a step, such as 0.1,0.5, instead of all")
    options.add_argument("--kinds", default="", help="of disturbances, such as loader,link, instead of all")
    options.add_argument("--keep", action="store_true", help="keep the rings, to judge them again")
    options.add_argument("--again", action="store_true", help="start nothing: judge the rings that were kept")
    options.add_argument("--page", type=Path)
    options.add_argument("--note", default="", help="how the results were made, for the page")
    given = options.parse_args()
    given.keep |= given.again
    given.work.mkdir(parents=True, exist_ok=True)
    hurry(NICE if given.seeds and not given.again and os.geteuid() == 0 else 0)
    first, _, last = given.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1) if first else ():
        for program in given.programs.split(","):
            for each in run(program, seed, given):
                print(_line(each), flush=True)
    if given.page:
        from slowing.page import page_of

        given.page.write_text(page_of([*_kept(given.work)], given.note))


def _kept(work: Path) -> Iterator[Result]:
    for path in sorted(work.glob("*.json")):
        for each in json.loads(path.read_text()):
            yield Result(
                **{
                    **each,
                    "section": Section(**{**each["section"], "ranks": tuple(each["section"]["ranks"])}),
                    "twin": each["twin"] and tuple(each["twin"]),
                }
            )


def _line(each: Result) -> str:
    named = "; ".join(f"{one['kind']} {one['ranks']} {one['phase']} {one['ms']:.0f} ms" for one in each.found)
    twin = "{:.0f} ({:.0f} to {:.0f})".format(*each.twin) if each.twin is not None else "-"
    added = f"{each.added:.0f}" if each.added is not None else "-"
    section = each.section
    return (
        f"{each.program} {each.seed} {section.kind} {section.share} {section.ranks} step {each.step_ms:.0f} "
        f"added {added} twin {twin}: {named or '-'} {each.by_nature or ''} {each.undecided or ''}"
    )


if __name__ == "__main__":
    main()
