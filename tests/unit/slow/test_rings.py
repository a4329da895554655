"""Who makes a job slow, by the rings of jobs whose times are known: next to the same job without the disturbance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import pytest

from bigsci_launch.runs.watching.typed import typed
from bigsci_launch.slow.answer import Asked, judged_rings
from bigsci_launch.slow.judge import judge
from bigsci_launch.slow.picture import StepPicture
from bigsci_launch.slow.straggler import SlowAnswer, SlowKind, StepPhase
from bigsci_launch.topology import Topology
from bigsci_launch.watch.show.lanes import draw_heat, shade
from tests.support.texts import has_parts

from .jobs import Act, Program, Seconds, answer_of_rings, data_parallel, noisy, pipelined, run
from .recorded import recorded

USUAL = {"data": 0.005, "forward": 0.04, "backward": 0.08, "optimizer": 0.01, "garbage": 0.0, "save": 0.02}
EIGHT = Topology(tp=2, pp=2, dp=2)
Change = Callable[[int, int, str], float]
Cores = Callable[[int, int], tuple[float, float]]
Delay = Callable[[int, int], float]


def even(_rank: int, _step: int, part: str) -> float:
    return USUAL[part]


def changed(change: Change) -> Seconds:
    """Return the usual seconds, and what `change` adds."""
    return lambda rank, step, part: USUAL[part] + change(rank, step, part)


def answer(
    program: Program, size: int, seconds: Seconds, topology: Topology | None = None, **more: object
) -> SlowAnswer:
    ranks = run(program, size, noisy(seconds), topology=topology, **more)  # type: ignore[arg-type]
    return answer_of_rings(ranks, {rank: f"n{rank // 4}" for rank in range(size)})


def step_ms(program: Program, size: int, seconds: Seconds, topology: Topology | None = None) -> float:
    found = answer(program, size, seconds, topology).step_ms
    assert found is not None
    return found


DISTURBED = {
    "forward": (StepPhase.FORWARD, lambda rank, step, part: 0.04 * (rank == 2 and part == "forward")),
    "backward": (StepPhase.BACKWARD, lambda rank, step, part: 0.04 * (rank == 2 and part == "backward")),
    "loader": (StepPhase.DATA, lambda rank, step, part: 0.04 * (rank == 2 and part == "data")),
    "optimizer": (StepPhase.OPTIMIZER, lambda rank, step, part: 0.04 * (rank == 2 and part == "optimizer")),
    "garbage": (
        StepPhase.GARBAGE_COLLECTION,
        lambda rank, step, part: 0.08 * (rank == 2 and part == "garbage" and step % 4 == 0),
    ),
    "device": (StepPhase.OUTSIDE_PYTHON, lambda rank, step, part: 0.3 * USUAL[part] * (rank == 2)),
}


CASES = [
    *(("data parallel", kind) for kind in DISTURBED),
    *(("tp2 pp2 dp2", kind) for kind in DISTURBED if kind != "garbage"),
]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_slow_rank_is_named_with_its_phase_and_what_a_step_would_gain(kind: str, layout: str) -> None:
    phase, change = DISTURBED[kind]
    job = (data_parallel(4), 4, None) if layout == "data parallel" else (pipelined(EIGHT), 8, EIGHT)
    program, size, topology = job
    found = answer(program, size, changed(change), topology)
    assert [(each.kind, each.ranks, each.phase) for each in found.stragglers] == [(SlowKind.RANK, (2,), phase)]
    cost = found.stragglers[0].cost
    twin = step_ms(program, size, changed(change), topology) - step_ms(program, size, even, topology)
    assert cost.ms_per_step == pytest.approx(twin, rel=0.15, abs=1.0)
    assert cost.low and cost.high and cost.low <= cost.ms_per_step <= cost.high
    assert found.stragglers[0].nodes == ("n0",)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", ["data parallel", "tp2 pp2 dp2"])
def test_noise_names_nobody(layout: str, seed: int) -> None:
    job = (data_parallel(4), 4, None) if layout == "data parallel" else (pipelined(EIGHT), 8, EIGHT)
    program, size, topology = job
    ranks = run(program, size, noisy(even, seed, 0.15), topology=topology)
    found = answer_of_rings(ranks, {})
    assert (found.stragglers, found.undecided, found.num_steps) == ((), None, 20)


def test_an_episode_is_no_straggler() -> None:
    found = answer(data_parallel(4), 4, changed(lambda rank, step, part: 0.04 * (rank == 1 and 8 <= step < 16)))
    assert not found.stragglers


def test_time_that_the_others_do_not_wait_for_costs_nothing() -> None:
    """The first stage waits for the second one, which has twice its work: a late rank there delays nothing."""
    found = answer(
        pipelined(EIGHT),
        8,
        changed(lambda rank, step, part: (0.03 if rank >= 4 else 0.01 * (rank == 1)) * (part == "forward")),
        EIGHT,
    )
    named = [each for each in found.stragglers if each.ranks == (1,)]
    assert not named


def test_all_ranks_of_a_stage_of_one_pipeline_are_a_slow_stage() -> None:
    found = answer(
        pipelined(EIGHT), 8, changed(lambda rank, step, part: 0.03 * (rank in (4, 5) and part == "backward")), EIGHT
    )
    assert [(each.kind, each.ranks, each.phase) for each in found.stragglers] == [
        (SlowKind.STAGE, (4, 5), StepPhase.BACKWARD)
    ]


@pytest.mark.parametrize(("stage", "is_blamed"), [(0, True), (1, False)])
@pytest.mark.parametrize("knows_topology", [True, False])
def test_a_stage_with_more_work_is_the_cut_and_the_last_one_has_the_loss(
    stage: int, is_blamed: bool, knows_topology: bool
) -> None:
    work = changed(lambda rank, step, part: 0.12 * (rank // 4 == stage and part in ("forward", "backward")))
    found = answer(pipelined(EIGHT), 8, work, EIGHT if knows_topology else None)
    ranks = tuple(range(4 * stage, 4 * stage + 4))
    assert [(each.kind, each.ranks) for each in found.stragglers] == ([(SlowKind.CUT, ranks)] if is_blamed else [])
    assert [each.ranks for each in found.imbalances] == ([] if is_blamed else [ranks])


def links_of(delay: Delay, **more: object) -> SlowAnswer:
    """Return what is found in a pipeline whose messages are late. Its ranks were never without a core, unless given."""
    cores = {"cores": lambda rank, step: (0.0, 0.0), **more}
    return answer_of_rings(run(pipelined(EIGHT), 8, noisy(even), topology=EIGHT, delay=delay, **cores), {})  # type: ignore[arg-type]


def late_link(one: int, other: int) -> float:
    return 0.005 * ({one, other} == {1, 5})


def test_a_slow_link_is_named_by_both_of_its_ends() -> None:
    found = links_of(late_link)
    assert [(each.kind, each.ranks) for each in found.stragglers] == [(SlowKind.LINK, (1, 5))]
    assert found.missing == ()


def test_a_slow_link_is_not_taken_for_clocks_that_are_apart() -> None:
    """Each rank has a clock of its own, as far as is known. Who sends leaves a message long before who receives it."""
    found = links_of(lambda one, other: 0.05 * ((one, other) == (0, 4)))
    assert [(each.kind, each.ranks) for each in found.stragglers] == [(SlowKind.LINK, (0, 4))]
    usual = links_of(lambda one, other: 0.0).step_ms
    assert found.step_ms and usual
    assert found.stragglers[0].cost.ms_per_step == pytest.approx(found.step_ms - usual, rel=0.15)


def test_a_slow_link_is_named_though_not_all_of_its_messages_are_waited_for() -> None:
    counts: Counter[tuple[int, int]] = Counter()

    def delay(one: int, other: int) -> float:
        counts[one, other] += 1
        return 0.012 * ({one, other} == {1, 5} and counts[one, other] % 4 == 0)

    found = links_of(delay)
    assert [(each.kind, each.ranks) for each in found.stragglers] == [(SlowKind.LINK, (1, 5))]


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (lambda rank, step: (0.0, 0.02 * (rank >= 4)), "rank 5 was kept from a CPU for 20 ms"),
        (None, "is not known"),
    ],
)
def test_late_messages_of_a_rank_that_may_have_waited_for_a_core_accuse_no_link(cores: Cores, words: str) -> None:
    """They are late in most steps: a thread gets its core at once now and then."""
    counts: Counter[tuple[int, int]] = Counter()

    def delay(one: int, other: int) -> float:
        counts[one, other] += 1
        return late_link(one, other) * ((counts[one, other] - 1) // 4 % 8 != 0)

    found = links_of(delay, cores=cores)
    assert found.stragglers == ()
    (why,) = found.missing
    assert has_parts(why, "ranks 1,5", words)


def test_a_link_is_named_whose_rank_waits_for_a_core_for_much_less() -> None:
    found = links_of(lambda one, other: 4 * late_link(one, other), cores=lambda rank, step: (0.0, 0.02 * (rank == 5)))
    assert [(each.kind, each.ranks) for each in found.stragglers] == [(SlowKind.LINK, (1, 5)), (SlowKind.RANK, (5,))]


def test_a_link_that_is_never_fast_is_named_though_its_ranks_wait_for_a_core_for_longer() -> None:
    found = links_of(late_link, cores=lambda rank, step: (0.0, 0.02))
    assert [(each.kind, each.ranks) for each in found.stragglers] == [(SlowKind.LINK, (1, 5))]


def test_a_stage_is_slow_for_one_reason() -> None:
    work = changed(lambda rank, step, part: 0.12 * (rank == 4 and part == "forward"))
    found = answer(pipelined(EIGHT), 8, work, EIGHT, cores=lambda rank, step: (0.0, 0.02 * (rank == 5)))
    assert [(each.ranks, each.phase) for each in found.stragglers] == [
        ((4,), StepPhase.FORWARD), ((5,), StepPhase.OUTSIDE_PYTHON)
    ]  # fmt: skip


def test_ranks_of_one_node_have_no_link() -> None:
    ranks = run(pipelined(EIGHT), 8, noisy(even), topology=EIGHT, delay=late_link, cores=lambda rank, step: (0.0, 0.0))
    found = answer_of_rings(ranks, dict.fromkeys(range(8), "n0"))
    assert found.stragglers == ()
    assert has_parts(found.missing[0], "ranks 1,5", "all are on n0")


@pytest.mark.parametrize(
    ("name", "link"),
    [("busy-host-1", None), ("busy-host-2", None), ("slow-link", (0, 2)), ("slow-link-3d", (2, 6))],
)
def test_of_busy_hosts_and_slow_links_the_links_alone_are_accused(name: str, link: tuple[int, int] | None) -> None:
    """The hosts had 12 times as many threads ready as cores; the links were limited to make steps a fifth longer. The
    ranks of the second one share two cores with six others, and were kept from them for two thirds of what it costs."""
    found = judge(recorded(name), {})
    assert [each.ranks for each in found.stragglers if each.kind is SlowKind.LINK] == ([link] if link else [])
    assert len(found.unclear) == (link is None)


def test_one_message_that_is_seconds_late_makes_no_slow_link() -> None:
    counts: Counter[tuple[int, int]] = Counter()

    def delay(one: int, other: int) -> float:
        counts[one, other] += 1
        return ({one, other} == {1, 5}) * (2.0 if (one, counts[one, other]) == (1, 50) else 0.0005)

    found = links_of(delay)
    assert (found.stragglers, found.missing) == ((), ())


def test_a_picture_has_the_slow_rank_in_dark_and_survives_its_file() -> None:
    change = changed(lambda rank, step, part: 0.12 * (rank == 2 and part == "backward"))
    ranks = run(pipelined(EIGHT), 8, noisy(change), topology=EIGHT)
    nodes = {rank: f"n{rank // 2}" for rank in range(8)}
    answer, job = judged_rings(ranks, nodes)
    asked = Asked(answer, EIGHT, job, nodes)
    picture = asked.picture
    assert picture is not None
    assert typed(StepPicture, json.loads(json.dumps(asdict(picture)))) == picture
    shades = {row.name: {shade(own / other - 1) for own, other in zip(row.work_ms, row.usual_ms, strict=True)}
              for row in picture.rows}  # fmt: skip
    assert shades["rank 2 (dp1 pp0 tp0)"] == {"more4"} and "more4" not in shades["rank 3 (dp1 pp0 tp1)"]
    assert len(picture.lanes) == 8 and draw_heat(picture).count("<rect") > 8 * len(picture.steps)
    assert {span.what for span in picture.lanes[2].spans} >= {"forward", "backward", "waits"}
    slow = {node for node, longer in asked.speeds.items() if longer > 1.05}
    assert slow == {"n1"}


HELD = 0.03


@pytest.mark.parametrize(("by_quota", "words"), [(False, "it waits for a CPU"), (True, "a CPU quota holds it up")])
def test_a_rank_that_waits_for_a_core_is_not_accused_of_its_code(by_quota: bool, words: str) -> None:
    """Its work is longer by what the kernel has counted, at whatever place that struck."""

    def cores(rank: int, _step: int) -> tuple[float, float]:
        return (HELD * by_quota, HELD * (not by_quota)) if rank == 2 else (0.0, 0.0)

    work = changed(lambda rank, step, part: HELD * (rank == 2 and part == "forward"))
    found = answer(data_parallel(4), 4, work, cores=cores)
    assert [(each.ranks, each.phase, each.site) for each in found.stragglers] == [
        ((2,), StepPhase.OUTSIDE_PYTHON, None)
    ]
    (cause,) = found.stragglers[0].causes
    assert has_parts(cause, words, "30 ms")
    few = answer(data_parallel(4), 4, work, cores=lambda rank, step: (0.0, 0.002 * (rank == 2)))
    assert [(each.phase, each.causes) for each in few.stragglers] == [(StepPhase.FORWARD, ())]


def test_a_rank_that_a_quota_holds_up_inside_collectives_is_named_with_what_they_lost() -> None:
    """All ranks are in the collective for as long, and work as they always do."""

    def with_held(rank: int, step: int) -> Iterator[Act]:
        for act in data_parallel(4)(rank, step, noisy(even)):
            yield replace(act, seconds=HELD) if act.group else act

    found = answer_of_rings(
        run(lambda rank, step, seconds: with_held(rank, step), 4, even,
            cores=lambda rank, step: (HELD * (rank == 1), 0.0)), {},
    )  # fmt: skip
    assert [(each.ranks, each.phase) for each in found.stragglers] == [((1,), StepPhase.OUTSIDE_PYTHON)]
    assert found.stragglers[0].cost.ms_per_step == pytest.approx(1e3 * HELD, rel=0.15)


def test_a_rank_that_is_slow_since_a_few_steps_is_found_in_the_newest_ones() -> None:
    work = changed(lambda rank, step, part: 0.04 * (rank == 1 and part == "forward" and step >= 40))
    found = answer(data_parallel(4), 4, work, steps=64)
    assert [(each.ranks, each.phase) for each in found.stragglers] == [((1,), StepPhase.FORWARD)]
    assert found.num_steps == 20


def test_clocks_that_are_apart_change_nothing() -> None:
    nodes = {rank: f"n{rank // 2}" for rank in range(8)}
    change = changed(DISTURBED["backward"][1])
    right = answer_of_rings(run(pipelined(EIGHT), 8, noisy(change), topology=EIGHT), nodes)
    apart = answer_of_rings(
        run(pipelined(EIGHT), 8, noisy(change), topology=EIGHT, clocks=lambda rank: rank // 2 * 5.0), nodes
    )
    assert [(each.kind, each.ranks, each.phase) for each in apart.stragglers] == [
        (SlowKind.RANK, (2,), StepPhase.BACKWARD)
    ]
    assert apart.stragglers[0].cost.ms_per_step == pytest.approx(right.stragglers[0].cost.ms_per_step, rel=0.02)


def test_a_rank_that_alone_saves_is_no_straggler_and_one_that_saves_slowly_is() -> None:
    alone = answer(data_parallel(4, saves=lambda rank, step: rank == 0), 4, even)
    assert (alone.stragglers, [each.ranks for each in alone.imbalances]) == ((), [(0,)])
    slow = answer(
        data_parallel(4, saves=lambda rank, step: step % 4 == 0), 4,
        changed(lambda rank, step, part: 0.6 * (rank == 0 and part == "save")),
    )  # fmt: skip
    assert [(each.ranks, each.phase) for each in slow.stragglers] == [((0,), StepPhase.SAVE)]


def test_uneven_lengths_blame_no_rank() -> None:
    found = answer(
        data_parallel(4),
        4,
        changed(lambda rank, step, part: 0.06 * (part == "forward" and hash((rank, step)) % 4 == 0)),
    )
    assert not found.stragglers
    assert [each.ranks for each in found.imbalances] == [(0, 1, 2, 3)]


def test_two_slow_ranks_are_both_named() -> None:
    work = changed(lambda rank, step, part: 0.04 * (rank in (1, 6) and part == "forward"))
    found = answer(data_parallel(8), 8, work)
    assert {each.ranks for each in found.stragglers} == {(1,), (6,)}


def test_what_is_not_known_is_not_judged() -> None:
    ranks = run(data_parallel(4), 4, changed(DISTURBED["forward"][1]))
    short = answer_of_rings(run(data_parallel(4), 4, even, steps=9), {})
    assert short.num_steps == 5 and short.undecided
    on_device = [replace(each, ring=replace(each.ring, are_blocking=False)) for each in ranks if each.ring]
    for few in (ranks[:1], [], on_device):
        found = answer_of_rings(few, {})
        assert found.undecided and not found.stragglers
    gone = [replace(ranks[3], ring=None, why="its node was lost"), *ranks[:3]]
    found = answer_of_rings(gone, {})
    assert found.missing == ("rank 3: its node was lost",)
    assert [each.ranks for each in found.stragglers] == [(2,)]
