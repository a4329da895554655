"""Which device a rank takes, and which sets of devices are refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.errors import BslError
from bigsci_launch.runs.layout import RunDir
from bigsci_launch.train.device.choice import Device, choose_device
from bigsci_launch.train.device.meeting import DeviceFacts, DeviceVerdict, judge, meet
from bigsci_launch.train.device.nccl import nccl_settings
from tests.support.texts import CheckText, has_parts


def chosen(wanted: Any = "auto", *, shares: bool = False, visible: int = 0, local: int = 0, **environ: str) -> Device:
    return choose_device(wanted, shares=shares, num_visible=visible, local_rank=local, environ=environ)


@pytest.mark.parametrize(("visible", "local", "index"), [(8, 5, 5), (8, 0, 0), (1, 5, 0), (1, 0, 0), (2, 1, 1)])
def test_a_rank_takes_its_own_gpu_under_both_kinds_of_binding(visible: int, local: int, index: int) -> None:
    assert chosen(visible=visible, local=local) == Device("cuda", index, "nccl")


def test_the_choice_is_the_same_once_local_rank_is_the_index() -> None:
    for visible in (1, 2, 3):
        for local in range(7):
            first = chosen(visible=visible, local=local, shares=True)
            assert first.index is not None
            assert chosen(visible=visible, local=first.index, shares=True) == first


def test_more_ranks_than_gpus_are_refused_in_words_unless_they_may_share() -> None:
    refused = chosen(visible=2, local=2)
    assert refused.index is None and has_parts(refused.refusal or "", "local rank 2", "2 GPUs")
    assert chosen(visible=2, local=3, shares=True) == Device("cuda", 1, "gloo")
    assert chosen(visible=1, local=3, shares=True) == Device("cuda", 0, "gloo")


def test_a_cpu_is_taken_only_where_nobody_expects_a_gpu(check_text: CheckText) -> None:
    taken = chosen(), chosen("cpu", visible=4, SLURM_STEP_GPUS="0,1")
    assert {replace(each, why=None) for each in taken} == {Device("cpu", None, "gloo")}
    assert chosen(SLURM_GPUS_ON_NODE="8").refusal is None
    refused = chosen("cuda"), chosen(SLURM_STEP_GPUS="0"), chosen(SLURM_STEP_GPUS="3", CUDA_VISIBLE_DEVICES="")
    check_text(*(str(each.why) for each in taken), *(str(each.refusal) for each in refused))


def test_what_is_set_for_nccl_gives_way_to_the_user(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt("0001")
    settings = nccl_settings(attempt, {"NCCL_DEBUG": "INFO"})
    assert "NCCL_DEBUG" not in settings
    assert settings["TORCH_FR_DUMP_TEMP_FILE"] == str(attempt.recorder / "nccl_trace_rank_")
    assert nccl_settings(attempt, {})["NCCL_DEBUG"] == "WARN"


GPU = DeviceFacts(0, "n0", "cuda", "nccl", "H200", "uuid-0", "2.13.0")
NO_GPU = DeviceFacts(0, "n0", "cpu", "gloo", "CPU", None, "2.13.0", why="torch sees no GPU")


def ranks(*each: DeviceFacts, per_node: int = 2) -> list[DeviceFacts]:
    return [replace(facts, rank=rank, node=f"n{rank // per_node}") for rank, facts in enumerate(each)]


def gpus(count: int) -> list[DeviceFacts]:
    return [replace(GPU, identity=f"uuid-{rank % 2}") for rank in range(count)]


def test_equal_devices_are_accepted() -> None:
    assert judge(ranks(*gpus(6)), shares=False) == DeviceVerdict()
    assert judge(ranks(*[NO_GPU] * 3), shares=False) == DeviceVerdict()


def test_a_node_without_a_gpu_is_named_even_if_most_have_none(check_text: CheckText) -> None:
    few = judge(ranks(*gpus(4), NO_GPU, NO_GPU), shares=False)
    most = judge(ranks(NO_GPU, NO_GPU, NO_GPU, *gpus(1)), shares=False)
    check_text(str(few.refusal), str(most.refusal))


def test_ranks_with_the_same_gpu_are_refused_unless_they_may_share() -> None:
    twice = ranks(GPU, GPU)
    assert has_parts(judge(twice, shares=False).refusal or "", "ranks 0-1 on n0", "uuid-0", "H200")
    assert judge(twice, shares=True) == DeviceVerdict()
    assert judge(ranks(GPU, GPU, per_node=1), shares=False) == DeviceVerdict()  # two nodes may number theirs alike
    unknown = replace(GPU, identity=None)
    assert judge(ranks(unknown, unknown), shares=False) == DeviceVerdict()


def test_other_models_and_versions_are_remarked_on() -> None:
    others = ranks(GPU, replace(GPU, name="H100", identity="other"), replace(GPU, torch="2.11.0"))
    devices, versions = judge(others, shares=False).remarks
    assert has_parts(devices, "H200 on rank 0 on n0, rank 2 on n1", "H100 on rank 1 on n0")
    assert has_parts(versions, "2.13.0 on ranks 0-1 on n0", "2.11.0 on rank 2 on n1")


class SharedStore:
    """A store of threads."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10)
            value: bytes = self._values[key]
            return value

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._values[key] = self._values.get(key, 0) + amount
            total: int = self._values[key]
            return total


def meet_all(everyone: list[DeviceFacts]) -> list[Any]:
    store, found = SharedStore(), [None] * len(everyone)

    def come(mine: DeviceFacts) -> None:
        try:
            found[mine.rank] = meet(store, mine, len(everyone), shares=False)  # type: ignore[call-overload]
        except BslError as error:
            found[mine.rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=come, args=(mine,)) for mine in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_ranks_get_the_same_verdict() -> None:
    assert meet_all(ranks(*gpus(4))) == [DeviceVerdict()] * 4
    errors = meet_all(ranks(*gpus(3), NO_GPU))
    assert [type(error) for error in errors] == [BslError] * 4
    assert len({(error.message, error.hint) for error in errors}) == 1
    assert "rank 3 on n1" in errors[0].message
