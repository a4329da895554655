"""RMSNorm, SwiGLU, grouped-query attention and a model without biases: exact, guarded, saved and converted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bigsci_launch.cli.main import bsl
from bigsci_launch.config.load import load_run
from bigsci_launch.plan.shape.parameters import ModelShape, pipeline_layers
from bigsci_launch.plan.shape.tflops import MODEL_PASSES, full_flops
from tests.support.texts import has_parts
from tests.support.tiers import with_long

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

CHOICES: dict[str, dict[str, Any]] = {
    "today": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"activation": "swiglu", "ffn_hidden_size": 96},
    "grouped": {"num_key_value_heads": 2},
    "grouped alibi": {"num_key_value_heads": 1, "positions": "alibi"},
    "no biases": {"biases": False},
    "all": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "ffn_hidden_size": 96,
        "num_key_value_heads": 2,
        "biases": False,
        "positions": "rotary",
        "tied_embeddings": False,
    },
}
MODERN = {**CHOICES["all"], "embedding_norm": True}
DEMO = Path(__file__).parents[2] / "configs/demo.yaml"
STEPS = 6
# "modern" has all choices at once; in bf16, guards see what they see in fp32.
FURTHER = ("grouped alibi", "healthy no biases", "healthy rmsnorm", "unreduced", "scaled")


def config_of(choice: str) -> Any:
    overrides = [f"model.{key}={str(value).lower()}" for key, value in CHOICES[choice].items()]
    overrides += [f"parallelism.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "data")]
    return load_run(DEMO, [*overrides, "model.num_layers=2", "training.precision=fp32"]).config


def build(config: Any) -> Any:
    """Return the layers of the model; its parameters are moved away from zeros and ones, which would hide errors."""
    from bigsci_launch.train.parallel.model import GptSizes
    from bigsci_launch.train.parallel.pipeline import layer_specs
    from bigsci_launch.train.parallel.tensor import TensorParallel

    specs = layer_specs(config, GptSizes.of_config(config), TensorParallel(rank=0, size=1, group=None))
    layers = [spec.build() for spec in specs]
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return layers


def by_plain_name(config: Any, layers: Any) -> dict[str, Any]:
    """Return the parameters under the names that `plain_gpt` uses."""
    has_positions = config.model.positions == "learned"
    named = {"embedding": layers[0].weight, **({"positions": layers[1].weight} if has_positions else {})}
    for number, layer in enumerate(layers[1 + has_positions : -2]):
        named |= {f"{number}.{name}": each for name, each in layer.named_parameters()}
    named |= {f"final.{name}": each for name, each in layers[-2].norm.named_parameters()}
    return {**named, "head": layers[0].weight if config.model.tied_embeddings else layers[-1].weight}


@pytest.mark.parametrize("choice", [each for each in CHOICES if each != "grouped alibi"])
def test_loss_and_gradients_are_those_of_a_plain_model(choice: str) -> None:
    from bigsci_launch.train.parallel.loss import VocabularyParallelLoss
    from bigsci_launch.train.parallel.tensor import TensorParallel

    from .plain_gpt import plain_loss

    config = config_of(choice)
    layers = build(config)
    named = by_plain_name(config, layers)
    draw = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, config.model.vocab_size, (2, 2, config.model.sequence_length), generator=draw)
    x = tokens
    for layer in layers[:-1]:
        x = layer(x)
    logits = layers[0].logits(x) if config.model.tied_embeddings else layers[-1](x)
    loss = VocabularyParallelLoss(config.model.vocab_size, TensorParallel(0, 1, None))(logits, labels)
    torch.autograd.backward(loss)
    copies = {name: each.detach().double().requires_grad_() for name, each in named.items()}
    if config.model.tied_embeddings:
        copies["head"] = copies["embedding"]
    expected = plain_loss(config.model, copies, tokens, labels)
    torch.autograd.backward(expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, each in copies.items():
        apart = float((named[name].grad.double() - each.grad).norm())
        assert apart <= 2e-6 * float(each.grad.norm()), name


@pytest.mark.parametrize("choice", CHOICES)
def test_the_planner_and_the_flops_count_what_is_built(choice: str) -> None:
    config = config_of(choice)
    layers = build(config)
    shape = ModelShape.of_config(config)
    counts = [sum(each.numel() for each in layer.parameters()) for layer in layers]
    assert [layer.num_parameters for layer in pipeline_layers(shape)] == counts
    matrices = sum(each.numel() for layer in layers for each in layer.parameters() if each.ndim == 2)
    tables = [each for layer in layers if (each := getattr(layer, "weight", None)) is not None]
    weights = matrices - sum(each.numel() for each in tables)
    h, s, padded = config.model.hidden_size, config.model.sequence_length, config.padded_vocab_size
    per_token = 6 * (weights + h * padded) + 12 * config.model.num_layers * h * s
    assert full_flops(shape, 1, 3, MODEL_PASSES) == pytest.approx(3 * s * per_token)


@pytest.fixture(scope="module")
def one(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cases = [("grouped alibi", CHOICES["grouped alibi"] | {"num_key_value_heads": 2}), ("modern", MODERN)]
    return train_several(
        tmp_path_factory.mktemp("one"),
        "tp=1",
        [(name, {"model": model, "training": {"steps": STEPS}}) for name, model in cases],
        further=FURTHER,
    )


@pytest.fixture(scope="module")
def two(train_several: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Guarded at every step. `stopped` resumes; `unreduced` and `scaled` have a defect at step 3."""

    def case(name: str, model: Any = MODERN, **training: Any) -> tuple[str, dict[str, Any]]:
        return name, {"model": model, "training": {"steps": STEPS, **training}, "guards": {"interval": 1}}

    def broken(name: str, kind: str, **training: Any) -> tuple[str, dict[str, Any]]:
        faults = [{"kind": kind, "step": 3}]
        optimizer = {"warmup_steps": 0, "learning_rate": 1e-2}
        return name, {**case(name, **training)[1], "faults": faults, "optimizer": optimizer}

    return train_several(
        tmp_path_factory.mktemp("two"),
        "tp=2",
        [
            case("grouped alibi", CHOICES["grouped alibi"] | {"num_key_value_heads": 2}),
            case("modern"),
            case("stopped", stop_after_steps=3),
            case("stopped"),
            case("healthy bf16", steps=12, precision="bf16"),
            case("healthy no biases", {"biases": False}, precision="bf16"),
            case("healthy rmsnorm", {"norm": "rmsnorm"}, precision="bf16"),
            broken("unreduced", "unreduced_tp_gradients"),
            broken("unreduced bf16", "unreduced_tp_gradients", precision="bf16"),
            broken("scaled", "scaled_gradients", precision="bf16"),
        ],
        further=FURTHER,
    )


