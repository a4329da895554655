"""Ranks that are late but at work, have ended or have not found the others, and links that carry nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass
from tests.support.texts import has_parts

from ...conftest import accused, ended, make_evidence, outcome, rank_of

WORLD = "all_reduce@c10d:10 < step@/src/train.py:5"
SAVE_BARRIER = "barrier@c10d:10 < save_checkpoint@/src/train.py:40 < train@/src/train.py:9"
SAVING = "write_shard@/src/io.py:3 < save_checkpoint@/src/train.py:38 < train@/src/train.py:9"
SPIN = "tokenise@/src/data.py:7 < get_batch@/src/data.py:3 < train@/src/train.py:9"
COMPILER = (
    "_try_wait@/usr/lib/python3.11/subprocess.py:2004 < run@/usr/lib/python3.11/subprocess.py:9 < build@/src/ops.py:1"
)
JOINING = "_new_process_group_helper@c10d:2169 < init_process_group@c10d:1899 < main@/src/train.py:2"
AT_STORE = (
    "_create_c10d_store@/venv/torch/distributed/rendezvous.py:199 < _env_rendezvous_handler@/venv/torch/distributed/"
    "rendezvous.py:280 < init_process_group@c10d:1892 < main@/src/train.py:2"
)
BUSY = {"state": "R", "wchan": "0", "cpu_ticks": (0, 95), "owns_gil": True}
NATIVE = {**BUSY, "owns_gil": False}


def moving(
    rank: dict[str, Any], written: Sequence[int], read: Sequence[int] = (1, 1), ran: bool = True
) -> dict[str, Any]:
    """`rank` with the bytes that its system calls transferred, and whether its main thread ran between the samples."""
    for index, sample in enumerate(rank["samples"]):
        sample["io"] = {"wchar": written[index], "rchar": 1}
        sample["thread_times"] = {str(rank["pid"]): 5 + index * ran}
    return rank


def with_children(rank: dict[str, Any], *ticks: int, state: str = "S") -> dict[str, Any]:
    child = {"pid": 4711, "comm": "cc1plus", "state": state, "wchan": "0"}
    for sample, count in zip(rank["samples"], ticks, strict=True):
        sample["children"] = [{**child, "cpu_ticks": count}]
    return rank


@pytest.mark.parametrize("state", ["S", "D"])
def test_a_rank_that_writes_is_slow_and_no_hang(state: str) -> None:
    """This includes a rank that sleeps in the kernel in every sample, because its bytes grow."""
    writer = moving(rank_of(1, SAVING, state=state, wchan="folio_wait_bit"), (4_000_000, 7_000_000))
    conclusion = judge(make_evidence([rank_of(0, SAVE_BARRIER), writer]))
    assert outcome(conclusion) == ("slow", HangClass.SAVE_IN_PROGRESS, [1])
    assert "writes 2.9 MiB/s in write_shard (io.py:3)" in conclusion.claim


@pytest.mark.parametrize(
    ("written", "ran", "why"),
    [
        ((100, 100), True, "nothing was written"),
        ((4_000_000, 4_000_300), True, "a few bytes are a log"),
        ((4_000_000, 7_000_000), False, "another thread wrote"),
        ((0, 7_000_000), True, "not known in both samples"),
    ],
)
def test_a_rank_that_writes_nothing_of_its_own_hangs(written: tuple[int, int], ran: bool, why: str) -> None:
    writer = moving(rank_of(1, SAVING, wchan="hrtimer_nanosleep"), written, ran=ran)
    conclusion = judge(make_evidence([rank_of(0, SAVE_BARRIER), writer]))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", [1]), why


@pytest.mark.parametrize(
    ("faults", "ran", "state"), [((5, 400), 1, "slow"), ((5, 6), 1, "hang"), ((5, 400), 0, "hang")]
)
def test_a_rank_that_reads_a_mapped_file_is_slow(faults: tuple[int, int], ran: int, state: str) -> None:
    """It sleeps in the kernel in every sample and transfers no bytes by system calls, but its page faults grow."""
    reader = rank_of(1, "__getitem__@/src/indexed_dataset.py:7", state="D", wchan="folio_wait_bit_common")
    for index, sample in enumerate(reader["samples"]):
        sample |= {"major_faults": faults[index], "thread_times": {str(reader["pid"]): 5 + index * ran}}
    conclusion = judge(make_evidence([rank_of(0, WORLD), reader]))
    assert (conclusion.state.value, conclusion.hang_class) == (
        state,
        HangClass.PREPARES_ALONE if state == "slow" else HangClass.PAGE_FAULT_NEVER_ENDS,
    )


def test_a_rank_that_computes_alone_while_others_wait_in_a_collective_may_never_end() -> None:
    conclusion = judge(make_evidence([rank_of(0, WORLD), rank_of(1, SPIN, **BUSY)]))
    assert outcome(conclusion) == ("hang", HangClass.PYTHON_NEVER_ENDS, [1])


def test_a_rank_that_spins_without_the_gil_may_wait_for_a_device() -> None:
    """Victims of a collective on GPUs do so, too, and no stack shows that collective. If lines move, or a recorder
    shows that no collective was started, it is the rank's own work."""
    conclusion = judge(make_evidence([rank_of(0, WORLD), rank_of(1, SPIN, **NATIVE)]))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", [])
    moving = [SPIN, SPIN.replace(":7 ", ":8 ")]
    assert accused(judge(make_evidence([rank_of(0, WORLD), rank_of(1, moving, **NATIVE)]))) == [1]
    members = {"w": [0, 1]}
    recorded = [
        rank_of(0, WORLD, calls="w w!", members=members),
        rank_of(1, SPIN, calls="w", members=members, **NATIVE),
    ]
    assert accused(judge(make_evidence(recorded))) == [1]


