"""Flight-recorder dumps that a job wrote on its own: read only if they are current, and never executed."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLACES = ["wait_for_peers", "load_batch", "wait_for_peers", "train_step"]


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def dump(**more: Any) -> bytes:
    """Return a dump with one collective that has not ended, as torch 2.13 writes it."""
    entry = {
        "record_id": 7, "process_group": ("0", "default_pg"), "collective_seq_id": 8,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"],
        "state": "started", "retired": False, "is_p2p": False,
    }  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, "": {"ranks": "[]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": [entry], **more}, protocol=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def samples(launch: Any, ask_agent: Callable[..., dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The last sample of each rank; the second has no dump, the third a hostile one, the fourth keeps working."""
    prefix = str(folder / "nccl_trace_rank_")
    launched = launch("hung_rank.py", [f"{place} {{ready}}" for place in PLACES], TORCH_FR_DUMP_TEMP_FILE=prefix)
    wait_until_still(launched.descendants(), 3)
    for rank, data in {0: dump(), 2: dump(version=Harm(folder / "harmed")), 3: dump()}.items():
        Path(f"{prefix}{rank}").write_bytes(data)
    found = ask_agent(launcher_pid=launched.pid)
    return [rank["samples"][-1] for rank in found["ranks"]]


def wait_until_still(pids: list[int], count: int) -> None:
    """Wait until `count` of the processes have not run for a while: they report before they sleep."""
    before, now = [""], [run_times(pid) for pid in pids]
    while sum(old == new for old, new in zip(before, now, strict=False)) < count:
        time.sleep(0.2)
        before, now = now, [run_times(pid) for pid in pids]


def run_times(pid: int) -> str:
    return Path(f"/proc/{pid}/schedstat").read_text()


def test_a_dump_that_was_written_after_the_rank_stood_still(samples: list[dict[str, Any]], folder: Path) -> None:
    assert samples[0]["recorder"] == {
        "first_record": 7, "tokens": [["0", "default_pg", "all_reduce", "[[8]]", "['Float']"]], "stream": [0],
        "last_sequence": {"0": 8}, "open": [0], "open_messages": 0, "members": {"0": "0-3"},
    }  # fmt: skip
    assert samples[0]["recorder_file"] == f"{folder}/nccl_trace_rank_0"


def test_a_rank_that_wrote_none(samples: list[dict[str, Any]]) -> None:
    assert {"recorder", "recorder_why"}.isdisjoint(samples[1])


def test_a_pickle_that_would_run_something_is_refused(samples: list[dict[str, Any]], folder: Path) -> None:
    assert samples[2]["recorder_why"].endswith(" posix.system")
    assert not (folder / "harmed").exists()


def test_a_dump_of_another_moment_is_not_taken_for_this_one(samples: list[dict[str, Any]]) -> None:
    assert "recorder" not in samples[3]
    assert "written before" in samples[3]["recorder_why"]
