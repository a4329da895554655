"""The memory that `bsl plan` predicts for `bsl train`, next to the tensors that are alive in its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigsci_launch.config.load import load_resolved
from bigsci_launch.plan.price.constants import PRIOR
from bigsci_launch.plan.price.memory import count_memory
from bigsci_launch.plan.price.own_memory import PRODUCT_WORKSPACE
from bigsci_launch.plan.shape.setup import Setup
from bigsci_launch.topology import Topology

from .conftest import Attempt

MODEL = {"num_layers": 4, "hidden_size": 128, "sequence_length": 128, "vocab_size": 4096}
TRAINING = {"steps": 2, "micro_batch_size": 8, "global_batch_size": 16, "precision": "bf16"}
LLAMA = {"positions": "rotary", "activation": "swiglu", "num_key_value_heads": 2, "tied_embeddings": False}


def scenario(
    name: str, model: dict[str, Any] | None = None, parallelism: dict[str, Any] | None = None, **training: Any
) -> tuple[str, dict[str, Any]]:
    sections = {"model": {**MODEL, **(model or {})}, "training": {**TRAINING, **training}}
    return name, {**sections, "parallelism": parallelism or {}, "guards": {"interval": "off"}}


# A norm other than LayerNorm, biases of scores and dropout are computed otherwise on a CPU.
PLAIN = scenario("plain")
SCENARIOS = {
    "tp=1": [
        PLAIN,
        scenario("recomputed", activation_checkpointing=True),
        scenario("selective", activation_checkpointing="selective"),
        scenario("llama", LLAMA),
        scenario("wide", {"vocab_size": 20_000}, micro_batch_size=1),
        scenario("once", {"ffn_hidden_size": 2048}, micro_batch_size=16),
    ],
    "tp=2,pp=2": [PLAIN, scenario("parts", LLAMA, {"sequence_parallel": True})],
    "dp=2": [PLAIN, scenario("overlapped", None, {"overlap": ["data"]})],
}


@pytest.mark.parametrize("topology", SCENARIOS)
def test_as_much_is_alive_as_is_predicted(train_several: Any, tmp_path: Path, topology: str) -> None:
    shape = Topology.parse(topology)
    attempts: dict[str, Attempt] = train_several(tmp_path, topology, SCENARIOS[topology], "counted_memory")
    found = {}
    for name, attempt in attempts.items():
        setup = Setup.of_config(load_resolved(attempt.folder.config), shape, shape.world_size)
        for rank in range(shape.world_size):
            lines = (attempt.folder.path / f"live-{rank}.jsonl").read_text().splitlines()
            *_, last = [json.loads(line)["bytes"] for line in lines]
            terms = count_memory(setup, shape.coordinate(rank)["pp"])
            need = (terms.state_gib(PRIOR) + terms.kept_gib + terms.working_gib) * 2**30 - PRODUCT_WORKSPACE
            found[name, rank] = need / last - 1
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=0.01)
