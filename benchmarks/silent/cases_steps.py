"""Defects in the middle of a run: of data, state, gradients, and values that are not finite."""

from __future__ import annotations

from typing import Any

from silent.case import AT, Case, Truth

SAMPLES = 8
BEFORE = SAMPLES * (AT - 1)
DATA = "^data"
MOMENTS = "memory|moments|optimizer (step|update)"
RATE = "learning rate|optimizer (update|settings)"
FINITE = "not finite|memory|moments"
GRADIENTS = "gradient|clipping"
FP32: dict[str, Any] = {"training": {"precision": "fp32"}}
AUTO: dict[str, Any] = {
    "training": {"steps": 24},
    "checkpoint": {"save_interval": 18},
    "guards": {"interval": "auto"},
}
COARSE: dict[str, Any] = {**AUTO, "guards": {"interval": 50}}
OWN: dict[str, Any] = {"data": {"prefix": "/proc/self/cwd/tokens"}}
ONE = (1,)


def data(name: str, what: str, shape: str, defect: str, ranks: tuple[int, ...], **more: Any) -> Case:
    blamed = more.pop("blamed", None)
    return Case(name, "data", what, shape, defect, ranks=ranks, truth=Truth(check=DATA, ranks=blamed), **more)


def other(name: str, what: str, shape: str, ranks: tuple[int, ...], folder: str) -> Case:
    options = {"own": "own", "other": folder}
    return data(name, what, shape, "other file", ranks, at=1, options=options, sections=OWN)


def cursor(name: str, what: str, shape: str, ranks: tuple[int, ...], shift: int, **more: Any) -> Case:
    options = {"from": BEFORE, "shift": shift}
    blamed = ranks or None
    return data(name, what, shape, "shifted cursor", ranks, options=options, blamed=blamed, **more)


CASES_DATA = (
    other("other-file-dp", "another file under the same path on a dp rank", "dp=2", ONE, "other"),
    other("other-file-tp", "another file under the same path on a tp rank", "tp=2", ONE, "other"),
    other("other-file-last-stage", "another file under the same path on the last stage", "pp=2", ONE, "other"),
    other("one-token-last-stage", "a file with one changed token on the last stage", "pp=2", ONE, "one"),
    other("one-token-dp", "a file with one changed token on a dp rank", "dp=2", ONE, "one"),
    other("short-file-dp", "a shorter copy of the file on a dp rank", "dp=2", ONE, "short"),
    cursor("offset-dp", "another offset on a dp rank", "dp=2", ONE, 160),
    cursor("offset-tp", "another offset on a tp rank", "tp=2", ONE, 160),
    cursor("offset-last-stage", "another offset on the last stage", "pp=2", ONE, 160),
    cursor("offset-replica", "another offset on a whole replica", "tp=2,dp=2", (2, 3), 160),
    cursor("replay-all", "the data starts over on all ranks", "dp=2", (), -BEFORE),
    cursor("replay-batch", "every batch is the one before, on all ranks", "dp=2", (), -SAMPLES),
    data("same-data", "two replicas read the same samples", "dp=2", "share of the first replica", (), at=1),
    data("same-data-tp", "two replicas read the same samples", "tp=2,dp=2", "share of the first replica", (), at=1),
    data(
        "token-tp",
        "a token changes on its way to a tp rank",
        "tp=2",
        "flipped token",
        ONE,
        options={"from": BEFORE, "part": 0},
    ),
    data(
        "label-last-stage",
        "a label changes on its way to one of two tp ranks of the last stage",
        "tp=2,pp=2",
        "flipped token",
        (3,),
        options={"from": BEFORE, "part": 1},
        blamed=(3,),
    ),
)


def state(name: str, what: str, defect: str, check: str, shape: str = "dp=2", **more: Any) -> Case:
    ranks = more.pop("ranks", ONE)
    truth = more.pop("truth", Truth(check=check, ranks=ranks or None))
    return Case(name, "state", what, shape, defect, ranks=ranks, truth=truth, **more)


def moment(name: str, what: str, **options: Any) -> Case:
    more = {key: options.pop(key) for key in ("ranks", "shape", "sections", "truth") if key in options}
    return state(name, what, "changed moment", MOMENTS, options=options, **more)


