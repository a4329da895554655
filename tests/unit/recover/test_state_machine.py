"""What the controller does next: generations begin, fail, end and follow each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bigsci_launch.recover.members import BatchSizes
from bigsci_launch.recover.orders import RankEnded, SlotNeverCame, SlotUnfit

from .conftest import EPOCH, Job

MakeJob = Callable[..., Job]


# ------------------------------------------------------------------------------------------- how generations begin


def test_the_first_generation_says_who_takes_part_and_where_they_meet(make_job: MakeJob) -> None:
    job = make_job("restart", nodes=(2, 2, 2), absent=(4, 5))
    assert job.generation == [0, 1, 2, 3], "spares are not waited for"
    (began,) = job.records_of("began")
    assert (began["world_size"], began["topology"], began["master"]) == (4, {"tp": 1, "pp": 2, "dp": 2}, "n0-ib:20000")
    assert began["members"][2] == {"rank": 2, "slot": 2, "node": "n1", "host": "n1"}
    assert job.told[3] == [
        {
            "do": "begin",
            "generation": 0,
            "rank": 3,
            "world_size": 4,
            "topology": {"tp": 1, "pp": 2, "dp": 2},
            "local_world_size": 2,
            "node_rank": 1,
            "nodes": ["n0", "n0", "n1", "n1"],
            "master_addr": "n0-ib",
            "master_port": 20000,
        }
    ]


def test_a_slot_that_never_says_hello_is_waited_for_and_then_done_without(make_job: MakeJob) -> None:
    job = make_job("restart", nodes=(2, 2, 2), absent=(1,))
    job.wait(59)
    assert job.machine.generation is None
    job.wait(2)
    assert job.generation == [2, 3, 4, 5], "whole nodes first"
    assert job.records_of("began")[0]["spares"] == [{"slot": 0, "node": "n0"}]


def test_it_says_what_it_waits_for_but_not_all_the_time(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("restart", absent=(1, 2, 3))
    for slot in (1, 2):
        job.wait(8)
        job.join(slot)
    job.wait(15)
    check_text(*(text for text in job.said if text.startswith("waiting")))


def test_slots_that_never_came_are_named_if_the_others_do_not_suffice(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("restart", shrink=False, absent=(1, 3))
    job.wait(61)
    assert job.code == 1
    (gave_up,) = job.records_of("gave_up")
    check_text(gave_up["why"])
    assert job.told[0] == [{"do": "leave", "code": 1}]


def test_a_runner_that_ends_before_it_connects_is_not_waited_for(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("restart", shrink=False, absent=(1,))
    job.take(SlotNeverCame(1, 127))
    assert job.code == 1
    check_text(job.records_of("gave_up")[0]["why"])


# ------------------------------------------------------------------------------------------- a rank is lost


@pytest.mark.parametrize("level", ["restart", "in_place"])
def test_a_rank_that_dies_is_back_in_its_slot_in_the_next_generation(make_job: MakeJob, level: str) -> None:
    job = make_job(level)
    job.wait(1)
    job.kill(2)
    assert [message["do"] for message in job.since_begin(3)] == ["end"]
    assert job.since_begin(2) == [], "nobody is there who could leave"
    if level == "in_place":
        job.leave()
    for rank in (0, 1, 3) if level == "restart" else ():
        job.end(rank, 143, was_requested=True)
        job.ready(job.slot_of(rank), 0)
    assert (job.number, job.generation) == (1, [0, 1, 2, 3])
    (failed,) = job.records_of("failed")
    assert (failed["kind"], failed["rank"], failed["slot"], failed["node"]) == ("died", 2, 2, "n1")
    assert (failed["code"], failed["signal"], failed["died"], failed["noticed"]) == (None, "SIGKILL", 1.0, EPOCH + 1)
    events = [record["event"] for record in job.records]
    assert (events, job.archived) == (["began", "failed", "ended", "began"], [0])


def test_a_rank_that_dies_waits_a_moment_for_its_own_slot_before_a_spare_takes_over(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.end(1, 1)
    job.leave()
    assert job.number == 0
    job.wait(1.9)
    assert job.number == 0
    job.wait(0.2)
    assert (job.number, job.generation) == (1, [0, 5, 2, 3])


def test_without_a_spare_the_slot_itself_is_waited_for(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.end(1, 1)
    job.leave()
    job.wait(100)
    assert job.number == 0
    job.ready(1)
    assert (job.number, job.generation) == (1, [0, 1, 2, 3])


def starts(job: Job, slot: int) -> list[dict[str, Any]]:
    """The runners of other slots that a slot was asked to start."""
    return [message for message in job.told[slot] if message["do"] == "start_runner"]


def test_a_slot_that_has_lost_its_runner_gets_another_one_from_its_node(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.lose(1)
    job.leave()
    job.wait(1.1)
    assert starts(job, 0) == [{"do": "start_runner", "slot": 1, "local_rank": 1, "runner_pid": 101, "place": {}}]
    assert job.number == 0
    job.join(1)
    assert (job.number, job.generation) == (1, [0, 1, 2, 3])
    assert job.failures == [(0, "lost_runner", 1)]
    assert not job.records_of("left_out"), "another slot of the node is there"


def test_a_spare_replaces_a_slot_whose_new_runner_takes_its_time(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.lose(1)
    job.leave()
    job.wait(2.9)
    assert job.number == 0
    job.wait(0.2)
    assert (job.number, job.generation) == (1, [0, 5, 2, 3])


def test_a_runner_that_does_not_come_is_started_three_times(make_job: MakeJob) -> None:
    job = make_job("in_place", shrink=False)
    job.lose(1)
    job.leave()
    job.wait(45)
    assert (len(starts(job, 0)), job.code) == (3, None)
    job.wait(2)
    assert (len(starts(job, 0)), job.code) == (3, 1)
    assert "slot 1" in job.records_of("gave_up")[0]["why"]


def test_on_this_machine_the_controller_starts_a_runner_again(make_job: MakeJob) -> None:
    job = make_job("restart", pp=1, dp=1, nodes=(1,), suffix=None)
    job.lose(0)
    assert job.restarted == [0]
    job.join(0)
    assert (job.number, job.failures) == (1, [(0, "lost_runner", 0)])
    assert not job.records_of("left_out"), "it is where the controller is"


def test_a_whole_spare_node_replaces_a_lost_one_which_is_left_out(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.lose(0, 1, is_silent=True)
    job.leave()
    assert (job.number, job.generation) == (1, [4, 5, 2, 3])
    assert job.records_of("began")[1]["master"] == "n2-ib:20004"
    (left_out,) = job.records_of("left_out")
    assert (left_out["node"], left_out["reason"], left_out["until"]) == ("n0", "lost", EPOCH + 86400)
    assert job.bad_nodes == ["n0"]
    assert len(job.records_of("ended")) == 1, "two slots of one node are one end"


def fail_check(job: Any, words: str) -> None:
    """Rank 1 dies, and its node fails the check that follows; the others are ended and ready again."""
    job.end(1, code=1)
    job.take(SlotUnfit(1, words))
    for rank in (0, 2, 3):
        job.end(rank, signal="SIGTERM", was_requested=True)
        job.ready(rank)
    job.wait(3)


def test_no_rank_is_placed_on_a_node_that_failed_a_check(make_job: MakeJob) -> None:
    job = make_job("restart", nodes=(2, 2, 2))
    fail_check(job, words := "shared memory: it is full")
    assert job.generation == [4, 5, 2, 3], "the whole node is avoided"
    assert job.records_of("left_out")[0]["reason"] == f"failed a check: {words}"
    assert job.bad_nodes == ["n0"]


def test_only_the_slot_that_failed_a_check_is_avoided_if_the_others_are_needed(make_job: MakeJob) -> None:
    job = make_job("restart", nodes=(2, 2, 1))
    fail_check(job, "gpu: a wrong product")
    assert job.generation == [0, 4, 2, 3]


def test_a_node_whose_runners_closed_their_connections_is_not_called_bad(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.lose(0)
    job.leave()
    job.wait(0.5)
    job.lose(1)
    assert job.failures == [(0, "lost_node", 0), (0, "lost_node", 1)]
    assert [(each["node"], each["until"]) for each in job.records_of("left_out")] == [("n0", None)]
    assert job.bad_nodes == []


def test_without_spares_fewer_replicas_continue_and_a_late_slot_brings_them_back(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(1, 1, 1, 1, 1), batches=BatchSizes(1, (4,)), absent=(4,))
    job.lose(3)
    job.leave()
    assert (job.number, job.generation) == (1, [0, 2])
    assert job.records_of("began")[1]["topology"] == {"tp": 1, "pp": 2, "dp": 1}
    job.join(4)
    assert job.since_begin(0) == [], "the generation has not finished a step yet"
    for rank in (0, 1):
        job.say(rank, "stepped", step=7)
    assert [message["do"] for message in job.since_begin(0)] == ["end"]
    job.leave()
    assert (job.number, job.generation) == (2, [0, 1, 2, 4])
    assert [record["event"] for record in job.records][-2:] == ["ended", "began"]
    assert len(job.records_of("failed")) == 1, "nothing has failed the second time"


def test_a_late_slot_does_not_end_a_generation_of_programs_that_would_start_again(make_job: MakeJob) -> None:
    job = make_job("restart", pp=1, nodes=(1, 1, 1), absent=(2,))
    job.lose(1)
    job.end(0, 143, was_requested=True)
    job.ready(0)
    assert job.generation == [0]
    job.join(2)
    job.wait(300)
    assert job.number == 1


def test_the_job_ends_where_the_layout_may_not_shrink(make_job: MakeJob, check_text: Any) -> None:
    job = make_job("in_place", nodes=(2, 1, 1), shrink=False)
    job.lose(3)
    job.leave()
    assert (job.code, job.archived) == (1, []), "what the ranks have left says how the job ended"
    (gave_up,) = job.records_of("gave_up")
    check_text(gave_up["why"])
    assert (gave_up["exit_code"], gave_up["rank"]) == (1, 3)
    assert all(job.told[slot][-1] == {"do": "leave", "code": 1} for slot in (0, 1, 2))


# ------------------------------------------------------------------------------------------- how generations end


def test_two_ranks_at_once_are_one_end(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.kill(0)
    job.kill(3)
    job.leave()
    assert job.number == 1
    assert job.failures == [(0, "died", 0), (0, "died", 3)]
    assert len(job.records_of("ended")) == 1


def test_ranks_that_have_lost_a_peer_do_not_hide_who_was_first(make_job: MakeJob) -> None:
    job = make_job("restart")
    job.words = {0: "RuntimeError: Connection closed by peer [10.0.0.2]:4711", 1: "KeyError: 7"}
    job.end(0, 1)
    job.end(1, 1)
    job.end(2, 143, was_requested=True)
    job.end(3, 143, was_requested=True)
    words = [(rank, job.words[rank]) for rank in (1, 0)]
    assert [(record["rank"], record["words"]) for record in job.records_of("failed")] == words


def test_ranks_that_lose_a_peer_end_the_generation_although_nobody_dies(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.say(1, "lost", text=(words := "Connection closed by peer"))
    job.wait(4.9)
    assert job.since_begin(0) == []
    job.wait(0.2)
    assert [message["do"] for message in job.since_begin(0)] == ["end"]
    job.leave()
    assert job.number == 1
    (failed,) = job.records_of("failed")
    assert (failed["kind"], failed["rank"], failed["words"]) == ("lost_peer", None, f"rank 1: {words}")


def test_the_death_that_made_them_lose_it_comes_first(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.say(1, "lost", text="Connection closed by peer")
    job.wait(1)
    job.kill(2)
    job.leave()
    assert (job.number, job.failures) == (1, [(0, "died", 2)])


def test_a_rank_that_makes_progress_with_leaving_has_more_time(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.kill(0)
    job.leave(2, 3)
    job.wait(14)
    job.say(1, "leaving")
    job.wait(14)
    assert [order["do"] for order in job.since_begin(1)] == ["end"]
    job.wait(2)
    assert [order["do"] for order in job.since_begin(1)] == ["end", "kill"]


def test_a_rank_that_does_not_leave_is_killed_by_its_runner_and_replaced(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.kill(0)
    assert job.since_begin(1)[0]["grace_s"] == 10
    job.leave(2, 3)
    job.wait(10)
    job.end(1, signal="SIGKILL", was_requested=True)
    assert job.number == 0
    job.ready(1)
    assert (job.number, job.generation) == (1, [0, 1, 2, 3])
    assert job.failures == [(0, "died", 0), (0, "stuck", 1)]
    assert job.records_of("ended")[0]["killed"] == [1]


def test_a_slot_whose_runner_cannot_end_its_rank_is_given_up(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 2, 2))
    job.kill(0)
    job.leave(2, 3)
    job.wait(16)
    assert [message["do"] for message in job.since_begin(1)] == ["end", "kill"]
    job.wait(10)
    assert job.dropped == [1]
    assert (job.number, job.generation) == (1, [0, 5, 2, 3])


def test_a_disk_that_hangs_delays_the_next_generation_by_seconds_only(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.is_disk_stuck = True
    job.kill(0)
    job.leave()
    job.wait(2.9)
    assert job.number == 0
    job.wait(0.2)
    assert (job.number, job.records_of("ended")[0]["seconds"]) == (1, 0.0)


def test_a_second_failure_while_the_next_generation_forms_ends_that_too(make_job: MakeJob) -> None:
    job = make_job("in_place")
    for rank in range(4):
        job.say(rank, "stepped", step=3)
    job.kill(0)
    job.leave()
    job.say(1, "joined", seconds=0.1)
    job.kill(3)
    job.leave()
    assert (job.number, job.generation) == (2, [0, 1, 2, 3])
    assert [(record["generation"], record["step"]) for record in job.records_of("ended")] == [(0, 3), (1, None)]


def test_a_rank_that_is_lost_between_two_generations_is_replaced(make_job: MakeJob) -> None:
    job = make_job("in_place", nodes=(2, 1, 1, 2))
    job.end(1, 1)
    job.leave()
    job.lose(3)
    job.ready(1)
    assert (job.number, job.generation) == (1, [0, 1, 2, 4])
    assert job.failures == [(0, "died", 1), (0, "lost_node", 3)]


def test_a_process_that_dies_before_it_hears_of_its_rank_ends_the_generation(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.take(RankEnded(2, None, None, None, "SIGKILL", 1.0, False, False, None))
    job.ready(2, None)
    job.leave()
    assert (job.number, job.failures) == (1, [(0, "died", 2)])


def test_what_a_slot_said_before_it_heard_of_the_generation_does_not_count(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.kill(0)
    job.leave()
    assert job.number == 1
    job.ready(2, 0)
    job.kill(0)
    assert [message["do"] for message in job.since_begin(2)] == ["end"], "rank 2 has not left generation 1"
    job.leave()
    assert job.number == 2


def test_a_rank_that_something_has_stopped_is_said_to_be(make_job: MakeJob) -> None:
    job = make_job("in_place")
    job.end(1, signal="SIGKILL", words="stopped by SIGSTOP for 10 s")
    job.ready(1)
    job.leave()
    assert job.failures == [(0, "stopped", 1)]
