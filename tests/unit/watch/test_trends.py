"""What the values of steps show. The lines of BLOOM's spike and of its slow node are as they were published."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from bigsci_launch.watch.judge.log_event import LogEvent
from bigsci_launch.watch.judge.slower import RECENT
from tests.support.texts import has_parts

from .conftest import Watched

Watch = Callable[..., Watched]
# 2022-04-12: seconds, loss, norm of the gradient of steps 31214 to 31222, and of 31250 and 31251.
SPIKE = (
    (106.46, 2.198845, 0.242),
    (105.90, 2.220424, 0.947),
    (106.40, 2.595213, 2.390),
    (106.33, 2.241558, 15.886),
    (107.53, 2.345279, 145.119),
    (106.36, 5.098124, 960.351),
    (106.30, 3.492029, 353.201),
    (106.13, 3.213059, 379.330),
    (106.44, 2.804948, 650.246),
)
CALM = ((106.09, 2.215699, 0.267), (106.13, 2.235667, 0.205))


def healthy(seed: int = 1, seconds: float = 105.2, noise: float = 0.004) -> Iterable[tuple[float, float, float]]:
    draw = random.Random(seed)
    while True:
        yield seconds * (1 + draw.gauss(0, noise)), 2.2 + draw.gauss(0, 0.012), 0.17 * 2 ** draw.gauss(0, 0.3)


def run(watched: Watched, first: int, rows: Iterable[tuple[float, float, float]], size: int = 2048) -> int:
    """See steps, and return the number of the next one."""
    step = first
    for seconds, loss, norm in rows:
        watched.see(
            LogEvent("step", step=step, seconds=seconds, loss=loss, grad_norm=norm, batch_size=size), after=seconds
        )
        step += 1
    return step


def take(number: int, rows: Iterable[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    return [row for row, _ in zip(rows, range(number), strict=False)]


def found(watched: Watched) -> list[tuple[str, int, bool]]:
    return [(noticed.kind, noticed.step, noticed.is_over) for noticed in watched.noticed]


@pytest.mark.parametrize("seed", range(5))
def test_healthy_steps_show_nothing(watch: Watch, seed: int) -> None:
    watched = watch()
    run(watched, 1, take(500, healthy(seed)))
    assert found(watched) == []


def test_blooms_loss_spike_is_noticed_at_its_first_high_loss_and_its_end_too(watch: Watch) -> None:
    watched = watch()
    run(watched, 31214 - 60, [*take(60, healthy()), *SPIKE[:3]])
    assert found(watched) == [("loss_spike", 31216, False)], "one step with an odd gradient is no spike"
    run(watched, 31217, [*SPIKE[3:], *(CALM * 15)])
    assert found(watched)[1:] == [
        *(("grad_spike", 31216, False), ("loss_spike", 31216, True), ("grad_spike", 31216, True))
    ]
    rise, *_, end, calm = watched.noticed
    assert has_parts(rise.sentence, "31216", "2.595", "2.2") and has_parts(end.sentence, "31216", "5.098")
    assert "up to 960.4" in calm.sentence


def test_blooms_slow_node_is_noticed_once_with_its_beginning(watch: Watch) -> None:
    watched = watch()
    step = run(watched, 42700, take(82, healthy(seconds=105.16, noise=0.001)))
    assert step == 42782
    slow = [(106.25, 2.11, 0.144), (110.17, 2.12, 0.135), *take(30, healthy(seconds=111.0, noise=0.001))]
    run(watched, 42782, slow[:RECENT])
    assert found(watched) == [("slower", 42783, False)]
    assert has_parts(watched.noticed[0].sentence, "step 42783, ", " 111", " 105.2 s", " 5.")
    step = run(watched, 42790, slow[RECENT:])
    run(watched, step, take(20, healthy(seconds=105.2, noise=0.001)))
    assert found(watched) == [("slower", 42783, False), ("slower", 42783, True)]


def test_a_second_slow_time_is_compared_with_the_time_before_the_first(watch: Watch) -> None:
    watched = watch()
    step = 1
    for seconds, number in ((105.2, 60), (111.0, 190), (105.2, 20), (111.0, 10)):
        step = run(watched, step, take(number, healthy(seconds=seconds, noise=0.002)))
    assert [is_over for _, _, is_over in found(watched)] == [False, True, False]


def test_one_slow_step_is_no_change(watch: Watch) -> None:
    watched = watch()
    rows = take(200, healthy())
    for at in range(40, 200, 5):
        rows[at] = (180.0, *rows[at][1:])
    run(watched, 1, rows)
    assert found(watched) == []


def test_a_slow_stage_of_the_ramp_up_is_no_change(watch: Watch) -> None:
    watched = watch()
    step = 1
    for size in range(192, 1024, 64):
        step = run(watched, step, take(40, healthy(seconds=15 + size / 20)), size)
    assert found(watched) == []


def test_the_steps_around_evaluations_saves_and_starts_are_not_timed(watch: Watch) -> None:
    watched = watch()
    rows = take(60, healthy())
    step = run(watched, 1, rows)
    for _ in range(20):
        watched.see(LogEvent("evaluated", step=step - 1), after=30.0)
        watched.see(LogEvent("saving", step=step - 1), LogEvent("saved", step=step - 1), after=30.0)
        step = run(watched, step, [(165.0, *rows[0][1:])])
    for _ in range(5):
        watched.tracker.new_attempt(watched.now)
        step = run(watched, step - 3, [(300.0, *rows[0][1:])] * 3)
    assert found(watched) == []


def test_a_save_that_prints_nothing_is_not_timed_if_it_is_expected(watch: Watch) -> None:
    """Lines of every tenth step, with a save after every twentieth that makes the next one longer."""
    watched = watch(save_interval=20, eval_interval=0)
    for step in range(10, 1200, 10):
        watched.see(LogEvent("step", step=step, seconds=14.0 if (step - 10) % 20 == 0 else 10.0), after=100.0)
    assert found(watched) == []


def test_times_of_lines_are_used_where_they_say_no_seconds(watch: Watch) -> None:
    watched = watch()
    clock = 1000.0
    for step in range(1, 80):
        clock += 2.0 if step < 60 else 2.4
        watched.see(LogEvent("step", clock, step=step), after=2.0)
    assert found(watched) == [("slower", 60, False)]
    assert watched.noticed[0].since == 1000.0 + 59 * 2.0 + 2.4


def test_a_loss_that_is_no_number_is_noticed_at_once_and_once(watch: Watch) -> None:
    watched = watch()
    run(watched, 1, take(3, healthy()))
    run(watched, 4, [(100.0, float("nan"), 0.2)] * 4)
    assert found(watched) == [("nan", 4, False)]
    run(watched, 8, take(3, healthy()))
    assert found(watched) == [("nan", 4, False), ("nan", 4, True)]


def skip(watched: Watched, first: int, number: int) -> None:
    watched.see(*(LogEvent("step", step=first + each, seconds=1.0, text="skipped") for each in range(number)))


def test_steps_that_fp16_skips_at_first_are_no_finding_but_later_many_in_a_row_are(watch: Watch) -> None:
    watched = watch()
    skip(watched, 1, 16)
    run(watched, 17, take(30, healthy()))
    skip(watched, 47, 2)
    run(watched, 49, take(5, healthy()))
    assert found(watched) == []
    skip(watched, 54, 6)
    assert found(watched) == [("nan", 54, False)]
    assert has_parts(watched.noticed[0].sentence, "5 steps", "step 54")


def test_losses_of_small_batches_that_differ_by_factors_are_no_spikes(watch: Watch) -> None:
    watched = watch()
    draw = random.Random(1)
    for step in range(1, 3000):
        watched.see(LogEvent("step", step=step, loss=0.8 * 2 ** draw.gauss(0, 0.8), grad_norm=2 ** draw.gauss(0, 0.8)))
    assert found(watched) == []


def test_values_that_may_be_negative_are_not_judged(watch: Watch) -> None:
    watched = watch()
    for step in range(1, 60):
        watched.see(LogEvent("step", step=step, loss=-1.0 if step % 2 else 5.0))
    assert found(watched) == []


def test_reports_without_numbers_are_counted(watch: Watch) -> None:
    watched = watch()
    draw = random.Random(1)
    losses = [2.0 + draw.gauss(0, 0.02) for _ in range(40)]
    for loss in [*losses, 4.0, 4.1]:
        watched.see(LogEvent("step", loss=loss), after=5.0)
    assert found(watched) == [("loss_spike", 41, False)]
