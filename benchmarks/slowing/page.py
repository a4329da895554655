"""Writes the page of `slow_runs.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from slow_runs import FIRST_STEP, HELD_OUT_FROM, KINDS, LENGTH, NICE, PHASES, UNEVEN, WORDS, Result, is_other

HEAD = """<!-- Made by `python benchmarks/slow_runs.py --work FOLDER --page docs/measurements/slow.md`. -->

# Who makes a job slow

Four or eight ranks of gloo on one machine with two cores are slowed down in some of their steps. `bsl slow` gets the
rings of one section of a job at a time: {length} steps, {seen} of them complete.

| program | |
|---|---|
| `ddp`, `fsdp2` | a program that knows nothing of `bsl`: a `DataLoader`, four layers, saves |
| `pipe` | the same with `torch.distributed.pipelining`: 1F1B, two stages, two replicas |
| `train`, `train tp2` | `bsl train` with pp2 dp2, and with tp2 pp2 |
| `tensor` | a program that knows nothing of `bsl`, with tp2 dp2: an `all_reduce` after each layer, in both directions |
| `3d`, `train 3d` | tp2 pp2 dp2 on eight ranks: `pipe` with the layers of `tensor`, and `bsl train` |
| `trainer` | a loop as of a library, under DDP: four micro-batches, clipping, evaluations, saves of one rank |
| `mesh` | FSDP2 over two replicas of two ranks that share the heads and the width of each block |
| `lengths` | DDP whose sequences differ in length: in each step another rank has most to do |
| `experts` | DDP with an expert on each rank, to which `all_to_all` sends tokens as a router would |
| `loss` | a pipeline as `pipe`, whose last stage also computes the loss, 20 ms for each micro-batch |

Most disturbances are sleeps of a known share of a step, so that they take no core from other ranks. Quotas are real
ones of a cgroup. Ranks of pipelines have networks of their own: a slow link is one cable with a limited rate (`tbf`),
by which what is sent in a step takes that share longer. A garbage collection is a real one with a pause inside.

- **Truth.** Undisturbed sections before and after a disturbed one are its *twins*. The difference of the medians, of
  4 or 5 steps each, is what the disturbance costs; it has an interval, which is wide on a busy machine. Ranks that
  share cores work faster while one of them sleeps: twins see that, and the stated cost does not, which takes the other
  ranks as they were. *Added* is what the slow rank has measured that it was held up, some of which others would have
  waited for anyway, above all in a pipeline.
- **Which sections count.** A disturbance that others do not wait for costs nothing, and is not to be found. So recall
  is that of sections whose steps are at least 10 % longer than their twins.
- **Innocent** is a rank that is named in an undisturbed section, or is not the disturbed one. Other programs on this
  machine take cores from some ranks for longer than from others. Ranks that are named because they wait for a CPU,
  and not for their code, have a row of their own. *It did*: by a count of the ranks themselves, it was on
  a core or ready without one for longer than its peers, by at least half of what is stated.
- **Priority.** Ranks have priority over other programs (nice {nice}).

"""
GOALS = """
| | goal | seen |
|---|---|---|
| sections at least 10 % slower, whose rank, stage or link is named | 95 % | {recall} |
| the same, by program | | {by_program} |
| sections 5 to 10 % slower | - | {small} |
| innocent ranks named as slow | 0 | {innocent} |
| innocent ranks named as waiting for a CPU, which other programs took | - | {waiting} |
| sections uneven by nature in which no rank is named, with the reason | all | {uneven} |
| phase right, of those named | 90 % | {phase} |
| ms within 15 % of the twins | all | {near}; within 15 % of their interval: {agrees} |
| the same, where half of that interval is at most 15 % of what it is about | all | {near_known} |
| ms within 15 % of what was added, without pipelines and quotas | | {near_added} |

"""
NOT_RUN = """## What it misses

At least 10 % slower, and not named: {missed}.

A quota's time counts for each core that it keeps from the threads of a rank, so that it is stated too high where
several of them are ready at once. Innocent ranks that are named as slow, by kind: {accused}.
{note}
## What was not run

