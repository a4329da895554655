"""The same weights, stored differently: equal in both directions, and one changed element is found and named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bigsci_launch.weights.match.names import unwrapped

Tensors = dict[str, torch.Tensor]
CHANGED = "layers.1.up.weight"
CUT_OVER_TP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def model() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "norm.weight": (4,)}
    names = {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    return {"embed.weight": torch.randn(6, 4, generator=generator)} | {
        name: torch.randn(shape, generator=generator) for name, shape in names.items()
    }


def changed(tensors: Tensors) -> Tensors:
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    found[CHANGED].view(-1)[-1] += 1
    return found


OPTIMIZER = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}


def save(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in tree.items()}, path)
    else:
        torch.save(tree, path)


def sharded(suffix: str, first: int) -> Callable[[Path, Tensors], None]:
    """Two shards under the usual names; the first has `first` tensors."""

    def write(folder: Path, tensors: Tensors) -> None:
        names = list(tensors)
        for number, held in enumerate((names[:first], names[first:]), 1):
            save(folder / f"model-0000{number}-of-00002{suffix}", {name: tensors[name] for name in held})

    return write


def one(name: str, tree: Callable[[Tensors], Any] = dict) -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: save(folder / name, tree(tensors))


def ranks(axis: str, count: int, *, is_replicated: bool = False) -> Callable[[Path, Tensors], None]:
    """One file for each rank of an axis, with its shards of all parameters."""

    def shard(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        dim = 0 if axis != "tp" else next((d for end, d in CUT_OVER_TP.items() if name.endswith(end)), None)
        if dim is None or is_replicated:
            return tensor
        chunks = tensor.chunk(count, dim)
        return chunks[rank].clone() if rank < len(chunks) else tensor[:0]

    def write(folder: Path, tensors: Tensors) -> None:
        for rank in range(count):
            places = {"tp": 0, "dp": 0} | {axis: rank}
            stem = f"part{rank}" if axis == "none" else f"w-pp0-tp{places['tp']}-dp{places['dp']}"
            save(folder / f"{stem}.pt", {name: shard(name, tensor, rank) for name, tensor in tensors.items()})

    return write


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Any]:
    return lambda tensors: OrderedDict((change(name), tensor) for name, tensor in tensors.items())


def fsdp_name(name: str) -> str:
    return "_fsdp_wrapped_module." + name.replace(".up.", "._checkpoint_wrapped_module.up.")


FULL = one("full.safetensors")
FLAT = one("weights.pt")
CASES = {
    "shards cut otherwise": (sharded(".safetensors", 2), sharded(".safetensors", 6), ""),
    "torch shards cut otherwise": (sharded(".bin", 2), sharded(".bin", 6), ""),
    "shards of two formats": (sharded(".pt", 2), sharded(".safetensors", 6), ""),
    "shards and one file": (sharded(".safetensors", 2), FULL, ""),
    "two formats": (FLAT, FULL, ""),
    "a container": (one("m.pt", lambda t: {"model": t}), FLAT, ""),
    "two containers": (one("m.pt", lambda t: {"module": t}), one("s.pt", lambda t: {"state_dict": t}), ""),
    "a container inside another": (one("m.pt", lambda t: {"app": {"model": t}}), FLAT, ""),
    "an unusual container": (one("m.pt", lambda t: {"net": t}), FLAT, "`net.`"),
    "with an optimizer": (
        one("m.pt", lambda t: {"model": t, "optimizer": OPTIMIZER, "epoch": 3}),
        FULL,
        "2 other tensors and 3 values of @",
    ),
    "Lightning": (
        one("m.ckpt", lambda t: {"state_dict": renamed("model.{}".format)(t), "optimizer_states": [OPTIMIZER]}),
        FLAT,
        "`model.`",
    ),
    "with averages": (
        one("m.pt", lambda t: {"model": t, "ema_model": {name: tensor * 2 for name, tensor in t.items()}}),
        FLAT,
        "9 other tensors of @",
    ),
    "module": (one("m.pt", renamed("module.{}".format)), FLAT, "`module.`"),
    "compiled": (one("m.pt", renamed("_orig_mod.{}".format)), FULL, "`_orig_mod.`"),
    "both": (one("m.pt", renamed("module._orig_mod.{}".format)), FLAT, "`_orig_mod.` and `module.`"),
    "Fabric": (one("m.pt", renamed("_forward_module.model.{}".format)), FLAT, "`_forward_module.` and `model.`"),
    "FSDP": (
        one("m.pt", renamed(fsdp_name)),
        FLAT,
        "`_checkpoint_wrapped_module.` and `_fsdp_wrapped_module.`",
    ),
    "a part in DDP": (one("m.pt", renamed(lambda n: n.replace(".up.", ".up.module."))), FLAT, "`module.`"),
    "shards of wrapped names": (
        lambda folder, t: sharded(".safetensors", 2)(folder, renamed("_orig_mod.{}".format)(t)),
        sharded(".safetensors", 6),
        "`_orig_mod.`",
    ),
    "tp shards": (ranks("tp", 2), FULL, ""),
    "dp shards": (ranks("dp", 2), FULL, ""),
    "dp shards of uneven length": (ranks("dp", 3), FULL, ""),
    "dp shards, twice": (ranks("dp", 2), ranks("dp", 4), "shards are joined"),
    "tp and dp shards": (ranks("tp", 2), ranks("dp", 2), "shards are joined"),
    "parts without coordinates": (ranks("none", 4), FULL, ""),
    "replicas": (ranks("dp", 3, is_replicated=True), FULL, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_weights_are_equal_and_a_changed_element_is_named(tmp_path: Path, diff: Any, case: str) -> None:
    write, write_plainly, note = CASES[case]
    write(tmp_path / "a", model())
    write(tmp_path / "changed", changed(model()))
    write_plainly(tmp_path / "b", model())
    for sides in (("a", "b"), ("b", "a")):
        answer = diff(*(tmp_path / side for side in sides))
        assert (answer.code, " differ" in answer.text) == (0, False), answer.text
        assert note.replace("@", "AB"[sides.index("a")]) in " ".join(answer.text.split())
    for sides in (("changed", "b"), ("b", "changed")):
        answer = diff(*(tmp_path / side for side in sides), "--json")
        assert answer.code == 1
        assert {entry["tensor"] for entry in answer.document["different"]} == {CHANGED}
        assert {entry["kind"] for entry in answer.document["different"]} == {"value"}
        assert not answer.document["values"]
    assert diff(tmp_path / "changed", tmp_path / "b", "--exclude", "^layers.1.up.weight$").code == 0


def test_a_tensor_with_two_names_is_compared_under_both(tmp_path: Path, diff: Any) -> None:
    tensors = model()
    save(tmp_path / "tied.pt", tensors | {"lm_head.weight": tensors["embed.weight"]})
    save(tmp_path / "once.safetensors", tensors)
    sharded(".safetensors", 3)(tmp_path / "sharded", tensors)
    answer = diff(tmp_path / "tied.pt", tmp_path / "once.safetensors")
    assert answer.code == 0
    assert "10 tensors compared" in answer.text
    assert "lm_head.weight = embed.weight" in answer.text
    assert diff(tmp_path / "sharded", tmp_path / "tied.pt").code == 0
    # A change of the only copy is one of both names.
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    apart["embed.weight"][2, 1] += 1
    save(tmp_path / "apart.safetensors", apart)
    for sides in (("tied.pt", "apart.safetensors"), ("apart.safetensors", "tied.pt")):
        document = diff(*(tmp_path / side for side in sides), "--json").document
        assert {entry["tensor"] for entry in document["different"]} == {"embed.weight", "lm_head.weight"}


def test_an_equal_copy_is_no_second_name(tmp_path: Path, diff: Any) -> None:
    """Neither a copy of the bytes nor a name that both formats could have had is explained away."""
    tensors = model()
    save(tmp_path / "copied.pt", tensors | {"lm_head.weight": tensors["embed.weight"].clone()})
    save(tmp_path / "part.pt", tensors | {"lm_head.weight": tensors["embed.weight"][:3]})
    save(tmp_path / "tied.pt", tensors | {"lm_head.weight": tensors["embed.weight"]})
    save(tmp_path / "once.safetensors", tensors)
    save(tmp_path / "once.pt", tensors)
    for a, b in (("copied.pt", "once.safetensors"), ("part.pt", "once.safetensors"), ("tied.pt", "once.pt")):
        document = diff(tmp_path / a, tmp_path / b, "--json").document
        assert [(entry["tensor"], entry["kind"]) for entry in document["different"]] == [("lm_head.weight", "missing")]
        document = diff(tmp_path / b, tmp_path / a, "--json").document
        assert [(entry["tensor"], entry["kind"]) for entry in document["different"]] == [("lm_head.weight", "extra")]


def test_a_lost_optimizer_is_a_difference_between_checkpoints_of_one_kind(tmp_path: Path, diff: Any) -> None:
    save(tmp_path / "a.pt", {"model": model(), "optimizer": OPTIMIZER})
    save(tmp_path / "b.pt", {"model": model()})
    document = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json").document
    assert {entry["tensor"] for entry in document["different"]} == {
        "optimizer.state.0.step",
        "optimizer.state.0.exp_avg",
    }
    assert diff(tmp_path / "b.pt", tmp_path / "a.pt").code == 1


@pytest.mark.parametrize("key", ["ema_model", "teacher"])
def test_every_container_of_a_file_is_compared(tmp_path: Path, diff: Any, key: str) -> None:
    save(tmp_path / "a.pt", {"model": model(), key: model()})
    save(tmp_path / "b.pt", {"model": model(), key: changed(model())})
    for a, b in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        document = diff(tmp_path / a, tmp_path / b, "--json").document
        assert [entry["tensor"] for entry in document["different"]] == [f"{key}.{CHANGED}"]


def test_a_parameter_with_an_empty_name_is_one_of_the_model(tmp_path: Path, diff: Any) -> None:
    step, lone, other = {"a.b": 1}, torch.ones(3), torch.zeros(2)
    torch.save({"module": {**step, "": lone}, "w": other}, tmp_path / "a.pt")
    torch.save({"module": step, "w": other}, tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").code == 1


def test_wrappers_never_merge_two_tensors(tmp_path: Path, diff: Any) -> None:
    ones, zeros = torch.ones(3), torch.zeros(3)
    save(tmp_path / "both.pt", {"w": ones, "module.w": zeros})
    save(tmp_path / "plain.pt", {"w": ones})
    save(tmp_path / "wrapped.pt", {"module.w": zeros})
    assert diff(tmp_path / "both.pt", tmp_path / "both.pt").code == 0
    for other, alone in (("plain.pt", "module.w"), ("wrapped.pt", "w")):
        document = diff(tmp_path / "both.pt", tmp_path / other, "--json").document
        assert [(entry["tensor"], entry["kind"]) for entry in document["different"]] == [(alone, "missing")]
    assert diff(tmp_path / "plain.pt", tmp_path / "wrapped.pt").code == 1


def test_wrapped_names_are_shown_and_chosen_without_wrappers(tmp_path: Path, diff: Any) -> None:
    for name, tensors in (("a.pt", model()), ("b.pt", changed(model()))):
        save(tmp_path / name, renamed("module._orig_mod.{}".format)(tensors))
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt", "--json", "--include", "^layers.1")
    assert [entry["tensor"] for entry in answer.document["different"]] == [CHANGED]
    assert not [note for note in answer.document["notes"] if "names are compared" in note]


def test_a_state_dict_of_torch_is_read_through_its_wrapper(tmp_path: Path, diff: Any) -> None:
    """Such a state dict also has the versions of its modules, and one for the wrapper itself."""
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    save(tmp_path / "plain.pt", plain.state_dict())
    save(tmp_path / "wrapped.pt", torch.nn.DataParallel(plain).state_dict())
    save(tmp_path / "dict.pt", dict(plain.state_dict()))
    for other, count in (("wrapped.pt", 1), ("dict.pt", 3)):
        answer = diff(tmp_path / "plain.pt", tmp_path / other)
        assert answer.code == 0, answer.text
        assert f"{count} value{'s' * (count > 1)} of {'B' if count == 1 else 'A'}, versions of modules" in answer.text
    other_version = plain.state_dict()
    other_version._metadata["1"]["version"] = 1  # type: ignore[attr-defined]
    save(tmp_path / "older.pt", other_version)
    assert diff(tmp_path / "plain.pt", tmp_path / "older.pt").code == 1


def test_every_replica_is_compared_with_the_full_file(tmp_path: Path, diff: Any) -> None:
    ranks("dp", 3, is_replicated=True)(tmp_path / "a", model())
    save(tmp_path / "a/w-pp0-tp0-dp2.pt", changed(model()))
    FULL(tmp_path / "b", model())
    for sides in (("a", "b"), ("b", "a")):
        document = diff(*(tmp_path / side for side in sides), "--json").document
        assert [(entry["tensor"], entry["coordinate"]["dp"]) for entry in document["different"]] == [(CHANGED, 2)]


def test_what_belongs_to_a_rank_is_compared_at_one_topology_only(tmp_path: Path, diff: Any, check_text: Any) -> None:
    def write(folder: Path, count: int, seed: int) -> None:
        for rank in range(count):
            state = {"rng": torch.full((4,), rank + seed, dtype=torch.uint8), "seed": rank + seed}
            save(folder / f"w-pp0-tp0-dp{rank}.pt", {"model": model(), **state})

    for name, count, seed in (("two", 2, 0), ("again", 2, 0), ("otherwise", 2, 7), ("four", 4, 0)):
        write(tmp_path / name, count, seed)
    assert diff(tmp_path / "two", tmp_path / "again").code == 0
    document = diff(tmp_path / "two", tmp_path / "otherwise", "--json").document
    assert {entry["tensor"] for entry in document["different"]} == {"rng"}
    assert {entry["value"] for entry in document["values"]} == {"seed"}
    answer = diff(tmp_path / "two", tmp_path / "four")
    assert answer.code == 0
    check_text(answer.text)


def test_a_tensor_is_found_whatever_else_its_file_has_under_that_name(tmp_path: Path, diff: Any) -> None:
    """A file's own `rng` is no parameter, although the model has one of that name."""
    inner, outer = torch.ones(3), torch.zeros(3)
    save(tmp_path / "a.pt", {"model": {"w": inner, "rng": inner}, "rng": outer})
    save(tmp_path / "b.pt", {"rng": outer, "model": {"rng": inner, "w": inner}})
    save(tmp_path / "c.pt", {"rng": inner, "model": {"rng": outer, "w": inner}})
    save(tmp_path / "flat.safetensors", {"w": inner, "rng": inner})
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").code == 0
    assert diff(tmp_path / "a.pt", tmp_path / "c.pt").code == 1
    assert diff(tmp_path / "a.pt", tmp_path / "flat.safetensors").code == 0


