"""One model in every format: each pair of formats is equal, or the report says what could not be compared."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bigsci_launch.file_names import digests_name
from bigsci_launch.topology import Coordinate
from bigsci_launch.weights.formats.digests import digest_document, digest_entry

Tensors = dict[str, torch.Tensor]
REPLICATED = ("ln.weight", "ln.bias", "down.bias")


def write_pipe(model: Any, folder: Path) -> None:
    model.write(folder)


def write_dumps(model: Any, folder: Path) -> None:
    for rank, at, tensors in ranks_of(model):
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / f"rank-{rank:04d}.safetensors", {axis: str(index) for axis, index in at.items()})


def write_digests(model: Any, folder: Path) -> None:
    folder.mkdir()
    for rank, at, tensors in ranks_of(model):
        entries = {
            name: digest_entry("BF16", value.shape, value.view(torch.uint8).numpy().tobytes())
            for name, value in tensors.items()
        }
        place = Coordinate.at(pp=at["pp"], tp=at["tp"], dp=at["dp"])
        document = digest_document(entries, rank=rank, coordinate=place, step=20)
        (folder / digests_name(rank)).write_text(json.dumps(document))


def write_folder(model: Any, folder: Path) -> None:
    folder.mkdir()
    for _, at, tensors in ranks_of(model):
        torch.save(tensors, folder / f"w-pp{at['pp']:02d}-tp{at['tp']}-dp{at['dp']}.pt")


def write_texts(model: Any, folder: Path) -> None:
    folder.mkdir()
    for _, at, tensors in ranks_of(model):
        lines = [f"module.{name}={torch.nn.Parameter(value)}\n" for name, value in tensors.items()]
        name = f"debug-805-pp{at['pp']:02d}-tp{at['tp']}-dp{at['dp']}-global20-after-iteration-20.txt"
        (folder / name).write_text("".join(lines))


def write_sharded(model: Any, folder: Path) -> None:
    folder.mkdir()
    whole = whole_of(model)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(whole)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in whole if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def write_legacy(model: Any, folder: Path) -> None:
    folder.mkdir()
    torch.save({"module": whole_of(model)}, folder / "model.bin", _use_new_zipfile_serialization=False)


def ranks_of(model: Any) -> list[tuple[int, dict[str, int], Tensors]]:
    places = [(pp, tp, dp) for pp, tp in model.state for dp in range(model.dp)]
    return [
        (
            rank,
            {"pp": pp, "tp": tp, "dp": dp},
            {name: roles["fp32"].bfloat16() for name, roles in model.state[pp, tp].items()},
        )
        for rank, (pp, tp, dp) in enumerate(places)
    ]


def whole_of(model: Any) -> Tensors:
    """Return every parameter once, with its tp shards joined."""
    found: Tensors = {}
    for pp in range(model.pp):
        for name in model.state[pp, 0]:
            shards = [model.state[pp, tp][name]["fp32"].bfloat16() for tp in range(model.tp)]
            is_whole = name.endswith(REPLICATED)
            dim = 1 if name.endswith("down.weight") else 0
            found[name] = shards[0] if is_whole else torch.cat(shards, dim)
    return found


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "pipe": write_pipe,
    "dumps": write_dumps,
    "digests": write_digests,
    "folder": write_folder,
    "texts": write_texts,
    "sharded": write_sharded,
    "legacy": write_legacy,
}
PER_RANK = {"pipe", "dumps", "folder"}
WHOLE = {"sharded", "legacy"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def made(written: Path, model: Any, kind: str) -> Path:
    if not (written / kind).exists():
        WRITERS[kind](model, written / kind)
    return written / kind


def expected_code(a: str, b: str) -> int:
    """Exit code 4 if digests or printed edges of shards are compared with wholes or with each other; else equal."""
    kinds = {a, b}
    opaque = kinds & {"digests", "texts"}
    return 4 if opaque == {"digests", "texts"} or (opaque and kinds & WHOLE) else 0


@pytest.mark.parametrize(("a", "b"), list(itertools.product(WRITERS, WRITERS)))
def test_every_format_against_every_other(written: Path, tiny: Any, diff: Any, a: str, b: str) -> None:
    answer = diff(made(written, tiny(), a), made(written, tiny(), b))
    assert answer.code == expected_code(a, b), answer.text
    assert " differ" not in answer.text
    assert ("bit for bit" in answer.text) == ("texts" not in (a, b))
    assert ("printed dumps" in answer.text) == ("texts" in (a, b) and "digests" not in (a, b))
    assert ("stores in another" in answer.text) == (answer.code == 4)


def test_what_printed_dumps_show_is_counted(written: Path, tiny: Any, diff: Any) -> None:
    model = tiny()
    folder = made(written, model, "dumps")
    large = {"big.weight": torch.zeros(400, 500), "small.bias": torch.zeros(8)}
    save_file(large, folder.parent / "large.safetensors")
    text = folder.parent / "large.txt"
    text.write_text("".join(f"{name}={torch.nn.Parameter(value)}\n" for name, value in large.items()))
    answer = diff(text, folder.parent / "large.safetensors")
    assert answer.code == 0
    assert "44 of 200,008 elements (0.022 %)" in answer.text


@pytest.mark.slow
def test_no_format_needs_torch_or_runs_what_a_pickle_names(written: Path, tiny: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim"

    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {victim}",)

    evil = tmp_path / "evil"
    evil.mkdir()
    torch.save({"module": whole_of(tiny()), "args": Malice()}, evil / "model.pt")
    different = tiny()
    for roles in different.state[1, 1].values():
        roles["fp32"] += 1
    different.write(tmp_path / "different")
    sides = [(made(written, tiny(), kind), tmp_path / "different") for kind in sorted({*PER_RANK, "texts", "digests"})]
    sides += [(evil, made(written, tiny(), "sharded")), (evil, tmp_path / "different")]
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from bigsci_launch.cli.main import bsl\n"
        "def code(*words): return CliRunner().invoke(bsl, ['diff-weights', *words]).exit_code\n"
        "codes = [code(*pair.split('|'), '--json') for pair in sys.argv[1:]]\n"
        "codes.append(code('--audit', sys.argv[-1].split('|')[1]))\n"
        "print(codes, [name for name in ('torch', 'deepspeed', 'safetensors') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, *("|".join(map(str, pair)) for pair in sides)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.strip() == "[1, 1, 1, 1, 1, 0, 1, 1] []"
    assert not victim.exists()


def test_the_order_of_two_models_in_a_file_does_not_matter(tmp_path: Path, diff: Callable[..., Any]) -> None:
    models = {
        name: {"model": {"w": torch.full((2,), float(number))}} for number, name in enumerate(("actor", "critic"))
    }
    torch.save(models, tmp_path / "a.pt")
    torch.save(dict(reversed(models.items())), tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").code == 0
    models["critic"]["model"]["w"][1] = 7
    torch.save(models, tmp_path / "b.pt")
    answer = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert answer.code == 1
    assert "critic.model.w" in answer.text