A link with a longer delay (`netem`): the kernel of this machine has none. Several machines, GPUs.
{left}The first {first} steps of a job are in no section.
"""
LEAST, LEAST_SMALL, CLOSE = 0.1, 0.05, 0.15
PARTS = {
    "Seeds that it was made with": lambda each: each.seed < HELD_OUT_FROM,
    "Seeds that were held out": lambda each: each.seed >= HELD_OUT_FROM and not is_other(each.program),
    "Programs that were held out": lambda each: each.seed >= HELD_OUT_FROM and is_other(each.program),
}


def page_of(results: Sequence[Result], note: str) -> str:
    """Return the page of all results, with a note on how they were made, if there is one."""
    text = HEAD.format(length=LENGTH, seen=LENGTH - 1, nice=NICE)
    for name, belongs in PARTS.items():
        part = [each for each in results if belongs(each)]
        if part:
            loads = sorted(each.load for each in part)
            text += (
                f"## {name}\n\nThe load of the machine, as steps were judged, was {loads[0]:.0f} to {loads[-1]:.0f}.\n"
            )
            text += _goals(part) + "\n".join(_table(part)) + "\n\n"
        else:
            text += f"## {name}\n\nNot run with the rules of today: not measured.\n\n"
    missed = [each for each in results if each.slower is not None and each.slower >= LEAST and not each.hits]
    names = "; ".join(f"{each.program}, {_words(each.section.kind, each.section.share)}" for each in missed)
    accused = Counter((each.program, one["kind"]) for each in results for one in each.innocent if not one["causes"])
    kinds = "; ".join(f"{program}, {kind}: {count}" for (program, kind), count in accused.items())
    left = [f"`{program}`" for program in (*KINDS, *UNEVEN) if program not in {each.program for each in results}]
    not_run = f"Of the programs, {', '.join(left)}. " if left else ""
    more = {"missed": names or "none", "accused": kinds or "none", "left": not_run}
    return text + NOT_RUN.format(first=FIRST_STEP, note=f"\n{note}\n" if note else "", **more).rstrip() + "\n"


def _words(kind: str, share: float) -> str:
    return f"{WORDS[kind]}, {share:.0%}" if share else WORDS[kind]


def _goals(results: Sequence[Result]) -> str:
    hits = [each for each in results if each.hits]
    slower = [each for each in results if each.slower is not None and each.slower >= LEAST]
    small = [each for each in results if each.slower is not None and LEAST_SMALL <= each.slower < LEAST]
    judged = [each for each in hits if each.section.kind in PHASES]
    uneven = [each for each in results if each.section.kind == "uneven"]
    alone = [each for each in hits if each.program in ("ddp", "fsdp2") and each.section.kind != "quota"]
    large = [each for each in slower if each.hits]
    rows = [(each.hits[0]["ms"], *each.twin) for each in large if each.twin is not None]
    off = [abs(stated - twin) / twin for stated, twin, _, _ in rows]
    known = [abs(stated - twin) / twin for stated, twin, low, high in rows if (high - low) / 2 <= CLOSE * twin]
    agreeing = [each.agrees for each in large if each.agrees is not None]
    innocent = [one for each in results for one in each.innocent]
    waiting = [one for one in innocent if one["causes"]]
    slow = [one for one in innocent if not one["causes"]]
    return GOALS.format(
        recall=_part(sum(bool(each.hits) for each in slower), len(slower)),
        by_program="; ".join(_of_program(slower, program) for program in sorted({each.program for each in slower})),
        uneven=_part(sum(bool(each.by_nature and not each.found) for each in uneven), len(uneven)),
        small=_part(sum(bool(each.hits) for each in small), len(small)),
        innocent=f"{len(slow)} in {len(results)} sections",
        waiting=f"{len(waiting)} in {len(results)} sections; it did: {sum(map(_was_busy, waiting))}",
        phase=_part(sum(each.has_right_phase for each in judged), len(judged)),
        near=_near(off),
        near_known=_near(known),
        agrees=_part(sum(agreeing), len(agreeing)),
        near_added=_near([each.ms_off for each in alone if each.ms_off is not None]),
    )


def _was_busy(one: dict[str, Any]) -> bool:
    return bool(one["busy_ms"] > one["ms"] / 2)


def _of_program(slower: Sequence[Result], program: str) -> str:
    of = [each for each in slower if each.program == program]
    return f"{program} {_part(sum(bool(each.hits) for each in of), len(of))}"


def _near(off: Sequence[float]) -> str:
    middle = f"; the median is {median(off):.0%} off" if off else ""
    return _part(sum(each <= CLOSE for each in off), len(off)) + middle


def _part(count: int, of: int) -> str:
    return f"{count} of {of} ({count / of:.0%})" if of else "0 of 0"


def _table(results: Sequence[Result]) -> Iterator[str]:
    yield "| program | disturbed | sections | named | innocent | phase right | ms stated / twins (interval) / added |"
    yield "|---|---|---|---|---|---|---|"
    kinds = {(each.program, each.section.kind, each.section.share): None for each in results}
    for program, kind, share in sorted(kinds, key=lambda one: (one[0], one[1] == "none", *one[1:])):
        rows = [
            each for each in results if (each.program, each.section.kind, each.section.share) == (program, kind, share)
        ]
        yield _row(program, kind, share, rows)


def _row(program: str, kind: str, share: float, rows: Sequence[Result]) -> str:
    words = _words(kind, share)
    named, innocent = sum(bool(each.hits) for each in rows), sum(len(each.innocent) for each in rows)
    right = str(sum(each.has_right_phase for each in rows)) if kind in PHASES else "-"
    figures = [_figures(each) for each in rows if share]
    return (
        f"| {program} | {words} | {len(rows)} | {named if share else '-'} | {innocent} | {right} | "
        f"{'; '.join(figures) or '-'} |"
    )


def _figures(each: Result) -> str:
    stated = f"{each.hits[0]['ms']:.0f}" if each.hits else "-"
    twins = "{:.0f} ({:.0f} to {:.0f})".format(*each.twin) if each.twin is not None else "?"
    return f"{stated} / {twins} / {f'{each.added:.0f}' if each.added is not None else '?'}"
