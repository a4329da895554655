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
    assert refused.refusal == "it is local rank 2, and sees 2 GPUs: there are more ranks than GPUs"
    assert refused.index is None
    assert chosen(visible=2, local=3, shares=True) == Device("cuda", 1, "gloo")
    assert chosen(visible=1, local=3, shares=True) == Device("cuda", 0, "gloo")


def test_a_cpu_is_taken_only_where_nobody_expects_a_gpu() -> None:
    assert chosen() == Device("cpu", None, "gloo", why="torch sees no GPU")
    assert chosen("cpu", visible=4, SLURM_STEP_GPUS="0,1") == Device("cpu", None, "gloo", why="training.device is cpu")
    assert chosen("cuda").refusal == "training.device is cuda, but torch sees no GPU"
    assert chosen(SLURM_GPUS_ON_NODE="8").refusal is None
    assert chosen(SLURM_STEP_GPUS="0").refusal == "Slurm gave SLURM_STEP_GPUS=0, but torch sees no GPU"
    hidden = chosen(SLURM_STEP_GPUS="3", CUDA_VISIBLE_DEVICES="")
    assert hidden.refusal == "Slurm gave SLURM_STEP_GPUS=3, but torch sees no GPU (CUDA_VISIBLE_DEVICES is '')"


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


def test_a_node_without_a_gpu_is_named() -> None:
    verdict = judge(ranks(*gpus(4), NO_GPU, NO_GPU), shares=False)
    assert verdict.refusal == (
        "ranks 4-5 on n2: cpu over gloo (torch sees no GPU), but 4 other ranks have cuda over nccl; "
        "they would wait for each other for ever"
    )


def test_the_nodes_without_a_gpu_are_named_even_if_they_are_most() -> None:
    verdict = judge(ranks(NO_GPU, NO_GPU, NO_GPU, *gpus(1)), shares=False)
    assert verdict.refusal is not None
    assert verdict.refusal.startswith("ranks 0-1 on n0, rank 2 on n1: cpu over gloo")


def test_ranks_with_the_same_gpu_are_refused_unless_they_may_share() -> None:
    twice = ranks(GPU, GPU)
    refusal = judge(twice, shares=False).refusal
    assert refusal == "ranks 0-1 on n0: have the same GPU, uuid-0 (H200); NCCL refuses that"
    assert judge(twice, shares=True) == DeviceVerdict()
    assert judge(ranks(GPU, GPU, per_node=1), shares=False) == DeviceVerdict()  # two nodes may number theirs alike
    unknown = replace(GPU, identity=None)
    assert judge(ranks(unknown, unknown), shares=False) == DeviceVerdict()


def test_other_models_and_versions_are_remarked_on() -> None:
    others = ranks(GPU, replace(GPU, name="H100", identity="other"), replace(GPU, torch="2.11.0"))
    assert judge(others, shares=False).remarks == (
        "ranks have different devices: H200 on rank 0 on n0, rank 2 on n1; H100 on rank 1 on n0",
        "ranks have different versions of torch: 2.13.0 on ranks 0-1 on n0; 2.11.0 on rank 2 on n1",
    )


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
    assert "rank 3 on n1: cpu over gloo" in errors[0].message