def test_files_of_other_names_keep_tensors_of_one_name_apart(tmp_path: Path, diff: Any) -> None:
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    for folder, names in (("a", ("x", "y")), ("b", ("s", "t"))):
        for name, tensor in zip(names, (ones, twos), strict=True):
            save(tmp_path / f"{folder}/{name}/part.pt", {"w": tensor})
    save(tmp_path / "c/s/part.pt", {"w": twos})
    save(tmp_path / "c/t/part.pt", {"w": twos})
    assert diff(tmp_path / "a", tmp_path / "b").code == 0
    for sides in (("a", "c"), ("c", "a")):
        assert diff(*(tmp_path / side for side in sides)).code == 1


def test_a_shard_that_cannot_be_read_hides_no_other_shard(tmp_path: Path, diff: Any) -> None:
    sharded(".safetensors", 2)(tmp_path / "a", model())
    sharded(".safetensors", 6)(tmp_path / "b", changed(model()))
    (tmp_path / "a/model-00001-of-00002.safetensors").write_bytes(b"x" * 100)
    answer = diff(tmp_path / "a", tmp_path / "b", "--json")
    assert answer.code == 4
    # The second shard's tensors are found, of which B has most in its first one.
    kinds = {entry["tensor"]: entry["kind"] for entry in answer.document["different"]}
    assert kinds == {CHANGED: "value"}
    assert answer.document["compared"] == 7


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("w", "w"),
        ("module.w", "w"),
        ("module.module.w", "w"),
        ("module._orig_mod.module.w", "w"),
        ("layers.0._checkpoint_wrapped_module.w", "layers.0.w"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b.w", "a.b.w"),
        ("encoder.module.w", "encoder.module.w"),
        ("my_module.w", "my_module.w"),
        ("not_orig_mod.w", "not_orig_mod.w"),
        ("module.", "module."),
    ],
)
def test_names_without_wrappers(name: str, plain: str) -> None:
    assert unwrapped(name) == plain
