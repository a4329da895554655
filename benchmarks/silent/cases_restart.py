"""Defects at a restart: changed settings, damaged or mixed checkpoints, state that a load loses; and undisturbed runs.

The bases save after steps 3 and 6 and stop there. A case resumes a copy of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silent.case import Case, Truth

HALF = 6
NEXT = HALF + 1
DROPOUT: dict[str, Any] = {"model": {"dropout": 0.1}}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", DROPOUT),
    "dp2-other-seed": ("dp=2", {**DROPOUT, "run": {"seed": 4321}}),
    "dp2-moving": ("dp=2", {**DROPOUT, "data": {"prefix": "moving"}}),
    "pp2": ("pp=2", DROPOUT),
    "pp2-untied": ("pp=2", {"model": {"dropout": 0.1, "tied_embeddings": False}}),
}
STOP_WORDS = "was saved|differs?|another|changed|not what|step|bytes|contents|cannot be read|No such file"


def setting(name: str, what: str, wanted: str, sections: Mapping[str, Any], words: str, **more: Any) -> Case:
    """Return a case that resumes with other settings; `words` must be in what names them."""
    truth = Truth(wanted, words=words, why=more.pop("why", ""))  # type: ignore[arg-type]
    return Case(name, "restart", what, base=more.pop("base", "dp2"), at=NEXT, sections=sections, truth=truth, **more)


def optimizer(**values: Any) -> dict[str, Any]:
    return {"optimizer": values}


CASES_SETTINGS = (
    setting("lr-x10", "learning rate times 10", "name", optimizer(learning_rate=3e-2), "learning_rate"),
    setting("schedule", "another decay of the learning rate", "name", optimizer(decay_steps=7), "decay_steps"),
    setting("warmup", "another warm-up", "name", optimizer(warmup_steps=9), "warmup_steps"),
    setting("weight-decay", "another weight decay", "name", optimizer(weight_decay=0.9), "weight_decay"),
    setting("betas", "other betas", "name", optimizer(betas=[0.5, 0.6]), "betas"),
    setting("adam-epsilon", "another epsilon of AdamW", "name", optimizer(epsilon=1e-3), "epsilon"),
    setting("clip", "another limit of the gradient norm", "name", optimizer(clip_grad=9.0), "clip_grad"),
    setting("seed", "another seed, so another order of the data", "stop", {"run": {"seed": 77}}, "seed"),
    setting(
        "global-batch", "another global batch", "name", {"training": {"global_batch_size": 16}}, "global_batch_size"
    ),
    setting(
        "ramp-up",
        "a ramp-up of the batch",
        "name",
        {"training": {"rampup": {"start": 4, "increment": 4, "samples": 64}}},
        "rampup|ramp",
    ),
    setting("data", "another dataset", "stop", {"data": {"prefix": "other"}}, "data|tokens"),
    setting("tokenizer", "another tokenizer of the same size", "stop", {"data": {"prefix": "retokenized"}}, "token"),
    setting("held-out", "another share held out", "stop", {"data": {"held_out": 0.1}}, "held_out|data"),
    setting("grown", "a dataset that has grown at its end", "name", {"data": {"prefix": "grown"}}, "data|tokens"),
    setting("dropout", "another dropout in the same run", "stop", {"model": {"dropout": 0.5}}, "dropout"),
    setting("epsilon", "another epsilon in the same run", "stop", {"model": {"layernorm_epsilon": 0.1}}, "epsilon"),
    setting(
        "dropout-by-load",
        "another dropout by checkpoint.load",
        "name",
        {"model": {"dropout": 0.5}, "checkpoint": {"load": "BASE"}},
        "dropout",
        edit="fresh run",
    ),
    setting(
        "epsilon-by-load",
        "another epsilon by checkpoint.load",
        "stop",
        {"model": {"layernorm_epsilon": 0.1}, "checkpoint": {"load": "BASE"}},
        "epsilon",
        edit="fresh run",
    ),
    setting(
        "other-run",
        "the checkpoint of another run of equal sizes",
        "stop",
        {},
        "another run|other run|run_id|run id|seed",
        edit="another run's",
    ),
    setting(
        "same-path-other-tokens",
        "other tokens under the path of the dataset",
        "stop",
        {},
        "data|tokens|digest",
        base="dp2-moving",
        edit="other tokens",
    ),
    setting(
        "micro-batch",
        "another micro batch, the same samples",
        "anything",
        {"training": {"micro_batch_size": 1}},
        ".",
        why="the same samples in the same step: nothing is wrong",
    ),
)


def damage(name: str, what: str, edit: str, words: str = STOP_WORDS, base: str = "dp2", **more: Any) -> Case:
    return Case(name, "restart", what, BASES[base][0], edit=edit, base=base, at=NEXT, truth=Truth(words=words), **more)


CASES_FILES = (
    damage("consumed-0", "consumed_samples: 0 in checkpoint.json", "consumed 0"),
    damage("step-5", "step: 5 in checkpoint.json", "step 5"),
    damage("config-edited", "the learning rate of its config edited in checkpoint.json", "config edited"),
    damage("mixed-untied", "a stage of step 3, untied", "stage of step 3", base="pp2-untied"),
    damage("mixed-tied", "a stage of step 3, tied", "stage of step 3", base="pp2"),
    damage("mixed-rank", "everything of one rank of step 3", "rank of step 3"),
    damage("mixed-shard", "the optimizer shard of step 3", "shard of step 3"),
    damage("mixed-all-but-record", "all of step 3 under the record of step 6", "record of step 6"),
    damage("bit-optimizer", "a bit of an optimizer file", "bit in optimizer"),
    damage("bit-layer", "a bit of a layer's file", "bit in layer"),
    damage("bit-random", "a bit of the random states", "bit in random"),
    damage("truncated", "a truncated optimizer file", "truncated"),
    damage("missing-shard", "a missing optimizer file", "missing shard"),
    damage("missing-digests", "missing digests of a rank", "missing digests"),
)


def load(name: str, what: str, defect: str, check: str, **more: Any) -> Case:
    truth = more.pop("truth", Truth(check=check, ranks=more.get("ranks") or None))
    return Case(name, "restart", what, defect=defect, base="dp2", at=NEXT, truth=truth, **more)


CASES_LOADS = (
    load("random-lost", "random states not restored", "generators lost", "load"),
    load("moments-lost", "moments not restored", "moments lost", "load|moment|adam"),
    load("moments-lost-dp", "moments not restored on a dp rank", "moments lost", "load|moment|adam", ranks=(1,)),
    load("adam-step-lost", "AdamW's step not restored", "step lost", "load|moment|adam"),
    load(
        "data-from-0",
        "the data starts over after the resume",
        "shifted cursor",
        "data|tokens|samples",
        options={"from": 0, "shift": -8 * HALF},
    ),
    load(
        "reseeded-after-load",
        "the generator seeded again after the check of the load",
        "reseeded",
        "random",
        truth=Truth("anything", why="no copy of a generator's state exists between saves, and no step shows it"),
    ),
)


def healthy(name: str, shape: str, **sections: Any) -> Case:
    return Case(name, "healthy", f"undisturbed, {shape}", shape, at=0, sections=sections, truth=Truth("nothing"))


RAMP = {"rampup": {"start": 4, "increment": 4, "samples": 48}}
ONE_STEP, AUTO = {"interval": 1}, {"interval": "auto"}
CASES_HEALTHY = (
    healthy("healthy-1-bf16", "dp=1"),
    healthy("healthy-1-fp32", "dp=1", training={"precision": "fp32"}),
    healthy("healthy-1-fp16", "dp=1", training={"precision": "fp16"}),
    healthy("healthy-dp2-bf16", "dp=2", model={"dropout": 0.1}),
    healthy("healthy-dp2-fp32", "dp=2", training={"precision": "fp32"}),
    healthy("healthy-dp2-fp16", "dp=2", training={"precision": "fp16"}),
    healthy("healthy-dp2-ramp", "dp=2", training=RAMP),
    healthy("healthy-dp2-auto", "dp=2", guards=AUTO, training={"steps": 40}),
    healthy("healthy-dp2-unclipped", "dp=2", optimizer={"clip_grad": 0.0}),
    healthy("healthy-dp2-norm", "dp=2", model={"embedding_norm": True, "tied_embeddings": False}),
    healthy("healthy-tp2-bf16", "tp=2", model={"dropout": 0.1}),
    healthy("healthy-tp2-fp32", "tp=2", training={"precision": "fp32"}),
    healthy("healthy-tp2-fp16", "tp=2", training={"precision": "fp16"}),
    healthy("healthy-tp2-alibi", "tp=2", model={"positions": "alibi", "embedding_norm": True}),
    healthy("healthy-pp2-bf16", "pp=2", model={"dropout": 0.1}),
    healthy("healthy-pp2-fp32", "pp=2", training={"precision": "fp32"}, data={"held_out": 0.1}),
    healthy("healthy-pp2-fp16", "pp=2", training={"precision": "fp16"}),
    healthy("healthy-pp2-rotary", "pp=2", model={"positions": "rotary", "tied_embeddings": False}),
    healthy("healthy-pp2-recomputed", "pp=2", training={"activation_checkpointing": True}, model={"dropout": 0.1}),
    healthy("healthy-tp2dp2-bf16", "tp=2,dp=2", model={"dropout": 0.1}, training=RAMP),
    healthy("healthy-pp2dp2-bf16", "pp=2,dp=2", model={"dropout": 0.1}, checkpoint={"keep_last": 1}),
    healthy("healthy-pp2dp2-fp32", "pp=2,dp=2", training={"precision": "fp32"}),
    healthy("healthy-tp2pp2-bf16", "tp=2,pp=2", training=RAMP),
    healthy("healthy-tp2pp2-fp32", "tp=2,pp=2", training={"precision": "fp32"}),
    healthy("healthy-tp2pp2-fp16", "tp=2,pp=2", training={"precision": "fp16"}),
)
CASES = (*CASES_SETTINGS, *CASES_FILES, *CASES_LOADS, *CASES_HEALTHY)