NORM_TRUTH = Truth(check="tensor-parallel copies|memory", ranks=ONE)
CASES_STATE = (
    moment("v-x100-dp", "exp_avg_sq times 100 on a dp rank", key="exp_avg_sq", factor=100.0),
    moment("v-x100-tp", "exp_avg_sq times 100 on a tp rank", key="exp_avg_sq", factor=100.0, shape="tp=2"),
    moment("v-zero-all", "exp_avg_sq zeroed on all ranks", key="exp_avg_sq", factor=0.0, ranks=()),
    moment("v-x0.5-all", "exp_avg_sq halved on all ranks", key="exp_avg_sq", factor=0.5, ranks=()),
    moment("m-zero-dp", "exp_avg zeroed on a dp rank", key="exp_avg", factor=0.0),
    moment("m-zero-all", "exp_avg zeroed on all ranks", key="exp_avg", factor=0.0, ranks=()),
    moment("m-sign-all", "exp_avg with the other sign on all ranks", key="exp_avg", factor=-1.0, ranks=()),
    moment("m-x1.5-pp", "exp_avg times 1.5 on a stage", key="exp_avg", factor=1.5, shape="pp=2"),
    moment("m-bit-low", "a low bit of one exp_avg flipped on a dp rank", key="exp_avg", bit=3),
    moment("v-bit-high", "the highest exponent bit of one exp_avg_sq flipped", key="exp_avg_sq", bit=30),
    moment("m-bit-low-fp32", "a low bit of one exp_avg flipped, fp32", key="exp_avg", bit=3, sections=FP32),
    moment("m-1e34", "1e34 in one exp_avg on a dp rank", key="exp_avg", value=1e34),
    moment("v-1e34", "1e34 in one exp_avg_sq on a dp rank", key="exp_avg_sq", value=1e34),
    moment("v-negative", "one exp_avg_sq below zero", key="exp_avg_sq", value=-1e-6),
    moment(
        "m-1e34-kept-2",
        "1e34 in one exp_avg, with keep_last 2 and a save after every step",
        key="exp_avg",
        value=1e34,
        sections={"checkpoint": {"save_interval": 1, "keep_last": 2}},
    ),
    state("adam-step-dp", "AdamW's step reset on a dp rank", "Adam's step reset", MOMENTS),
    state("adam-step-all", "AdamW's step reset on all ranks", "Adam's step reset", MOMENTS, ranks=()),
    state("master-bit", "a bit of a master, under the same bf16 weight", "changed master", MOMENTS),
    state(
        "masters-all",
        "low bits of all masters, under the same bf16 weights",
        "changed master",
        MOMENTS,
        ranks=(),
        options={"all": True},
    ),
    state("lr-x3-dp", "learning rate times 3 inside AdamW on a dp rank", "scaled rate", RATE, options={"factor": 3.0}),
    state("lr-x3-all", "the same on all ranks", "scaled rate", RATE, ranks=(), options={"factor": 3.0}),
    state("lr-x3-tp", "the same on a tp rank", "scaled rate", RATE + "|copies", "tp=2", options={"factor": 3.0}),
    state(
        "lr-x3-fp32",
        "the same on all ranks, fp32",
        "scaled rate",
        RATE,
        ranks=(),
        options={"factor": 3.0},
        sections=FP32,
    ),
    state(
        "betas-in-adam",
        "betas of a group changed on all ranks",
        "changed groups",
        "optimizer (groups|settings)",
        ranks=(),
        options={"key": "betas", "value": (0.9, 0.5)},
    ),
    state(
        "decay-dropped",
        "weight decay of the groups set to 0 on a dp rank",
        "changed groups",
        "optimizer (groups|settings)",
        options={"key": "weight_decay", "value": 0.0},
    ),
    state("decay-twice", "weights decayed ten times more", "decayed twice", "optimizer update", ranks=()),
    state(
        "update-left-out",
        "AdamW does not update on a dp rank, once",
        "update left out",
        MOMENTS,
        options={"once": True},
    ),
    state("other-sign", "AdamW gets gradients of the other sign", "other sign", "optimizer update|gradient", ranks=()),
    state(
        "padded-rows",
        "padded rows of the embedding set to 3 on all ranks",
        "changed weight",
        "padding|memory",
        "tp=2",
        ranks=ONE,
        options={"name": "embedding.weight", "first": 140 * 32, "plus": 3.0},
    ),
    state(
        "norm-apart-tp",
        "a layer norm and its master changed on a tp rank",
        "changed weight",
        "",
        "tp=2",
        options={"name": "2.attention_norm.weight", "factor": 1.01},
        truth=NORM_TRUTH,
    ),
    state(
        "tied-copy-stale",
        "the tied copy of the last stage and its master changed",
        "changed weight",
        "tied copies|memory",
        "pp=2",
        options={"name": "embedding.weight", "factor": 1.01},
    ),
    state(
        "weight-bit-dp", "a bit of a weight, not of its master", "changed copy", "data-parallel copies|masters|memory"
    ),
    state(
        "reseeded",
        "the generator of dropout seeded again in mid-run",
        "reseeded",
        "random",
        sections={"model": {"dropout": 0.1}},
        truth=Truth("anything", why="no copy of a generator's state exists between saves, and no step shows it"),
    ),
)