@pytest.mark.parametrize(
    ("phase", "hang_class"),
    [("save", HangClass.SAVE_IN_PROGRESS), ("eval", HangClass.BARRIER_MEANT), ("load", HangClass.PREPARES_ALONE)],
)
def test_in_a_phase_of_its_own_record_a_rank_may_take_its_time(phase: str, hang_class: HangClass) -> None:
    beats = [{"rank": 1, "phase": phase, "step": 9, "time": 1.0}]
    conclusion = judge(make_evidence([rank_of(0, WORLD), rank_of(1, SPIN, **BUSY)], heartbeats=beats))
    assert (conclusion.state.value, conclusion.hang_class) == ("slow", hang_class)
    asleep = rank_of(1, SPIN, wchan="hrtimer_nanosleep")
    assert judge(make_evidence([rank_of(0, WORLD), asleep], heartbeats=beats)).state.value == "hang"


def test_others_in_the_barrier_at_the_end_of_what_it_does_are_meant_to_wait() -> None:
    evaluating = "mm@/src/m.py:1 < evaluate@/src/train.py:70 < evaluate_and_print@/src/train.py:60"
    barrier = "barrier@c10d:10 < evaluate_and_print@/src/train.py:62"
    ranks = [*(rank_of(rank, barrier) for rank in range(3)), rank_of(3, evaluating, **BUSY)]
    conclusion = judge(make_evidence(ranks))
    assert outcome(conclusion) == ("slow", HangClass.BARRIER_MEANT, [3])
    assert "evaluate_and_print" in conclusion.claim
    elsewhere = [*(rank_of(rank, "barrier@c10d:10 < finish@/src/train.py:90") for rank in range(3)), ranks[3]]
    assert judge(make_evidence(elsewhere)).state.value == "hang"


def test_soon_after_the_start_a_rank_may_compile() -> None:
    ranks = [rank_of(0, WORLD), rank_of(1, SPIN, **BUSY)]
    beat = {"rank": 1, "phase": "step", "step": 101, "time": 1.0, "first_step": 100}
    assert outcome(judge(make_evidence(ranks, heartbeats=[beat]))) == ("slow", HangClass.WARM_UP, [])
    assert judge(make_evidence(ranks, heartbeats=[{**beat, "step": 110}])).state.value == "hang"


def test_several_ranks_that_compute_at_one_place_are_no_hang() -> None:
    ranks = [rank_of(0, WORLD), rank_of(1, WORLD), rank_of(2, SPIN, **BUSY), rank_of(3, SPIN, **BUSY)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, accused(conclusion)) == ("progressing", [])
    apart = rank_of(3, "other@/src/x.py:1 < elsewhere@/src/x.py:2 < a@/src/x.py:3 < b@/src/x.py:4", **BUSY)
    assert accused(judge(make_evidence([*ranks[:3], apart]))) == [2, 3]


def test_who_is_at_work_is_named_beside_a_rank_that_could_not_be_read() -> None:
    saving = rank_of(1, "write@/src/save.py:1 < save_checkpoint@/src/save.py:2", state="D", wchan="")
    for index, sample in enumerate(saving["samples"]):
        sample |= {"io": {"rchar": 1, "wchar": 1 + index * 10**8}, "thread_times": {str(saving["pid"]): index}}
    barrier = "barrier@c10d:10 < save_checkpoint@/src/save.py:5"
    ranks = [rank_of(0, barrier), saving, rank_of(2, None), rank_of(3, barrier)]
    assert outcome(judge(make_evidence(ranks))) == ("slow", HangClass.SAVE_IN_PROGRESS, [1])


