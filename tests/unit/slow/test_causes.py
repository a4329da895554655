"""What a node has counted before and after a look, as causes. diagnostics/node_counters.py reads such counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bigsci_launch.slow import causes
from bigsci_launch.slow.causes import Counted, causes_of

SECONDS = 10.0
Facts = Mapping[str, Any]


def place(
    before: Facts | None = None,
    after: Facts | None = None,
    *,
    machine: tuple[Facts, Facts] = ({}, {}),
    neighbours: Mapping[int, Facts] | None = None,
    record: Facts | None = None,
    **node: Any,
) -> Counted:
    last = {"mono": SECONDS, "cores": [0], **(after or {})}
    return Counted(
        rank=3,
        before={"mono": 0.0, **(before or {})},
        after=last,
        record={"pid": 7, "states": {"S": 10}, **(record or {})},
        node={"machine": list(machine), "clock_ticks_per_s": 100, **node},
        neighbours={3: last, **(neighbours or {})},
    )


def quota(throttled: int, periods: int) -> Facts:
    return {
        "quotas": [{"cgroup": "/job", "cores": 0.5, "throttled": throttled, "periods": periods, "throttled_s": 0.0}]
    }


LATE = ({"schedule": {"run_ns": 0, "delay_ns": 0}}, {"schedule": {"run_ns": 0, "delay_ns": 4 * 10**9}})
BUSY = {"processes": [{"pid": 99, "comm": "rsync\x1b", "cpu_s": {"0": 6.0, "5": 90.0}}]}
CARD = {"uuid": "GPU-1", "pci.bus_id": "00000000:3B:00.0", "clocks.sm": "600", "clocks.max.sm": "1980",
        "pcie.link.width.current": "16", "pcie.link.width.max": "16", "clocks_throttle_reasons.active": "0x0",
        "temperature.gpu": "40"}  # fmt: skip


SWAP = {"swapped_in": 0, "swapped_out": 5}


def gpus(xids: list[str] | None = None, **card: str) -> tuple[Facts, Facts]:
    return {}, {"gpus": {"cards": [{**CARD, **card}], "of_processes": {"7": "GPU-1"}, "xids": xids}}


def trip(ms: float) -> Facts:
    return {"sockets": {"retransmitted": 0, "sent": 0, "round_trip_us": int(ms * 1000)}}


def sent(again: int, segments: int) -> Facts:
    return {"sockets": {"retransmitted": again, "sent": segments, "round_trip_us": 9}}


DISTURBED = {
    "limited_by_quota": (place(quota(5, 100), quota(55, 200)), ["0.5 cores", "50 of 100", "/job"]),
    "shares_its_core": (place(machine=({}, {"num_cores": 8}), neighbours={4: {"cores": [0]}}), ["3-4", "core 0"]),
    "meets_other_processes": (place(*LATE, **BUSY), ["99", "rsync\\x1b", "60%", "40%"]),
    "has_slow_clock": (
        place(machine=({}, {"cores": {"0": {"base_khz": 3_000_000, "khz": 1_200_000}}})), ["1.2", "3 GHz"],
    ),
    "loses_time_to_hypervisor": (place(machine=({"stolen_ticks": {"0": 0}}, {"stolen_ticks": {"0": 200}})), ["20%"]),
    "is_swapped": (
        place({}, {"swapped_kib": 1 << 20}, machine=(SWAP, {**SWAP, "swapped_in": 900})), ["1 GiB", "900", "0 out"],
    ),
    "reads_pages_from_disk": (place({"major_faults": 10}, {"major_faults": 1010}), ["100"]),
    "waits_for_device": (place(record={"states": {"D": 3, "S": 7}}), ["30%"]),
    "has_full_file_system": (place(places=[{"path": "/data", "free_share": 0.001, "pids": [7]}]), ["/data", "0.1%"]),
    "sends_again": (place(sent(0, 0), sent(50, 1000)), ["50", "1000"]),
    "has_slow_connection": (place({}, trip(40), neighbours={4: trip(0.1), 5: trip(0.2)}), ["40 ms"]),
    "has_slow_gpu": (place(machine=gpus(**{"clocks_throttle_reasons.active": "0x20"})), ["temperature", "600", "1980"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTURBED)
def test_each_cause_is_named_alone_with_what_was_read(name: str) -> None:
    disturbed, parts = DISTURBED[name]
    (sentence,) = causes_of(disturbed)
    assert sentence == getattr(causes, name)(disturbed)
    assert all(part in sentence for part in parts), sentence


def test_every_cause_is_tried() -> None:
    assert set(DISTURBED) == {find.__name__ for find in causes.CAUSES}


@pytest.mark.parametrize(
    "calm",
    [
        pytest.param(place(), id="nothing was read"),
        pytest.param(place(quota(50, 100), quota(50, 200)), id="throttled before the look"),
        pytest.param(place(machine=({}, {"num_cores": 1}), neighbours={4: {"cores": [0]}}), id="all that the node has"),
        pytest.param(place(**BUSY), id="the rank did not wait for its core, or it is not known"),
        pytest.param(place(*LATE, processes=[{"pid": 9, "comm": "x", "cpu_s": {"5": 90.0}}]), id="another core"),
        pytest.param(place(machine=({}, {"cores": {"0": {"khz": 800_000}}})), id="a clock alone says nothing"),
        pytest.param(place({}, {"swapped_kib": 1 << 20}), id="in swap, and left there"),
        pytest.param(place(places=[{"path": "/", "free_share": 0.0, "pids": [8]}]), id="the disk of another process"),
        pytest.param(place(sent(9, 100), sent(9, 90000)), id="lost segments before"),
        pytest.param(place({}, sent(50, 1000)), id="read once"),
        pytest.param(place({}, trip(40), neighbours={4: trip(39), 5: trip(41)}), id="as far as the others"),
        pytest.param(place(machine=gpus()), id="a card at rest"),
        pytest.param(place(machine=gpus(**{"clocks_throttle_reasons.active": "[N/A]"})), id="a card that does not say"),
    ],
)
def test_what_is_no_cause(calm: Counted) -> None:
    assert causes_of(calm) == ()


def test_a_narrow_link_and_an_error_of_a_card() -> None:
    (narrow,) = causes_of(place(machine=gpus(**{"pcie.link.width.current": "4"})))
    assert "4 of 16" in narrow
    (xid,) = causes_of(place(machine=gpus(["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"])))
    assert "Xid" in xid and "79" in xid
    assert not causes_of(place(machine=gpus(["NVRM: Xid (PCI:0000:af:00): 79"])))