def not_finite(name: str, what: str, defect: str, **more: Any) -> Case:
    ranks = more.pop("ranks", ONE)
    truth = more.pop("truth", Truth(check=FINITE, ranks=ranks or None))
    return Case(name, "nan", what, more.pop("shape", "dp=2"), defect, ranks=ranks, truth=truth, **more)


NAN, INF = float("nan"), float("inf")
FOR_EVER: dict[str, Any] = {"training": {"steps": 20}, "guards": {"interval": 1, "max_skipped_steps": 4}}
SKIPPED = Truth("name", check="skipped|not finite", words=r"2\.mlp\.up\.weight")
NEVER = Truth(check="not finite", words=r"2\.mlp\.up\.weight", ranks=(1,), late=3, is_saved=False)
CASES_NAN = (
    not_finite(
        "nan-gradient-once",
        "NaN in a gradient in one step",
        "scaled gradients",
        options={"factor": NAN, "once": True, "name": "2.mlp.up.weight"},
        truth=SKIPPED,
    ),
    not_finite(
        "inf-gradient-once-tp",
        "Inf in a gradient of a tp rank in one step",
        "scaled gradients",
        shape="tp=2",
        options={"factor": INF, "once": True, "name": "2.mlp.up.weight"},
        truth=SKIPPED,
    ),
    not_finite(
        "nan-gradient-for-ever",
        "NaN in a gradient in every step",
        "scaled gradients",
        options={"factor": NAN, "name": "2.mlp.up.weight"},
        sections=FOR_EVER,
        truth=NEVER,
    ),
    not_finite(
        "nan-gradient-for-ever-fp32",
        "the same, fp32",
        "scaled gradients",
        options={"factor": NAN, "name": "2.mlp.up.weight"},
        sections={**FOR_EVER, "training": {"steps": 20, "precision": "fp32"}},
        truth=NEVER,
    ),
    not_finite(
        "nan-weight-pp",
        "NaN in a weight and its master on the last stage",
        "poisoned weight",
        shape="pp=2",
        options={"value": NAN, "master": True},
    ),
    not_finite("nan-weight-dp", "NaN in a weight on a dp rank", "poisoned weight", options={"value": NAN}),
    not_finite(
        "huge-weight",
        "1e30 in a weight and its master",
        "poisoned weight",
        options={"value": 1e30, "master": True},
        shape="pp=2",
    ),
    not_finite(
        "nan-moment", "NaN in one exp_avg on a dp rank", "changed moment", options={"key": "exp_avg", "value": NAN}
    ),
    not_finite(
        "nan-weight-between",
        "NaN in a weight between armed steps",
        "poisoned weight",
        at=15,
        options={"value": NAN, "master": True},
        sections=COARSE,
        shape="pp=2",
    ),
    not_finite(
        "m-1e34-between",
        "1e34 in one exp_avg between armed steps",
        "changed moment",
        at=15,
        options={"key": "exp_avg", "value": 1e34},
        sections=COARSE,
    ),
)


def gradient(name: str, what: str, shape: str, defect: str, **more: Any) -> Case:
    truth = more.pop("truth", Truth(check=GRADIENTS))
    return Case(name, "gradients", what, shape, defect, truth=truth, **more)


