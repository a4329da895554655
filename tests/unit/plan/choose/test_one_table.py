"""`bsl config check` and `bsl plan` refuse the same layouts for the same reason: there is one table of rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigsci_launch.config.check import check_run
from bigsci_launch.config.finding import Finding
from bigsci_launch.config.load import resolve_run
from bigsci_launch.config.problems import section_at
from bigsci_launch.config.rules.table import EMPTY_STAGE, LAYOUT_RULES
from bigsci_launch.config.schema.run import RunConfig
from bigsci_launch.config.schema.site import SiteConfig
from bigsci_launch.config.site import Site
from bigsci_launch.plan.choose.answer import request_plans

BLOOM = Path(__file__).parents[4] / "configs/bloom-176b-2022.yaml"
NAMES = [rule.name for rule in LAYOUT_RULES]


def section(values: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Values of a section, of which the first in each list is the legal and usual one."""
    return st.fixed_dictionaries({}, optional={key: st.sampled_from(given[1:]) for key, given in values.items()}).map(
        lambda changed: {**{key: given[0] for key, given in values.items()}, **changed}
    )


EXPERTS = {"count": 8, "per_token": 2, "ffn_hidden_size": 64}
RUN = st.sampled_from([*({"command": ["a"], "framework": name} for name in ("megatron", "torchtitan", "fsdp")), {}])
PARALLELISM = section(
    {
        "tensor_parallel_size": [4, 1, 2, 16],
        "pipeline_parallel_size": [2, 1, 3, 4, 96],
        "data_parallel_size": [None, 4, 8],
        "context_parallel_size": [1, 2],
        "expert_parallel_size": [1, 2],
        "expert_shards": [1, 2, 3, 32],
        "sequence_parallel": [False, True],
        "zero_stage": [1, 3],
        "shard_group_size": [None, 3],
        "schedule": ["1f1b", "interleaved"],
        "chunks_per_rank": [1, 2],
        "partition_method": ["type:transformer", "time:35,35", "parameters"],
    }
)
MODEL = section(
    {
        "num_layers": [72, 7, 70],
        "hidden_size": [14336, 14338],
        "num_attention_heads": [112, 30],
        "num_key_value_heads": [None, 2, 5],
        "head_size": [None, 127],
        "ffn_hidden_size": [None, 99],
        "sequence_length": [2048, 2049],
        "positions": ["alibi", "rotary"],
        "experts": [None, EXPERTS, {**EXPERTS, "count": 64}, {**EXPERTS, "per_token": 9}],
    }
)
RAMP = {"start": 192, "increment": 16, "samples": 9765625}
TRAINING = section(
    {"micro_batch_size": [1, 2, 3], "global_batch_size": [2048, 2049], "rampup": [None, RAMP, {**RAMP, "start": 193}]}
)
SLURM = section({"nodes": [8, 3, 48], "spare_nodes": [0, 1]})


def with_values(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    data = config.model_dump()
    return RunConfig.model_validate({**data, **{name: {**data[name], **sections[name]} for name in sections}})


def requires_keys_that_exist(finding: Finding) -> None:
    for key in finding.keys:
        *path, name = key.split(".")
        model, where = (SiteConfig, path[1:]) if path[0] == "site" else (RunConfig, path)
        found = section_at(model, tuple(where))
        assert found is not None and name in found.model_fields, key


@pytest.mark.slow
@given(RUN, PARALLELISM, MODEL, TRAINING, SLURM, st.sampled_from([1, 2]))
def test_both_refuse_the_same_layouts_for_the_same_reason(
    run: dict[str, Any],
    parallelism: dict[str, Any],
    model: dict[str, Any],
    training: dict[str, Any],
    slurm: dict[str, Any],
    domain: int,
) -> None:
    base, site, _ = resolve_run(BLOOM)
    site = Site(site.name, site.path, site.config.model_copy(update={"nvlink_domain_nodes": domain}))
    run = {"command": None, "framework": None, **run}
    config = with_values(base, run=run, parallelism=parallelism, model=model, training=training, slurm=slurm)
    broken = [finding for finding in check_run(config, site) if finding.rule in NAMES and finding.is_error]
    for finding in broken:
        requires_keys_that_exist(finding)
    refusal = request_plans(config, site, None).refusal
    if refusal and refusal.rule == EMPTY_STAGE and model["num_layers"] >= parallelism["pipeline_parallel_size"]:
        assert not broken, "only the partitioner knows"
        return
    assert refusal == (broken[0] if broken else None)