def test_all_ranks_spin_without_the_gil_or_wait_for_their_devices() -> None:
    """Every rank in a hang on GPUs looks like this, and so does every rank in a long step."""
    conclusion = judge(make_evidence([rank_of(rank, SPIN, **NATIVE) for rank in range(4)]))
    assert (conclusion.state.value, accused(conclusion)) == ("unknown", [])
    ranks = [rank_of(0, WORLD), rank_of(1, WORLD), *(rank_of(rank, SPIN, **NATIVE) for rank in (2, 3))]
    assert judge(make_evidence(ranks)).state.value == "unknown"
    assert judge(make_evidence([*ranks[:3], rank_of(3, SPIN, **BUSY)])).state.value == "progressing"


def test_all_ranks_compute() -> None:
    conclusion = judge(make_evidence([rank_of(rank, SPIN, **BUSY) for rank in range(4)]))
    assert (conclusion.state.value, accused(conclusion)) == ("progressing", [])


@pytest.mark.parametrize(
    ("ticks", "child_state", "state"),
    [
        ((10, 80), "S", "slow"),
        ((10, 10), "S", "hang"),
        ((10, 13), "R", "slow"),
        ((10, 13), "S", "hang"),
        ((10, 10), "R", "hang"),
    ],
)
def test_a_child_that_computes_is_work(ticks: tuple[int, int], child_state: str, state: str) -> None:
    parent = with_children(rank_of(1, COMPILER, wchan="do_wait"), *ticks, state=child_state)
    conclusion = judge(make_evidence([rank_of(0, WORLD), parent]))
    assert (conclusion.state.value, conclusion.hang_class) == (
        state,
        HangClass.COMPILER_AT_WORK if state == "slow" else HangClass.CHILD_STUCK,
    )
    asleep = with_children(rank_of(1, SPIN, wchan="hrtimer_nanosleep"), *ticks)
    assert judge(make_evidence([rank_of(0, WORLD), asleep])).state.value == "hang", "it does not wait for the child"


def test_of_two_that_stay_away_only_the_one_without_work_is_accused() -> None:
    writer = moving(rank_of(1, SAVING), (4_000_000, 7_000_000))
    ranks = [rank_of(0, WORLD), writer, rank_of(2, SPIN, state="T", wchan="do_signal_stop"), rank_of(3, WORLD)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, accused(conclusion)) == ("hang", [2])


def test_ranks_that_leave_after_the_end() -> None:
    upload = "upload@/src/logs.py:3 < main@/src/train.py:2"
    left = [rank_of(rank, None, state="gone") for rank in (1, 2, 3)]
    ranks = [rank_of(0, upload, wchan="hrtimer_nanosleep"), *left]
    exits = [ended(rank, 0) for rank in (1, 2, 3)]
    conclusion = judge(make_evidence(ranks, exits=exits))
    assert outcome(conclusion) == ("finished", HangClass.LEAVING, [])
    assert has_parts(conclusion.claim, "rank 0 (n0)", "upload (logs.py:3)")
    failed = judge(make_evidence(ranks, exits=[{**exits[0], "code": 1}, *exits[1:]]))
    assert (failed.state.value, accused(failed)) == ("crashed", [1])
    waiting = judge(make_evidence([rank_of(0, WORLD), *ranks[1:]], exits=exits))
    assert waiting.state.value != "finished", "somebody still waits for the others"


def test_all_say_that_they_have_come_to_the_end() -> None:
    ranks = [rank_of(rank, f"leave@/src/x.py:{rank}", wchan="hrtimer_nanosleep") for rank in range(4)]
    beats = [{"rank": rank, "phase": "end", "step": 9, "time": 1.0} for rank in range(4)]
    assert judge(make_evidence(ranks, heartbeats=beats)).state.value == "finished"
    beats[2]["phase"] = "step"
    conclusion = judge(make_evidence(ranks, heartbeats=beats))
    assert (conclusion.state.value, conclusion.suspects) == ("hang", ()), "nobody has run for an hour"


def test_a_rank_that_is_late_for_the_rendezvous() -> None:
    ranks = [rank_of(0, AT_STORE), *(rank_of(rank, JOINING, wchan="poll_schedule_timeout") for rank in (1, 2))]
    late = rank_of(3, "download@/src/tokenizer.py:3 < main@/src/train.py:1", wchan="hrtimer_nanosleep")
    assert outcome(judge(make_evidence([*ranks, late]))) == ("hang", HangClass.RENDEZVOUS_LATE, [3])