LATE: dict[str, Any] = {"at": 15}
BIAS = Truth(check="replicated gradients|layer gradients")
LOSS, LOSS_ONE = Truth(check="loss gradient"), Truth(check="loss gradient", ranks=ONE)
LAYER = Truth(check="layer gradients|replicated gradients|gradient norm", ranks=ONE)
REDUCTION, TIED = Truth(check="gradient reduction"), Truth(check="tied gradients", tensor="embedding")
CLIPPING = Truth(check="clipping")
CASES_GRADIENTS = (
    gradient(
        "x8-dp",
        "gradients times 8 on a dp rank",
        "dp=2",
        "scaled loss",
        ranks=ONE,
        options={"factor": 8.0},
        truth=LOSS_ONE,
    ),
    gradient(
        "x8-dp-fp32",
        "the same, fp32",
        "dp=2",
        "scaled loss",
        ranks=ONE,
        options={"factor": 8.0},
        sections=FP32,
        truth=LOSS_ONE,
    ),
    gradient(
        "x8-one-matrix-dp",
        "the gradient of one matrix times 8 on a dp rank",
        "dp=2",
        "scaled gradients",
        ranks=ONE,
        options={"factor": 8.0, "name": "2.mlp.up.weight"},
        truth=Truth(check="layer gradients", tensor=r"2\.mlp\.up\.weight", ranks=ONE),
    ),
    gradient(
        "x8-tp",
        "gradients times 8 on a tp rank",
        "tp=2",
        "scaled gradients",
        ranks=ONE,
        options={"factor": 8.0},
        truth=LAYER,
    ),
    gradient("x8-all", "gradients times 8 on all ranks", "dp=2", "scaled loss", options={"factor": 8.0}, truth=LOSS),
    gradient(
        "x8-all-fp32", "the same, fp32", "dp=2", "scaled loss", options={"factor": 8.0}, sections=FP32, truth=LOSS
    ),
    gradient(
        "half-dp",
        "half of what was accumulated is lost on a dp rank",
        "dp=2",
        "half accumulated",
        ranks=ONE,
        truth=REDUCTION,
    ),
    gradient("unreduced-dp", "gradients not summed over dp", "dp=2", "unreduced dp", truth=REDUCTION),
    gradient("unreduced-dp-fp32", "the same, fp32", "dp=2", "unreduced dp", sections=FP32, truth=REDUCTION),
    gradient("unreduced-dp-tp", "the same at tp 2", "tp=2,dp=2", "unreduced dp", truth=REDUCTION),
    gradient(
        "unreduced-dp-fp32-auto",
        "fp32, between armed steps",
        "dp=2",
        "unreduced dp",
        **LATE,
        sections={**AUTO, "training": {"steps": 24, "precision": "fp32"}},
        truth=REDUCTION,
    ),
    gradient("unreduced-tied", "tied gradients not summed", "pp=2", "unreduced tied", truth=TIED),
    gradient(
        "unreduced-tied-auto",
        "the same between armed steps",
        "pp=2",
        "unreduced tied",
        **LATE,
        sections=COARSE,
        truth=TIED,
    ),
    gradient("unreduced-tp", "gradients not summed over tp", "tp=2", "unreduced tp", truth=BIAS),
    gradient("unreduced-tp-auto", "between armed steps", "tp=2", "unreduced tp", **LATE, sections=COARSE, truth=BIAS),
    gradient(
        "replicas-halved",
        "gradients of tp replicas halved",
        "tp=2",
        "scaled replicas",
        options={"factor": 0.5},
        truth=BIAS,
    ),
    gradient(
        "replicas-halved-auto",
        "the same between armed steps, and saved",
        "tp=2",
        "scaled replicas",
        **LATE,
        options={"factor": 0.5},
        sections=AUTO,
        truth=BIAS,
    ),
    gradient("unclipped", "no clipping, checked in every step", "dp=2", "unclipped", truth=CLIPPING),
    gradient(
        "unclipped-auto", "no clipping between armed steps", "dp=2", "unclipped", **LATE, sections=AUTO, truth=CLIPPING
    ),
    gradient(
        "unclipped-coarse",
        "no clipping, armed for the save alone",
        "dp=2",
        "unclipped",
        **LATE,
        sections=COARSE,
        truth=CLIPPING,
    ),
)

CASES = (*CASES_DATA, *CASES_STATE, *CASES_NAN, *CASES_GRADIENTS)
