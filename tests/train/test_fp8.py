"""Matrix products in fp8: their errors, what is left in bf16, training next to bf16, guards, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import has_parts

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

from torch.nn import functional  # noqa: E402

from bigsci_launch.errors import ConfigError  # noqa: E402
from bigsci_launch.topology import Topology  # noqa: E402
from bigsci_launch.train.parallel import fp8  # noqa: E402
from bigsci_launch.train.parallel.fp8 import GRADIENT, INPUT, as_multiplied, fp8_linear, rounded, scale_for  # noqa: E402

from .conftest import make_config  # noqa: E402

STEPS = 100
FURTHER = ("bf16", "fp8")
"""Runs that are long enough to learn something."""


def computed(linear: Any, rows: int = 64, outputs: int = 96, dtype: Any = torch.bfloat16) -> list[Any]:
    """Return a product and the gradients of its input, weight and bias, for operands that bf16 holds exactly."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, gradient = (
        (torch.randn(shape, generator=draw) * size).bfloat16().to(dtype).requires_grad_()
        for shape, size in (((2, rows // 2, 128), 1.0), ((outputs, 128), 0.02), (outputs, 0.1), ((rows, outputs), 1e-6))
    )
    y = linear(x, weight, bias)
    y.backward(gradient.detach().view_as(y))
    return [y.detach(), x.grad, weight.grad, bias.grad]


def test_each_product_is_off_by_what_its_formats_round() -> None:
    exact = computed(functional.linear, dtype=torch.float64)
    apart = [
        float((mine.double() - each).norm() / each.norm())
        for mine, each in zip(computed(fp8_linear), exact, strict=True)
    ]
    assert 0.01 < apart[0] < 0.04, "e4m3 x e4m3"
    assert all(0.03 < each < 0.07 for each in apart[1:3]), "e5m2 x e4m3"
    assert apart[3] < 0.003, "the bias is summed in bf16"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiler_traces_it_whole_and_changes_no_bit() -> None:
    compiled = computed(torch.compile(fp8_linear, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(mine, each) for mine, each in zip(computed(fp8_linear), compiled, strict=True))


@pytest.mark.parametrize("sizes", [{"rows": 24}, {"outputs": 88}])
def test_sizes_that_no_kernel_takes_stay_in_bf16(sizes: dict[str, int]) -> None:
    plain = computed(functional.linear, **sizes)
    assert all(torch.equal(mine, each) for mine, each in zip(computed(fp8_linear, **sizes), plain, strict=True))


@pytest.mark.parametrize("number_format", [INPUT, GRADIENT])
def test_scales_round_nothing_and_use_the_range(number_format: Any) -> None:
    largest = torch.finfo(number_format).max
    for size in (1e-20, 3e-5, 1.0, 448.0, 6e4):
        x = (torch.randn(1000, generator=torch.Generator().manual_seed(1)) * size).bfloat16()
        scale = scale_for(x, number_format)
        assert torch.frexp(scale).mantissa == 0.5
        assert largest / 2 < float((x.float() * scale).abs().max()) <= largest
        assert torch.equal(rounded(x, scale, number_format).float(), (x.float() * scale).to(number_format).float())


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert torch.equal(fp8_linear(x, weight), x)
    for value in (torch.inf, torch.nan):
        x[3, 5] = value
        assert not fp8_linear(x, weight)[3].isfinite().any()


def test_guards_see_the_operands_that_were_multiplied() -> None:
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    seen = as_multiplied(fp8_linear, x, weight, INPUT), as_multiplied(fp8_linear, weight, weight, INPUT)
    torch.testing.assert_close(functional.linear(*seen), fp8_linear(x, weight), rtol=0.01, atol=0.01)
    assert as_multiplied(functional.linear, x, weight, INPUT) is x


@pytest.mark.parametrize(
    ("capability", "hip", "has"), [((8, 0), None, False), ((8, 9), None, True), ((9, 4), "6", False)]
)
def test_gpus_without_fp8_are_refused(capability: Any, hip: Any, has: bool, monkeypatch: Any, tmp_path: Path) -> None:
    from bigsci_launch.train.parallel.pipeline import require_precision

    monkeypatch.setattr(fp8, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.version, "hip", hip)
    config = make_config(Topology(tp=1, pp=1, dp=1), tmp_path, {"training": {"precision": "fp8"}})
    if has:
        require_precision(config)
        return
    with pytest.raises(ConfigError) as refused:
        require_precision(config)
    assert has_parts(str(refused.value), "training.precision: fp8", "a card")


MODERN = {
    **{"norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 96, "biases": False, "positions": "rotary"},
    "tied_embeddings": False,
}


@pytest.fixture(scope="module")
def one(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def case(name: str, precision: str, steps: int = 6, **training: Any) -> tuple[str, dict[str, Any]]:
        guards = {"interval": 1 if steps < STEPS else 20}
        sizes = {"steps": steps, "micro_batch_size": 4}
        sections = {"training": {**sizes, "precision": precision, **training}, "guards": guards}
        return name, {"model": {"num_layers": 2}, **sections}

    narrow = {"model": {"num_layers": 2, "ffn_hidden_size": 88}}
    return train_several(
        tmp_path_factory.mktemp("one"),
        "tp=1",
        [
            case("bf16", "bf16", STEPS),
            case("fp8", "fp8", STEPS),
            case("whole", "fp8"),
            case("recomputed", "fp8", activation_checkpointing=True),
            case("stopped", "fp8", stop_after_steps=3),
            case("stopped", "fp8"),
            case("changed", "bf16", stop_after_steps=3),
            case("changed", "fp8"),
            ("narrow", {**case("narrow", "fp8")[1], **narrow}),
            case("whole bf16", "bf16"),
        ],
        further=FURTHER,
    )


@pytest.fixture(scope="module")
def two(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def case(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
        training = {"steps": 6, "precision": "fp8", "micro_batch_size": 4}
        return name, {"training": training, "guards": {"interval": 1}, **more}

    model, faults = {"num_layers": 2}, [{"kind": "unreduced_tp_gradients", "step": 3}]
    return train_several(
        tmp_path_factory.mktemp("two"),
        "tp=2",
        [case("fp8", model=model), case("modern", model=MODERN), case("unreduced", model=model, faults=faults)],
    )


def losses(attempt: Any) -> list[float]:
    steps = attempt.steps()
    assert sorted(steps) == list(range(min(steps), max(steps) + 1)), attempt.error(0)
    return [steps[step]["loss"] for step in sorted(steps)]


@pytest.mark.parametrize(
    ("fp8_run", "bf16_run", "steps"),
    [("whole", "whole bf16", 6), pytest.param(*FURTHER[::-1], STEPS, marks=pytest.mark.long)],
)
def test_it_trains_as_bf16_does(fp8_run: str, bf16_run: str, steps: int, one: Any) -> None:
    mine, theirs = losses(one[fp8_run]), losses(one[bf16_run])
    assert len(mine) == len(theirs) == steps
    assert theirs[-1] < theirs[0] - 0.003 * steps
    assert mine != theirs
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_two_ranks_with_scales_of_their_own_train_as_one(one: Any, two: Any) -> None:
    assert losses(two["fp8"]) == pytest.approx(losses(one["whole"]), rel=1e-3)


def test_guards_have_nothing_to_say_of_a_healthy_run(one: Any, two: Any) -> None:
    healthy = [*one.values(), two["fp8"], two["modern"]]
    assert [attempt.error(0) for attempt in healthy] == [None] * len(healthy)
    assert [attempt.events(0, "guard") for attempt in healthy] == [[]] * len(healthy)


def test_guards_stop_a_wrong_step(two: Any) -> None:
    assert two["unreduced"].error(0)["step"] == 3


def test_a_run_recomputes_and_resumes_to_the_last_bit_and_changes_between_bf16_and_fp8(one: Any) -> None:
    whole = {step: record["loss_hex"] for step, record in one["whole"].steps().items()}
    assert {step: record["loss_hex"] for step, record in one["recomputed"].steps().items()} == whole
    parts = {**one["stopped"].steps(), **one["stopped+"].steps()}
    assert {step: record["loss_hex"] for step, record in parts.items()} == whole
    assert sorted(one["changed+"].steps()) == [4, 5, 6]
    changes = {event["key"]: event["severity"] for event in one["changed+"].events(0, "changed")}
    assert changes["training.precision"] == "name"


def test_the_log_counts_the_layers_that_stay_in_bf16(one: Any) -> None:
    log = (one["narrow"].run.path.parent / "ranks/attempts/0001/logs/rank-0000.log").read_text()
    assert "fp8: 8 of 8 linear layers of this stage\n" in log
    assert has_parts(log, "fp8: 4 of 8 linear layers of this stage; bf16: ", "mlp.up", "mlp.down", "multiples of 16")