@pytest.mark.parametrize(("at_store", "accused"), [([0, 2], [2]), ([0], [0]), ([0, 2, 3], [2, 3]), ([0, 1, 2, 3], [])])
def test_a_rank_that_looks_for_the_others_elsewhere(at_store: list[int], accused: list[int]) -> None:
    """Rank 0 waits at the store for all others. Alone there, it is the culprit; if all are there, nobody is."""
    ranks = [
        rank_of(rank, AT_STORE if rank in at_store else JOINING, wchan="poll_schedule_timeout") for rank in range(4)
    ]
    assert outcome(judge(make_evidence(ranks))) == ("hang", HangClass.RENDEZVOUS_ELSEWHERE, accused)


def socket(local: str, remote: str, **more: Any) -> dict[str, Any]:
    return {"local": local, "remote": remote, "state": "ESTABLISHED", "fd": 9, **more}


LOST = {"tx": 48_720, "timer": "retransmit", "retransmits": 5}


def on_two_hosts(**lost: Any) -> list[dict[str, Any]]:
    """Four ranks in one collective, two on each of two hosts; rank 1 sends `lost` to rank 2."""
    sockets = {
        0: [socket("10.0.0.1:50", "10.0.0.1:51")],
        1: [socket("10.0.0.1:51", "10.0.0.1:50"), socket("10.0.0.1:52", "10.0.0.2:60", **lost)],
        2: [socket("10.0.0.2:60", "10.0.0.1:52")],
        3: [socket("10.0.0.2:61", "10.0.0.2:62")],
    }
    return [
        rank_of(rank, WORLD, sample={"sockets": {"count": len(held), "list": held}}) for rank, held in sockets.items()
    ]


def test_a_link_that_carries_nothing_accuses_no_rank() -> None:
    conclusion = judge(make_evidence(on_two_hosts(**LOST)))
    assert outcome(conclusion) == ("hang", HangClass.LINK_DOWN, [])
    assert [side.ranks for side in conclusion.sides] == [(0, 1), (2, 3)]
    assert has_parts(conclusion.claim, "47.6 KiB", "rank 1", "10.0.0.2:60")


def test_even_where_a_rank_waits_for_an_answer_over_that_link() -> None:
    ranks = on_two_hosts(**LOST)
    for sample in ranks[3]["samples"]:
        sample.update(
            rank_of(3, "get_tag@/src/x.py:1", wchan="poll_schedule_timeout")["samples"][0], mono=sample["mono"]
        )
    assert accused(judge(make_evidence(ranks))) == []


UNSENT = {"tx": 1072, "timer": "zero window probe"}


def test_a_link_that_lets_nothing_out() -> None:
    """Packets too large for the link: nothing is in flight, and the process at the other end has read everything."""
    ranks = on_two_hosts(**UNSENT)
    conclusion = judge(make_evidence(ranks))
    assert outcome(conclusion) == ("hang", HangClass.LINK_DOWN, [])
    assert has_parts(conclusion.claim, "1.0 KiB", "rank 1", "10.0.0.2:60")
    ranks[2]["samples"][1]["sockets"] = {"list": [socket("10.0.0.2:60", "10.0.0.1:52", rx=65_536)]}
    assert judge(make_evidence(ranks)).hang_class is not HangClass.LINK_DOWN, "its process does not read"
    ranks = on_two_hosts(**UNSENT)
    for sample, unsent in zip(ranks[1]["samples"], (50_000, 1072), strict=True):
        sample["sockets"] = {"list": [socket("10.0.0.1:52", "10.0.0.2:60", **{**UNSENT, "tx": unsent})]}
    assert judge(make_evidence(ranks)).hang_class is not HangClass.LINK_DOWN, "its queue got shorter"


@pytest.mark.parametrize("lost", [{}, {**LOST, "retransmits": 1}, {"tx": 100, "timer": "retransmit"}])
def test_a_queue_that_is_sent_once_is_no_dead_link(lost: dict[str, Any]) -> None:
    assert judge(make_evidence(on_two_hosts(**lost))).hang_class is not HangClass.LINK_DOWN


def test_the_other_end_must_be_a_host_of_ranks() -> None:
    """A metrics server that is down blocks nobody."""
    ranks = on_two_hosts()
    for sample in ranks[0]["samples"]:
        sample["sockets"]["list"].append(socket("10.0.0.1:70", "192.0.2.1:443", **LOST))
    assert "192.0.2.1" not in judge(make_evidence(ranks)).claim
