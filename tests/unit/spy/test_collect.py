from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bigsci_launch.spy.collect import FrameReader, agent_program


def test_documents_come_through_a_stream_that_mixes_them_with_chatter(agent: ModuleType) -> None:
    documents = {
        f"n{node}": {"node": f"n{node}", "text": "".join(random.choices("abcdef", k=5000))} for node in range(3)
    }
    lines = [line for document in documents.values() for line in agent.frame(document)]
    assert len(lines) > 6
    assert max(map(len, lines)) < 1000, "srun cuts longer lines"
    lines += ["loading module cuda", "", "@bsl", "@bsl is a word"]
    random.shuffle(lines)
    reader = FrameReader()
    completed = {node for line in lines if (node := reader.feed(line))}
    assert completed == set(documents)
    assert reader.documents == documents
    assert not reader.torn


def test_a_document_that_breaks_off_is_known_to_be_torn(agent: ModuleType) -> None:
    lines = agent.frame({"node": "n1", "text": "".join(random.choices("abcdef", k=5000))})
    reader = FrameReader()
    for line in lines[:-1]:
        assert reader.feed(line) is None
    assert reader.torn == {"n1"}


@pytest.mark.parametrize("flags", [["-I", "-S"], ["-I", "-S", "-W", "error"]])
def test_the_agent_runs_from_standard_input_without_the_package(tmp_path: Path, flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-", json.dumps({"node": "n7", "pid_files": str(tmp_path)})],
        input=agent_program(), capture_output=True, text=True, timeout=30, cwd=tmp_path, check=True,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (document["node"], document["ranks"], document["found_by"]) == ("n7", [], "pid files")