@pytest.mark.parametrize("name", with_long(["grouped alibi", "modern"], FURTHER))
def test_two_ranks_of_a_layer_train_as_one(name: str, one: Any, two: Any) -> None:
    mine, theirs = one[name].steps(), two[name].steps()
    assert sorted(mine) == sorted(theirs) == list(range(1, STEPS + 1))
    for step in mine:
        assert theirs[step]["loss"] == pytest.approx(mine[step]["loss"], rel=1e-6), step
        assert theirs[step]["grad_norm"] == pytest.approx(mine[step]["grad_norm"], rel=1e-5), step


# Replicas know nothing of a model but its tensors; test_parity.py has them.
@pytest.mark.parametrize("topology", with_long(["pp=2", "dp=2"], ["dp=2"]))
def test_stages_and_replicas_train_as_one(topology: str, one: Any, finish: Any, tmp_path: Path) -> None:
    training = {"steps": STEPS, "activation_checkpointing": topology == "pp=2"}
    other = finish(tmp_path, topology, model=MODERN, training=training, guards={"interval": 1})
    mine, theirs = one["modern"].steps(), other.steps()
    assert sorted(mine) == sorted(theirs)
    for step in mine:
        assert theirs[step]["loss"] == pytest.approx(mine[step]["loss"], rel=1e-6), step


