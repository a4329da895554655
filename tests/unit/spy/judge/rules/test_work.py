"""Ranks that are late but at work, have ended or have not found the others, and links that carry nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bigsci_launch.spy.evidence.ranks import Evidence
from bigsci_launch.spy.judge.conclusion import Conclusion
from bigsci_launch.spy.judge.verdict import judge
from bigsci_launch.spy.taxonomy import HangClass

MakeEvidence = Callable[..., Evidence]
MakeRank = Callable[..., dict[str, Any]]
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
ENDED = {"node": "n0", "code": 0, "signal": None, "time": 1.0}


def suspects(conclusion: Conclusion) -> list[int]:
    return [suspect.rank for suspect in conclusion.suspects]


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
def test_a_rank_that_writes_is_slow_and_no_hang(make_evidence: MakeEvidence, make_rank: MakeRank, state: str) -> None:
    """This includes a rank that sleeps in the kernel in every sample, because its bytes grow."""
    writer = moving(make_rank(1, SAVING, state=state, wchan="folio_wait_bit"), (4_000_000, 7_000_000))
    conclusion = judge(make_evidence([make_rank(0, SAVE_BARRIER), writer]))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "slow",
        HangClass.SAVE_IN_PROGRESS,
        [1],
    )
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
def test_a_rank_that_writes_nothing_of_its_own_hangs(
    make_evidence: MakeEvidence, make_rank: MakeRank, written: tuple[int, int], ran: bool, why: str
) -> None:
    writer = moving(make_rank(1, SAVING, wchan="hrtimer_nanosleep"), written, ran=ran)
    conclusion = judge(make_evidence([make_rank(0, SAVE_BARRIER), writer]))
    assert (conclusion.state.value, suspects(conclusion)) == ("hang", [1]), why


@pytest.mark.parametrize(
    ("faults", "ran", "state"), [((5, 400), 1, "slow"), ((5, 6), 1, "hang"), ((5, 400), 0, "hang")]
)
def test_a_rank_that_reads_a_mapped_file_is_slow(
    make_evidence: MakeEvidence, make_rank: MakeRank, faults: tuple[int, int], ran: int, state: str
) -> None:
    """It sleeps in the kernel in every sample and transfers no bytes by system calls, but its page faults grow."""
    reader = make_rank(1, "__getitem__@/src/indexed_dataset.py:7", state="D", wchan="folio_wait_bit_common")
    for index, sample in enumerate(reader["samples"]):
        sample |= {"major_faults": faults[index], "thread_times": {str(reader["pid"]): 5 + index * ran}}
    conclusion = judge(make_evidence([make_rank(0, WORLD), reader]))
    assert (conclusion.state.value, conclusion.hang_class) == (
        state,
        HangClass.PREPARES_ALONE if state == "slow" else HangClass.PAGE_FAULT_NEVER_ENDS,
    )


def test_a_rank_that_computes_alone_while_others_wait_in_a_collective_may_never_end(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    conclusion = judge(make_evidence([make_rank(0, WORLD), make_rank(1, SPIN, **BUSY)]))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "hang",
        HangClass.PYTHON_NEVER_ENDS,
        [1],
    )


def test_a_rank_that_spins_without_the_gil_may_wait_for_a_device(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    """Victims of a collective on GPUs do so, too, and no stack shows that collective. If lines move, or a recorder
    shows that no collective was started, it is the rank's own work."""
    conclusion = judge(make_evidence([make_rank(0, WORLD), make_rank(1, SPIN, **NATIVE)]))
    assert (conclusion.state.value, suspects(conclusion)) == ("hang", [])
    assert "with no collective on the stack" in conclusion.claim
    moving = [SPIN, SPIN.replace(":7 ", ":8 ")]
    assert suspects(judge(make_evidence([make_rank(0, WORLD), make_rank(1, moving, **NATIVE)]))) == [1]
    members = {"w": [0, 1]}
    recorded = [
        make_rank(0, WORLD, calls="w w!", members=members),
        make_rank(1, SPIN, calls="w", members=members, **NATIVE),
    ]
    assert suspects(judge(make_evidence(recorded))) == [1]


