"""How a rank finds out its identity from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.errors import ConfigError
from bigsci_launch.topology import Topology
from bigsci_launch.train.rank.identity import parse_identity, require_topology

ENVIRONMENT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "BSL_RUN_DIR": "/scratch/runs/demo",
    "BSL_ATTEMPT": "0002",
}


def config(**parallelism: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "t"},
            "parallelism": parallelism,
            "model": {
                "num_layers": 2,
                "hidden_size": 8,
                "num_attention_heads": 2,
                "sequence_length": 8,
                "vocab_size": 300,
            },
            "training": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 8},
            "data": {"prefix": "d"},
        }
    )


def test_place() -> None:
    identity = parse_identity({**ENVIRONMENT, "SLURMD_NODENAME": "n2"})
    assert (identity.rank, identity.world_size, identity.node) == (3, 8, "n2")
    assert identity.attempt.path == Path("/scratch/runs/demo/attempts/0002")


def test_everything_that_is_missing_is_named_at_once() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("LOCAL_RANK", "MASTER_ADDR")}
    with pytest.raises(ConfigError) as caught:
        parse_identity({**environment, "WORLD_SIZE": "eight"})
    assert [problem.key for problem in caught.value.problems] == ["LOCAL_RANK", "MASTER_ADDR", "WORLD_SIZE"]


def test_topology_fills_the_data_parallel_axis() -> None:
    assert require_topology(config(tensor_parallel_size=2), 8) == Topology(tp=2, pp=1, dp=4)


def test_axes_that_the_trainer_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallelism.expert_parallel_size: "):
        require_topology(config(expert_parallel_size=2), 8)


@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [({"tensor_parallel_size": 3}, 8), ({"data_parallel_size": 4}, 8), ({"pipeline_parallel_size": 4}, 2)],
)
def test_ranks_that_do_not_fit_are_refused(sizes: dict[str, int], world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"{world_size} were started"):
        require_topology(config(**sizes), world_size)
