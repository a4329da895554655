"""When a job is over, when it is given up, and what people and watchers ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.recover.orders import RankEnded, RunnersEnded, SlotLost, Terminated

from .conftest import Job

MakeJob = Callable[..., Job]


# ------------------------------------------------------------------------------------------- phases and progress


def test_a_phase_is_recorded_when_its_last_rank_has_come_to_it(make_job: MakeJob) -> None:
    job = make_job("in_place", pp=1)
    job.say(0, "joined", seconds=0.1)
    assert not job.records_of("phase")
    job.wait(0.5)
    job.say(1, "joined", seconds=0.4)
    job.say(0, "restored", step=4, source="memory", why=None)
    job.say(1, "restored", step=4, source="checkpoint", why=(why := "slots 0 and 1 were buddies"))
    for step in (5, 6):
        for rank in (0, 1):
            job.say(rank, "stepped", step=step)
    phases = [(record["phase"], record["step"], record["source"], record["why"]) for record in job.records_of("phase")]
    assert phases == [
        ("joined", None, None, None),
        ("restored", 4, "checkpoint", why),
        ("first_step", 5, None, None),
    ]
    assert job.records_of("phase")[0]["seconds"] == pytest.approx(0.5)
    job.kill(0)
    job.leave()
    assert job.records_of("ended")[0]["step"] == 6


def fail_in_place(job: Job, rank: int, step: int | None, code: int = 1, back_at: int | None = None) -> None:
    """Have a generation finish a step, fail, and be followed by the next one, if there is one."""
    job.wait(1)
    for each in range(len(job.generation)) if back_at is not None else ():
        job.say(each, "restored", step=back_at, source="checkpoint")
    for each in range(len(job.generation)) if step is not None else ():
        job.say(each, "stepped", step=step)
    job.end(rank, code)
    job.ready(job.slot_of(rank))
    job.leave()


def test_three_generations_that_end_at_one_step_are_the_end(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("in_place")
    for step in (5, 6, 6):
        fail_in_place(job, 1, step)
    assert job.code is None
    fail_in_place(job, 2, None, code=41)
    assert job.code == 41
    (gave_up,) = job.records_of("gave_up")
    assert gave_up["rank"] == 2
    check_text(gave_up["why"])
    assert len(job.records_of("ended")) == 4


@pytest.mark.parametrize("steps", [(38, 40, 40, 38), (38, 40, 39, 38), (40, 38, 40)])
def test_a_generation_that_gets_no_further_than_the_furthest_is_no_progress(
    make_job: MakeJob, steps: tuple[int, ...]
) -> None:
    job = make_job("in_place")
    for step in steps:
        assert job.code is None
        fail_in_place(job, 1, step)
    assert job.code == 1


def test_steps_that_are_done_again_after_a_lost_state_are_progress(make_job: MakeJob) -> None:
    job = make_job("in_place")
    fail_in_place(job, 1, 40)
    fail_in_place(job, 1, 7, back_at=0)
    for step in (14, 21, 28):
        fail_in_place(job, 2, step)
    assert job.code is None
    for step in (28, 28):
        fail_in_place(job, 2, step)
    assert job.code == 1


def test_a_failure_that_costs_the_state_each_time_ends_the_job(make_job: MakeJob) -> None:
    job = make_job("in_place")
    for step, back_at in ((40, None), (40, 30), (39, 30)):
        fail_in_place(job, 1, step, back_at=back_at)
        assert job.code is None
    fail_in_place(job, 1, 40, back_at=30)
    assert job.code == 1


def test_a_rank_that_ends_with_0_before_it_has_finished_is_replaced(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.end(2, 0)
    job.ready(2)
    job.leave()
    assert (job.number, job.failures, job.code) == (1, [(0, "left_early", 2)], None)
    for rank in range(4):
        job.say(rank, "finished")
        job.end(rank, 0)
    assert job.code == 0


def test_a_program_that_ends_with_0_is_the_cause_of_peers_that_are_only_lost(make_job: MakeJob) -> None:
    job = make_job("restart", pp=1, dp=3, nodes=(3,))
    job.words = {0: "RuntimeError: Connection closed by peer [10.0.0.2]:4711"}
    job.end(2, 0)
    job.end(0, 7)
    job.end(1, 143, was_requested=True)
    assert job.failures == [(0, "left_early", 2), (0, "died", 0)]
    (gave_up,) = job.records_of("gave_up")
    assert (job.code, gave_up["rank"]) == (7, 2)


def test_a_finished_step_is_progress(make_job: MakeJob) -> None:
    job = make_job("in_place")
    for step in (5, 5, 6, 6, 7, 7):
        fail_in_place(job, 1, step)
    assert (job.code, job.number) == (None, 6)


def fail_restarted(job: Job, lived_s: float, step: int | None) -> None:
    job.step = step
    job.wait(lived_s)
    job.end(0, 7)
    job.ready(0)
    job.end(1, 143, was_requested=True)
    job.ready(1)


@pytest.mark.parametrize(
    ("lives", "is_end"),
    [
        ([(5, None), (5, None), (5, None)], True),
        ([(5, None), (70, None), (5, None), (5, None)], False),
        ([(70, 9), (70, 9), (70, 9)], True),
        ([(5, 7), (5, 8), (5, 9)], False),
        ([(5, 9), (70, None), (5, 9)], False),
    ],
)
def test_where_programs_tell_no_step_short_lives_count(
    make_job: MakeJob, lives: list[tuple[float, int | None]], is_end: bool
) -> None:
    job = make_job("restart", pp=1, nodes=(2,))
    for lived_s, step in lives:
        fail_restarted(job, lived_s, step)
    assert (job.code == 7) == is_end, job.records_of("gave_up")
    assert job.records_of("ended")[-1]["step"] == lives[-1][1]


def test_a_final_error_is_not_tried_again(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("in_place")
    job.say(1, "final", text="guard: weights differ")
    job.end(1, 3, is_final=True)
    job.leave()
    assert job.code == 3
    check_text(job.records_of("gave_up")[0]["why"])


@pytest.mark.parametrize(
    ("accused", "own", "cause"),
    [
        ((3,), {"code": 3}, (3, 3, None)),
        ((3,), {"signal": "SIGKILL", "was_requested": True}, (3, None, "SIGKILL")),
        ((3,), {}, (3, None, None)),
        ((2, 3), {"code": 3}, (2, None, None)),
        ((), {"code": 3}, (None, 3, None)),
    ],
)
def test_the_cause_is_whom_a_guard_accuses_and_not_who_ended_first(
    make_job: MakeJob, accused: tuple[int, ...], own: dict[str, Any], cause: tuple[int | None, int | None, str | None]
) -> None:
    job = make_job("in_place")
    job.accused = {rank: accused for rank in (1, 3)}
    job.words = {1: "GuardError: copies differ", 3: "GuardError: copies differ"}
    job.end(1, 3, is_final=True)
    if own:
        job.end(3, **own)
    job.leave()
    first, (gave_up,) = job.records_of("failed")[0], job.records_of("gave_up")
    assert (first["rank"], first["code"], first["signal"]) == cause
    assert (first["kind"], gave_up["rank"], job.code) == ("died", cause[0], 3)
    assert gave_up["why"].endswith("GuardError: copies differ")
    assert 1 in [failed["rank"] for failed in job.records_of("failed")]


def test_a_guard_does_not_excuse_a_rank_that_died_before_it_spoke(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.accused = {1: (3,)}
    job.end(0, signal="SIGKILL")
    job.end(1, 3)
    job.ready(0)
    job.ready(1)
    job.leave()
    assert [rank for _, _, rank in job.failures] == [0, 1]


def test_a_rank_that_does_not_exit_with_its_final_error_is_killed(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.say(1, "final", text="guard: weights differ")
    job.wait(10.1)
    assert [message["do"] for message in job.since_begin(1)] == ["kill"]
    job.end(1, signal="SIGKILL", was_requested=True, is_final=True)
    job.leave()
    assert job.code == 137


def test_the_job_is_finished_when_every_rank_has_ended_with_0(make_job: MakeJob) -> None:
    job = make_job("restart", pp=1, absent=(2, 3))
    job.end(0, 0)
    assert job.code is None
    job.end(1, 0)
    assert job.code == job.machine.exit_code == 0
    assert job.records_of("finished") == [{"event": "finished", "generation": 0, "exit_code": 0}]
    assert job.told[1][-1] == {"do": "leave", "code": 0}


def test_after_a_rank_has_ended_with_0_a_failure_is_that_of_the_job(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("restart", pp=1, nodes=(2,))
    job.end(0, 0)
    job.end(1, 9)
    assert job.code == 9
    check_text(job.records_of("gave_up")[0]["why"])


@pytest.mark.parametrize(
    "end",
    [{"signal": "SIGKILL"}, {"code": 1}, {"code": 0, "was_requested": True}, None],
    ids=["killed", "failed", "told", "runner lost"],
)
def test_a_rank_that_has_finished_is_done_however_its_process_ends(
    make_job: MakeJob, end: dict[str, Any] | None
) -> None:
    job = make_job("in_place", pp=1, nodes=(2,), suffix=None)
    for rank in (0, 1):
        job.say(rank, "finished")
    if end is None:
        job.lose(1)
    else:
        job.end(1, **end)
    assert (job.code, job.restarted) == (None, [])
    job.end(0, 0)
    assert (job.code, job.failures, len(job.records_of("finished"))) == (0, [], 1)


def test_a_rank_that_had_not_finished_when_it_was_told_to_end_has_failed(make_job: MakeJob) -> None:
    job = make_job("in_place", pp=1, nodes=(2,))
    job.end(1, 0, was_requested=True)
    job.leave(0)
    assert job.failures == [(0, "died", 1)]


def test_ranks_may_not_run_for_ever_after_the_first_has_ended(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("restart", pp=1, nodes=(2,), wait_s=30)
    job.end(0, 0)
    job.wait(29)
    assert job.code is None
    job.wait(2)
    assert job.code == 1
    check_text(job.records_of("gave_up")[0]["why"])


def test_a_slot_whose_process_never_lives_long_enough_gets_no_rank(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.end(1, 1)
    for _ in range(3):
        job.take(RankEnded(1, None, None, 1, None, 1.0, False, False, None))
    job.ready(1)
    job.leave()
    assert job.generation == [0, 5, 2, 3]


def test_deaths_of_waiting_processes_count_from_the_last_generation_that_stepped(make_job: MakeJob) -> None:
    job = make_job("in_place", pp=1, nodes=(2, 1))
    for number in range(4):
        for rank in (0, 1):
            job.say(rank, "stepped", step=number)
        job.end(1, signal="SIGKILL")
        job.take(RankEnded(1, None, None, 1, None, 1.0, False, False, None))
        job.ready(1)
        job.leave(0)
        assert (job.number, job.generation) == (number + 1, [0, 1])


# ------------------------------------------------------------------------------------------- what others ask for


def test_a_fence_kills_the_rank_and_ends_the_generation(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.ask("fence", 2)
    assert job.answers == [None]
    assert [message["do"] for message in job.since_begin(2)] == ["kill"]
    assert [message["do"] for message in job.since_begin(0)] == ["end"]
    job.leave(0, 1, 3)
    job.end(2, signal="SIGKILL", was_requested=True)
    job.ready(2)
    assert job.number == 1
    (failed,) = job.records_of("failed")
    assert (failed["kind"], failed["rank"], failed["signal"]) == ("hung", 2, "SIGKILL")
    assert failed["words"].startswith("it hangs")
    assert job.records_of("ended")[0]["killed"] == []


@pytest.mark.parametrize(("generation", "rank"), [(1, 2), (0, 9), (0, None)])
def test_a_fence_for_another_generation_or_rank_is_refused(
    make_job: MakeJob, generation: int, rank: int | None
) -> None:
    job = make_job("in_place")
    job.ask("fence", rank, generation)
    assert job.answers[0] is not None
    assert all(job.since_begin(slot) == [] for slot in range(4))


def test_a_fence_that_comes_when_the_generation_ends_is_refused(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.kill(0)
    job.ask("fence", 2)
    assert [answer is None for answer in job.answers] == [False]
    assert [message["do"] for message in job.since_begin(2)] == ["end"]


def test_a_restart_that_is_asked_for_blames_nobody(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.ask("begin_again")
    job.leave()
    assert (job.number, job.failures) == (1, [(0, "asked", None)])


def test_a_job_that_is_told_to_end_recovers_nothing(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.take(Terminated(15))
    assert job.code == 143
    assert job.since_begin(1) == [], "Slurm tells the ranks itself, at about this time"
    job.end(1, signal="SIGTERM", was_requested=True)
    job.lose(2)
    job.wait(1.1)
    assert job.since_begin(3) == [{"do": "leave", "code": 143, "grace_s": 30.0}]
    job.wait(60)
    assert (job.number, job.machine.exit_code) == (0, 143)
    assert [record["event"] for record in job.records] == ["began", "gave_up"]


def test_ranks_that_all_end_well_when_they_are_told_to_are_a_good_end(make_job: MakeJob) -> None:
    job = make_job("restart", pp=1, nodes=(2,))
    job.take(Terminated(15))
    job.end(0, 0, was_requested=True)
    job.end(1, 0, was_requested=True)
    assert job.machine.exit_code == 0


def test_when_every_runner_has_ended_the_job_is_over(make_job: MakeJob) -> None:
    job = make_job("restart")
    job.take(RunnersEnded(9))
    assert job.code == 9
    job.take(SlotLost(0, "the connection to its runner was closed"))
    assert [record["event"] for record in job.records] == ["began", "gave_up"]