@pytest.mark.parametrize(
    ("phase", "hang_class"),
    [("save", HangClass.SAVE_IN_PROGRESS), ("eval", HangClass.BARRIER_MEANT), ("load", HangClass.PREPARES_ALONE)],
)
def test_in_a_phase_of_its_own_record_a_rank_may_take_its_time(
    make_evidence: MakeEvidence, make_rank: MakeRank, phase: str, hang_class: HangClass
) -> None:
    beats = [{"rank": 1, "phase": phase, "step": 9, "time": 1.0}]
    conclusion = judge(make_evidence([make_rank(0, WORLD), make_rank(1, SPIN, **BUSY)], heartbeats=beats))
    assert (conclusion.state.value, conclusion.hang_class) == ("slow", hang_class)
    asleep = make_rank(1, SPIN, wchan="hrtimer_nanosleep")
    assert judge(make_evidence([make_rank(0, WORLD), asleep], heartbeats=beats)).state.value == "hang"


def test_others_in_the_barrier_at_the_end_of_what_it_does_are_meant_to_wait(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    evaluating = "mm@/src/m.py:1 < evaluate@/src/train.py:70 < evaluate_and_print@/src/train.py:60"
    barrier = "barrier@c10d:10 < evaluate_and_print@/src/train.py:62"
    ranks = [*(make_rank(rank, barrier) for rank in range(3)), make_rank(3, evaluating, **BUSY)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "slow",
        HangClass.BARRIER_MEANT,
        [3],
    )
    assert "the others wait in a barrier in evaluate_and_print" in conclusion.claim
    elsewhere = [*(make_rank(rank, "barrier@c10d:10 < finish@/src/train.py:90") for rank in range(3)), ranks[3]]
    assert judge(make_evidence(elsewhere)).state.value == "hang"


def test_soon_after_the_start_a_rank_may_compile(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(0, WORLD), make_rank(1, SPIN, **BUSY)]
    beat = {"rank": 1, "phase": "step", "step": 101, "time": 1.0, "first_step": 100}
    conclusion = judge(make_evidence(ranks, heartbeats=[beat]))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == ("slow", HangClass.WARM_UP, [])
    assert judge(make_evidence(ranks, heartbeats=[{**beat, "step": 110}])).state.value == "hang"


def test_several_ranks_that_compute_at_one_place_are_no_hang(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(0, WORLD), make_rank(1, WORLD), make_rank(2, SPIN, **BUSY), make_rank(3, SPIN, **BUSY)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, suspects(conclusion)) == ("progressing", [])
    apart = make_rank(3, "other@/src/x.py:1 < elsewhere@/src/x.py:2 < a@/src/x.py:3 < b@/src/x.py:4", **BUSY)
    assert suspects(judge(make_evidence([*ranks[:3], apart]))) == [2, 3]


def test_who_is_at_work_is_named_beside_a_rank_that_could_not_be_read(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    saving = make_rank(1, "write@/src/save.py:1 < save_checkpoint@/src/save.py:2", state="D", wchan="")
    for index, sample in enumerate(saving["samples"]):
        sample |= {"io": {"rchar": 1, "wchar": 1 + index * 10**8}, "thread_times": {str(saving["pid"]): index}}
    barrier = "barrier@c10d:10 < save_checkpoint@/src/save.py:5"
    ranks = [make_rank(0, barrier), saving, make_rank(2, None), make_rank(3, barrier)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "slow",
        HangClass.SAVE_IN_PROGRESS,
        [1],
    )


def test_all_ranks_spin_without_the_gil_or_wait_for_their_devices(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    """Every rank in a hang on GPUs looks like this, and so does every rank in a long step."""
    conclusion = judge(make_evidence([make_rank(rank, SPIN, **NATIVE) for rank in range(4)]))
    assert (conclusion.state.value, suspects(conclusion)) == ("unknown", [])
    ranks = [make_rank(0, WORLD), make_rank(1, WORLD), *(make_rank(rank, SPIN, **NATIVE) for rank in (2, 3))]
    assert judge(make_evidence(ranks)).state.value == "unknown"
    assert judge(make_evidence([*ranks[:3], make_rank(3, SPIN, **BUSY)])).state.value == "progressing"


def test_all_ranks_compute(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    conclusion = judge(make_evidence([make_rank(rank, SPIN, **BUSY) for rank in range(4)]))
    assert (conclusion.state.value, suspects(conclusion)) == ("progressing", [])


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
def test_a_child_that_computes_is_work(
    make_evidence: MakeEvidence, make_rank: MakeRank, ticks: tuple[int, int], child_state: str, state: str
) -> None:
    parent = with_children(make_rank(1, COMPILER, wchan="do_wait"), *ticks, state=child_state)
    conclusion = judge(make_evidence([make_rank(0, WORLD), parent]))
    assert (conclusion.state.value, conclusion.hang_class) == (
        state,
        HangClass.COMPILER_AT_WORK if state == "slow" else HangClass.CHILD_STUCK,
    )
    asleep = with_children(make_rank(1, SPIN, wchan="hrtimer_nanosleep"), *ticks)
    assert judge(make_evidence([make_rank(0, WORLD), asleep])).state.value == "hang", "it does not wait for the child"


def test_of_two_that_stay_away_only_the_one_without_work_is_accused(
    make_evidence: MakeEvidence, make_rank: MakeRank
) -> None:
    writer = moving(make_rank(1, SAVING), (4_000_000, 7_000_000))
    ranks = [make_rank(0, WORLD), writer, make_rank(2, SPIN, state="T", wchan="do_signal_stop"), make_rank(3, WORLD)]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, suspects(conclusion)) == ("hang", [2])


def test_ranks_that_leave_after_the_end(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    upload = "upload@/src/logs.py:3 < main@/src/train.py:2"
    left = [make_rank(rank, None, state="gone") for rank in (1, 2, 3)]
    ranks = [make_rank(0, upload, wchan="hrtimer_nanosleep"), *left]
    exits = [{**ENDED, "rank": rank} for rank in (1, 2, 3)]
    conclusion = judge(make_evidence(ranks, exits=exits))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == ("finished", HangClass.LEAVING, [])
    assert "rank 0 (n0) is still in upload (logs.py:3)" in conclusion.claim
    failed = judge(make_evidence(ranks, exits=[{**exits[0], "code": 1}, *exits[1:]]))
    assert (failed.state.value, suspects(failed)) == ("crashed", [1])
    waiting = judge(make_evidence([make_rank(0, WORLD), *ranks[1:]], exits=exits))
    assert waiting.state.value != "finished", "somebody still waits for the others"


def test_all_say_that_they_have_come_to_the_end(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(rank, f"leave@/src/x.py:{rank}", wchan="hrtimer_nanosleep") for rank in range(4)]
    beats = [{"rank": rank, "phase": "end", "step": 9, "time": 1.0} for rank in range(4)]
    assert judge(make_evidence(ranks, heartbeats=beats)).state.value == "finished"
    beats[2]["phase"] = "step"
    conclusion = judge(make_evidence(ranks, heartbeats=beats))
    assert (conclusion.state.value, conclusion.suspects) == ("hang", ()), "nobody has run for an hour"


def test_a_rank_that_is_late_for_the_rendezvous(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = [make_rank(0, AT_STORE), *(make_rank(rank, JOINING, wchan="poll_schedule_timeout") for rank in (1, 2))]
    late = make_rank(3, "download@/src/tokenizer.py:3 < main@/src/train.py:1", wchan="hrtimer_nanosleep")
    conclusion = judge(make_evidence([*ranks, late]))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "hang",
        HangClass.RENDEZVOUS_LATE,
        [3],
    )


@pytest.mark.parametrize(("at_store", "accused"), [([0, 2], [2]), ([0], [0]), ([0, 2, 3], [2, 3]), ([0, 1, 2, 3], [])])
def test_a_rank_that_looks_for_the_others_elsewhere(
    make_evidence: MakeEvidence, make_rank: MakeRank, at_store: list[int], accused: list[int]
) -> None:
    """Rank 0 waits at the store for all others. Alone there, it is the culprit; if all are there, nobody is."""
    ranks = [
        make_rank(rank, AT_STORE if rank in at_store else JOINING, wchan="poll_schedule_timeout") for rank in range(4)
    ]
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == (
        "hang",
        HangClass.RENDEZVOUS_ELSEWHERE,
        accused,
    )


def socket(local: str, remote: str, **more: Any) -> dict[str, Any]:
    return {"local": local, "remote": remote, "state": "ESTABLISHED", "fd": 9, **more}


LOST = {"tx": 48_720, "timer": "retransmit", "retransmits": 5}


def on_two_hosts(make_rank: MakeRank, **lost: Any) -> list[dict[str, Any]]:
    """Four ranks in one collective, two on each of two hosts; rank 1 sends `lost` to rank 2."""
    sockets = {
        0: [socket("10.0.0.1:50", "10.0.0.1:51")],
        1: [socket("10.0.0.1:51", "10.0.0.1:50"), socket("10.0.0.1:52", "10.0.0.2:60", **lost)],
        2: [socket("10.0.0.2:60", "10.0.0.1:52")],
        3: [socket("10.0.0.2:61", "10.0.0.2:62")],
    }
    return [
        make_rank(rank, WORLD, sample={"sockets": {"count": len(held), "list": held}}) for rank, held in sockets.items()
    ]


def test_a_link_that_carries_nothing_accuses_no_rank(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    conclusion = judge(make_evidence(on_two_hosts(make_rank, **LOST)))
    assert (conclusion.state.value, conclusion.hang_class, suspects(conclusion)) == ("hang", HangClass.LINK_DOWN, [])
    assert [side.ranks for side in conclusion.sides] == [(0, 1), (2, 3)]
    assert "from rank 1 to 10.0.0.2:60 are sent again" in conclusion.claim


def test_even_where_a_rank_waits_for_an_answer_over_that_link(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    ranks = on_two_hosts(make_rank, **LOST)
    for sample in ranks[3]["samples"]:
        sample.update(
            make_rank(3, "get_tag@/src/x.py:1", wchan="poll_schedule_timeout")["samples"][0], mono=sample["mono"]
        )
    assert suspects(judge(make_evidence(ranks))) == []


UNSENT = {"tx": 1072, "timer": "zero window probe"}


def test_a_link_that_lets_nothing_out(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    """Packets too large for the link: nothing is in flight, and the process at the other end has read everything."""
    ranks = on_two_hosts(make_rank, **UNSENT)
    conclusion = judge(make_evidence(ranks))
    assert (conclusion.hang_class, suspects(conclusion)) == (HangClass.LINK_DOWN, [])
    assert "1.0 KiB from rank 1 to 10.0.0.2:60 cannot be sent" in conclusion.claim
    ranks[2]["samples"][1]["sockets"] = {"list": [socket("10.0.0.2:60", "10.0.0.1:52", rx=65_536)]}
    assert "carries nothing" not in judge(make_evidence(ranks)).claim, "its process does not read"
    ranks = on_two_hosts(make_rank, **UNSENT)
    for sample, unsent in zip(ranks[1]["samples"], (50_000, 1072), strict=True):
        sample["sockets"] = {"list": [socket("10.0.0.1:52", "10.0.0.2:60", **{**UNSENT, "tx": unsent})]}
    assert "carries nothing" not in judge(make_evidence(ranks)).claim, "its queue got shorter"


@pytest.mark.parametrize("lost", [{}, {**LOST, "retransmits": 1}, {"tx": 100, "timer": "retransmit"}])
def test_a_queue_that_is_sent_once_is_no_dead_link(
    make_evidence: MakeEvidence, make_rank: MakeRank, lost: dict[str, Any]
) -> None:
    assert "carries nothing" not in judge(make_evidence(on_two_hosts(make_rank, **lost))).claim


def test_the_other_end_must_be_a_host_of_ranks(make_evidence: MakeEvidence, make_rank: MakeRank) -> None:
    """A metrics server that is down blocks nobody."""
    ranks = on_two_hosts(make_rank)
    for sample in ranks[0]["samples"]:
        sample["sockets"]["list"].append(socket("10.0.0.1:70", "192.0.2.1:443", **LOST))
    conclusion = judge(make_evidence(ranks))
    assert "192.0.2.1" not in conclusion.claim