def test_a_resumed_run_has_the_same_losses_to_the_last_bit(two: Any) -> None:
    whole = {step: record["loss_hex"] for step, record in two["modern"].steps().items()}
    parts = {**two["stopped"].steps(), **two["stopped+"].steps()}
    assert {step: record["loss_hex"] for step, record in parts.items()} == whole
    assert len(two["stopped+"].steps()) == STEPS - 3


@pytest.mark.parametrize("name", with_long(["modern", "healthy bf16", "healthy no biases", "healthy rmsnorm"], FURTHER))
def test_guards_have_nothing_to_say_of_a_healthy_run(name: str, two: Any) -> None:
    assert two[name].error(0) is None, two[name].error(0)
    assert [two[name].events(rank, "guard") for rank in range(2)] == [[], []]


@pytest.mark.parametrize("name", with_long(["unreduced", "unreduced bf16", "scaled"], FURTHER))
def test_without_biases_the_weights_of_the_norms_tell(name: str, two: Any) -> None:
    error = two[name].error(0)
    assert error["step"] == 3
    assert has_parts(error["message"], "replicated gradients", "attention_norm.weight", "layer that reads")


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(bsl, [str(word) for word in words])


@pytest.fixture(scope="module")
def on_one_rank(two: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two ranks, converted for one."""
    saved, folder = two["modern"].run.checkpoints / f"global_step{STEPS}", tmp_path_factory.mktemp("on-one-rank")
    done = invoke("checkpoint", "convert", saved, "-o", folder, "--tp", 1, "--pp", 1, "--dp", 1)
    assert done.exit_code == 0, done.output
    return folder / saved.name


def test_a_conversion_keeps_every_bit_there_and_back(two: Any, on_one_rank: Path, tmp_path: Path) -> None:
    saved = two["modern"].run.checkpoints / f"global_step{STEPS}"
    done = invoke("checkpoint", "convert", on_one_rank, "-o", tmp_path, "--tp", 2, "--pp", 1, "--dp", 1)
    assert done.exit_code == 0, done.output
    compared = invoke("diff-weights", saved, tmp_path / saved.name, "--exclude", "rng_*")
    assert compared.exit_code == 0, compared.output


@pytest.mark.long  # test_resume.py holds this for a model with biases and a tied embedding
def test_deepspeeds_own_converter_finds_the_same_parameters(two: Any, on_one_rank: Path, tmp_path: Path) -> None:
    saved, universal = two["modern"].run.checkpoints / on_one_rank.name, tmp_path / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    command += ["--num_merge_workers", "1", "--input_folder", str(saved), "--output_folder", str(universal)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    compared = invoke("diff-weights", on_one_rank, universal)
    assert compared.exit_code == 0, compared.output


def test_no_conversion_splits_a_key_value_head(two: Any, tmp_path: Path) -> None:
    saved = two["modern"].run.checkpoints / f"global_step{STEPS}"
    refused = invoke("checkpoint", "convert", saved, "-o", tmp_path, "--tp", 4, "--pp", 1, "--dp", 1)
    assert has_parts(refused.output, "tp 4 ", "heads (2)")


def test_another_choice_is_another_model(two: Any, start: Any, tmp_path: Path) -> None:
    saved = two["stopped"].run.checkpoints / "global_step3"
    other = {key: value for key, value in MODERN.items() if key not in ("biases", "num_key_value_heads")}
    refused = start(tmp_path, "tp=2", model=other, training={"steps": STEPS}, checkpoint={"load": str(saved)})
    assert set(refused.wait()) == {4}
    message = refused.error(0)["message"]
    assert has_parts(message, "num_key_value_heads is 2 ", "biases is False ")
